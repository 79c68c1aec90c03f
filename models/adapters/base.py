"""The interface of adapters: what is trained beside a frozen Linear."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...memory.weights.frozen_linear import FrozenLinear

Shape = tuple[int, ...]
ReadWeights = Callable[[], FrozenLinear]
INITS = ("kaiming", "gaussian", "pissa")
DROPOUTS = ("dropout", "rank_dropout", "module_dropout")


@dataclass(frozen=True)
class AdapterSpec:
    """Hyperparameters of one layer's adapter.

    algorithm: a key of the registry.
    rank, alpha: the update is scaled by alpha / rank.
    factor: of LoKr's factorisation; -1 is near the square root.
    constraint: of OFT; 0 is none.
    init: of a LoRA's weights, one of INITS.
    """

    algorithm: str
    rank: int
    alpha: float
    factor: int = -1
    constraint: float = 0.0
    init: str = "kaiming"


class DropMask(NamedTuple):
    """Dropout mask of an update for one step of B samples.

    update: (B, rows or 1, width or 1), 0 where a part is dropped.
    module: (B, 1, 1), 0 for samples whose layer runs without its adapter; None where `update` covers that.
    """

    update: Tensor
    module: Tensor | None = None

    def without_drops(self) -> "DropMask":
        """A mask of this shape that drops nothing."""
        return DropMask(*(None if mask is None else torch.ones_like(mask) for mask in self))  # type: ignore[arg-type]


class Adapter(nn.Module):
    """The update of one frozen Linear (out, in).

    Its parameters are fp32 master weights, under the names that a state file gives them; they are used in the dtype of
    x, from `casts` where these are in that dtype. A new adapter does not change the Linear, nor does one whose master
    weights are all zero. `forward` is traced as a part of its block: shapes are static, and what differs from step to
    step comes in as a tensor.

    drops: the kinds of dropout that it supports.
    rank_drop_scaled: true where the parts that rank dropout retains are scaled up to keep the mean of the update.
    replaces_output: true where a zero update does not stand for "no adapter", so that module dropout needs a mask of
        its own.
    has_norm: true where the update is a constant times the product of all master weights, so that `norm` exists.
    reads_casts: true where `forward` reads each master weight in the dtype of x only.
    strength_field: the hyperparameter that sets `strength`.
    casts: the master weights in the dtype of the computation, by name, where they are kept beside the fp32 ones;
        whoever keeps them writes them before each forward, and takes their gradients to the master weights.
    """

    algorithm: ClassVar[str]
    drops: ClassVar[tuple[str, ...]] = ("rank_dropout", "module_dropout")
    rank_drop_scaled: ClassVar[bool] = True
    replaces_output: ClassVar[bool] = False
    has_norm: ClassVar[bool] = False
    reads_casts: ClassVar[bool] = False
    strength_field: ClassVar[str] = "alpha"
    casts: Mapping[str, nn.Parameter]

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__()
        self.spec, self.out_features, self.in_features = spec, out_features, in_features
        # Factor of the update; a constant of the graph.
        self.scale = spec.alpha / spec.rank
        self.casts = {}
        for name, shape in self.shapes(spec, out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        """Shapes of the master weights by name; reads no weight."""
        raise AssertionError(f"{cls.__name__} has no shapes")

    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Initialise the master weights, which lie on the host as `source` does. read: gives the frozen weights, for
        algorithms that start from them."""
        raise AssertionError(f"{type(self).__name__} has no start")

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        """Run the Linear with the adapter: x (B, T, in) → (B, T, out)."""
        raise AssertionError(f"{type(self).__name__} has no forward")

    @property
    def strength(self) -> float:
        """Constant by which the same master weights mean a stronger update or a weaker one."""
        return self.scale

    def scaled(self, hidden: Tensor) -> Tensor:
        """The scale on the rank activations, the smallest tensor that it can go on."""
        return hidden if self.scale == 1.0 else hidden * self.scale

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """A master weight in `dtype`: the one that is kept, or a new cast."""
        kept = self.casts.get(name)
        return getattr(self, name).to(dtype) if kept is None or kept.dtype != dtype else kept

    def make_casts(self, dtype: torch.dtype) -> None:
        """Keep casts where `forward` reads them, of an adapter that is run by itself, to be measured."""
        if self.reads_casts and dtype != torch.float32:
            self.casts = {name: nn.Parameter(weight.detach().to(dtype)) for name, weight in self.named_parameters()}

    def drop_width(self) -> int:
        """Number of parts that rank dropout drops one by one."""
        raise AssertionError(f"{type(self).__name__} has no drop_width")

    def norm(self) -> Tensor:
        """‖delta W‖ (Frobenius), an fp32 scalar, where `has_norm`; delta W is not materialised."""
        raise AssertionError(f"{type(self).__name__} has no norm")

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a LoRA file by the suffix of their key in kohya's names; no copies."""
        raise AssertionError(f"{type(self).__name__} has no tensors")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the master weights from the `tensors` of an adapter of this size and alpha."""
        for suffix, own in self.tensors().items():
            if suffix != "alpha":
                own.copy_(tensors[suffix])

    def structure(self) -> str:
        """Key of the compiled graph: adapters of equal structure share one."""
        shapes = ",".join("x".join(map(str, p.shape)) for p in self.parameters())
        return f"{self.algorithm}({shapes})*{self.scale!r},{self.spec.constraint!r}"


def as_rows(x: Tensor) -> Tensor:
    """x (…, n) as a matrix (rows, n). Where several products read this one matrix, a compiler adds up their gradients
    of it inside the products; of views of its own for each, in passes over it."""
    return x.reshape(-1, x.shape[-1])


def kaiming_uniform(into: Tensor, source: torch.Generator) -> None:
    """Initialise as torch does a Linear: uniform within 1 / √columns."""
    bound = into.shape[-1] ** -0.5
    with torch.no_grad():
        into.uniform_(-bound, bound, generator=source)


def norm_of_product(up: Tensor, down: Tensor) -> Tensor:
    """‖up·down‖ (Frobenius) from the Gram matrices, ‖up·down‖² = ⟨upᵀ·up, down·downᵀ⟩: the product is never made."""
    return ((up.T @ up).double() * (down @ down.T)).sum().clamp(min=0).sqrt().float()


def factorize(features: int, factor: int) -> tuple[int, int]:
    """Factorise features as small · large, as LyCORIS's `factorization` does: by `factor` itself where it divides and
    leaves a larger part, else by the divisor up to `factor` that is nearest to the square root; -1 sets no limit."""
    if factor > 0 and features % factor == 0 and features >= factor**2:
        return factor, features // factor
    limit = features if factor < 0 else factor
    small = max(d for d in range(1, min(limit, int(features**0.5)) + 1) if features % d == 0)
    return small, features // small
