"""Way of a batch to a GPU, told by the calls: page-locked first, then a copy that is not waited for."""

import logging
from typing import Any

import pytest
import torch
from tessera.memory.host.to_device import to_device
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)


class Gpu(TorchFunctionMode):
    """Stands for a GPU: notes what is asked of it, and gives the host's tensor back."""

    def __init__(self, locks: bool = True) -> None:
        super().__init__()
        self.locks = locks
        self.requests: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            self.requests.append("pin_memory")
            if not self.locks:
                raise RuntimeError("CUDA error: out of memory")
            return args[0].clone()
        if func is Tensor.to:
            self.requests.append((args[0].is_contiguous(), args[1:], kwargs))
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("locks", [True, False])
def test_a_tensor_goes_through_page_locked_memory_without_being_waited_for(locks, caplog) -> None:
    tensor = torch.arange(12).reshape(3, 4).T
    with Gpu(locks) as gpu, caplog.at_level(logging.WARNING):
        result = to_device(tensor, CUDA)
    assert gpu.requests == ["pin_memory", (True, (CUDA,), {"non_blocking": True})]
    assert torch.equal(result, tensor)
    assert ("96 bytes of a batch could not be page-locked" in caplog.text) is not locks


def test_weights_without_a_gpu_are_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
