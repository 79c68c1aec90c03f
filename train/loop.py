"""The training loop."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import comfy.model_management
import psutil
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..compile.apply import cannot_compile
from ..compile.settings import CompileSettings
from ..memory.block_swap import BlockSwap, frozen_modules
from ..memory.frozen import unload_everything
from ..memory.pinning import Pinning, choose_pinning, is_windows, not_pinned
from ..memory.residency import Holder, ResidentWeights
from ..memory.spill import SpillWatch
from ..memory.swap_plan import choose_blocks
from ..models.family import Family, ModelInputs, Transformer
from . import automatic, stopped
from .automatic import AutomaticMemory
from .batch import Batch, make_batch, strata_of
from .batches import batch_order
from .checkpoint import TrainingState, load_state, save_state, state_path
from .data import TrainingData
from .events import Observer, StepReport
from .formats import save_lora
from .lora import LoraNetwork, build_network
from .lora_model import LoraModel
from .machine import forget_memory_peak, machine_facts, memory_peak
from .objective import training_loss
from .optimizer import build_optimizer, build_scheduler, restore_optimizer, state_of
from .optimizer_weights import LoraAverage, saved_weights
from .reader import SampleReader
from .run import RunFolder, TrainSettings, place_of
from .runner import BlockRunner

log = logging.getLogger(__name__)


# (step, last loss, LoRA) → the metadata of its file.
Describe = Callable[[int, float | None, LoraModel], dict[str, str]]


@dataclass
class Progress:
    """How far a run is. `whole` is False only while the optimizer moves the weights."""

    step: int = 0
    batches: int = 0
    saved_step: int = 0
    whole: bool = True
    loss: list[float] = field(default_factory=list)


class Trainer:
    """One run over one MODEL. `run` trains from where it stands to the last step, whatever ends it is saved first."""

    def __init__(
        self,
        patcher: ModelPatcher,
        family: Family,
        data: TrainingData,
        targets: list[str],
        settings: TrainSettings,
        compile_settings: CompileSettings | None,
        folder: RunFolder,
        lineage: str,
        describe: Describe,
        observer: Observer,
    ):
        self.patcher, self.family, self.data, self.settings = patcher, family, data, settings
        self.folder, self.lineage, self.describe, self.observer = folder, lineage, describe, observer
        self.progress = Progress()
        self.machine = machine_facts(patcher.load_device, compile_settings)
        self.seconds: deque[float] = deque(maxlen=50)
        self.strata = strata_of(settings, data.samples)

        observer.phase("Loading the model")
        unload_everything()
        self.device = patcher.load_device
        forget_memory_peak(self.device)
        self.spill = SpillWatch(self.device)
        self.dtype = patcher.model.get_dtype_inference()
        self.memory = settings.memory
        self.automatic: AutomaticMemory | None = None
        self.compile_settings = compile_settings
        try:
            self.set_up(targets)
        except BaseException as error:
            if (resident := getattr(self, "resident", None)) is not None:
                resident.forget()
            if not comfy.model_management.is_oom(error):
                raise
            raise stopped.out_of_memory_while_loading() from error
        self.tell_how_memory_is_used()

    def set_up(self, targets: list[str]) -> None:
        """Everything that takes memory."""
        settings = self.settings
        if automatic.is_asked(self.memory):
            self.choose_memory(targets)
        self.build_what_fits()
        self.network: LoraNetwork = build_network(self.transformer, targets, settings.network, settings.seed)
        self.optimizer = build_optimizer(settings.optimizer, self.network.parameters())
        self.scheduler = build_scheduler(settings.optimizer, self.optimizer, settings.steps)
        decay = settings.optimizer.ema_decay
        self.average = LoraAverage(decay, self.network.masters()) if decay else None
        # fp16 gradients underflow; every other dtype has fp32's range.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.reader = SampleReader(self.data.samples)
        self.runner = self.build_runner()
        if self.runner.not_compiled:
            self.train_eager(self.runner.not_compiled)

    # Where the weights lie.

    def choose_memory(self, targets: list[str]) -> None:
        """Measures one step and takes the fastest way through it that fits."""
        self.observer.phase("Measuring one step")
        measured = automatic.measure(self.patcher, self.family, self.data, targets, self.settings)
        self.automatic = AutomaticMemory(self.settings.memory, measured, self.family.swap_order)
        self.memory = self.automatic.options()
        self.observer.note(self.automatic.plan.text)

    def build_what_fits(self) -> None:
        """`build`, with a smaller plan for as long as the memory does not suffice and there is one."""
        while True:
            try:
                self.transformer, self.swap = self.build()
                break
            except Exception as error:
                if not comfy.model_management.is_oom(error) or not self.step_down():
                    raise
            comfy.model_management.soft_empty_cache()
        self.place = {id(block): number for number, (_, block) in enumerate(self.transformer.blocks())}
        self.resident = ResidentWeights(self.holders(), self.device, self.patcher.offload_device)

    def step_down(self) -> bool:
        """Takes the next smaller plan, which is said, where one was chosen automatically and there is one."""
        less = self.automatic.step_down() if self.automatic else None
        if self.automatic is None or less is None:
            return False
        self.memory = self.automatic.options()
        self.observer.note(f"Out of memory at step {self.progress.step + 1}; it goes on with less. {less.text}")
        return True

    def build_again(self) -> None:
        """Puts the weights where `memory` says; the LoRA, the optimizer and the graphs stay."""
        self.optimizer.zero_grad(set_to_none=True)
        self.runner.let_go()
        self.resident.forget()
        # The masters are held by ComfyUI's modules alone from here on, so that each is let go when it moves.
        self.resident.modules, self.swap = (), None
        comfy.model_management.soft_empty_cache()
        self.build_what_fits()
        self.network.attach(self.transformer.linears())
        if self.runner.memory.checkpointing == self.memory.checkpointing:
            self.runner.take_blocks(self.transformer.blocks())
        else:
            self.runner = self.build_runner()

    def build_runner(self) -> BlockRunner:
        graphs = len(self.data.graph_keys())
        return BlockRunner(self.transformer.blocks(), self.memory, self.compile_settings, graphs, self.device)

    def tell_how_memory_is_used(self) -> None:
        if self.memory.offload_activations and self.runner.offload is None:
            self.observer.note(
                "offload_activations is ignored: it works on what full checkpointing keeps, and checkpointing is "
                f"'{self.memory.checkpointing}'."
            )
        if self.pinning is not None and not self.pinning.masters and self.device.type == "cuda":
            self.observer.note(self.pinning.reason)
        if self.swap is not None and self.pinning is not None and self.pinning.masters:
            if (told := not_pinned(self.swap.ring.masters)) is not None:
                self.observer.note(told)

    def build(self) -> tuple[Transformer, BlockSwap | None]:
        """The transformer with its weights on the device, and those of the swapped blocks on the host."""
        memory, model = self.memory, self.patcher.model
        self.pinning: Pinning | None = None
        swapped = choose_blocks(memory.blocks_to_swap, self.family.block_lists(model), self.family.swap_order)
        transformer = self.family.build(self.patcher, self.device, self.dtype, memory.attention, swapped)
        if not swapped:
            return transformer, None
        blocks = [block for name, block in transformer.blocks() if name in swapped]
        needed = sum(m.held_bytes() for block in blocks for m in frozen_modules(block).values())
        available = psutil.virtual_memory().available
        self.pinning = choose_pinning(memory.pin_memory, self.device.type, needed, available, is_windows())
        return transformer, BlockSwap(blocks, self.device, memory.prefetch_blocks, self.pinning.masters)

    def holders(self) -> list[Holder]:
        """What holds the frozen weights on the device."""
        if self.swap is None:
            return list(self.transformer.frozen_modules())
        swapped = {id(m) for block in self.swap.blocks for m in frozen_modules(block).values()}
        return [*(m for m in self.transformer.frozen_modules() if id(m) not in swapped), self.swap]

    # The recipe.

    def run(self) -> None:
        settings, progress = self.settings, self.progress
        order = batch_order(self.data.samples, settings.batch_size, settings.seed)
        batches = islice(order, progress.batches, None)
        upcoming = self.draw(batches)
        try:
            while progress.step < settings.steps:
                self.observer.check_interrupted()
                started = time.perf_counter()
                compiled_before = self.runner.report.counts()
                drawn, upcoming = upcoming, self.draw(batches)
                self.reader.want(chain(*drawn, *upcoming))
                learning_rate = float(self.scheduler.get_last_lr()[0])
                mean_loss = self.forward_backward(drawn)
                self.check_finite(mean_loss)
                self.optimizer_step()
                progress.batches += len(drawn)
                progress.step += 1
                progress.loss.append(mean_loss)
                if self.runner.report.counts() == compiled_before:
                    self.seconds.append(time.perf_counter() - started)
                self.observer.step(self.report(mean_loss, learning_rate))
                if (spilled := self.spill.told()) is not None:
                    self.observer.note(spilled)
                if settings.save_every and progress.step % settings.save_every == 0 and progress.step < settings.steps:
                    self.save()
        except BaseException as error:
            self.save_what_is_there()
            step, saved = self.progress.step, self.progress.saved_step
            if self.progress.whole:
                left = stopped.kept(step, self.state_name(step))
            else:
                left = stopped.broken_off(saved, self.state_name(saved))
            if (told := stopped.explained(error, step, left, self.runner.planned_graphs)) is None:
                raise
            raise told from error

    def draw(self, batches: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The micro-batches of one step, as sample indices."""
        return [next(batches) for _ in range(self.settings.gradient_accumulation)]

    def forward_backward(self, drawn: list[tuple[int, ...]]) -> float:
        """The mean loss over the micro-batches; its gradients are left on the LoRA's masters."""
        try:
            return self._forward_backward(drawn)
        except Exception as error:
            smaller = comfy.model_management.is_oom(error) and self.step_down()
            cause = cannot_compile(error) if self.runner.planned_graphs and not smaller else None
            if cause is None and not smaller:
                raise
            log.warning("A step failed and is tried again", exc_info=error)
        # Outside the handler, which holds the first try's activations. The draws depend on the step only.
        if cause is None:
            self.build_again()
            return self.forward_backward(drawn)
        self.train_eager(cause)
        comfy.model_management.soft_empty_cache()
        return self._forward_backward(drawn)

    def train_eager(self, cause: str) -> None:
        """From here on without torch.compile, which is said once."""
        self.observer.note(f"torch.compile does not work on this machine, so training runs eager: {cause}")
        self.runner.fall_back_to_eager()
        self.machine = machine_facts(self.device, None)

    def _forward_backward(self, drawn: list[tuple[int, ...]]) -> float:
        self.resident.ensure()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for micro, indices in enumerate(drawn):
            samples = [(self.data.samples[i], self.reader.read(i)) for i in indices]
            draw = (self.progress.step, micro)
            with torch.no_grad():
                options, seed = self.settings.objective, self.settings.seed
                batch = make_batch(self.patcher, self.family, samples, options, self.device, seed, draw, self.strata)
            loss = self.loss(batch, draw) / len(drawn)
            with self.runner.watch_backward():
                self.scaler.scale(loss).backward()
            total += loss.detach()
        automatic.make_room_to_step(self.optimizer, self.settings.optimizer.optimizer, self.network.parameters())
        return float(total)

    def loss(self, batch: Batch, draw: tuple[int, int]) -> Tensor:
        velocity = self.velocity(batch.inputs, draw)
        return training_loss(self.settings.objective, velocity, batch.target, batch.sigma, batch.weights).mean()

    def velocity(self, inputs: ModelInputs, draw: tuple[int, int]) -> Tensor:
        """(B, N, C·patch) from the transformer with the LoRA on it."""

        def run(block: Any, *args: Tensor) -> Any:
            key = ("dropout", *draw, self.place[id(block)])
            masks = self.network.draw_masks(block, inputs, self.settings.seed, key, self.dtype)
            if self.swap is not None and id(block) in self.swap.number:
                return self.swap.run(self.runner, block, *args, masks)
            return self.runner(block, *args, masks)

        return self.transformer.forward(run, inputs)

    def optimizer_step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        limit = self.settings.optimizer.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        if not self.scaler.is_enabled() and not torch.isfinite(norm):
            raise stopped.not_finite("gradient", self.progress.step, self.state_name(self.progress.step))
        self.progress.whole = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update()
        self.scheduler.step()
        self.progress.whole = True

    def check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise stopped.not_finite("loss", self.progress.step, self.state_name(self.progress.step))

    # What is kept.

    def state(self) -> TrainingState:
        return TrainingState(
            step=self.progress.step,
            batches=self.progress.batches,
            masters=self.network.masters(),
            optimizer=state_of(self.optimizer),
            scheduler=self.scheduler.state_dict(),
            scaler=self.scaler.state_dict(),
            loss=self.progress.loss,
            lineage=self.lineage,
            machine=self.machine,
            average=self.average.state() if self.average is not None else {},
        )

    def state_name(self, step: int) -> str:
        """The state of this step as the `resume` input names it."""
        above = place_of(self.settings.output_name).parent
        return (above / self.folder.path.name / state_path(self.folder.path, step).name).as_posix()

    def resume(self, path: Path) -> None:
        """Goes on from a saved state, as if the run had never stopped."""
        state = load_state(path)
        self.network.load_masters(state.masters)
        restore_optimizer(self.optimizer, self.scheduler, state.optimizer, state.scheduler)
        if self.average is not None:
            self.average.load(state.average)
            if not state.average:
                self.observer.note(f"The state has no average of the LoRA, so it is taken from step {state.step} on.")
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state.scaler)
        self.progress = Progress(state.step, state.batches, state.step, True, list(state.loss))
        self.observer.note(f"Resumed at step {state.step}.")
        if state.lineage != self.lineage:
            self.observer.note("The state is of a run with other data, model or settings; it goes on with these.")
        for name, value in self.machine.items():
            if state.machine.get(name) != value:
                self.observer.note(
                    f"The state was saved with {name} = {state.machine.get(name)} and goes on with {value}, so the "
                    "result may differ in its last bits from an uninterrupted run."
                )

    def snapshot(self) -> LoraModel:
        """The LoRA as it stands, on the host, with its metadata."""
        with saved_weights(self.network.masters(), self.optimizer, self.average):
            lora = self.network.snapshot()
        last = self.progress.loss[-1] if self.progress.loss else None
        lora.metadata.update(self.describe(self.progress.step, last, lora))
        return lora

    def save(self) -> None:
        """Writes the LoRA and the whole state. Not being able to save now does not end the run: there is time to free
        some disk space before the next save."""
        try:
            self._write(self.folder.step_lora_path(self.progress.step))
        except OSError as error:
            self.observer.note(f"{error.strerror} Training goes on and tries again at the next save.")

    def save_final(self) -> LoraModel:
        """Writes the LoRA under its own name, and the whole state. Raises TrainingStopped where it cannot."""
        try:
            return self._write(self.folder.lora_path)
        except OSError as error:
            raise stopped.TrainingStopped(error.strerror) from error

    def _write(self, path: Path) -> LoraModel:
        step, lora = self.progress.step, self.snapshot()
        save_lora(path, lora, "kohya", "fp32")
        save_state(state_path(self.folder.path, step), self.state())
        self.progress.saved_step = step
        self.folder.forget_old_states(step)
        self.observer.saved(path)
        return lora

    def save_what_is_there(self) -> None:
        """At Cancel or an error: the LoRA so far and the whole state, if they are newer than the last."""
        kept = self.progress.saved_step
        if self.progress.whole and self.progress.step > kept:
            try:
                self._write(self.folder.step_lora_path(self.progress.step))
            except Exception as error:  # what ended the run is what the user has to be told
                log.warning("The state could not be saved", exc_info=error)
                cause = getattr(error, "strerror", None) or "The state could not be saved."
                self.observer.note(f"{cause} The last state that is kept is that of step {kept}.")

    def close(self) -> None:
        """Gives all memory back."""
        self.optimizer.zero_grad(set_to_none=True)
        self.reader.close()
        self.resident.forget()
        del self.resident, self.runner, self.swap, self.transformer, self.network, self.optimizer, self.scheduler
        del self.average
        comfy.model_management.soft_empty_cache()

    # What is told.

    def report(self, loss: float, learning_rate: float) -> StepReport:
        pace = median(self.seconds) if self.seconds else None
        left = None if pace is None else pace * (self.settings.steps - self.progress.step)
        return StepReport(self.progress.step, self.settings.steps, loss, learning_rate, pace, left)

    def facts(self) -> dict[str, Any]:
        """Numbers for the summary: graphs, seconds, memory."""
        counts = self.runner.report.counts()
        return {
            "graphs_planned": self.runner.planned_graphs,
            "graphs_compiled": counts.graphs,
            "graph_breaks": counts.graph_breaks,
            "compile_seconds": round(counts.seconds, 2),
            "seconds_per_step": round(median(self.seconds), 4) if self.seconds else None,
            "blocks_swapped": len(self.swap.blocks) if self.swap else 0,
            "block_copies": self.swap.ring.copies if self.swap else 0,
            "checkpointing": self.memory.checkpointing,
            "memory_plan": self.automatic.plan.text if self.automatic else None,
            "activations_offloaded_mib": self.runner.offload.bytes_out // 2**20 if self.runner.offload else 0,
            "compile_report": self.runner.report.facts(),
            **memory_peak(self.device),
        }
