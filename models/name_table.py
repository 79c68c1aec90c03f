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
    """Convert a name to the form of kohya's keys: `double_blocks.0.img_attn.qkv` → `double_blocks_0_img_attn_qkv`."""
    return name.replace(".", "_")


_COMPILED = re.compile(r"^_orig_mod\.|\._orig_mod(?=\.)|__orig_mod(?=[_.])")


def uncompiled(key: str) -> str:
    """Remove from a key the `_orig_mod` that torch.compile inserts for wrapped modules, dotted or flat."""
    return _COMPILED.sub("", key)


def matcher(template: str) -> re.Pattern[str]:
    """Compile a template to a pattern of the names it matches; its groups are the numbers."""
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d+)"))


def filled(template: str, numbers: Sequence[str]) -> str:
    """Fill a template with its numbers. `str.format` is not used, since templates are read from files too."""
    first, *rest = template.split("{}")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, rest, strict=True))


Shape = tuple[int, int]
"""Rows and columns of a native weight."""


def fused_rows(name: str, parts: int, rows: int, columns: int) -> list[int]:
    """Split the rows of a fused module: four parts are q, k and v of the hidden size, which is the module's input size,
    and then the MLP; others are equal."""
    return [columns] * 3 + [rows - 3 * columns] if parts == 4 else [rows // parts] * parts


@dataclass(frozen=True)
class Gap:
    """Modules that a program does not load from a LoRA file of one format, or loads differently than trained.

    program: `ComfyUI` or `diffusers`.
    format: one of `lora.files.formats`.
    names: patterns of native names.
    refuses: True if the program loads nothing from a file that holds one of them.
    """

    program: str
    format: str
    names: tuple[str, ...]
    refuses: bool = False


@dataclass(frozen=True)
class NameTable:
    """The names of one family. Kohya's keys replace dots with underscores, which only a table can undo.

    to_diffusers: native module name -> the diffusers modules that together form it, in the order of its output rows;
        "{}" is the number of the block.
    extra_modules: modules that may have a weight difference but no matrix, or no counterpart in diffusers.
    rows: (native name, parts, rows, columns of the native weight) -> number of rows of each diffusers module.
    halves_swapped: native names whose two halves of rows are swapped in diffusers.
    proportions: the shape of a module's weight in units of the hidden size, if it distinguishes the family from another
        with a module of that name.
    gaps: modules that ComfyUI and diffusers do not load from files, as tests find with their loaders.
    by_rule: True if the table was derived from one model's modules, so that a file of the model has to record it.
    unet: True if the model is a U-Net in diffusers.
    kohya_by_diffusers: True if kohya's keys are diffusers' names with underscores, for modules that are not split
        there.
    cut: native names that every format stores as their diffusers modules, since other files of the model do so.
    _flat: pattern of a flat name in kohya's keys -> native name, with "{}" for each number.
    _dotted: pattern of a native name -> that name, with "{}" for each number.
    """

    to_diffusers: Mapping[str, tuple[str, ...]]
    extra_modules: tuple[str, ...] = ()
    rows: Callable[[str, int, int, int], list[int]] = fused_rows
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
        # Names without numbers come first: a template could match them as another name.
        templates = sorted((*self.to_diffusers, *self.extra_modules), key=lambda template: "{}" in template)
        flat = {flat_name(template): template for template in templates}
        if self.kohya_by_diffusers:
            flat |= {flat_name(parts[0]): name for name, parts in self.to_diffusers.items() if len(parts) == 1}
        object.__setattr__(self, "_flat", {matcher(key): template for key, template in flat.items()})
        object.__setattr__(self, "_dotted", {matcher(template): template for template in templates})

    def native(self, flat: str) -> str | None:
        """Return the native name of a module from its flat one; None if the family has no such module."""
        for pattern, template in self._flat.items():
            if match := pattern.fullmatch(flat):
                return filled(template, match.groups())
        return None

    def flat(self, name: str) -> str:
        """Return the flat name of a native module in a file with kohya's keys."""
        parts = self.diffusers(name) if self.kohya_by_diffusers else ()
        return flat_name(parts[0] if len(parts) == 1 else name)

    def fits(self, flat: str, shape: Shape) -> bool:
        """Return whether the module can have a weight of this shape."""
        name = self.native(flat)
        if name is None:
            return False
        rows, columns = self.proportions.get(self.template(name), shape)
        return rows * shape[1] == columns * shape[0]

    def left_out(self, program: str, format: str, names: Sequence[str]) -> list[str]:
        """Select the native names in a LoRA file of this format that a program does not load."""
        for gap in self.gaps:
            if (gap.program, gap.format) == (program, format):
                matches = [name for name in names if any(fnmatchcase(name, pattern) for pattern in gap.names)]
                return list(names) if matches and gap.refuses else matches
        return []

    def knows(self, program: str, format: str) -> bool:
        """Return whether it is known which modules a program loads from a file of this format."""
        return not self.by_rule or program == "ComfyUI" or (format == "diffusers" and bool(self.to_diffusers))

    def template(self, name: str) -> str:
        """Return the template of a native name; the name itself if there is none."""
        return self._entry(name)[0]

    def diffusers(self, name: str) -> tuple[str, ...]:
        """Return the diffusers modules of the native module `name`, in row order; empty if there are none."""
        template, numbers = self._entry(name)
        return tuple(filled(part, numbers) for part in self.to_diffusers.get(template, ()))

    def cut_modules(self, name: str) -> tuple[str, ...]:
        """Return the modules that files store in place of `name`, in row order; empty if they store it whole."""
        return self.diffusers(name) if self.template(name) in self.cut else ()

    def cut_from(self, module: str) -> str | None:
        """Return the native module that contains a module of `cut_modules`; None for any other."""
        for template in self.cut:
            for part in self.to_diffusers[template]:
                if match := matcher(part).fullmatch(module):
                    return filled(template, match.groups())
        return None

    def _entry(self, name: str) -> tuple[str, Sequence[str]]:
        """Return the template of a native name, and the numbers in place of its "{}"."""
        if name not in self.to_diffusers:
            for pattern, template in self._dotted.items():
                if match := pattern.fullmatch(name):
                    return template, match.groups()
        return name, ()

    def diffusers_rows(self, name: str, rows: int, columns: int) -> list[int]:
        """Return the number of output rows of the native module in each of its diffusers modules. rows, columns: the
        native weight's (out, in)."""
        return self.rows(name, len(self.diffusers(name)), rows, columns)

    def diffusers_keys(self, module: str) -> tuple[str, str]:
        """Return the keys of down and up in diffusers' format. U-Nets use those of its attention processors, which
        ComfyUI reads too, unlike PEFT's keys for U-Nets."""
        if not self.unet:
            return f"transformer.{module}.lora_A.weight", f"transformer.{module}.lora_B.weight"
        owner, attention, projection = module.rpartition(".to_")
        key = f"unet.{module}.lora"
        if attention:
            key = f"unet.{owner}.processor.to_{projection.removesuffix('.0')}_lora"
        return f"{key}.down.weight", f"{key}.up.weight"

    def recorded(self) -> str:
        """Serialise the table as JSON for the header of a file; empty for a built-in table."""
        if not self.by_rule:
            return ""
        return json.dumps(
            {
                "modules": self.extra_modules,
                "diffusers": self.to_diffusers,
                "halves_swapped": sorted(self.halves_swapped),
                "unet": self.unet,
                "kohya_by_diffusers": self.kohya_by_diffusers,
                **({"cut": sorted(self.cut)} if self.cut else {}),
                **({"gaps": [[gap.program, gap.format, gap.names] for gap in self.gaps]} if self.gaps else {}),
            }
        )


def read_recorded(text: str) -> NameTable | None:
    """Parse a table written by `recorded`; None if the text is not one."""
    try:
        recorded: dict[str, Any] = parse_json(text, METADATA, "modules")
        diffusers = {str(name): tuple(map(str, parts)) for name, parts in recorded["diffusers"].items()}
        modules, swapped = tuple(map(str, recorded["modules"])), frozenset(map(str, recorded["halves_swapped"]))
        unet, by_diffusers = bool(recorded["unet"]), bool(recorded["kohya_by_diffusers"])
        cut = frozenset(map(str, recorded.get("cut", ())))
        gaps = tuple(Gap(str(p), str(f), tuple(map(str, names))) for p, f, names in recorded.get("gaps", ()))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if any(part.count("{}") != name.count("{}") for name, parts in diffusers.items() for part in parts):
        return None
    if not cut <= diffusers.keys():
        return None
    return NameTable(
        diffusers,
        modules,
        halves_swapped=swapped,
        gaps=gaps,
        by_rule=True,
        unet=unet,
        kohya_by_diffusers=by_diffusers,
        cut=cut,
    )
