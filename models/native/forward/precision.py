"""Checks of a transformer in another compute dtype, on the weights as stored."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...family import Block, ModelInputs, OwnTransformer, Transformer
from ...layers.lora_linear import LoraLayer


def small_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers of a block or module by name, except the matrices of Linears, which are cast at
    each use."""
    tensors = {}
    for owner, inner in module.named_modules():
        names = ("bias",) if isinstance(inner, LoraLayer) else tuple(inner._buffers)
        for name in names:
            tensor = inner._buffers.get(name)
            if tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensors[f"{owner}.{name}" if owner else name] = tensor
    return tensors


def run_in(dtype: torch.dtype, function: Callable[..., Any], block: Block, *args: Any) -> Any:
    """Call a function on a block and its arguments with its small tensors, as now in its slot, in `dtype`."""
    with cast_buffers(dtype, [block]):
        return function(block, *args)


@contextmanager
def computing_in(dtype: torch.dtype, transformer: Transformer) -> Iterator[None]:
    """Run the transformer's modules outside its blocks in this dtype."""
    inside = {id(module) for _, block in transformer.blocks() for module in block.modules()}
    outside = [module for module in transformer.frozen_modules() if id(module) not in inside]
    assert isinstance(transformer, OwnTransformer)
    with cast_buffers(dtype, outside), transformer.computing_in(dtype):
        yield


@contextmanager
def cast_buffers(dtype: torch.dtype, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Cast the small tensors of these modules within the context."""
    saved: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for module in modules:
            for name, tensor in small_tensors(module).items():
                owner, _, buffer_name = name.rpartition(".")
                table = module.get_submodule(owner)._buffers
                saved.append((table, buffer_name, tensor))
                table[buffer_name] = tensor.to(dtype)
        yield
    finally:
        for table, buffer_name, tensor in saved:
            table[buffer_name] = tensor


@contextmanager
def dtype_told(dtype: torch.dtype, base: Any) -> Iterator[None]:
    """Set this dtype as the compute dtype of a shadow's `BaseModel` and its modules."""
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
