"""Counter of what a block's ops give, as it runs eagerly: what checkpointing may keep of it."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .checkpointing import attention_ops, matmul_ops


class ResultBytes(TorchDispatchMode):
    """Context that counts ops.

    attention: bytes of attention's results (also its log-sum-exp), which selective checkpointing always keeps.
    products: bytes of the results of matrix products, of which it keeps a part.
    moved: bytes that all other ops read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.products = self.moved = 0
        self._attention, self._products = attention_ops(), matmul_ops()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        made = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
        if op in self._attention:
            self.attention += sum(map(_bytes, made))
        elif op in self._products:
            self.products += sum(map(_bytes, made))
        else:
            read = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
            if op._schema.is_mutable or not _shared(made, read):
                self.moved += sum(map(_bytes, (*read, *made)))
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shared(made: list[Tensor], read: list[Tensor]) -> bool:
    """Return True where what was made is a view of what was read."""
    places = {tensor.untyped_storage()._cdata for tensor in read}
    return any(tensor.untyped_storage()._cdata in places for tensor in made)
