"""Module names of one family: native, in kohya's flat keys, and in diffusers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


def flat_name(name: str) -> str:
    """`double_blocks.0.img_attn.qkv` as kohya's keys write it: `double_blocks_0_img_attn_qkv`."""
    return name.replace(".", "_")


_COMPILED = re.compile(r"^_orig_mod\.|\._orig_mod(?=\.)|__orig_mod(?=[_.])")


def uncompiled(key: str) -> str:
    """A key without the `_orig_mod` that torch.compile puts before the names of what it wraps, with dots or flat."""
    return _COMPILED.sub("", key)


Shape = tuple[int, int]
"""Rows and columns of a native weight."""


def equal_rows(name: str, parts: int, rows: int, columns: int) -> list[int]:
    """Split the rows of a fused module into parts of one size."""
    return [rows // parts] * parts


@dataclass(frozen=True)
class Gap:
    """Modules that a program does not take from a LoRA file of one format, or takes otherwise than they were trained.

    program: `ComfyUI` or `diffusers`.
    format: of `lora.files.formats`.
    names: patterns of native names.
    refuses: True where it takes nothing of a file that holds one of them.
    """

    program: str
    format: str
    names: tuple[str, ...]
    refuses: bool = False


@dataclass(frozen=True)
class NameTable:
    """The names of one family. Kohya's keys write dots as underscores, so that only a table can undo them.

    to_diffusers: native module name -> the diffusers modules that together hold it, in the order of its output rows;
        "{}" is the number of the block.
    others: modules that may carry a difference but have no matrix, or no place in diffusers.
    rows: (native name, parts, rows, columns of the native weight) -> how many rows each diffusers module takes.
    halves_swapped: native names whose two halves of rows diffusers holds the other way round.
    proportions: the shape of a module's weight in units of the hidden size, where it tells the family from another with
        a module of that name.
    gaps: what ComfyUI and diffusers do not take from files of it, as tests find with their own loaders.
    """

    to_diffusers: Mapping[str, tuple[str, ...]]
    others: tuple[str, ...] = ()
    rows: Callable[[str, int, int, int], list[int]] = equal_rows
    halves_swapped: frozenset[str] = frozenset()
    proportions: Mapping[str, Shape] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    _flat: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flat = {re.escape(flat_name(t)).replace(r"\{\}", r"(\d+)"): t for t in (*self.to_diffusers, *self.others)}
        object.__setattr__(self, "_flat", flat)

    def native(self, flat: str) -> str | None:
        """The native name of a module from its flat one; None where the family has no such module."""
        for pattern, template in self._flat.items():
            if match := re.fullmatch(pattern, flat):
                return template.format(*match.groups())
        return None

    def fits(self, flat: str, shape: Shape) -> bool:
        """True where the module can have a weight of this shape."""
        name = self.native(flat)
        if name is None:
            return False
        rows, columns = self.proportions.get(self.template(name), shape)
        return rows * shape[1] == columns * shape[0]

    def left_out(self, program: str, format: str, names: Sequence[str]) -> list[str]:
        """The native names, out of those that a LoRA file of this format holds, that a program does not take."""
        for gap in self.gaps:
            if (gap.program, gap.format) == (program, format):
                found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in gap.names)]
                return list(names) if found and gap.refuses else found
        return []

    def template(self, name: str) -> str:
        """A native name with the number of its block as "{}"."""
        return name if name in self.to_diffusers else re.sub(r"\.\d+\.", ".{}.", name, count=1)

    def diffusers(self, name: str) -> tuple[str, ...]:
        """The diffusers modules that hold the native module `name`, in row order; empty where there is none."""
        index = re.search(r"\.(\d+)\.", name)
        parts = self.to_diffusers.get(self.template(name), ())
        return tuple(part.format(index.group(1) if index else "") for part in parts)

    def diffusers_rows(self, name: str, rows: int, columns: int) -> list[int]:
        """Output rows of the native module that each of its diffusers modules takes. rows, columns: the native
        weight's (out, in)."""
        return self.rows(name, len(self.diffusers(name)), rows, columns)
