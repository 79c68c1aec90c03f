"""What is trained beside a frozen Linear, whatever the algorithm."""

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
    """The adapter of one layer. factor: of LoKr's cut, -1 near the square root. constraint: of OFT, 0 is none. init:
    what a LoRA begins from, one of INITS."""

    algorithm: str
    rank: int
    alpha: float
    factor: int = -1
    constraint: float = 0.0
    init: str = "kaiming"


class DropMask(NamedTuple):
    """What of an update stays in a step, B samples. update: (B, rows or 1, width or 1), which holds 0 where it is
    dropped. module: (B, 1, 1), 1 where the layer has its adapter and 0 where it goes without; None where `update` says
    it all."""

    update: Tensor
    module: Tensor | None = None

    def without_drops(self) -> "DropMask":
        """One of this shape that drops nothing."""
        return DropMask(*(None if mask is None else torch.ones_like(mask) for mask in self))  # type: ignore[arg-type]


class Adapter(nn.Module):
    """The update of one frozen Linear (out, in).

    Its parameters are the fp32 masters, under the names that a state file gives them; they are used in the dtype of x.
    A new one does not change the Linear, nor does one whose masters are all zero. `forward` is traced whole, as a part
    of its block: shapes are static, and what differs from step to step comes in as a tensor.

    drops: the kinds of dropout that mean something for it. rank_drop_scaled: whether what stays after rank dropout is
    scaled up, so that the update is the same on average. replaces_output: whether without it the layer is another even
    where the update is zero, so that module dropout needs a mask of its own. has_norm: whether the update is the
    product of all its masters, times a constant: `norm` gives its size.
    """

    algorithm: ClassVar[str]
    drops: ClassVar[tuple[str, ...]] = ("rank_dropout", "module_dropout")
    rank_drop_scaled: ClassVar[bool] = True
    replaces_output: ClassVar[bool] = False
    has_norm: ClassVar[bool] = False

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__()
        self.spec, self.out_features, self.in_features = spec, out_features, in_features
        # What the update is multiplied by; a constant of the graph.
        self.scale = spec.alpha / spec.rank
        for name, shape in self.shapes(spec, out_features, in_features).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        """The masters' shapes by name, without any weight."""
        raise AssertionError(f"{cls.__name__} has no shapes")

    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Fills the masters, which lie on the host as `source` does, with what training starts from. read: gives the
        frozen weights, where they are needed for it."""
        raise AssertionError(f"{type(self).__name__} has no start")

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        """x: (B, T, in) → (B, T, out), what the Linear gives with the adapter."""
        raise AssertionError(f"{type(self).__name__} has no forward")

    def drop_width(self) -> int:
        """How many parts of it rank dropout drops one by one."""
        raise AssertionError(f"{type(self).__name__} has no drop_width")

    def norm(self) -> Tensor:
        """‖delta W‖ (Frobenius), fp32 and without a dimension, where `has_norm`; delta W is not made for it."""
        raise AssertionError(f"{type(self).__name__} has no norm")

    def tensors(self) -> dict[str, Tensor]:
        """What a LoRA file holds of it, by the suffix of its key in kohya's names; no copies."""
        raise AssertionError(f"{type(self).__name__} has no tensors")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills the masters from what `tensors` gave of an adapter of this size and alpha."""
        for suffix, own in self.tensors().items():
            if suffix != "alpha":
                own.copy_(tensors[suffix])

    def structure(self) -> str:
        """What the graph of a block depends on: adapters of equal structure share one."""
        shapes = ",".join("x".join(map(str, p.shape)) for p in self.parameters())
        return f"{self.algorithm}({shapes})*{self.scale!r},{self.spec.constraint!r}"


def kaiming_uniform(into: Tensor, source: torch.Generator) -> None:
    """As torch starts a Linear: uniform within 1 / √columns."""
    bound = into.shape[-1] ** -0.5
    with torch.no_grad():
        into.uniform_(-bound, bound, generator=source)


def norm_of_product(up: Tensor, down: Tensor) -> Tensor:
    """‖up·down‖ (Frobenius) from the Gram matrices, ‖up·down‖² = ⟨upᵀ·up, down·downᵀ⟩: the product is never made."""
    return ((up.T @ up).double() * (down @ down.T)).sum().clamp(min=0).sqrt().float()


def factorize(features: int, factor: int) -> tuple[int, int]:
    """features as small · large, as LyCORIS's `factorization` cuts them: by `factor` itself where it divides and leaves
    a larger part, else by the divisor up to `factor` that is nearest to the square root; -1 sets no limit."""
    if factor > 0 and features % factor == 0 and features >= factor**2:
        return factor, features // factor
    limit = features if factor < 0 else factor
    small = max(d for d in range(1, min(limit, int(features**0.5)) + 1) if features % d == 0)
    return small, features // small
