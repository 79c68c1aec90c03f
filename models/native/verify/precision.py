"""A transformer that computes in another dtype for a check, on the weights as they are stored."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...family import Block, ModelInputs, Transformer
from ...layers.lora_linear import LoraLayer


def small_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Give the floating buffers of a block or module by name, but for the matrices of Linears, which are cast at each
    use."""
    found = {}
    for owner, inner in module.named_modules():
        names = ("bias",) if isinstance(inner, LoraLayer) else tuple(inner._buffers)
        for name in names:
            tensor = inner._buffers.get(name)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                found[f"{owner}.{name}" if owner else name] = tensor
    return found


def run_in(dtype: torch.dtype, function: Callable[..., Any], block: Block, *args: Any) -> Any:
    """Call a function on a block and its arguments with its small tensors, those in its slot now, in `dtype`."""
    with cast_buffers(dtype, [block]):
        return function(block, *args)


@contextmanager
def computing_in(dtype: torch.dtype, transformer: Transformer) -> Iterator[None]:
    """Have what stands around the transformer's blocks compute in this dtype."""
    inside = {id(module) for _, block in transformer.blocks() for module in block.modules()}
    outside = [module for module in transformer.frozen_modules() if id(module) not in inside]
    attributes: Any = transformer
    before = attributes.dtype
    with cast_buffers(dtype, outside):
        attributes.dtype = dtype
        try:
            yield
        finally:
            attributes.dtype = before


@contextmanager
def cast_buffers(dtype: torch.dtype, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Cast the small tensors of these modules for the time of the context."""
    saved: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for module in modules:
            for name, tensor in small_tensors(module).items():
                owner, _, own = name.rpartition(".")
                table = module.get_submodule(owner)._buffers
                saved.append((table, own, tensor))
                table[own] = tensor.to(dtype)
        yield
    finally:
        for table, own, tensor in saved:
            table[own] = tensor


@contextmanager
def dtype_told(dtype: torch.dtype, base: Any) -> Iterator[None]:
    """Have a shadow's `BaseModel` and its modules know this dtype as the one that they compute in."""
    saved: list[tuple[dict[str, Any], str, Any]] = [(vars(base), "manual_cast_dtype", base.manual_cast_dtype)]
    tables = [vars(module) for module in base._modules["diffusion_model"].modules()]
    saved += [(table, "dtype", table["dtype"]) for table in tables if isinstance(table.get("dtype"), torch.dtype)]
    try:
        for table, name, _ in saved:
            table[name] = dtype
        yield
    finally:
        for table, name, value in saved:
            table[name] = value


def cast_floating(inputs: ModelInputs, dtype: torch.dtype) -> ModelInputs:
    """Cast the inputs' 16-bit tensors."""
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    narrow = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16)}
    return replace(inputs, **{name: tensor.to(dtype) for name, tensor in narrow.items()})
