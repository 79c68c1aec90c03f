"""The order of copies on a GPU, with its streams played on the CPU: what is computed never reads what has not come, and
nothing is overwritten that is still read; each wait that orders them is needed."""

import gc
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import tiny
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.train.config.settings import MemoryOptions
from tessera.train.report.errors import TrainingStopped
from tiny.compile.compiling import make_lora, with_lora
from tiny.memory.streams import WrongOrder, streams
from tiny.models.sampling import sample
from tiny.train.runs import Watcher
from torch import OutOfMemoryError, equal, ones

# Where anything waits, by what the copies go through; what settles everything stands beside.
WAITS = {
    "plain": {"CopyStream.copy", "CopyStream.wait"},
    "staged": {"CudaLink.send", "CudaLink.order", "CudaLink.finished"},
    "offload": {"ActivationOffload._copy", "ActivationOffload._release_until", "ActivationOffload._unpack"},
}
SETTLE = {"CopyStream.settle", "CudaLink.settle", "ActivationOffload.drop_broken_step"}


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("deep") / "flux.safetensors", depth=3, depth_single=3)


def start_trainer(path: Path, folder: Path, **memory: Any) -> Any:
    trainer = tiny.make_trainer(
        tiny.load_flux(path),
        tiny.make_data([(4, 4), (2, 8)], [16, 16]),
        folder,
        steps=2,
        memory=MemoryOptions(**{"checkpointing": "full"} | memory),
    )
    tiny.observe(trainer, Watcher())
    tiny.fill_up_matrices(trainer)
    return trainer


def trained(path: Path, folder: Path, **memory: Any) -> Any:
    trainer = start_trainer(path, folder, **memory)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def resident(deep_flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[str, Any] = {}

    def resident_run(checkpointing: str) -> Any:
        if checkpointing not in runs:
            runs[checkpointing] = trained(deep_flux, tmp_path_factory.mktemp("plain"), checkpointing=checkpointing)
        return runs[checkpointing]

    return resident_run


def same_run(first: Any, other: Any) -> bool:
    pairs = zip(first.network.pairs.values(), other.network.pairs.values(), strict=True)
    return first.progress.loss == other.progress.loss and all(
        equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("kind", ["plain", "staged"])
@pytest.mark.parametrize(
    ("checkpointing", "offload", "prefetch"),
    [("none", False, 1), ("none", False, 2), ("selective", False, 3), ("full", True, 1), ("full", True, 3)],
)
def test_training(deep_flux, resident, tmp_path, monkeypatch, kind, checkpointing, offload, prefetch) -> None:
    want = resident(checkpointing)
    memory = {"checkpointing": checkpointing, "offload_activations": offload}
    with streams(monkeypatch, kind == "staged") as device:
        run = trained(deep_flux, tmp_path, blocks_to_swap=5, prefetch_blocks=prefetch, **memory)
    assert same_run(run, want)
    assert device.deferred >= run.placed.weights.swap.ring.copies > 5
    waits = device.sites - SETTLE
    assert waits <= WAITS[kind] | (WAITS["offload"] if offload else set())
    if prefetch == 3:
        assert waits >= WAITS[kind]
    assert not offload or waits >= WAITS["offload"]
    notes = [text for text in run.observer.notes if text.startswith("offload_activations")]
    # There is no page-locked memory here; it is told once for all steps.
    assert [text.split(": ")[1][:4] for text in notes] == (["0.00"] if offload else [])


@pytest.mark.parametrize("site", sorted({*WAITS["plain"], *WAITS["staged"], *WAITS["offload"]}))
def test_waits_can_not_be_left_out(deep_flux, resident, tmp_path, monkeypatch, site: str) -> None:
    want = resident("full")
    memory = {"checkpointing": "full", "blocks_to_swap": 5, "offload_activations": site in WAITS["offload"]}
    with streams(monkeypatch, site in WAITS["staged"], omitted=site):
        try:
            run = trained(deep_flux, tmp_path, prefetch_blocks=3, **memory)
        except Exception as error:  # also where a loss that is no number ends the run
            noticed = any(words in str(error) for words in ("not a number", "NaN", "from that of ComfyUI"))
            assert type(error).__name__ == "WrongOrder" or noticed, error
        else:
            assert not same_run(run, want)


def test_a_backward_that_breaks_off_lets_go_of_nothing_that_a_copy_is_on_its_way_to(
    deep_flux, resident, tmp_path, monkeypatch
) -> None:
    """The activations of the block before the one where it breaks off have been asked for by then. The CPU's queue of
    autograd keeps what it had still to do until it is used again; a GPU's goes on with it at once."""
    with streams(monkeypatch, True) as device:
        memory = MemoryOptions(checkpointing="full", blocks_to_swap=-1, offload_activations=True)
        data = tiny.make_data([(4, 4), (2, 8)], [16, 16])
        trainer = tiny.make_trainer(tiny.load_flux(deep_flux), data, tmp_path, steps=2, memory=memory)
        tiny.observe(trainer, Watcher())
        tiny.fill_up_matrices(trainer)
        loss = trainer.train_step.losses.batch_loss
        build = trainer.placed.rebuild
        hooks = []

        def fail(grad: Any) -> None:
            hooks[0].remove()
            raise OutOfMemoryError("CUDA out of memory")

        def watched(*args: Any) -> Any:
            value = loss(*args)
            if not hooks:
                _, block = trainer.placed.weights.transformer.blocks()[2]
                linear = next(linear for linear in block.linears().values() if linear.adapter is not None)
                hooks.append(linear.adapter.up.register_hook(fail))
            return value

        def rebuild(step: int) -> None:
            ones(1, requires_grad=True).sum().backward()
            build(step)

        trainer.train_step.losses.batch_loss, trainer.placed.rebuild = watched, rebuild
        trainer.run()
    assert hooks and trainer.placed.weights.swap is not None  # it went on with less
    assert same_run(trainer, resident("full")) and device.deferred > 0


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("site", sorted(SETTLE))
def test_a_run_that_breaks_off_ends_its_copies_before_it_lets_go_of_their_memory(
    deep_flux, tmp_path, monkeypatch, site: str, waits: bool
) -> None:
    def fail(grad: Any) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    expected = nullcontext() if waits else pytest.raises(WrongOrder, match="memory is let go")
    with expected, streams(monkeypatch, site.startswith("CudaLink"), omitted=None if waits else site) as device:
        memory = {"blocks_to_swap": 5, "offload_activations": site.startswith("ActivationOffload")}
        trainer = start_trainer(deep_flux, tmp_path, prefetch_blocks=3, **memory)
        linears = trainer.placed.weights.transformer.blocks()[2][1].linears().values()
        next(linear for linear in linears if linear.adapter is not None).adapter.up.register_hook(fail)
        with suppress(TrainingStopped):
            trainer.run()
        ones(1, requires_grad=True).sum().backward()  # as above
        trainer.close()
        del trainer, linears
        gc.collect()
        device.finish()


@pytest.mark.parametrize("site", [None, "CudaLink.send", "CudaLink.order"])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_sampling_with_a_lora(tiny_flux: Any, monkeypatch: Any, prefetch: int, site: str | None) -> None:
    lora = make_lora(tiny_flux, inside="_blocks.")
    wants = [sample(tiny_flux, "flux"), sample(with_lora(tiny_flux, lora, 0.7), "flux")]
    comfy.model_management.unload_all_models()
    swapped, _ = swap(tiny_flux, SwapSettings(4, prefetch))
    models = [swapped, with_lora(swapped, lora, 0.7)]
    with streams(monkeypatch, True, omitted=site) as device:
        try:
            results = [equal(sample(models[i], "flux"), wants[i]) for i in (1, 0, 1)]
        except AssertionError as error:
            assert type(error).__name__ == "WrongOrder"
            results = [False]
        comfy.model_management.unload_all_models()
    assert all(results) is (site is None) and (site is not None or device.deferred > 0)
