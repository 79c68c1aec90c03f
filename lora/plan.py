"""Plan of a network: the adapter of each layer, determined before any weight is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from ..models.adapters.base import AdapterSpec, factorize
from ..models.adapters.lokr import LokrAdapter
from ..models.adapters.oft import block_size
from ..models.adapters.registry import ADAPTERS, CONVOLUTIONS
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
    if options.algorithm not in CONVOLUTIONS and (unsupported := [name for name in targets if name in convs]):
        raise ValueError(
            f"algorithm is {options.algorithm}, which has no form for convolutions such as {unsupported[0]}; set it to "
            f"'lora', or leave the {len(unsupported)} convolutions out in targets."
        )
    specs = adapter_specs(options, targets)
    if options.algorithm == "oft":
        _check_oft(specs, shapes)
    return targets


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


def _check_oft(specs: Mapping[str, AdapterSpec], shapes: Mapping[str, Size]) -> None:
    for name, spec in specs.items():
        if ADAPTERS["oft"].shapes(spec, *shapes[name])["oft_blocks"][1] == 1:
            raise ValueError(
                f"oft cannot cut {name}, whose output is {shapes[name][0]}, into blocks of at most rank {spec.rank}; "
                "raise rank, or leave the layer out in targets."
            )


def parameter_count(spec: AdapterSpec, size: Size) -> int:
    """Count the trained parameters of an adapter on a layer (out, in)."""
    return sum(prod(shape) for shape in ADAPTERS[spec.algorithm].shapes(spec, *size).values())


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
            f"{' and '.join(kinds)} {works} only inside the blocks, so {len(outside)} trained layers outside have none."
        )
    notes += _too_large(specs, shapes)
    if options.rank_patterns.strip():
        kinds_before = _block_kinds(family, model, dict.fromkeys(targets))
        if (kinds_now := _block_kinds(family, model, specs)) > kinds_before:
            notes.append(
                f"rank_patterns split {kinds_before} block types into {kinds_now}, and each is compiled separately: "
                f"{kinds_now} graphs for each token count and text length."
            )
    return notes


def _too_large(specs: Mapping[str, AdapterSpec], shapes: Mapping[str, Size]) -> list[str]:
    """Return notes about ranks that a layer cannot use."""
    algorithm = next(iter(specs.values())).algorithm
    if algorithm in ("lora", "dora"):
        high = [n for n, spec in specs.items() if spec.rank > min(shapes[n])]
        if high:
            return [
                f"rank {specs[high[0]].rank} is more than {len(high)} of the layers can use, such as {high[0]} of "
                f"{shapes[high[0]][0]} × {shapes[high[0]][1]}."
            ]
    if algorithm == "loha":
        high = [n for n, spec in specs.items() if spec.rank**2 > min(shapes[n])]
        if high:
            return [
                f"loha of rank {specs[high[0]].rank} reaches rank {specs[high[0]].rank ** 2}, more than {len(high)} of "
                f"the layers can use, such as {high[0]} of {shapes[high[0]][0]} × {shapes[high[0]][1]}; it takes the "
                "time and the memory of a LoRA of that rank."
            ]
    if algorithm == "oft":
        small = {n: size for n, spec in specs.items() if (size := block_size(shapes[n][0], spec.rank)) < spec.rank}
        if small:
            name, size = next(iter(small.items()))
            return [
                f"oft cuts {len(small)} of {len(specs)} layers into smaller blocks than rank {specs[name].rank}, such "
                f"as {name} into blocks of {size}: the largest divisor of its {shapes[name][0]} outputs."
            ]
    if algorithm == "lokr":
        return [*_other_factors(specs, shapes), *_full_matrices(specs, shapes)]
    return []


def _other_factors(specs: Mapping[str, AdapterSpec], shapes: Mapping[str, Size]) -> Iterator[str]:
    """Yield a note about layers that LoKr's factor does not divide."""
    cuts = {n: {factorize(size, spec.factor)[0] for size in shapes[n]} for n, spec in specs.items()}
    other = {n: factors for n, spec in specs.items() if spec.factor > 0 and (factors := cuts[n] - {spec.factor})}
    if other:
        name, factors = next(iter(other.items()))
        yield (
            f"lokr cuts {len(other)} of {len(specs)} layers otherwise than by factor {specs[name].factor}, such as "
            f"{name} of {shapes[name][0]} × {shapes[name][1]} by {' and '.join(map(str, sorted(factors)))}: the "
            "largest divisor up to it."
        )


def _full_matrices(specs: Mapping[str, AdapterSpec], shapes: Mapping[str, Size]) -> Iterator[str]:
    """Yield a note about layers whose second matrix LoKr keeps whole."""
    whole = [n for n, spec in specs.items() if LokrAdapter.is_full_matrix(spec, *shapes[n])]
    if whole:
        yield (
            f"lokr keeps its second matrix whole in {len(whole)} of {len(specs)} layers, as a pair of rank "
            f"{specs[whole[0]].rank} would save little; rank and alpha are not used there."
        )


def _block_kinds(family: Family, model: Any, layer_values: Mapping[str, Any]) -> int:
    """Count the kinds of blocks, which differ in the values of their layers."""
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
        f"{_size(4 * total * options.file_ranks)} as fp32, {_size(2 * total * options.file_ranks)} as bf16"
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
