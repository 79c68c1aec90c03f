"""Which settings for my card: what the planner of block swap chooses for FLUX.1 dev, by the memory of the card.

Run: python benchmarks which_settings > benchmarks/results/which_settings.md
Nothing is trained: the blocks run on torch's meta device, which counts bytes without having them; seconds come from the
stated link and arithmetic. Needs ComfyUI as the other benchmarks do; the result is the same on every machine.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from figures import markdown_table
from torch import Tensor

from counted.gpu_norm import eager_norm

GB = 2**30
HIDDEN = 3072
HEADS = 24
DOUBLE = 19
SINGLE = 38
TEXT = 512
# img_in, txt_in, the embedders of time, guidance and pooled text, final_layer: numbers outside of the blocks.
OUTER = 64 * HIDDEN + 4096 * HIDDEN + (256 + 256 + 768 + 3 * HIDDEN) * HIDDEN + 2 * HIDDEN * HIDDEN + 64 * HIDDEN
# What core's comfy/supported_models.py and BaseModel.memory_required reserve to sample one picture: 0.01 MB for each
# latent pixel and byte of the dtype, times the family's factor.
SAMPLING_FACTOR = 3.1
CARDS = (8, 12, 16, 24, 32)
# How the Linears of the blocks are stored, and bytes of a number outside of them. 8 bit is fp8, and int8 but for its
# scales, 0.1 % more.
STORED = {"bf16": 2.0, "8 bit": 1.0, "Q4_K": 2.0}


class FlashAttention(torch.autograd.Function):
    """Keeps what flash attention keeps: q, k, v, the result and one fp32 number for each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: None = None) -> Tensor:
    return FlashAttention.apply(q, k, v).flatten(2)


class MetaWeights:
    """FLUX.1's weights by name, as tensors without memory."""

    def __init__(self, pack: Any, stored: str):
        self.pack = pack
        self.stored = stored
        self.compute_dtype = torch.bfloat16

    def linear(self, name: str) -> Any:
        rows, columns = next(shape for end, shape in SHAPES.items() if name.endswith(end))
        shape = rows * HIDDEN, columns * HIDDEN
        bias = torch.empty(shape[0], dtype=torch.bfloat16, device="meta")
        frozen = self.pack("memory.weights.frozen_linear")
        formats = self.pack("memory.weights.formats.stored_format")
        if self.stored == "Q4_K":
            kind = self.pack("memory.weights.formats.gguf_blocks").FORMATS["Q4_K"]
            blocks = torch.empty(shape[0], shape[1] // kind.values * kind.size, dtype=torch.uint8, device="meta")
            return frozen.FrozenLinear(blocks, None, bias, (), formats.Format("Q4_K", shape, (), {}).text())
        dtype = torch.bfloat16 if self.stored == "bf16" else torch.float8_e4m3fn
        return frozen.FrozenLinear(torch.empty(shape, dtype=dtype, device="meta"), None, bias)

    def tensor(self, name: str) -> Tensor:
        return torch.empty(HIDDEN // HEADS, dtype=torch.bfloat16, device="meta")


# (out, in) in units of the hidden size.
SHAPES = {
    "_mod.lin": (6, 1),
    "_attn.qkv": (3, 1),
    "_attn.proj": (1, 1),
    "_mlp.0": (4, 1),
    "_mlp.2": (1, 4),
    "modulation.lin": (3, 1),
    "linear1": (7, 1),
    "linear2": (1, 5),
}


def make_block(pack: Any, kind: str, stored: str, rank: int, modulation: bool) -> Any:
    """Return a block on the meta device. modulation: its modulation has adapters too, as `*` for targets gives it."""
    blocks, weights = pack("models.flux.blocks"), MetaWeights(pack, stored)
    base, lora = pack("models.adapters.base"), pack("models.adapters.lora")
    norm = SimpleNamespace(query_norm=SimpleNamespace(eps=1e-6))
    side = SimpleNamespace(norm=norm)
    native = SimpleNamespace(num_heads=HEADS, norm=norm, img_attn=side, txt_attn=side)
    block = (blocks.DoubleBlock if kind == "double" else blocks.SingleBlock)(weights, "block", native, attend)
    for name, linear in block.linears().items():
        if modulation or not name.endswith("mod"):
            spec = base.AdapterSpec("lora", rank, float(rank))
            linear.adapter = lora.LoraAdapter(spec, *linear.shape).to("meta")
    return block


def block_costs(
    pack: Any, stored: str, tokens: int, rank: int, tflops: float, training: bool, modulation: bool = False
) -> list[tuple[Any, int]]:
    """Return cost and trained numbers of each block, in the order of the forward."""
    cost, priced = pack("memory.swap.block_cost"), pack("memory.activations.cost")
    kinds = {}
    for kind in ("double", "single"):
        block = make_block(pack, kind, stored, rank, modulation)
        joint = tokens + TEXT
        vec = torch.empty(1, 1, HIDDEN, dtype=torch.bfloat16, device="meta")
        pe = torch.empty(1, joint, 1, HIDDEN // HEADS // 2, 2, device="meta")
        lengths = (tokens, TEXT) if kind == "double" else (joint,)
        streams = [torch.empty(1, n, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in lengths]
        frozen = [b for module in block.modules() for b in module._buffers.values() if b is not None]
        excluded = {t.untyped_storage()._cdata for t in (*frozen, *block.parameters(), vec, pe)}
        saved: dict[int, Tensor] = {}

        def pack_saved(tensor: Tensor, excluded: set[int] = excluded, saved: dict[int, Tensor] = saved) -> Tensor:
            if tensor.dim() and tensor.untyped_storage()._cdata not in excluded:
                saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        norm = patch.object(torch.nn.functional, "rms_norm", eager_norm)
        with norm, torch.autograd.graph.saved_tensors_hooks(pack_saved, lambda tensor: tensor):
            block(*streams, vec, pe, None, {})
        saved_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        # Per token 12 products of hidden by hidden in either kind; attention's backward is 2.5 times its forward.
        products, attention = 2 * 12 * HIDDEN**2 * joint, 4 * joint**2 * HIDDEN
        kinds[kind] = (
            cost.BlockCost(
                "",
                weights=sum(t.numel() * t.element_size() for t in frozen),
                inputs=sum(t.numel() * t.element_size() for t in streams),
                saved=int(priced.COMPILED_SAVES * saved_bytes),
                working=saved_bytes if training else 0,
                forward=(products + attention) / (tflops * 1e12),
                backward=(products + 2.5 * attention) / (tflops * 1e12),
                # The result in bf16 and its log-sum-exp in fp32.
                attention=joint * (HIDDEN * 2 + HEADS * 4),
                work=priced.block_work(
                    {"mm": products, "attention": attention},
                    {"mm": products, "attention": 2.5 * attention},
                    saved_bytes,
                ),
            ),
            sum(p.numel() for p in block.parameters()),
        )
    block_names = [("double", f"double_blocks.{i}") for i in range(DOUBLE)]
    block_names += [("single", f"single_blocks.{i}") for i in range(SINGLE)]
    return [(replace(kinds[kind][0], name=name), kinds[kind][1]) for kind, name in block_names]


def rows_for(pack: Any, card: int, args: argparse.Namespace, training: bool) -> list[Sequence[str]]:
    plan, cost = pack("memory.swap.plan"), pack("memory.swap.block_cost")
    order = pack("models.flux.family").Flux.forward.swap_order
    tokens = (args.side // 16) ** 2
    rows = []
    for name, outside in STORED.items():
        if name == "Q4_K" and not training:
            continue  # its own loader streams when it samples
        costs = block_costs(pack, name, tokens, args.rank, args.tflops, training)
        blocks = [cost for cost, _ in costs]
        free = int((card - args.taken) * GB * 19 / 20)
        machine = plan.Hardware(free, args.link * 1e9, int(args.ram * GB))
        counts = tuple(range(len(blocks) + 1))
        other = int(OUTER * outside)
        if training:
            other += sum(trained for _, trained in costs) * 16
            budgets = (0.5, cost.LEAST_BUDGET)
            choices = plan.SearchSpace(counts, plan.prefetches(1), ("none", "selective", "full"), budgets)
        else:
            other += int((args.side // 8) ** 2 * 2 * 0.01 * SAMPLING_FACTOR * 2**20)
            # Compute time is not measured before sampling: the choice is made without it, the seconds include it.
            unknown = [replace(block, forward=0.0) for block in blocks]
            sampling_plan = plan.plan(unknown, other, machine, order, plan.SearchSpace(counts, plan.prefetches(1)))
            choices = plan.SearchSpace((len(sampling_plan.swapped),), (sampling_plan.prefetch,))
        final_plan = plan.plan(blocks, other, machine, order, choices)
        computing = sum(sum(cost.block_seconds(block, final_plan.checkpointing, final_plan.budget)) for block in blocks)
        row = [
            f"{card} GB",
            name,
            str(len(final_plan.swapped)),
            str(final_plan.prefetch) if final_plan.swapped else "–",
        ]
        least = f" {final_plan.budget}" if final_plan.budget == cost.LEAST_BUDGET else ""
        row += [f"{final_plan.checkpointing}{least}"] if training else []
        row += [f"{final_plan.device_bytes / GB:.1f} of {free / GB:.1f}", f"{final_plan.seconds:.2f}"]
        row += [f"{max(0.0, final_plan.seconds - computing):.2f}"]
        rows.append(row if final_plan.fits else [*row[:2], *["does not fit"] * (len(row) - 2)])
    return rows


def which_settings(pack: Any, args: argparse.Namespace) -> str:
    """The page."""
    common = ["card", "weights", "blocks_to_swap", "prefetch_blocks"]
    figures = ["GB in use", "s", "s waiting for copies"]
    training = [row for card in CARDS for row in rows_for(pack, card, args, True)]
    sampling = [row for card in CARDS for row in rows_for(pack, card, args, False)]
    return f"""# Which settings for my card

What `blocks_to_swap` -1 with `checkpointing` auto chooses for FLUX.1 dev at {args.side}×{args.side}, batch 1. Made by
`python benchmarks which_settings` from the planner (`memory/swap/plan.py`); no card was measured. On your machine
the planner measures instead of assuming, so it may choose otherwise.

Assumed: a link of {args.link:g} GB/s from page-locked memory (PCIe 4 with 16 lanes; a card with 8 lanes has half of
it); {args.tflops:g} TFLOP/s in the blocks on every card (faster cards wait for copies sooner, slower ones later);
{args.taken:g} GB of each card taken by the display, CUDA and compiled kernels, and a twentieth of the rest left to the
allocator; {args.ram:g} GB of free RAM. Bytes are reckoned for compiled blocks, as the planner does it, from what our
own eager blocks keep for backward, counted on the meta device; and that much for the gradients inside one block. {TEXT}
text tokens. `selective 0.01` keeps attention's results and computes the rest again. `8 bit` is a file in fp8 or
int8, or a bf16 file with `quantize`; `Q4_K` a GGUF file. What dequantising a layer for a moment takes is not counted.

## Training a LoRA

Rank {args.rank} on attention and MLP, AdamW (16 bytes for each trained number). Seconds are of the blocks in one step.

{markdown_table([*common, "checkpointing", *figures], training)}

## Sampling

Chosen without knowing how long the blocks compute, as the nodes do; seconds are of the blocks in one pass. Beside the
weights {int((args.side // 8) ** 2 * 2 * 0.01 * SAMPLING_FACTOR)} MB
are kept for activations, as ComfyUI does.

{markdown_table([*common, *figures], sampling)}
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=1024, help="pixels along a side of the picture")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--link", type=float, default=25.0, help="GB/s (10^9) from the host to the card")
    parser.add_argument("--tflops", type=float, default=80.0, help="of bf16 arithmetic in the blocks")
    parser.add_argument("--taken", type=float, default=2.0, help="GB of the card that are not for the model")
    parser.add_argument("--ram", type=float, default=32.0, help="GB of free RAM")
    return parser


def main() -> None:
    from comfyui import set_up_comfyui

    args = parser().parse_args()
    set_up_comfyui("cpu")
    print(which_settings(lambda name: import_module(f"tessera.{name}"), args), end="")


if __name__ == "__main__":
    main()
