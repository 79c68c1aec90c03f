"""Training that fits itself into the memory: what is measured, what is chosen, and going on when that was too much."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.lora.plan import choose_targets
from tessera.memory.swap.training import BlockSwap, frozen_modules
from tessera.train.config.settings import MemoryOptions
from tessera.train.placement import auto, placed_model
from tessera.train.placement import weights as placed_weights
from tessera.train.report.errors import TrainingStopped
from tessera.train.report.observer import SilentObserver
from tiny.compile.compiling import Graphs

STEPS = 3
TEXT = 16
TOKENS = 16
HIDDEN = 128


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return tiny.write_flux(folder / "flux.safetensors", depth=1, depth_single=8)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(SilentObserver, "note", lambda self, text: messages.append(text))
    return messages


def make(path: Path, folder: Path, *, dtype: Any = None, backend: str | None = None, batch: int = 1, **memory: Any):
    """A trainer; without options the memory is left open."""
    data = tiny.make_data([(4, 4), (2, 8), (8, 2)], [TEXT] * 3)
    options = MemoryOptions(**{"checkpointing": "auto", "blocks_to_swap": -1, **memory})
    model = tiny.load_flux(path, dtype)
    trainer = tiny.make_trainer(model, data, folder, backend=backend, batch_size=batch, steps=STEPS, memory=options)
    tiny.fill_up_matrices(trainer)
    return trainer


def assert_same_run(first: Any, other: Any) -> None:
    assert first.progress.loss == other.progress.loss and len(first.progress.loss) == STEPS
    reference = other.network.master_weights()
    for name, master in first.network.master_weights().items():
        assert torch.equal(master, reference[name]), name


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int) -> None:
    """A device of that size, behind a link whose copies always hide."""
    monkeypatch.setattr(auto, "free_memory", lambda device: bytes_)
    monkeypatch.setattr(auto, "link_bandwidth", lambda device: 1e15)


def test_with_room_for_all_nothing_streams_and_nothing_is_computed_again(deep_flux, tmp_path, notes) -> None:
    trainer = make(deep_flux, tmp_path)
    assert trainer.placed.weights.swap is None and trainer.placed.memory.options.checkpointing == "none"
    assert len(notes) == 1 and notes[0].startswith("Everything fits in the computer's memory (")
    trainer.run()
    measured = trainer.placed.memory.automatic.measured
    for (name, block), cost in zip(trainer.placed.weights.transformer.blocks(), measured.blocks, strict=True):
        size = sum(module.held_bytes() for module in frozen_modules(block).values())
        assert cost.name == name and 0 <= cost.weights - size < 256 * 40  # each tensor starts at a multiple of 256
        assert cost.inputs == (TOKENS + TEXT) * HIDDEN * 4
        assert cost.saved > cost.inputs and cost.forward > 0 and cost.backward > 0
    assert trainer.summary()["memory_plan"] == notes[0]


def test_kept_bytes_of_a_block_are_those_that_autograd_holds_for_it(deep_flux: Path, tmp_path: Path) -> None:
    """Another way of counting: all memory that the graph of a block reaches, by its storages."""
    trainer = make(deep_flux, tmp_path, batch=2)
    saved: dict[str, dict[int, int]] = {}
    runner = trainer.placed.execution.runner
    weights = {
        b.untyped_storage().data_ptr() for m in trainer.placed.weights.transformer.frozen_modules() for b in m.buffers()
    }
    weights |= {p.untyped_storage().data_ptr() for p in trainer.network.parameters()}
    names = {id(block): name for name, block in trainer.placed.weights.transformer.blocks()}

    def run(block: Any, *args: Any) -> Any:
        # Leaves, so that the walk over the graph ends at the block's inputs.
        args = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor) and not a.requires_grad}
        out = runner(block, *args)
        nodes = [t.grad_fn for t in (out if isinstance(out, tuple) else (out,))]
        sizes, visited = saved.setdefault(names[id(block)], {}), set()
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)
            for attribute in dir(node):
                if not attribute.startswith("_saved_"):
                    continue
                value = getattr(node, attribute)
                for tensor in value if isinstance(value, (tuple, list)) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.dim():
                        storage = tensor.untyped_storage()
                        if storage.data_ptr() not in weights | inputs:
                            sizes[storage.data_ptr()] = storage.nbytes()
        return out

    trainer.placed.execution.runner = run
    samples = [
        (trainer.context.data.samples[0], trainer.train_step.batches.reader.read(indices))
        for indices in tiny.micro_batch(0, 0)
    ]
    batch = auto.make_batch(
        trainer.context.patcher, trainer.context.family, samples, trainer.settings.objective, trainer.device, 3, (0, 0)
    )
    trainer.placed.velocity(batch.inputs, (0, 0))
    for cost in trainer.placed.memory.automatic.measured.blocks:
        assert cost.saved == sum(saved[cost.name].values()), cost.name


def test_measuring_again_counts_the_same_bytes(deep_flux: Path, tmp_path: Path) -> None:
    first, second = (make(deep_flux, tmp_path / str(i)).placed.memory.automatic.measured for i in range(2))
    assert first.other_bytes == second.other_bytes
    for block, other in zip(first.blocks, second.blocks, strict=True):
        assert (block.weights, block.inputs, block.saved) == (other.weights, other.inputs, other.saved)


def test_a_block_stored_in_fp8_keeps_no_more_for_backward_than_its_activations(deep_flux, tmp_path) -> None:
    plain = make(deep_flux, tmp_path / "plain").placed.memory.automatic.measured.blocks
    stored = make(deep_flux, tmp_path / "fp8", dtype=torch.float8_e4m3fn).placed.memory.automatic.measured.blocks
    for plain_cost, fp8_cost in zip(plain, stored, strict=True):
        assert fp8_cost.weights < plain_cost.weights / 3
        assert fp8_cost.saved == plain_cost.saved


@pytest.mark.parametrize("part", [0.9, 0.75, 0.65])
def test_a_smaller_device_streams_what_it_has_to_and_trains_the_same(deep_flux, tmp_path, monkeypatch, part) -> None:
    resident = make(deep_flux, tmp_path / "resident", checkpointing="full", blocks_to_swap=0)
    resident.run()
    whole = make(deep_flux, tmp_path / "whole", checkpointing="full").placed.memory.automatic.plan.device_bytes
    free(monkeypatch, int(part * whole))
    trainer = make(deep_flux, tmp_path / "small", checkpointing="full")
    plan = trainer.placed.memory.automatic.plan
    assert plan.fits and plan.swapped and plan.device_bytes <= part * whole
    assert {
        n for n, b in trainer.placed.weights.transformer.blocks() if id(b) in trainer.placed.weights.swap.number
    } == plan.swapped
    trainer.run()
    assert_same_run(trainer, resident)
    # What lies on the device never takes more than the plan has for weights.
    activations = sum(cost.inputs for cost in trainer.placed.memory.automatic.measured.blocks)
    assert trainer.placed.weights.resident.bytes <= plan.device_bytes - activations


def out_of_memory_at(trainer: Any, *steps: int) -> None:
    """Each of these steps breaks off once in the middle of its backward."""
    failing = list(steps)
    loss = trainer.train_step.losses.batch_loss
    hooks = []

    def fail(grad: torch.Tensor) -> None:
        hooks.pop().remove()
        raise torch.OutOfMemoryError("CUDA out of memory")

    def watched(batch: Any, draw: Any) -> torch.Tensor:
        value = loss(batch, draw)
        if failing and trainer.progress.step + 1 == failing[0]:
            failing.pop(0)
            _, block = trainer.placed.weights.transformer.blocks()[2]
            hooks.append(block.linears()["linear1"].adapter.up.register_hook(fail))
        return value

    trainer.train_step.losses.batch_loss = watched


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_a_step_that_runs_out_of_memory_is_made_again_with_less(deep_flux, tmp_path, notes, backend) -> None:
    torch._dynamo.reset()
    trainer = make(deep_flux, tmp_path / "automatic", backend=backend, checkpointing="full")
    assert trainer.placed.weights.swap is None
    graphs = Graphs()
    out_of_memory_at(trainer, 2)
    trainer.run()
    assert (
        trainer.placed.weights.swap is not None
        and len(trainer.placed.weights.swap.blocks) == trainer.placed.memory.options.blocks_to_swap > 0
    )
    assert notes[1].startswith(
        "Out of memory at step 2, so training continues with less. Fits in the computer's memory ("
    )
    assert graphs() == trainer.placed.execution.runner.planned_graphs == (2 if backend else 0)
    memory = trainer.placed.memory.options
    assert memory.checkpointing == "full"
    started_with_it = make(
        deep_flux,
        tmp_path / "fixed",
        backend=backend,
        checkpointing="full",
        blocks_to_swap=memory.blocks_to_swap,
        prefetch_blocks=memory.prefetch_blocks,
    )
    started_with_it.run()
    assert_same_run(trainer, started_with_it)


def test_the_plan_steps_down_as_often_as_it_has_to_and_ends_when_there_is_no_less(deep_flux, tmp_path, notes) -> None:
    trainer = make(deep_flux, tmp_path)
    out_of_memory_at(trainer, *[2] * 100)
    with pytest.raises(TrainingStopped, match="Out of memory at step 2"):
        trainer.run()
    assert trainer.progress.saved_step == 1
    assert trainer.placed.memory.options.checkpointing == "full" and trainer.placed.memory.options.blocks_to_swap == 8
    steps = [note for note in notes if note.startswith("Out of memory at step 2, so training continues with less.")]
    assert len(steps) > 2 and len(set(steps)) == len(steps)


def test_run_without_a_plan_that_can_be_placed_ends_with_its_sentence(deep_flux, tmp_path, monkeypatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = make(deep_flux, tmp_path, checkpointing="full")
    out_of_memory_at(trainer, 2)
    monkeypatch.setattr(placed_weights, "BlockSwap", fail)
    with pytest.raises(TrainingStopped, match="Out of memory at step 2"):
        trainer.run()
    assert trainer.progress.saved_step == 1 and trainer.summary()["blocks_swapped"] == 0
    trainer.close()


def test_run_without_automatic_that_needs_more_ends_with_a_sentence(deep_flux, tmp_path, notes) -> None:
    trainer = make(deep_flux, tmp_path, checkpointing="full", blocks_to_swap=2)
    out_of_memory_at(trainer, 2)
    with pytest.raises(TrainingStopped, match="Out of memory at step 2.*blocks_to_swap to -1"):
        trainer.run()
    assert notes == []


def test_running_out_while_the_weights_are_placed_steps_down_too(deep_flux, tmp_path, monkeypatch, notes) -> None:
    counts: list[int] = []

    class Failing(placed_weights.BlockSwap):  # the first one
        def __init__(self, blocks: Any, *args: Any):
            counts.append(len(blocks))
            if len(counts) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(blocks, *args)

    needed = make(deep_flux, tmp_path / "whole", checkpointing="full").placed.memory.automatic.plan.device_bytes
    free(monkeypatch, int(0.8 * needed))
    monkeypatch.setattr(placed_weights, "BlockSwap", Failing)
    trainer = make(deep_flux, tmp_path / "failing", checkpointing="full")
    assert counts == sorted(set(counts)) and len(trainer.placed.weights.swap.blocks) == counts[-1]
    trainer.run()
    assert len(trainer.progress.loss) == STEPS and trainer.summary()["blocks_swapped"] == counts[-1]


@pytest.mark.parametrize("moment", ["first", "later"])
def test_lack_of_memory_for_the_optimizer_is_found_before_it_moves_a_weight(
    deep_flux, tmp_path, notes, monkeypatch, moment
) -> None:
    """A device that has no room for as much as the step of AdamW takes, once, at the first step or at a later one."""
    trainer = make(deep_flux, tmp_path / "automatic", checkpointing="full")
    (group,) = trainer.network.flat
    real = torch.empty
    failed = []
    requests = []
    # Two moments in the first step, and a number while it runs.
    at_step, pieces = (0, 3) if moment == "first" else (1, 1)

    def empty(*size: Any, **kwargs: Any) -> torch.Tensor:
        if not failed and trainer.progress.step == at_step and size == (group.master.nbytes,):
            requests.append(kwargs["dtype"])
            if len(requests) == pieces:
                failed.append(trainer.progress.step)
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    trainer.run()
    step = 1 if moment == "first" else 2
    assert failed == [step - 1]
    assert notes[1].startswith(
        f"Out of memory at step {step}, so training continues with less. Fits in the computer's memory ("
    )
    started_with_it = make(
        deep_flux,
        tmp_path / "fixed",
        checkpointing="full",
        blocks_to_swap=trainer.placed.memory.options.blocks_to_swap,
        prefetch_blocks=trainer.placed.memory.options.prefetch_blocks,
    )
    started_with_it.run()
    assert_same_run(trainer, started_with_it)


@pytest.mark.parametrize("save_every", [0, 1])
def test_an_optimizer_that_breaks_off_amid_a_step_leaves_what_was_saved_and_says_what(
    deep_flux, tmp_path, save_every
) -> None:
    data = tiny.make_data([(4, 4)], [TEXT])
    trainer = tiny.make_trainer(tiny.load_flux(deep_flux), data, tmp_path, steps=STEPS, save_every=save_every)

    def break_off(*_: Any) -> None:
        if trainer.progress.step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.learner.optimizer.register_step_post_hook(break_off)
    with pytest.raises(TrainingStopped, match="Out of memory at step 3") as stopped:
        trainer.run()
    states = sorted(path.name for path in tmp_path.glob("state-*"))
    if save_every:
        assert states[-1] in str(stopped.value) and "up to step 2 is saved" in str(stopped.value)
    else:
        assert states == [] and "Nothing was saved before that" in str(stopped.value)


def test_slots_that_do_not_fit_and_whatever_else_fails_at_the_start_leave_the_weights_unlocked(
    deep_flux, tmp_path, monkeypatch
) -> None:
    ended = []
    end = BlockSwap.end
    monkeypatch.setattr(BlockSwap, "end", lambda self: ended.append(self) or end(self))

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(BlockSwap, "take", full)
        with pytest.raises(TrainingStopped, match="Out of memory while loading the model"):
            make(deep_flux, tmp_path, checkpointing="none", blocks_to_swap=2)
    assert len(ended) == 1
    with monkeypatch.context() as broken:
        broken.setattr(placed_model, "build_network", full)
        with pytest.raises(TrainingStopped, match="Out of memory while loading the model"):
            make(deep_flux, tmp_path, checkpointing="none", blocks_to_swap=2)
    assert len(ended) == 2


def test_the_copy_of_the_lora_that_a_forward_without_it_takes_is_counted(deep_flux: Path, tmp_path: Path) -> None:
    trainer = make(deep_flux, tmp_path, checkpointing="none", blocks_to_swap=0)
    targets = choose_targets(trainer.context.family, trainer.context.patcher.model, trainer.settings.network)

    def other(**changes: float) -> int:
        settings = replace(trainer.settings, objective=replace(trainer.settings.objective, **changes))
        return auto.measure(
            trainer.context.patcher, trainer.context.family, trainer.context.data, targets, settings
        ).other_bytes

    plain, copy = other(), 4 * sum(p.numel() for p in trainer.network.parameters())
    assert [other(**{name: 2.0}) - plain for name in ("preservation_weight", "guidance_loss_scale")] == [copy] * 2
    trainer.close()
