"""The empty caption of training data from latents, as core's nodes encoded it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...common.fingerprint import fingerprint
from ..conditioning import check_finite, copy_all_to_host, copy_to_host, read_entry
from ..samples import FIRST_VARIANT, Prompt, Sample, SampleTensors, SampleVariant, TrainingData
from .from_latents import ON_THE_GRID

# Conditioning entries that come from a sample's images and not from its caption.
OF_IMAGES = ("reference_latents", "reference_latents_method", "clip_vision_output", *ON_THE_GRID)


def with_empty_caption(data: TrainingData, empty: Sequence[Any]) -> TrainingData:
    """Add the empty caption, one CONDITIONING of one entry, to each sample.

    Raises ValueError for more than one entry, and for an entry that is not a caption.
    """
    if len(empty) != 1:
        raise ValueError(f"empty has {len(empty)} conditionings; connect one CLIP Text Encode without text.")
    cond, rest = read_entry(empty[0], "empty")
    check_finite(cond, "empty")
    # Image entries come from each sample's own: a node for edit models puts its reference on the empty caption too.
    prompt = Prompt(
        copy_to_host(cond), {name: copy_all_to_host(value) for name, value in rest.items() if name not in OF_IMAGES}
    )
    samples = tuple(replace(s, load=partial(_load, s, prompt), empty_length=prompt.text.shape[1]) for s in data.samples)
    return replace(
        data, samples=samples, fingerprint=fingerprint(data.fingerprint, prompt.text, dict(prompt.conditioning))
    )


def _load(sample: Sample, empty: Prompt, choice: SampleVariant = FIRST_VARIANT) -> SampleTensors:
    tensors = sample.load(choice)
    if not choice.empty_caption:
        return tensors
    return replace(tensors, empty_prompt=beside_picture(empty, tensors.conditioning))


def beside_picture(prompt: Prompt, conditioning: Mapping[str, Any]) -> Prompt:
    """Put a prompt in the place of a sample's caption, whose conditioning this is.

    Tensors of the caption, such as its mask, do not apply to the prompt; plain values such as a frame rate do.
    """
    common_entries = {
        k: v for k, v in conditioning.items() if k in OF_IMAGES or isinstance(v, bool | int | float | str)
    }
    return Prompt(prompt.text, {**common_entries, **prompt.conditioning})
