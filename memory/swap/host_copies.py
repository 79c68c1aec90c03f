"""A model's weights on the host stay where they lie while ComfyUI takes the model to the device and back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...common.gguf_tensor import is_gguf
from ..host.flat_weights import WeightRef, parts_of, weight_refs, with_parts
from .inference import SwappedBlocks
from .patcher import KEY


@contextmanager
def host_copies_retained(patcher: ModelPatcher) -> Iterator[None]:
    """Put a model's host memory back, on leaving, as it lay.

    ComfyUI frees the host's memory of a weight when it moves it to the device, and takes new memory on the way back.
    The flat weights of swapped blocks share their memory with the MODEL's own weights, and there would be two of each.
    Leave it when the model is unloaded. Under dynamic VRAM nothing of this moves.

    Block swap of the MODEL itself streams them as they lie meanwhile, and gathers none in buffers of its own.
    """
    swap: SwappedBlocks | None = patcher.attachments.get(KEY)
    if swap is not None:
        swap.keep_in_place = True
    before = [] if patcher.is_dynamic() else _on_host(patcher)
    try:
        yield
    finally:
        if swap is not None:
            swap.keep_in_place = False
        for ref, lay in before:
            now = ref.tensor()
            if now is None or not _moved(parts_of(now), lay):
                continue
            if is_traceable_wrapper_subclass(now) or is_gguf(now):
                ref.table[ref.attribute] = with_parts(now, lay)
                continue
            with torch.inference_mode(now.is_inference()):
                now.data = lay[0]


def _on_host(patcher: ModelPatcher) -> list[tuple[WeightRef, list[Tensor]]]:
    placed = [(ref, ref.tensor()) for ref in weight_refs("", patcher.model)]
    held = [(ref, parts_of(tensor)) for ref, tensor in placed if tensor is not None]
    return [(ref, parts) for ref, parts in held if all(part.device.type == "cpu" for part in parts)]


def _moved(now: list[Tensor], lay: list[Tensor]) -> bool:
    """Return True if it is the same weight in other memory of the same device."""
    kinds = [[(part.device, part.dtype, part.shape) for part in parts] for parts in (now, lay)]
    return kinds[0] == kinds[1] and any(n.data_ptr() != p.data_ptr() for n, p in zip(now, lay, strict=True))
