"""LoRAs of one algorithm made into another's by the best fit, layer by layer."""

import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...common.rng import generator
from ...common.text import quoted
from ...models.adapters.base import AdapterSpec
from ...models.adapters.loha import LohaAdapter
from ...models.adapters.lokr import LokrAdapter
from ...models.adapters.lora import LoraAdapter
from ...models.adapters.registry import ADAPTERS
from .components import Size
from .hadamard import MOST_RANKS, HadamardUpdate, nearest_hadamard
from .kronecker import nearest_kronecker
from .layerwise import NOTHING, NewLora, Tell, resize_lora
from .updates import Updates

LORA = LoraAdapter.algorithm
LOKR = LokrAdapter.algorithm
LOHA = LohaAdapter.algorithm
ALGORITHMS = (LORA, LOKR, LOHA)
_MUCH = 0.25  # of the change
_ADVICE = {
    LOKR: "That is much: lokr fits well only a change that was trained as one, with the same factor. A smaller factor "
    "leaves less out, in a larger file.",
    LOHA: "That is much: a higher rank leaves less out.",
}


def check_conversion(algorithm: str, factor: int, size: Size) -> None:
    """Raise ValueError, naming the input, for a conversion that does not exist."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {quoted(algorithm)}; choose one of {', '.join(ALGORITHMS)}.")
    if algorithm == LOKR and factor != -1 and factor < 1:
        raise ValueError(f"factor is {factor}; give the size of the small matrix, such as 8, or -1.")
    if algorithm == LOHA and not 1 <= size.rank <= MOST_RANKS:
        raise ValueError(f"rank is {size.rank}; loha needs one from 1 to {MOST_RANKS}, such as 8.")
    if algorithm == LOHA and size.energy < 1:
        raise ValueError(f"energy is {size.energy:g}, and a loha can't be cut by it; set energy to 1 and choose rank.")


def convert_lora(
    lora: Updates, factors: Mapping[str, float], algorithm: str, factor: int, size: Size, tell: Tell
) -> NewLora:
    """Make a LoRA of this algorithm that is near to another of any kind, with its layers multiplied by the factors.

    factor: of LoKr. A LoHa of at most the rank stays as it is in a LoHa.
    """
    if algorithm == LORA:
        return resize_lora(lora, factors, size, tell)
    new_lora = NewLora(algorithm, factor)
    layers = [layer for layer in lora.layers() if factors.get(layer, 1.0)]
    for number, layer in enumerate(layers):
        tell(number, len(layers))
        strength = factors.get(layer, 1.0)
        delta = lora.delta(layer) * strength
        norm = float(delta.norm())
        if norm**2 <= NOTHING:
            continue
        source = generator(0, "convert", layer)
        if algorithm == LOKR:
            new_lora.record(layer, *nearest_kronecker(delta, lora.shapes[layer], factor, size, source), norm)
        else:
            new_lora.record(layer, *_loha(lora, layer, delta, strength, size.rank, source), norm)
    return new_lora


def _loha(
    lora: Updates, layer: str, delta: Tensor, strength: float, rank: int, source: torch.Generator
) -> tuple[HadamardUpdate, float]:
    """Fit a LoHa to delta W of a layer, in which the strength is contained."""
    product = lora.hadamard(layer)
    if product is not None and product.rank <= rank:
        return replace(product, w1_a=product.w1_a * strength), 0.0
    update = lora.low_rank(layer)
    chain = [delta] if update is None else [update.scaled_up * strength, update.down]
    return nearest_hadamard(delta, chain, rank, source)


def advice(new_lora: NewLora) -> list[str]:
    """Say what to change if much of the change is left out."""
    text = _ADVICE.get(new_lora.algorithm)
    return [text] if text and new_lora.loss > _MUCH else []


def with_network(metadata: Mapping[str, str], new_lora: NewLora) -> dict[str, str]:
    """Replace the network in a file's header, if it names one, by that of a new LoRA, which has a layer."""
    if "ss_network_dim" not in metadata:
        return dict(metadata)
    rank = max(update.rank for update in new_lora.updates.values())
    header = {key: text for key, text in metadata.items() if key != "ss_network_args"}
    header |= {"ss_network_dim": str(rank), "ss_network_alpha": str(float(rank))}
    kind, former = ADAPTERS[new_lora.algorithm], metadata.get("ss_network_module", "")
    if not kind.in_kohya:
        args = kind.network_args(AdapterSpec(new_lora.algorithm, rank, float(rank), new_lora.factor))
        texts = {name: str(value) for name, value in args.items()}
        header |= {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps(texts)}
    elif former.startswith("lycoris"):
        del header["ss_network_module"]
    return header
