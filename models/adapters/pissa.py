"""PiSSA: a LoRA that starts from the largest singular components of the weight (Meng et al. 2024, arXiv 2404.02948)."""

import torch
from torch import Tensor

from .base import AdapterSpec, ReadWeights
from .lora import LoraAdapter

_ITERATIONS = 8
_OVERSAMPLING = 2


class PissaAdapter(LoraAdapter):
    """W' = (W − s·B₀·A₀) + s·B·A with s = alpha / rank, trained from A₀, B₀: eq. 2 to 4, s as in PEFT.

    A = A₀ + `down` and B = B₀ + `up`, so that the trained parameters are the offsets from the start, zero at first.
    With

        s·(B·A − B₀·A₀) = s·(B₀·down + up·A)

    W stays as stored, the first step starts from the model bit for bit, and in bf16 the small change is not the
    difference of two large numbers. Gradients and steps are those of A and B; weight decay pulls towards the model. The
    file is a plain LoRA of twice the rank, [down; A] and [B₀, up], which loads on the unmodified model.
    """

    init = "pissa"
    starts_from_weights = True
    file_ranks = 2  # its file holds the initial weights too
    no_norm = "init is pissa, whose matrices are not small; set scale_weight_norms to 0, or init to kaiming"
    reads_casts = False  # down is added to its start in fp32
    odd_in = ""
    has_norm = False  # its master weights are offsets from the start, not the factors of the update
    down_start: Tensor
    up_start: Tensor

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__(spec, out_features, in_features)
        for name, shape in self.shapes(spec, out_features, in_features).items():
            self.register_buffer(f"{name}_start", torch.zeros(shape))

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Set A₀ = √(S / s)·Vᵀ and B₀ = U·√(S / s) from the largest components U·S·Vᵀ of W."""
        left_vectors, sizes, right_vectors = largest_parts(read().full(), self.spec.rank, source)
        root = (sizes / self.scale).sqrt()
        self.up_start[:, : len(root)].copy_(left_vectors * root)
        self.down_start[: len(root)].copy_(right_vectors * root[:, None])

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return down (2·rank, in) and up (out, 2·rank) of the same update."""
        down = torch.cat((self.down, self.down_start + self.down))
        return down.to(dtype), torch.cat((self.up_start, self.up), dim=1).to(dtype)

    def expand_mask(self, mask: Tensor) -> Tensor:
        """Repeat a mask, (B, rows, rank or 1), to (B, rows, 2·rank or 1): a rank is dropped from both halves."""
        return mask if mask.shape[-1] == 1 else torch.cat((mask, mask), dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        down, up = self.factors(torch.float32)
        alpha = torch.tensor(2 * float(self.spec.alpha))
        return {"lora_down.weight": down, "lora_up.weight": up, "alpha": alpha}

    def structure(self) -> str:
        return f"pissa {super().structure()}"


def largest_parts(weight: Tensor, rank: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Compute U (out, r), S (r,), Vᵀ (r, in) of the largest singular components, r = rank or as many as there are.

    Subspace iteration from a random start (Halko, Martinsson & Tropp 2011, arXiv 0909.4061, algorithms 4.4 and 5.1);
    the start is drawn from `source`, so that runs are reproducible.
    """
    rows, columns = weight.shape
    width = min(_OVERSAMPLING * rank, rows, columns)
    basis = torch.randn(columns, width, generator=source).to(weight.device)
    basis, _ = torch.linalg.qr(weight @ basis)
    for _ in range(_ITERATIONS):
        basis, _ = torch.linalg.qr(weight.T @ basis)
        basis, _ = torch.linalg.qr(weight @ basis)
    left_vectors, sizes, right_vectors = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return (basis @ left_vectors)[:, :rank], sizes[:rank], right_vectors[:rank]
