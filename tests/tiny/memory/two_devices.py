"""A CPU as two devices, to count waits for the device and copies to it without a GPU.

Tensors passed to `put` are on the device, and so is everything computed from them or made there by name; all others are
on the host. Ops that would raise or copy implicitly on a GPU are recorded too.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
"""The device by name. torch takes it for the CPU, and tells it from torch.device("cpu")."""

_aten = torch.ops.aten
# Their results, or the sizes of these, are numbers on the host. An index by a mask is counted as `index`.
READS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.equal, _aten.is_nonzero}
READS |= {_aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.repeat_interleave, _aten.bincount}
TO_HOST = {Tensor.tolist: "tolist", Tensor.cpu: "cpu", Tensor.numpy: "numpy"}


class TwoDevices:
    """reads: the ops by which the host waited for the device. moved_count: tensors that were moved to the device.
    mixed: ops that had tensors of both, such as a copy of one to the other; a number, which goes along with the kernel,
    and a tensor of no elements, which has no address, are no part of it."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.moved_count = 0
        self.mixed: Counter[str] = Counter()
        self._storages: dict[int, Any] = {}  # by address; held, so that no address is used again

    def put(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr():
                self._storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()

    def let_go(self, tensor: Tensor) -> None:
        self._storages.pop(tensor.untyped_storage().data_ptr(), None)

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self._storages

    def put_weights_of(self, trainer: Any) -> None:
        """Put the tensors of a run that are on the device before its first step; it moves its batches there by name."""
        trainer.placed.weights.device = trainer.train_step.batches.device = DEVICE
        self.put(trainer.network.parameters())
        self.put(tensor for group in trainer.network.flat for tensor in (group.gradient, group.cast))
        self.put(
            tensor for module in trainer.placed.weights.transformer.frozen_modules() for tensor in module.buffers()
        )
        if trainer.placed.weights.swap is not None:
            self.put(trainer.placed.weights.swap.ring.slots.tensors)
        if trainer.learner.average is not None:
            self.put(trainer.learner.average.master_weights.values())

    @contextmanager
    def watched(self) -> Iterator["TwoDevices"]:
        grouped = clip_grad._group_tensors_by_device_and_dtype

        def by_device(lists: Any) -> Any:  # which finds the device out in C++
            groups = grouped(lists).items()
            return {
                (DEVICE if self.holds(lists_of_group[0][0]) else d, dtype): (lists_of_group, i)
                for (d, dtype), (lists_of_group, i) in groups
            }

        clip_grad._group_tensors_by_device_and_dtype = by_device
        try:
            with _Ops(self), _Calls(self):
                yield self
        finally:
            clip_grad._group_tensors_by_device_and_dtype = grouped


class _Ops(TorchDispatchMode):
    def __init__(self, devices: TwoDevices):
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, devices = kwargs or {}, self.devices
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        are_on_device = [devices.holds(t) for t in tensors]
        if any(are_on_device):
            packet, name = func.overloadpacket, func.overloadpacket.__name__
            if packet in READS or (packet is _aten.index and any(t.dtype == torch.bool for t in tensors[1:])):
                devices.reads[name] += 1
            elif any(
                not is_on_device and t.numel() and (t.dim() or packet is _aten.copy_)
                for t, is_on_device in zip(tensors, are_on_device, strict=True)
            ):
                devices.mixed[name] += 1
        with torch._C.DisableTorchFunction():  # modes that watch functions have seen this one
            result = func(*args, **kwargs)
        # In a backward autograd makes the zeros of outputs that nothing has used, in C++.
        if any(are_on_device) or (not tensors and torch._C._current_graph_task_id() != -1):
            devices.put(tree_leaves(result))
        return result


class _Calls(TorchFunctionMode):
    """Stand-ins for calls without an op: a tensor's device, copies between devices, numbers that are read in one go."""

    def __init__(self, devices: TwoDevices):
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, devices = kwargs or {}, self.devices
        is_on_device = bool(args) and devices.holds(args[0])
        if func == Tensor.device.__get__ and is_on_device:
            return DEVICE
        arguments = [*args[1:], *kwargs.values()]
        devices_named = [
            torch.device(a) for a in arguments if isinstance(a, torch.device) or (isinstance(a, str) and a == "cpu")
        ]
        if func is Tensor.to:
            devices_named += [DEVICE if devices.holds(a) else a.device for a in args[1:] if isinstance(a, Tensor)]
        if func is Tensor.to and devices_named and (devices_named[0] == DEVICE) != is_on_device:
            return self._move(func(args[0].clone(), *args[1:], **kwargs), is_on_device)
        result = func(*args, **kwargs)
        if is_on_device and func in TO_HOST:
            devices.reads[TO_HOST[func]] += 1
        if DEVICE in devices_named:
            devices.put(tree_leaves(result))
        return result

    def _move(self, copy: Tensor, from_there: bool) -> Tensor:
        """copy: as on two devices; both are in RAM, for which torch would return the same tensor."""
        if from_there:
            self.devices.reads["to"] += 1
            self.devices.let_go(copy)
        else:
            self.devices.moved_count += 1
            self.devices.put([copy])
        return copy
