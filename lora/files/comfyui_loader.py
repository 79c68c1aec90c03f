"""ComfyUI's own LoRA loaders, compared with this pack's reader: which weights do they patch otherwise?"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.lora
import comfy.lora_convert
from torch import Tensor

from .patches import Patch, Target
from .reader import LoraPatches, name_of

_Content = tuple[str, bool, tuple[int, ...], frozenset[Any]]


def read_otherwise(lora: Mapping[str, Tensor], read: LoraPatches, model: Any) -> list[str]:
    """Return the weights that ComfyUI's loaders do not patch as `read` does, which was read from the same tensors."""
    names = comfy.lora.model_lora_keys_unet(model, {})
    try:
        with _quiet():
            loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(lora)), names, log_missing=False)
    except Exception:  # of a file that ComfyUI's reader fails on, whatever it raises
        loaded = {}
    own_contents, core_contents = _by_weight(read.entries()), _by_weight(loaded.items())
    return [name_of(key) for key, contents in own_contents.items() if contents != core_contents.get(key)]


def _by_weight(entries: Iterable[tuple[Target, Any]]) -> dict[str, list[_Content]]:
    """Return the patches of each weight, comparable by the storage of their tensors."""
    weights: dict[str, list[_Content]] = {}
    for target, content in entries:
        key, patch = Patch.from_entry(target, content)
        values = content[1] if isinstance(content, tuple) else content.weights
        identities = frozenset(
            (value.data_ptr(), tuple(value.shape)) if isinstance(value, Tensor) else value
            for value in values
            if isinstance(value, Tensor | float | int)
        )
        place = tuple(patch.place or ())
        kind = content[0] if isinstance(content, tuple) else content.name
        weights.setdefault(key, []).append((kind, patch.function is None, place, identities))
    for contents in weights.values():
        contents.sort(key=lambda content: (content[0], content[2]))
    return weights


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute the root logger, to which ComfyUI's reader writes, for a reading that is only compared."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
