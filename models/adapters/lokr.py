"""LoKr: the Kronecker product of a small matrix and a low-rank or full one (LyCORIS, arXiv 2309.14859; KronA, arXiv
2212.10650)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...memory.weights.frozen_linear import FrozenLinear
from .add_product import add_product
from .base import (
    Adapter,
    AdapterSpec,
    DropMask,
    Layers,
    ReadWeights,
    Shape,
    factorize,
    kaiming_uniform,
    norm_of_product,
    scaled,
)


class LokrAdapter(Adapter):
    """delta W = s · w1 ⊗ w2, with out = l·k and in = m·n factorised near `factor`.

    w1: (l, m). w2: w2_a·w2_b, (k, rank) and (rank, n), with s = alpha / rank; or one full matrix, (k, n), with s = 1,
    if rank is half of its larger side or more. The factorisation, the condition for a full w2, and s are those that
    LyCORIS writes and ComfyUI reads. delta W is never materialised: for x as an (m, n) matrix X, the update is
    w1·X·w2ᵀ.
    """

    algorithm = "lokr"
    has_norm = True
    odd_in = "lokr_w1"
    reads_casts = True
    lokr_w1: nn.Parameter
    lokr_w2: nn.Parameter
    lokr_w2_a: nn.Parameter
    lokr_w2_b: nn.Parameter

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__(spec, out_features, in_features)
        self.full_matrix = self.is_full_matrix(spec, out_features, in_features)
        if self.full_matrix:
            self.scale = 1.0

    @classmethod
    def network_args(cls, spec: AdapterSpec) -> dict[str, Any]:
        return {"algo": cls.algorithm, "factor": spec.factor}

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        (low, k), (m, n) = factorize(out_features, spec.factor), factorize(in_features, spec.factor)
        if cls.is_full_matrix(spec, out_features, in_features):
            return {"lokr_w1": (low, m), "lokr_w2": (k, n)}
        return {"lokr_w1": (low, m), "lokr_w2_a": (k, spec.rank), "lokr_w2_b": (spec.rank, n)}

    @staticmethod
    def is_full_matrix(spec: AdapterSpec, out_features: int, in_features: int) -> bool:
        """Return whether w2 is not factorised: LyCORIS factorises it if rank is below half of its larger side."""
        return 2 * spec.rank >= max(factorize(out_features, spec.factor)[1], factorize(in_features, spec.factor)[1])

    @classmethod
    def layer_notes(cls, layers: Layers) -> list[str]:
        return [*_other_factors(layers), *cls._full_matrices(layers)]

    @classmethod
    def _full_matrices(cls, layers: Layers) -> Iterator[str]:
        """Yield a note about layers whose second matrix is kept whole."""
        whole = [spec for _, spec, size in layers if cls.is_full_matrix(spec, *size)]
        if whole:
            yield (
                f"lokr keeps its second matrix whole in {len(whole)} of {len(layers)} layers, as a pair of rank "
                f"{whole[0].rank} would save little; rank and alpha are not used there."
            )

    @classmethod
    def read_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave alpha out, which no reader uses if both matrices are whole."""
        whole = {"lokr_w1", "lokr_w2"} <= tensors.keys()
        return {suffix: tensor for suffix, tensor in tensors.items() if not (whole and suffix == "alpha")}

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Initialise as LyCORIS does: w1 and w2_a Kaiming uniform, w2_b or the full w2 at zero."""
        kaiming_uniform(self.lokr_w1, source)
        if not self.full_matrix:
            kaiming_uniform(self.lokr_w2_a, source)

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        y = frozen.apply(x)
        w1 = self.cast("lokr_w1", x.dtype)
        rows = x.unflatten(-1, (w1.shape[1], -1))  # (…, m, n)
        if self.full_matrix:
            update = _mixed(linear(rows, self.cast("lokr_w2", x.dtype)), w1)
        else:  # apply w1 in the middle: rows are shortest there
            activations = _mixed(scaled(linear(rows, self.cast("lokr_w2_b", x.dtype)), self.scale), w1)
            w2_a = self.cast("lokr_w2_a", x.dtype)
            if mask is None:
                return add_product(y.unflatten(-1, (w1.shape[0], -1)), activations, w2_a).flatten(-2)
            update = linear(activations, w2_a)
        update = update.flatten(-2)
        return y + (update if mask is None else update * mask.update)

    def drop_width(self) -> int:
        """Count the rows of delta W, as LyCORIS drops them."""
        return self.out_features

    def norm(self) -> Tensor:
        """Compute ‖w1 ⊗ w2‖ = ‖w1‖·‖w2‖: every entry of one is multiplied by every entry of the other."""
        w2 = self.lokr_w2.norm() if self.full_matrix else norm_of_product(self.lokr_w2_a, self.lokr_w2_b)
        return self.scale * self.lokr_w1.norm() * w2

    def tensors(self) -> dict[str, Tensor]:
        # No reader scales a full w2; LyCORIS writes the rank as alpha then.
        alpha = float(self.spec.rank if self.full_matrix else self.spec.alpha)
        return {**dict(self.named_parameters()), "alpha": torch.tensor(alpha)}


def _other_factors(layers: Layers) -> Iterator[str]:
    """Yield a note about layers that the factor does not divide."""
    other = []
    for name, spec, size in layers:
        factors = {factorize(side, spec.factor)[0] for side in size} - {spec.factor}
        if spec.factor > 0 and factors:
            other.append((name, spec, size, factors))
    if other:
        name, spec, (rows, columns), factors = other[0]
        yield (
            f"lokr cuts {len(other)} of {len(layers)} layers otherwise than by factor {spec.factor}, such as {name} of "
            f"{rows} × {columns} by {' and '.join(map(str, sorted(factors)))}: the largest divisor up to it."
        )


def _mixed(rows: Tensor, w1: Tensor) -> Tensor:
    """Multiply w1 (l, m) by rows (…, m, r) → (…, l, r), as one matmul over all of them."""
    return linear(rows.transpose(-1, -2), w1).transpose(-1, -2)
