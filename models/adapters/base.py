"""The interface of adapters: the trained update of a frozen Linear."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...memory.weights.frozen_linear import FrozenLinear

Shape = tuple[int, ...]
ReadWeights = Callable[[], FrozenLinear]
USUAL_INIT = "kaiming"
DROPOUTS = ("dropout", "rank_dropout", "module_dropout")


@dataclass(frozen=True)
class AdapterSpec:
    """Hyperparameters of one layer's adapter.

    algorithm: a key of the registry.
    rank: of the update's two matrices, or the algorithm's counterpart of it.
    alpha: the update is scaled by alpha / rank.
    factor: target factor of LoKr's factorisation; -1 factorises near the square root.
    constraint: OFT's norm limit; 0 for none.
    init: initialisation of the weights, one of the class's `inits`.
    """

    algorithm: str
    rank: int
    alpha: float
    factor: int = -1
    constraint: float = 0.0
    init: str = USUAL_INIT


Layers = Sequence[tuple[str, AdapterSpec, tuple[int, int]]]
"""Layers with an adapter: name, hyperparameters, and (out, in) of the weight."""


class DropMask(NamedTuple):
    """Dropout mask of an update for one step of B samples.

    update: (B, rows or 1, width or 1), 0 for dropped parts.
    module: (B, 1, 1), 0 for samples whose layer runs without its adapter; None if `update` covers that.
    """

    update: Tensor
    module: Tensor | None = None

    def without_drops(self) -> "DropMask":
        """Make a mask of this shape that drops nothing."""
        return DropMask(*(None if mask is None else torch.ones_like(mask) for mask in self))  # type: ignore[arg-type]


class Adapter(nn.Module):
    """The update of one frozen Linear (out, in).

    Its parameters are fp32 master weights, under their names in a state file. They are used in the dtype of x, taken
    from `casts` if those have that dtype. A new adapter does not change the Linear, nor does one whose master weights
    are all zero. `forward` is traced as part of its block: shapes are static, and values that change from step to step
    are passed as tensors.

    drops: supported kinds of dropout.
    rank_drop_scaled: true if the parts that survive rank dropout are scaled up to keep the mean of the update.
    replaces_output: true if a zero update is not equivalent to "no adapter", so that module dropout needs its own mask.
    has_norm: true if the update is a constant times the product of all master weights, so that `norm` exists.
    reads_casts: true if `forward` reads each master weight in the dtype of x only.
    strength_field: the hyperparameter that sets `strength`.
    unlike_matrices: names the master weights that are no matrices, for an optimizer that takes matrices only.
    no_norm: says for an adapter without `norm` why `scale_weight_norms` is not for it, and how to go on.
    inits: names of the initialisations that it can have, the usual one first.
    init: the one of them for which this class replaces its algorithm's; empty for the algorithm's own class.
    starts_from_weights: true if it begins from the model's weights, so that it can't begin from a LoRA as well.
    has_pair: true if it trains two matrices `down` and `up`, whose learning rates can differ (LoRA+).
    fits_any: true if it can begin from an update of any form, as the nearest of its rank.
    multiplies_weight: true if its update depends on the weight that it is loaded on.
    no_training_adapter: says why a training adapter is not for it, if its file depends on the weights of the training.
    file_ranks: ranks of its file for each rank that is trained.
    in_kohya: true if kohya's scripts have it themselves; LyCORIS makes the others.
    has_lengths: true if its file has `dora_scale`, one length for each column.
    odd_in: the master weight whose negation negates the update, as a strength of -1 does; empty if there is none.
    casts: copies of the master weights in the compute dtype, by name, if any; their owner fills them in, writes
        them before each forward and passes their gradients on to the master weights.
    """

    algorithm: ClassVar[str]
    drops: ClassVar[tuple[str, ...]] = ("rank_dropout", "module_dropout")
    rank_drop_scaled: ClassVar[bool] = True
    replaces_output: ClassVar[bool] = False
    has_norm: ClassVar[bool] = False
    reads_casts: ClassVar[bool] = False
    strength_field: ClassVar[str] = "alpha"
    unlike_matrices: ClassVar[str] = "tensors that are no matrices"
    no_norm: ClassVar[str] = "the norm of this algorithm's update is not known; set scale_weight_norms to 0"
    inits: ClassVar[tuple[str, ...]] = (USUAL_INIT,)
    init: ClassVar[str] = ""
    starts_from_weights: ClassVar[bool] = False
    has_pair: ClassVar[bool] = False
    fits_any: ClassVar[bool] = False
    multiplies_weight: ClassVar[bool] = False
    no_training_adapter: ClassVar[str] = ""
    file_ranks: ClassVar[int] = 1
    in_kohya: ClassVar[bool] = False
    has_lengths: ClassVar[bool] = False
    odd_in: ClassVar[str] = ""
    casts: dict[str, nn.Parameter]

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__()
        self.spec = spec
        self.out_features = out_features
        self.in_features = in_features
        # Factor of the update; a constant of the graph.
        self.scale = spec.alpha / spec.rank
        self.casts = {}
        for name, shape in self.shapes(spec, out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        """Return the shapes of the master weights by name, without reading a weight."""
        raise AssertionError(f"{cls.__name__} has no shapes")

    @classmethod
    def check_layers(cls, layers: Layers) -> None:
        """Raise ValueError for a layer that it can't have."""

    @classmethod
    def layer_notes(cls, layers: Layers) -> list[str]:
        """Return notes for the user on hyperparameters that some layers can't use, one sentence each."""
        return []

    @classmethod
    def reads_as(cls, name: str, suffixes: Collection[str]) -> bool:
        """Return True for its own file. name: of ComfyUI's reader of it. suffixes: of its tensors in kohya's names."""
        return name == cls.algorithm

    @classmethod
    def read_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a file that say something: those that its readers use."""
        return dict(tensors)

    @classmethod
    def network_args(cls, spec: AdapterSpec) -> dict[str, Any]:
        """Return the arguments with which LyCORIS makes such an adapter, for a file's metadata; none for kohya's own
        LoRA."""
        return {"algo": cls.algorithm}

    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Initialise the master weights, which are on the host like `source`. read: returns the frozen weights, for
        algorithms that start from them."""
        raise AssertionError(f"{type(self).__name__} has no start")

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        """Run the Linear with the adapter: x (B, T, in) → (B, T, out)."""
        raise AssertionError(f"{type(self).__name__} has no forward")

    @property
    def strength(self) -> float:
        """The constant that makes the same master weights a stronger or weaker update."""
        return self.scale

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a master weight in `dtype`: the stored cast, or a new one."""
        existing = self.casts.get(name)
        return getattr(self, name).to(dtype) if existing is None or existing.dtype != dtype else existing

    def drop_width(self) -> int:
        """Return the number of parts that rank dropout drops independently."""
        raise AssertionError(f"{type(self).__name__} has no drop_width")

    def norm(self) -> Tensor:
        """Compute ‖delta W‖ (Frobenius), an fp32 scalar, if `has_norm`; delta W is not materialised."""
        raise AssertionError(f"{type(self).__name__} has no norm")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a LoRA file by the suffix of their kohya key; no copies."""
        raise AssertionError(f"{type(self).__name__} has no tensors")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the master weights from the `tensors` of an adapter of this size and alpha."""
        for suffix, target in self.tensors().items():
            if suffix != "alpha":
                target.copy_(tensors[suffix])

    def structure(self) -> str:
        """Return the key of the compiled graph: adapters of equal structure share one."""
        shapes = ",".join("x".join(map(str, p.shape)) for p in self.parameters())
        return f"{self.algorithm}({shapes})*{self.scale!r},{self.spec.constraint!r}"


def make_casts(adapter: Adapter, dtype: torch.dtype) -> None:
    """Make the `casts` of an adapter whose `forward` reads them, to measure it on its own."""
    if adapter.reads_casts and dtype != torch.float32:
        weights = adapter.named_parameters()
        adapter.casts.update({name: nn.Parameter(weight.detach().to(dtype)) for name, weight in weights})


def scaled(activations: Tensor, scale: float) -> Tensor:
    """Apply an adapter's scale to its rank activations, the smallest tensor on the path."""
    return activations if scale == 1.0 else activations * scale


def above_rank(layers: Layers) -> list[str]:
    """Return a note on layers whose rank is above the sides of their weight."""
    high = [(name, spec, size) for name, spec, size in layers if spec.rank > min(size)]
    if not high:
        return []
    name, spec, (rows, columns) = high[0]
    return [f"rank {spec.rank} is more than {len(high)} of the layers can use, such as {name} of {rows} × {columns}."]


def kaiming_uniform(weight: Tensor, source: torch.Generator) -> None:
    """Initialise a weight, (rows, columns), like torch's Linear: uniform within 1 / √columns."""
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        weight.uniform_(-bound, bound, generator=source)


def norm_of_product(up: Tensor, down: Tensor) -> Tensor:
    """Compute ‖up·down‖ (Frobenius) from the Gram matrices, ‖up·down‖² = ⟨upᵀ·up, down·downᵀ⟩, without the product
    itself. up: (out, r), down: (r, in) → an fp32 scalar."""
    return ((up.T @ up).double() * (down @ down.T)).sum().clamp(min=0).sqrt().float()


def factorize(features: int, factor: int) -> tuple[int, int]:
    """Factorise features as small · large, like LyCORIS's `factorization`: by `factor` itself if it divides and leaves
    a larger part, else by the divisor up to `factor` that is nearest to the square root; -1 sets no limit."""
    if factor > 0 and features % factor == 0 and features >= factor**2:
        return factor, features // factor
    limit = features if factor < 0 else factor
    small = max(d for d in range(1, min(limit, int(features**0.5)) + 1) if features % d == 0)
    return small, features // small
