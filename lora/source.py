"""A LoRA that a run starts from or trains on top of: identified by its content, read on demand."""

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ..common.files import read_tensors
from ..common.fingerprint import fingerprint
from ..common.untrusted.budgets import LORA_FILE, check_size
from ..common.untrusted.tensor_files import open_tensors


def read_lora_file(path: Path, input_name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a safetensors file. Raises ValueError, naming the input, if it is damaged or has
    more tensors than any LoRA."""
    try:
        with open_tensors(path) as file:
            check_size(LORA_FILE, f"{input_name}: {path.name}", items=len(file.keys()))
        return read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{input_name}: {path.name} can't be read as safetensors ({error}); choose another."
        ) from error


@dataclass(frozen=True)
class LoraSource:
    """A LoRA as an option of a run.

    name: for messages, without a folder.
    content: the fingerprint of its tensors.
    reader: returns the tensors.
    input_name: the input that selects it, for messages.

    The last two are not fields, so that options with a source in them can be compared, fingerprinted and serialised.
    """

    name: str
    content: str
    reader: InitVar[Callable[[], Mapping[str, Tensor]] | None] = None
    input_name: InitVar[str] = ""

    def __post_init__(self, reader: Callable[[], Mapping[str, Tensor]] | None, input_name: str) -> None:
        object.__setattr__(self, "_reader", reader)
        object.__setattr__(self, "_input_name", input_name)

    def input(self, default: str) -> str:
        """Return the input that selects it, else `default`."""
        return getattr(self, "_input_name", "") or default

    def tensors(self) -> Mapping[str, Tensor]:
        reader: Callable[[], Mapping[str, Tensor]] | None = getattr(self, "_reader", None)
        assert reader is not None, self
        return reader()

    @classmethod
    def from_file(cls, path: Path, input_name: str) -> "LoraSource":
        """Make a source from a safetensors file. Raises ValueError if it is damaged."""

        def read() -> Mapping[str, Tensor]:
            return read_lora_file(path, input_name)[0]

        return cls(path.name, fingerprint(read()), read, input_name)

    @classmethod
    def from_lora(cls, lora: Mapping[str, Tensor], input_name: str = "") -> "LoraSource":
        """Make a source from a LORA_MODEL of the graph."""
        name = getattr(lora, "metadata", {}).get("ss_output_name", "LORA_MODEL")
        return cls(str(name), fingerprint(dict(lora)), lambda: lora, input_name)
