"""The family of any other model: what it refuses, how it groups a batch, its dropout and its check of the forward."""

from dataclasses import replace

import pytest
import torch
from tessera.lora.options import NetworkOptions
from tessera.models.catalogue.registry import family_of
from tessera.models.family import SampleFacts
from tessera.models.native.forward import inputs
from tessera.models.native.forward.blocks import NativeBlock
from tessera.models.native.forward.transformer import NativeTransformer
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.batch import fixed_batch
from thinned import one_in
from tiny.compile.compiling import Graphs, graphs_after_each_step
from tiny.native import ROWS, build, data_of, sample_of
from tiny.train.runs import Watcher, train, training_data
from tiny.train.training import fill_up_matrices, make_trainer, micro_batch

BY_NAME = {row.name: row for row in ROWS}
Z_IMAGE, SDXL = BY_NAME["z-image"], BY_NAME["sdxl"]


def trainer_of(row, data, folder, **changes):
    trainer = make_trainer(build(row), data, folder, **changes)
    fill_up_matrices(trainer)
    return trainer


def gradients(trainer, *indices):
    loss = trainer.train_step.forward_backward([micro_batch(*indices)])
    grads = {
        n: p.grad.clone() for n, p in zip(trainer.network.master_weights(), trainer.network.parameters(), strict=True)
    }
    return float(loss), grads


def assert_equal(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= tolerance * value.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (SampleFacts("a.mp4", 5, (), 0, frozenset()), "a.mp4 is a clip of 5 frames; .* trains on pictures"),
        (SampleFacts("a.mp4", 5, (), 1, frozenset()), "a.mp4 gives its first frame without noise"),
    ],
)
def test_inputs_that_a_native_model_cannot_take_are_told(facts, sentence):
    row = BY_NAME["ltx-video"] if facts.clean_frames else SDXL
    model = build(row)
    with pytest.raises(ValueError, match=sentence):
        family_of(model).check(model.model, facts)


def test_samples_of_other_shapes_run_one_after_the_other(tmp_path, monkeypatch):
    wide = replace(Z_IMAGE, latent=(Z_IMAGE.latent[0], Z_IMAGE.latent[2], Z_IMAGE.latent[1]))
    samples = [sample_of(Z_IMAGE, "a"), sample_of(wide, "b"), sample_of(Z_IMAGE, "c"), sample_of(Z_IMAGE, "d", 5)]
    trainer = trainer_of(Z_IMAGE, training_data(*samples), tmp_path, batch_size=4)
    calls = []
    forward = NativeTransformer._call

    def counted(self, group):
        calls.append(group.rows)
        return forward(self, group)

    monkeypatch.setattr(NativeTransformer, "_call", counted)
    loss, together = gradients(trainer, 0, 1, 2, 3)
    assert calls[-3:] == [(0, 2), (1,), (3,)]
    monkeypatch.setattr(inputs, "_signature", lambda latent, conds: object())
    alone, apart = gradients(trainer, 0, 1, 2, 3)
    assert calls[-4:] == [(0,), (1,), (2,), (3,)]
    assert loss == pytest.approx(alone, rel=1e-6)
    assert_equal(together, apart)


@pytest.mark.parametrize("row", one_in(2, [Z_IMAGE, SDXL]), ids=str)
def test_dropout_is_the_same_when_a_block_is_computed_again(row, tmp_path):
    plain_options = NetworkOptions(rank=4, alpha=4.0)
    options = replace(plain_options, dropout=0.3, rank_dropout=0.2, module_dropout=0.2)

    def step_of(network, checkpointing):
        memory, folder = MemoryOptions(checkpointing=checkpointing), tmp_path / f"{checkpointing}{network.dropout}"
        return gradients(trainer_of(row, data_of(row, 2), folder, batch_size=2, network=network, memory=memory), 0, 1)

    stored = step_of(options, "none")
    recomputed = step_of(options, "full")
    plain = step_of(plain_options, "none")
    assert stored[0] == pytest.approx(recomputed[0], rel=1e-6) and plain[0] != pytest.approx(stored[0], rel=1e-4)
    assert_equal(recomputed[1], stored[1])


def test_a_forward_that_comes_out_different_is_refused_before_the_first_step(tmp_path, monkeypatch):
    trainer = trainer_of(Z_IMAGE, data_of(Z_IMAGE, 1), tmp_path)
    block = trainer.placed.weights.transformer.blocks()[0][1]
    forward, run_core = NativeBlock.forward, NativeBlock.run_core
    blocks = []

    def in_training(self, *args):
        blocks.append(self)
        try:
            return forward(self, *args)
        finally:
            blocks.pop()

    def scaled(self, *tensors, call):
        return run_core(self, *tensors, call=call) * (1.1 if self is block and blocks else 1.0)

    monkeypatch.setattr(NativeBlock, "forward", in_training)
    monkeypatch.setattr(NativeBlock, "run_core", scaled)
    with pytest.raises(ValueError, match="whose output is .* different when it runs for training"):
        trainer.run()
    assert trainer.progress.step == 0


def test_the_model_itself_is_never_changed(tmp_path):
    model = build(SDXL)
    initial = {name: value.clone() for name, value in model.model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in model.model.named_modules()}
    trainer = make_trainer(model, data_of(SDXL, 2), tmp_path, memory=MemoryOptions(checkpointing="full"))
    trainer.run()
    trainer.close()
    assert all(torch.equal(model.model.state_dict()[name], value) for name, value in initial.items())
    for name, module in model.model.named_modules():
        assert vars(module).keys() == attributes[name].keys(), name


def test_data_of_other_text_encoders_is_told_before_the_first_step(tmp_path):
    other = replace(Z_IMAGE, text=(Z_IMAGE.text[0], Z_IMAGE.text[1] + 8))
    trainer = trainer_of(Z_IMAGE, training_data(sample_of(other, "a")), tmp_path)
    with pytest.raises(ValueError, match="^model is Z-Image, whose forward fails on this data .*; prepare the data"):
        trainer.run()
    assert trainer.progress.step == 0


def test_validation_before_the_first_step_and_a_model_placed_anew_run_compiled(tmp_path):
    torch._dynamo.reset()
    trainer = trainer_of(Z_IMAGE, data_of(Z_IMAGE, 1), tmp_path / "compiled", backend="aot_eager")
    sample = trainer.context.data.samples[0]
    batch = fixed_batch(
        trainer.context.patcher, trainer.context.family, [(sample, sample.load(), 0.5)], 1.0, trainer.device, 0
    )
    with torch.no_grad():
        assert torch.isfinite(trainer.placed.velocity(batch.inputs, None)).all()
    assert all(block.call is None for _, block in trainer.placed.weights.transformer.blocks())
    loss, grads = gradients(trainer, 0)
    trainer.train_step.retries.place_again()
    repeated, grads_again = gradients(trainer, 0)
    plain, expected = gradients(trainer_of(Z_IMAGE, data_of(Z_IMAGE, 1), tmp_path / "plain"), 0)
    assert loss == pytest.approx(plain, rel=1e-6) and repeated == pytest.approx(plain, rel=1e-6)
    assert_equal(grads, expected)
    assert_equal(grads_again, expected)
    assert not trainer.placed.execution.runner.failed


def test_patches_of_the_forward_are_refused(tmp_path):
    model = build(SDXL).clone()
    model.set_model_attn1_patch(lambda q, k, v, options: (q, k, v))
    watcher = Watcher()
    with pytest.raises(ValueError, match="carries transformer patches .*, which training of this model can't apply"):
        train(model, data_of(SDXL, 1), tmp_path, watcher)
    assert "Loading the model" not in watcher.phases


@pytest.mark.parametrize("said", [{}, {"width": 2048, "height": 512}], ids=["latent", "text"])
def test_the_size_of_a_picture_reaches_the_model_as_in_core_s_sampler(said, tmp_path):
    import comfy.samplers

    row = replace(SDXL, conditioning=lambda draw: {"pooled_output": draw(1, 64), **said})
    trainer = trainer_of(row, data_of(row, 1), tmp_path)
    sample = trainer.context.data.samples[0]
    read = sample.load()
    noise = torch.zeros(1, *row.latent)
    conditioning = {"cross_attn": read.text, "model_conds": {}, **read.conditioning}
    (expected,) = comfy.samplers.encode_model_conds(
        trainer.context.patcher.model.extra_conds, [conditioning], noise, "cpu", "positive"
    )
    batch = fixed_batch(trainer.context.patcher, trainer.context.family, [(sample, read, 0.5)], 1.0, trainer.device, 0)
    assert torch.equal(batch.inputs.groups[0].conds["y"], expected["model_conds"]["y"].cond)


def test_loading_s_own_memory_is_not_copied(tmp_path):
    class Held:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    model = build(SDXL)
    norm = next(m for n, m in model.model.diffusion_model.named_modules() if n.endswith("norm1"))
    norm._pin_state, norm._v = Held(), (Held(), 1)
    trainer = make_trainer(model, data_of(SDXL, 1), tmp_path)
    assert not any("_v" in vars(m) for m in trainer.placed.weights.transformer.shadow.diffusion_model.modules())


def test_two_epochs_of_mixed_shapes_and_captions_compile_each_graph_once(tmp_path):
    torch._dynamo.reset()
    channels, height, width = Z_IMAGE.latent
    upright, smaller = (replace(Z_IMAGE, latent=(channels, *sides)) for sides in ((width, height), (height, width - 2)))
    short, long = Z_IMAGE.text[0] - 2, Z_IMAGE.text[0]
    samples = [
        sample_of(Z_IMAGE, "a"),
        sample_of(upright, "b"),
        sample_of(Z_IMAGE, "c", short),
        sample_of(smaller, "d"),
    ]
    data = training_data(*samples)
    assert {key[2] for key in data.graph_keys()} == {short, long} and len(data.graph_keys()) == 3
    trainer = trainer_of(Z_IMAGE, data, tmp_path, backend="eager", steps=8, save_every=0)
    graphs = Graphs()
    counts, keys = graphs_after_each_step(trainer, graphs)
    assert len(set(keys[:4])) == len(set(keys)) == 3
    assert 0 < counts[3] <= trainer.placed.execution.runner.planned_graphs
    assert counts[4:] == counts[3:4] * 4 and graphs.breaks == 0 and not trainer.placed.execution.runner.failed
    torch._dynamo.reset()


@pytest.mark.parametrize(("row", "batch"), [(SDXL, 1), (Z_IMAGE, 2)], ids=["sdxl", "z-image"])
def test_pictures_of_one_token_count_and_other_sides_stay_compiled(row, batch, tmp_path):
    """A U-Net sees the sides, and of a mixed batch each shape runs with as many samples as it happens to have."""
    torch._dynamo.reset()
    channels, height, width = row.latent
    wide = replace(row, latent=(channels, height // 2, width * 2))
    data = training_data(sample_of(row, "a"), sample_of(row, "b"), sample_of(wide, "c"), sample_of(wide, "d"))
    assert len(data.graph_keys()) == 1
    trainer = trainer_of(row, data, tmp_path, backend="eager", batch_size=batch, steps=4, save_every=0)
    planned = trainer.placed.execution.runner.planned_graphs
    trainer.run()
    assert not trainer.placed.execution.runner.failed and trainer.placed.execution.runner.planned_graphs == planned
    torch._dynamo.reset()


def test_a_model_that_is_placed_anew_keeps_its_graphs(tmp_path):
    """As after a second plan, or where memory ran out: what the first forward has found of the blocks still counts."""
    torch._dynamo.reset()
    trainer = trainer_of(Z_IMAGE, data_of(Z_IMAGE), tmp_path, backend="eager")
    graphs = Graphs()
    trainer.train_step.forward_backward([micro_batch(0)])
    planned, graph_count = trainer.placed.execution.runner.planned_graphs, graphs()
    trainer.placed.rebuild(1)
    trainer.train_step.forward_backward([micro_batch(0)])
    assert not trainer.placed.execution.runner.failed and trainer.placed.execution.runner.planned_graphs == planned
    assert graphs() == graph_count
    trainer.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", one_in(2, ["boogu", "hidream-o1"]))
def test_blocks_that_the_data_does_not_reach_are_a_part_of_the_plan(name, tmp_path):
    """Those of reference pictures run in no step without one, and lie in memory all the same."""
    row = BY_NAME[name]
    trainer = make_trainer(build(row), data_of(row), tmp_path, memory=MemoryOptions(blocks_to_swap=-1))
    automatic = trainer.placed.memory.automatic
    unreached = [block for block in automatic.measured.blocks if not block.forward]
    assert unreached and all(block.weights and not block.saved for block in unreached)
    measured = automatic.measured.timed_anew(dict.fromkeys(automatic.measured.shapes, 1.0))
    assert [block.forward for block in measured.blocks if not block.saved] == [0.0] * len(unreached)
    assert trainer.train_step.forward_backward([micro_batch(0)]).isfinite()
    trainer.close()
