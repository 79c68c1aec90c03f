"""The modules of a model that is known by its own modules alone: ComfyUI's names and kohya's follow from theirs."""

import re
from collections.abc import Iterable
from typing import Any

from ..name_table import NameTable, flat_name

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def names_of(module_names: Iterable[str]) -> NameTable:
    """Make the table of a model from the names of its modules, such as `layers.0.attention.qkv`. It has no names of
    diffusers.

    Raises ValueError where two modules have one name in kohya's keys, which ComfyUI could not tell apart either.
    """
    names = tuple(dict.fromkeys(module_names))
    by_flat: dict[str, str] = {}
    for name in names:
        if (other := by_flat.setdefault(flat_name(name), name)) != name:
            raise ValueError(
                f"model has the layers {other} and {name}, which LoRA files call by one name; use another model."
            )
    templates = tuple(dict.fromkeys(_NUMBER.sub("{}", name) for name in names))
    table = NameTable({}, templates)
    # `a.b_1` and `a.b.2` are both of `a_b_{}` in kohya's keys: the name that the template misses is written out.
    missed = tuple(name for flat, name in by_flat.items() if table.native(flat) != name)
    return NameTable({}, (*missed, *templates)) if missed else table


def native_names(model: Any) -> NameTable:
    """Make the table of a ComfyUI BaseModel: of all modules of its diffusion model that have a weight."""
    modules = model.diffusion_model.named_modules()
    return names_of(name for name, module in modules if hasattr(module, "weight"))
