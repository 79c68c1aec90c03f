"""Dataset files of other trainers: kohya's and musubi-tuner's TOML, ai-toolkit's YAML."""

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Any

from ...common.text import cut, joined, quantity, quoted, shortlist
from ...common.untrusted.budgets import DATASET_FIELDS, DATASET_FILE, DATASET_PATH, OverBudget, check_size
from ...common.untrusted.json_text import parse_json
from ...common.untrusted.regular_files import file_state, read_regular
from .captions import decoded, unreadable

_NAMES = re.compile(r".+\.(?:toml|ya?ml)|.*(?:dataset|config).*\.json", re.IGNORECASE)
KOHYA = "kohya's scripts"
MUSUBI = "musubi-tuner"
AI_TOOLKIT = "ai-toolkit"
_MOST_ALIASES = 20  # of YAML, which multiply a mapping by some thousand at most
_MOST_DOTS = 200  # in a line of TOML


@dataclass(frozen=True)
class DatasetBlock:
    """One folder of a dataset file, with the values that it inherits.

    trainer: the trainer whose words they are.
    values: fields by name.
    """

    trainer: str
    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class DatasetFile:
    """A dataset file of another trainer.

    path: the file.
    blocks: its folders, in order.
    """

    path: Path
    blocks: tuple[DatasetBlock, ...]

    @property
    def trainers(self) -> str:
        return joined(list(dict.fromkeys(block.trainer for block in self.blocks)))


def find_dataset_files(folder: Path, files: Sequence[Path]) -> list[DatasetFile]:
    """List the dataset files that lie directly in a folder.

    Raises ValueError for one that can't be parsed, if its name ends in .toml.
    """
    candidates = (read_dataset_file(file) for file in files if file.parent == folder and is_dataset_name(file.name))
    return [dataset_file for dataset_file in candidates if dataset_file is not None]


def is_dataset_name(name: str) -> bool:
    """Return True for a file that may be a dataset file."""
    return _NAMES.fullmatch(name) is not None


def read_dataset_file(path: Path) -> DatasetFile | None:
    """Read a dataset file; None for a file of another kind."""
    try:
        return _read(path, file_state(path))
    except OSError as error:
        raise unreadable("file", path, error) from error


@lru_cache(maxsize=64)
def _read(path: Path, state: tuple[int, ...]) -> DatasetFile | None:
    kind = path.suffix.lower()
    try:
        text = decoded(read_regular(path, DATASET_FILE))
        check_size(DATASET_FILE, path.name, items=text.count("\n") + text.count(","))
        parse = {".toml": _parse_toml, ".json": lambda text: parse_json(text, DATASET_FILE, path.name)}
        value = parse.get(kind, _parse_yaml)(text)
        blocks = _blocks(value, kind) if isinstance(value, dict) else ()
    except (OverBudget, UnicodeDecodeError, json.JSONDecodeError):
        return None  # no dataset file is that large or otherwise written; it is listed as not read
    except (ValueError, RecursionError) as error:
        if kind != ".toml":
            return None
        raise ValueError(
            f"The dataset file {path.name!r} can't be read ({cut(str(error))}); correct it, take it out of the folder, "
            "or set layout to plain."
        ) from error
    return DatasetFile(path, blocks) if blocks else None


def _blocks(value: Mapping[str, Any], kind: str) -> tuple[DatasetBlock, ...]:
    return tuple(_ai_toolkit(value) if kind in (".yaml", ".yml") else (*_kohya(value), *_ai_toolkit(value)))


def _parse_toml(text: str) -> Any:
    """Parse TOML with the standard library, or on Python 3.10 with tomli, which ComfyUI's alembic brings there.

    Both take time quadratic in the dots of a dotted key, which stands in one line.
    """
    if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name).loads(text)
        except ModuleNotFoundError:
            continue
    raise ValueError("Python 3.10 needs the package tomli for it: run `pip install tomli` and restart ComfyUI")


def _parse_yaml(text: str) -> Any:
    """Parse YAML, plain values only, with libyaml if PyYAML has it.

    Its events are counted first: an alias that is merged, as in `<<: [*a, *a]`, doubles a mapping each time.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = aliases = depth = 0
        for event in yaml.parse(text, loader):
            events += 1
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            check_size(DATASET_FILE, "YAML", items=events, depth=depth)
            if aliases > _MOST_ALIASES:
                raise ValueError(f"it has more than {_MOST_ALIASES} aliases")
        return yaml.load(text, loader)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise ValueError("it is not YAML") from error


def _kohya(value: Mapping[str, Any]) -> Iterator[DatasetBlock]:
    """Yield the subsets of sd-scripts and the datasets of musubi-tuner; the inner value of a field wins."""
    general = _fields(value.get("general"))
    for dataset in _objects(value.get("datasets")):
        defaults = general | _fields(dataset)
        for subset in _objects(dataset.get("subsets")):
            if "image_dir" in subset or "metadata_file" in subset:
                yield DatasetBlock(KOHYA, defaults | _fields(subset))
        if any(f"{kind}_{place}" in defaults for kind in ("image", "video") for place in ("directory", "jsonl_file")):
            yield DatasetBlock(MUSUBI, defaults)


def _ai_toolkit(value: Mapping[str, Any]) -> Iterator[DatasetBlock]:
    """Yield the datasets of a training file of ai-toolkit, or of a part of one."""
    config = value.get("config") if isinstance(value.get("config"), dict) else value
    assert isinstance(config, Mapping)
    for process in (*_objects(config.get("process")), config):
        defaults = {"trigger_word": process["trigger_word"]} if process.get("trigger_word") else {}
        for dataset in _objects(process.get("datasets")):
            if "folder_path" in dataset or "dataset_path" in dataset:
                yield DatasetBlock(AI_TOOLKIT, defaults | _fields(dataset))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of an object that are no lists of objects."""
    if not isinstance(value, dict):
        return {}
    check_size(DATASET_FIELDS, "A part of it", items=len(value))
    return {str(name): each for name, each in value.items() if not _objects(each)}


def resolve_place(text: str, base: Path, may_read: Callable[[Path], bool]) -> Path | None:
    """Find the folder or file that a dataset file names, on this machine.

    text: path as written, maybe of another machine.
    base: folder of the dataset file.
    may_read: predicate for places outside of `base`.

    An absolute path that exists and may be read is taken as it is; a relative one counts from `base`. Of any other, the
    longest end that exists below `base` is taken, or `base` itself if it has the name. None if there is none, and for
    a text that is longer than any path.
    """
    if len(text) > DATASET_PATH.characters:
        return None
    plain = text.strip().replace("\\", "/")
    pure = PureWindowsPath(text.strip())
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    if not plain or "\0" in plain or len(parts) > DATASET_PATH.items:
        return None
    if not (pure.drive or plain.startswith("/")) and ".." not in parts:
        place = base.joinpath(*parts)
        if _exists(place):
            return place
    absolute = Path(text.strip())
    if absolute.is_absolute() and may_read(absolute) and _exists(absolute):
        return absolute
    parts = [part for part in parts if part != ".." and ":" not in part]
    for start in range(len(parts)):
        if _exists(place := base.joinpath(*parts[start:])):
            return place
    return base if parts and parts[-1] == base.name else None


def _exists(path: Path) -> bool:
    """Return True for a path that is there; one that is too long for the system isn't."""
    try:
        return path.exists()
    except OSError:
        return False


def missing_place(file: DatasetFile, field: str, text: str) -> ValueError:
    """Make the error of a place that isn't there or may not be read."""
    return ValueError(
        f"{file.path.name!r} has {quoted(text)} as {field}, which is not below its own folder nor in an allowed one; "
        "put it next to the file, or write a path that is relative to it."
    )


def unused_note(file: DatasetFile, used: Mapping[str, str], unused: Sequence[str]) -> str:
    """Make the note on the fields that were read of a dataset file. used: name of the input for each of them."""
    renamed = [f"{field} as {name}" if field != name else field for field, name in used.items()]
    ignored = f" Not used, as inputs of Tessera's nodes decide: {shortlist(unused)}." if unused else ""
    return (
        f"Read as {file.path.name!r} of {file.trainers} says ({quantity(len(file.blocks), 'folder')}): "
        f"{', '.join(renamed)}."
        f"{ignored} Set layout to plain to read the folder without it."
    )
