"""Automatic memory plan: measure one block of each structure, and choose checkpointing and block swap to fit.

A measured block reaches the device through the slots of block swap, so measuring needs no more memory than the smallest
plan. It runs eagerly, which saves at least as much for backward as the compiled block does.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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

WORTH = 0.05  # part of a step that another plan has to save: less is within what timing differs by


def plans_memory(memory: MemoryOptions) -> bool:
    """Return True where the options leave block swap or checkpointing to the plan."""
    return memory.blocks_to_swap == -1 or memory.checkpointing == "auto"


@dataclass(frozen=True)
class StepCost:
    """Measured cost of one training step, from which a swap plan is made (`memory.swap.plan.plan`).

    blocks: one cost for each block.
    other_bytes: bytes outside the blocks: other weights, LoRA, optimizer state.
    machine: free memory and bandwidths.
    structures: the structure of each block.
    shapes: shape of the first input at which each structure was measured.
    """

    blocks: tuple[BlockCost, ...]
    other_bytes: int
    machine: Hardware
    structures: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def timed_anew(self, forward: Mapping[str, float]) -> "StepCost":
        """Return the cost with the blocks' own seconds of a forward, by structure; backward changes as much."""
        blocks = (
            replace(block, forward=forward[kind], backward=block.backward * forward[kind] / block.forward)
            for kind, block in zip(self.structures, self.blocks, strict=True)
        )
        return replace(self, blocks=tuple(blocks))


class AutomaticMemory:
    """Memory plan of a run, and the sequence of smaller plans for an OOM."""

    def __init__(
        self, asked: MemoryOptions, measured: StepCost, order: tuple[str, ...], before: str | None = None
    ) -> None:
        """before: checkpointing of the state that the run goes on from, taken again where it fits."""
        self.asked, self.measured, self.order = asked, measured, order
        self.choices = search_space(asked, len(measured.blocks))
        self.may_plan_again = True
        if asked.checkpointing == "auto" and before in self.choices.checkpointing:
            self.plan = self._plan(replace(self.choices, checkpointing=(before,)))
            if self.plan.fits:
                self.may_plan_again = False
                return
        self.plan = self._plan(self.choices)

    def _plan(self, choices: SearchSpace) -> SwapPlan:
        measured = self.measured
        return plan(measured.blocks, measured.other_bytes, measured.machine, self.order, choices)

    def options(self) -> MemoryOptions:
        """Return the memory options with the plan's values for the automatic ones."""
        return replace(
            self.asked,
            blocks_to_swap=len(self.plan.swapped),
            prefetch_blocks=self.plan.prefetch,
            checkpointing=self.plan.checkpointing or self.asked.checkpointing,
        )

    def plan_again(self, forward: Mapping[str, float], steps: int, compile_seconds: float) -> bool:
        """Plan with the seconds of the compiled blocks, and switch to that plan where it pays. Returns True then.

        forward: seconds of a block's forward, by structure.
        steps: optimizer steps left.
        compile_seconds: what compiling took; another checkpointing compiles anew.
        """
        self.may_plan_again = False
        self.measured = self.measured.timed_anew(forward)
        now, best = self._plan(self._only(self.plan)), self._plan(self.choices)
        saved = now.seconds - best.seconds
        cost = 0.0 if best.checkpointing == now.checkpointing else compile_seconds
        pays = best.fits and saved > WORTH * now.seconds and saved * steps > cost
        self.plan = best if pays else now
        return pays

    def _only(self, made: SwapPlan) -> SearchSpace:
        """Return the search space of one plan."""
        checkpointing = (made.checkpointing,) if made.checkpointing else ()
        counts, prefetch = (len(made.swapped),), (made.prefetch,)
        return replace(self.choices, counts=counts, prefetch=prefetch, checkpointing=checkpointing)

    def step_down(self) -> SwapPlan | None:
        """Switch to the next smaller plan and return it; None where there is none."""
        self.may_plan_again = False  # what is planned anew would be the plan that did not fit
        measured = self.measured
        less = step_down(self.plan, measured.blocks, measured.other_bytes, measured.machine, self.order, self.choices)
        if less is not None:
            self.plan = less
        return less


def shared_memory_note(device: torch.device) -> str:
    """Explain what a plan's memory is on a device without memory of its own; empty for a GPU."""
    if device.type in ("cuda", "xpu"):
        return ""
    name = {"cpu": "the CPU", "mps": "MPS"}.get(device.type, device.type)
    return f" On {name} that is the computer's own memory, as far as it was free when the run began."


def search_space(asked: MemoryOptions, blocks: int) -> SearchSpace:
    """Return the search space: all values of the automatic options, the user's value of the others."""
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


def free_memory(patcher: ModelPatcher) -> int:
    """Return the bytes that a run may use: the free memory without ComfyUI's reserve and 5 % for fragmentation."""
    return max(0, usable_memory(patcher) * 19 // 20)


def make_room_to_step(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, parameters: Iterable[nn.Parameter]
) -> None:
    """Allocate and free the memory that the optimizer step will need.

    An OOM is raised here, where the step can be retried. Inside the optimizer it would leave some weights updated and
    others not, which can be neither repeated nor undone.
    """
    begun = any(optimizer.state.values())
    per_number = spec.step_bytes + (0 if begun else spec.state_bytes)
    _ = [torch.empty(p.numel() * per_number, dtype=torch.uint8, device=p.device) for p in parameters]


def measure(
    patcher: ModelPatcher, family: Family, data: TrainingData, targets: list[str], settings: TrainSettings
) -> StepCost:
    """Measure a training step: run one block of each structure forward and backward on the largest batch.

    Frees everything that it has allocated.
    """
    device, dtype = patcher.load_device, patcher.model.get_dtype_inference()
    available = psutil.virtual_memory().available
    machine = Hardware(free_memory(patcher), link_bandwidth(device), available)
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
    structures = tuple(block.structure() for _, block in transformer.blocks())
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
    # Bytes per trained parameter: the fp32 weight, its gradient, the optimizer's state and the EMA.
    average = 4 if settings.optimizer.ema_decay else 0
    # Preservation switches the adapters off for one forward and holds a copy of their weights meanwhile.
    kept = 4 if settings.objective.preservation_weight else 0
    lora = trained * (4 + 4 + settings.optimizer.spec.state_bytes + average + kept) + network.buffer_bytes()
    other = sum(module.held_bytes() for module in outer) + lora + _total(probe.outside)
    for module in transformer.frozen_modules():
        module.release()
    return StepCost(tuple(costs), other, replace(machine, file=file), structures, probe.shapes)


class _Probe:
    """Block runner for measuring: runs the first block of each structure and input shapes and returns its outputs for
    the others. A structure costs what its largest inputs do."""

    def __init__(self, network: LoraNetwork, inputs: ModelInputs, settings: TrainSettings, device: torch.device):
        self.network, self.inputs, self.settings, self.device = network, inputs, settings, device
        self.costs: dict[str, BlockCost] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[tuple[Any, ...], Any] = {}
        self.outside: dict[int, Tensor] = {}  # tensors saved outside the blocks, by address

    def run(self, block: Block, *args: Any) -> Any:
        structure = block.structure()
        # Blocks of one structure may see other tokens: those of the text, of the picture, or both.
        place = structure, tuple(a.shape for a in args if isinstance(a, Tensor))
        if place not in self._outputs:
            self.outside |= {_storage(a): a for a in args if isinstance(a, Tensor) and not a.requires_grad}
            cost, self._outputs[place] = self._measure(block, args)
            if structure not in self.costs or self.costs[structure].saved < cost.saved:
                self.costs[structure], self.shapes[structure] = cost, tuple(args[0].shape)
        return self._outputs[place]

    def _measure(self, block: Block, args: tuple[Any, ...]) -> tuple[BlockCost, Any]:
        for linear in block.linears().values():
            if linear.adapter is not None:
                linear.adapter = copy.deepcopy(linear.adapter).to(self.device)
        swap = BlockSwap([block], self.device, 1, False, in_place=True)
        trained = any(linear.adapter is not None for linear in block.linears().values())
        # Where nothing up to here is trained, another block of this structure may still come after one that is.
        alone = not trained and not any(isinstance(a, Tensor) and a.requires_grad for a in args)
        inputs = [
            a.detach().requires_grad_(a.requires_grad or (alone and a.is_floating_point()))
            if isinstance(a, Tensor)
            else a
            for a in args
        ]
        tensors = [a for a in inputs if isinstance(a, Tensor)]
        masks = self.network.sample_masks(block, self.inputs, self.settings.seed, ("measure",), args[0].dtype)

        # Tensors that exist anyway do not count: weights in their slot, the LoRA, and inputs shared by all blocks.
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
        # The second run is timed: the first one includes one-time costs such as kernel selection.
        again, forward_seconds = _timed(self.device, forward)
        _, backward_seconds = _timed(self.device, lambda: _backward(again))
        cost = BlockCost(
            "",
            weights=0,
            inputs=sum(a.numel() * a.element_size() for a in tensors if a.requires_grad),
            saved=kept,
            # Without a peak counter: gradients of all saved tensors, an upper bound.
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
    """Record the storages that autograd saves for backward, without those in `own` and scalars.

    into: receives the tensors by address. It holds them, as a freed address would be reused and not counted again.
    """

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and _storage(tensor) not in own:
            into[_storage(tensor)] = tensor
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _backward(outputs: Any) -> None:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float]:
    """Run `call` and return (its result, seconds), with the device synchronised before and after."""
    _synchronize(device)
    started = time.perf_counter()
    result = call()
    _synchronize(device)
    return result, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _used(device: torch.device) -> int:
    """Return the bytes in use and reset the counter of `_peak`."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
