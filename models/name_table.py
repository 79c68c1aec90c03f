"""Module names of one family: native, in kohya's flat keys, and in diffusers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ..common.untrusted.budgets import METADATA
from ..common.untrusted.json_text import parse_json


def flat_name(name: str) -> str:
    """`double_blocks.0.img_attn.qkv` as kohya's keys write it: `double_blocks_0_img_attn_qkv`."""
    return name.replace(".", "_")


_COMPILED = re.compile(r"^_orig_mod\.|\._orig_mod(?=\.)|__orig_mod(?=[_.])")


def uncompiled(key: str) -> str:
    """A key without the `_orig_mod` that torch.compile puts before the names of what it wraps, with dots or flat."""
    return _COMPILED.sub("", key)


def matcher(template: str) -> re.Pattern[str]:
    """A pattern of the names that a template stands for; its groups are the numbers."""
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d+)"))


def filled(template: str, numbers: Sequence[str]) -> str:
    """A template with its numbers in it. `str.format` is not used, for templates are read from files too."""
    first, *rest = template.split("{}")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


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
    by_rule: True where it was made of one model's modules, so that a file of the model has to tell it.
    unet: True where diffusers has the model as a U-Net.
    kohya_by_diffusers: True where kohya's keys are diffusers' names with underscores, for modules that are one there.
    cut: native names whose diffusers modules every format holds, since other files of the model hold those.
    """

    to_diffusers: Mapping[str, tuple[str, ...]]
    others: tuple[str, ...] = ()
    rows: Callable[[str, int, int, int], list[int]] = equal_rows
    halves_swapped: frozenset[str] = frozenset()
    proportions: Mapping[str, Shape] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    by_rule: bool = False
    unet: bool = False
    kohya_by_diffusers: bool = False
    cut: frozenset[str] = frozenset()
    _flat: dict[re.Pattern[str], str] = field(init=False, repr=False, compare=False)
    _dotted: dict[re.Pattern[str], str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # What is written out goes before a template that takes it for another name.
        templates = sorted((*self.to_diffusers, *self.others), key=lambda template: "{}" in template)
        flat = {flat_name(template): template for template in templates}
        if self.kohya_by_diffusers:
            flat |= {flat_name(parts[0]): name for name, parts in self.to_diffusers.items() if len(parts) == 1}
        object.__setattr__(self, "_flat", {matcher(key): template for key, template in flat.items()})
        object.__setattr__(self, "_dotted", {matcher(template): template for template in templates})

    def native(self, flat: str) -> str | None:
        """The native name of a module from its flat one; None where the family has no such module."""
        for pattern, template in self._flat.items():
            if match := pattern.fullmatch(flat):
                return filled(template, match.groups())
        return None

    def flat(self, name: str) -> str:
        """The flat name of a native module in a file with kohya's keys."""
        parts = self.diffusers(name) if self.kohya_by_diffusers else ()
        return flat_name(parts[0] if len(parts) == 1 else name)

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

    def knows(self, program: str, format: str) -> bool:
        """True where it is known what a program takes of a file of this format."""
        return not self.by_rule or program == "ComfyUI" or (format == "diffusers" and bool(self.to_diffusers))

    def template(self, name: str) -> str:
        """The entry that a native name belongs to; the name itself where there is none."""
        return self._entry(name)[0]

    def diffusers(self, name: str) -> tuple[str, ...]:
        """The diffusers modules that hold the native module `name`, in row order; empty where there is none."""
        template, numbers = self._entry(name)
        return tuple(filled(part, numbers) for part in self.to_diffusers.get(template, ()))

    def cut_modules(self, name: str) -> tuple[str, ...]:
        """The modules in place of which files hold `name`, in row order; empty for one that they hold whole."""
        return self.diffusers(name) if self.template(name) in self.cut else ()

    def cut_from(self, module: str) -> str | None:
        """The native module that a module of `cut_modules` is a part of; None for any other."""
        for template in self.cut:
            for part in self.to_diffusers[template]:
                if match := matcher(part).fullmatch(module):
                    return filled(template, match.groups())
        return None

    def _entry(self, name: str) -> tuple[str, Sequence[str]]:
        """The template of a native name, and the numbers in place of its "{}"."""
        if name not in self.to_diffusers:
            for pattern, template in self._dotted.items():
                if match := pattern.fullmatch(name):
                    return template, match.groups()
        return name, ()

    def diffusers_rows(self, name: str, rows: int, columns: int) -> list[int]:
        """Output rows of the native module that each of its diffusers modules takes. rows, columns: the native
        weight's (out, in)."""
        return self.rows(name, len(self.diffusers(name)), rows, columns)

    def diffusers_keys(self, module: str) -> tuple[str, str]:
        """The keys of down and up in diffusers' format. U-Nets have those of its attention processors, which ComfyUI
        reads too; PEFT's it does not read of them."""
        if not self.unet:
            return f"transformer.{module}.lora_A.weight", f"transformer.{module}.lora_B.weight"
        owner, attention, projection = module.rpartition(".to_")
        key = f"unet.{module}.lora"
        if attention:
            key = f"unet.{owner}.processor.to_{projection.removesuffix('.0')}_lora"
        return f"{key}.down.weight", f"{key}.up.weight"

    def recorded(self) -> str:
        """The table as JSON for the header of a file; empty for one that the pack knows without."""
        if not self.by_rule:
            return ""
        return json.dumps(
            {
                "modules": self.others,
                "diffusers": self.to_diffusers,
                "halves_swapped": sorted(self.halves_swapped),
                "unet": self.unet,
                "kohya_by_diffusers": self.kohya_by_diffusers,
                **({"cut": sorted(self.cut)} if self.cut else {}),
            }
        )


def read_recorded(text: str) -> NameTable | None:
    """Read the table that `recorded` gave; None where the text is nothing of the kind."""
    try:
        told: dict[str, Any] = parse_json(text, METADATA, "modules")
        diffusers = {str(name): tuple(map(str, parts)) for name, parts in told["diffusers"].items()}
        others, swapped = tuple(map(str, told["modules"])), frozenset(map(str, told["halves_swapped"]))
        unet, by_diffusers = bool(told["unet"]), bool(told["kohya_by_diffusers"])
        cut = frozenset(map(str, told.get("cut", ())))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if any(part.count("{}") != name.count("{}") for name, parts in diffusers.items() for part in parts):
        return None
    if not cut <= diffusers.keys():
        return None
    return NameTable(
        diffusers, others, halves_swapped=swapped, by_rule=True, unet=unet, kohya_by_diffusers=by_diffusers, cut=cut
    )
