"""Automatic memory plan: measure one block of each structure, and choose checkpointing and block swap to fit.

A measured block reaches the device through the slots of block swap, so measuring needs no more memory than the smallest
plan. It runs eagerly; the saved activations and the recompute of the compiled block are estimated from the operations
counted in the eager one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import psutil
import torch
from comfy.model_patcher import ModelPatcher

from ...common.core import usable_memory
from ...compile.settings import CompileSettings
from ...data.samples import TrainingData
from ...lora.network import build_network
from ...memory.activations.cost import H100_RATES
from ...memory.host.file_speed import measure_file_bandwidth
from ...memory.host.flat_buffer import Layout
from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.staging import link_bandwidth
from ...memory.swap.block_cost import LEAST_BUDGET, BlockCost
from ...memory.swap.plan import (
    Hardware,
    SearchSpace,
    SwapPlan,
    Way,
    memory_place,
    plan,
    prefetches,
    step_down,
)
from ...memory.swap.training import frozen_modules
from ...models.family import Family, Transformer
from ..blocks.low_bit_policy import LowBitPolicy
from ..config.settings import MemoryOptions, TrainSettings
from ..objective.batch import make_batch
from ..optim.registry import OptimizerSpec
from .probe import Probe, count_saved, storage_of, total_bytes

WORTH = 0.05  # part of a step that another plan has to save: less is timing noise


def plans_memory(memory: MemoryOptions) -> bool:
    """Return whether the options leave block swap or checkpointing to the plan."""
    return memory.blocks_to_swap == -1 or memory.checkpointing == "auto"


@dataclass(frozen=True)
class StepCost:
    """Measured cost of one training step, from which a swap plan is made (`memory.swap.plan.plan`).

    blocks: one cost for each block.
    other_bytes: bytes outside the blocks: other weights, LoRA, optimizer state.
    machine: free memory and bandwidths.
    structures: the structure of each block.
    shapes: shape of the first input at which each structure was measured.
    lora_bytes: part of `other_bytes` that the LoRA takes with its gradient and optimizer state.
    batch_bytes: part of `other_bytes` that the batch takes with all that is saved outside the blocks.
    """

    blocks: tuple[BlockCost, ...]
    other_bytes: int
    machine: Hardware
    structures: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lora_bytes: int = 0
    batch_bytes: int = 0

    def timed_anew(self, forward: Mapping[str, float]) -> "StepCost":
        """Return the cost with these forward seconds of the blocks, by structure.

        The backward scales with them by the ratio of the counted kernels, or else of the measured seconds.
        """

        def timed(block: BlockCost, seconds: float) -> BlockCost:
            forward_seconds, backward_seconds = block.forward, block.backward
            if block.work is not None:
                forward_seconds, backward_seconds = (
                    H100_RATES.seconds(block.work.forward),
                    H100_RATES.seconds(block.work.backward),
                )
            return replace(block, forward=seconds, backward=seconds * backward_seconds / forward_seconds)

        pairs = zip(self.structures, self.blocks, strict=True)
        return replace(self, blocks=tuple(timed(b, forward[kind]) if kind in forward else b for kind, b in pairs))


class AutomaticMemory:
    """Memory plan of a run, and the sequence of smaller plans for an OOM."""

    def __init__(
        self, options: MemoryOptions, measured: StepCost, order: tuple[str, ...], previous_choice: Way | None = None
    ) -> None:
        """previous_choice: choice of the state that the run resumes from, taken again if it fits."""
        self.user_options = options
        self.measured = measured
        self.order = order
        self.choices = search_space(options, len(measured.blocks))
        self.may_plan_again = True
        if options.checkpointing == "auto" and previous_choice in self.choices.ways:
            self.plan = self._plan(self._only_way(previous_choice))
            if self.plan.fits:
                self.may_plan_again = False
                return
        self.plan = self._plan(self.choices)

    def _plan(self, choices: SearchSpace) -> SwapPlan:
        measured = self.measured
        return plan(measured.blocks, measured.other_bytes, measured.machine, self.order, choices)

    def options(self) -> MemoryOptions:
        """Return the memory options with the plan's values for the automatic ones."""
        budget = self.plan.budget if self.plan.checkpointing == "selective" else self.user_options.activation_budget
        return replace(
            self.user_options,
            blocks_to_swap=len(self.plan.swapped),
            prefetch_blocks=self.plan.prefetch,
            checkpointing=self.plan.checkpointing or self.user_options.checkpointing,
            activation_budget=budget,
        )

    def plan_again(self, forward: Mapping[str, float], steps: int, compile_seconds: float) -> bool:
        """Plan with the seconds of the compiled blocks, and switch to that plan if it pays. Returns True then.

        forward: seconds of a block's forward, by structure.
        steps: optimizer steps left.
        compile_seconds: seconds of compiling; another checkpointing compiles again.
        """
        self.may_plan_again = False
        self.measured = self.measured.timed_anew(forward)
        current_plan, best_plan = self._plan(self._space_of(self.plan)), self._plan(self.choices)
        saved = current_plan.seconds - best_plan.seconds
        cost = (
            0.0
            if (best_plan.checkpointing, best_plan.budget) == (current_plan.checkpointing, current_plan.budget)
            else compile_seconds
        )
        pays = best_plan.fits and saved > WORTH * current_plan.seconds and saved * steps > cost
        self.plan = best_plan if pays else current_plan
        return pays

    def _space_of(self, swap_plan: SwapPlan) -> SearchSpace:
        """Return the search space of one plan."""
        counts, prefetch = (len(swap_plan.swapped),), (swap_plan.prefetch,)
        return replace(self._only_way(Way(swap_plan.checkpointing, swap_plan.budget)), counts=counts, prefetch=prefetch)

    def _only_way(self, way: Way) -> SearchSpace:
        checkpointing = (way.checkpointing,) if way.checkpointing else ()
        return replace(self.choices, checkpointing=checkpointing, budgets=(way.budget,))

    def adopt(self, swap_plan: SwapPlan) -> None:
        """Adopt another rank's plan, and keep it as long as the memory suffices."""
        self.plan, self.may_plan_again = swap_plan, False

    def rename(self, structures: Sequence[str]) -> None:
        """Rename the measured structures to those that the blocks have now."""
        names = dict(zip(self.measured.structures, structures, strict=True))
        shapes = {names[name]: shape for name, shape in self.measured.shapes.items()}
        self.measured = replace(self.measured, structures=tuple(structures), shapes=shapes)

    def step_down(self) -> SwapPlan | None:
        """Switch to the next smaller plan and return it; None without one."""
        self.may_plan_again = False  # planning again would give the plan that did not fit
        measured = self.measured
        smaller_plan = step_down(
            self.plan, measured.blocks, measured.other_bytes, measured.machine, self.order, self.choices
        )
        if smaller_plan is not None:
            self.plan = smaller_plan
        return smaller_plan


def choice_facts(memory: MemoryOptions) -> dict[str, str]:
    """Return the checkpointing that a state records, and the budget if it is selective."""
    read = {"activation_budget": str(memory.activation_budget)} if memory.checkpointing == "selective" else {}
    return {"checkpointing": memory.checkpointing, **read}


def chosen_before(facts: Mapping[str, str], options: MemoryOptions) -> Way | None:
    """Return the choice that a state's facts record, None without one.

    If they record a budget that is no longer a choice, that of `options` takes its place.
    """
    checkpointing = facts.get("checkpointing")
    if checkpointing != "selective":
        return None if checkpointing is None else Way(checkpointing, 0.0)
    budget = facts.get("activation_budget")
    return Way(checkpointing, LEAST_BUDGET if budget == str(LEAST_BUDGET) else options.activation_budget)


def search_space(options: MemoryOptions, blocks: int) -> SearchSpace:
    """Return the search space: all values of the automatic options, the user's value of the others."""
    automatic = options.checkpointing == "auto"
    budgets = (options.activation_budget, LEAST_BUDGET) if automatic else (options.activation_budget,)
    counts: tuple[int, ...] = (options.blocks_to_swap,)
    prefetch: tuple[int, ...] = (options.prefetch_blocks,)
    if options.blocks_to_swap == -1:
        counts = tuple(range(blocks + 1))
        prefetch = prefetches(options.prefetch_blocks)
    return SearchSpace(
        counts=counts,
        prefetch=prefetch,
        checkpointing=("none", "selective", "full") if automatic else (options.checkpointing,),
        budgets=tuple(dict.fromkeys(budgets)),
        offload=options.offload_activations,
    )


def free_memory(patcher: ModelPatcher) -> int:
    """Return the bytes that a run may use: the free memory without ComfyUI's reserve and 5 % for fragmentation."""
    return max(0, usable_memory(patcher) * 19 // 20)


def blocks_run_once(family: Family, settings: TrainSettings) -> bool:
    """Return False if samples of different sizes in a batch run through the blocks one after another."""
    return not family.whole_grids or settings.batch_size == 1


def make_room_to_step(optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
    """Allocate and free the memory that the optimizer step will need.

    An OOM raised here can be retried. Inside the optimizer it would leave some weights updated and
    others not, which can be neither repeated nor undone.
    """
    has_state = any(optimizer.state.values())
    per_number = spec.step_bytes + (0 if has_state else spec.state_bytes)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # In pieces as large as its tensors: a group's weights may be one parameter, and memory may be fragmented.
    sizes = [min(4, per_number - piece) for piece in range(0, per_number, 4)]
    _ = [torch.empty(p.numel() * size, dtype=torch.uint8, device=p.device) for p in parameters for size in sizes]


def compiles(settings: CompileSettings | None, device: torch.device) -> Callable[[str], bool]:
    """Return a function that returns whether the block of a name is to run compiled."""

    def is_compiled(name: str) -> bool:
        compile_options = settings.options_for(name) if settings else None
        # Without Triton (as on Windows) inductor has no GPU backend, and blocks run uncompiled after the first try.
        missing = device.type == "cuda" and find_spec("triton") is None
        return compile_options is not None and not (compile_options.backend == "inductor" and missing)

    return is_compiled


def block_bytes(patcher: ModelPatcher, family: Family, memory: MemoryOptions) -> dict[str, int]:
    """Return the bytes of each block's weights in the format that `memory.quantize` asks for, without reading them."""
    transformer = _on_host(patcher, family, memory)
    sizes = _block_bytes(transformer)
    for module in transformer.frozen_modules():
        module.release()
    return sizes


def _on_host(patcher: ModelPatcher, family: Family, memory: MemoryOptions) -> Transformer:
    """Build the transformer with all blocks on the host, quantised ones in zeros."""
    lists = family.forward.block_lists(patcher.model)
    on_host = frozenset(f"{name}.{i}" for name, length in lists.items() for i in range(length))
    device, dtype = patcher.load_device, patcher.model.get_dtype_inference()
    return family.forward.build(patcher, device, dtype, memory.attention, on_host, memory.quantize, in_zeros=True)


def _block_bytes(transformer: Transformer) -> dict[str, int]:
    sizes = {}
    for name, block in transformer.blocks():
        buffers = ((key, b) for m in frozen_modules(block).values() for key, b in m._buffers.items() if b is not None)
        sizes[name] = Layout.from_tensors(buffers).size
    return sizes


def measure(
    patcher: ModelPatcher,
    family: Family,
    data: TrainingData,
    targets: list[str],
    settings: TrainSettings,
    compile_settings: CompileSettings | None = None,
    available: int | None = None,
    processes: int = 1,
) -> StepCost:
    """Measure a training step: run one block of each structure forward and backward on the largest batch.

    compile_settings: those of the run, whose blocks are estimated as compiled; None runs eagerly.
    available: free bytes of this host's memory; None queries them.
    processes: number of processes that share them.
    Frees everything that it has allocated.
    """
    device, dtype = patcher.load_device, patcher.model.get_dtype_inference()
    available = psutil.virtual_memory().available if available is None else available
    machine = Hardware(
        free_memory(patcher), link_bandwidth(device), available // processes, place=memory_place(device.type)
    )
    transformer = _on_host(patcher, family, settings.memory)
    LowBitPolicy(settings.memory.low_bit_matmul, device, dtype, None, compile_settings).set(transformer.blocks())
    run_once = blocks_run_once(family, settings)
    network = build_network(transformer, targets, settings.network, settings.seed, run_once)
    frozen = [module for _, block in transformer.blocks() for module in frozen_modules(block).values()]
    in_blocks = (b for m in frozen for b in m.buffers())
    file = measure_file_bandwidth(in_blocks, settings.memory.pin_memory, available, processes)
    in_file = {name: bytes_in_file(b.buffers()) if file is not None else 0 for name, b in transformer.blocks()}
    largest = max(data.samples, key=lambda sample: sample.tokens + sum(sample.references) + sample.text_length)
    samples = [(largest, largest.load())] * settings.batch_size
    with torch.no_grad():
        batch = make_batch(patcher, family, samples, settings.objective, device, settings.seed, (0, 0))
    inside = {id(module) for module in frozen}
    outer = [module for module in transformer.frozen_modules() if id(module) not in inside]
    structures = tuple(block.structure() for _, block in transformer.blocks())
    outer_storages = {storage_of(buffer) for module in outer for buffer in module.buffers()}
    probe = Probe(network, batch.inputs, settings, device)
    with count_saved(probe.outside, outer_storages):
        transformer.forward(probe.run, batch.inputs)

    compiled = compiles(compile_settings, device)
    costs: list[BlockCost] = []
    weights = _block_bytes(transformer)
    for name, block in transformer.blocks():
        # A block that this data does not reach (for reference pictures, say) takes no more than its weights.
        cost = (probe.compiled if compiled(name) else probe.costs).get(block.structure(), BlockCost("", 0))
        costs.append(replace(cost, name=name, weights=weights[name], in_file=in_file[name]))
    trained = sum(p.numel() for p in network.parameters())
    # Bytes per trained parameter: the fp32 weight, its gradient, the optimizer's state and the EMA.
    average = 4 if settings.optimizer.ema_decay else 0
    # These switch the adapters off for a forward, and hold a copy of their weights meanwhile.
    by_picture = settings.validation is not None and settings.validation.loss_by_picture
    concept = any(sample.concept for sample in data.samples)
    switches_off = (
        settings.objective.preservation_weight or settings.objective.guidance_loss_scale or by_picture or concept
    )
    clone = 4 if switches_off else 0
    # A cast and its gradient, or the gradient that autograd makes before it is part of the flat one.
    joined = 4 if settings.optimizer.is_elementwise else 0
    step = joined if network.casts_in(dtype) is None else 2 * dtype.itemsize
    lora = trained * (4 + 4 + step + settings.optimizer.spec.state_bytes + average + clone) + network.buffer_bytes()
    batch_storages = {storage_of(tensor): tensor for tensor in batch.tensors() if tensor.device.type == device.type}
    # One batch: the next one is made after this step's activations are freed, and before those of its own step.
    saved = total_bytes(probe.outside | batch_storages)
    other = sum(module.held_bytes() for module in outer) + lora + saved
    for module in transformer.frozen_modules():
        module.release()
    return StepCost(tuple(costs), other, replace(machine, file=file), structures, probe.shapes, lora, saved)
