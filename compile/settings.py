"""Settings of Compile Model."""

import fnmatch
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..common.text import quoted
from ..common.untrusted.budgets import SETTINGS, check_size

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DYNAMIC = {"auto": None, "true": True, "false": False}
SCOPES = ("blocks", "stack", "model")
EAGER = "eager"  # in an override: not compiled at all

# Values of the presets: name → (mode, scope).
PRESETS = {
    "fast start": ("default", "blocks"),
    "balanced": ("max-autotune-no-cudagraphs", "blocks"),
    "maximum speed": ("max-autotune-no-cudagraphs", "stack"),
}

# mode with CUDA graphs → the same without.
_CUDA_GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
# Backends that torch lists for its own tests and debugging.
_NOT_FOR_USERS = re.compile(r"TESTING|minifier|crossref|eager_debug|eager_noexcept|invoke_subgraph|_with_mode")
_KNOWN_FIRST = ("inductor", "cudagraphs", "aot_eager", "eager")


@dataclass(frozen=True)
class CompileOptions:
    """Arguments of `torch.compile` for one region.

    backend: name of a backend of torch.compile.
    mode: one of MODES.
    dynamic: auto, true or false.
    fullgraph: a graph break is an error.
    limit: the most graphs that the region may hold.
    """

    backend: str = "inductor"
    mode: str = "default"
    dynamic: str = "auto"
    fullgraph: bool = False
    limit: int = 64

    def cuda_graphs(self) -> bool:
        return self.backend == "cudagraphs" or (self.backend == "inductor" and self.mode in _CUDA_GRAPH_MODES)

    def without_cuda_graphs(self) -> "CompileOptions":
        """Return the nearest settings without CUDA graphs; the backend cudagraphs becomes inductor."""
        if not self.cuda_graphs():
            return self
        return replace(self, backend="inductor", mode=_CUDA_GRAPH_MODES.get(self.mode, self.mode))


@dataclass(frozen=True)
class Override:
    """One line of overrides.

    pattern: of the blocks that it applies to.
    eager: the blocks are not compiled.
    changes: (setting, value) pairs.
    """

    pattern: str
    eager: bool = False
    changes: tuple[tuple[str, str], ...] = ()

    def matches(self, block: str) -> bool:
        """Return True if the line applies to a block.

        block: its name inside the diffusion model, such as double_blocks.3.
        """
        return _matches(self.pattern, block)

    def apply(self, options: CompileOptions) -> CompileOptions:
        changes = {key: value == "true" if key == "fullgraph" else value for key, value in self.changes}
        return replace(options, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CompileSettings:
    """Settings of a Compile Model node.

    backend: name of a backend of torch.compile.
    mode: one of MODES.
    dynamic: auto, true or false.
    fullgraph: a graph break is an error.
    cache_size_limit: the most graphs that a region may hold.
    scope: one of SCOPES.
    overrides: settings of some blocks; the last that matches a block wins.
    """

    backend: str = "inductor"
    mode: str = "default"
    dynamic: str = "auto"
    fullgraph: bool = False
    cache_size_limit: int = 64
    scope: str = "blocks"
    overrides: tuple[Override, ...] = ()

    def options(self) -> CompileOptions:
        return CompileOptions(self.backend, self.mode, self.dynamic, self.fullgraph, self.cache_size_limit)

    def options_for(self, block: str) -> CompileOptions | None:
        """Return the settings of the block of this name, None for eager.

        The last line of the overrides that matches wins.
        """
        for override in reversed(self.overrides):
            if override.matches(block):
                return None if override.eager else override.apply(self.options())
        return self.options()

    def distinct_options(self, blocks: Sequence[str]) -> list[CompileOptions]:
        """List the distinct arguments of torch.compile for blocks of these names, and for the model as a whole."""
        kinds = {options for options in (self.options_for(block) for block in blocks) if options is not None} | {
            self.options()
        }
        return sorted(kinds, key=str)

    def check(self) -> None:
        """Raise ValueError, in a sentence, for an invalid value."""
        if self.mode not in MODES:
            raise ValueError(f"mode is {quoted(self.mode)}; choose one of {', '.join(MODES)}.")
        if self.dynamic not in DYNAMIC:
            raise ValueError(f"dynamic is {quoted(self.dynamic)}; choose one of {', '.join(DYNAMIC)}.")
        if self.scope not in SCOPES:
            raise ValueError(f"scope is {quoted(self.scope)}; choose one of {', '.join(SCOPES)}.")
        if self.cache_size_limit < 1:
            raise ValueError(f"cache_size_limit is {self.cache_size_limit}; it has to be at least 1.")
        for backend in {self.backend, *(value for o in self.overrides for key, value in o.changes if key == "backend")}:
            check_backend(backend)

    def ignored(self, blocks: Sequence[str], device: torch.device) -> list[str]:
        """Return a sentence for each setting that does less here than it says.

        blocks: the names of the model's blocks. Raises ValueError for an override that matches none of them.
        """
        notes = []
        for options in self.distinct_options(blocks):
            if options.cuda_graphs() and device.type != "cuda":
                setting = f"mode {options.mode}" if options.backend == "inductor" else f"the backend {options.backend}"
                notes.append(f"{setting} uses no CUDA graphs here: the model runs on {device.type}.")
        for override in self.overrides:
            if not any(override.matches(block) for block in blocks):
                patterns = ", ".join(dict.fromkeys(f"{block.rpartition('.')[0]}.*" for block in blocks)) or "none"
                raise ValueError(f"overrides: {override.pattern} matches no block of this model, which has {patterns}.")
        missing = {"recompile_limit", "isolate_recompiles"} - set(inspect.signature(torch.compile).parameters)
        if missing:
            notes.append(
                f"torch {torch.__version__} has no limit for each region: cache_size_limit is set in torch's "
                "configuration for the time of each call, and compiled models share it."
            )
        return notes


def backends() -> list[str]:
    """List the backends of this torch, the usual ones first."""
    listed = [name for name in torch._dynamo.list_backends(exclude_tags=()) if not _NOT_FOR_USERS.search(name)]
    return list(_KNOWN_FIRST) + [name for name in listed if name not in _KNOWN_FIRST]


def check_backend(name: str) -> None:
    """Raise ValueError for a backend that is not available. Backends that torch lists may still lack their package."""
    from importlib.util import find_spec

    needed = {"tvm": "tvm", "openxla": "torch_xla", "openxla_eval": "torch_xla"}.get(name)
    if needed and find_spec(needed) is None:
        raise ValueError(f"backend {name} needs the package {needed}, which is not installed; choose inductor.")
    try:
        torch._dynamo.lookup_backend(name)
    except Exception as error:
        raise ValueError(f"backend {name!r} is not installed; choose one of {', '.join(backends())}.") from error


def dynamic_named(value: Any) -> str:
    """Normalise a value of dynamic: Python and JSON spell true and false differently from torch's manual.

    Raises ValueError for any other value.
    """
    name = str(value).strip().lower()
    if name not in DYNAMIC:
        raise ValueError(f"dynamic is {quoted(value)}; choose one of {', '.join(DYNAMIC)}.")
    return name


def parse_overrides(text: str) -> tuple[Override, ...]:
    """Parse the lines of the overrides field.

    A line is a pattern of blocks, then `eager` or any of backend=, mode=, dynamic=, fullgraph=. A pattern may have
    wildcards and ranges: double_blocks.*, single_blocks.0-9. Empty lines and comments after a # are skipped. Raises
    ValueError, in a sentence, for a line without a setting, or with unknown, repeated or conflicting ones, and for a
    text that is too long.
    """
    check_size(SETTINGS, "overrides", characters=len(text))
    overrides = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        overrides.append(_parse_line(number, words[0], words[1:]))
    return tuple(overrides)


def _parse_line(number: int, pattern: str, words: list[str]) -> Override:
    place = f"overrides, line {number}"
    if not words:
        raise ValueError(f"{place}: {pattern} has no setting; write eager or, for example, mode=max-autotune after it.")
    if EAGER in words:
        if len(words) > 1:
            raise ValueError(f"{place}: eager blocks are not compiled, so eager can't be combined with other settings.")
        return Override(pattern, eager=True)
    allowed = {"backend": None, "mode": MODES, "dynamic": tuple(DYNAMIC), "fullgraph": ("true", "false")}
    changes: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in allowed:
            raise ValueError(
                f"{place}: {quoted(word)} is not known; write eager, {', '.join(f'{k}=…' for k in allowed)}."
            )
        if key in changes:
            raise ValueError(f"{place}: {key} is given twice.")
        values = allowed[key]
        if key in ("dynamic", "fullgraph"):
            value = value.lower()
        if values is not None and value not in values:
            raise ValueError(f"{place}: {key} is {quoted(value)}; choose one of {', '.join(values)}.")
        changes[key] = value
    return Override(pattern, changes=tuple(changes.items()))


def _matches(pattern: str, block: str) -> bool:
    """Match part by part between the dots, so that a * or a range matches one number only.

    A pattern that ends in .* or in a list's name covers everything below it.
    """
    globs, parts = pattern.split("."), block.split(".")
    if len(globs) > len(parts):
        return False
    return all(_part_matches(glob, part) for glob, part in zip(globs, parts, strict=False))


def _part_matches(pattern: str, part: str) -> bool:
    if (numbers := re.fullmatch(r"(\d{1,9})-(\d{1,9})", pattern)) and part.isdigit():
        return int(numbers[1]) <= int(part) <= int(numbers[2])
    return fnmatch.fnmatchcase(part, pattern)
