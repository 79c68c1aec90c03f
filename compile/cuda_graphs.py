"""CUDA graphs: torch's memory allocator, which they depend on, and errors from recording or replaying them."""

import torch

# The one allocator that can save and restore a pool's state, as inductor's CUDA graphs require at each recording. The
# others raise "does not yet support getCheckpointState".
NATIVE = "native"
CUDA_MALLOC_ASYNC = "cudaMallocAsync"

# Modules with a frame in the traceback of every error of recording or replaying a CUDA graph.
_MODULES = {"torch._inductor.cudagraph_trees", "torch.cuda.graphs"}


def memory_allocator(device: torch.device) -> str | None:
    """Return the name of torch's allocator (native, cudaMallocAsync, pluggable); None for a device other than CUDA."""
    return torch.cuda.get_allocator_backend() if device.type == "cuda" else None


def no_cuda_graphs(device: torch.device) -> str | None:
    """Return why the allocator makes CUDA graphs impossible, as the end of a sentence; None if it does not."""
    allocator = memory_allocator(device)
    if allocator in (None, NATIVE):
        return None
    reason = f"torch allocates memory by {allocator} here, which can't make them"
    return (
        f"{reason}; start ComfyUI with --disable-cuda-malloc to have them" if allocator == CUDA_MALLOC_ASYNC else reason
    )


def from_cuda_graphs(error: BaseException) -> bool:
    """Return True for an error that was raised while a CUDA graph was recorded or replayed."""
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") in _MODULES:
            return True
        frame = frame.tb_next
    return False
