"""The LoRA network: which Linears are trained, their fp32 masters, and their file form."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.family import Block, Family, ModelInputs, Transformer, linear_shapes
from ..models.lora_linear import LoraLinear
from .draws import generator
from .lora_model import LoraModel, LowRank
from .options import NetworkOptions
from .targets import match_targets


class LoraNetwork:
    """One pair (down, up) per target Linear, attached to a transformer.

    down starts as torch's Kaiming-uniform Linear weight, drawn from (seed, module name); up starts at zero, so that
    the first step starts from the model as it is (arXiv 2106.09685, section 4.1).
    """

    def __init__(self, options: NetworkOptions, targets: Sequence[str], linears: dict[str, LoraLinear], seed: int):
        self.options = options
        self.names = tuple(targets)
        self.pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name in self.names:
            weight = linears[name].weight
            (out_features, in_features), device = weight.shape, weight.device
            bound = 1.0 / math.sqrt(in_features)
            down = torch.empty(options.rank, in_features).uniform_(
                -bound, bound, generator=generator(seed, "lora", name)
            )
            up = torch.zeros(out_features, options.rank)
            pair = nn.Parameter(down.to(device)), nn.Parameter(up.to(device))
            self.pairs[name] = pair
        self.attach(linears)

    def attach(self, linears: dict[str, LoraLinear]) -> None:
        """Puts the LoRA on these Linears."""
        for name, pair in self.pairs.items():
            linears[name].add_lora(*pair, scale=self.options.alpha / self.options.rank)

    def parameters(self) -> list[nn.Parameter]:
        return [p for pair in self.pairs.values() for p in pair]

    def masters(self) -> dict[str, Tensor]:
        """The fp32 masters by `<module>.down` / `<module>.up`, for the state file."""
        return {
            f"{n}.{side}": p.detach()
            for n, pair in self.pairs.items()
            for side, p in zip(("down", "up"), pair, strict=True)
        }

    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Puts saved masters back. Raises ValueError where they belong to another network."""
        own = self.masters()
        if own.keys() != masters.keys() or any(own[k].shape != masters[k].shape for k in own):
            raise ValueError(
                "The saved state was trained with another rank or other targets; set them as they were, or set "
                "resume to 'off'."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(masters[name])

    def snapshot(self) -> LoraModel:
        """A copy on the host, in kohya's names."""
        alpha = float(self.options.alpha)
        copies = {n: [p.detach().to("cpu", copy=True) for p in pair] for n, pair in self.pairs.items()}
        return LoraModel.from_modules({n: LowRank(down, up, alpha) for n, (down, up) in copies.items()})

    def draw_masks(
        self,
        block: Block,
        inputs: ModelInputs,
        seed: int,
        key: tuple[int | str, ...],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Dropout masks (B, rows, rank) for one block, from the draw `key`; empty without dropout.

        They are drawn outside the block, so that a recompute of the block sees the same ones.
        """
        p = self.options.dropout
        if p == 0:
            return {}
        masks = {}
        rows = block.lora_rows(inputs)
        for name, linear in block.linears().items():
            if linear.lora_down is None:
                continue
            device = linear.weight.device
            source = generator(seed, *key, name, device=device)
            draw = torch.rand(len(inputs.tokens), rows[name], self.options.rank, generator=source, device=device)
            masks[name] = ((draw >= p) / (1 - p)).to(dtype)
        return masks


def choose_targets(family: Family, model: Any, options: NetworkOptions) -> list[str]:
    """The Linears to train, by name; needs no weights, so that a wrong pattern ends before anything is loaded."""
    return match_targets(list(linear_shapes(model)), options.include or family.default_targets, options.exclude)


def network_notes(options: NetworkOptions, family: Family, model: Any, targets: Sequence[str]) -> list[str]:
    """What a user should know about these options on this model, a sentence each."""
    lists = tuple(f"{name}." for name in family.block_lists(model))
    outside = [name for name in targets if not name.startswith(lists)]
    if not options.dropout or not outside:
        return []
    return [f"dropout works within the blocks; {len(outside)} trained layers outside of them have none."]


def build_network(transformer: Transformer, targets: Sequence[str], options: NetworkOptions, seed: int) -> LoraNetwork:
    return LoraNetwork(options, targets, transformer.linears(), seed)
