"""The repeated blocks of a diffusion model, found by structure: the units of compiling and swapping."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn


@dataclass(frozen=True)
class BlockOfModel:
    """A block of a diffusion model.

    name: its module name, such as double_blocks.3.
    kind: label of its structure; blocks of one kind share a graph.
    module: ComfyUI's module.
    """

    name: str
    kind: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[BlockOfModel]:
    """Find the blocks of a diffusion model by structure, in the order of its modules.

    A block is an entry of a list (ModuleList or Sequential) that holds at least two weight matrices. If all entries of
    a ModuleList are of one class they are blocks, whatever they contain: the layers of a DiT, with their experts.
    Elsewhere the class has to occur more than once, and of nested ones the innermost counts: the transformer and
    residual blocks of a UNet, not the stages that contain them.
    """
    parents = [(name, parent) for name, parent in model.named_modules() if isinstance(parent, _LISTS)]
    entries = [
        _Entry(f"{name}.{key}" if name else key, child, _is_uniform(parent))
        for name, parent in parents
        for key, child in parent.named_children()
        if _could_be_block(child)
    ]
    times = Counter(type(entry.module) for entry in entries)
    candidates = [entry for entry in entries if entry.uniform or times[type(entry.module)] > 1]
    candidate_ids = {id(entry.module) for entry in candidates}
    inside: set[int] = set()
    blocks = []
    for entry in candidates:  # outer ones come first
        descendant_ids = {id(m) for m in entry.module.modules()} - {id(entry.module)}
        if id(entry.module) in inside or (not entry.uniform and descendant_ids & candidate_ids):
            continue
        inside |= descendant_ids
        blocks.append(BlockOfModel(entry.name, kind_of(entry.module), entry.module))
    return blocks


def most_blocks(matrices: Iterable[str]) -> int:
    """Return an upper bound on the blocks that `find_blocks` finds in a model whose file holds these matrices by name,
    such as double_blocks.3.img_mlp.0.weight. It counts entries of lists with two matrices, and is exact if no block
    holds a list of such entries."""
    return sum(1 for count in _entries(matrices).values() if count >= 2)


def in_blocks(matrices: Sequence[str]) -> list[str]:
    """Select the matrices of a file, by name, that are in an entry of a list with at least two of them."""
    inside = _entries(matrices)
    return [name for name in matrices if any(inside[entry] >= 2 for entry in _entries_of(name))]


def _entries(matrices: Iterable[str]) -> Counter[str]:
    return Counter(entry for name in matrices for entry in _entries_of(name))


def _entries_of(name: str) -> list[str]:
    """Return the list entries that contain a module: a.3 and a.3.b.0 for a.3.b.0.weight."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


_LISTS = (nn.ModuleList, nn.Sequential)


class _Entry(NamedTuple):
    """Entry of a list that could be a block.

    name: its module name.
    module: ComfyUI's module.
    uniform: all entries of its list, a ModuleList, are of one class.
    """

    name: str
    module: nn.Module
    uniform: bool


def _could_be_block(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and _weight_matrices(module) >= 2


def _is_uniform(parent: nn.Module) -> bool:
    """Return whether a module is a ModuleList of blocks of one class; also of a single one, as in a model of one
    layer."""
    children = list(parent.children())
    one_class = len({type(child) for child in children}) == 1
    return isinstance(parent, nn.ModuleList) and one_class and all(map(_could_be_block, children))


def _weight_matrices(module: nn.Module) -> int:
    """Count the layers inside that have a weight and take features or channels: Linears, convolutions and their
    replacements in other packs (also quantised ones, whose weight may be no plain parameter)."""
    return sum(
        1
        for inner in module.modules()
        if hasattr(inner, "weight") and (hasattr(inner, "in_features") or hasattr(inner, "in_channels"))
    )


def kind_of(block: nn.Module) -> str:
    """Make the key of a block's class and its parameters' names, shapes and dtypes: ClassName:digest."""
    shapes = ";".join(f"{name}{tuple(p.shape)}{p.dtype}" for name, p in block.named_parameters())
    inner = ";".join(type(module).__qualname__ for module in block.modules())
    digest = hashlib.sha256(f"{shapes}|{inner}".encode()).hexdigest()[:8]
    return f"{type(block).__name__}:{digest}"


def list_of(block: BlockOfModel) -> str:
    """Return the name of the list that contains a block."""
    return block.name.rpartition(".")[0]


def lists_of(blocks: Sequence[BlockOfModel]) -> dict[str, list[BlockOfModel]]:
    """Group the blocks by the name of the list that contains them."""
    by_list: dict[str, list[BlockOfModel]] = {}
    for block in blocks:
        by_list.setdefault(list_of(block), []).append(block)
    return by_list


def numbered(blocks: Sequence[BlockOfModel]) -> dict[str, BlockOfModel]:
    """Map the names used for swapping, list and index, to the blocks."""
    return {f"{name}.{i}": block for name, members in lists_of(blocks).items() for i, block in enumerate(members)}


def block_lists(model: nn.Module, blocks: Sequence[BlockOfModel]) -> dict[str, list[BlockOfModel]]:
    """Find the ModuleLists that consist of blocks only, two or more of them: name of the list → its blocks in order."""
    by_name = {block.name: block for block in blocks}
    lists = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            members = [by_name.get(f"{name}.{index}") for index in range(len(module))]
            if all(member is not None for member in members):
                lists[name] = [member for member in members if member is not None]
    return lists


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every Linear of the model by its module name, without reading a weight."""
    modules = model.diffusion_model.named_modules()
    return {name: (m.out_features, m.in_features) for name, m in modules if hasattr(m, "in_features")}
