"""Training with blocks that stream from the host: the same numbers, counted copies, the same graphs."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.host.flat_buffer import Layout
from tessera.memory.swap.training import frozen_modules
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory import swapping
from tiny.memory.swapping import assert_same_run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKS = 6  # three double and three single ones
STEPS = 3


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return tiny.write_flux(folder / "flux.safetensors", depth=3, depth_single=3)


def trained(path: Path, folder: Path, **options: Any) -> Any:
    """A trainer that has made STEPS steps."""
    return swapping.trained(tiny.load_flux(path), swapping.three_pictures(), folder, steps=STEPS, **options)


@pytest.fixture(scope="module")
def resident(deep_flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[Any, Any] = {}

    def resident_run(**settings: Any) -> Any:
        key = tuple(sorted(settings.items()))
        if key not in runs:
            runs[key] = trained(deep_flux, tmp_path_factory.mktemp("resident"), **settings)
        return runs[key]

    return resident_run


@pytest.mark.parametrize(("batch", "checkpointing"), one_in(3, [(3, "selective"), (1, "none"), (1, "full")]))
def test_compiled_blocks_stay_whole_and_swap_adds_no_graph(deep_flux, tmp_path, batch, checkpointing) -> None:
    torch._dynamo.reset()
    settings = {"backend": "aot_eager", "batch": batch, "checkpointing": checkpointing}
    plain = trained(deep_flux, tmp_path / "plain", **settings)
    graphs = Graphs()
    swapped = trained(deep_flux, tmp_path / "swapped", blocks_to_swap=4, **settings)
    assert graphs() == plain.placed.execution.runner.planned_graphs == 2
    assert_same_run(swapped, plain)


@pytest.mark.parametrize(
    ("count", "prefetch"),
    one_in(4, [(count, ahead) for count in range(1, BLOCKS + 1) for ahead in (1, 2, 3) if (count + ahead) % 2]),
)
def test_compiled_equals_resident_for_every_count_and_prefetch(deep_flux, resident, tmp_path, count, prefetch) -> None:
    """With the backend `eager`: dynamo's graphs, and the ops of the eager run."""
    plain = resident(backend="eager")
    graphs = Graphs()
    swapped = trained(deep_flux, tmp_path, backend="eager", blocks_to_swap=count, prefetch_blocks=prefetch)
    assert graphs() == 2 and graphs.breaks == 0
    assert_same_run(swapped, plain)


class Writes(TorchDispatchMode):
    """Memory that each copy goes into, and that it comes out of."""

    def __init__(self) -> None:
        super().__init__()
        self.destinations: list[int] = []
        self.out_of: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.destinations.append(args[0].untyped_storage().data_ptr())
            self.out_of.append(args[1].untyped_storage().data_ptr())
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("unchecked")
def test_the_masters_are_never_written_and_stay_the_models_own(deep_flux: Path, tmp_path: Path) -> None:
    model = tiny.load_flux(deep_flux)
    initial = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(
        model, data, tmp_path, steps=2, memory=MemoryOptions(checkpointing="none", blocks_to_swap=6)
    )
    masters = [master.clone() for master in trainer.placed.weights.swap.ring.flat_weights]
    with Writes() as writes:
        trainer.run()
    homes = {master.untyped_storage().data_ptr() for master in trainer.placed.weights.swap.ring.flat_weights}
    slots = {slot.untyped_storage().data_ptr() for slot in trainer.placed.weights.swap.ring.slots.tensors}
    # What is written are slots, out of masters, and no master is, not even with what it holds.
    assert not homes & set(writes.destinations)
    assert [
        (destination in slots)
        for destination, out_of in zip(writes.destinations, writes.out_of, strict=True)
        if out_of in homes
    ] == [True] * trainer.placed.weights.swap.ring.copies
    assert all(torch.equal(a, b) for a, b in zip(masters, trainer.placed.weights.swap.ring.flat_weights, strict=True))
    after = model.model.state_dict()
    assert initial.keys() == after.keys() and all(torch.equal(initial[key], after[key]) for key in initial)
    # The host holds the weights once: ComfyUI's modules point into the masters.
    weight = model.model.diffusion_model.single_blocks[1].linear1.weight
    storages = [m.untyped_storage().data_ptr() for m in trainer.placed.weights.swap.ring.flat_weights]
    assert weight.untyped_storage().data_ptr() in storages


def test_after_a_run_nothing_of_the_model_is_page_locked(deep_flux: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from tessera.memory.swap import training

    unlocked: list[int] = []

    def unlock(flat: torch.Tensor) -> bool:
        unlocked.append(flat.untyped_storage().data_ptr())
        return True

    monkeypatch.setattr(training, "unlock", unlock)
    model = tiny.load_flux(deep_flux)
    trainer = tiny.make_trainer(
        model, tiny.make_data([(4, 4)], [16]), tmp_path, memory=MemoryOptions(checkpointing="full", blocks_to_swap=6)
    )
    homes = [master.untyped_storage().data_ptr() for master in trainer.placed.weights.swap.ring.flat_weights]
    trainer.run()
    assert unlocked == []
    trainer.close()
    assert unlocked == homes
    weight = model.model.diffusion_model.single_blocks[1].linear1.weight
    assert weight.untyped_storage().data_ptr() in homes  # where the weights are all its own, no copy is made


def test_memory_that_cannot_be_unlocked_is_left_block_after_block(
    deep_flux: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """On Windows, torch's allocator keeps its memory page-locked until nothing is in it and it is told to give back."""
    from tessera.memory.swap import training

    expired: list[int] = []
    model = tiny.load_flux(deep_flux)
    initial = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    trainer = tiny.make_trainer(
        model, tiny.make_data([(4, 4)], [16]), tmp_path, memory=MemoryOptions(checkpointing="full", blocks_to_swap=6)
    )
    trainer.run()
    homes = [StorageWeakRef(master.untyped_storage()) for master in trainer.placed.weights.swap.ring.flat_weights]
    monkeypatch.setattr(training, "unlock", lambda flat: False)
    monkeypatch.setattr(training, "give_back", lambda: expired.append([home.expired() for home in homes].count(True)))
    trainer.close()
    assert expired == [1, 2, 3, 4, 5, 6]
    after = model.model.state_dict()
    assert initial.keys() == after.keys() and all(torch.equal(initial[key], after[key]) for key in initial)


def test_memory_management_can_have_the_slots_back(deep_flux: Path, tmp_path: Path) -> None:
    import comfy.model_management

    plain = trained(deep_flux, tmp_path / "plain")
    data = tiny.make_data([(4, 4), (2, 8), (8, 2)], [16, 16, 16])
    trainer = tiny.make_trainer(
        tiny.load_flux(deep_flux),
        data,
        tmp_path / "swapped",
        steps=STEPS,
        memory=MemoryOptions(checkpointing="none", blocks_to_swap=4),
    )
    tiny.fill_up_matrices(trainer)
    sizes = []

    class Unloading(type(trainer.observer)):
        def step(self, report: Any) -> None:
            comfy.model_management.unload_all_models()
            sizes.append(trainer.placed.weights.swap.held_bytes())

    tiny.observe(trainer, Unloading())
    trainer.run()
    assert sizes == [0] * STEPS
    assert_same_run(trainer, plain)


def test_a_slot_that_holds_another_block_is_found_in_the_backward(deep_flux: Path, tmp_path: Path) -> None:
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(
        tiny.load_flux(deep_flux), data, tmp_path, steps=1, memory=MemoryOptions(checkpointing="full", blocks_to_swap=6)
    )
    ring = trainer.placed.weights.swap.ring
    bring = ring._bring

    def bring_another(j: int, ahead: Any) -> None:
        bring(j, ahead)
        ring.slots.occupants[j % ring.slots.count] = 99

    ring._bring = bring_another
    with pytest.raises(AssertionError, match="holds"):
        trainer.run()


def test_the_tensors_of_a_block_lie_aligned_in_one_buffer(deep_flux: Path, tmp_path: Path) -> None:
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(
        tiny.load_flux(deep_flux), data, tmp_path, memory=MemoryOptions(checkpointing="full", blocks_to_swap=6)
    )
    for block in trainer.placed.weights.swap.blocks:
        tensors = {f"{owner}.{n}": t for owner, m in frozen_modules(block).items() for n, t in m._buffers.items()}
        layout = Layout.from_tensors((name, tensor) for name, tensor in tensors.items() if tensor is not None)
        assert layout in trainer.placed.weights.swap.layouts and all(field.offset % 256 == 0 for field in layout.fields)
    assert all(slot.data_ptr() % 256 == 0 for slot in trainer.placed.weights.swap.ring.slots.tensors)


def test_more_blocks_than_there_are_is_one_sentence(deep_flux: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="blocks_to_swap is 7; this model has 6 blocks"):
        tiny.make_trainer(
            tiny.load_flux(deep_flux),
            tiny.make_data([(4, 4)], [16]),
            tmp_path,
            memory=MemoryOptions(checkpointing="full", blocks_to_swap=7),
        )
