"""Flat weights: the weights of a block in one flat host buffer, to which the block's own modules point.

There is no registry of flat weights: the modules' tensors are the host copies, and the flat buffer is found through
them. So several MODELs over one base share it, and it is freed with the last tensor over it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...common.gguf_tensor import as_stored, is_gguf, with_memory
from .flat_buffer import ALIGNMENT, Layout, ScatteredBuffer, empty_bytes, trim_heap

SMALL_PART = 64  # tensors below a 64th of their block's bytes are small: a bias, a norm, a scale


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


# Callback that installs a tensor's parts in new memory: (reference, tensor, new parts).
Put = Callable[[WeightRef, Tensor, list[Tensor]], object]


def weight_refs(name: str, block: nn.Module) -> list[WeightRef]:
    """List references to the block's tensors without holding the tensors, so each can be freed after its move."""
    return [
        WeightRef(f"{path}.{attribute}", module, table, attribute)
        for path, module in block.named_modules(prefix=name)
        for table in (module._parameters, module._buffers)
        for attribute, tensor in table.items()
        if tensor is not None
    ]


def plain_tensors(refs: Sequence[WeightRef]) -> Iterator[tuple[str, Tensor]]:
    """Yield each plain tensor, named by its weight's key and its index among the weight's parts."""
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        for i, part in enumerate(parts_of(tensor)):
            yield f"{ref.key}/{i}", part


def parts_of(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors of a weight: itself, or the parts of a quantised one."""
    if is_gguf(tensor):
        return [as_stored(tensor)]
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.data]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two weights share the same memory with equal dtype, shape and strides."""
    return _lies(tensor) == _lies(other)


def _lies(tensor: Tensor) -> list[Any]:
    return [(p.device, p.data_ptr(), p.dtype, p.shape, p.stride()) for p in parts_of(tensor)]


def with_parts(tensor: Tensor, parts: list[Tensor]) -> Tensor:
    """Make a tensor of the same class over other parts.

    Plain ones become ordinary tensors, as compiled code guards on inference tensors. A quantised one keeps its kind, as
    ComfyUI moves it under inference mode, which fails for an ordinary one.
    """
    if is_traceable_wrapper_subclass(tensor):
        return _rewrapped(tensor, parts, tensor.is_inference())
    with torch.inference_mode(False):
        if is_gguf(tensor):
            return with_memory(tensor, parts[0])
        rebuilt = _unflatten(tensor, iter(parts))
        return nn.Parameter(rebuilt, requires_grad=False) if isinstance(tensor, nn.Parameter) else rebuilt


def _rewrapped(tensor: Tensor, parts: list[Tensor], inference: bool) -> Tensor:
    """Make a quantised weight over other parts, under inference mode or outside it."""
    with torch.inference_mode(inference):
        rebuilt = _unflatten(tensor, iter(parts))
        # As `nn.Parameter` does for tensor subclasses, but without its `detach`, in which a quantised tensor copies its
        # scales; they have to remain the given parts.
        rebuilt._is_param = isinstance(tensor, nn.Parameter)  # type: ignore[attr-defined]
        return rebuilt


def restore_inference_mode(model: nn.Module) -> None:
    """Make quantised weights inference tensors again, as a loader node makes them, over the same memory.

    Call it while the model is not loaded. Unloading a MODEL outside inference mode (ComfyUI's own Unload Models,
    between two prompts) leaves ordinary copies of them. Nodes sample under inference mode, in which `nn.Parameter`
    rejects such copies, and ComfyUI wraps each weight in it again on a move to the device that already holds it
    (comfy/ops.py, _quantized_apply): the CPU, or the GPU with --gpu-only. So a load with a LoRA on other weights, and
    the following unload, would fail.
    """
    for ref in weight_refs("", model):
        tensor = ref.tensor()
        if tensor is not None and is_traceable_wrapper_subclass(tensor) and not tensor.is_inference():
            ref.table[ref.attribute] = _rewrapped(tensor, parts_of(tensor), inference=True)


def _unflatten(tensor: Tensor, parts: Iterator[Tensor]) -> Tensor:
    if not is_traceable_wrapper_subclass(tensor):
        return next(parts)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _unflatten(getattr(tensor, name), parts) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def shared_flat(refs: Sequence[WeightRef], layout: Layout, keep: Collection[str] = ()) -> Tensor | None:
    """Return the flat buffer of this layout that already contains all these tensors, or None.

    Scales of quantised weights may have been copied out of it, as ComfyUI's moves do; they are copied back in.
    keep: keys of tensors that another node has put in temporarily; the buffer belongs to the tensors they replace.
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
        same_storage = part.device == first.device and part.untyped_storage().data_ptr() == storage.data_ptr()
        if same_storage and part.data_ptr() == start + field.offset:
            continue
        if part.nbytes > ALIGNMENT:
            return None
        outside.append((field, part))
    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (layout.size,), (1,))
    for field, part in outside:
        field.tensor_in(flat).copy_(part)
    return flat


def point_at(ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> None:
    """Point the module that owns `tensor` at the same weight over `parts`."""
    ref.table[ref.attribute] = with_parts(tensor, parts)


def into_flat(
    refs: Sequence[WeightRef], layout: Layout, pinned: bool, put: Put = point_at, later: bool = False
) -> Tensor:
    """Move the tensors into one flat buffer on the host; each is freed before the next is read.

    put(ref, tensor, parts): called for each with its parts in the buffer.
    later: the buffer is to be page-locked by `Locking`.
    """
    flat = empty_bytes(layout.size, torch.device("cpu"), pinned, later)
    fields = iter(layout.fields)
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        parts = []
        for part in parts_of(tensor):
            target = next(fields).tensor_in(flat)
            # ComfyUI leaves weights missing from the file on the meta device until the load, which fills in zeros.
            target.zero_() if part.is_meta else target.copy_(part)
            parts.append(target)
        put(ref, tensor, parts)
        del tensor, part  # free this one's memory before the next is read
    trim_heap()
    return flat


def scattered(refs: Sequence[WeightRef], layout: Layout) -> ScatteredBuffer:
    """Wrap the tensors as a scattered buffer, without moving them."""
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
    weights: Iterable[tuple[WeightRef, Tensor]], leaves: Callable[[WeightRef, Tensor], bool], put: Put = point_at
) -> None:
    """Copy tensors out of a flat buffer into memory of their own; the buffer is freed with its last tensor.

    leaves(ref, part): whether to copy this part of the tensor out. put: as in `into_flat`.
    """
    for ref, tensor in weights:
        parts = parts_of(tensor)
        leaving = [leaves(ref, part) for part in parts]
        if any(leaving):
            # Ordinary tensors, as `with_parts` makes.
            with torch.inference_mode(False):
                own_parts = [
                    part.clone() if is_leaving else part for part, is_leaving in zip(parts, leaving, strict=True)
                ]
            put(ref, tensor, own_parts)


class BlockWeights:
    """The weights of some blocks of one model, in the order of the forward.

    blocks: the modules by their names in the MODEL's state dict, such as diffusion_model.single_blocks.3.
    refs: references to the tensors of each block.
    layouts: of each block's flat buffer.
    keys: names of all these tensors in the MODEL's state dict.
    modules: identities of all modules of the blocks.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self.blocks = dict(blocks)
        self.refs = [weight_refs(name, block) for name, block in self.blocks.items()]
        self.layouts = [Layout.from_tensors(plain_tensors(refs)) for refs in self.refs]
        self.keys = {ref.key for refs in self.refs for ref in refs}
        self.modules = {id(module) for block in self.blocks.values() for module in block.modules()}

    @property
    def quantised(self) -> bool:
        """Return whether a weight consists of several tensors."""
        return any(len(layout.fields) > len(refs) for layout, refs in zip(self.layouts, self.refs, strict=True))

    def largest(self) -> int:
        """Return the bytes of the largest flat buffer."""
        return max(layout.size for layout in self.layouts)


class HostBuffers:
    """Host memory from which blocks stream: flat buffers, or the tensors themselves as scattered ones.

    pinned: flat buffers are page-locked, as long as the system grants it.
    from_file: the tensors stay where they are, in the mapped file.
    """

    def __init__(self, weights: BlockWeights, pinned: bool, from_file: bool):
        self.weights = weights
        self.pinned = pinned
        self.from_file = from_file
        self._in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stream the tensors from their present host memory within the context, as a training run holds them."""
        self._in_place = True
        try:
            yield
        finally:
            self._in_place = False

    def collect(self, replaced: Collection[str]) -> tuple[list[Tensor | ScatteredBuffer], int]:
        """Return a buffer for each block, and the number of those that could not be page-locked.

        replaced: keys of tensors that another node has put in temporarily; the modules keep those.
        """
        buffers = [
            self._collect(refs, layout, replaced)
            for refs, layout in zip(self.weights.refs, self.weights.layouts, strict=True)
        ]
        if not self.pinned or self._in_place:
            return buffers, 0
        refused = sum(not buffer.is_pinned() for buffer in buffers)
        self.pinned = not refused
        return buffers, refused

    def _collect(self, refs: list[WeightRef], layout: Layout, replaced: Collection[str]) -> Tensor | ScatteredBuffer:
        if self.from_file:
            return scattered(refs, layout)
        flat = shared_flat(refs, layout, replaced)
        if self._in_place:
            return scattered(refs, layout) if flat is None else flat
        if flat is None or (self.pinned and not flat.is_pinned()):
            return into_flat(refs, layout, self.pinned, _point_at_but(replaced))
        return flat


def _point_at_but(replaced: Collection[str]) -> Put:
    """Return `point_at` for all keys except those that another node has replaced temporarily."""

    def put(ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> None:
        if ref.key not in replaced:
            point_at(ref, tensor, parts)

    return put
