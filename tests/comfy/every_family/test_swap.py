"""Training every family with blocks that stream from the host: the same bits, counted copies, no further graph."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from family_cases import cases, every_case, marks_of, modes_in_turn
from tessera.lora.options import NetworkOptions
from tessera.models.catalogue.registry import family_of
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory import swapping
from tiny.memory.swapping import assert_same_run
from tiny.models.family_case import FamilyCase, computing_in
from tiny.train.runs import training_data

MODES = ("none", "selective", "full")
STEPS = 3


def data_of(case: FamilyCase) -> Any:
    return training_data(*case.batches()[case.main_batches[-1]]())


@pytest.fixture
def trained(case_file: Any) -> Any:
    """A trainer of a case's model of several blocks that has made STEPS steps."""

    def make(case: FamilyCase, folder: Path, batch: int = 2, dtype: torch.dtype | None = None, **options: Any) -> Any:
        file = case_file(case, **case.deep, **({"dtype": dtype} if dtype else {}))
        return swapping.trained(case.load(file, dtype), data_of(case), folder, batch=batch, steps=STEPS, **options)

    return make


@pytest.fixture(scope="module")
def runs() -> dict[Any, Any]:
    return {}


@pytest.fixture
def resident(runs: dict[Any, Any], trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with every block on the device, made once."""

    def resident_run(case: FamilyCase, **settings: Any) -> Any:
        key = (case.name, *sorted(settings.items()))
        if key not in runs:
            runs[key] = trained(case, tmp_path_factory.mktemp("resident"), **settings)
        return runs[key]

    return resident_run


def unused(case: FamilyCase, trainer: Any) -> list[str]:
    last = list(trainer.placed.weights.transformer.blocks())[-1][0]
    return [f"{last}.{name}" for name in case.unused]


def counts(blocks: int) -> Iterator[tuple[int, int, str]]:
    """List (blocks to swap, blocks ahead, checkpointing): every pair without checkpointing, which stands inside, and
    some with it."""
    for count in range(1, blocks + 1):
        yield from ((count, prefetch, "none") for prefetch in (1, 2, 3))
    pairs = [(1, 1), (2, 1), (blocks // 2, 1), (blocks - 1, 1), (blocks - 1, 2), *((blocks, n) for n in (1, 2, 3))]
    yield from ((*pair, mode) for pair in dict.fromkeys(pairs) for mode in MODES[1:])


def swapped_runs() -> Iterator[Any]:
    """Every count for the first row, every other one for the others, in turn."""
    for number, case in enumerate(cases("swap")):
        for place, (count, prefetch, mode) in enumerate(counts(case.deep_blocks)):
            fast = (count, prefetch, mode) == (case.deep_blocks - 1, 1, "full")  # two slots for more blocks
            if number and place % 2 != number % 2 and not fast:
                continue
            yield pytest.param(
                case,
                count,
                prefetch,
                mode,
                id=f"{case.name}-{count}-{prefetch}-{mode}",
                marks=marks_of(case, "swap", fast=fast, thin=not fast),
            )


@pytest.mark.parametrize(("case", "count", "prefetch", "mode"), one_in(8, swapped_runs()))
def test_swapped_equals_resident_bit_for_bit(resident, trained, tmp_path, case, count, prefetch, mode):
    plain = resident(case, checkpointing=mode)  # first: what comes next unloads it
    swapped = trained(case, tmp_path, checkpointing=mode, blocks_to_swap=count, prefetch_blocks=prefetch)
    assert len(swapped.placed.weights.transformer.blocks()) == case.deep_blocks
    assert_same_run(swapped, plain, unused(case, swapped))
    slots = min(prefetch + 1, count)
    # The first forward brings all; after that what is there at the turn, and at the end of a step, stays.
    assert swapped.placed.weights.swap.ring.copies == STEPS * 2 * (count - slots) + slots
    assert swapped.summary()["block_copies_per_step"] == 2 * (count - slots)
    assert swapped.placed.weights.swap.held_bytes() == slots * max(
        layout.size for layout in swapped.placed.weights.swap.layouts
    )


@pytest.mark.parametrize("batch", one_in(2, [3, 1]))
@modes_in_turn(MODES, "swap", thin=("chroma", "qwen-image"))
def test_batches_of_one_and_three_are_the_same_too(resident, trained, tmp_path, case, mode, batch):
    plain = resident(case, checkpointing=mode, batch=batch)
    swapped = trained(case, tmp_path, checkpointing=mode, batch=batch, blocks_to_swap=case.deep_blocks - 1)
    assert_same_run(swapped, plain, unused(case, swapped))


@modes_in_turn(MODES, "swap", "compiled swap", thin=("flux", "wan"))
def test_compiled_blocks_stay_whole_and_swap_adds_no_graph(trained, tmp_path, case, mode):
    torch._dynamo.reset()
    settings = {"backend": "aot_eager", "checkpointing": mode}
    plain = trained(case, tmp_path / "plain", **settings)
    graphs = Graphs()
    swapped = trained(case, tmp_path / "swapped", blocks_to_swap=case.deep_blocks - 1, **settings)
    assert graphs() == plain.placed.execution.runner.planned_graphs == case.kinds  # a run compiles its own
    assert_same_run(swapped, plain, unused(case, swapped))


@every_case("swap", thin=True)
def test_swap_changes_no_bit_in_bf16_where_every_linear_is_trained(case_file, tmp_path, case):
    """The vector that all blocks read has a gradient then. In fp32 another order of its additions shows in the last
    digit only; in bf16 it is 3e-3 of all gradients."""

    def gradients(folder: str, **memory: Any) -> dict[str, torch.Tensor]:
        model = computing_in(case.load(case_file(case, **case.deep)), torch.bfloat16)
        network, options = (
            NetworkOptions(rank=4, alpha=8.0, include=("*",)),
            MemoryOptions(checkpointing="none", **memory),
        )
        trainer = tiny.make_trainer(
            model, data_of(case), tmp_path / folder, steps=1, network=network, memory=options, batch_size=2
        )
        tiny.fill_up_matrices(trainer)
        trainer.run()
        assert trainer.placed.weights.dtype == torch.bfloat16
        return {f"{name}.{i}": p.grad for name, pair in trainer.network.pairs.items() for i, p in enumerate(pair)}

    resident, swapped = gradients("resident"), gradients("swapped", blocks_to_swap=case.deep_blocks)
    different = [name for name in resident if not _equal(resident[name], swapped[name])]
    assert not different, f"{len(different)} of {len(resident)}: {different[:4]}"


def _equal(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return tensor is other if tensor is None or other is None else torch.equal(tensor, other)


@every_case("swap", "fp8", thin=("flux", "wan"))
def test_an_fp8_file_streams_as_it_is_stored(trained, tmp_path, case):
    plain = trained(case, tmp_path / "resident", dtype=torch.float8_e4m3fn)
    swapped = trained(case, tmp_path / "swapped", dtype=torch.float8_e4m3fn, blocks_to_swap=case.deep_blocks)
    assert_same_run(swapped, plain, unused(case, swapped))
    (_, block), *_ = swapped.placed.weights.transformer.blocks()
    assert {linear.weight.dtype for linear in block.linears().values()} == {torch.float8_e4m3fn}


@every_case("swap", thin=("flux", "wan"))
def test_activations_may_wait_on_the_host(resident, trained, tmp_path, case):
    plain = resident(case, checkpointing="full")
    offloaded = trained(case, tmp_path, checkpointing="full", offload_activations=True, blocks_to_swap=2)
    assert offloaded.placed.execution.runner.checkpointing.offload.bytes_in > 0
    assert_same_run(offloaded, plain, unused(case, offloaded))


@every_case("swap", thin=True)
def test_the_flat_weights_are_never_written_and_stay_the_models_own(case_file, tmp_path, case):
    model = case.load(case_file(case, **case.deep))
    initial = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}
    memory = MemoryOptions(checkpointing="none", blocks_to_swap=case.deep_blocks)
    trainer = tiny.make_trainer(model, data_of(case), tmp_path, steps=2, memory=memory)
    trainer.run()
    after = model.model.state_dict()
    assert initial.keys() == after.keys() and all(torch.equal(initial[key], after[key]) for key in initial)
    # The host holds the weights once: each parameter of ComfyUI's blocks lies in the flat weights.
    storages = {flat.untyped_storage().data_ptr() for flat in trainer.placed.weights.swap.ring.flat_weights}
    for name in family_of(model).forward.block_lists(model.model):
        for parameter, tensor in getattr(model.model.diffusion_model, name)[1].named_parameters():
            assert tensor.untyped_storage().data_ptr() in storages, f"{name}.1.{parameter}"


@every_case("swap", thin=("flux", "wan"))
def test_a_plan_is_chosen_by_measuring_a_block(trained, tmp_path, case):
    automatic = trained(case, tmp_path, checkpointing="auto", blocks_to_swap=-1)
    assert automatic.placed.memory.automatic is not None and automatic.progress.step == STEPS


@every_case("swap", fast=True)
def test_with_nothing_connected_a_step_is_measured_and_what_fits_trains(case_file, case, tmp_path):
    trainer = tiny.make_trainer(case.load(case_file(case)), data_of(case), tmp_path, steps=1, memory=MemoryOptions())
    assert trainer.placed.memory.automatic.plan.fits and trainer.placed.memory.options.checkpointing == "none"
    trainer.run()
    assert trainer.placed.weights.swap is None and len(trainer.progress.loss) == 1
