"""What every model family gives to the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..memory.host.to_device import to_device
from ..memory.weights.residency import FrozenModule
from .latents import LatentPolicy
from .layers.lora_linear import LoraLinear

RunBlock = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One batch as the transformer takes it; B samples of one token count N, R reference tokens and one text length L.

    tokens: (B, N, C·patch) noisy latents; references: (B, R, C·patch) clean latents of reference pictures, or None;
    text: (B, L, D), padded; timestep: (B,) fp32, or (B, frames). A family adds what else its forward takes, with the
    names in `on_host` of what its forward reads on the host.
    """

    on_host: ClassVar[tuple[str, ...]] = ()

    tokens: Tensor
    text: Tensor
    timestep: Tensor
    references: Tensor | None = None

    @property
    def image_tokens(self) -> int:
        """N + R, the length of the picture's stream."""
        return self.tokens.shape[1] + (0 if self.references is None else self.references.shape[1])

    @property
    def text_tokens(self) -> int:
        return self.text.shape[1]

    def to(self, device: torch.device) -> "ModelInputs":
        """The same on the device, but for what is read on the host."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in self.on_host}
        return replace(self, **{n: to_device(t, device) for n, t in tensors.items() if isinstance(t, Tensor)})


class Block(nn.Module):
    """One transformer block over frozen weights. `kind` names the structure that blocks of one graph share."""

    kind: str

    def linears(self) -> dict[str, LoraLinear]:
        """The block's Linears by their name inside the block."""
        return {name: module for name, module in self.named_modules() if isinstance(module, LoraLinear)}

    def native_name(self, name: str) -> str:
        """The model's own name, inside the block, of the Linear called `name` here."""
        raise AssertionError(f"{type(self).__name__} has no native_name")

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        """How many rows each Linear sees per sample: the height of a dropout mask over its rank activations."""
        raise AssertionError(f"{type(self).__name__} has no lora_rows")

    def structure(self) -> str:
        """Blocks of equal structure share one compiled graph: the kind, how each Linear is stored, and which carry what
        kind of adapter of what rank."""
        linears = self.linears().items()
        adapters = (f"{name} {linear.adapter.structure()}" for name, linear in linears if linear.adapter)
        return f"{self.kind}:" + ";".join((*adapters, *(f"{name} {linear.storage}" for name, linear in linears)))


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
    """One sample as a step sees it.

    latent: x_t in the model's space, fp32, (C, H, W), or (C, T, H, W) where the model works on clips.
    text: (1, l, D) as it was encoded; text_length: L, to which the family pads it.
    conditioning: the rest of ComfyUI's conditioning.
    tokens: how many of its tokens are kept; clean_frames: how many latent frames at its start carry no noise.
    """

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]
    tokens: int
    text_length: int
    clean_frames: int = 0


@dataclass(frozen=True)
class SampleFacts:
    """What is known of a sample before its tensors are read: its name for messages, its latent frames, the tokens of
    each reference picture, how many of its frames are given clean, what its conditioning carries, and the tokens of its
    caption as it was encoded."""

    name: str
    frames: int
    references: tuple[int, ...]
    clean_frames: int
    conditioning: frozenset[str]
    text_length: int = 0


@dataclass(frozen=True)
class Origin:
    """What a LoRA file says of its model: ModelSpec's architecture and implementation, and the version and the module
    that kohya's and musubi's keys name, empty where they have none."""

    architecture: str
    implementation: str
    kohya_version: str = ""
    kohya_module: str = ""


@dataclass(frozen=True)
class Patches:
    """A latent cut into tokens: tokens (N, C·patch), frame after frame in row order; positions (N, axes)."""

    tokens: Tensor
    positions: Tensor


class Family(Protocol):
    """One architecture: how its latents become tokens, how its forward runs, what its LoRAs train by default.

    name: in metadata and in keys. title: in messages. default_targets: patterns of the Linears that a LoRA trains.
    swap_order: the lists of blocks, first the one whose blocks are swapped first.
    """

    name: str
    title: str
    default_targets: tuple[str, ...]
    swap_order: tuple[str, ...]

    def matches(self, model: Any) -> bool: ...

    def variant(self, model: Any) -> str: ...

    def origin(self, model: Any) -> Origin: ...

    def latents(self, model: Any) -> LatentPolicy: ...

    def shift(self, model: Any, tokens: int) -> float:
        """How far training moves the sigma of a sample of that many tokens (references apart) towards noise by default,
        as `objective.shift_sigma` does."""
        ...

    def expert_boundary(self, model: Any) -> float | None:
        """The sigma below which a second model, the low noise expert, takes over from one of this kind; None for models
        that come alone."""
        ...

    def takes_guidance(self, model: Any) -> bool:
        """Whether the model is told a guidance, as those are that guidance was distilled into."""
        ...

    def text_width(self, model: Any) -> int: ...

    def pooled_width(self, model: Any) -> int: ...

    def vision_width(self, model: Any) -> int:
        """The width of what CLIP vision saw of a start picture, as the model takes it; 0 where it takes none."""
        ...

    def text_length(self, model: Any, length: int) -> int:
        """The length that a caption of `length` encoded tokens takes in the model's sequence."""
        ...

    def check(self, model: Any, sample: SampleFacts) -> None:
        """Raises ValueError, with the fix, for a sample that this model does not train on."""
        ...

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        """What a user should know about these samples on this model, a sentence each."""
        ...

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
    ) -> ModelInputs:
        """The batch as the transformer takes it, on the device of sigma, (B,) fp32, where the latents lie too. Training
        makes it on the host, where reading a number waits for nothing, and moves it as a whole. Raises ValueError for a
        conditioning that this forward does not run."""
        ...


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of every Linear of the model by its module name, without reading a weight."""
    modules = model.diffusion_model.named_modules()
    return {name: (m.out_features, m.in_features) for name, m in modules if hasattr(m, "in_features")}
