"""Default targets of an unnamed model, by the names of its blocks and their Linears."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...blocks import find_blocks, linear_shapes

# Lists of blocks that the noisy latent does not pass through, by words in their names: text, its refiners and adapters,
# modulation, reference pictures, sound and control. `noise_refiner` is the latent's own.
_NOT_OF_THE_LATENT = re.compile(
    r"txt|text|caption|(^|[._])cap([._]|$)|prompt|llm|(?<!noise_)refiner|adapter|connector|encoder|embed"
    r"|guidance|approximator|(^|[._])ref(erence)?([._]|$)|audio|music|vision|(^|[._])visual[.]|vace|control|pose|face|motion|camera"
)
# Words in the names of a block's Linears that are neither attention nor MLP: modulation, by any of its names, the
# embedding of the timestep in a residual block, and sound.
_NOT_TRAINED = frozenset(
    (
        "mod",
        "modc",
        "modx",
        "modcx",
        "modulation",
        "adaln",
        "ada",
        "norm",
        "emb",
        "embed",
        "embedder",
        "time",
        "timestep",
    )
    + ("temb", "generator", "router", "skip", "audio")
)


def default_targets(model: Any) -> tuple[str, ...]:
    """Return patterns of the Linears that a LoRA trains by default: attention and MLP of the lists of blocks that the
    noisy latent passes through. Empty for a model without blocks.

    model: a ComfyUI BaseModel.
    """
    blocks = find_blocks(model.diffusion_model)
    lists = {block.name: block.name.rpartition(".")[0] for block in blocks}
    on_the_way = [name for name, parent in lists.items() if passes_latent(parent)] or list(lists)
    names = list(linear_shapes(model))
    inside = _names_inside(on_the_way, names)
    targets = [name for name in inside if is_trained(name)] or inside
    return as_patterns(targets, names)


def passes_latent(blocks: str) -> bool:
    """Return whether the noisy latent passes through a list of blocks, by its name."""
    return _NOT_OF_THE_LATENT.search(blocks.lower()) is None


def is_trained(name: str) -> bool:
    """Return whether a Linear, by its name, is part of attention or an MLP. Routed experts are not trained: each sees
    only a few of the tokens."""
    return "experts" not in name.split(".") and not _NOT_TRAINED & set(_words(name))


def as_patterns(targets: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return patterns that match `targets` among `names` and nothing else, with `*` for the numbers if that is
    exact."""
    target_set = frozenset(targets)
    patterns: dict[str, None] = {}
    for name in targets:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in patterns:
            continue
        exact = all(other in target_set for other in names if fnmatchcase(other, pattern))
        patterns[pattern if exact else name] = None
    return tuple(patterns)


def _words(name: str) -> Iterable[str]:
    """Split a name into words: adaLN_modulation.1 -> adaln, modulation; norm1 -> norm."""
    return (word.rstrip("0123456789") for word in re.split(r"[._]", name.lower()))


def _names_inside(blocks: Iterable[str], names: Sequence[str]) -> list[str]:
    prefixes = tuple(f"{block}." for block in blocks)
    return [name for name in names if name.startswith(prefixes)]
