"""Weights that stay in the memory-mapped file they were loaded from.

ComfyUI copies a file's weights into memory of its own unless dynamic VRAM is on. Where that memory is short, weights
that need no conversion can stay where they are: the system brings their pages in when they are read, and drops them
again when it needs the memory.
"""

import ctypes
import logging
import re
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...common.core import lazy_loading_code
from ...common.processes import processes_here
from .flat_weights import WeightRef, parts_of, weight_refs, with_parts
from .pinning import RESERVED_RAM

log = logging.getLogger(__name__)

KEY = "tessera.weights_in_file"
# address range, permissions, offset, device, inode, path: proc_pid_maps(5)
LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ ([1-9]\d*) +(/.*)")
NOT_FILES = ("/dev/", "/memfd:", "/SYSV")
MEM_MAPPED = 0x40000  # of VirtualQuery: a view of a file


class FileMaps:
    """Snapshot of the memory ranges that are mapped files; empty on a system that can't be asked."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        if sys.platform == "linux":
            found = (LINE.match(line) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines())
            for match in found:  # in the order of addresses
                if match is not None and not match[4].startswith(NOT_FILES):
                    self.starts.append(int(match[1], 16))
                    self.ends.append(int(match[2], 16))

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a plain tensor lies in a mapped file."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return False
        address = tensor.data_ptr()
        if sys.platform == "win32":
            return _is_view_of_file(address)
        i = bisect_right(self.starts, address) - 1
        return i >= 0 and address < self.ends[i]


class _Region(ctypes.Structure):
    """MEMORY_BASIC_INFORMATION of Windows."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("allocation", ctypes.c_void_p),
        ("protected_at_first", ctypes.c_uint32),
        ("size", ctypes.c_size_t),
        ("state", ctypes.c_uint32),
        ("protected", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
    )


def _is_view_of_file(address: int) -> bool:
    region = _Region()
    query = ctypes.windll.kernel32.VirtualQuery  # type: ignore[attr-defined]
    query.argtypes, query.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
    asked = query(address, ctypes.byref(region), ctypes.sizeof(region))
    return bool(asked) and region.type == MEM_MAPPED


def bytes_in_file(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of these tensors that lie in a mapped file."""
    maps = FileMaps()
    return sum(part.nbytes for tensor in tensors for part in parts_of(tensor) if maps.holds(part))


class MappedWeights:
    """Weights that lie in a mapped file until ComfyUI moves them to the device.

    Restored, they lie there again, and no copy on the host takes their place. Keys are names in the MODEL's state dict.
    """

    def __init__(self, refs: Iterable[WeightRef]):
        maps = FileMaps()
        held = [(ref, parts_of(tensor)) for ref in refs if (tensor := ref.tensor()) is not None]
        self.held = {ref.key: (ref, parts) for ref, parts in held if maps.holds(parts[0])}

    def __contains__(self, key: str) -> bool:
        return key in self.held

    def __len__(self) -> int:
        return len(self.held)

    def restore(self, replaced: Collection[str], only: str | None = None) -> None:
        """Point the modules at the file's memory again.

        replaced: keys of those that are patched at present, say, and stay. only: restrict to weights on devices of this
        type.
        """
        for key, (ref, parts) in self.held.items():
            tensor = ref.tensor()
            if tensor is None or key in replaced or (only is not None and tensor.device.type != only):
                continue
            if is_traceable_wrapper_subclass(tensor):
                ref.table[ref.attribute] = with_parts(tensor, parts)
            else:
                tensor.data = parts[0]

    def drop_replaced(self, replaced: Collection[str]) -> None:
        """Drop weights in whose place another node has put its own for good; they are never restored."""
        for key, (ref, parts) in list(self.held.items()):
            tensor = ref.tensor()
            moved = tensor is not None and (tensor.device.type != "cpu" or key in replaced)
            if not moved and (tensor is None or parts_of(tensor)[0].data_ptr() != parts[0].data_ptr()):
                del self.held[key]

    def copy_out(self, key: str) -> None:
        """Give this weight memory of its own, if it lies in the file now."""
        ref, parts = self.held.get(key, (None, []))
        tensor = None if ref is None else ref.tensor()
        if ref is not None and tensor is not None and parts_of(tensor)[0].data_ptr() == parts[0].data_ptr():
            ref.table[ref.attribute] = with_parts(tensor, [part.clone() for part in parts])


class KeepMapped(TorchFunctionMode):
    """Mode in which ComfyUI loads a file without copying it.

    Weights take the file's memory wherever a copy would hold the same bytes. Core does so itself under dynamic VRAM
    (`load_state_dict(assign=True)`), and has no option for it elsewhere. A way of loading that is not known is told in
    the log, since it takes the memory of a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: FileMaps | None = None
        self.lazy_loading = lazy_loading_code()
        self.kept, self.copied = 0, 0  # bytes

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if (sentence := self.message()) is not None and error[0] is None:
            log.warning(sentence)

    def message(self) -> str | None:
        """Return a sentence for the user where no more than small weights stayed in the file, else None."""
        if self.copied <= self.kept:
            return None
        return (
            "This ComfyUI loads the model's weights in an unknown way, so they can't be read from the file as "
            f"needed: they take {self.copied / 2**30:.2f} GB of RAM. If that's too much, start ComfyUI with "
            "--disable-dynamic-vram."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and type(args[0]) is nn.Parameter and self._can_stay(args[-1], args[0]):
            args[0].data = args[-1]
            self.kept += args[-1].nbytes
            return args[0]
        # A Linear that was made while dynamic VRAM is on has no memory yet and clones the file's weight.
        if func is torch.Tensor.clone and sys._getframe(1).f_globals.get("__name__") == "comfy.ops":
            if self._can_stay(args[0], args[0]):
                if sys._getframe(1).f_code is self.lazy_loading:
                    self.kept += args[0].nbytes
                    return args[0]
                self.copied += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def _can_stay(self, source: Any, into: Tensor) -> bool:
        if type(source) is not Tensor or into.device.type != "cpu" or not source.is_contiguous():
            return False
        if (source.dtype, source.shape) != (into.dtype, into.shape):
            return False
        if self.maps is None:  # the file was mapped before its first weight is loaded
            self.maps = FileMaps()
        return self.maps.holds(source)


def copy_into_ram(model: nn.Module) -> None:
    """Copy the weights that `KeepMapped` has left in the file into memory, unless that is short.

    Nor where several processes of this machine train together: all of them read the file's pages, which are there once.
    """
    if processes_here() > 1:
        return
    needed = bytes_in_file(model.parameters())
    if psutil.virtual_memory().available < needed + RESERVED_RAM or not needed:
        return
    maps = FileMaps()
    for ref in weight_refs("", model):
        tensor = ref.tensor()
        assert tensor is not None
        lying = [(part, maps.holds(part)) for part in parts_of(tensor)]
        if not any(inside for _, inside in lying):
            continue
        parts = [part.clone() if inside else part for part, inside in lying]
        if is_traceable_wrapper_subclass(tensor):
            ref.table[ref.attribute] = with_parts(tensor, parts)
        else:  # which may stand in several places
            tensor.data = parts[0]


def protect_from_hooks(patcher: ModelPatcher) -> None:
    """Copy weights out of the file before a hook of this MODEL or of its clones writes into them.

    ComfyUI writes what a hook does to a weight into the weight, also on the host, and a file's memory can't be written.
    """
    if bytes_in_file(patcher.model.parameters()) and not patcher.get_callbacks(
        CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, KEY
    ):
        patcher.add_callback_with_key(CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, KEY, _leave_hooked)


def _leave_hooked(patcher: Any, *_: Any) -> None:
    swap = getattr(patcher, "swap", None)  # of a SwapPatcher
    if swap is not None and swap.rest:  # each leaves when it is written
        return
    keys = {key for patches in patcher.hook_patches.values() for key in patches}
    keys -= swap.keys if swap is not None else set()  # these are patched in their slots
    held = MappedWeights(ref for ref in weight_refs("", patcher.model) if ref.key in keys)
    for key in held.held:
        held.copy_out(key)
