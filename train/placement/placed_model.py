"""Model of a run: frozen weights, LoRA, and the execution of its blocks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import comfy.model_management
import torch

from ...lora.network import LoraNetwork, build_network
from ...memory.host.page_locked import give_back
from ...memory.host.pinning import unpinned_message
from ...memory.low_bit.quantize import quantize_of
from ...models.family import ModelInputs
from ..blocks.block_clock import BlockClock
from ..blocks.low_bit_policy import LowBitPolicy
from ..preflight.context import RunContext
from ..report.observer import Observer
from ..verify.forward import FirstChecks
from . import auto
from .execution import BlockExecution
from .memory_choice import MemoryChoice
from .quantize_notes import quantize_summary
from .weights import PlacedWeights


class PlacedModel:
    """Model of a run, allocated by the constructor.

    With an automatic memory plan, an OOM while the weights are loaded switches to the next smaller plan and reports it.

    memory: the memory options, and the plan that chooses them.
    low_bit: the matmul precision of the blocks' Linears.
    weights: the frozen weights on device and host, by the memory options.
    network: the LoRA.
    execution: runs the blocks.
    """

    def __init__(self, context: RunContext, observer: Observer):
        self.patcher = context.patcher
        self.family = context.family
        self.observer = observer
        self.settings, self.world = context.device_settings, context.world
        self.memory = MemoryChoice(context, observer)
        device, dtype = self.patcher.load_device, self.patcher.model.get_dtype_inference()
        self.low_bit = LowBitPolicy(
            self.settings.memory.low_bit_matmul, device, dtype, context.low_bit_matmul, context.compile_settings
        )
        self.weights = PlacedWeights(self.patcher, self.family, self.low_bit, self.memory.host_memory)
        self.checks = FirstChecks(self.family, context.all_data.samples, self.settings.objective.guidance)
        try:
            self.memory.plan(context)
            self._place(step=0)
            self.network: LoraNetwork = build_network(
                self.weights.transformer,
                context.targets,
                self.settings.network,
                self.settings.seed,
                auto.blocks_run_once(self.family, self.settings),
            )
            self.execution = BlockExecution(context, self.weights, self.network, self.memory.options)
            timed = device.type in ("cpu", "cuda")  # on others the host's clock times queueing only
            automatic = self.memory.automatic
            if timed and automatic and automatic.may_plan_again and self.execution.runner.planned_graphs:
                self.execution.runner.time_blocks(BlockClock(automatic.measured.shapes, device))
        except BaseException:
            self.weights.unload()
            raise

    def _place(self, step: int) -> None:
        """Place the weights; on OOM retry with the next smaller plan. Raises the OOM if there is none."""
        sharing = self.memory.sharing
        while True:
            try:
                self.weights.build(self.memory.options, sharing.node)
                sharing.check_built(self.weights.holders())
                break
            except Exception as error:
                if not comfy.model_management.is_oom(error):
                    raise
                sharing.not_built(error)
                if not self.memory.step_down(step):
                    raise
            # Outside the handler: inside it the exception's frames still hold the tensors.
            comfy.model_management.soft_empty_cache()
        sharing.use(self.weights.swap)
        self.weights.make_resident()

    def plan_again(self, steps: int) -> bool:
        """Plan again once the compiled blocks are timed.

        steps: optimizer steps left.

        Returns whether another plan is to be placed, by `rebuild`.
        """
        runner = self.execution.runner
        if runner.clock is None or (seconds := runner.clock.seconds()) is None:
            return False
        runner.time_blocks(None)
        return self.memory.plan_again(seconds, steps, runner.report.counts().seconds)

    def rebuild(self, step: int) -> None:
        """Place the weights again by the options of `memory`; LoRA and optimizer are kept."""
        self.execution.runner.checkpointing.discard_offloaded()
        swapped_before = self.weights.swap is not None
        self.weights.clear()
        self.memory.sharing.use(None)
        comfy.model_management.soft_empty_cache()
        self._place(step)
        if self.weights.swap is not None and not swapped_before:
            self.checks.note_first_swap()
        self.network.attach(self.weights.transformer.linears())
        self.execution.place(self.memory.options)

    @contextmanager
    def measured_low_bit(self) -> Iterator[int]:
        """Run the blocks eagerly and fully checkpointed inside the context, and choose their matmul precision by that.

        Yields the number of micro-batches to run.
        Nothing may be compiled yet: blocks share a graph only if their choice is the same.
        """
        self.weights.ensure()
        self.observer.phase("Measuring which layers can multiply in 8 bit")
        blocks, clock = self.weights.transformer.blocks(), self.execution.runner.clock
        with self.execution.eager(self.memory.options):
            with self.low_bit.measured(blocks):
                yield self.low_bit.micro_batches
            self.low_bit.adopt(self.world.broadcast("low_bit_matmul", self.low_bit.decision()))
        self.low_bit.set(blocks)
        self.execution.renew(self.memory.options)
        automatic = self.memory.automatic
        if clock is not None and automatic is not None:
            automatic.rename([block.structure() for _, block in blocks])
            self.execution.runner.time_blocks(BlockClock(automatic.measured.shapes, self.weights.device))
        self._note_low_bit()

    def _note_low_bit(self) -> None:
        for note in self.low_bit.notes():
            self.observer.note(note)

    def note_memory_use(self) -> None:
        """Report host memory that could not be pinned, and the layers' storage format and matmul precision, as far as
        decided."""
        for note in self.weights.quantize_notes:
            self.observer.note(note)
        if not self.low_bit.undecided:
            self._note_low_bit()
        host = self.weights.host
        if host is not None and host.notes:
            self.observer.note(host.notes[0])

    def message(self) -> str | None:
        """Return one sentence, once, on a problem with pinned memory that only a step shows."""
        swap, offload = self.weights.swap, self.execution.runner.checkpointing.offload
        if swap is not None and (refused := swap.ring.take_refused()):
            return unpinned_message(refused, len(swap.blocks))
        return None if offload is None else offload.pool.message()

    def velocity(self, inputs: ModelInputs, rng_key: tuple[int | str, ...] | None) -> torch.Tensor:
        """Predict the velocity with the LoRA, (B, N, C·patch).

        rng_key: (step, micro-batch, …), key of the dropout masks; None turns dropout off, in the same graphs.
        """
        self.check_forward(inputs)  # for validation, which may come before the first step
        self.network.flat.write_casts()
        return self.weights.transformer.forward(self.execution.run_block(inputs, rng_key), inputs)

    def velocity_without(self, inputs: ModelInputs) -> torch.Tensor:
        """Predict the velocity without the LoRA, detached, (B, N, C·patch).

        Runs with autograd on, to use the graphs of a training step: `no_grad` would compile others.
        """
        with self.network.switched_off():
            velocity = self.velocity(inputs, None).detach()
        self.execution.runner.checkpointing.discard_offloaded()  # no backward follows
        return velocity

    def training(self) -> AbstractContextManager[None]:
        """Return the context of a forward and its backward."""
        return self.family.forward.training(self.weights.transformer)

    def check_forward(self, inputs: ModelInputs) -> None:
        """Compare the training forward with ComfyUI's, once. Raises ValueError if they differ.

        Blocks that must not be compiled run uncompiled from then on.
        """
        if not self.checks.due(inputs):
            return
        weights = self.weights
        # With full-precision matmuls: low-precision ones would round a last-digit difference to other codes.
        uncounted = nullcontext() if weights.swap is None else weights.swap.ring.uncounted()
        with uncounted, self.network.switched_off(), self.low_bit.switched_off(weights.transformer.blocks()):
            eager_blocks = self.checks.run(
                self.patcher, weights.transformer, weights.on_device, inputs, self.observer.note
            )
        self.execution.leave_eager(eager_blocks)

    def close(self) -> None:
        """Free all memory of the model."""
        # First: waits for copies of an interrupted step that may still be running.
        self.execution.runner.checkpointing.discard_offloaded()
        self.memory.sharing.use(None)
        self.weights.close()
        del self.weights, self.execution, self.network
        give_back()  # pinned memory of activations and batches

    def facts(self) -> dict[str, object]:
        """Return entries for the summary: graphs, block swap, checkpointing, memory plan."""
        runner = self.execution.runner
        swap = self.weights.swap
        options = self.memory.options
        counts, offload = runner.report.counts(), runner.checkpointing.offload
        return {
            "graphs_planned": runner.planned_graphs,
            "graphs_compiled": counts.graphs,
            "graph_breaks": counts.graph_breaks,
            "compile_seconds": round(counts.seconds, 2),
            "blocks_swapped": len(swap.blocks) if swap else 0,
            "block_copies": self.weights.copies(),
            **self.memory.sharing.facts(),
            "checkpointing": options.checkpointing,
            "memory_plan": self.memory.plan_text(),
            "activations_offloaded_mib": offload.bytes_out // 2**20 if offload else 0,
            "compile_report": runner.report.facts(),
            **self.low_bit.facts(),
            **quantize_summary(quantize_of(self.patcher), options.quantize),
        }
