"""OFT: blocks of the output are rotated (Qiu et al. 2023, arXiv 2306.07280), as LyCORIS's diag-oft."""

from typing import Any

import torch
from torch import Tensor, nn

from ...memory.weights.frozen_linear import FrozenLinear
from .base import Adapter, AdapterSpec, DropMask, Layers, ReadWeights, Shape


class OftAdapter(Adapter):
    """W' = diag(R_1 … R_k)ᵀ · W, R = (I + Q)·(I − Q)⁻¹ by Cayley's transform, Q = blocks − blocksᵀ. blocks: (k, b, b).

    b, the size of a block, is the largest divisor of the output up to `rank`. With a `constraint` c > 0, Q is scaled so
    that its norm over all blocks is at most c·out (COFT, section 3.3, in LyCORIS's form); a file stores c·out as alpha,
    and ComfyUI reads it so. ComfyUI reads `rescale` but does not apply it, so there is none.

    R − I = 2·Q·(I − Q)⁻¹ is applied to the frozen layer's output and added to it: so small rotations survive in bf16.
    """

    algorithm = "oft"
    multiplies_weight = True
    rank_drop_scaled = False  # a scaled update is no rotation
    strength_field = "constraint"
    unlike_matrices = "stacks of blocks"
    no_norm = (
        "oft rotates a layer's output, which keeps its size; set scale_weight_norms to 0 (constraint limits the "
        "rotation)"
    )
    oft_blocks: nn.Parameter

    @classmethod
    def network_args(cls, spec: AdapterSpec) -> dict[str, Any]:
        return {"algo": "diag-oft", "constraint": spec.constraint}

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        size = block_size(out_features, spec.rank)
        return {"oft_blocks": (out_features // size, size, size)}

    @classmethod
    def check_layers(cls, layers: Layers) -> None:
        for name, spec, (rows, _) in layers:
            if block_size(rows, spec.rank) == 1:
                raise ValueError(
                    f"oft cannot cut {name}, whose output is {rows}, into blocks of at most rank {spec.rank}; raise "
                    "rank, or leave the layer out in targets."
                )

    @classmethod
    def layer_notes(cls, layers: Layers) -> list[str]:
        small = [
            (name, spec, rows, size)
            for name, spec, (rows, _) in layers
            if (size := block_size(rows, spec.rank)) < spec.rank
        ]
        if not small:
            return []
        name, spec, rows, size = small[0]
        return [
            f"oft cuts {len(small)} of {len(layers)} layers into smaller blocks than rank {spec.rank}, such as {name} "
            f"into blocks of {size}: the largest divisor of its {rows} outputs."
        ]

    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Leave the blocks at zero: R = I."""

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        y = frozen._replace(bias=None).apply(x)
        blocks = y.unflatten(-1, self.oft_blocks.shape[:2])
        update = torch.einsum("...kn,knm->...km", blocks, self.turn().to(x.dtype))
        if mask is not None:
            update = update * mask.update.unsqueeze(-1)
        y = y + update.flatten(-2)
        return y if frozen.bias is None else y + frozen.bias

    def turn(self) -> Tensor:
        """Compute R − I, (k, b, b)."""
        q = self.oft_blocks - self.oft_blocks.transpose(1, 2)
        if self.limit:
            q = q * (self.limit / (torch.linalg.vector_norm(q) + 1e-8)).clamp(max=1.0)
        eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        # I − Q is never singular; skipping the check avoids a device sync.
        return 2 * q @ torch.linalg.inv_ex(eye - q).inverse

    @property
    def limit(self) -> float:
        """The largest norm of Q, 0 for no limit."""
        return self.spec.constraint * self.out_features

    @property
    def strength(self) -> float:
        return self.limit

    def drop_width(self) -> int:
        """Count the blocks."""
        return self.oft_blocks.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        return {"oft_blocks": self.oft_blocks, "alpha": torch.tensor(self.limit)}


def block_size(out_features: int, rank: int) -> int:
    """Find the largest divisor of the output up to `rank`. LyCORIS's own factorisation stops near the square root of
    the output, beyond which a larger rank does nothing; readers take the size from the file."""
    return next(size for size in range(min(rank, out_features), 0, -1) if out_features % size == 0)
