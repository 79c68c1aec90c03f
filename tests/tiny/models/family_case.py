"""Rows of the tests in tests/comfy/every_family: the data of one variant of a model family.

To add a family, write `tests/families/<name>.py` with a subclass of FamilyCase, and its rows as `CASES`. Nothing lists
them: every module of that folder is read. Methods that raise NotImplementedError here must be implemented, or their
axis left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

# Axes that a row may leave out, by name and with the reason.
AXES = {
    "forward": "velocities equal ComfyUI's in fp32",
    "16 bit": "velocities equal ComfyUI's in bf16 and fp16",
    "fp8": "velocities of a file of fp8 equal ComfyUI's, and its blocks stream as they are stored",
    "reference": "the reference equals ComfyUI's velocity, and its gradients are those of finite differences",
    "gradients": "LoRA gradients equal those of the reference in fp32",
    "compiled gradients": "the same with blocks compiled by aot_eager",
    "inductor": "the same with blocks compiled by inductor, which takes a minute for each kind of block",
    "bf16 gradients": "the same in bf16, within its rounding",
    "graphs": "compiled by aot_eager, one graph per kind of block and shape key, no recompile and no break",
    "swap": "blocks that stream from the host train the same bits",
    "compiled swap": "the same with compiled blocks, and no graph more",
    "prepared data": "Prepare Dataset makes what it trains on, of folders and with its own encoders",
    "resume": "a cancelled run goes on to the same bits",
    "files": "each LoRA format is read back by ComfyUI as the same delta W",
    "diffusers": "diffusers reads the formats as the same delta W, and runs as ComfyUI does",
    "learning": "a trained LoRA lowers the loss of ComfyUI's forward and draws its sample",
}

# Axes without new information for a variant whose blocks are those of another row.
SAME_BLOCKS = ("compiled gradients", "inductor", "compiled swap")
# The same if even the sizes around the blocks are those of another row.
SAME_SIZES = (*SAME_BLOCKS, "16 bit", "bf16 gradients", "graphs", "swap", "resume")

Batch = Callable[[], list[Any]]


@dataclass(frozen=True)
class Captions:
    """Samples of one shape with captions of many lengths: the text lengths that they are padded to, each a graph for
    every kind of block, and a note of training about them."""

    samples: list[Any]
    text_lengths: int
    note: str | None = None


@dataclass(frozen=True)
class Encoders:
    """Text encoders and VAE that Prepare Dataset is given for a variant.

    clip, vae, clip_vision: as their loaders give them.
    options: arguments of `prepare` that it needs.
    sizes: of `write`, so that the model fits the encoders.
    """

    clip: Any
    vae: Any
    clip_vision: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diffusers:
    """LoRA files of a family in diffusers.

    mixin: what reads the file, by `lora_state_dict`.
    build: (MODEL) → diffusers' model of the same size and weights, frozen.
    rows: (MODEL, tensors by names of weights) → the same by diffusers' names, by a table that is not ours.
    layouts: the LoRA formats that it reads, each with ALL or TARGETS, the Linears that it knows in it.
    velocity: (diffusers' model, sample, noisy latent in the model's space, sigma, guidance) → (N, C), called as its
        pipeline does, in the dtype of the latent.
    batches: names of `FamilyCase.batches` that its pipelines can be given.
    as_core: gives diffusers' model the numbers that ComfyUI is known to have otherwise than diffusers.
    differs: modules that diffusers is known to read otherwise, by format.
    """

    mixin: Any
    build: Callable[[Any], Any]
    rows: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]
    layouts: Mapping[str, str]
    velocity: Callable[[Any, Any, Tensor, float, float], Tensor]
    batches: tuple[str, ...] = ("shapes",)
    as_core: Callable[[Any], None] = lambda transformer: None
    differs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ALL, TARGETS = "all", "targets"


@dataclass(frozen=True)
class Learning:
    """A run whose LoRA has to learn its samples.

    model: the MODEL. samples: its data. options: changes of the run. near, far: how far from a sample the
    sampler lands at most with the LoRA and at least without it, in parts of the sample's norm.
    """

    model: Any
    samples: list[Any]
    options: Mapping[str, Any]
    near: float
    far: float


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """One variant of a family: a tiny model, its data, and independent values to compare training with.

    name: the id of its tests.
    variant: what `Family.variant` says of the tiny model.
    linears: how many Linears of the tiny model a LoRA can train, counted by hand.
    targets: how many of them it trains by default.
    left_out: the names out of AXES that this row leaves out, with the reason for each.
    """

    name: str
    variant: str
    linears: int
    targets: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    family: ClassVar[str]
    """`Family.name`."""
    kinds: ClassVar[int] = 1
    """Kinds of blocks, each of which is a graph for every shape."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Linears that no gradient reaches, as in the text stream of a last block."""

    main_batches: ClassVar[tuple[str, ...]] = ("shapes",)
    """The batches that stand for all where a test takes long."""
    padded_caption: ClassVar[int | None] = None
    """The text length of every caption of no more tokens; None where short ones take less."""
    never_trained: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of Linears that no LoRA trains."""
    layouts: ClassVar[Mapping[str, str]] = {"kohya": ALL, "comfyui": ALL, "diffusers": ALL}
    """The LoRA formats that ComfyUI reads of this family, each with the Linears that it knows in it."""
    deep: ClassVar[Mapping[str, Any]] = {}
    """Sizes for `write` that give four blocks or more."""
    deep_blocks: ClassVar[int] = 4
    """Number of these blocks."""
    wide: ClassVar[Mapping[str, Any]] = {}
    """Sizes for `write` that give two heads or more, where the smallest model has one."""
    ragged_in_core: ClassVar[bool] = True
    """False where ComfyUI cannot be asked for the velocity of the tokens of a ragged edge alone."""
    forward_bounds: ClassVar[Mapping[str, float]] = {"fp32": 3e-6, "bf16": 2e-2, "fp16": 3e-3}
    """Largest relative error of a batch's velocities against ComfyUI's, by the dtype that both compute in."""

    def __post_init__(self) -> None:
        assert self.left_out.keys() <= AXES.keys(), self.left_out

    # The tiny model

    def write(self, path: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
        """Write a checkpoint as ComfyUI reads it; `sizes` are this family's own, as `deep` and `wide` have them."""
        raise NotImplementedError

    def load(self, path: Path, dtype: torch.dtype | None = None) -> Any:
        """The MODEL that `UNETLoader` gives for the file; `dtype` is its `weight_dtype`."""
        raise NotImplementedError

    def encoders(self, files: Mapping[str, Path]) -> Encoders:
        """Tiny ones; files: the fixture `tiny_files`, text encoders and VAEs by name."""
        raise NotImplementedError

    # The data

    def folders(self) -> dict[str, int]:
        """The folders that it is trained on, each with the graphs that their data takes for every kind of block.

        "pictures": three of one area in three shapes, with captions of up to some hundred tokens. "controls": these,
        with a control picture each. "clips": two videos of two shapes, cut to 5 and 9 frames. "clips and pictures".
        """
        raise NotImplementedError

    def batches(self) -> dict[str, Batch]:
        """Lists of samples that can share a batch, by name: at most four of one shape key.

        "shapes": three samples of unlike aspect ratios, without references. "ragged", if the family has ragged edges:
        three samples with fewer tokens than their grids. Others by their purpose.
        """
        raise NotImplementedError

    def mixed(self) -> list[Any]:
        """An even number of samples of many shapes, whose lengths of text and references make `mixed_keys` of them."""
        raise NotImplementedError

    def mixed_keys(self) -> list[tuple[int, tuple[int, ...], int]]:
        """(tokens, tokens of each reference, text length) of each graph that `mixed` needs, in order."""
        raise NotImplementedError

    def captions(self) -> Captions | None:
        """Return captions of many lengths, None if captions are padded before they enter the training data."""
        return None

    def learning(self, folder: Path) -> Learning:
        """Sample to be learned in seconds; a file of its own goes into `folder`."""
        raise NotImplementedError

    def gradients(self) -> dict[str, tuple[int, ...]]:
        """The batches whose gradients are compared in every mode, each with the numbers of samples to take of it."""
        return {"shapes": (1, 3)}

    # Independent values, computed without this pack. N: the tokens that a sample keeps; C: channels of a token.

    def tokens(self, latent: Tensor, sample: Any) -> Tensor:
        """(N, C) of a latent without batch axis, in the order of the model's output."""
        raise NotImplementedError

    def in_model_space(self, latent: Tensor) -> Tensor:
        """The VAE's latent as the model sees it."""
        raise NotImplementedError

    def shift(self, sample: Any) -> float:
        """Shift by which training moves this sample's sigma towards noise by default."""
        return 1.0

    def reference_velocity(
        self,
        tensors: Mapping[str, Tensor],
        sample: Any,
        x_t: Tensor,
        sigma: float,
        guidance: float = 1.0,
        lora: Mapping[str, tuple[Tensor, Tensor, float]] | None = None,
    ) -> Tensor:
        """(N, C) by the formulas of tests/reference, in the dtype of x_t.

        tensors: the checkpoint's. x_t: the noisy latent in the model's space. lora: module to (down, up, scale).
        """
        raise NotImplementedError

    def core_text(self, sample: Any) -> Tensor:
        """(1, L, D): the caption as ComfyUI's sampler takes it."""
        return sample.load().text

    def core_velocity(
        self, model: Any, sample: Any, sigma: float, guidance: float = 1.0, x_t: Tensor | None = None
    ) -> Tensor:
        """(N, C), fp32, from ComfyUI's `apply_model` on this sample alone, unpadded; x_t: the noisy latent in the
        model's space with a batch axis, the sample's latent itself by default."""
        raise NotImplementedError

    # LoRA files

    def is_target(self, name: str) -> bool:
        """True for a Linear that a LoRA trains by default, by what other trainers do."""
        raise NotImplementedError

    def header(self) -> dict[str, str]:
        """Fields of a LoRA file's metadata by which other programs know the family."""
        raise NotImplementedError

    def diffusers(self) -> Diffusers | None:
        """Return the family's model in diffusers, None if it has none."""
        return None


def computing_in(model: Any, dtype: torch.dtype) -> Any:
    """The MODEL set to compute in this dtype, as ComfyUI sets it on a GPU that has it."""
    if dtype != torch.float32:
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
    return model


def block_count(model: Any) -> int:
    from tessera.models.catalogue.registry import family_of

    return sum(family_of(model).forward.block_lists(model.model).values())


def our_velocity(model: Any, samples: list[Any], sigmas: list[float], guidance: float = 1.0) -> Tensor:
    """(B, N, C), in the model's dtype: the samples as one batch through our forward, each latent taken as x_t."""
    from tessera.memory.weights.frozen import unload
    from tessera.models.catalogue.registry import family_of
    from tessera.models.model_patches import trainable_model

    patcher, _ = trainable_model(model)
    unload()
    family = family_of(model)
    device = patcher.load_device
    dtype = patcher.model.get_dtype_inference()
    transformer = family.forward.build(patcher, device, dtype, "auto")
    with torch.no_grad():
        levels = torch.tensor(sigmas, device=device)
        inputs = family.forward.inputs(patcher, [noisy(sample) for sample in samples], levels, guidance)
        assert inputs.timestep.dtype == torch.float32
        return transformer.forward(lambda block, *rest: block(*rest, {}), inputs).cpu()


def noisy(sample: Any) -> Any:
    """The sample as a step sees it, its latent taken as x_t."""
    from tessera.models.family import NoisySample

    read = sample.load()
    return NoisySample(
        read.latent, read.text, read.conditioning, sample.tokens, sample.text_length, sample.clean_frames
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual − expected| / |expected|, by the Frobenius norm."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
