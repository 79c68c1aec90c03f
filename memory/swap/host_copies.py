"""Preserve a model's host memory while ComfyUI moves the model to the device and back."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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
    """Point a model's weights back at their original host memory on exit.

    ComfyUI frees the host memory of a weight when it moves it to the device, and allocates new memory on the way back.
    The flat weights of swapped blocks share their memory with the MODEL's own weights, so there would be two copies.
    Exit the context after the model is unloaded. Under dynamic VRAM these weights do not move.

    Meanwhile block swap of the MODEL itself streams them in place, without gathering them in flat buffers.
    """
    swap: SwappedBlocks | None = patcher.attachments.get(KEY)
    originals = [] if patcher.is_dynamic() else _on_host(patcher)
    try:
        with nullcontext() if swap is None else swap.host.in_place():
            yield
    finally:
        for ref, original in originals:
            tensor = ref.tensor()
            if tensor is None or not _is_relocated(parts_of(tensor), original):
                continue
            if is_traceable_wrapper_subclass(tensor) or is_gguf(tensor):
                ref.table[ref.attribute] = with_parts(tensor, original)
                continue
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = original[0]


def _on_host(patcher: ModelPatcher) -> list[tuple[WeightRef, list[Tensor]]]:
    placed = [(ref, ref.tensor()) for ref in weight_refs("", patcher.model)]
    weights = [(ref, parts_of(tensor)) for ref, tensor in placed if tensor is not None]
    return [(ref, parts) for ref, parts in weights if all(part.device.type == "cpu" for part in parts)]


def _is_relocated(current: list[Tensor], original: list[Tensor]) -> bool:
    """Return True if the parts match in device, dtype and shape but not in memory."""
    kinds = [[(part.device, part.dtype, part.shape) for part in parts] for parts in (current, original)]
    return kinds[0] == kinds[1] and any(n.data_ptr() != p.data_ptr() for n, p in zip(current, original, strict=True))
