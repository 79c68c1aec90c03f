"""What may have to be encoded, the cache that says whether it is, and the loop that does it."""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .cache import Cache, Shape

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done and how long it will take)."""
Interrupted = Callable[[], None]
"""Called between two things; may raise."""


@dataclass(frozen=True)
class Job:
    """What may have to be encoded.

    Its cache key, the shapes its file must hold, about how many bytes that takes, how to make it, what to call it.
    """

    key: str
    shapes: Mapping[str, Shape]
    bytes: int
    encode: Callable[[], Mapping[str, Tensor]]
    name: str


def lacking(cache: Cache, jobs: Iterable[Job]) -> list[Job]:
    """What the cache does not hold, each key once."""
    return [job for job in {job.key: job for job in jobs}.values() if not cache.holds(job.key, job.shapes)]


def check_space(folder: Path, jobs: Iterable[Job]) -> None:
    """ValueError if the disk of the cache folder is too small for what the jobs will write."""
    wanted = sum(job.bytes for job in jobs)
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise ValueError(
            f"Encoding the data set takes about {wanted / 1e9:.2f} GB and the disk with the cache folder "
            f"({folder.parent.name}/{folder.name} in ComfyUI's user folder) has {free / 1e9:.2f} GB free; free some "
            f"space, or start ComfyUI with --user-directory on a larger disk."
        )


def encode(cache: Cache, jobs: list[Job], what: str, progress: Progress, interrupted: Interrupted) -> None:
    """Encode one at a time and write it at once."""
    start = time.monotonic()
    for done, job in enumerate(jobs):
        interrupted()
        left = _time_left(start, done, len(jobs))
        progress(done, len(jobs), f"Encoding {what}: {done} of {len(jobs)}{left}")
        tensors = job.encode()
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise ValueError(
                f"Encoding {job.name} gave values that are not finite; run the VAE or the text encoders in a wider "
                f"dtype (ComfyUI's --fp32-vae or --fp32-text-enc)."
            )
        cache.write(job.key, tensors)
        assert cache.holds(job.key, job.shapes), (job.name, {n: tuple(t.shape) for n, t in tensors.items()}, job.shapes)
    if jobs:
        progress(len(jobs), len(jobs), f"Encoding {what}: {len(jobs)} of {len(jobs)}")


def _time_left(start: float, done: int, total: int) -> str:
    if done == 0:
        return ""
    seconds = (time.monotonic() - start) / done * (total - done)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
