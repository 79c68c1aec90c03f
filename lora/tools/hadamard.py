"""LoHa of any update: the nearest elementwise product of two low-rank matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.adapters.pissa import largest_parts
from ...models.convolutions import WeightShape
from ..files.spellings import ALPHA
from .components import relative_loss

MOST_RANKS = 32  # time grows with the fourth power of the rank
_TRIAL, _ROUNDS = 8, 32
_TINY = 1e-100  # for rows without equations
_DAMPING = 1e-9  # of the mean eigenvalue: keeps a row that its equations leave open


@dataclass(frozen=True)
class HadamardUpdate:
    """One layer's update, delta W = alpha / rank · (w1_a·w1_b) ∘ (w2_a·w2_b), in the tensors of `LohaAdapter`.

    w1_a: (out, rank).
    w1_b: (rank, in·kernel).
    w2_a: (out, rank).
    w2_b: (rank, in·kernel).
    alpha: scale of the update, times rank.
    """

    w1_a: Tensor
    w1_b: Tensor
    w2_a: Tensor
    w2_b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.w1_b)

    def delta(self) -> Tensor:
        """Compute delta W (out, in·kernel)."""
        return self.alpha / self.rank * (self.w1_a @ self.w1_b) * (self.w2_a @ self.w2_b)

    def tensors(self, shape: WeightShape) -> dict[str, Tensor]:
        """Return the tensors of a file by suffix. shape: of the layer's weight, which is not used."""
        matrices = {"w1_a": self.w1_a, "w1_b": self.w1_b, "w2_a": self.w2_a, "w2_b": self.w2_b}
        named = {f"hada_{name}": matrix for name, matrix in matrices.items()}
        return {**named, ALPHA: torch.tensor(float(self.alpha))}


@dataclass(frozen=True)
class Side:
    """The rows, or the columns, of both factors.

    first: of the first factor, (out, r) or (in·kernel, r), fp64.
    second: of the second factor, of the same shape.
    """

    first: Tensor
    second: Tensor

    def products(self) -> Tensor:
        """Multiply each column of the first by each of the second: (out or in, r²)."""
        return _row_products(self.first, self.second)


@dataclass(frozen=True)
class _Factors:
    """The product (rows.first · columns.firstᵀ) ∘ (rows.second · columns.secondᵀ).

    rows: (out, r) each.
    columns: (in·kernel, r) each.
    """

    rows: Side
    columns: Side

    def product(self) -> Tensor:
        return (self.rows.first @ self.columns.first.T) * (self.rows.second @ self.columns.second.T)

    def update(self, size: float) -> HadamardUpdate:
        """Make the update of `size` times this product, all four matrices of about the same magnitude, so that they
        suit 16 bits."""
        w1_a, w1_b = _balanced(self.rows.first, self.columns.first)
        w2_a, w2_b = _balanced(self.rows.second, self.columns.second)
        ratio = (w2_a.norm() / w1_a.norm()).sqrt()
        scale_1, scale_2 = ratio * size**0.25, size**0.25 / ratio
        return HadamardUpdate(
            (w1_a * scale_1).float(),
            (w1_b.T * scale_1).float(),
            (w2_a * scale_2).float(),
            (w2_b.T * scale_2).float(),
            float(w1_a.shape[1]),
        )


def nearest_hadamard(
    delta: Tensor, chain: Sequence[Tensor], rank: int, source: torch.Generator
) -> tuple[HadamardUpdate, float]:
    """Find an elementwise product of two matrices of this rank that is near delta W (out, in). Also returns the share
    of the norm that is lost.

    Alternating least squares: with the columns and one of the two factors of rows fixed, each row of the other is the
    solution of `rank` linear equations; so no turn makes the loss larger. It is tried from two starts, and the better
    one goes on: the largest components of delta W times a matrix of ones, so that the result is never worse than the
    LoRA of this rank; and |delta W|^½ times itself with the signs. Other minima may be nearer: there is no method
    known that finds the best one.

    chain: matrices whose product is delta W; two of low rank are faster than delta W itself. source: of the starts.
    """
    size = float(delta.norm())
    delta = delta / size
    chain = [chain[0].double() / size, *(matrix.double() for matrix in chain[1:])]
    starts = (_components_start(delta, rank, source), _root_start(delta, rank, source))
    trials = [_alternate(chain, start, _TRIAL) for start in starts]
    best = min(trials, key=lambda factors: relative_loss(delta, factors.product()))
    best = _alternate(chain, best, _ROUNDS)
    return best.update(size), relative_loss(delta, best.product())


def _components_start(delta: Tensor, rank: int, source: torch.Generator) -> _Factors:
    rows, columns = _matrices(delta, rank, source)
    ones = torch.zeros_like(rows)
    ones[:, 0] = 1
    draws = torch.randn(columns.shape, generator=source, dtype=torch.float64)
    draws[:, 0] = 1
    return _Factors(Side(rows, ones), Side(columns, draws))


def _root_start(delta: Tensor, rank: int, source: torch.Generator) -> _Factors:
    root = delta.abs().sqrt()
    rows_1, columns_1 = _matrices(root * delta.sign(), rank, source)
    rows_2, columns_2 = _matrices(root, rank, source)
    return _Factors(Side(rows_1, rows_2), Side(columns_1, columns_2))


def _matrices(matrix: Tensor, rank: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the largest components as rows (out, rank) and columns (in, rank), with zeros if there are too few."""
    left, sizes, right = largest_parts(matrix.float(), rank, source)
    root, rest = sizes.sqrt(), rank - len(sizes)
    rows, columns = (left * root).double(), (right.T * root).double()
    return torch.nn.functional.pad(rows, (0, rest)), torch.nn.functional.pad(columns, (0, rest))


def _alternate(chain: Sequence[Tensor], start: _Factors, rounds: int) -> _Factors:
    transposed = [matrix.T for matrix in reversed(chain)]
    rows, columns = start.rows, start.columns
    for _ in range(rounds):
        rows = solve_side(chain, rows, columns)
        columns = solve_side(transposed, columns, rows)
    return _Factors(rows, columns)


def solve_side(chain: Sequence[Tensor], rows: Side, columns: Side) -> Side:
    """Solve for the rows of both factors, one after the other.

    With P (in, r²), the products of a column of the one and a column of the other, row i of the product is
    P·(rows.first[i] ⊗ rows.second[i]): all that is needed of delta W is delta W · P, and of the columns PᵀP.
    """
    products, rank = columns.products(), columns.first.shape[1]
    target = torch.linalg.multi_dot([*chain, products]).view(-1, rank, rank)
    gram = (products.T @ products).view(rank, rank, rank, rank)
    first = _solve(target, gram, rows.second, rows.first)
    return Side(first, _solve(target.transpose(1, 2), gram.permute(1, 0, 3, 2), first, rows.second))


def _solve(target: Tensor, gram: Tensor, other: Tensor, start: Tensor) -> Tensor:
    """Solve each row's normal equations. target: (rows, r, r). gram: (r, r, r, r). other, start: (rows, r)."""
    rank = start.shape[1]
    right = torch.einsum("ikl,il->ik", target, other)
    weights = _row_products(other, other)
    left = (weights @ gram.permute(1, 3, 0, 2).reshape(rank**2, rank**2)).view(-1, rank, rank)
    damping = _DAMPING * left.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + _TINY
    left = left + torch.diag_embed(damping.expand(-1, rank))
    return torch.linalg.solve(left, right + damping * start)


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    """Multiply each column of the first by each of the second: (rows, r), (rows, q) → (rows, r·q)."""
    return (first.unsqueeze(2) * second.unsqueeze(1)).flatten(1)


def _balanced(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each pair of columns to the same mean square, with the same product."""
    sizes, other_sizes = (matrix.square().mean(0) for matrix in (rows, columns))
    scale = torch.where((sizes > 0) & (other_sizes > 0), (other_sizes / sizes) ** 0.25, 1.0)
    return rows * scale, columns / scale
