"""Facts of the machine: hardware and software that the last bits of a result depend on, and the memory peak."""

from typing import Any

import psutil
import torch

from ...compile.cuda_graphs import memory_allocator
from ...compile.settings import CompileSettings

VERSION = "0.1.0"  # of Tessera, as in `pyproject.toml`


def environment_facts(device: torch.device, compile_settings: CompileSettings | None) -> dict[str, str]:
    """Return threads, torch, device, backend and mode. With the same, a resumed run equals an uninterrupted one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": torch.__version__,
        "device": name,
        "threads": str(torch.get_num_threads()),
        "backend": compile_settings.backend if compile_settings else "eager",
        "mode": compile_settings.mode if compile_settings else "eager",
    }


def reset_memory_peak(device: torch.device) -> None:
    """Reset the counter of `memory_peak`, if the device has one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> dict[str, Any]:
    """Return the memory peak in MiB: memory reserved by torch on a GPU, else the process's resident memory.

    On a GPU also the name of torch's allocator.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(device) // 2**20
        return {"peak_memory_mib": peak, "peak_memory_of": "GPU", "allocator": memory_allocator(device)}
    memory = psutil.Process().memory_info()
    return {"peak_memory_mib": getattr(memory, "peak_wset", _peak_resident()) // 2**20, "peak_memory_of": "process"}


def driver_memory(device: torch.device) -> dict[str, int]:
    """Return MiB in use on a GPU, other programs included, and MiB of it in all, as the driver counts them.

    torch returns nothing of what it has reserved, so during a run the first is the peak. Empty without a GPU.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"driver_memory_mib": (total - free) // 2**20, "device_memory_mib": total // 2**20}


def _peak_resident() -> int:
    """Return the peak resident memory in bytes. Windows has no `resource`; there psutil gives the peak itself."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss
    import sys

    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
