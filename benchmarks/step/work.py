"""Demands of a training step, counted on torch's meta device: FLOP, and the bytes that block swap copies."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from families import Model, Picture
from figures import swapped_blocks

from step.data import random_data


@dataclass(frozen=True)
class Work:
    """Of one step on one sample. parameters: of the model; tokens, text_tokens: in its sequences; forward, backward:
    FLOP of matrix products; recompute: of those that full checkpointing computes again."""

    parameters: int
    tokens: int
    text_tokens: int
    forward: int
    backward: int
    recompute: int


@dataclass(frozen=True)
class SwapWork:
    """Of one step once the first is over. blocks: how many of `total` stream; bytes: in all copies."""

    blocks: int
    total: int
    copies: int
    bytes: int


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: None = None) -> torch.Tensor:
    """Attention as torch's SDPA runs it on a GPU; its backward computes the scores again.

    On the meta device SDPA would take the plain products. The captions that are counted have no pads to mask.
    """
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]


class CountedStep:
    """A model without weights, and its step on one sample of that picture. file: of a small model."""

    def __init__(self, model: Model, file: str, picture: Picture):
        dtype = torch.bfloat16 if model.write is None else torch.float32
        self.patcher = model.load(file, "meta", dtype)
        self.family = import_module("tessera.models.catalogue.registry").family_of(self.patcher)
        compute = self.patcher.model.get_dtype_inference()
        self.transformer = self.family.forward.build(self.patcher, torch.device("meta"), compute, "auto")
        (self.sample,) = random_data(self.patcher, picture, 1).samples

    def count(self, rank: int, include: tuple[str, ...]) -> Work:
        """Count our own forward and backward, with a LoRA on `include`, or on the family's default targets."""
        from torch.utils.flop_counter import FlopCounterMode

        self._add_lora(rank, include)
        inputs, in_blocks = self.inputs(), []

        def run(block: Any, *args: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = block(*args, {})
            in_blocks.append(counter.get_total_flops())
            return result

        with patch.object(torch.nn.functional, "scaled_dot_product_attention", flash):
            with FlopCounterMode(display=False) as forward:
                velocity = self.transformer.forward(run, inputs)
            with FlopCounterMode(display=False) as backward:
                velocity.sum().backward()
        return Work(
            sum(p.numel() for p in self.patcher.model.diffusion_model.parameters()),
            inputs.image_tokens,
            inputs.text_tokens,
            forward.get_total_flops(),
            backward.get_total_flops(),
            sum(in_blocks),
        )

    def calls(self, rank: int, include: tuple[str, ...], batch: int) -> dict[str, list[tuple[Any, tuple[Any, ...]]]]:
        """Each structure's blocks with the arguments that they are given, on the meta device. One of each runs."""
        self._add_lora(rank, include)
        calls: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {}
        outputs: dict[str, Any] = {}

        def run(block: Any, *args: Any) -> Any:
            structure = block.structure()
            calls.setdefault(structure, []).append((block, args))
            if structure not in outputs:
                outputs[structure] = block(*args, {})
            return outputs[structure]

        with patch.object(torch.nn.functional, "scaled_dot_product_attention", flash):
            self.transformer.forward(run, self.inputs(batch))
        return calls

    def _add_lora(self, rank: int, include: tuple[str, ...]) -> None:
        plan, options = import_module("tessera.lora.plan"), import_module("tessera.lora.options")
        base, lora = import_module("tessera.models.adapters.base"), import_module("tessera.models.adapters.lora")
        network = options.NetworkOptions(rank=rank, alpha=float(rank), include=include)
        linears = self.transformer.linears()
        for name in plan.choose_targets(self.family, self.patcher.model, network):
            spec = base.AdapterSpec("lora", rank, float(rank))
            adapter = linears[name].adapter = lora.LoraAdapter(spec, *linears[name].shape).to("meta")
            base.make_casts(adapter, self.patcher.model.get_dtype_inference())

    def inputs(self, batch: int = 1) -> Any:
        """`batch` times the sample, as the family hands it to its transformer."""
        noisy, tensors = import_module("tessera.models.family").NoisySample, self.sample.load()
        conditioning = {name: value.to("meta") for name, value in tensors.conditioning.items()}
        latent, text = tensors.latent.to("meta"), tensors.text.to("meta")
        sample = noisy(latent, text, conditioning, self.sample.tokens, self.sample.text_length)
        return self.family.forward.inputs(self.patcher, [sample] * batch, torch.empty(batch, device="meta"), 1.0)

    def count_swap(self, percent: float, prefetch: int) -> SwapWork:
        """Run the engine's own ring over blocks without bytes."""
        selection, ring = import_module("tessera.memory.swap.selection"), import_module("tessera.memory.swap.slot_ring")
        lists = self.family.forward.block_lists(self.patcher.model)
        total = sum(lists.values())
        count = swapped_blocks(percent, total)
        swapped = selection.choose_blocks(count, lists, self.family.forward.swap_order)
        if not swapped:
            return SwapWork(0, total, 0, 0)
        masters = [_master(block) for name, block in self.transformer.blocks() if name in swapped]
        slots = ring.SlotRing(masters, torch.device("meta"), prefetch)
        slots.take()
        previous = (0, 0)
        for _ in range(2):
            previous = slots.copies, slots.bytes_copied
            for j in range(len(masters)):
                slots.forward(j)
            for j in reversed(range(len(masters))):
                slots.backward(j)
        return SwapWork(count, total, slots.copies - previous[0], slots.bytes_copied - previous[1])


def _master(block: Any) -> torch.Tensor:
    """The block's flat buffer, without memory."""
    swap, flat = import_module("tessera.memory.swap.training"), import_module("tessera.memory.host.flat_buffer")
    tensors = [
        (f"{owner}.{name}", tensor)
        for owner, module in swap.frozen_modules(block).items()
        for name, tensor in module.named_buffers(recurse=False)
    ]
    return torch.empty(flat.Layout.from_tensors(tensors).size, dtype=torch.uint8, device="meta")
