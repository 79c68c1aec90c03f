"""Batches: sample noise and sigma for each sample, and pack model inputs and targets as tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.rng import generator
from ...data.samples import ERASURE, Sample, SampleTensors, TargetPrompt, shown_per_epoch
from ...memory.host.to_device import to_device
from ...models.family import Family, ModelInputs, NoisySample
from ...models.objective import Objective
from ..concept.targets import ConceptTarget, PictureTarget, PromptTarget, PromptTerm
from .loss import Signal
from .noise import perturb_noise, sample_noise
from .options import ObjectiveOptions
from .preservation import PreservationInputs
from .timestep_sampling import Strata, sample_sigma, sample_stratum


@dataclass(frozen=True)
class Batch:
    """Micro-batch with both sides of its loss.

    inputs: arguments of the transformer's forward.
    target: target of the output, (B, N, C·patch), fp32: the velocity in flow matching.
    sigma: noise levels in 0 to 1, (B,), fp32.
    weights: weight of each token in the loss of its sample, (B, N); None if all are 1.
    loss_weights: factor on the loss of each sample, (B,); None if all are 1.
    preserved: inputs of the preservation loss; None without preservation.
    signal: noise and signal at each level; None in flow matching, whose level determines both.
    unconditional: inputs with the empty caption; None without the guidance-preserving loss.
    concept: target of a slider or an erasure, in place of `target`; None without one.
    """

    inputs: ModelInputs
    target: Tensor
    sigma: Tensor
    weights: Tensor | None
    loss_weights: Tensor | None = None
    preserved: PreservationInputs | None = None
    signal: Signal | None = None
    unconditional: ModelInputs | None = None
    concept: ConceptTarget | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copy every tensor to `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else to_device(tensor, device)

        return Batch(
            self.inputs.to(device),
            to_device(self.target, device),
            to_device(self.sigma, device),
            move(self.weights),
            move(self.loss_weights),
            None if self.preserved is None else self.preserved.to(device),
            None if self.signal is None else self.signal.to(device),
            None if self.unconditional is None else self.unconditional.to(device),
            None if self.concept is None else self.concept.to(device),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the batch and of its parts."""
        return _tensors(self)


def make_batch(
    patcher: ModelPatcher,
    family: Family,
    samples: Sequence[tuple[Sample, SampleTensors]],
    objective: ObjectiveOptions,
    device: torch.device,
    seed: int,
    rng_key: tuple[int, int],
    strata: Strata | None = None,
    part: tuple[int, int] = (0, 1),
) -> Batch:
    """Make the training batch of one micro-batch.

    rng_key: (step, micro-batch). With `seed` and a sample's index in the batch it determines every random number.
    strata: stratum counts of a step and of an epoch; None samples each sigma independently.
    part: (number, count): `samples` are part `number` of `count` equal parts of the micro-batch.

    The batch is assembled on the host, so that reading a value needs no device synchronisation, and then copied.
    """
    noised: list[_NoisedSample] = []
    for place, (sample, tensors) in enumerate(samples, start=part[0] * len(samples)):
        size = sample.tokens // sample.grid[0]  # tokens of one frame: resolution-dependent shifts are defined on these
        latent = model_space(patcher, family, tensors)
        shift = family.sampling.shift(patcher.model, size)
        number = rng_key[1] * len(samples) * part[1] + place
        stratum = sample_stratum(objective, seed, rng_key[0], number, strata) if strata else None
        sigma = sample_sigma(objective, generator(seed, "sigma", *rng_key, place), size, shift, stratum)
        noise = sample_noise(latent.shape, generator(seed, "noise", *rng_key, place), objective.noise_offset)
        input_noise = perturb_noise(noise, objective, generator(seed, "ip_noise", *rng_key, place))
        noised.append(_NoisedSample(sample, tensors, latent, noise, input_noise, sigma))
    return _assemble(patcher, family, noised, objective.guidance).to(device)


def fixed_batch(
    patcher: ModelPatcher,
    family: Family,
    rows: Sequence[tuple[Sample, SampleTensors, float]],
    guidance: float,
    device: torch.device,
    seed: int,
) -> Batch:
    """Make a batch of samples at given sigmas.

    rows: sample, its tensors, and its sigma.

    The noise depends on the seed and the sample's name only, so that losses of different steps are comparable.
    """
    noised: list[_NoisedSample] = []
    for sample, tensors, sigma in rows:
        latent = model_space(patcher, family, tensors)
        noise = sample_noise(latent.shape, generator(seed, "validation noise", sample.name))
        noised.append(_NoisedSample(sample, tensors, latent, noise, noise, sigma))
    return _assemble(patcher, family, noised, guidance).to(device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple):
        for element in value:
            yield from _tensors(element)


class _NoisedSample(NamedTuple):
    """Sample with its random noise and noise level.

    sample: its grid, text length and clean frames, among other things.
    tensors: its tensors, those of one variant.
    latent: (C, H, W) or (C, T, H, W) fp32, clean latent in the model's space.
    noise: noise of the target, in the shape of `latent`.
    input_noise: noise mixed into the input; differs from `noise` under input perturbation.
    level: noise level in 0 to 1.
    """

    sample: Sample
    tensors: SampleTensors
    latent: Tensor
    noise: Tensor
    input_noise: Tensor
    level: float


def _assemble(patcher: ModelPatcher, family: Family, noised: Sequence[_NoisedSample], guidance: float) -> Batch:
    objective = family.sampling.objective(patcher)
    noisy: list[NoisySample] = []
    targets: list[Tensor] = []
    sigmas = [objective.noise_level(entry.level) for entry in noised]
    for (sample, tensors, latent, noise, input_noise, _), sigma in zip(noised, sigmas, strict=True):
        x_t = objective.add_noise(latent, input_noise, sigma)
        if sample.clean_frames:
            x_t[:, : sample.clean_frames] = latent[:, : sample.clean_frames]
        noisy.append(
            NoisySample(x_t, tensors.text, tensors.conditioning, sample.tokens, sample.text_length, sample.clean_frames)
        )
        targets.append(family.forward.patchify(objective.target(latent, noise, sigma), sample.tokens).tokens)
    levels = torch.tensor([entry.level for entry in noised], dtype=torch.float32)
    model_sigmas = torch.tensor(sigmas, dtype=torch.float32)
    inputs = family.forward.inputs(patcher, noisy, model_sigmas, guidance)
    samples = [(entry.sample, entry.tensors) for entry in noised]
    preserved: PreservationInputs | None = None
    if any(tensors.class_prompt for _, tensors in samples):
        class_inputs = [
            _with_class_prompt(noisy_sample, tensors) for noisy_sample, (_, tensors) in zip(noisy, samples, strict=True)
        ]
        has_class_caption = torch.tensor([float(tensors.class_prompt is not None) for _, tensors in samples])
        token_weights = _weights([(sample, replace(tensors, weights=None)) for sample, tensors in samples])
        preserved = PreservationInputs(
            family.forward.inputs(patcher, class_inputs, model_sigmas, guidance), has_class_caption, token_weights
        )
    unconditional: ModelInputs | None = None
    if any(tensors.empty_prompt for _, tensors in samples):
        unconditional = family.forward.inputs(patcher, _with_empty_prompts(noisy, samples), model_sigmas, guidance)
    weights, loss_weights = _weights(samples), _loss_weights([sample for sample, _ in samples])
    signal = _signal(objective, sigmas)

    def make_inputs(rows: Sequence[NoisySample]) -> ModelInputs:
        return family.forward.inputs(patcher, rows, model_sigmas, guidance)

    concept: ConceptTarget | None = None
    if any(tensors.targets for _, tensors in samples):
        concept = _prompt_target(samples, noisy, make_inputs)
    elif any(tensors.opposite is not None for _, tensors in samples):
        concept = _picture_target(patcher, family, noised, noisy, sigmas, make_inputs)
    return Batch(inputs, torch.stack(targets), levels, weights, loss_weights, preserved, signal, unconditional, concept)


def _prompt_target(
    samples: Sequence[tuple[Sample, SampleTensors]],
    noisy: Sequence[NoisySample],
    make_inputs: Callable[[Sequence[NoisySample]], ModelInputs],
) -> PromptTarget:
    """Make the target of prompts; a sample with fewer of them than another repeats its first with no weight."""
    count = max(len(tensors.targets) for _, tensors in samples)
    rows = [_filled(tensors.targets, count) for _, tensors in samples]
    terms = []
    for prompts in zip(*rows, strict=True):
        prompted = [
            replace(noisy_sample, text=target.prompt.text, conditioning=target.prompt.conditioning)
            for noisy_sample, target in zip(noisy, prompts, strict=True)
        ]
        weight, direction = (
            torch.tensor(factors, dtype=torch.float32)
            for factors in ([target.weight for target in prompts], [target.direction for target in prompts])
        )
        terms.append(PromptTerm(make_inputs(prompted), weight, direction))
    return PromptTarget(tuple(terms), is_odd=samples[0][0].concept != ERASURE)


def _filled(targets: Sequence[TargetPrompt], count: int) -> list[TargetPrompt]:
    return [*targets, *[replace(targets[0], weight=0.0, direction=0.0)] * (count - len(targets))]


def _picture_target(
    patcher: ModelPatcher,
    family: Family,
    noised: Sequence["_NoisedSample"],
    noisy: Sequence[NoisySample],
    sigmas: Sequence[float],
    make_inputs: Callable[[Sequence[NoisySample]], ModelInputs],
) -> PictureTarget:
    """Make the target of picture pairs: the other pictures get the same noise."""
    objective = family.sampling.objective(patcher)
    rows, targets = [], []
    for entry, row, sigma in zip(noised, noisy, sigmas, strict=True):
        assert entry.tensors.opposite is not None, entry.sample.name
        latent = model_space(patcher, family, replace(entry.tensors, latent=entry.tensors.opposite))
        rows.append(replace(row, latent=objective.add_noise(latent, entry.input_noise, sigma)))
        target = objective.target(latent, entry.noise, sigma)
        targets.append(family.forward.patchify(target, entry.sample.tokens).tokens)
    return PictureTarget(make_inputs(rows), torch.stack(targets))


def _signal(objective: Objective, sigmas: Sequence[float]) -> Signal | None:
    if objective.is_flow:
        return None
    ratios, scales = (
        [compute(sigma) for sigma in sigmas] for compute in (objective.noise_ratio, objective.output_scale)
    )
    return Signal(torch.tensor(ratios, dtype=torch.float32), torch.tensor(scales, dtype=torch.float32))


def _with_class_prompt(sample: NoisySample, tensors: SampleTensors) -> NoisySample:
    """Replace the caption by the class caption, if the sample has one."""
    prompt = tensors.class_prompt
    return sample if prompt is None else replace(sample, text=prompt.text, conditioning=prompt.conditioning)


def _with_empty_prompts(
    noisy: Sequence[NoisySample], samples: Sequence[tuple[Sample, SampleTensors]]
) -> list[NoisySample]:
    """Replace the captions by the empty one, at the largest of its text lengths."""
    length = max(sample.empty_length for sample, _ in samples)
    uncaptioned = []
    for noisy_sample, (_, tensors) in zip(noisy, samples, strict=True):
        prompt = tensors.empty_prompt
        assert prompt is not None, "the check before a run asks for it of all samples"
        uncaptioned.append(
            replace(noisy_sample, text=prompt.text, conditioning=prompt.conditioning, text_length=length)
        )
    return uncaptioned


def strata_sizes(samples_per_step: int, samples: Sequence[Sample]) -> Strata:
    """Count the samples of an optimizer step and of an epoch of this run."""
    return Strata(samples_per_step, shown_per_epoch(samples))


def model_space(patcher: ModelPatcher, family: Family, tensors: SampleTensors) -> Tensor:
    """Scale the clean latent to the model's space, fp32: (C, H, W), or (C, T, H, W) for a video model."""
    model, latent = family.as_loaded(patcher.model), tensors.latent.float()
    if model.latent_format.latent_dimensions == 3 and latent.ndim == 3:
        latent = latent.unsqueeze(1)  # an image is a video of one frame
    return model.process_latent_in(latent[None])[0]


def _weights(samples: Sequence[tuple[Sample, SampleTensors]]) -> Tensor | None:
    """Stack the token weights, (B, N): mask values, 1 without a mask, 0 for clean frames, which are inputs."""
    if not any(sample.clean_frames or tensors.weights is not None for sample, tensors in samples):
        return None
    weights = torch.ones(len(samples), samples[0][0].tokens)
    for row, (sample, tensors) in zip(weights, samples, strict=True):
        if tensors.weights is not None:
            row.copy_(tensors.weights)
        row[: sample.clean_frames * sample.tokens // sample.grid[0]] = 0
    return weights


def _loss_weights(samples: Sequence[Sample]) -> Tensor | None:
    if all(sample.loss_weight == 1 for sample in samples):
        return None
    return torch.tensor([sample.loss_weight for sample in samples], dtype=torch.float32)
