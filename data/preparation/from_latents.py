"""Training data from latents and conditionings that core's nodes encoded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ...common.fingerprint import fingerprint
from ...common.text import quantity, shortlist
from ...models.latents import WAN22, LatentPolicy, policy_of_latent
from ..buckets.grids import Grid, Placement
from ..buckets.latent_crops import place_latents
from ..conditioning import check_finite, copy_all_to_host, copy_to_host, read_entry
from ..encode.clip_vision import hidden_states, vision_output
from ..media.latent_masks import noise_mask_notes, noise_mask_weights
from ..samples import FIRST_VARIANT, Sample, SampleTensors, SampleVariant, TrainingData
from .checks import length_notes

Conditioning = list[Any]  # ComfyUI's: [[cond, {"pooled_output": …}], …]
# Entries of a conditioning that have the latent's own height and width; they are cropped with it.
ON_THE_GRID = ("concat_latent_image", "concat_mask")


@dataclass(frozen=True)
class _Latent:
    """Latent of one image or video.

    name: name in messages.
    tensor: (C, H, W) of an image, (C, T, H, W) of a video.
    mask: noise mask, (1, T, h, w) or (1, H, W); None without one.
    """

    name: str
    tensor: Tensor
    mask: Tensor | None

    @property
    def frames(self) -> int:
        """Number of latent frames; 1 for an image."""
        return self.tensor.shape[1] if self.tensor.ndim == 4 else 1

    def clean_frames(self, policy: LatentPolicy) -> int:
        """Count the leading latent frames of a video that its noise mask marks as clean.

        Recognises the mask of core's Wan22ImageToVideoLatent: 0 on the first frames, 1 on all frames after them.
        """
        if policy is not WAN22 or self.mask is None or self.mask.ndim != 4 or self.mask.shape[1] != self.frames:
            return 0
        noisy = self.mask.flatten(2).amax(dim=(0, 2)) > 0
        whole = self.mask.flatten(2).amin(dim=(0, 2)) == 1
        count = int((~noisy).long().cumprod(0).sum())
        return count if 0 < count < self.frames and bool(whole[count:].all()) else 0


def latents_to_data(
    latents: Sequence[Mapping[str, Any]],
    positive: Sequence[Conditioning],
    max_graphs: int,
    masked_loss: bool = False,
) -> TrainingData:
    """Make training data from lists of ComfyUI's LATENT and CONDITIONING, as core's dataset nodes output them.

    latents: dicts whose "samples" are (C, H, W), (B, C, H, W) or (B, C, T, H, W); each latent of a batch is a sample.
    positive: conditionings in one of three layouts: one list per latent dict (with one entry per sample of the batch,
        or one entry for the whole batch), one entry per sample in total, or a single entry for all samples. Reference
        latents, start images (core's WanImageToVideo) and CLIP vision outputs are retained.
    max_graphs: limit of token counts. Latents of more counts are center-cropped to few counts, and notes name them.
        Those of models that run ComfyUI's own forward keep all their whole tokens: a crop would have a ragged edge.
    masked_loss: use noise masks as token weights of the loss; without it they are ignored, with a note.

    An odd side loses one row or column of latent cells, with a note. A noise mask that marks the first frames of a
    Wan 2.2 5B video as clean sets the sample's `clean_frames` instead. Tensors are copied to the host, so that
    autograd can save them for backward.
    Raises ValueError if counts or shapes do not match, and for values that are not finite.
    """
    batches = [_split(latent, index) for index, latent in enumerate(latents)]
    single_latents = [
        _Latent(f"latent {index + 1}", *pair) for index, pair in enumerate(pair for batch in batches for pair in batch)
    ]
    if not single_latents:
        raise ValueError("latents is empty; connect the latents of Make Training Dataset or VAE Encode.")
    policy = _check_channels([latent.tensor for latent in single_latents])
    entries = _match(positive, [len(batch) for batch in batches])
    grids = [_grid(latent.tensor, index, policy.patch) for index, latent in enumerate(single_latents)]
    graph_limit = max(max_graphs, len(single_latents)) if policy.whole_grids and max_graphs >= 1 else max_graphs
    placements = place_latents(grids, graph_limit)
    samples: list[Sample] = []
    fingerprints: list[str] = []
    references: list[_References] = []
    for latent, entry, grid, placement in zip(single_latents, entries, grids, placements, strict=True):
        tensors = _tensors(latent, entry, grid, placement.grid, policy.patch)
        references.append(_references(tensors.conditioning, latent, grid, placement, policy))
        clean = latent.clean_frames(policy)
        if masked_loss and latent.mask is not None and not clean:
            height, width = latent.tensor.shape[-2:]
            weights = noise_mask_weights(latent.mask, latent.name, (height, width), grid, placement, policy.patch)
            tensors = replace(tensors, weights=copy_to_host(weights))
        samples.append(_sample(latent.name, tensors, placement, references[-1].tokens, clean))
        fingerprints.append(_fingerprint(tensors, samples[-1]))
    masked = [latent.name for latent in single_latents if latent.mask is not None and not latent.clean_frames(policy)]
    notes = (
        *noise_mask_notes(masked, masked_loss),
        *_reference_notes(samples, references, max_graphs),
        *_notes(single_latents, grids, placements, samples, max_graphs, policy),
    )
    return TrainingData(tuple(samples), fingerprint(fingerprints), notes)


def _sample(
    name: str, tensors: SampleTensors, placement: Placement, references: tuple[int, ...], clean_frames: int
) -> Sample:
    """Make the sample of a latent, which holds its tensors. references: tokens of each."""
    return Sample(
        name=name,
        grid=(placement.grid.frames, placement.grid.height, placement.grid.width),
        tokens=placement.tokens,
        text_length=tensors.text.shape[1],
        load=partial(_load_tensors, tensors),
        references=references,
        clean_frames=clean_frames,
        conditioning=frozenset(key for key, value in tensors.conditioning.items() if value is not None),
    )


def _fingerprint(tensors: SampleTensors, sample: Sample) -> str:
    """Fingerprint a sample by its tensors; weights of the loss count if it has any."""
    return fingerprint(
        tensors.latent,
        tensors.text,
        _fingerprint_input(tensors.conditioning),
        sample.tokens,
        sample.references,
        sample.clean_frames,
        *(() if tensors.weights is None else (tensors.weights,)),
    )


def _load_tensors(tensors: SampleTensors, choice: SampleVariant = FIRST_VARIANT) -> SampleTensors:
    """Return the tensors: encoded latents have one variant."""
    return tensors


def _split(latent: Mapping[str, Any], index: int) -> list[tuple[Tensor, Tensor | None]]:
    """Split a LATENT into pairs of latent and noise mask: (C, H, W) for one frame, (C, T, H, W) for a video."""
    samples, mask = latent["samples"], latent.get("noise_mask")
    if samples.ndim not in (3, 4, 5):
        raise ValueError(
            f"Latent {index + 1} has the shape {tuple(samples.shape)}; it must be (C, H, W), (B, C, H, W) or "
            f"(B, C, T, H, W)."
        )
    batch = samples[None] if samples.ndim == 3 else samples
    # A batch of masks that is shorter than the latents repeats its last mask.
    count = len(batch)
    masks = [None] * count if mask is None else [mask[min(position, len(mask) - 1)] for position in range(count)]
    pictures = [picture.squeeze(1) if picture.ndim == 4 and picture.shape[1] == 1 else picture for picture in batch]
    return list(zip(pictures, masks, strict=True))


def _match(positive: Sequence[Conditioning], batches: list[int]) -> list[Any]:
    """Assign one conditioning entry to each latent."""
    pictures = sum(batches)
    if len(positive) == len(batches) and all(len(p) in (1, size) for p, size in zip(positive, batches, strict=True)):
        return [
            entry
            for entries, size in zip(positive, batches, strict=True)
            for entry in (entries if len(entries) == size else entries * size)
        ]
    flat = [entry for entries in positive for entry in entries]
    if len(flat) == pictures:
        return flat
    if len(flat) == 1:
        return flat * pictures
    raise ValueError(
        f"positive has {quantity(len(flat), 'conditioning')} and latents has {quantity(pictures, 'picture')}; give one "
        "for each picture, or one for all."
    )


def _check_channels(pictures: list[Tensor]) -> LatentPolicy:
    """Return the latent policy by the number of channels, which must be the same for all latents."""
    channels = [picture.shape[0] for picture in pictures]
    other = next((index for index, count in enumerate(channels) if count != channels[0]), None)
    if other is not None:
        raise ValueError(
            f"latents have different numbers of channels (latent 1 has {channels[0]}, latent {other + 1} has "
            f"{channels[other]}); encode all pictures with one VAE."
        )
    return policy_of_latent(channels[0])


def _grid(picture: Tensor, index: int, patch: int) -> Grid:
    height, width = (side // patch for side in picture.shape[-2:])
    if height < 1 or width < 1:
        raise ValueError(
            f"Picture {index + 1} of latents is {picture.shape[-2]} x {picture.shape[-1]} cells, too small for a "
            f"token of {patch} x {patch}; encode a larger picture."
        )
    return Grid(height, width, picture.shape[1] if picture.ndim == 4 else 1)


def _cut(picture: Tensor, grid: Grid, target: Grid, patch: int) -> Tensor:
    """Center-crop a latent (..., H, W) from `grid` to `target`, in whole tokens."""
    top = (grid.height - target.height) // 2 * patch
    left = (grid.width - target.width) // 2 * patch
    return picture[..., top : top + target.height * patch, left : left + target.width * patch]


def _tensors(latent: _Latent, entry: Any, grid: Grid, target: Grid, patch: int) -> SampleTensors:
    name = f"The conditioning of {latent.name}"
    cond, conditioning = read_entry(entry, name)
    check_finite(latent.tensor, latent.name)
    check_finite(cond, name)
    for name in ON_THE_GRID:
        if (value := conditioning.get(name)) is not None:
            if value.shape[-2:] != latent.tensor.shape[-2:] or (value.ndim == 5 and value.shape[2] != latent.frames):
                raise ValueError(
                    f"{latent.name.capitalize()} is {_sides(latent.tensor)} and the start picture of its conditioning "
                    f"({name}) is {_sides(value)}; give WanImageToVideo the width, height and length of the clip."
                )
            conditioning[name] = _cut(value, grid, target, patch)
    if (vision := conditioning.get("clip_vision_output")) is not None:
        conditioning["clip_vision_output"] = vision_output(copy_to_host(hidden_states(vision)))
    return SampleTensors(
        copy_to_host(_cut(latent.tensor, grid, target, patch)),
        copy_to_host(cond),
        {key: copy_all_to_host(value) for key, value in conditioning.items()},
    )


def _sides(tensor: Tensor) -> str:
    frames = tensor.shape[-3] if tensor.ndim > 3 else 1
    return f"{tensor.shape[-1]} x {tensor.shape[-2]} cells and {quantity(frames, 'frame')}"


@dataclass(frozen=True)
class _References:
    """Reference latents of one sample.

    tokens: tokens of each reference.
    odd: a reference lost an odd row or column of cells.
    whole: a reference of another size stays uncropped while the latent is cropped.
    """

    tokens: tuple[int, ...]
    odd: bool
    whole: bool


def _references(
    conditioning: Mapping[str, Any], latent: _Latent, grid: Grid, placement: Placement, policy: LatentPolicy
) -> _References:
    """Crop the reference latents in-place to whole tokens, and along with the latent if both have the same size."""
    references = conditioning.get("reference_latents") or []
    tokens = []
    odd = False
    whole = False
    for index, reference in enumerate(references):
        height, width = (side // policy.patch for side in reference.shape[-2:])
        if not (_is_picture(reference, policy.channels) and height and width):
            raise ValueError(
                f"A reference latent of {latent.name} has the shape {tuple(reference.shape)}; it must be one picture "
                f"of {policy.channels} channels, encoded with the VAE of latents."
            )
        odd |= (height * policy.patch, width * policy.patch) != reference.shape[-2:]
        target = Grid(height, width)
        if placement.crop > 0 and reference.shape[-2:] == latent.tensor.shape[-2:]:
            target = Grid(placement.grid.height, placement.grid.width)
        elif placement.crop > 0:
            whole = True
        references[index] = copy_to_host(_cut(reference, Grid(height, width), target, policy.patch))
        tokens.append(target.tokens)
    return _References(tuple(tokens), odd, whole)


def _is_picture(latent: Tensor, channels: int) -> bool:
    """Return whether a latent is one picture, (1, C, H, W) or (1, C, 1, H, W), of so many channels."""
    frames = tuple(latent.shape[2:-2])
    return latent.ndim in (4, 5) and tuple(latent.shape[:2]) == (1, channels) and frames in ((), (1,))


def _fingerprint_input(conditioning: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a conditioning for the fingerprint: the CLIP vision output is replaced by its hidden states."""
    return {
        key: hidden_states(value) if key == "clip_vision_output" and value is not None else value
        for key, value in conditioning.items()
    }


def _reference_notes(samples: list[Sample], references: list[_References], max_graphs: int) -> Iterator[str]:
    odd = [sample.name for sample, sizes in zip(samples, references, strict=True) if sizes.odd]
    whole = [sample.name for sample, sizes in zip(samples, references, strict=True) if sizes.whole]
    if odd:
        yield f"Reference latents of an odd number of cells are cut to whole tokens: {shortlist(odd)}."
    if whole:
        yield (
            f"Cropped without their reference latents, which have a different size: {shortlist(whole)}; raise "
            f"max_graphs to crop less, or encode both at one size."
        )
    shapes = {sample.references for sample in samples}
    graphs = {(sample.tokens, sample.references) for sample in samples}
    if len(shapes) > 1 and len(graphs) > max_graphs:
        listed = ", ".join(" + ".join(map(str, shape)) or "none" for shape in sorted(shapes))
        yield (
            f"With their reference latents ({listed} tokens) the latents make {len(graphs)} graphs, each compiled; "
            f"encode the control pictures at fewer sizes, or use Prepare Dataset, which plans them."
        )


def _notes(
    latents: list[_Latent],
    grids: list[Grid],
    placements: list[Placement],
    samples: list[Sample],
    max_graphs: int,
    policy: LatentPolicy,
) -> Iterator[str]:
    sides = [latent.tensor.shape[-2:] for latent in latents]
    odd = [s.name for s, side in zip(samples, sides, strict=True) if any(cells % policy.patch for cells in side)]
    if odd:
        yield (
            f"These have an odd number of latent cells along a side, so one row is cut off: {shortlist(odd)}."
            if policy.patch == 2
            else f"Cut to whole tokens, because their sides are not multiples of {policy.patch} cells: "
            f"{shortlist(odd)}."
        )
    counts = sorted({p.tokens for p in placements})
    listed = ", ".join(map(str, counts))
    cut = [
        f"{sample.name} (from {grid.width} x {grid.height} to {p.grid.width} x {p.grid.height} tokens, {p.crop:.1%})"
        for sample, grid, p in zip(samples, grids, placements, strict=True)
        if p.crop > 0
    ]
    if cut:
        yield f"Cropped to keep within max_graphs ({listed} tokens, ragged edge): {shortlist(cut)}."
    if len(counts) > max_graphs and policy.whole_grids:
        yield (
            f"There are {len(counts)} token counts ({listed}), each compiled: these latents are not cropped to fewer, "
            f"as their models take no ragged edge; encode pictures at fewer sizes."
        )
    elif len(counts) > max_graphs:
        yield (
            f"There are {len(counts)} token counts ({listed}), the fewest for pictures and clips of these lengths; "
            f"each is compiled."
        )
    if policy.whole_grids:  # other models pad texts to a few lengths
        yield from length_notes(samples)
