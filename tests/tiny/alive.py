"""Tensors that this process holds, counted by tests that look for memory left behind."""

import gc
import weakref

import torch
from tessera.memory.host.flat_weights import parts_of
from torch._subclasses import FakeTensor


def tensors() -> list[torch.Tensor]:
    """All that Python's collector knows, but for those that have no numbers. A proxy is not asked what it stands for:
    that may be gone."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [tensor for tensor in found if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"]


def size_of(found: list[torch.Tensor]) -> int:
    """Each memory once."""
    storages = [part.untyped_storage() for tensor in found for part in parts_of(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Since:
    """The tensors made from here on. What earlier tests have left may go meanwhile, and is not looked at."""

    def __init__(self) -> None:
        # By their addresses, as a tensor is compared number by number; alive, none of them can be taken for a new one.
        self._before = {id(tensor): weakref.ref(tensor) for tensor in tensors()}

    def __call__(self) -> list[torch.Tensor]:
        return [t for t in tensors() if (old := self._before.get(id(t))) is None or old() is not t]
