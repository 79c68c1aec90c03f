"""What a result's last bits, and a run's memory, depend on."""

from typing import Any

import psutil
import torch

from ...compile.settings import CompileSettings


def machine_facts(device: torch.device, compile_settings: CompileSettings | None) -> dict[str, str]:
    """Threads, torch, device, backend and mode: with the same ones, a resumed run equals an uninterrupted one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": torch.__version__,
        "device": name,
        "threads": str(torch.get_num_threads()),
        "backend": compile_settings.backend if compile_settings else "eager",
        "mode": compile_settings.mode if compile_settings else "eager",
    }


def forget_memory_peak(device: torch.device) -> None:
    """Lets `memory_peak` count from here on, where the device can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> dict[str, Any]:
    """The most memory in use so far, MiB: what torch reserved on a GPU, else the process's resident memory."""
    if device.type == "cuda":
        return {"peak_memory_mib": torch.cuda.max_memory_reserved(device) // 2**20, "peak_memory_of": "GPU"}
    memory = psutil.Process().memory_info()
    return {"peak_memory_mib": getattr(memory, "peak_wset", _peak_resident()) // 2**20, "peak_memory_of": "process"}


def _peak_resident() -> int:
    """Bytes; on Windows psutil has the figure itself."""
    try:
        import resource
    except ImportError:
        return psutil.Process().memory_info().rss
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
