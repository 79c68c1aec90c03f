"""Sampling of noise levels: distribution, shift, sigma range and stratification."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...common.rng import generator as generator_for
from ...models.catalogue.registry import resolution_shifts
from .distribution import Distribution, distribution_of, sample_from
from .options import ObjectiveOptions

MIN_RANGE_PROBABILITY = 1e-4  # least probability that a sigma range must have under the distribution
RESOLUTION_SHIFTS = resolution_shifts()
# The family's shift does not apply: the user specifies the distribution of the final sigmas.
UNSHIFTED_SAMPLINGS = ("logsnr", "custom")


def shift_sigma(sigma: float, shift: float) -> float:
    """Compute s·sigma / (1 + (s − 1)·sigma), which moves sigma towards noise for s > 1 and leaves 0 and 1 in place.

    Esser et al. 2024, arXiv 2403.03206, sec. 5.3.2, with s = sqrt(m / n). FLUX's `time_shift`,
    exp(mu) / (exp(mu) + 1/sigma − 1), is the same with s = exp(mu).
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


@dataclass(frozen=True)
class Strata:
    """Numbers of samples that stratification groups.

    step: samples of an optimizer step.
    epoch: samples of an epoch, repeats counted.
    """

    step: int
    epoch: int


def sample_stratum(
    options: ObjectiveOptions, seed: int, step: int, number: int, strata: Strata
) -> tuple[int, int] | None:
    """Return the stratum (k, n) of a sample: the k-th of n equally likely parts. None if `stratified` is off.

    step: optimizer step, from 0.
    number: index of the sample in its optimizer step, from 0.
    strata: group sizes.

    The n samples of a group take each stratum once, in a random order that depends on the seed and the group only
    (stratified sampling; for noise levels Kingma et al. 2021, arXiv 2107.00630, appendix I.1). A group is an optimizer
    step ('batch') or as many consecutive samples as an epoch has ('epoch').
    """
    if options.stratified == "off":
        return None
    if options.stratified == "batch":
        group = step
        place = number
        count = strata.step
    else:
        group, place = divmod(step * strata.step + number, strata.epoch)
        count = strata.epoch
    return _strata_order(seed, options.stratified, group, count)[place], count


@lru_cache(maxsize=4)
def _strata_order(seed: int, kind: str, group: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randperm(count, generator=generator_for(seed, "strata", kind, group)).tolist())


def sample_sigma(
    options: ObjectiveOptions,
    generator: torch.Generator,
    tokens: int,
    shift: float = 1.0,
    stratum: tuple[int, int] | None = None,
) -> float:
    """Sample one sigma, 0 to 1, in float64 on the host: from `distribution_of(options)`, then shifted.

    tokens: image tokens of one frame, read by the resolution_… samplings only.
    shift: the family's shift for training, 1 is none; `effective_shift` decides whether it applies.
    stratum: (k, n) of `sample_stratum`, None samples the whole distribution.

    In a narrower range, `cut` samples the distribution conditioned on the range by inverse transform sampling, and
    `squeeze` maps the sampled sigma to min + (max − min)·sigma.
    """
    distribution, shift = distribution_of(options), effective_shift(options, tokens, shift)
    low, high = options.min_sigma, options.max_sigma
    if not _is_cut(options):
        if stratum is None:
            sigma = sample_from(distribution, generator)
        else:
            sigma = distribution.quantile(_sample_probability(generator, stratum))
        return low + (high - low) * shift_sigma(sigma, shift)
    lower, upper = _range_probabilities(options, distribution, shift)
    sigma = shift_sigma(distribution.quantile(lower + (upper - lower) * _sample_probability(generator, stratum)), shift)
    return min(max(sigma, low), high)


def sigma_cdf(options: ObjectiveOptions, tokens: int, shift: float, sigma: float) -> float:
    """Return the probability that `sample_sigma` returns a value below `sigma`."""
    distribution, shift = distribution_of(options), effective_shift(options, tokens, shift)
    if _is_cut(options):
        lower, upper = _range_probabilities(options, distribution, shift)
        inside = min(max(sigma, options.min_sigma), options.max_sigma)
        return (distribution.cdf(shift_sigma(inside, 1.0 / shift)) - lower) / (upper - lower)
    place = (sigma - options.min_sigma) / (options.max_sigma - options.min_sigma)
    return distribution.cdf(shift_sigma(min(max(place, 0.0), 1.0), 1.0 / shift))


def range_probability(options: ObjectiveOptions, tokens: int, shift: float) -> float:
    """Return the probability of the sigma range under the distribution, 0 to 1; 1 unless the range is cut."""
    if not _is_cut(options):
        return 1.0
    lower, upper = _range_probabilities(options, distribution_of(options), effective_shift(options, tokens, shift))
    return upper - lower


def check_range(options: ObjectiveOptions, tokens: int, shift: float) -> None:
    """Raise ValueError if the distribution has less than MIN_RANGE_PROBABILITY in the sigma range."""
    if range_probability(options, tokens, shift) < MIN_RANGE_PROBABILITY:
        raise ValueError(
            f"Less than {MIN_RANGE_PROBABILITY:g} of what timestep_sampling '{options.timestep_sampling}' draws lies "
            f"between min_sigma {options.min_sigma:g} and max_sigma {options.max_sigma:g}; widen them, or set "
            "sigma_range to 'squeeze'."
        )


def effective_shift(options: ObjectiveOptions, tokens: int, shift: float) -> float:
    """Return the shift to apply.

    That is `options.shift` if it is above 0. Otherwise it is the resolution's shift for the resolution_… samplings,
    1 (none) for `logsnr` and `custom`, and `shift`, the family's shift, for all others.
    """
    if options.shift > 0:
        return options.shift
    if options.timestep_sampling in RESOLUTION_SHIFTS:
        return RESOLUTION_SHIFTS[options.timestep_sampling](tokens)
    return 1.0 if options.timestep_sampling in UNSHIFTED_SAMPLINGS else shift


def _is_cut(options: ObjectiveOptions) -> bool:
    return (options.min_sigma, options.max_sigma) != (0.0, 1.0) and options.sigma_range == "cut"


def _range_probabilities(options: ObjectiveOptions, distribution: Distribution, shift: float) -> tuple[float, float]:
    """Return the cumulative probabilities of `min_sigma` and `max_sigma` before the shift."""
    lower, upper = (distribution.cdf(shift_sigma(end, 1.0 / shift)) for end in (options.min_sigma, options.max_sigma))
    return lower, upper


def _sample_probability(generator: torch.Generator, stratum: tuple[int, int] | None) -> float:
    """Sample uniformly from [0, 1), or from the stratum's interval of it."""
    part = torch.rand((), generator=generator, dtype=torch.float64).item()
    return part if stratum is None else (stratum[0] + part) / stratum[1]
