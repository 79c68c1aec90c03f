"""Count the bytes of a block's op results in eager mode, which checkpointing may save."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .checkpointing import attention_ops, matmul_ops


class ResultBytes(TorchDispatchMode):
    """Dispatch mode that counts bytes.

    attention: results of attention (including its log-sum-exp), which selective checkpointing always saves.
    products: results of matmuls, of which it saves a part.
    other_bytes: bytes that all other ops read and write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.products = self.other_bytes = 0
        self._attention, self._products = attention_ops(), matmul_ops()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        results = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
        if op in self._attention:
            self.attention += sum(map(_bytes, results))
        elif op in self._products:
            self.products += sum(map(_bytes, results))
        else:
            read = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
            if op._schema.is_mutable or not _is_view(results, read):
                self.other_bytes += sum(map(_bytes, (*read, *results)))
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_view(results: list[Tensor], read: list[Tensor]) -> bool:
    """Return True if a result is a view of a tensor that was read."""
    places = {tensor.untyped_storage()._cdata for tensor in read}
    return any(tensor.untyped_storage()._cdata in places for tensor in results)
