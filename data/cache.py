"""Encoded pictures and captions on disk, each named by what it was made from."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..common.files import write_atomically
from ..common.tensor_file import read_tensors

Shape = tuple[int | None, ...]


class Cache:
    """A folder of safetensors files, one per key. A key names all that its tensors depend on, so files never go stale.

    Files are written beside and renamed: what has its name is whole. One that is not (a disk that failed, a copy that
    broke off) counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def holds(self, key: str, shapes: Mapping[str, Shape]) -> bool:
        """Whether a whole file with tensors of these names and shapes is there (None fits any length).

        Reads the header only; safetensors compares it with the length of the file.
        """
        found = self.shapes(key)
        return found.keys() == shapes.keys() and all(_fits(found[name], shape) for name, shape in shapes.items())

    def shapes(self, key: str) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors in the file, none where there is no whole file."""
        try:
            with safe_open(self.path(key), framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (OSError, SafetensorError):
            return {}

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Raises OSError with a sentence if the disk is full or may not be written to."""
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_atomically(self.path(key), lambda beside: save_file(on_host, beside))

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors on the host, in the dtype in which they were made, fit to be saved for backward.

        Raises FileNotFoundError where there is no whole file.
        """
        try:
            return read_tensors(self.path(key))[0]
        except (OSError, SafetensorError) as error:
            raise FileNotFoundError(f"{self.path(key).name}: {error}") from error


def _fits(found: tuple[int, ...], wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(w is None or f == w for f, w in zip(found, wanted, strict=True))
