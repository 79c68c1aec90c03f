"""Disk cache of encoded images and captions, and the jobs that fill it."""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..common.files import read_tensors, sweep_unfinished, write_atomically
from ..common.progress import Interrupted, Progress
from ..common.untrusted.tensor_files import open_tensors

Shape = tuple[int | None, ...]


class Cache:
    """Folder of safetensors files, one per key.

    A key is a fingerprint of everything that its tensors depend on, so a file never goes stale.
    A file is written under a temporary name and then renamed, so a file under its final name is complete.
    A damaged file (disk failure, interrupted copy) counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Return the path of a key's file; the first two characters of the key name its subfolder."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def holds(self, key: str, shapes: Mapping[str, Shape] | None) -> bool:
        """Return whether there is an intact file with tensors of exactly these names and shapes.

        A length of None matches any length, and None for `shapes` any tensors.
        Reads only the header; safetensors validates it against the length of the file.
        """
        stored = self.shapes(key)
        if shapes is None:
            return bool(stored)
        return stored.keys() == shapes.keys() and all(_fits(stored[name], shape) for name, shape in shapes.items())

    def shapes(self, key: str) -> dict[str, tuple[int, ...]]:
        """Read names and shapes of the tensors in the file; an empty dict if there is no intact file."""
        try:
            with open_tensors(self.path(key)) as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (OSError, SafetensorError):
            return {}

    def size(self, key: str) -> int:
        """Return the bytes of a key's file on disk."""
        return self.path(key).stat().st_size

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors under the key.

        Raises OSError with a message for the user if the disk is full or not writable.
        """
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomically(self.path(key), lambda file: save_file(on_host, file))

    def read(self, key: str) -> dict[str, Tensor]:
        """Read the tensors to the host in their stored dtype.

        The tensors are ordinary ones (no inference tensors), so autograd can save them for backward.
        Raises FileNotFoundError if there is no intact file.
        """
        try:
            return read_tensors(self.path(key))[0]
        except (OSError, SafetensorError) as error:
            raise FileNotFoundError(f"{self.path(key).name}: {error}") from error


@dataclass(frozen=True)
class EncodeJob:
    """One tensor file to encode if the cache lacks it.

    key: cache key.
    shapes: name and shape of each tensor in the file; None for a length known only after encoding, and as a whole if
        the names are, too.
    bytes: approximate size on disk.
    encode: computes the tensors.
    name: the encoded file or caption, for messages.
    """

    key: str
    shapes: Mapping[str, Shape] | None
    bytes: int
    encode: Callable[[], Mapping[str, Tensor]]
    name: str


def missing_jobs(cache: Cache, jobs: Iterable[EncodeJob]) -> list[EncodeJob]:
    """List the jobs whose tensors the cache lacks, each key once."""
    return [job for job in {job.key: job for job in jobs}.values() if not cache.holds(job.key, job.shapes)]


def check_space(folder: Path, jobs: Iterable[EncodeJob]) -> None:
    """Check that the disk of the cache folder has room for the output of the jobs.

    Raises ValueError if it has not.
    """
    required_bytes = sum(job.bytes for job in jobs)
    # The cache folder itself may not exist yet; disk_usage needs a path that does.
    existing_folder = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing_folder).free
    if required_bytes > free:
        raise ValueError(
            f"Encoding the pictures takes about {required_bytes / 1e9:.2f} GB, but the disk with the cache folder "
            f"({folder.parent.name}/{folder.name} in ComfyUI's user folder) has {free / 1e9:.2f} GB free; free some "
            "space, or start ComfyUI with --user-directory on a larger disk."
        )


def run_jobs(cache: Cache, jobs: list[EncodeJob], noun: str, progress: Progress, interrupted: Interrupted) -> None:
    """Run the jobs one by one and write each result at once, so that an interrupted run continues where it stopped.

    noun: plural noun of the encoded inputs, for the progress text.
    Raises ValueError if an encoder returns NaN or infinity.
    """
    if jobs:
        sweep_unfinished(cache.folder)
    start = time.monotonic()
    for completed, job in enumerate(jobs):
        interrupted()
        remaining_time = _time_left(start, completed, len(jobs))
        progress(completed, len(jobs), f"Encoding {noun}: {completed} of {len(jobs)}{remaining_time}")
        tensors = job.encode()
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise ValueError(
                f"Encoding {job.name} gave values that are not finite; run the VAE or the text encoders in a wider "
                f"dtype (ComfyUI's --fp32-vae or --fp32-text-enc)."
            )
        cache.write(job.key, tensors)
        assert cache.holds(job.key, job.shapes), (job.name, {n: tuple(t.shape) for n, t in tensors.items()}, job.shapes)
    if jobs:
        progress(len(jobs), len(jobs), f"Encoding {noun}: {len(jobs)} of {len(jobs)}")


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        expected_size is None or size == expected_size for size, expected_size in zip(shape, expected, strict=True)
    )


def _time_left(start: float, completed: int, total: int) -> str:
    if completed == 0:
        return ""
    seconds = (time.monotonic() - start) / completed * (total - completed)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
