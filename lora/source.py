"""A LoRA that a run begins from or stands on: known by its content, read when it is needed."""

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ..common.files import read_tensors
from ..common.fingerprint import fingerprint


@dataclass(frozen=True)
class LoraSource:
    """name: for people, without a folder. content: the fingerprint of its tensors. reader: gives the tensors; told: the
    input that names it, for messages. Both are no fields, so that options with a source in them can be compared, named
    and written down."""

    name: str
    content: str
    reader: InitVar[Callable[[], Mapping[str, Tensor]] | None] = None
    told: InitVar[str] = ""

    def __post_init__(self, reader: Callable[[], Mapping[str, Tensor]] | None, told: str) -> None:
        object.__setattr__(self, "_reader", reader)
        object.__setattr__(self, "_told", told)

    def input(self, default: str) -> str:
        """The input that names it."""
        return getattr(self, "_told", "") or default

    def tensors(self) -> Mapping[str, Tensor]:
        reader: Callable[[], Mapping[str, Tensor]] | None = getattr(self, "_reader", None)
        assert reader is not None, self
        return reader()

    @classmethod
    def of_file(cls, path: Path, told: str) -> "LoraSource":
        """A safetensors file. told: the input that names it. Raises ValueError where it is not whole."""

        def read() -> Mapping[str, Tensor]:
            try:
                return read_tensors(path)[0]
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{told}: {path.name} cannot be read as safetensors ({error}); choose another."
                ) from error

        return cls(path.name, fingerprint(read()), read, told)

    @classmethod
    def of_model(cls, lora: Mapping[str, Tensor], told: str = "") -> "LoraSource":
        """A LORA_MODEL of the graph. told: the input that it stands for."""
        name = getattr(lora, "metadata", {}).get("ss_output_name", "LORA_MODEL")
        return cls(str(name), fingerprint(dict(lora)), lambda: lora, told)
