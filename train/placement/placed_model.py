"""The model of a run with its weights where the memory options say, and what runs its blocks."""

import comfy.model_management
import psutil
import torch

from ...data.samples import TrainingData
from ...lora.network import LoraNetwork, build_network
from ...memory.host.mapped_file import bytes_in_file
from ...memory.host.page_locked import give_back
from ...memory.host.pinning import HostPlacement, HostWeights, place_on_host, unpinned_message
from ...memory.swap.plan import choose_blocks
from ...memory.swap.training import BlockSwap, frozen_modules
from ...memory.weights.residency import Holder, ResidentWeights
from ...models.family import Block, ModelInputs, RunBlock, Transformer
from ..observer import Observer
from ..preflight.context import RunContext
from . import auto
from .auto import AutomaticMemory
from .block_runner import BlockRunner


class PlacedModel:
    """Takes the memory of a run when it is made: the frozen weights, the LoRA on them, and the graphs to be.

    Where memory was to be chosen automatically and does not suffice, it steps down to a smaller plan and says so.
    """

    def __init__(self, context: RunContext, observer: Observer):
        self.patcher, self.family, self.settings, self.observer = (
            context.patcher,
            context.family,
            context.settings,
            observer,
        )
        data, targets = context.all_data, context.targets
        self.compile_settings, self.graphs = context.compile_settings, len(data.graph_keys())
        self.device = self.patcher.load_device
        self.dtype = self.patcher.model.get_dtype_inference()
        self.memory = self.settings.memory
        self.automatic: AutomaticMemory | None = None
        self.resident: ResidentWeights | None = None
        try:
            if auto.is_asked(self.memory):
                self._choose_memory(data, targets)
            self._build_what_fits(step=0)
            self.network: LoraNetwork = build_network(
                self.transformer, targets, self.settings.network, self.settings.seed
            )
            self.runner = self._build_runner()
        except BaseException:
            self.forget()
            raise

    # Where the weights lie.

    def _choose_memory(self, data: TrainingData, targets: list[str]) -> None:
        """Measures one step and takes the fastest way through it that fits."""
        self.observer.phase("Measuring one step")
        measured = auto.measure(self.patcher, self.family, data, targets, self.settings)
        self.automatic = AutomaticMemory(self.settings.memory, measured, self.family.swap_order)
        self.memory = self.automatic.options()
        self.observer.note(self.automatic.plan.text)

    def _build_what_fits(self, step: int) -> None:
        """`_build`, with a smaller plan for as long as the memory does not suffice and there is one."""
        while True:
            try:
                self.transformer, self.swap = self._build()
                break
            except Exception as error:
                if not comfy.model_management.is_oom(error) or not self.step_down(step):
                    raise
            comfy.model_management.soft_empty_cache()
        self.place = {id(block): number for number, (_, block) in enumerate(self.transformer.blocks())}
        self.resident = ResidentWeights(self._holders(), self.device, self.patcher.offload_device)

    def _build(self) -> tuple[Transformer, BlockSwap | None]:
        """The transformer with its weights on the device, and those of the swapped blocks on the host."""
        memory, model = self.memory, self.patcher.model
        self.host: HostPlacement | None = None
        swapped = choose_blocks(memory.blocks_to_swap, self.family.block_lists(model), self.family.swap_order)
        transformer = self.family.build(self.patcher, self.device, self.dtype, memory.attention, swapped)
        if not swapped:
            return transformer, None
        blocks = [block for name, block in transformer.blocks() if name in swapped]
        needed = sum(m.held_bytes() for block in blocks for m in frozen_modules(block).values())
        available = psutil.virtual_memory().available
        inside = bytes_in_file(tensor for block in blocks for tensor in block.buffers())
        host = place_on_host(memory.pin_memory, self.device.type, HostWeights(needed, inside), available)
        self.host = host
        return transformer, BlockSwap(blocks, self.device, memory.prefetch_blocks, host.pinned, host.from_file)

    def _holders(self) -> list[Holder]:
        """What holds the frozen weights on the device."""
        if self.swap is None:
            return list(self.transformer.frozen_modules())
        swapped = {id(m) for block in self.swap.blocks for m in frozen_modules(block).values()}
        return [*(m for m in self.transformer.frozen_modules() if id(m) not in swapped), self.swap]

    def _build_runner(self) -> BlockRunner:
        return BlockRunner(self.transformer.blocks(), self.memory, self.compile_settings, self.graphs, self.device)

    def step_down(self, step: int) -> bool:
        """Takes the next smaller plan, which is said, where one was chosen automatically and there is one. step: how
        many are done."""
        less = self.automatic.step_down() if self.automatic else None
        if self.automatic is None or less is None:
            return False
        self.memory = self.automatic.options()
        self.observer.note(f"Out of memory at step {step + 1}; it goes on with less. {less.text}")
        return True

    def build_again(self, step: int) -> None:
        """Puts the weights where `memory` says; the LoRA, the optimizer and the graphs stay."""
        assert self.resident is not None
        self.runner.let_go()
        self.resident.forget()
        # The masters are held by ComfyUI's modules alone from here on, so that each is let go when it moves.
        self.resident.modules, self.swap = (), None
        comfy.model_management.soft_empty_cache()
        self._build_what_fits(step)
        self.network.attach(self.transformer.linears())
        if self.runner.memory.checkpointing == self.memory.checkpointing:
            self.runner.take_blocks(self.transformer.blocks())
        else:
            self.runner = self._build_runner()

    def tell_how_memory_is_used(self) -> None:
        if self.memory.offload_activations and self.runner.offload is None:
            self.observer.note(
                "offload_activations is ignored: it works on what full checkpointing keeps, and checkpointing is "
                f"'{self.memory.checkpointing}'."
            )
        if self.host is not None and self.host.notes:
            self.observer.note(self.host.notes[0])
        if self.swap is not None and self.host is not None and self.host.pinned:
            if (told := unpinned_message(self.swap.ring.flat_weights)) is not None:
                self.observer.note(told)

    def told(self) -> str | None:
        """What only a step shows of how memory is used: one sentence, once."""
        return None if self.runner.offload is None else self.runner.offload.message()

    # What runs.

    def ensure(self) -> None:
        """Makes the weights resident, whatever took their place since the last step."""
        assert self.resident is not None
        self.resident.ensure()

    def velocity(self, inputs: ModelInputs, draw: tuple[int | str, ...] | None) -> torch.Tensor:
        """(B, N, C·patch) from the transformer with the LoRA on it. draw: (step, micro-batch, …), for dropout; with
        None nothing is dropped, in the same graphs."""
        return self.transformer.forward(self._run_block(inputs, draw), inputs)

    def velocity_without(self, inputs: ModelInputs) -> torch.Tensor:
        """The same of the model as it came, without a gradient.

        It runs as a training step does, by the same graphs, which it could not under `no_grad`; what was kept for a
        backward is let go at the end.
        """
        with self.network.switched_off():
            velocity = self.velocity(inputs, None).detach()
        self.runner.let_go()
        return velocity

    def _run_block(self, inputs: ModelInputs, draw: tuple[int | str, ...] | None) -> RunBlock:
        def run(block: Block, *args: torch.Tensor) -> object:
            key = ("dropout", *(draw or (0, 0)), self.place[id(block)])
            masks = self.network.sample_masks(block, inputs, self.settings.seed, key, self.dtype)
            if draw is None:
                masks = {name: mask.without_drops() for name, mask in masks.items()}
            if self.swap is not None and id(block) in self.swap.number:
                return self.swap.run(self.runner, block, *args, masks)
            return self.runner(block, *args, masks)

        return run

    def forget(self) -> None:
        """Takes the weights off the device and out of ComfyUI's list."""
        if self.resident is not None:
            self.resident.forget()

    def close(self) -> None:
        """Gives all memory back."""
        self.runner.let_go()  # copies of a step that broke off may be under way
        self.forget()
        del self.resident, self.runner, self.swap, self.transformer, self.network
        give_back()  # what activations and batches took on the host

    def copies(self) -> int:
        """How many times a block was copied to the device since the blocks have their present place."""
        return self.swap.ring.copies if self.swap else 0

    def facts(self) -> dict[str, object]:
        """Numbers for the summary: graphs, swap, what was chosen."""
        counts = self.runner.report.counts()
        return {
            "graphs_planned": self.runner.planned_graphs,
            "graphs_compiled": counts.graphs,
            "graph_breaks": counts.graph_breaks,
            "compile_seconds": round(counts.seconds, 2),
            "blocks_swapped": len(self.swap.blocks) if self.swap else 0,
            "block_copies": self.copies(),
            "checkpointing": self.memory.checkpointing,
            "memory_plan": self.automatic.plan.text if self.automatic else None,
            "activations_offloaded_mib": self.runner.offload.bytes_out // 2**20 if self.runner.offload else 0,
            "compile_report": self.runner.report.facts(),
        }
