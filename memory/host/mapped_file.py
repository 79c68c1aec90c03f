"""Weights that stay in the memory-mapped file they were loaded from.

ComfyUI copies a file's weights into memory of its own unless dynamic VRAM is on. If RAM is short, weights that need no
conversion can stay in the mapping: the system pages them in when they are read, and drops the pages when it needs the
memory.
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
    """Snapshot of the memory ranges of mapped files; empty except on Linux. Windows is queried per address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        if sys.platform == "linux":
            matches = (LINE.match(line) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines())
            for match in matches:  # in the order of addresses
                if match is not None and not match[4].startswith(NOT_FILES):
                    self.starts.append(int(match[1], 16))
                    self.ends.append(int(match[2], 16))

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a plain tensor is in a mapped file."""
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
    bytes_written = query(address, ctypes.byref(region), ctypes.sizeof(region))
    return bool(bytes_written) and region.type == MEM_MAPPED


def bytes_in_file(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of these tensors in mapped files."""
    maps = FileMaps()
    return sum(part.nbytes for tensor in tensors for part in parts_of(tensor) if maps.holds(part))


class MappedWeights:
    """Weights of a MODEL in a mapped file, which ComfyUI moves to the device.

    `restore` points the modules back at the file, so no host copy replaces it. Keys are names in its state dict.
    """

    def __init__(self, refs: Iterable[WeightRef]):
        maps = FileMaps()
        weights = [(ref, parts_of(tensor)) for ref in refs if (tensor := ref.tensor()) is not None]
        self.entries = {ref.key: (ref, parts) for ref, parts in weights if maps.holds(parts[0])}

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __len__(self) -> int:
        return len(self.entries)

    def restore(self, replaced: Collection[str], device_type: str | None = None) -> None:
        """Point the modules at the file's memory again.

        replaced: keys to leave as they are, such as currently patched ones. device_type: restore only weights on
        devices of this type.
        """
        for key, (ref, parts) in self.entries.items():
            tensor = ref.tensor()
            if tensor is None or key in replaced or (device_type is not None and tensor.device.type != device_type):
                continue
            if is_traceable_wrapper_subclass(tensor):
                ref.table[ref.attribute] = with_parts(tensor, parts)
            else:
                tensor.data = parts[0]

    def drop_replaced(self, replaced: Collection[str]) -> None:
        """Drop weights that another node has permanently replaced; they are never restored."""
        for key, (ref, parts) in list(self.entries.items()):
            tensor = ref.tensor()
            displaced = tensor is not None and (tensor.device.type != "cpu" or key in replaced)
            if not displaced and (tensor is None or parts_of(tensor)[0].data_ptr() != parts[0].data_ptr()):
                del self.entries[key]

    def copy_out(self, key: str) -> None:
        """Copy this weight into memory of its own if it is in the file now."""
        ref, parts = self.entries.get(key, (None, []))
        tensor = None if ref is None else ref.tensor()
        if ref is not None and tensor is not None and parts_of(tensor)[0].data_ptr() == parts[0].data_ptr():
            ref.table[ref.attribute] = with_parts(tensor, [part.clone() for part in parts])


class KeepMapped(TorchFunctionMode):
    """Torch function mode in which ComfyUI loads a file without copying it.

    Weights use the file's memory wherever a copy would hold the same bytes. Core does so itself under dynamic VRAM
    (`load_state_dict(assign=True)`), and has no option for it otherwise. An unknown loading path is logged, since it
    takes the memory of a copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: FileMaps | None = None
        self.lazy_loading = lazy_loading_code()
        self.mapped_bytes, self.copied_bytes = 0, 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if (sentence := self.message()) is not None and error[0] is None:
            log.warning(sentence)

    def message(self) -> str | None:
        """Return a sentence for the user if more bytes were copied than stayed in the file, else None."""
        if self.copied_bytes <= self.mapped_bytes:
            return None
        return (
            "This ComfyUI loads the model's weights in an unknown way, so they can't be read from the file as "
            f"needed: they take {self.copied_bytes / 2**30:.2f} GB of RAM. If that's too much, start ComfyUI with "
            "--disable-dynamic-vram."
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and type(args[0]) is nn.Parameter and self._can_stay(args[-1], args[0]):
            args[0].data = args[-1]
            self.mapped_bytes += args[-1].nbytes
            return args[0]
        # A Linear created while dynamic VRAM is on has no memory yet and clones the file's weight.
        if func is torch.Tensor.clone and sys._getframe(1).f_globals.get("__name__") == "comfy.ops":
            if self._can_stay(args[0], args[0]):
                if sys._getframe(1).f_code is self.lazy_loading:
                    self.mapped_bytes += args[0].nbytes
                    return args[0]
                self.copied_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def _can_stay(self, source: Any, target: Tensor) -> bool:
        if type(source) is not Tensor or target.device.type != "cpu" or not source.is_contiguous():
            return False
        if (source.dtype, source.shape) != (target.dtype, target.shape):
            return False
        if self.maps is None:  # the file was mapped before its first weight is loaded
            self.maps = FileMaps()
        return self.maps.holds(source)


def copy_into_ram(model: nn.Module) -> None:
    """Copy the weights that `KeepMapped` has left in the file into RAM, unless RAM is short.

    Skipped if several processes of this machine train together: they share the file's pages.
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
        located = [(part, maps.holds(part)) for part in parts_of(tensor)]
        if not any(inside for _, inside in located):
            continue
        parts = [part.clone() if inside else part for part, inside in located]
        if is_traceable_wrapper_subclass(tensor):
            ref.table[ref.attribute] = with_parts(tensor, parts)
        else:  # several modules may share it
            tensor.data = parts[0]


def protect_from_hooks(patcher: ModelPatcher) -> None:
    """Copy weights out of the file before a hook of this MODEL or of its clones writes into them.

    ComfyUI applies hook patches to weights in-place, also on the host, and the mapping is read-only.
    """
    if bytes_in_file(patcher.model.parameters()) and not patcher.get_callbacks(
        CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, KEY
    ):
        patcher.add_callback_with_key(CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, KEY, _leave_hooked)


def _leave_hooked(patcher: Any, *_: Any) -> None:
    swap = getattr(patcher, "swap", None)  # of a SwapPatcher
    if swap is not None and swap.rest:  # SwapPatcher copies each out when it is written
        return
    keys = {key for patches in patcher.hook_patches.values() for key in patches}
    keys -= swap.weights.keys if swap is not None else set()  # those are patched in their slots
    mapped = MappedWeights(ref for ref in weight_refs("", patcher.model) if ref.key in keys)
    for key in mapped.entries:
        mapped.copy_out(key)
