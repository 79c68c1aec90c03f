"""The memory plan is made with eager blocks, and once more when the compiled ones are timed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.swap.block_cost import LEAST_BUDGET, BlockCost
from tessera.memory.swap.plan import Hardware, Way
from tessera.train.blocks.block_clock import LEAST, BlockClock
from tessera.train.config.settings import MemoryOptions
from tessera.train.distributed.world import SINGLE_PROCESS
from tessera.train.placement.auto import AutomaticMemory, StepCost
from tessera.train.placement.sharing import SharedBlocks
from tiny.train.runs import Watcher

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = {"block:": (1, 8, 4)}
COUNT = 10
EAGER = 1.0  # seconds of a block's forward
MB = 2**20
# Ten blocks of 100 bytes that save 20, or 1 with full checkpointing; the link carries 50 bytes a second.
BLOCKS = tuple(
    BlockCost(f"blocks.{i}", weights=100, inputs=1, saved=20, forward=EAGER, backward=2 * EAGER) for i in range(COUNT)
)
MEASURED = StepCost(BLOCKS, 0, Hardware(free=900, link=50.0, host=10**6), ("block:",) * COUNT, SHAPES)


class Report:
    """Of a region: `events` grows with each compile."""

    def __init__(self) -> None:
        self.events: list[int] = []


def automatic(previous_way: Way | None = None, **changes: Any) -> AutomaticMemory:
    options = MemoryOptions(checkpointing="auto", blocks_to_swap=-1)
    return AutomaticMemory(options, replace(MEASURED, **changes), (), previous_way)


def choice(memory: AutomaticMemory) -> tuple[str | None, int]:
    return memory.plan.checkpointing, len(memory.plan.swapped)


def test_compiled_blocks_that_no_longer_hide_the_copies_are_planned_anew():
    memory = automatic()
    assert choice(memory) == ("none", 5)
    seconds = memory.plan.seconds
    assert memory.plan_again({"block:": EAGER / 10}, steps=1000, compile_seconds=60.0)
    assert (memory.plan.checkpointing, memory.plan.budget) == ("selective", LEAST_BUDGET)
    assert memory.plan.fits and memory.plan.seconds < seconds
    # As if it had been measured so: backward is as much faster.
    blocks = tuple(replace(block, forward=EAGER / 10, backward=2 * EAGER / 10) for block in BLOCKS)
    assert memory.plan == automatic(blocks=blocks).plan


def test_another_checkpointing_is_not_compiled_for_a_run_that_is_soon_over():
    memory = automatic()
    assert not memory.plan_again({"block:": EAGER / 10}, steps=3, compile_seconds=600.0)
    assert choice(memory) == ("none", 5)
    blocks = tuple(replace(block, forward=EAGER / 10, backward=2 * EAGER / 10) for block in BLOCKS)
    assert memory.measured.blocks == blocks  # what it says of the seconds is right from here on


def test_another_budget_is_compiled_anew_too():
    memory = automatic()
    memory.plan = memory._plan(memory._only_way(Way("selective", 0.5)))
    assert not memory.plan_again({"block:": EAGER / 10}, steps=3, compile_seconds=600.0)
    memory.plan = memory._plan(memory._only_way(Way("selective", 0.5)))
    assert memory.plan_again({"block:": EAGER / 10}, steps=1000, compile_seconds=60.0)
    assert memory.plan.budget == LEAST_BUDGET


class Peer:
    """Another device that shares blocks, with this room and this in it besides the blocks."""

    count = 2

    def __init__(self, *room: int) -> None:
        self.room = room

    def bandwidth(self, device: torch.device) -> float:
        return 50.0 * MB

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.room if isinstance(value, list) else value]


@pytest.mark.parametrize(("free", "other"), [(900, 10), (900, 90), (1000, 10), (1000, 90)])
def test_devices_that_share_blocks_plan_for_the_least_room_and_the_most_in_it_of_any(free: int, other: int) -> None:
    blocks = tuple(replace(block, weights=100 * MB, inputs=MB, saved=20 * MB) for block in BLOCKS)
    machine = Hardware(free=950 * MB, link=50.0 * MB, host=10**12)
    measured = replace(MEASURED, blocks=blocks, other_bytes=50 * MB, machine=machine)
    sharing = SharedBlocks(SINGLE_PROCESS, Peer(free * MB, other * MB), CPU)
    memory, _ = sharing.plan(MemoryOptions(checkpointing="auto", blocks_to_swap=-1), measured, (), None)
    step_cost = memory.measured
    assert (step_cost.machine.shards, step_cost.machine.free, step_cost.other_bytes) == (
        2,
        min(950, free) * MB,
        max(50, other) * MB,
    )


def test_a_plan_that_is_about_as_fast_stays():
    memory = automatic()
    assert not memory.plan_again({"block:": EAGER / 1.01}, steps=10**6, compile_seconds=0.0)
    assert choice(memory) == ("none", 5)


def test_plan_of_a_state_and_one_that_ran_out_of_memory_are_not_planned_again():
    assert automatic().may_plan_again
    assert not automatic(previous_way=Way("full", 0.0)).may_plan_again
    stepped = automatic()
    assert stepped.step_down() is not None and not stepped.may_plan_again
    planned = automatic()
    planned.plan_again({"block:": EAGER}, 10, 0.0)
    assert not planned.may_plan_again


# The clock.


def test_the_clock_counts_calls_of_the_measured_size_that_compile_nothing(monkeypatch):
    clock = BlockClock(SHAPES, CPU)
    report = Report()
    ticks = iter(range(100))
    monkeypatch.setattr(clock, "moment", lambda: float(next(ticks)))
    for shape in [(1, 8, 4)] * (LEAST - 1) + [(1, 9, 4)] * 5:
        with clock.time("block:", report, (torch.ones(shape),)):
            pass
    with clock.time("block:", report, (torch.ones(1, 8, 4),)):
        report.events.append(1)
    with pytest.raises(ZeroDivisionError), clock.time("block:", report, (torch.ones(1, 8, 4),)):
        raise ZeroDivisionError
    assert clock.seconds() is None
    with clock.time("block:", report, (torch.ones(1, 8, 4),)):
        next(ticks)
    assert clock.seconds() == {"block:": 1.0}  # the median


def test_on_a_gpu_events_stand_around_a_call_and_are_read_when_they_are_over(monkeypatch):
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("synchronize")

        def elapsed_time(self, end: Any) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = BlockClock(SHAPES, CUDA)
    for _ in range(LEAST):
        with clock.time("block:", Report(), (torch.ones(1, 8, 4),)):
            events.append("call")
    assert events == ["record", "call", "record"] * LEAST  # nothing waits in between
    assert clock.seconds() == {"block:": 0.25} and events[-LEAST:] == ["synchronize"] * LEAST


# In a run.


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("deep") / "flux.safetensors", depth=2, depth_single=6)


def trained(path: Path, folder: Path, **memory: Any) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    data, options = tiny.make_data([(4, 4)], [16]), MemoryOptions(**memory)
    trainer = tiny.make_trainer(tiny.load_flux(path), data, folder, backend="eager", steps=5, memory=options)
    trainer.placed.memory.observer = tiny.observe(trainer, Watcher())
    tiny.fill_up_matrices(trainer)
    trainer.run()
    return trainer, trainer.observer.notes


def test_a_run_goes_on_with_the_other_plan_and_learns_the_same(deep_flux, tmp_path, monkeypatch):
    resident, notes = trained(deep_flux, tmp_path / "resident", checkpointing="none")
    assert resident.placed.execution.runner.clock is None and notes == []
    requests: list[tuple[dict[str, float], int, float]] = []

    def plan_again(self: AutomaticMemory, forward: dict[str, float], steps: int, compile_seconds: float) -> bool:
        requests.append((forward, steps, compile_seconds))
        self.plan = self._plan(replace(self.choices, counts=(3,), checkpointing=("full",)))
        return True

    monkeypatch.setattr(AutomaticMemory, "plan_again", plan_again)
    trainer, notes = trained(deep_flux, tmp_path / "again", checkpointing="auto", blocks_to_swap=-1)
    ((forward, steps, compile_seconds),) = requests
    # Two double and six single blocks: each kind was timed thrice without a compile after the second step.
    assert forward.keys() == trainer.placed.memory.automatic.measured.shapes.keys() and steps == 5 - 2
    assert all(0 < seconds < 60 for seconds in forward.values()) and compile_seconds > 0
    (note,) = (
        text
        for text in notes
        if text.startswith("Replanned with the measured speed of the compiled blocks. Fits in the computer's memory (")
    )
    assert "3 of 8 blocks stream" in note and "checkpointing full" in note
    assert len(trainer.placed.weights.swap.blocks) == 3 and trainer.placed.memory.options.checkpointing == "full"
    assert (
        trainer.train_step.retries.environment["checkpointing"] == "full"
        and trainer.placed.execution.runner.clock is None
    )
    assert trainer.progress.loss == resident.progress.loss and len(resident.progress.loss) == 5
    reference = resident.network.master_weights()
    assert all(torch.equal(weight, reference[name]) for name, weight in trainer.network.master_weights().items())


def test_eager_blocks_were_timed_as_they_run(deep_flux, tmp_path):
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(tiny.load_flux(deep_flux), data, tmp_path, steps=1, memory=MemoryOptions())
    assert trainer.placed.memory.automatic is not None and trainer.placed.execution.runner.clock is None
