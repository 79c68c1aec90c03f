"""The interface between a model family and the trainer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..memory.host.to_device import to_device
from ..memory.low_bit.quantize import AS_STORED
from ..memory.weights.frozen import FrozenWeights
from ..memory.weights.residency import FrozenModule
from .latents import LatentPolicy
from .layers.attention import attention_function, ragged_attention_function
from .layers.lora_linear import LoraLayer
from .name_table import NameTable
from .objective import FlowMatching, Objective
from .text import TextPolicy

RunBlock = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One batch as the transformer takes it; B samples of one token count N, R reference tokens and one text length L.

    tokens: (B, N, C·patch) noisy latents.
    references: (B, R, C·patch) clean latents of reference images, or None.
    text: (B, L, D), padded.
    timestep: (B,) fp32, or (B, frames).

    A family adds the other inputs of its forward, and names in `on_host` those that its forward reads on the host.
    """

    on_host: ClassVar[tuple[str, ...]] = ()

    tokens: Tensor
    text: Tensor
    timestep: Tensor
    references: Tensor | None = None

    @property
    def image_tokens(self) -> int:
        """N + R, the length of the image stream."""
        return self.tokens.shape[1] + (0 if self.references is None else self.references.shape[1])

    @property
    def text_tokens(self) -> int:
        return self.text.shape[1]

    def to(self, device: torch.device) -> "ModelInputs":
        """Copy the tensors to the device, except those read on the host."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in self.on_host}
        return replace(self, **{n: to_device(t, device) for n, t in tensors.items() if isinstance(t, Tensor)})


class Block(nn.Module):
    """One transformer block over frozen weights.

    kind: name of the structure that blocks of one graph share.
    shapes: the largest number of input shapes that one batch gives blocks of this structure.
    shapes_known: False if that is a guess: with more shapes than planned, the blocks run uncompiled.
    """

    kind: str
    shapes: int = 1
    shapes_known: bool = True

    def linears(self) -> Mapping[str, LoraLayer]:
        """Return the block's Linears, and the convolutions that can have an adapter, by their name inside the block."""
        return {name: module for name, module in self.named_modules() if isinstance(module, LoraLayer)}

    def native_name(self, name: str) -> str:
        """Return the model's own name, inside the block, of the Linear called `name` here."""
        raise AssertionError(f"{type(self).__name__} has no native_name")

    def lora_rows(self, inputs: ModelInputs) -> dict[str, int]:
        """Return the rows that each Linear sees per sample: the height of a dropout mask over its rank activations."""
        raise AssertionError(f"{type(self).__name__} has no lora_rows")

    def mask_shapes(self, inputs: ModelInputs) -> dict[str, tuple[int, int]]:
        """Return (samples, rows) of each Linear's dropout mask."""
        return {name: (len(inputs.tokens), rows) for name, rows in self.lora_rows(inputs).items()}

    def structure(self) -> str:
        """Return the key of the compiled graph, which blocks of equal structure share: the kind, the storage of each
        Linear, and the structure of each adapter."""
        linears = self.linears().items()
        adapters = (f"{name} {linear.adapter.structure()}" for name, linear in linears if linear.adapter)
        return f"{self.kind}:" + ";".join((*adapters, *(f"{name} {linear.storage}" for name, linear in linears)))


class Transformer(Protocol):
    """A model ready to train: `forward` runs its blocks through `run(block, *tensors)`."""

    def blocks(self) -> Sequence[tuple[str, Block]]: ...

    def linears(self) -> Mapping[str, LoraLayer]: ...

    def frozen_modules(self) -> list[FrozenModule]:
        """Return every module that holds frozen weights."""
        ...

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor: ...


class OwnTransformer:
    """The base of transformers with a forward of ours.

    dtype: of the modules outside the blocks.
    """

    dtype: torch.dtype

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Run the modules outside the blocks in another dtype inside the context."""
        previous, self.dtype = self.dtype, dtype
        try:
            yield
        finally:
            self.dtype = previous


@dataclass(frozen=True)
class NoisySample:
    """One sample of a training step.

    latent: x_t in the model's space, fp32, (C, H, W), or (C, T, H, W) for video models.
    text: (1, l, D) as encoded.
    conditioning: the rest of ComfyUI's conditioning.
    tokens: the number of tokens trained on.
    text_length: L, the length that the family pads the text to.
    clean_frames: the number of leading latent frames without noise.
    """

    latent: Tensor
    text: Tensor
    conditioning: Mapping[str, Any]
    tokens: int
    text_length: int
    clean_frames: int = 0


@dataclass(frozen=True)
class SampleFacts:
    """Facts about a sample that are known before reading its tensors.

    name: for messages.
    frames: latent frames.
    references: tokens of each reference image.
    clean_frames: latent frames without noise.
    conditioning: the keys of the conditioning.
    text_length: tokens of the encoded caption.
    """

    name: str
    frames: int
    references: tuple[int, ...]
    clean_frames: int
    conditioning: frozenset[str]
    text_length: int = 0


@dataclass(frozen=True)
class Origin:
    """The base model in the metadata of a LoRA file.

    architecture: field of ModelSpec.
    implementation: field of ModelSpec, the address or name of its code.
    kohya_version: version of the base model in kohya's and musubi's keys, empty if they have none.
    kohya_module: network module in kohya's and musubi's keys, empty if they have none.
    """

    architecture: str
    implementation: str
    kohya_version: str = ""
    kohya_module: str = ""


@dataclass(frozen=True)
class Patches:
    """A patchified latent.

    tokens: (N, C·patch), frame after frame in row order.
    positions: (N, axes).
    """

    tokens: Tensor
    positions: Tensor


@dataclass(frozen=True, kw_only=True)
class UsualSettings:
    """A model's part of a preset of Train LoRA, and of a measured step of sampling.

    learning_rate: of a LoRA, with AdamW.
    file_names: pattern of the names of its files in lower case, by which the browser knows it before it is loaded, as
        Python's `re` and JavaScript read it; empty if its names tell nothing.
    pictures_only: whether it makes no clips.
    prompt_tokens: tokens of a short prompt, as ComfyUI's text encoder gives them: most pad it.
    negative_tokens: tokens of a negative prompt; None for as many. ComfyUI runs prompts of one length in one call,
        others in two.
    cfg: guidance scale of the sampler.
    """

    learning_rate: float = 1e-4
    file_names: str = ""
    pictures_only: bool = False
    prompt_tokens: int = 256
    negative_tokens: int | None = None
    cfg: float = 4.0


UNET = UsualSettings(prompt_tokens=77, cfg=7.0)  # CLIP's length


@dataclass(frozen=True)
class SamplingFacts:
    """Latents and noise levels of the models. The defaults are those of a flow matching model.

    policy: of the latents.
    usual_shift: timestep shift of training.
    resolution_shifts: resolution-dependent schedules of the sampler: value of timestep_sampling -> shift for a token
        count.
    """

    policy: LatentPolicy
    usual_shift: float = 1.0
    resolution_shifts: Mapping[str, Callable[[int], float]] = field(default_factory=dict)

    def latents(self, model: Any) -> LatentPolicy:
        """Return the latent policy of this model's VAE."""
        return self.policy

    def shift(self, model: Any, tokens: int) -> float:
        """Return the default timestep shift of training, as `objective.shift_sigma` applies it, for a sample of
        `tokens` tokens (without references)."""
        return self.usual_shift

    def objective(self, patcher: ModelPatcher) -> Objective:
        """Return the noise levels, noising and target: flow matching, whose level is the model's sigma."""
        return FlowMatching()

    def expert_boundary(self, model: Any) -> float | None:
        """Return the sigma below which a second expert takes over from this model; None for models without one."""
        return None


@dataclass(frozen=True)
class ConditioningFacts(ABC):
    """Inputs of the models beside the noisy latent. The defaults are those of a model without pooled text, guidance and
    CLIP vision.

    text: the text encoders; None for a model whose captions keep their encoded length.
    """

    text: TextPolicy | None = None

    @abstractmethod
    def text_width(self, model: Any) -> int:
        """Return the features per token of the model's text input; 0 if only its forward shows them."""

    def pooled_width(self, model: Any) -> int:
        """Return the features of the model's pooled text input; 0 if it takes none."""
        return 0

    def vision_width(self, model: Any) -> int:
        """Return the features of CLIP vision's output for a start picture; 0 if the model takes none."""
        return 0

    def text_length(self, model: Any, length: int) -> int:
        """Return the length of a caption of `length` encoded tokens in the model's sequence."""
        return length if self.text is None else self.text.model_length(length)

    def takes_guidance(self, model: Any) -> bool:
        """Return whether guidance was distilled into the model, so that it is an input."""
        return False


@dataclass(frozen=True)
class TrainingForward(ABC):
    """The forward that training runs over a model's frozen weights, and its batches.

    title: of the family, for messages.
    swap_order: the lists of blocks in the order in which they are swapped.
    """

    title: str
    swap_order: tuple[str, ...]

    def block_lists(self, model: Any) -> dict[str, int]:
        """Return the lists of blocks in the order of the forward, with their lengths."""
        return {name: len(getattr(model.diffusion_model, name)) for name in self.swap_order}

    @abstractmethod
    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
        quantize: str = AS_STORED,
        in_zeros: bool = False,
    ) -> Transformer:
        """Build the training forward over the patcher's frozen weights; those of the blocks in `on_host` stay on the
        host.

        quantize: format of the blocks' Linears, one of `memory.low_bit.quantize.QUANTIZE`.
        in_zeros: fill those that are converted to it with zeros, for measurements.
        """

    def training(self, transformer: Transformer) -> AbstractContextManager[None]:
        """Return the context of a training step, forward and backward."""
        return nullcontext()

    @abstractmethod
    def patchify(self, latent: Tensor, keep: int) -> Patches:
        """Cut a latent, (C, H, W) or (C, T, H, W), into its first `keep` tokens."""

    @abstractmethod
    def inputs(
        self, patcher: ModelPatcher, samples: Sequence[NoisySample], sigma: Tensor, guidance: float
    ) -> ModelInputs:
        """Collate the batch as the transformer takes it, on the device of sigma, (B,) fp32, and of the latents.

        sigma: the model's own sigmas, `noise_level` of the family's objective.

        Training builds it on the host, where reading a number needs no sync, and moves it as a whole. Raises ValueError
        for a conditioning that this forward does not run.
        """

    def as_core_takes(self, sample: NoisySample) -> NoisySample:
        """Return the sample as ComfyUI's own forward takes it, with the text as its encoder outputs it."""
        return sample


@dataclass(frozen=True)
class OwnForward(TrainingForward):
    """A forward of our own over ComfyUI's weights.

    text: the text encoders.
    ragged: whether attention masks the pads of captions, so that `transformer` takes a RaggedAttention.
    """

    text: TextPolicy
    ragged: bool = False

    def build(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        attention: str,
        on_host: frozenset[str] = frozenset(),
        quantize: str = AS_STORED,
        in_zeros: bool = False,
    ) -> Transformer:
        lists = self.block_lists(patcher.model)
        blocks = frozenset(f"{name}.{i}" for name, length in lists.items() for i in range(length))
        weights = FrozenWeights(patcher, device, compute_dtype, on_host, quantize, blocks, in_zeros)
        choose = ragged_attention_function if self.ragged else attention_function
        return self.transformer(patcher.model, weights, choose(attention, device, compute_dtype))

    @abstractmethod
    def transformer(self, model: Any, weights: FrozenWeights, attention: Any) -> Transformer:
        """Build the training forward. attention: an Attention, or a RaggedAttention if the forward is `ragged`."""


class ForwardChecks:
    """Checks of a training forward that runs ComfyUI's modules. A forward of our own needs none of them: its tests and
    `train/verify/` compare it with ComfyUI's."""

    def check_forward(
        self, transformer: Transformer, on_device: RunBlock, inputs: ModelInputs, small: ModelInputs | None
    ) -> dict[str, str]:
        """Compare the training forward with ComfyUI's on this batch and a small one in fp32. Returns the blocks that
        must not be compiled, with the reasons. Raises ValueError if they differ."""
        return {}

    def check_batch(self, transformer: Transformer, on_device: RunBlock, inputs: ModelInputs) -> str | None:
        """Run samples separately from now on if those of one batch influence each other. Returns a sentence about it,
        or None."""
        return None

    def kernel_notes(self) -> Iterable[str]:
        """Name the kernels of ComfyUI's that training can't use, as `check_forward` saw the model call them."""
        return ()

    def check_outside(self, transformer: Transformer, on_device: RunBlock, inputs: ModelInputs) -> None:
        """Raise ValueError if the model reads tensors of a swapped block outside of it."""
        raise AssertionError("our own forwards read none")


class Family(ABC):
    """One model architecture: how a model of it is recognised and named, what samples it takes, and its parts.

    `model` is always a ComfyUI BaseModel of the family.

    name: in metadata and in keys.
    title: in messages.
    releases: the releases that train, as README and help pages list them in brackets.
    model_class: ComfyUI's class of the models.
    transformer_class: ComfyUI's class of their `diffusion_model`.
    text: the text encoders for captions, and the VAEs that go with them.
    names: module names in kohya's and in diffusers' LoRA files.
    default_targets: patterns of the Linears that a LoRA trains.
    never_trained: patterns of the Linears that no LoRA trains, whatever its targets; `linears()` of the transformer
        lacks them.
    tested_by_name: whether tests cover the model by name.
    own_forward: False if training runs ComfyUI's forward, the one that patches of other nodes are meant for.
    whole_grids: whether the forward takes whole grids only, no ragged edge.
    usual: learning rate of a LoRA, and prompt and guidance of a sample.
    sampling: latents and noise levels.
    conditioning: inputs beside the noisy latent.
    forward: the forward that training runs.
    checks: of a forward that runs ComfyUI's modules.
    """

    name: str
    title: str
    releases: str
    model_class: type
    transformer_class: type
    text: TextPolicy
    names: NameTable
    default_targets: tuple[str, ...]
    never_trained: tuple[str, ...] = ()
    own_forward: bool = True
    tested_by_name: bool = True
    whole_grids: bool = False
    usual: UsualSettings = UsualSettings()
    sampling: SamplingFacts
    conditioning: ConditioningFacts
    forward: TrainingForward
    checks: ForwardChecks = ForwardChecks()

    @property
    def pictures_only(self) -> bool:
        """Return whether the models make no video."""
        return self.text.pictures_only

    def fits_data(self, text_family: str) -> bool:
        """Return whether training data has captions encoded for this family, or for an unknown one (empty)."""
        return text_family in ("", self.text.family)

    def matches(self, model: Any) -> bool:
        """Return whether the model is of this family. Subclasses in core run another forward and are other families."""
        return type(model) is self.model_class

    def variant(self, model: Any) -> str:
        """Return the release that the model is, or is a fine-tune of, as far as its weights show."""
        return self.name

    def as_loaded(self, model: Any) -> Any:
        """Return the model without state left by sampling, to make batches from."""
        return model

    @abstractmethod
    def origin(self, model: Any) -> Origin: ...

    def check(self, model: Any, sample: SampleFacts) -> None:
        """Raise ValueError, with the fix, for a sample that this model can't train on."""
        if sample.frames > 1 and self.pictures_only:
            raise ValueError(f"{sample.name} is a clip of {sample.frames} frames; {self.title} trains on pictures.")

    def notes(self, model: Any, samples: Sequence[SampleFacts]) -> list[str]:
        """Return remarks for the user about these samples on this model, a sentence each."""
        return []

    def distillation_notes(self, model: Any) -> list[str]:
        """Return remarks on the model's distillation and how to preserve it, a sentence each; for a run that does
        nothing about it."""
        return []
