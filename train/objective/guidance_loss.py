"""Guidance-preserving loss: training keeps the guidance that was distilled into a model's output."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ...common.text import shortlist
from ...data.samples import Sample, SampleVariant
from ...models.family import ModelInputs
from .options import ObjectiveOptions


def guided_target(
    target: Tensor,
    inputs: ModelInputs,
    unconditional: ModelInputs,
    frozen_output: Callable[[ModelInputs], Tensor],
    g: float,
) -> Tensor:
    """Compute target + (g − 1)·(v₀(c) − v₀(∅)), (B, N, C·patch) in fp32.

    target: unguided target of the output, (B, N, C·patch), fp32.
    inputs: inputs with the captions c. unconditional: inputs with the empty caption ∅, at the same x_t.
    frozen_output: computes the output of the frozen model v₀, with the adapter switched off, (B, N, C·patch).
    g: guidance_loss_scale, above 1.

    A model with distilled guidance outputs u + G·(v − u), with v for the caption and u for the empty one. The target
    noise − x0 has the mean v, and so trains the guidance G away. For such a model v₀(c) − v₀(∅) = G·(v − u), so that
    g = 2 − 1/G preserves its guidance: v + (g − 1)·G·(v − u) = u + G·(v − u). Outputs that predict noise or v of a
    schedule are guided by the same sum, and so are their targets here.

    Two forms are in use, both with u of the model itself, the adapter on, and G as the factor. ostris/ai-toolkit
    (SDTrainer.py, `do_guidance_loss` with `guidance_loss_target`; kohya-ss/musubi-tuner: `--h3_guidance_loss_scale`)
    trains towards u + G·(target − u). tdrussell/diffusion-pipe (models/minimax_h3.py, `cfg`) compares
    (output + (G − 1)·u) / G with target, which has the same optimum.
    This is the first form, but with the frozen model's v₀(c) instead of the target in the multiplied difference: the
    unpredictable noise of a sample is not multiplied, and the guided target cannot drift.
    """
    return target + (g - 1.0) * (frozen_output(inputs).float() - frozen_output(unconditional).float())


def with_empty_caption(choice: SampleVariant, options: ObjectiveOptions) -> SampleVariant:
    """Request the empty caption of a sample, if the loss uses it."""
    return replace(choice, empty_caption=True) if options.guidance_loss_scale else choice


def check_guidance_loss(
    options: ObjectiveOptions, samples: Sequence[Sample], title: str, takes_guidance: bool, training_adapter: str = ""
) -> tuple[str, ...]:
    """Make notes on the guidance-preserving loss.

    title: title of the model.
    takes_guidance: the model has an input for the guidance that was distilled into it.
    training_adapter: name of the LoRA that removes the distillation during training; empty without one.

    Raises ValueError if the loss is on and a sample has no empty caption, or a training adapter is on too.
    """
    scale = options.guidance_loss_scale
    if not scale:
        return ()
    if training_adapter:
        raise ValueError(
            f"guidance_loss_scale is {scale:g} and training_adapter is {training_adapter}, which removes the guidance "
            "that this loss preserves; set guidance_loss_scale to 0, or training_adapter to none."
        )
    if missing := [sample.name for sample in samples if not sample.empty_length]:
        raise ValueError(
            f"guidance_loss_scale is {scale:g} and there is no empty caption for {shortlist(missing)}; switch "
            "encode_empty_caption on in Prepare Dataset, connect empty to Latents to Training Data, or set "
            "guidance_loss_scale to 0."
        )
    notes = [f"guidance_loss_scale {scale:g} runs the model without the LoRA twice more per step. It's experimental."]
    if takes_guidance and options.guidance == ObjectiveOptions.guidance:
        notes.append(
            f"{title} trains with guidance {options.guidance:g}, at which its output has no guidance, so "
            "guidance_loss_scale adds some; set guidance to what you sample with (such as 3.5), or "
            "guidance_loss_scale to 0."
        )
    return tuple(notes)
