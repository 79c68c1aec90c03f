"""Flat weights: the weights of a block in one flat buffer on the host, at which the block's own modules point.

No list of flat weights is kept anywhere: the modules' tensors are the host copies, and the flat buffer is found again
through them. So several MODELs over one base share it, and it is freed when the last tensor over it is.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...common.gguf_tensor import as_stored, is_gguf, over
from .flat_buffer import ALIGNMENT, Layout, ScatteredBuffer, empty_bytes, trim_heap

SMALL_PART = 64  # a tensor of less than this part of its block: a bias, a norm, a scale


@dataclass(frozen=True)
class WeightRef:
    """Reference to a tensor by the module that holds it.

    key: name in the state dict of the MODEL.
    owner: the module.
    table: the module's parameters or buffers.
    attribute: the tensor's name in the table.
    """

    key: str
    owner: nn.Module
    table: dict[str, Any]
    attribute: str

    def tensor(self) -> Tensor | None:
        return self.table.get(self.attribute)


# What takes a tensor's parts over in other memory: (where it stands, the tensor, its parts there).
Put = Callable[[WeightRef, Tensor, list[Tensor]], object]


def weight_refs(name: str, block: nn.Module) -> list[WeightRef]:
    """List references to the block's tensors; no tensor is held, so each can be freed when it has been moved."""
    return [
        WeightRef(f"{path}.{attribute}", module, table, attribute)
        for path, module in block.named_modules(prefix=name)
        for table in (module._parameters, module._buffers)
        for attribute, tensor in table.items()
        if tensor is not None
    ]


def plain_tensors(refs: Sequence[WeightRef]) -> Iterator[tuple[str, Tensor]]:
    """Yield each plain tensor under its weight's key and its number among the weight's parts."""
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        for i, part in enumerate(parts_of(tensor)):
            yield f"{ref.key}/{i}", part


def parts_of(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors that a weight consists of: itself, or the parts of a quantised one."""
    if is_gguf(tensor):
        return [as_stored(tensor)]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.data]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two weights are the same bytes, read in the same way."""
    return _lies(one) == _lies(other)


def _lies(tensor: Tensor) -> list[Any]:
    return [(p.device, p.data_ptr(), p.dtype, p.shape, p.stride()) for p in parts_of(tensor)]


def with_parts(tensor: Tensor, parts: list[Tensor]) -> Tensor:
    """Make the same kind of tensor over other parts.

    An ordinary one, as compiled code tells it from one that was made under inference mode. A quantised one stays what
    it was: ComfyUI moves it under inference mode, which an ordinary one does not bear.
    """
    if is_traceable_wrapper_subclass(tensor):
        return _rewrapped(tensor, parts, tensor.is_inference())
    with torch.inference_mode(False):
        if is_gguf(tensor):
            return over(tensor, parts[0])
        made = _over(tensor, iter(parts))
        return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _rewrapped(tensor: Tensor, parts: list[Tensor], inference: bool) -> Tensor:
    """A quantised weight over other parts, made under inference mode or outside of it."""
    with torch.inference_mode(inference):
        made = _over(tensor, iter(parts))
        # What `nn.Parameter` does to a tensor of another class, less the `detach`: a quantised tensor copies its scales
        # there, and they have to stay the parts.
        made._is_param = isinstance(tensor, nn.Parameter)  # type: ignore[attr-defined]
        return made


def restore_inference_mode(model: nn.Module) -> None:
    """Make quantised weights inference tensors again, as a loader node makes them, over the same memory.

    Call it while the model is not loaded. Unloading a MODEL outside inference mode (ComfyUI's own Unload Models,
    between two prompts) leaves ordinary copies of them. Under inference mode, where nodes sample, `nn.Parameter` takes
    no such one, and ComfyUI wraps each weight in it anew that it moves to a device on which it lies already
    (comfy/ops.py, _quantized_apply): the CPU, or the GPU with --gpu-only. So they could not be loaded with a LoRA on
    others, nor be taken off again.
    """
    for ref in weight_refs("", model):
        tensor = ref.tensor()
        if tensor is not None and is_traceable_wrapper_subclass(tensor) and not tensor.is_inference():
            ref.table[ref.attribute] = _rewrapped(tensor, parts_of(tensor), inference=True)


def _over(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    if not is_traceable_wrapper_subclass(tensor):
        return next(parts)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _over(getattr(tensor, name), parts) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def shared_flat(refs: Sequence[WeightRef], layout: Layout, keep: Collection[str] = ()) -> Tensor | None:
    """Find the flat buffer of this layout over which all these tensors lie already, if they do.

    Scales of quantised weights may have been copied out of it, as ComfyUI's moves do; they are copied in again.
    keep: keys of tensors that another node put there for a while; the buffer is that of the tensors they stand for.
    """
    if any(ref.key in keep for ref in refs):
        return None
    parts = [part for _, part in plain_tensors(refs)]
    first = parts[0]
    if first.device.type != "cpu":
        return None
    storage, start = first.untyped_storage(), first.data_ptr()
    offset = start - storage.data_ptr()
    if offset + layout.size > storage.nbytes():
        return None
    outside = []
    for field, part in zip(layout.fields, parts, strict=True):
        if (tuple(part.shape), tuple(part.stride()), part.dtype) != (field.shape, field.stride, field.dtype):
            return None
        here = part.device == first.device and part.untyped_storage().data_ptr() == storage.data_ptr()
        if here and part.data_ptr() == start + field.offset:
            continue
        if part.nbytes > ALIGNMENT:
            return None
        outside.append((field, part))
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (layout.size,), (1,))
    for field, part in outside:
        field.on(flat).copy_(part)
    return flat


def point_at(ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> None:
    """Let the module that owns `tensor` hold it over `parts` from here on."""
    ref.table[ref.attribute] = with_parts(tensor, parts)


def into_flat(
    refs: Sequence[WeightRef], layout: Layout, pinned: bool, put: Put = point_at, later: bool = False
) -> Tensor:
    """Move the tensors into one flat buffer on the host; each is let go before the next is read.

    put(place, tensor, parts): called for each with its parts in the buffer.
    later: the buffer is to be page-locked by `Locking`.
    """
    flat = empty_bytes(layout.size, torch.device("cpu"), pinned, later)
    fields = iter(layout.fields)
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        parts = []
        for part in parts_of(tensor):
            moved = next(fields).on(flat)
            # ComfyUI leaves what a file lacks without memory until it is loaded, and then fills it with zeros.
            moved.zero_() if part.is_meta else moved.copy_(part)
            parts.append(moved)
        put(ref, tensor, parts)
        del tensor, part  # the memory of this one is free before the next is read
    trim_heap()
    return flat


def scattered(refs: Sequence[WeightRef], layout: Layout) -> ScatteredBuffer:
    """Wrap the tensors as a flat buffer in pieces; nothing moves."""
    pieces = []
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        parts = parts_of(tensor)
        if any(part.is_meta for part in parts):  # as in `into_flat`
            parts = [torch.zeros_like(part, device="cpu") if part.is_meta else part for part in parts]
            ref.table[ref.attribute] = with_parts(tensor, parts)
        pieces += parts
    return ScatteredBuffer(layout, tuple(pieces))


def leave_flat(
    held: Iterable[tuple[WeightRef, Tensor]], leaves: Callable[[WeightRef, Tensor], bool], put: Put = point_at
) -> None:
    """Give tensors that lie over a flat buffer memory of their own; the buffer is freed when the last has left it.

    leaves(place, part): whether this part of the tensor leaves. put: as in `into_flat`.
    """
    for ref, tensor in held:
        parts = parts_of(tensor)
        leaving = [leaves(ref, part) for part in parts]
        if any(leaving):
            # Ordinary tensors, as `with_parts` makes of what it is given.
            with torch.inference_mode(False):
                own = [part.clone() if leaves_ else part for part, leaves_ in zip(parts, leaving, strict=True)]
            put(ref, tensor, own)
