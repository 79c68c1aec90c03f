"""Tensors that this process holds, counted by tests that look for memory left behind."""

import gc
import weakref

import torch
from tessera.memory.host.flat_weights import parts_of
from torch._subclasses import FakeTensor


def tensors() -> list[torch.Tensor]:
    """Return all tensors that Python's garbage collector tracks, except fake and meta ones. Proxies are not resolved:
    their referent may be gone."""
    gc.collect()
    objects = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [tensor for tensor in objects if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"]


def size_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    storages = [part.untyped_storage() for tensor in tensors for part in parts_of(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Since:
    """The tensors made from here on. What earlier tests have left may go meanwhile, and is not looked at."""

    def __init__(self) -> None:
        # By their addresses, as a tensor is compared number by number; alive, none of them can be taken for a new one.
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in tensors()}

    def __call__(self) -> list[torch.Tensor]:
        return [t for t in tensors() if (old := self._earlier.get(id(t))) is None or old() is not t]
