"""Simulate streams of a GPU on the CPU, to test the order of copies: each copy runs as late as its events allow, and
earlier reads find other bytes.

Reads and writes of the computing thread are logged by storage. A copy on a stream that has not waited for the last
access to its memory is an error, as a GPU might run it before that; and so is one whose memory was freed while it was
under way. A wait can be left out by its place in the code, to show that it is needed.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

POISON = 0xFF  # in fp32 and bf16 a NaN


class WrongOrder(AssertionError):
    pass


@dataclass
class Device:
    """State that its streams share. sites: the places in the code that wait for anything; without: those that don't, in
    this test. deferred: how many copies came later than they were asked for."""

    omitted: str | None = None
    sites: set[str] = field(default_factory=set)
    deferred: int = 0
    position: int = 0  # of the computing thread
    last: dict[int, int] = field(default_factory=dict)  # of each storage, the position of its last access
    copies: threading.local = field(default_factory=threading.local)  # stream state of each thread
    sides: "list[Side]" = field(default_factory=list)

    def waits(self) -> bool:
        frame = sys._getframe(2)
        site = f"{type(frame.f_locals['self']).__name__}.{frame.f_code.co_name}"
        self.sites.add(site)
        return site != self.omitted

    def finish(self) -> None:
        """Make all copies that are under way still."""
        for side in self.sides:
            side.run(len(side.queue))

    def access(self, tensors: list[Tensor]) -> None:
        self.position += 1
        for tensor in tensors:
            self.last[_storage(tensor)] = self.position


@dataclass(frozen=True)
class Event:
    stream: Any
    position: int

    def synchronize(self) -> None:
        if self.stream.device.waits():
            self.stream.run(self.position)


class Computing:
    """The stream of the thread that computes, which is never behind."""

    def __init__(self, device: Device):
        self.device = device

    def record_event(self) -> Event:
        return Event(self, self.device.position)

    def run(self, position: int) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        if self.device.waits():
            event.stream.run(event.position)


class Side:
    """A stream of copies."""

    def __init__(self, device: Device):
        self.device = device
        self.queue: list[Callable[[], Any] | None] = []
        self.completed = self.awaited = 0
        self.lock = threading.RLock()
        device.sides.append(self)

    def run(self, position: int) -> None:
        with self.lock, _disable_current_modes():
            while self.completed < position:
                copy, self.queue[self.completed] = self.queue[self.completed], None
                self.completed += 1
                assert copy is not None
                copy()

    def synchronize(self) -> None:
        if self.device.waits():
            self.run(len(self.queue))

    def record_event(self) -> Event:
        copies: _Copies = self.device.copies.current
        if copies.followed:
            with self.lock, _disable_current_modes():
                self._show_late(copies.targets)
        return Event(self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        if self.device.waits():
            self.awaited = max(self.awaited, event.position)

    def wait_stream(self, other: Computing) -> None:
        if self.device.waits():
            self.awaited = max(self.awaited, other.record_event().position)

    def copy(self, target: Tensor, source: Tensor) -> None:
        for tensor in (target, source):
            if self.device.last.get(_storage(tensor), 0) > self.awaited:
                raise WrongOrder("a copy starts before what the computation does with its memory")
        destination, out_of = _alias(target), _alias(source)
        _bytes_of(destination).fill_(POISON)
        self.device.deferred += 1
        self.queue.append(partial(self._make, destination, out_of))

    @staticmethod
    def _make(destination: Tensor, out_of: Tensor) -> None:
        for tensor in (destination, out_of):
            if _uses(tensor) <= UNHELD:
                raise WrongOrder("memory is let go while a copy is under way")
        with torch.no_grad():
            destination.copy_(out_of)

    def _show_late(self, targets: list[Tensor]) -> None:
        """Delay the results computed from these on the stream until the events allow them."""
        self.run(len(self.queue))
        for target in targets:
            memory, result = _bytes_of(target), _bytes_of(target).clone()
            memory.fill_(POISON)
            self.device.deferred += 1
            self.queue.append(partial(memory.copy_, result))


class _Computes(TorchDispatchMode):
    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self.device.access([leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)])
        return out


class _Copies(TorchDispatchMode):
    """On a side stream: copies are deferred; what follows them there is made at once and shown late."""

    def __init__(self, side: Side):
        super().__init__()
        self.side = side
        self.targets: list[Tensor] = []
        self.followed = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _disable_current_modes(), self.side.lock:
            if function is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:] == (True,)):
                self.side.copy(args[0], args[1])
                self.targets.append(args[0])
                return args[0]
            if self.targets:  # else a slice of the tensor to copy
                self.side.run(len(self.side.queue))
                self.followed = True
            return function(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alias(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _bytes_of(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        size = tensor.element_size()
        view = torch.empty(0, dtype=torch.uint8)
        return view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (tensor.numel() * size,), (1,))


def _uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


UNHELD = _uses(_alias(torch.empty(1)))  # of a storage that nothing but an alias holds


@contextmanager
def streams(monkeypatch: Any, staged: bool, omitted: str | None = None) -> Iterator[Device]:
    """Let rings and activation offload that are made in here copy as on a GPU. staged: through a staging buffer, else
    from masters that count as page-locked; without: a function that does not wait, such as CopyStream.wait."""
    from tessera.memory.activations import offload
    from tessera.memory.host.staging import CudaLink, StagedStream
    from tessera.memory.swap import slot_ring

    device, cpu = Device(omitted), torch.device("cpu")
    computing, begin = Computing(device), offload.ActivationOffload.__init__

    def stream_of(masters: Any, *_: Any) -> Any:
        if staged:
            return StagedStream(CudaLink(cpu), max(master.numel() for master in masters), pinned=False)
        plain = slot_ring.CopyStream(cpu)
        plain.stream = Side(device)  # type: ignore[assignment]
        return plain

    def begin_offload(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.stream = Side(device)

    @contextmanager
    def use_stream(side: Side) -> Iterator[None]:
        device.copies.current = copies = _Copies(side)
        with copies:
            yield

    with monkeypatch.context() as patch:
        patch.setattr(slot_ring, "staged_stream", stream_of)
        patch.setattr(offload.ActivationOffload, "__init__", begin_offload)
        patch.setattr(torch.cuda, "Stream", lambda *_: Side(device))
        patch.setattr(torch.cuda, "current_stream", lambda *_: computing)
        patch.setattr(torch.cuda, "stream", use_stream)
        with _Computes(device):
            yield device
