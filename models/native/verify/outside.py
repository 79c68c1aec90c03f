"""Refusal to compute with a swapped block's tensors while it does not run: its slot may hold those of another block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..forward.blocks import NativeBlock, flatten

# Names in torch of what doesn't need a tensor's values.
_VALUELESS = frozenset(
    {
        *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "itemsize", "nbytes"),
        *("size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "element_size"),
    }
)


class UnloadedTensor(Tensor):
    """A tensor of a block that does not run: whatever needs its values raises ValueError.

    place: its name in its block, and the block's.
    """

    place: tuple[str, str]

    @classmethod
    def standing_for(cls, tensor: Tensor, name: str, block: str) -> "UnloadedTensor":
        """Make the stand-in for a tensor. name: in its block."""
        unloaded = tensor.as_subclass(cls)
        unloaded.place = name, block
        return unloaded

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = function.__self__ if function.__name__ == "__get__" else function
        if attribute.__name__ in _VALUELESS:
            return super().__torch_function__(function, types, args, kwargs)
        tensors, _ = flatten(args, kwargs or {}, samples=1)
        name, block = next(tensor for tensor in tensors if isinstance(tensor, UnloadedTensor)).place
        raise ValueError(
            f"blocks_to_swap can't be used with this model: its {name} is read while its block {block} does not run, "
            "so that it could be that of another block; set blocks_to_swap to 0."
        )


class Unloaded:
    """Context in which the tensors of these blocks, other than their layers' own, can be read only while `loaded`."""

    def __init__(self, blocks: Sequence[NativeBlock]):
        self._tables = {block.name: [module._buffers for module in block.tensors] for block in blocks}
        self._stored = {name: [dict(table) for table in tables] for name, tables in self._tables.items()}
        self._unloaded = {block.name: [_unloaded(block.name, module) for module in block.tensors] for block in blocks}

    def __enter__(self) -> "Unloaded":
        for name in self._tables:
            self._write(name, self._unloaded)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._tables:
            self._write(name, self._stored)

    @contextmanager
    def loaded(self, block: NativeBlock) -> Iterator[None]:
        """Give a block its tensors within the context."""
        if block.name not in self._tables:
            yield
            return
        self._write(block.name, self._stored)
        try:
            yield
        finally:
            self._write(block.name, self._unloaded)

    def _write(self, name: str, contents: dict[str, list[dict[str, Any]]]) -> None:
        for table, content in zip(self._tables[name], contents[name], strict=True):
            table.update(content)


def _unloaded(block: str, module: Any) -> dict[str, Tensor | None]:
    """Make the stand-ins for the tensors of one module of a block. module: a `SharedTensors`."""
    tensors: dict[str, Tensor | None] = {}
    for name, tensor in module._buffers.items():
        if tensor is not None:
            name_in_block = f"{module.prefix}.{name}".removeprefix(f"{block}.")
            tensors[name] = UnloadedTensor.standing_for(tensor, name_in_block, block)
    return tensors
