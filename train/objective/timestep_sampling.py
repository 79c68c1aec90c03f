"""Which noise levels are drawn."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...common.rng import generator as generator_for
from ...models.registry import resolution_shifts
from .distribution import Distribution, distribution_of, draw_from
from .options import ObjectiveOptions

LEAST_PART = 1e-4  # of the draws, that a range has to hold
RESOLUTION_SHIFTS = resolution_shifts()
# These say themselves where the noise levels lie, so that the model's own shift would move them away from there.
AS_WRITTEN = ("logsnr", "custom")


def shift_sigma(sigma: float, shift: float) -> float:
    """s·sigma / (1 + (s − 1)·sigma): moves sigmas towards noise for s > 1 and leaves 0 and 1 in place.

    Esser et al. 2024, arXiv 2403.03206, sec. 5.3.2, with s = sqrt(m / n). FLUX's `time_shift`,
    exp(mu) / (exp(mu) + 1/sigma − 1), is the same with s = exp(mu).
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


@dataclass(frozen=True)
class Strata:
    """How many draws there are in an optimizer step and in an epoch."""

    step: int
    epoch: int


def stratum_of(options: ObjectiveOptions, seed: int, step: int, number: int, strata: Strata) -> tuple[int, int] | None:
    """(k, n): this draw comes from the k-th of n equally likely parts of the distribution. None where `stratified` is
    off. number: of the draw in its optimizer step, from 0.

    Of n draws that belong together each comes from another part, in an order that depends on the seed and on what they
    belong to only (stratified sampling; for noise levels Kingma et al. 2021, arXiv 2107.00630, appendix I.1).
    batch: the samples of an optimizer step belong together. epoch: as many draws one after another as an epoch has.
    """
    if options.stratified == "off":
        return None
    if options.stratified == "batch":
        group, place, count = step, number, strata.step
    else:
        group, place = divmod(step * strata.step + number, strata.epoch)
        count = strata.epoch
    return _order(seed, options.stratified, group, count)[place], count


@lru_cache(maxsize=4)
def _order(seed: int, kind: str, group: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randperm(count, generator=generator_for(seed, "strata", kind, group)).tolist())


def draw_sigma(
    options: ObjectiveOptions,
    generator: torch.Generator,
    tokens: int,
    shift: float = 1.0,
    stratum: tuple[int, int] | None = None,
) -> float:
    """One noise level, 0 to 1, computed in float64 on the host: drawn from `distribution_of(options)`, then shifted.

    tokens: of the sample's picture, read by the resolution_… samplings only.
    shift: the family's own for training (1 leaves the draw as it is); `shift_of` says what takes its place.
    stratum: (k, n) as `stratum_of` gives it.

    Where `min_sigma` or `max_sigma` narrow the range: `cut` draws from the distribution on condition that sigma lies in
    it, by the inverse of its distribution function; `squeeze` maps the drawn sigma to min + (max − min)·sigma.
    """
    distribution, shift = distribution_of(options), shift_of(options, tokens, shift)
    low, high = options.min_sigma, options.max_sigma
    if not _is_cut(options):
        if stratum is None:
            sigma = draw_from(distribution, generator)
        else:
            sigma = distribution.quantile(_part(generator, stratum))
        return low + (high - low) * shift_sigma(sigma, shift)
    least, most = _ends(options, distribution, shift)
    drawn = shift_sigma(distribution.quantile(least + (most - least) * _part(generator, stratum)), shift)
    return min(max(drawn, low), high)


def part_below(options: ObjectiveOptions, tokens: int, shift: float, sigma: float) -> float:
    """The part of the draws of `draw_sigma` that lies below `sigma`."""
    distribution, shift = distribution_of(options), shift_of(options, tokens, shift)
    if _is_cut(options):
        least, most = _ends(options, distribution, shift)
        inside = min(max(sigma, options.min_sigma), options.max_sigma)
        return (distribution.below(shift_sigma(inside, 1.0 / shift)) - least) / (most - least)
    place = (sigma - options.min_sigma) / (options.max_sigma - options.min_sigma)
    return distribution.below(shift_sigma(min(max(place, 0.0), 1.0), 1.0 / shift))


def distribution_part(options: ObjectiveOptions, tokens: int, shift: float) -> float:
    """The part of the distribution that the range leaves to be drawn, 0 to 1."""
    if not _is_cut(options):
        return 1.0
    least, most = _ends(options, distribution_of(options), shift_of(options, tokens, shift))
    return most - least


def check_range(options: ObjectiveOptions, tokens: int, shift: float) -> None:
    """Raises ValueError where hardly any sigma of the distribution lies in the range, so that none can be drawn."""
    if distribution_part(options, tokens, shift) < LEAST_PART:
        raise ValueError(
            f"Less than {LEAST_PART:g} of what timestep_sampling '{options.timestep_sampling}' draws lies between "
            f"min_sigma {options.min_sigma:g} and max_sigma {options.max_sigma:g}; widen them, or set sigma_range to "
            "'squeeze'."
        )


def shift_of(options: ObjectiveOptions, tokens: int, shift: float) -> float:
    """By how much the drawn sigmas are shifted: by `options.shift` where it is above 0, else by the resolution's shift
    for the samplings of that name, not at all for `logsnr` and `custom`, and else by `shift`, the family's own."""
    if options.shift > 0:
        return options.shift
    if options.timestep_sampling in RESOLUTION_SHIFTS:
        return RESOLUTION_SHIFTS[options.timestep_sampling](tokens)
    return 1.0 if options.timestep_sampling in AS_WRITTEN else shift


def _is_cut(options: ObjectiveOptions) -> bool:
    return (options.min_sigma, options.max_sigma) != (0.0, 1.0) and options.sigma_range == "cut"


def _ends(options: ObjectiveOptions, distribution: Distribution, shift: float) -> tuple[float, float]:
    """The parts of the draws that lie below `min_sigma` and below `max_sigma`."""
    least, most = (distribution.below(shift_sigma(end, 1.0 / shift)) for end in (options.min_sigma, options.max_sigma))
    return least, most


def _part(generator: torch.Generator, stratum: tuple[int, int] | None) -> float:
    """From [0, 1), or from the stratum's part of it."""
    part = torch.rand((), generator=generator, dtype=torch.float64).item()
    return part if stratum is None else (stratum[0] + part) / stratum[1]
