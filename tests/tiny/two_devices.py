"""A CPU as two devices: what waits for the device, and what goes there, can be counted without a GPU.

Tensors that `put` was told of lie on the device, and so does whatever is computed from them or made there by name; all
others lie on the host. Where a GPU would raise or copy behind one's back, the op is kept too.
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
    """reads: the ops by which the host waited for the device. moved: tensors that were moved to the device. mixed: ops
    that had tensors of both, such as a copy of one to the other; a number, which goes along with the kernel, and
    a tensor of no elements, which has no address, are no part of it."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.moved = 0
        self.mixed: Counter[str] = Counter()
        self._held: dict[int, Any] = {}  # by address; held, so that no address is used again

    def put(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr():
                self._held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()

    def let_go(self, tensor: Tensor) -> None:
        self._held.pop(tensor.untyped_storage().data_ptr(), None)

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in self._held

    def put_weights_of(self, trainer: Any) -> None:
        """Put there what a run has on the device before its first step; it moves its batches there by name."""
        trainer.device = trainer.batches.device = DEVICE
        self.put(trainer.network.parameters())
        self.put(tensor for group in trainer.network.flat for tensor in (group.gradient, group.cast))
        self.put(tensor for module in trainer.placed.transformer.frozen_modules() for tensor in module.buffers())
        if trainer.placed.swap is not None:
            self.put(trainer.placed.swap.ring.slots)
        if trainer.learner.average is not None:
            self.put(trainer.learner.average.master_weights.values())

    @contextmanager
    def watched(self) -> Iterator["TwoDevices"]:
        grouped = clip_grad._group_tensors_by_device_and_dtype

        def by_device(lists: Any) -> Any:  # which finds the device out in C++
            groups = grouped(lists).items()
            return {(DEVICE if self.holds(held[0][0]) else d, dtype): (held, i) for (d, dtype), (held, i) in groups}

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
        there = [devices.holds(t) for t in tensors]
        if any(there):
            packet, name = func.overloadpacket, func.overloadpacket.__name__
            if packet in READS or (packet is _aten.index and any(t.dtype == torch.bool for t in tensors[1:])):
                devices.reads[name] += 1
            elif any(
                not at and t.numel() and (t.dim() or packet is _aten.copy_)
                for t, at in zip(tensors, there, strict=True)
            ):
                devices.mixed[name] += 1
        with torch._C.DisableTorchFunction():  # modes that watch functions have seen this one
            made = func(*args, **kwargs)
        # In a backward autograd makes the zeros of outputs that nothing has used, in C++.
        if any(there) or (not tensors and torch._C._current_graph_task_id() != -1):
            devices.put(tree_leaves(made))
        return made


class _Calls(TorchFunctionMode):
    """Stand-ins for what no op tells: a tensor's device, copies between devices, numbers that are read in one go."""

    def __init__(self, devices: TwoDevices):
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, devices = kwargs or {}, self.devices
        held = bool(args) and devices.holds(args[0])
        if func == Tensor.device.__get__ and held:
            return DEVICE
        given = [*args[1:], *kwargs.values()]
        named = [torch.device(a) for a in given if isinstance(a, torch.device) or (isinstance(a, str) and a == "cpu")]
        if func is Tensor.to:
            named += [DEVICE if devices.holds(a) else a.device for a in args[1:] if isinstance(a, Tensor)]
        if func is Tensor.to and named and (named[0] == DEVICE) != held:
            return self._moved(func(args[0].clone(), *args[1:], **kwargs), held)
        made = func(*args, **kwargs)
        if held and func in TO_HOST:
            devices.reads[TO_HOST[func]] += 1
        if DEVICE in named:
            devices.put(tree_leaves(made))
        return made

    def _moved(self, made: Tensor, from_there: bool) -> Tensor:
        """made: a copy, as on two devices; both lie in RAM, where torch would give the same tensor."""
        if from_there:
            self.devices.reads["to"] += 1
            self.devices.let_go(made)
        else:
            self.devices.moved += 1
            self.devices.put([made])
        return made
