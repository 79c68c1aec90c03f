"""Conditioning of one sample, processed by the MODEL's own `extra_conds` exactly as in ComfyUI's sampling."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from comfy.model_base import BaseModel
from torch import Tensor
from torch.nn import functional as F

# Keys that other nodes set on a conditioning to steer sampling; a training step has no use for them.
SAMPLING_ONLY = {"start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "strength", "area", "mask"}


def model_conditioning(
    model: BaseModel,
    noisy: Tensor,
    text: Tensor,
    conditioning: Mapping[str, Any],
    guidance: float | None,
    device: torch.device,
    lists: Collection[str] | None = (),
) -> dict[str, Any]:
    """Build the keyword arguments of `apply_model` for one sample: tensors in the inference dtype on the device, lists
    of them if `lists` names the argument or is None, and plain values (the method for reference latents).

    noisy: (C, H, W) or (C, T, H, W); text: (1, L, D). `guidance` overrides that of the conditioning; None keeps it.
    Raises ValueError if the conditioning carries something that a training step can't honour: a ControlNet, GLIGEN,
    hooks, a list of tensors that the family does not take.
    """
    for name in ("control", "gligen", "hooks"):
        if conditioning.get(name) is not None:
            raise ValueError(f"positive carries {name}, which training can't apply; connect it without that node.")
    kwargs = {k: v for k, v in conditioning.items() if k not in SAMPLING_ONLY}
    if guidance is not None:
        kwargs["guidance"] = guidance
    conds = model.extra_conds(cross_attn=text, noise=noisy[None], device=device, **kwargs)
    dtype = model.get_dtype_inference()
    result: dict[str, Any] = {}
    for name, cond in conds.items():
        value = cond.process_cond(batch_size=1, area=None, device=device).cond
        if isinstance(value, Tensor):
            result[name] = _cast(value, device, dtype)
        elif not isinstance(value, list):
            result[name] = value
        elif lists is None or name in lists:
            result[name] = [_cast(entry, device, dtype) if isinstance(entry, Tensor) else entry for entry in value]
        else:
            raise ValueError(f"positive carries {name}, which LoRA training of this model does not take; remove it.")
    return result


def padded_texts(texts: Sequence[Tensor], length: int, masked: bool) -> tuple[Tensor, Tensor | None]:
    """Batch texts, (1, l, D) each, at one length: (B, length, D), and their mask, (B, length), False for pads.

    masked: whether there is a mask; it depends on the length alone, so that batches of one length run the same graph.
        Without one, all texts have the length.
    """
    lengths = torch.tensor([text.shape[1] for text in texts])
    assert bool((lengths <= length).all()) and (masked or bool((lengths == length).all())), (lengths, length)
    if not masked:
        return torch.cat(list(texts)), None
    padded = torch.cat([F.pad(text, (0, 0, 0, length - text.shape[1])) for text in texts])
    return padded, (torch.arange(length) < lengths[:, None]).to(padded.device)


def _cast(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    keep = value.dtype in (torch.int, torch.long)
    return value.to(device=device, dtype=None if keep else dtype)
