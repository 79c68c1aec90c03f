"""Timing of a region, compiled and eager on the same inputs, and the memory that compiling took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import comfy.model_management
import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

LONG = 2.0  # seconds: a region that takes longer is timed once


@dataclass(frozen=True)
class Speed:
    """Time of one call at one size.

    size: shape of the largest input, such as 1x4096x3072.
    eager_ms: median milliseconds uncompiled.
    compiled_ms: median milliseconds compiled.
    """

    size: str
    eager_ms: float
    compiled_ms: float

    @property
    def gain(self) -> float:
        return self.eager_ms / self.compiled_ms


def compare(compiled: Callable[..., Any], eager: Callable[..., Any], args: tuple[Any, ...]) -> Speed | None:
    """Time both alternately on copies of the inputs, after a warm-up; None if memory does not suffice for that."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(args[1:]) if isinstance(t, Tensor)]
    if not any(t.ndim < 6 for t in tensors):
        return None
    try:
        compiled_s, eager_s = [], []
        seconds_of(eager, args)
        for turn in range(3):
            compiled_s.append(seconds_of(compiled, args))
            eager_s.append(seconds_of(eager, args))
            if turn == 0 and compiled_s[0] + eager_s[0] > LONG:
                break
    except Exception as error:
        if not comfy.model_management.is_oom(error):
            raise
        return None
    return Speed(size_of(tensors), 1000 * median(eager_s), 1000 * median(compiled_s))


def seconds_of(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Time one call on copies of the tensors, since ComfyUI's blocks write into their inputs."""
    copies: dict[int, Tensor] = {}  # a repeated tensor is copied once: graphs have guards on which inputs are the same
    inputs = tree_map_only(Tensor, lambda t: copies.setdefault(id(t), t.clone()), args[1:])
    device = next(t.device for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, Tensor))
    synchronise(device)
    started = time.perf_counter()
    function(args[0], *inputs)
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def size_of(tensors: list[Tensor]) -> str:
    """Format the shape of the largest input, such as 1x4096x3072.

    RoPE's tables, which have six dimensions, are left out.
    """
    return "x".join(str(n) for n in max((t for t in tensors if t.ndim < 6), key=lambda t: t.numel()).shape)


def memory_beside_tensors(device: torch.device) -> int:
    """Count bytes in use that are not torch's tensors.

    On a GPU the driver's count minus torch's reservation (compiled kernels, their context and the buffers of CUDA
    graphs), else the process's resident memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss
