"""Dropout of adapters. Masks are sampled outside the blocks, so that the recompute of a block sees the same ones."""

import torch
from torch import Tensor

from ..common.rng import generator
from ..models.adapters.base import Adapter, DropMask
from ..models.family import Block, ModelInputs
from .options import NetworkOptions


def sample_masks(
    options: NetworkOptions,
    block: Block,
    inputs: ModelInputs,
    seed: int,
    key: tuple[int | str, ...],
    dtype: torch.dtype,
    part: tuple[int, int] = (0, 1),
) -> dict[str, DropMask]:
    """Sample the masks of one block, by the names of its Linears, from the random key `key`; empty without dropout.

    part: (number, count) if the samples are one of `count` equal shards of a batch: the masks of the whole batch are
        sampled, so that those of a sample do not depend on the number of devices.

    dropout: drops elements of the rank activations. rank_dropout: drops whole ranks per sample (rows of delta W for
        LoHa and LoKr, blocks for OFT). Both scale the rest by 1 / (1 − p), except for OFT. module_dropout: drops the
        whole adapter per sample, unscaled. Same as kohya's network_dropout, rank_dropout and module_dropout
        (sd-scripts, networks/lora.py), except that a module is dropped per sample and not per batch. LyCORIS drops the
        same rows of delta W, but leaves the rest unscaled: its rank_dropout_scale is off by default, and if on divides
        by the share that this draw kept.
    """
    if not options.drops:
        return {}
    shapes = block.mask_shapes(inputs)
    masks = {}
    for name, linear in block.linears().items():
        if linear.adapter is not None and name in shapes:
            sampler = _MaskSampler(seed, (*key, name), linear.weight.device, dtype, part)
            masks[name] = _mask(options, linear.adapter, sampler, *shapes[name])
    return masks


class _MaskSampler:
    def __init__(
        self, seed: int, key: tuple[int | str, ...], device: torch.device, dtype: torch.dtype, part: tuple[int, int]
    ):
        self.seed = seed
        self.key = key
        self.device = device
        self.dtype = dtype
        self.part = part

    def sample(self, p: float, shape: tuple[int, ...], scaled: bool, *kind: str) -> Tensor:
        """Sample a mask: 0 with probability p, else 1, or 1 / (1 − p) if `scaled`."""
        source = generator(self.seed, *self.key, *kind, device=self.device)
        (batch, *rest), (number, count) = shape, self.part
        draw = torch.rand((batch * count, *rest), generator=source, device=self.device)[number * batch :][:batch]
        return ((draw >= p) / (1 - p if scaled else 1)).to(self.dtype)


def _mask(options: NetworkOptions, adapter: Adapter, sampler: _MaskSampler, batch: int, rows: int) -> DropMask:
    width = adapter.drop_width()
    parts, module = [], None
    if options.dropout:
        parts.append(sampler.sample(options.dropout, (batch, rows, width), True))
    if options.rank_dropout:
        parts.append(sampler.sample(options.rank_dropout, (batch, 1, width), adapter.rank_drop_scaled, "rank"))
    if options.module_dropout:
        module = sampler.sample(options.module_dropout, (batch, 1, 1), False, "module")
        parts.append(module)
    update = parts[0]
    for part in parts[1:]:
        update = update * part
    return DropMask(update, module if adapter.replaces_output else None)
