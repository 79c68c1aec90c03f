"""Plan of a network: the adapter of each layer, determined before any weight is read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ..common.text import quantity
from ..models.adapters.base import AdapterSpec, Layers
from ..models.adapters.registry import ADAPTERS, CONVOLUTIONS, adapter_kind
from ..models.blocks import linear_shapes
from ..models.convolutions import WeightShape, as_matrix, convolutions, layer_shapes, weight_shapes
from ..models.family import Family
from .options import NetworkOptions
from .patterns import (
    match_rank_patterns,
    match_targets,
    rank_and_alpha,
)

Size = tuple[int, int]


def choose_targets(family: Family, model: Any, options: NetworkOptions) -> list[str]:
    """Choose the layers to train, by name: Linears, and convolutions if a pattern matches no Linear. Needs no weights,
    so that a wrong pattern fails before anything is loaded; raises ValueError for it."""
    shapes, convs = linear_shapes(model), convolutions(model.diffusion_model)
    trainable = [name for name in shapes if not any(fnmatchcase(name, pattern) for pattern in family.never_trained)]
    targets = match_targets(trainable, options.include or family.default_targets, options.exclude, list(convs))
    if options.kind not in CONVOLUTIONS and (unsupported := [name for name in targets if name in convs]):
        algorithms = [repr(name) for name, kind in ADAPTERS.items() if kind in CONVOLUTIONS]
        raise ValueError(
            f"algorithm is {options.algorithm}, which has no form for convolutions such as {unsupported[0]}; set it to "
            f"{' or '.join(algorithms)}, or leave the {quantity(len(unsupported), 'convolution')} out in targets."
        )
    options.kind.check_layers(_layers(adapter_specs(options, targets), shapes))
    return targets


def _layers(specs: Mapping[str, AdapterSpec], shapes: Mapping[str, Size]) -> Layers:
    """List the layers whose shape is known."""
    return [(name, spec, shapes[name]) for name, spec in specs.items() if name in shapes]


def base_spec(options: NetworkOptions) -> AdapterSpec:
    """Return the adapter of a layer that no rank pattern matches."""
    return AdapterSpec(options.algorithm, options.rank, options.alpha, options.factor, options.constraint, options.init)


def adapter_specs(options: NetworkOptions, targets: Sequence[str]) -> dict[str, AdapterSpec]:
    """Return the adapter of each target; several matching rank patterns apply in order.

    Raises ValueError for a pattern that matches no target.
    """
    base, lines = base_spec(options), options.rank_lines
    specs = {}
    for name, numbers in match_rank_patterns(lines, targets).items():
        rank, alpha = rank_and_alpha(lines, numbers, (base.rank, base.alpha))
        specs[name] = replace(base, rank=rank, alpha=alpha)
    return specs


def parameter_count(spec: AdapterSpec, size: Size) -> int:
    """Count the trained parameters of an adapter on a layer (out, in)."""
    return sum(prod(shape) for shape in adapter_kind(spec).shapes(spec, *size).values())


def network_notes(options: NetworkOptions, family: Family, model: Any, targets: Sequence[str]) -> list[str]:
    """Return notes for the user about these options on this model, one sentence each."""
    specs, shapes = adapter_specs(options, targets), layer_shapes(model)
    lists = tuple(f"{name}." for name in family.forward.block_lists(model))
    outside = [name for name in targets if not name.startswith(lists)]
    notes = []
    kinds = [kind for kind in ("dropout", "rank_dropout", "module_dropout") if getattr(options, kind)]
    if kinds and outside:
        works = "works" if len(kinds) == 1 else "work"
        notes.append(
            f"{' and '.join(kinds)} {works} only inside the blocks, so "
            f"{quantity(len(outside), 'trained layer outside has', 'trained layers outside have')} none."
        )
    notes += options.kind.layer_notes(_layers(specs, shapes))
    if options.rank_patterns.strip():
        kinds_before = _block_kinds(family, model, dict.fromkeys(targets))
        if (kinds_now := _block_kinds(family, model, specs)) > kinds_before:
            notes.append(
                f"rank_patterns split {kinds_before} block types into {kinds_now}, and each is compiled separately: "
                f"{kinds_now} graphs for each token count and text length."
            )
    return notes


def _block_kinds(family: Family, model: Any, layer_values: Mapping[str, Any]) -> int:
    """Count the block types, which differ in the values of their layers."""
    kinds = set()
    for name, length in family.forward.block_lists(model).items():
        for index in range(length):
            prefix = f"{name}.{index}."
            layers = frozenset((n.removeprefix(prefix), v) for n, v in layer_values.items() if n.startswith(prefix))
            kinds.add((name, layers))
    return len(kinds)


def describe_network(options: NetworkOptions, family: Family, model: Any) -> str:
    """Describe the network on this model: layers, their number, trained parameters, size of the file.

    Raises ValueError as `choose_targets` does.
    """
    targets, shapes = choose_targets(family, model, options), weight_shapes(model)
    specs = adapter_specs(options, targets)
    groups: dict[tuple[str, AdapterSpec, WeightShape], list[int]] = {}
    for name in targets:
        index = re.search(r"\.(\d+)\.", name)
        template = name if index is None else f"{name[: index.start()]}.{{}}.{name[index.end() :]}"
        groups.setdefault((template, specs[name], shapes[name]), []).append(int(index.group(1)) if index else -1)
    rows = []
    for (template, spec, shape), indices in groups.items():
        name = template.replace("{}", _ranges(indices))
        numbers = len(indices) * parameter_count(spec, as_matrix(shape))
        rows.append((name, f"{len(indices)} ×", "×".join(map(str, shape)), f"rank {spec.rank}", f"{numbers:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    total = sum(parameter_count(specs[name], as_matrix(shapes[name])) for name in targets)
    head = (
        f"{options.algorithm} on {len(targets)} of {len(shapes)} layers of {family.title}: {total:,} trained numbers, "
        f"{_size(4 * total * options.kind.file_ranks)} as fp32, {_size(2 * total * options.kind.file_ranks)} as bf16"
    )
    notes = network_notes(options, family, model, targets)
    return "\n".join([head, "", *lines, *(["", *notes] if notes else [])])


def _ranges(indices: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as 0-2,5."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
