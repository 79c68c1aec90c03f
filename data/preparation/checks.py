"""Checks and notes on items, encoders and options; they run before anything is encoded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...common.text import quantity, quoted, shortlist
from ...models.latents import WAN21, WAN22, LatentPolicy
from ...models.text import AS_COMFYUI, EDIT_PROMPTS, FIRST_EDIT, PLUS, TextPolicy
from ..buckets.grids import RAGGED_EDGE, WHOLE_GRIDS
from ..buckets.planner import BucketPlan
from ..buckets.sizes import SizePlan
from ..encode.clip_vision import check_vision
from ..encode.text import ItemCaptions
from ..folders.items import Item
from ..samples import GraphKey, Sample, shown_per_epoch

TEXT_LIMITS = (512, 256)  # choices of max_text_length besides AS_COMFYUI
FEW_LENGTHS = 8  # of captions, which a note lists one by one and which do not take long to compile


def check_options(
    text: TextPolicy,
    latents: LatentPolicy,
    max_text_length: int | None,
    clip_vision: Any,
    image_to_video: bool,
    edit_prompt: str,
) -> None:
    """Check the options of Prepare Dataset against the connected VAE and text encoders.

    Raises ValueError for a value out of its list and for options that contradict the model family.
    """
    if max_text_length is not None and max_text_length not in TEXT_LIMITS:
        choices = ", ".join([AS_COMFYUI, *map(str, TEXT_LIMITS)])
        raise ValueError(f"max_text_length is {max_text_length}; choose one of {choices}.")
    if edit_prompt not in EDIT_PROMPTS:
        raise ValueError(f"edit_prompt is {quoted(edit_prompt)}; choose one of {', '.join(EDIT_PROMPTS)}.")
    if image_to_video and text.pictures_only:
        raise ValueError(
            f"image_to_video is on, and {text.family} makes no video; switch it off, or connect Wan's VAE and text "
            f"encoder."
        )
    if image_to_video and latents not in text.latents:
        raise ValueError(
            "image_to_video is on, but only Wan has start pictures; switch it off, or connect Wan's VAE and text "
            "encoder."
        )
    if clip_vision is not None and not image_to_video:
        raise ValueError(
            "clip_vision is connected and image_to_video is off; switch it on to train Wan 2.1 image to video, or "
            "disconnect clip_vision."
        )
    if clip_vision is not None and latents is WAN21:
        check_vision(clip_vision)


def check_items(
    items: Sequence[Item], text: TextPolicy, latents: LatentPolicy, image_to_video: bool, edit_prompt: str
) -> None:
    """Check that the model family can train on the items: videos, control images, and start images.

    Raises ValueError naming up to five items that it can't train on.
    """
    clips = [item.name for item in items if item.pixels.frames > 1]
    if clips and text.pictures_only:
        raise ValueError(
            f"{text.family} makes pictures, and the data set holds clips ({shortlist(clips)}); take Training Clips "
            f"out, set target_frames to 1, or connect Wan's VAE and text encoder."
        )
    if clips and not latents.makes_video:
        raise ValueError(
            f"The VAE is {latents.family}, which encodes pictures only, and the data set holds clips "
            f"({shortlist(clips)}); take Training Clips out, set target_frames to 1, or load the VAE of a video model."
        )
    controlled = [item for item in items if item.controls]
    if controlled and not text.takes_controls and text.whole_grids:
        raise ValueError(
            f"Control pictures can't be prepared for {text.family}, and {controlled[0].name!r} has one; set "
            f"control_folder to none, or encode them with core's nodes and connect Latents to Training Data."
        )
    if controlled and not text.takes_controls:
        raise ValueError(
            f"{text.family} takes no control pictures, and {controlled[0].name!r} has one; set control_folder to none, "
            f"or connect the VAE and text encoders of an edit model (Qwen-Image-Edit, FLUX.1 Kontext, FLUX.2)."
        )
    several = [item.name for item in controlled if len(item.controls) > 1]
    if several and text.sees_controls and edit_prompt == FIRST_EDIT:
        raise ValueError(
            f"edit_prompt is {FIRST_EDIT!r}, which takes one control picture, and there are several for: "
            f"{shortlist(several)}; choose {PLUS!r}, or leave one control picture for each."
        )
    still = [item.name for item in items if item.pixels.frames == 1]
    if still and image_to_video and latents is WAN21:
        raise ValueError(
            f"image_to_video gives each clip's first frame as its start picture, and these have no frame after it to "
            f"learn: {shortlist(still)}; take pictures out of the data set and 1 out of target_frames, or switch "
            f"image_to_video off."
        )


def plan_notes(plan: BucketPlan, max_graphs: int) -> Iterator[str]:
    """Yield a note on the token counts of a bucket plan."""
    frames = sorted({placement.grid.frames for placement in plan.placements})
    if plan.least_graphs > max_graphs or (plan.least_graphs > 1 and plan.fit == RAGGED_EDGE):
        yield (
            f"Clips of {', '.join(map(str, frames))} latent frames need {plan.least_graphs} token counts, and each is "
            "compiled. Clips of one length need only one."
        )


def size_notes(items: Sequence[Item], plans: Sequence[SizePlan]) -> Iterator[str]:
    """Yield a note on items that are not trained at every size. items: in the order that the plans count them in."""
    counts = Counter(index for size in plans for index in size.members)
    fewer = [item.name for index, item in enumerate(items) if counts[index] < max(counts.values())]
    if fewer:
        yield (
            "These are too small for some of the sizes in megapixels and more_megapixels, so they are trained only at "
            f"those below their own: {shortlist(fewer)}."
        )


def cut_notes(items: Sequence[Item], captions: Sequence[ItemCaptions]) -> Iterator[str]:
    """Yield a note on truncated captions. captions: one for each item, of its first variant."""
    cut = [(item.name, caption) for item, caption in zip(items, captions, strict=True) if caption.dropped]
    if cut:
        listed = shortlist([f"{name} ({quantity(caption.dropped, 'token')})" for name, caption in cut])
        yield f"These captions are longer than {cut[0][1].longest} tokens, so their end is cut off: {listed}."


def text_limit(text: TextPolicy, max_text_length: int | None) -> int | None:
    """Return the tokens at which the captions of these encoders are cut, None for never."""
    return None if max_text_length is None or not text.lengths else max(max_text_length, text.lengths[0])


def fit_to_models(fit: str, text: TextPolicy, latents: LatentPolicy) -> tuple[str, tuple[str, ...]]:
    """Return the fit that the models of these encoders support, and a note if it differs from the requested one."""
    if fit != RAGGED_EDGE or not (text.whole_grids or latents.whole_grids):
        return fit, ()
    family = text.family if text.whole_grids else latents.family
    note = (
        f"fit is {WHOLE_GRIDS} here, because {family} doesn't support a ragged edge. If the plan shows a lot of "
        "cropping, raise max_graphs."
    )
    return WHOLE_GRIDS, (note,)


def cut_to_latent_frames(items: tuple[Item, ...], latents: LatentPolicy) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Truncate each clip to a number of frames that fills this VAE's latent frames, and note which clips lost some."""
    cut, shorter = [], []
    for item in items:
        count = latents.whole_frames(item.pixels.frames)
        if count < item.pixels.frames:
            shorter.append(f"{item.name} ({item.pixels.frames} to {count})")
            item = replace(item, pixels=item.pixels.first(count))
        cut.append(item)
    if not shorter:
        return items, ()
    return tuple(cut), (
        f"Shortened to a number of frames that {latents.family} accepts: {shortlist(shorter)}; set target_frames to "
        "such a number.",
    )


def start_notes(items: Sequence[Item], latents: LatentPolicy, image_to_video: bool) -> Iterator[str]:
    """Yield notes on image-to-video training with Wan 2.2 5B."""
    if not image_to_video or latents is not WAN22:
        return
    still = [item.name for item in items if item.pixels.frames == 1]
    if still:
        yield f"These are single frames, so they train without a start picture: {shortlist(still)}."


def length_notes(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a note on caption lengths, for a model that takes captions at their encoded length."""
    lengths = sorted({length for sample in samples for _, _, length in sample.graph_keys})
    if len(lengths) < 2:
        return
    listed = ", ".join(map(str, lengths)) if len(lengths) <= FEW_LENGTHS else f"{lengths[0]} to {lengths[-1]}"
    note = f"The captions have {len(lengths)} different lengths ({listed} tokens), and each is compiled separately."
    if len(lengths) > FEW_LENGTHS:
        steps = len({key for sample in samples for key in sample.graph_keys})
        note += (
            f" Together with the picture sizes that makes {steps} graphs per block type: write captions of similar "
            "length, or switch compile off on Train LoRA."
        )
    yield note


def regularisation_notes(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a note on the ratio at which regularisation samples are shown."""
    reg_samples = [sample for sample in samples if sample.regularisation]
    if not reg_samples:
        return
    learnt = shown_per_epoch(samples) // 2
    showings = sum(sample.repeats for sample in reg_samples)
    count = quantity(len(reg_samples), "regularisation picture or clip", "regularisation pictures or clips")
    yield (
        f"Regularisation: every second showing is one of {count}. That is {learnt} per epoch, or "
        f"{learnt / showings:.3g} times all of them with their repeats."
    )


def shapes_text(keys: Sequence[GraphKey], noun: str) -> str:
    """Describe how often a model is compiled for these token counts, (latent, references, caption) each."""
    names = "image" if noun == "pictures" else "video"
    if len(keys) == 1:
        ((tokens, references, length),) = keys
        control = f" + {sum(references)} control" if references else ""
        shape = f"{tokens} {names}{control} + {length} text tokens"
        return f"All {noun} share one shape ({shape}), so the model is compiled once."
    counts = (" + ".join(map(str, (tokens, *references, length))) for tokens, references, length in keys)
    parts = f"{names} + control + text" if any(references for _, references, _ in keys) else f"{names} + text"
    return (
        f"The {noun} have {len(keys)} shapes (tokens of {parts}: {', '.join(counts)}); the model is compiled for each."
    )
