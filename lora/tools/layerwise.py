"""LoRAs made of others, layer by layer: several merged, one resized, the difference of two models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...common.rng import generator
from ...common.text import quoted
from ...common.untrusted.budgets import SETTINGS, check_size
from ...common.untrusted.patterns import name_matcher
from ...models.adapters.lora import LoraAdapter
from ..files.lora_model import LowRank
from .components import Components, Size, components_of, largest_components
from .merge import WEIGHTED, merge
from .updates import LayerUpdate, Updates, all_layers

Tell = Callable[[int, int], None]
"""Called before each layer with its number and the number of layers; may raise."""
NOTHING = 1e-12  # squared norm below which an update is none
_WORST = 3  # layers that a report names


@dataclass
class NewLora:
    """LoRA in the making.

    algorithm: adapter of the updates.
    factor: LoKr's, into which layers are divided; -1 for as even as possible.
    updates: by native name of the layer.
    losses: share of each layer's norm that its rank leaves out.
    norms: Frobenius norm of each layer's delta W.
    """

    algorithm: str = LoraAdapter.algorithm
    factor: int = -1
    updates: dict[str, LayerUpdate] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    def add(self, layer: str, components: Components, size: Size) -> None:
        """Add the largest components of a layer; none for an update of zeros."""
        if components.total <= NOTHING:
            return
        rank = components.rank_for(size.energy)
        update, loss = components.truncated(min(rank, size.rank) if size.rank else rank)
        self.record(layer, update, loss, components.total**0.5)

    def record(self, layer: str, update: LayerUpdate, loss: float, norm: float) -> None:
        """Add the update of a layer. loss: share of `norm`, of delta W, that it leaves out."""
        self.updates[layer] = update
        self.losses[layer], self.norms[layer] = loss, norm

    @property
    def loss(self) -> float:
        """Share of the norm of the complete change that is left out. There has to be a layer."""
        total = sum(norm**2 for norm in self.norms.values())
        return (sum((self.losses[layer] * norm) ** 2 for layer, norm in self.norms.items()) / total) ** 0.5

    def report(self) -> list[str]:
        """Describe ranks and losses, a sentence a line. There has to be a layer."""
        ranks = sorted(update.rank for update in self.updates.values())
        span = f"{ranks[0]}" if ranks[0] == ranks[-1] else f"{ranks[0]} to {ranks[-1]}"
        count = f"{len(ranks)} layer{'s' if len(ranks) > 1 else ''}"
        kind = "" if self.algorithm == LoraAdapter.algorithm else f" as {self.algorithm}"
        lines = [f"{count}{kind} of rank {span}; {self.loss:.2%} of the change is left out."]
        worst = sorted(self.losses, key=lambda layer: -self.losses[layer])[:_WORST]
        if self.losses[worst[0]] > 1e-3:
            shares = ", ".join(f"{layer} {self.losses[layer]:.1%}" for layer in worst)
            lines.append(f"Most is left out in {shares}.")
        return lines


def merge_loras(
    loras: Sequence[Updates], weights: Sequence[float], method: str, density: float, seed: int, size: Size, tell: Tell
) -> NewLora:
    """Merge LoRAs. With `size.rank` 0 a layer gets as many ranks as the LoRAs have there together; a weighted sum of
    low-rank updates is exact then."""
    new_lora = NewLora()
    layers = all_layers(loras)
    for number, layer in enumerate(layers):
        tell(number, len(layers))
        parts = [lora.low_rank(layer) for lora in loras if layer in lora.read.patches]
        ranks = sum(part.rank for part in parts if part is not None)
        if method == WEIGHTED and None not in parts:
            factors = [weight for weight, lora in zip(weights, loras, strict=True) if layer in lora.read.patches]
            new_lora.add(layer, components_of(_stacked([p for p in parts if p is not None], factors)), size)
            continue
        deltas = [lora.delta(layer) for lora in loras]
        delta = merge(deltas, weights, method, density, _seed(seed, layer))
        new_lora.add(
            layer,
            largest_components(delta, size.rank or ranks or _full_rank(delta), generator(0, "merge", layer)),
            size,
        )
    return new_lora


def resize_lora(lora: Updates, factors: Mapping[str, float], size: Size, tell: Tell) -> NewLora:
    """Change the rank of a LoRA, and multiply its layers by the factors."""
    new_lora = NewLora()
    layers = [layer for layer in lora.layers() if factors.get(layer, 1.0)]
    for number, layer in enumerate(layers):
        tell(number, len(layers))
        factor, update = factors.get(layer, 1.0), lora.low_rank(layer)
        if update is not None:
            new_lora.add(layer, components_of(LowRank(update.down, update.up * factor, update.alpha)), size)
            continue
        delta = lora.delta(layer) * factor
        new_lora.add(
            layer, largest_components(delta, size.rank or _full_rank(delta), generator(0, "resize", layer)), size
        )
    return new_lora


def extract_lora(
    layers: Sequence[str],
    read: Callable[[str], Tensor],
    read_tuned: Callable[[str], Tensor],
    size: Size,
    tell: Tell,
) -> NewLora:
    """Make the LoRA of the difference of two models, with one layer of each in memory at a time.

    read, read_tuned: return the weight of a layer as a matrix (out, in), fp32.
    """
    new_lora = NewLora()
    for number, layer in enumerate(layers):
        tell(number, len(layers))
        delta = read_tuned(layer) - read(layer)
        new_lora.add(
            layer, largest_components(delta, size.rank or _full_rank(delta), generator(0, "extract", layer)), size
        )
    return new_lora


def read_factors(text: str, layers: Sequence[str]) -> dict[str, float]:
    """Parse lines such as `double_blocks.* 0.5` into a factor by layer; a later line goes before an earlier one.

    Raises ValueError for a line without a number, and for one that names no layer.
    """
    check_size(SETTINGS, "blocks", characters=len(text))
    factors: dict[str, float] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        pattern, _, number = line.rpartition(" ")
        factors |= dict.fromkeys(_matching(pattern.strip(), line, layers), _factor(number, line))
    return factors


def _matching(pattern: str, line: str, layers: Sequence[str]) -> Iterator[str]:
    matcher = name_matcher(pattern, "blocks")
    matches = [layer for layer in layers if matcher.match(layer) or layer.startswith(f"{pattern}.")]
    if not matches:
        raise ValueError(
            f"blocks: {quoted(line)} names no layer of the LoRA; write its name and a number, such as {layers[0]} 0.5, "
            "with * for any text."
        )
    yield from matches


def _factor(number: str, line: str) -> float:
    try:
        factor = float(number)
    except ValueError:
        factor = float("nan")
    if not abs(factor) <= 100:
        raise ValueError(f"blocks: {quoted(line)} has no number between -100 and 100 at its end, such as 0.5.")
    return factor


def _stacked(parts: Sequence[LowRank], weights: Sequence[float]) -> LowRank:
    """Join low-rank updates into the one whose delta W is the weighted sum of theirs."""
    down = torch.cat([part.down.float() for part in parts])
    up = torch.cat([weight * part.scaled_up for weight, part in zip(weights, parts, strict=True)], dim=1)
    return LowRank(down, up, float(len(down)))


def _full_rank(delta: Tensor) -> int:
    return min(delta.shape)


def _seed(seed: int, layer: str) -> int:
    return int(torch.randint(2**31, (1,), generator=generator(seed, "dare", layer)))
