"""Token weights from the noise mask of a latent: the loss counts where the sampler may change the latent."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...common.text import shortlist
from ..buckets.grids import Grid, Placement
from .masks import area_mean


def noise_mask_weights(
    mask: Tensor, name: str, cells: tuple[int, int], grid: Grid, placement: Placement, patch: int
) -> Tensor:
    """Compute the weight of each kept token, (tokens,): the mean of the mask over its square of the latent.

    mask: (1, H, W), (H, W) or (1, T, H, W), which core stretches over the latent whatever H and W are.
    cells: (height, width) of the latent.
    grid: all tokens of the latent.
    placement: the part in the middle that is kept.
    patch: cells of a token along a side.
    Raises ValueError for a mask of neither one nor the latent's number of frames, and for one that is 0 in the whole
    crop.
    """
    frames = mask.reshape(1, *mask.shape[-2:]) if mask.ndim < 4 else mask[0]
    if len(frames) not in (1, grid.frames):
        raise ValueError(
            f"The noise mask of {name} has {len(frames)} frames and the latent {grid.frames}; give it one, or as many."
        )
    target = placement.grid
    top, left = (grid.height - target.height) // 2, (grid.width - target.width) // 2
    down, across = (frames.shape[1] * patch / cells[0], frames.shape[2] * patch / cells[1])
    box = (left * across, top * down, (left + target.width) * across, (top + target.height) * down)
    means = [area_mean(frame.float().cpu().numpy(), box, target.height, target.width).flatten() for frame in frames]
    frame_tokens = placement.tokens // target.frames
    weights = torch.cat([means[min(frame, len(means) - 1)][:frame_tokens] for frame in range(target.frames)])
    if not float(weights.sum()) > 0:
        raise ValueError(
            f"The noise mask of {name} is 0 everywhere in the cropped latent, so there is nothing to learn; set it to "
            "1 where the model should learn, or switch masked_loss off."
        )
    return weights


def noise_mask_notes(masked: Sequence[str], used: bool) -> Iterator[str]:
    """Yield notes on noise masks.

    masked: names of the latents with a noise mask that marks no frames as clean.
    used: masked_loss is on.
    """
    if masked and not used:
        yield (
            f"Training takes the whole picture, so the noise mask is ignored for {shortlist(masked)}; switch "
            "masked_loss on to learn only where it is 1."
        )
    if used and not masked:
        yield "masked_loss has no effect, as no latent has a noise mask; set one with Set Latent Noise Mask."
