"""Fits a run into the free memory: one block of each kind is run and measured, and the planner chooses.

A block is brought to the device through the slots of block swap, so measuring takes no more memory than the smallest
plan. It runs eager, which keeps at least as much for backward as the compiled block does.
"""

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...common.core import usable_memory
from ...compile.region import run_block
from ...data.samples import TrainingData
from ...lora.network import LoraNetwork, build_network
from ...memory.host.file_speed import measure_file_bandwidth
from ...memory.host.flat_buffer import Layout
from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.staging import link_bandwidth
from ...memory.swap.plan import BlockCost, Hardware, SearchSpace, SwapPlan, plan, prefetches, step_down
from ...memory.swap.training import BlockSwap, frozen_modules
from ...models.family import Block, Family, ModelInputs
from ..batch import make_batch
from ..optim.registry import OptimizerSpec
from ..settings import MemoryOptions, TrainSettings


def is_asked(memory: MemoryOptions) -> bool:
    return memory.blocks_to_swap == -1 or memory.checkpointing == "auto"


@dataclass(frozen=True)
class StepCost:
    """Measured cost of one training step, from which a swap plan is made (`memory.swap.plan.plan`).

    blocks: one cost for each block.
    other_bytes: memory for all that is not in a block: outer weights, LoRA, optimizer state.
    machine: free memory and bandwidths.
    """

    blocks: tuple[BlockCost, ...]
    other_bytes: int
    machine: Hardware


class AutomaticMemory:
    """The plan of a run, and the next smaller one when it proves too large."""

    def __init__(self, asked: MemoryOptions, measured: StepCost, order: tuple[str, ...]):
        self.asked, self.measured, self.order = asked, measured, order
        self.choices = choices_of(asked, len(measured.blocks))
        self.plan = plan(measured.blocks, measured.other_bytes, measured.machine, order, self.choices)

    def options(self) -> MemoryOptions:
        """The options with the plan in place of what was left open."""
        return replace(
            self.asked,
            blocks_to_swap=len(self.plan.swapped),
            prefetch_blocks=self.plan.prefetch,
            checkpointing=self.plan.checkpointing or self.asked.checkpointing,
        )

    def step_down(self) -> SwapPlan | None:
        """The next plan that takes less, which is in force from here on; None where there is none."""
        measured = self.measured
        less = step_down(self.plan, measured.blocks, measured.other_bytes, measured.machine, self.order, self.choices)
        if less is not None:
            self.plan = less
        return less


def choices_of(asked: MemoryOptions, blocks: int) -> SearchSpace:
    """What the user left open."""
    counts: tuple[int, ...] = (asked.blocks_to_swap,)
    prefetch: tuple[int, ...] = (asked.prefetch_blocks,)
    if asked.blocks_to_swap == -1:
        counts = tuple(range(blocks + 1))
        prefetch = prefetches(asked.prefetch_blocks)
    return SearchSpace(
        counts=counts,
        prefetch=prefetch,
        checkpointing=("none", "selective", "full") if asked.checkpointing == "auto" else (asked.checkpointing,),
        budget=asked.activation_budget,
        offload=asked.offload_activations,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that a run may use: what ComfyUI leaves to other programs is kept back, and a twentieth for the pieces that
    an allocator cannot join."""
    return max(0, usable_memory(device) * 19 // 20)


def make_room_to_step(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, parameters: Iterable[nn.Parameter]
) -> None:
    """Takes the memory that the optimizer's step will take, and lets it go again. Where there is too little it is found
    out here: the step itself would break off amid moving the weights, and could be made neither again nor undone."""
    begun = any(optimizer.state.values())
    per_number = spec.step_bytes + (0 if begun else spec.state_bytes)
    _ = [torch.empty(p.numel() * per_number, dtype=torch.uint8, device=p.device) for p in parameters]


def measure(
    patcher: ModelPatcher, family: Family, data: TrainingData, targets: list[str], settings: TrainSettings
) -> StepCost:
    """Runs one block of each kind forward and back on the largest batch of the data. Everything is let go after."""
    device, dtype = patcher.load_device, patcher.model.get_dtype_inference()
    available = psutil.virtual_memory().available
    machine = Hardware(free_memory(device), link_bandwidth(device), available)
    lists = family.block_lists(patcher.model)
    on_host = frozenset(f"{name}.{i}" for name, length in lists.items() for i in range(length))
    transformer = family.build(patcher, device, dtype, settings.memory.attention, on_host)
    network = build_network(transformer, targets, settings.network, settings.seed)
    frozen = [module for _, block in transformer.blocks() for module in frozen_modules(block).values()]
    file = measure_file_bandwidth((b for m in frozen for b in m.buffers()), settings.memory.pin_memory, available)
    in_file = {name: bytes_in_file(b.buffers()) if file is not None else 0 for name, b in transformer.blocks()}
    largest = max(data.samples, key=lambda sample: sample.tokens + sum(sample.references) + sample.text_length)
    samples = [(largest, largest.load())] * settings.batch_size
    with torch.no_grad():
        batch = make_batch(patcher, family, samples, settings.objective, device, settings.seed, (0, 0))
    inside = {id(module) for module in frozen}
    outer = [module for module in transformer.frozen_modules() if id(module) not in inside]
    own = {_storage(buffer) for module in outer for buffer in module.buffers()}
    probe = _Probe(network, batch.inputs, settings, device)
    with _count_saved(probe.outside, own):
        transformer.forward(probe.run, batch.inputs)

    costs: list[BlockCost] = []
    for name, block in transformer.blocks():
        held = frozen_modules(block).values()
        weights = Layout.of((key, b) for module in held for key, b in module._buffers.items() if b is not None)
        cost = probe.costs[block.structure()]
        costs.append(replace(cost, name=name, weights=weights.size, in_file=in_file[name]))
    trained = sum(p.numel() for p in network.parameters())
    # A number, its gradient, what the optimizer keeps of it, and its average.
    average = 4 if settings.optimizer.ema_decay else 0
    # While the adapters are switched off, what they hold is kept beside.
    kept = 4 if settings.objective.preservation_weight else 0
    lora = trained * (4 + 4 + settings.optimizer.spec.state_bytes + average + kept) + network.buffer_bytes()
    other = sum(module.held_bytes() for module in outer) + lora + _total(probe.outside)
    for module in transformer.frozen_modules():
        module.release()
    return StepCost(tuple(costs), other, replace(machine, file=file))


class _Probe:
    """Runs the first block of each structure for real, and for the others gives back what that one gave."""

    def __init__(self, network: LoraNetwork, inputs: ModelInputs, settings: TrainSettings, device: torch.device):
        self.network, self.inputs, self.settings, self.device = network, inputs, settings, device
        self.costs: dict[str, BlockCost] = {}
        self._outputs: dict[str, Any] = {}
        self.outside: dict[int, Tensor] = {}  # what the model keeps outside of its blocks, by its memory

    def run(self, block: Block, *args: Any) -> Any:
        structure = block.structure()
        if structure not in self.costs:
            self.outside |= {_storage(a): a for a in args if isinstance(a, Tensor) and not a.requires_grad}
            self.costs[structure], self._outputs[structure] = self._measure(block, args)
        return self._outputs[structure]

    def _measure(self, block: Block, args: tuple[Any, ...]) -> tuple[BlockCost, Any]:
        for linear in block.linears().values():
            if linear.adapter is not None:
                linear.adapter = copy.deepcopy(linear.adapter).to(self.device)
        swap = BlockSwap([block], self.device, 1, False, in_place=True)
        inputs = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
        tensors = [a for a in inputs if isinstance(a, Tensor)]
        masks = self.network.sample_masks(block, self.inputs, self.settings.seed, ("measure",), args[0].dtype)

        # What is there anyway: weights in their slot, the LoRA, and what all blocks share.
        shared = [a for a in tensors if not a.requires_grad]
        own = {_storage(tensor) for tensor in (*swap.ring.slots, *block.parameters(), *shared)}
        saved: dict[int, Tensor] = {}

        def forward() -> Any:
            with _count_saved(saved, own):
                return swap.run(run_block, block, *inputs, masks)

        before = _used(self.device)
        outputs = forward()
        kept = _total(saved)
        saved.clear()
        _backward(outputs)
        peak = _peak(self.device)
        again, forward_seconds = _timed(self.device, forward)
        _, backward_seconds = _timed(self.device, lambda: _backward(again))
        cost = BlockCost(
            "",
            weights=0,
            inputs=sum(a.numel() * a.element_size() for a in tensors if a.requires_grad),
            saved=kept,
            # Where nothing counts the peak: the gradients of all that was kept, which is more than there ever are.
            working=kept if peak is None else max(0, peak - before - kept),
            forward=forward_seconds,
            backward=backward_seconds,
        )
        swap.release()
        for module in frozen_modules(block).values():
            module.take()
        if isinstance(outputs, Tensor):
            return cost, outputs.detach().requires_grad_()
        return cost, tuple(output.detach().requires_grad_() for output in outputs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _total(held: dict[int, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def _count_saved(into: dict[int, Tensor], own: set[int]) -> saved_tensors_hooks:
    """Notes every memory that autograd keeps for backward, but for those in `own` and for single numbers. The tensors
    are held on to: an address that is free again would be counted as the same memory."""

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and _storage(tensor) not in own:
            into[_storage(tensor)] = tensor
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _backward(outputs: Any) -> None:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float]:
    """(what it returned, seconds)"""
    _synchronize(device)
    started = time.perf_counter()
    result = call()
    _synchronize(device)
    return result, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _used(device: torch.device) -> int:
    """Bytes in use; `_peak` counts from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
