"""Updates that are no product of two thin matrices, and what a LoRA can take of them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...models.adapters.pissa import largest_parts
from .patches import Patch

EMPTY = 1e-6  # a singular part this small beside the largest is none
_ROUNDING = 1e-6  # a change of W this small beside W is what fp32 rounds


def delta_of(
    patches: Sequence[Patch], shape: tuple[int, int], device: torch.device, read: Callable[[], Tensor]
) -> Tensor:
    """delta W (out, in), fp32 on `device`: what ComfyUI's reader makes of a weight by these patches, less the weight.

    read: gives W, fp32, which is only asked for where delta W depends on it (BOFT, OFT, GLoRA, DoRA's lengths, a whole
    weight); else the patches go on zeros, so that nothing is rounded to W's size. Raises ValueError where the reader
    leaves a patch out, and where the numbers overflow.
    """
    weight = read().to(device) if any(patch.needs_weight for patch in patches) else None
    delta = torch.zeros(shape, device=device) if weight is None else weight.clone()
    for patch in patches:
        delta, applied = patch.apply(delta)
        if not applied:
            raise ValueError(f"ComfyUI could not apply its {patch.form}; ComfyUI's log says why")
    if weight is not None:
        delta -= weight
        if delta.norm() <= _ROUNDING * weight.norm():
            delta.zero_()
    if not delta.isfinite().all():
        raise ValueError("its update is NaN or infinite on the weights of this model")
    return delta


def cut_to_rank(delta: Tensor, rank: int, scale: float, source: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """(down, up, ‖lost‖ / ‖delta W‖): scale·up·down are the largest singular parts, `rank` of them or as many as there
    are."""
    left, sizes, right = largest_parts(delta, rank, source)
    there = int((sizes > EMPTY * sizes[0]).sum())
    left, sizes, right = left[:, :there], sizes[:there], right[:there]
    root = (sizes / scale).sqrt()
    total = float(delta.double().square().sum())
    lost = math.sqrt(max(0.0, 1.0 - float(sizes.double().square().sum()) / total)) if total else 0.0
    return right * root[:, None], left * root, lost
