"""Threads of a small model's training on the CPU: one, since more of them wait for each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from comfy.model_patcher import ModelPatcher

SMALL = 16 * 2**20  # bytes of a model, such as the one of Try it


@contextmanager
def threads_for(model: ModelPatcher) -> Iterator[None]:
    """Compute on one thread if a small model trains on the CPU; on a GPU, or for a larger one, change nothing.

    Several threads spin at a barrier after each operation: if another process keeps a core busy, they wait for the
    scheduler to give it back, in each of thousands of operations.
    """
    if model.load_device.type != "cpu" or model.model_size() > SMALL:
        yield
        return
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)
