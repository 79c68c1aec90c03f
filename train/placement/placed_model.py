"""Model of a run: its weights placed on device and host by the memory options, its LoRA and its block runner."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import comfy.model_management
import psutil
import torch

from ...data.samples import TrainingData
from ...lora.network import LoraNetwork, build_network
from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.page_locked import give_back
from ...memory.host.pinning import HostPlacement, HostWeights, place_on_host, unpinned_message
from ...memory.low_bit.quantize import quantize_of
from ...memory.swap.selection import choose_blocks
from ...memory.swap.sharded import ShardedSwap
from ...memory.swap.training import BlockSwap, frozen_modules
from ...memory.weights.residency import Holder, ResidentWeights
from ...models.adapters.base import DropMask
from ...models.family import Block, ModelInputs, RunBlock, Transformer
from ..blocks.block_clock import BlockClock
from ..blocks.block_runner import BlockRunner
from ..blocks.graph_count import count_graphs
from ..blocks.low_bit_policy import LowBitPolicy
from ..distributed.node import connect_node, free_host_memory
from ..observer import Observer
from ..preflight.context import RunContext
from ..verify.forward import FirstChecks
from . import auto
from .auto import AutomaticMemory
from .quantize_notes import quantize_notes, quantize_summary
from .sharing import SharedBlocks


class PlacedModel:
    """Frozen weights, LoRA and block runner of a run, allocated by the constructor.

    With an automatic memory plan, an OOM while the weights are loaded switches to the next smaller plan and reports it.
    """

    _before_block: Callable[[], None] | None = None

    def __init__(self, context: RunContext, observer: Observer):
        self.patcher, self.family, self.observer = context.patcher, context.family, observer
        self.settings, self.world, self.share = context.device_settings, context.world, context.share
        data, targets = context.all_data, context.targets
        self.compile_settings, self.graphs = context.compile_settings, count_graphs(data, self.family, self.settings)
        self.device, self.dtype = self.patcher.load_device, self.patcher.model.get_dtype_inference()
        self.memory, self.previous_facts = self.settings.memory, context.environment
        self.free_before = free_host_memory(self.world)
        self.sharing = SharedBlocks(self.world, connect_node(self.world, self.device, self.memory), self.device)
        policy_args = self.memory.low_bit_matmul, self.device, self.dtype
        self.low_bit = LowBitPolicy(*policy_args, context.low_bit_matmul, self.compile_settings)
        self.automatic: AutomaticMemory | None = None
        self.resident: ResidentWeights | None = None
        self.checks = FirstChecks(self.family, data.samples, self.settings.objective.guidance)
        self.eager_blocks: dict[str, str] = {}  # which must not be compiled, with the reason
        try:
            if auto.plans_memory(self.memory):
                self._choose_memory(data, targets)
            self._build_within_memory(step=0)
            network_args = self.settings.network, self.settings.seed, auto.blocks_run_once(self.family, self.settings)
            self.network: LoraNetwork = build_network(self.transformer, targets, *network_args)
            self.runner = self._build_runner()
            timed = self.device.type in ("cpu", "cuda")  # on others the host's clock times queueing only
            if timed and self.automatic and self.automatic.may_plan_again and self.runner.planned_graphs:
                self.runner.clock = BlockClock(self.automatic.measured.shapes, self.device)
        except BaseException:
            self.unload()
            raise

    def _choose_memory(self, data: TrainingData, targets: list[str]) -> None:
        """Measure one step and choose the fastest plan that fits."""
        self.observer.phase("Measuring one step")
        measure_args = self.patcher, self.family, data, targets, self.settings, self.compile_settings
        measured = auto.measure(*measure_args, self.free_before, self.world.local_size)
        previous_choice = auto.chosen_before(self.previous_facts, self.settings.memory)
        plan_args = self.settings.memory, measured, self.family.swap_order, previous_choice
        self.automatic, reason = self.sharing.plan(*plan_args)
        if reason:
            self.observer.note(f"shard is not used: {reason}.")
        self.memory = self.automatic.options()
        self.observer.note(self.automatic.plan.text)

    def _plan_text(self) -> str | None:
        """Return the memory plan in words; None without one."""
        return self.automatic.plan.text if self.automatic else None

    def choice_facts(self) -> dict[str, str]:
        """Return the checkpointing and its budget if the plan chose them: a resumed run takes them again."""
        return auto.choice_facts(self.memory) if self.settings.memory.checkpointing == "auto" else {}

    def _build_within_memory(self, step: int) -> None:
        """Call `_build`; on OOM retry with the next smaller plan. Raises the OOM if there is none."""
        while True:
            try:
                self.transformer, self.swap = self._build()
                self.sharing.check_built(self._holders())
                break
            except Exception as error:
                if not comfy.model_management.is_oom(error):
                    raise
                self.sharing.not_built(error)
                if not self.step_down(step):
                    raise
            # Outside the handler: inside it the exception's frames still hold the tensors.
            comfy.model_management.soft_empty_cache()
        self.place = {id(block): number for number, (_, block) in enumerate(self.transformer.blocks())}
        self.sharing.swap = self.swap
        self.resident = ResidentWeights(self._holders(), self.device, self.patcher.offload_device)

    def _build(self) -> tuple[Transformer, BlockSwap | None]:
        """Build the transformer with its weights on the device, those of swapped blocks on the host."""
        memory, model = self.memory, self.patcher.model
        self.host: HostPlacement | None = None
        swapped = choose_blocks(memory.blocks_to_swap, self.family.block_lists(model), self.family.swap_order)
        build_args = memory.attention, swapped, memory.quantize
        transformer = self.family.build(self.patcher, self.device, self.dtype, *build_args)
        self.low_bit.set(transformer.blocks())
        on_host = swapped if self.sharing.node is None else ()
        self.quantize_notes = list(quantize_notes(memory.quantize, transformer.blocks(), on_host))
        if not swapped:
            return transformer, None
        blocks = [block for name, block in transformer.blocks() if name in swapped]
        if self.sharing.node is not None:
            return transformer, ShardedSwap(blocks, self.device, memory.prefetch_blocks, self.sharing.node)
        needed = sum(m.held_bytes() for block in blocks for m in frozen_modules(block).values())
        free = psutil.virtual_memory().available if self.world.world_size == 1 else self.free_before
        available = free // self.world.local_size
        inside = bytes_in_file(tensor for block in blocks for tensor in block.buffers())
        host = place_on_host(memory.pin_memory, self.device.type, HostWeights(needed, inside), available)
        self.host = host
        return transformer, BlockSwap(blocks, self.device, memory.prefetch_blocks, host.pinned, host.from_file)

    def _holders(self) -> list[Holder]:
        """List the holders of device memory for frozen weights: modules, and the block swap for its blocks."""
        if self.swap is None:
            return list(self.transformer.frozen_modules())
        swapped = {id(m) for block in self.swap.blocks for m in frozen_modules(block).values()}
        return [*(m for m in self.transformer.frozen_modules() if id(m) not in swapped), self.swap]

    def _build_runner(self) -> BlockRunner:
        return BlockRunner(self.transformer.blocks(), self.memory, self.compile_settings, self.graphs, self.device)

    def step_down(self, step: int, error: Exception | None = None) -> bool:
        """Switch to the next smaller plan and report it. Returns False without an automatic plan or a smaller one.

        step: optimizer steps done.
        error: the OOM of a forward or backward, here or on a device that shares blocks; None while the model is placed.
        """
        if self.automatic is None:
            return False
        if error is not None:
            self.sharing.ask_for_less(error)
        smaller_plan = self.sharing.agreed(self.automatic, self.automatic.step_down())
        if smaller_plan is None:
            return False
        self.memory = self.automatic.options()
        self.observer.note(f"Out of memory at step {step + 1}, so training continues with less. {smaller_plan.text}")
        return True

    def plan_again(self, steps: int) -> bool:
        """Plan again once the compiled blocks are timed: the plan was made with eager ones, which are slower.

        steps: optimizer steps left.

        Returns whether another plan is to be placed, by `rebuild`.
        """
        clock = self.runner.clock
        if clock is None or self.automatic is None or (seconds := clock.seconds()) is None:
            return False
        self.runner.clock = None
        compile_seconds = self.runner.report.counts().seconds
        if not self.automatic.may_plan_again or not self.automatic.plan_again(seconds, steps, compile_seconds):
            return False
        self.memory = self.automatic.options()
        self.observer.note(f"Replanned with the measured speed of the compiled blocks. {self.automatic.plan.text}")
        return True

    def rebuild(self, step: int) -> None:
        """Place the weights again by `memory`; LoRA and optimizer are kept, graphs unless checkpointing changes."""
        assert self.resident is not None
        self.runner.discard_offloaded()
        self.resident.release()
        # Drop our references to the host weights: then only ComfyUI's modules hold them, and moving one frees it.
        swapped_before = self.swap is not None
        self.resident.modules, self.swap, self.sharing.swap = (), None, None
        comfy.model_management.soft_empty_cache()
        self._build_within_memory(step)
        if self.swap is not None and not swapped_before:
            self.checks.note_first_swap()
        self.network.attach(self.transformer.linears())
        if auto.choice_facts(self.runner.memory) == auto.choice_facts(self.memory):
            self.runner.set_blocks(self.transformer.blocks())
        else:
            self.runner = self._build_runner()
            self._leave_eager()

    @contextmanager
    def measured_low_bit(self) -> Iterator[int]:
        """Run the blocks eagerly and fully checkpointed inside the context, and choose their matmul precision by that.

        Yields the number of micro-batches to run.
        Nothing may be compiled yet: blocks share a graph only if their choice is the same.
        """
        self.ensure()
        self.observer.phase("Measuring which layers can multiply in 8 bit")
        blocks, runner = self.transformer.blocks(), self.runner
        self.runner = BlockRunner(blocks, replace(self.memory, checkpointing="full"), None, self.graphs, self.device)
        try:
            with self.low_bit.measured(blocks):
                yield self.low_bit.micro_batches
            self.low_bit.adopt(self.world.broadcast("low_bit_matmul", self.low_bit.decision()))
        finally:
            self.runner.discard_offloaded()
            self.runner = runner
        self.low_bit.set(blocks)
        clock, self.runner = runner.clock, self._build_runner()
        self._leave_eager()
        if clock is not None and self.automatic is not None:
            self.automatic.rename([block.structure() for _, block in blocks])
            self.runner.clock = BlockClock(self.automatic.measured.shapes, self.device)
        self._note_low_bit()

    def _note_low_bit(self) -> None:
        for note in self.low_bit.notes():
            self.observer.note(note)

    def note_memory_use(self) -> None:
        """Report ignored memory options, host memory that could not be pinned, and the layers' storage format and
        matmul precision, as far as decided."""
        for note in self.quantize_notes:
            self.observer.note(note)
        if not self.low_bit.undecided:
            self._note_low_bit()
        if self.memory.offload_activations and self.runner.offload is None:
            self.observer.note(
                "offload_activations is ignored: it only works with checkpointing full, and checkpointing is "
                f"'{self.memory.checkpointing}'."
            )
        if self.host is not None and self.host.notes:
            self.observer.note(self.host.notes[0])

    def message(self) -> str | None:
        """Return one sentence, once, on a problem with pinned memory that only a step shows."""
        if self.swap is not None and (refused := self.swap.ring.refused):
            self.swap.ring.refused = 0
            return unpinned_message(refused, len(self.swap.blocks))
        return None if self.runner.offload is None else self.runner.offload.message()

    def fall_back_to_eager(self) -> None:
        """Run the blocks uncompiled from now on."""
        self.runner.fall_back_to_eager()
        self.compile_settings = None

    def ensure(self) -> None:
        """Load the weights again if another model has taken their place since the last step."""
        assert self.resident is not None
        self.resident.ensure()

    def velocity(self, inputs: ModelInputs, rng_key: tuple[int | str, ...] | None) -> torch.Tensor:
        """Predict the velocity with the LoRA, (B, N, C·patch).

        rng_key: (step, micro-batch, …), key of the dropout masks; None turns dropout off, in the same graphs.
        """
        self.check_forward(inputs)  # for validation, which may come before the first step
        self.network.write_casts()
        return self.transformer.forward(self.run_block(inputs, rng_key), inputs)

    def velocity_without(self, inputs: ModelInputs) -> torch.Tensor:
        """Predict the velocity without the LoRA, detached, (B, N, C·patch).

        Runs with autograd on, to use the graphs of a training step: `no_grad` would compile others.
        """
        with self.network.switched_off():
            velocity = self.velocity(inputs, None).detach()
        self.runner.discard_offloaded()  # no backward follows
        return velocity

    def training(self) -> AbstractContextManager[None]:
        """Return the context of a forward and its backward."""
        return self.family.training(self.transformer)

    def check_forward(self, inputs: ModelInputs) -> None:
        """Compare the training forward with ComfyUI's, once. Raises ValueError if they differ.

        Blocks that must not be compiled run eager from then on.
        """
        if not self.checks.due(inputs):
            return
        # With full-precision matmuls: low-precision ones would round a last-digit difference to other codes.
        uncounted = nullcontext() if self.swap is None else self.swap.ring.uncounted()
        with uncounted, self.network.switched_off(), self.low_bit.switched_off(self.transformer.blocks()):
            model = self.patcher, self.transformer, self.on_device
            self.eager_blocks |= self.checks.run(*model, inputs, self.observer.note)
        self._leave_eager()

    @contextmanager
    def before_blocks(self, call: Callable[[], None]) -> Iterator[None]:
        """Call a function, which may raise, before each run of a block in this context."""
        self._before_block = call
        try:
            yield
        finally:
            self._before_block = None

    def on_device(self, function: Callable[..., Any], block: Block, *args: Any) -> Any:
        """Call a function on a block and its arguments with the block's weights on the device."""
        if self._before_block is not None:
            self._before_block()
        if self.swap is not None and id(block) in self.swap.number:
            return self.swap.run(function, block, *args)
        return function(block, *args)

    def _leave_eager(self) -> None:
        for name, block in self.transformer.blocks():
            if name in self.eager_blocks:
                self.runner.leave_eager(block, self.eager_blocks[name])

    def run_block(self, inputs: ModelInputs, rng_key: tuple[int | str, ...] | None) -> RunBlock:
        drops = self.network.options.drops

        def sampled(block: Block) -> dict[str, DropMask]:
            key = ("dropout", *(rng_key or (0, 0)), self.place[id(block)])
            part = self.share.part, self.share.parts
            masks = self.network.sample_masks(block, inputs, self.settings.seed, key, self.dtype, part)
            return masks if rng_key is not None else {name: mask.without_drops() for name, mask in masks.items()}

        def run(block: Block, *args: torch.Tensor) -> object:
            masks = sampled(block) if drops else {}
            return self.on_device(self.runner, block, *args, masks)

        return run

    def unload(self) -> None:
        """Free the weights on the device and remove them from ComfyUI's list of loaded models."""
        if self.resident is not None:
            self.resident.release()

    def close(self) -> None:
        """Free all memory of the model."""
        self.runner.discard_offloaded()  # first: waits for copies of an interrupted step that may still be running
        self.unload()
        self.sharing.swap = None
        del self.resident, self.runner, self.swap, self.transformer, self.network
        give_back()  # pinned memory of activations and batches

    def copies(self) -> int:
        """Count the block copies to the device since the weights were last placed."""
        return self.swap.ring.copies if self.swap else 0

    def facts(self) -> dict[str, object]:
        """Return entries for the summary: graphs, block swap, checkpointing, memory plan."""
        counts = self.runner.report.counts()
        return {
            "graphs_planned": self.runner.planned_graphs,
            "graphs_compiled": counts.graphs,
            "graph_breaks": counts.graph_breaks,
            "compile_seconds": round(counts.seconds, 2),
            "blocks_swapped": len(self.swap.blocks) if self.swap else 0,
            "block_copies": self.copies(),
            **self.sharing.facts(),
            "checkpointing": self.memory.checkpointing,
            "memory_plan": self._plan_text(),
            "activations_offloaded_mib": self.runner.offload.bytes_out // 2**20 if self.runner.offload else 0,
            "compile_report": self.runner.report.facts(),
            **self.low_bit.facts(),
            **quantize_summary(quantize_of(self.patcher), self.memory.quantize),
        }
