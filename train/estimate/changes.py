"""Changes of one setting, and what a step would then take, calculated from the measured cost of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...data.samples import Sample
from ...memory.low_bit.matmul import INT8
from ...memory.low_bit.quantize import AS_STORED
from ...memory.swap.block_cost import BlockCost
from ...memory.swap.plan import SwapPlan
from ..config.settings import MemoryOptions
from ..placement.auto import AutomaticMemory, StepCost, block_bytes
from ..preflight.context import RunContext
from ..preflight.disk_space import trained_parameters


@dataclass(frozen=True)
class Alternative:
    """Another value of one setting.

    name: the input.
    before: its value now.
    after: its other value.
    bytes: what the memory peak changes by.
    seconds: seconds of a step, as a multiple of the seconds now.
    fits: into the free memory.
    keeps_result: the LoRA stays the same except for rounding.
    """

    name: str
    before: float | str
    after: float | str
    bytes: int
    seconds: float
    fits: bool
    keeps_result: bool


@dataclass(frozen=True)
class _Variant:
    """Another value of one setting, before its plan is made.

    name: the input.
    before: its value now.
    after: its other value.
    memory: memory options with that value.
    cost: cost of a step with that value.
    keeps_result: the LoRA stays the same except for rounding.
    """

    name: str
    before: float | str
    after: float | str
    memory: MemoryOptions
    cost: StepCost
    keeps_result: bool = False


def calculated_changes(context: RunContext, cost: StepCost, fits: bool) -> tuple[Alternative, ...]:
    """Calculate what a step takes after each of some changes. Those that change neither memory nor time are left out.

    cost: of the largest batch, with the settings of the run.
    fits: whether steps with these settings found enough memory, which says more of it than a plan.
    """

    def plan(memory: MemoryOptions, step: StepCost) -> SwapPlan:
        return AutomaticMemory(memory, step, context.family.forward.swap_order).plan

    present = plan(context.device_settings.memory, cost)
    # As `step_down` does: a tenth less than what ran out of memory.
    limit = max if fits else min
    free = limit(cost.machine.free, present.device_bytes if fits else present.device_bytes * 9 // 10)
    cost = replace(cost, machine=replace(cost.machine, free=free))
    changes = []
    for variant in _variants(context, cost, present):
        other = plan(variant.memory, variant.cost)
        seconds = other.seconds / present.seconds if present.seconds else 1.0
        if other.device_bytes != present.device_bytes or seconds != 1.0:
            changes.append(
                Alternative(
                    variant.name,
                    variant.before,
                    variant.after,
                    other.device_bytes - present.device_bytes,
                    seconds,
                    other.fits,
                    variant.keeps_result,
                )
            )
    return tuple(changes)


def cheapest_fitting(changes: tuple[Alternative, ...], count: int = 3) -> list[Alternative]:
    """Choose the changes with which the run fits: those that keep the result first, and of these the fastest."""
    return sorted((c for c in changes if c.fits), key=lambda c: (not c.keeps_result, c.seconds))[:count]


def sample_size(sample: Sample) -> int:
    """Return the tokens that a sample brings into the blocks."""
    return sample.tokens + sum(sample.references) + sample.text_length


def largest_sample(context: RunContext) -> Sample:
    """Return the largest sample to learn from, whose steps are measured."""
    return max((s for s in context.data.samples if not s.regularisation), key=sample_size)


def _variants(context: RunContext, cost: StepCost, present: SwapPlan) -> Iterator[_Variant]:
    yield from _ranks(context, cost)
    yield from _batch_sizes(context, cost)
    yield from _picture_sizes(context, cost)
    yield from _memory_options(context, cost, present)


def _ranks(context: RunContext, cost: StepCost) -> Iterator[_Variant]:
    """Yield half the rank and twice the rank."""
    settings, model = context.device_settings, context.patcher.model
    rank = settings.network.rank
    parameters = trained_parameters(model, settings.network, context.targets)
    for other in filter(None, (rank // 2, rank * 2)):
        factor = trained_parameters(model, replace(settings.network, rank=other), context.targets) / parameters
        yield _Variant("rank", rank, other, settings.memory, _with_lora(cost, factor))


def _batch_sizes(context: RunContext, cost: StepCost) -> Iterator[_Variant]:
    """Yield half the batch and twice the batch."""
    batch = context.settings.batch_size
    for size in filter(None, (batch // 2, batch * 2)):
        yield _Variant("batch_size", batch, size, context.device_settings.memory, _scaled(cost, size / batch))


def _picture_sizes(context: RunContext, cost: StepCost) -> Iterator[_Variant]:
    """Yield other areas, if the data say of how many megapixels they are; the text stays as long as it is."""
    megapixels = context.data.made_with.get("megapixels")
    if not isinstance(megapixels, int | float):
        return
    sample = largest_sample(context)
    whole = sample_size(sample)
    rest = whole - sample.tokens
    for area in filter(None, (round(part * megapixels, 2) for part in (0.25, 0.5, 2.0))):
        share = (area / megapixels * sample.tokens + rest) / whole
        yield _Variant("megapixels", megapixels, area, context.device_settings.memory, _scaled(cost, share))


def _memory_options(context: RunContext, cost: StepCost, present: SwapPlan) -> Iterator[_Variant]:
    """Yield the other kinds of checkpointing, automatic block swap, and frozen weights in 8 bits."""
    memory = context.device_settings.memory
    for checkpointing in ("none", "selective", "full"):
        if checkpointing != present.checkpointing:
            options = replace(memory, checkpointing=checkpointing)
            yield _Variant("checkpointing", str(present.checkpointing), checkpointing, options, cost, True)
    if memory.blocks_to_swap != -1:
        options = replace(memory, blocks_to_swap=-1)
        yield _Variant("blocks_to_swap", memory.blocks_to_swap, -1, options, cost, True)
    if memory.quantize == AS_STORED:
        yield _Variant("quantize", AS_STORED, INT8, memory, _in_8_bit(cost, context))


def _with_lora(cost: StepCost, factor: float) -> StepCost:
    """Return the cost with a LoRA of `factor` times as many parameters."""
    change = round((factor - 1) * cost.lora_bytes)
    return replace(cost, other_bytes=cost.other_bytes + change, lora_bytes=cost.lora_bytes + change)


def _scaled(cost: StepCost, factor: float) -> StepCost:
    """Return the cost with `factor` times as many tokens: bytes and seconds in proportion."""

    def size(count: int) -> int:
        return round(factor * count)

    def block(b: BlockCost) -> BlockCost:
        return replace(
            b,
            inputs=size(b.inputs),
            saved=size(b.saved),
            working=size(b.working),
            attention=size(b.attention),
            budgeted=None if b.budgeted is None else size(b.budgeted),
            forward=factor * b.forward,
            backward=factor * b.backward,
        )

    batch = size(cost.batch_bytes)
    other = cost.other_bytes + batch - cost.batch_bytes
    return replace(cost, blocks=tuple(map(block, cost.blocks)), other_bytes=other, batch_bytes=batch)


def _in_8_bit(cost: StepCost, context: RunContext) -> StepCost:
    """Return the cost with the blocks' 16 and 32 bit matrices in 8 bits."""
    memory = replace(context.device_settings.memory, quantize=INT8)
    weights = block_bytes(context.patcher, context.family, memory)
    return replace(cost, blocks=tuple(replace(b, weights=weights[b.name]) for b in cost.blocks))
