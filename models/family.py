"""What every model family gives to the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..memory.residency import FrozenModule
from .latents import LatentPolicy
from .lora_linear import LoraLinear

RunBlock = Callable[..., Any]


@dataclass(frozen=True)
class ModelInputs:
    """One batch as the transformer takes it; B samples of one token count N and one text length L.

    tokens: (B, N, C·patch) noisy latents; positions: (B, N, axes) ids of the kept tokens; text: (B, L, D);
    pooled: (B, P) or None; timestep: (B,) fp32; guidance: (B,) or None.
    """

    tokens: Tensor
    positions: Tensor
    text: Tensor
    pooled: Tensor | None
    timestep: Tensor
    guidance: Tensor | None


class Block(nn.Module):
    """One transformer block over frozen weights. `kind` names the structure that blocks of one graph share."""

    kind: str

    def linears(self) -> dict[str, LoraLinear]:
        """The block's Linears by their name inside the block."""
        return {name: module for name, module in self.named_modules() if isinstance(module, LoraLinear)}

    def native_name(self, name: str) -> str:
        """The model's own name, inside the block, of the Linear called `name` here."""
        raise AssertionError(f"{type(self).__name__} has no native_name")

    def lora_rows(self, image_tokens: int, text_tokens: int) -> dict[str, int]:
        """How many rows each Linear sees per sample: the height of a dropout mask over its rank activations."""
        raise AssertionError(f"{type(self).__name__} has no lora_rows")

    def structure(self) -> str:
        """Blocks of equal structure share one compiled graph: the kind and which Linears carry a LoRA."""
        return f"{self.kind}:" + ",".join(name for name, lin in self.linears().items() if lin.lora_down is not None)


class Transformer(Protocol):
    """A model ready to train: `forward` runs its blocks through `run(block, *tensors)`."""

    def blocks(self) -> Sequence[tuple[str, Block]]: ...

    def linears(self) -> dict[str, LoraLinear]: ...

    def frozen_modules(self) -> list[FrozenModule]:
        """Everything that holds frozen weights."""
        ...

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor: ...


@dataclass(frozen=True)
class NoisySample:
    """One sample as a step sees it: latent x_t (C, H, W) in the model's space, fp32; its text (1, L, D) and the rest of
    its conditioning; how many of its tokens are kept."""

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True)
class Patches:
    """A latent cut into tokens: tokens (N, C·patch) in row order, positions (N, axes)."""

    tokens: Tensor
    positions: Tensor


class Family(Protocol):
    """One architecture: how its latents become tokens, how its forward runs, what its LoRAs train by default."""

    name: str
    latents: LatentPolicy
    default_targets: tuple[str, ...]
    default_shift: float
    swap_order: tuple[str, ...]

    def matches(self, model: Any) -> bool: ...

    def variant(self, model: Any) -> str: ...

    def text_width(self, model: Any) -> int: ...

    def pooled_width(self, model: Any) -> int: ...

    def notes(self, model: Any, text_lengths: Sequence[int]) -> list[str]: ...

    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
    ) -> Transformer: ...

    def block_lists(self, model: Any) -> dict[str, int]: ...

    def cut(self, latent: Tensor, keep: int) -> Patches: ...

    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ModelInputs: ...

    def linear_names(self, model: Any) -> list[str]: ...
