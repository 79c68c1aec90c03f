"""Updates that are no product of two thin matrices, LoHa's and LoKr's, and what a LoRA can take of them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..models.adapters.pissa import largest_parts
from .lora_model import ALPHA

EMPTY = 1e-6  # a singular part this small beside the largest is none
DENSE = ("loha", "lokr")


def delta_of(parts: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """delta W (out, in), fp32, of one module's tensors by suffix.

    LoHa: s·(w1_a·w1_b) ∘ (w2_a·w2_b) (arXiv 2108.06098); LoKr: s·w1 ⊗ w2, each whole or a product (arXiv 2212.10650),
    with s = alpha / rank, which is 1 where nothing has a rank, as ComfyUI reads them.
    """
    at = {suffix: tensor.to(device) for suffix, tensor in parts.items() if suffix != ALPHA}
    if "hada_w1_a" in at:
        rank: int | None = len(at["hada_w1_b"])
        full = (at["hada_w1_a"] @ at["hada_w1_b"]) * (at["hada_w2_a"] @ at["hada_w2_b"])
    else:
        rank = next((len(at[b]) for b in ("lokr_w2_b", "lokr_w1_b") if b in at), None)
        one, two = (at[w] if w in at else at[f"{w}_a"] @ at[f"{w}_b"] for w in ("lokr_w1", "lokr_w2"))
        full = torch.kron(one, two)
    return full * (float(parts[ALPHA]) / rank) if rank and ALPHA in parts else full


def size_of(parts: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """(out, in) of `delta_of`; None where the tensors are of another layout."""
    plain = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", ALPHA}
    plain |= {f"lokr_{w}{part}" for w in ("w1", "w2") for part in ("", "_a", "_b")}
    if not parts.keys() <= plain or any(tensor.dim() != 2 for name, tensor in parts.items() if name != ALPHA):
        return None
    if "hada_w1_a" in parts:
        return len(parts["hada_w1_a"]), parts["hada_w1_b"].shape[1]
    rows, columns = 1, 1
    for w in ("lokr_w1", "lokr_w2"):
        rows *= len(parts[w if w in parts else f"{w}_a"])
        columns *= parts[w if w in parts else f"{w}_b"].shape[1]
    return rows, columns


def cut_to_rank(delta: Tensor, rank: int, scale: float, source: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """(down, up, ‖lost‖ / ‖delta W‖): scale·up·down are the largest singular parts, `rank` of them or as many as there
    are."""
    left, sizes, right = largest_parts(delta, rank, source)
    there = int((sizes > EMPTY * sizes[0]).sum())
    left, sizes, right = left[:, :there], sizes[:there], right[:there]
    root = (sizes / scale).sqrt()
    total = float(delta.double().square().sum())
    lost = math.sqrt(max(0.0, 1.0 - float(sizes.double().square().sum()) / total)) if total else 0.0
    return right * root[:, None], left * root, lost
