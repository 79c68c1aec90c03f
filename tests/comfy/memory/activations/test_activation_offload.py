"""Training with kept block inputs on the host: the same numbers, counted bytes, buffers used again, no graph more."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.activations.offload import ActivationOffload
from tessera.train.config.settings import MemoryOptions
from tessera.train.loop import retries
from tessera.train.objective.batch import fixed_batch
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory import swapping
from tiny.memory.swapping import assert_same_run

STEPS = 2
HIDDEN = 128
TOKENS = 16
TEXT = 16


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return tiny.write_flux(folder / "flux.safetensors", depth=2, depth_single=3)


def trained(path: Path, folder: Path, *, steps: int = STEPS, **options: Any) -> Any:
    memory = {"checkpointing": "full", **options}
    return swapping.trained(tiny.load_flux(path), swapping.three_pictures(), folder, steps=steps, **memory)


CASES = [(None, batch, swap) for batch in (1, 3) for swap in (0, 4)] + [("aot_eager", 3, 4), ("aot_eager", 1, 0)]


@pytest.mark.parametrize(("backend", "batch", "swap"), one_in(2, CASES[::-1]))
def test_offloaded_equals_kept_bit_for_bit_with_counted_bytes(deep_flux, tmp_path, backend, batch, swap) -> None:
    torch._dynamo.reset()
    resident = trained(deep_flux, tmp_path / "kept", backend=backend, batch=batch)
    graphs = Graphs()
    offloaded = trained(
        deep_flux, tmp_path / "off", backend=backend, batch=batch, blocks_to_swap=swap, offload_activations=True
    )
    # A run compiles its own graphs, one for each kind of block.
    assert graphs() == resident.placed.execution.runner.planned_graphs == (2 if backend else 0)
    assert_same_run(offloaded, resident)
    # Two double blocks and two of the three single ones: the last stays. Each keeps its stream of all tokens, fp32.
    a_block = batch * (TOKENS + TEXT) * HIDDEN * 4
    offload = offloaded.placed.execution.runner.checkpointing.offload
    assert offload.bytes_out == offload.bytes_in == STEPS * 4 * a_block
    # Picture and text of a double block are a buffer each; the second step makes none.
    assert offload.pool.buffers == 2 * 2 + 2
    assert sum(map(len, offload.pool.free.values())) == offload.pool.buffers


def test_tensors_wanted_back_are_asked_for_one_block_ahead(deep_flux: Path, tmp_path: Path, monkeypatch) -> None:
    requests: list[tuple[str, int]] = []
    fetch, unpack = ActivationOffload._fetch, ActivationOffload._unpack

    def spy_fetch(self: Any, saved: Any) -> Any:
        if saved.fetched is None:
            requests.append(("copy", saved.turn))
        return fetch(self, saved)

    def spy_unpack(self: Any, saved: Any) -> Any:
        if not isinstance(saved, torch.Tensor):
            requests.append(("need", saved.turn))
        return unpack(self, saved)

    monkeypatch.setattr(ActivationOffload, "_fetch", spy_fetch)
    monkeypatch.setattr(ActivationOffload, "_unpack", spy_unpack)
    trained(deep_flux, tmp_path, steps=1, offload_activations=True)
    for turn in (1, 2, 3):
        assert requests.index(("copy", turn)) < requests.index(("need", turn))
        assert requests.index(("copy", turn)) > requests.index(("need", turn + 1))


@pytest.mark.parametrize("goes_on", ["eager", "with less", None])
def test_a_step_that_breaks_off_keeps_nothing_when_it_goes_on_or_ends(
    deep_flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: str | None
) -> None:
    options = MemoryOptions(checkpointing="full", offload_activations=True)
    data = tiny.make_data([(4, 4)], [TEXT])
    trainer = tiny.make_trainer(tiny.load_flux(deep_flux), data, tmp_path, steps=1, memory=options)
    tiny.fill_up_matrices(trainer)
    _, block = trainer.placed.weights.transformer.blocks()[2]
    linear = next(linear for linear in block.linears().values() if linear.adapter is not None)
    offload, coming = trainer.placed.execution.runner.checkpointing.offload, []

    def fail(grad: torch.Tensor) -> None:
        hook.remove()
        coming.append(len(offload._fetching))
        raise torch.OutOfMemoryError if goes_on == "with less" else RuntimeError("no compiler")

    hook = linear.adapter.up.register_hook(fail)
    if goes_on is not None:
        if goes_on == "with less":
            monkeypatch.setattr(trainer.placed.memory, "step_down", lambda *_: True)
        else:
            trainer.placed.execution.runner.planned_graphs = 1
            monkeypatch.setattr(retries, "cannot_compile", str)
        trainer.run()
    else:
        with pytest.raises(RuntimeError, match="no compiler"):
            trainer.run()
        trainer.close()
    assert coming == [2] and not offload._fetching and trainer.progress.step == (goes_on is not None)


def test_a_forward_that_no_backward_follows_keeps_nothing(deep_flux: Path, tmp_path: Path) -> None:
    options = MemoryOptions(checkpointing="full", offload_activations=True)
    data = tiny.make_data([(4, 4)], [TEXT])
    trainer = tiny.make_trainer(tiny.load_flux(deep_flux), data, tmp_path, memory=options)
    tiny.fill_up_matrices(trainer)
    sample, placed = trainer.context.data.samples[0], trainer.placed
    batch = fixed_batch(
        trainer.context.patcher, trainer.context.family, [(sample, sample.load(), 0.5)], 1.0, trainer.device, 0
    )
    placed.velocity_without(batch.inputs)
    offload = placed.execution.runner.checkpointing.offload
    assert offload.bytes_out > 0 and not offload._storing and not offload._offloaded
    trainer.close()


def test_other_kinds_of_checkpointing_keep_their_activations(deep_flux, tmp_path) -> None:
    data = tiny.make_data([(4, 4)], [TEXT])
    trainer = tiny.make_trainer(
        tiny.load_flux(deep_flux),
        data,
        tmp_path,
        steps=1,
        memory=MemoryOptions(checkpointing="selective", offload_activations=True),
    )
    trainer.run()
    assert trainer.placed.execution.runner.checkpointing.offload is None


def test_a_buffer_is_filled_with_strides_and_bytes_as_they_were() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    x = torch.randn(3, 4, 5).transpose(1, 2).requires_grad_()
    part = torch.randn(8, 8)[:, :3].requires_grad_()

    def run(block: Any, *args: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda a, b: (a.exp().sum(), b.exp()), *args, use_reentrant=False)

    total, y = offload.wrap(run)(object(), x, part)
    assert offload.bytes_out == x.numel() * 4  # a part of a larger tensor stays: its copy would have other strides
    (total + y.sum()).backward()
    assert torch.equal(x.grad, x.detach().exp()) and torch.equal(part.grad, part.detach().exp())


def test_tensors_of_two_blocks_may_be_on_their_way_out_and_those_before_are_let_go() -> None:
    offload, storing = ActivationOffload(torch.device("cpu")), []
    run = offload.wrap(lambda block, x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False))
    for _ in range(5):
        run(object(), torch.randn(4, requires_grad=True))
        storing.append({turn for turn, *_ in offload._storing})
    assert storing == [{1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}]
