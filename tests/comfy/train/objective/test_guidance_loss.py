"""Guidance-preserving loss: gradients against an fp64 reference, its graphs, its place in a run, its refusals."""

from dataclasses import replace

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import load_file
from tessera.data.preparation.empty_caption import with_empty_caption
from tessera.data.preparation.from_latents import latents_to_data
from tessera.data.samples import Prompt, SampleVariant
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.batch import make_batch
from tessera.train.objective.guidance_loss import check_guidance_loss
from tessera.train.objective.options import ObjectiveOptions
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.native import ROWS, build, sample_of
from tiny.train.reference_row import ReferenceRow
from tiny.train.runs import Watcher, cancel_at, run_settings, sample, train, training_data

SCALE = 1.75
WEIGHT = 0.7
EMPTY = 8
OBJECTIVE = ObjectiveOptions(guidance_loss_scale=SCALE, guidance=3.5)
FP32 = 1e-4
BY_NAME = {row.name: row for row in ROWS}


def with_empty(item, length=EMPTY, is_class=False, weights=None):
    """The sample with an empty caption of its own length; on request with a class caption and a mask."""
    tensors = replace(item.load(), weights=weights)
    empty = sample("", 1, 1, length).load()
    other = sample(f"the class of {item.name}", *item.grid[1:]).load()
    prompts = {
        "empty_prompt": Prompt(empty.text, empty.conditioning),
        "class_prompt": Prompt(other.text, other.conditioning) if is_class else None,
    }

    def load(choice=None):
        requests = {"empty_prompt": choice and choice.empty_caption, "class_prompt": choice and choice.class_caption}
        return replace(tensors, **{name: prompts[name] for name, is_wanted in requests.items() if is_wanted})

    return replace(item, class_caption=is_class, empty_length=length, load=load)


def data():
    """Three samples of one token count, one with a mask and one with a class caption."""
    masked = with_empty(sample("a", 4, 4), weights=torch.linspace(0, 1, 16))
    return training_data(masked, with_empty(sample("b", 2, 8), is_class=True), with_empty(sample("c", 8, 2)))


def with_variants(trainer, *indices):
    """A micro-batch as the trainer draws it."""
    classes = [trainer.context.data.samples[index].class_caption for index in indices]
    return [
        (index, SampleVariant(class_caption=is_class, empty_caption=True))
        for index, is_class in zip(indices, classes, strict=True)
    ]


def reference(trainer, tensors, micro_batches):
    """The loss and the gradients of a step in fp64, written out: the masked mean of
    (v(c) − (noise − x0 + (SCALE − 1)·(v0(c) − v0(∅))))², with v0 the model without the LoRA, and of a sample with a
    class caption WEIGHT times mean((v(class) − v0(class))²)."""
    settings, weights = trainer.settings, {name: t.double() for name, t in tensors.items()}
    lora, masters = tiny.reference_masters(trainer)
    total = torch.zeros((), dtype=torch.float64)
    for micro, indices in enumerate(micro_batches):
        for place, index in enumerate(indices):
            item = trainer.context.data.samples[index]
            read = item.load(SampleVariant(class_caption=True, empty_caption=True))
            row = ReferenceRow(settings, weights, item, read, micro, place)
            with torch.no_grad():
                difference = row.velocity(read, {}) - row.velocity(read.empty_prompt, {})
            error = row.velocity(read, lora) - (row.target + (SCALE - 1) * difference)
            counted = torch.ones(item.tokens) if read.weights is None else read.weights
            loss = (error.square().mean(dim=2)[0] * counted.double()).sum() / counted.double().sum()
            if read.class_prompt and settings.objective.preservation_weight:
                with torch.no_grad():
                    frozen = row.velocity(read.class_prompt, {})
                loss = loss + WEIGHT * (row.velocity(read.class_prompt, lora) - frozen).square().mean()
            total = total + loss / (len(indices) * len(micro_batches))
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in masters.items()}


MODES = {
    "eager": (None, MemoryOptions(checkpointing="none"), 0.0),
    "preserving": (None, MemoryOptions(checkpointing="none"), WEIGHT),
    "full, compiled, swapped": (
        "aot_eager",
        MemoryOptions(checkpointing="full", blocks_to_swap=2, offload_activations=True),
        WEIGHT,
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_the_fp64_reference(mode, tiny_files, tiny_flux, tmp_path):
    backend, memory, weight = MODES[mode]
    objective = replace(OBJECTIVE, preservation_weight=weight)
    settings = {"batch_size": 2, "gradient_accumulation": 2, "objective": objective, "memory": memory}
    trainer = tiny.make_trainer(tiny_flux, data(), tmp_path, backend=backend, **settings)
    tiny.fill_up_matrices(trainer)
    initial = {name: master.clone() for name, master in trainer.network.master_weights().items()}
    micro_batches = [(0, 1), (2, 0)]
    loss = trainer.train_step.forward_backward([with_variants(trainer, *indices) for indices in micro_batches])
    expected_loss, expected = reference(trainer, load_file(tiny_files["flux"]), micro_batches)
    assert abs(loss - expected_loss) < FP32 * expected_loss
    tiny.check_gradients(trainer, expected, FP32)
    after = trainer.network.master_weights()
    assert all(torch.equal(initial[name], after[name]) for name in initial)
    trainer.close()


@pytest.mark.parametrize(("length", "graphs"), [(EMPTY, 4), (16, 2)])
def test_the_graphs_of_the_empty_caption_are_planned_and_no_other_is_made(length, graphs, tiny_flux, tmp_path):
    torch._dynamo.reset()
    graph_count = Graphs()
    training_set = training_data(*(with_empty(sample(name, 4, 4), length) for name in "ab"))
    settings = {"batch_size": 2, "steps": 3, "memory": MemoryOptions(checkpointing="none"), "objective": OBJECTIVE}
    trainer = tiny.make_trainer(tiny_flux, training_set, tmp_path, backend="eager", **settings)
    trainer.run()
    assert graph_count() == trainer.placed.execution.runner.planned_graphs == graphs and graph_count.breaks == 0
    calls = sum(region.compiled_calls for region in trainer.placed.execution.runner.report.regions)
    assert calls == 3 * 3 * 4  # steps, forwards of each, blocks
    trainer.close()


@pytest.mark.parametrize("name", one_in(2, ["z-image", "sdxl"]))
def test_a_native_model_of_any_objective_runs_it_on_its_raw_output(name, tmp_path):
    """The target moves by what the frozen model's raw outputs, which plain forwards give, differ in."""
    row = BY_NAME[name]
    model = build(row)
    caption, other = sample_of(row, "a"), sample_of(row, "another", row.text[0] + 3)
    empty = other.load()
    read = replace(caption.load(), empty_prompt=Prompt(empty.text, empty.conditioning))
    item = replace(caption, empty_length=empty.text.shape[1], load=lambda *_: read)
    timestep_sampling = "uniform" if name == "sdxl" else "logit_normal"
    objective = ObjectiveOptions(guidance_loss_scale=SCALE, timestep_sampling=timestep_sampling)
    trainer = tiny.make_trainer(model, training_data(item), tmp_path, objective=objective)
    start = make_batch(
        trainer.context.patcher, trainer.context.family, [(item, read)], objective, trainer.device, 3, (0, 0)
    )
    plain = [trainer.placed.velocity(inputs, None).detach() for inputs in (start.inputs, start.unconditional)]
    tiny.fill_up_matrices(trainer)
    velocity = trainer.placed.velocity(start.inputs, (0, 0)).detach()
    target = start.target + (SCALE - 1) * (plain[0] - plain[1])
    (loss,) = trainer.train_step.losses(start, (0, 0))
    assert float(loss.detach()) == pytest.approx(float((velocity - target).square().mean()), rel=1e-4)
    assert float(loss.detach()) != pytest.approx(float((velocity - start.target).square().mean()), rel=1e-3)
    trainer.close()


def test_a_native_run_compiles_each_length_of_text_once_as_planned(tmp_path):
    row = BY_NAME["z-image"]
    torch._dynamo.reset()
    caption, other = sample_of(row, "a"), sample_of(row, "", row.text[0] + 3).load()
    read = replace(caption.load(), empty_prompt=Prompt(other.text, other.conditioning))
    data = training_data(replace(caption, empty_length=row.text[0] + 3, load=lambda *_: read))
    graph_count = Graphs()
    objective = ObjectiveOptions(guidance_loss_scale=SCALE)
    trainer = tiny.make_trainer(build(row), data, tmp_path, backend="eager", steps=2, objective=objective)
    planned, runner = trainer.placed.execution.runner.planned_graphs, trainer.placed.execution.runner
    assert runner.rules.graphs == 2 == len(data.graph_keys(empty=True)) and len(data.graph_keys()) == 1
    trainer.run()
    assert graph_count() <= planned == runner.planned_graphs and graph_count.breaks == 0 and not runner.failed
    trainer.close()


def test_a_resumed_run_learns_the_same_and_off_is_a_run_without(tiny_flux, tmp_path):
    options = {"objective": {"guidance_loss_scale": SCALE}, "network": {"rank": 4, "dropout": 0.2}}
    whole = train(tiny_flux, data(), tmp_path / "whole", **options)
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, data(), tmp_path / "cancelled", cancel_at(3), **options)
    resumed = train(tiny_flux, data(), tmp_path / "cancelled", **options)
    assert whole.loss == resumed.loss
    assert all(torch.equal(whole.lora[name], resumed.lora[name]) for name in whole.lora)
    plain = train(tiny_flux, data(), tmp_path / "off", **options | {"objective": {}})
    assert plain.loss != whole.loss
    keys = {
        scale: run_settings(objective={"guidance_loss_scale": scale}).lineage("data", "model")
        for scale in (0.0, 1.0, SCALE)
    }
    assert keys[0.0] == keys[1.0] == run_settings().lineage("data", "model") != keys[SCALE]


def test_validation_measures_the_plain_loss(tiny_flux, tmp_path):
    validation = {"every_n_steps": 2, "at_start": True, "part": 0.34}
    points = [
        train(tiny_flux, data(), tmp_path / str(scale), steps=2, validation=dict(validation), objective=objective)
        for scale, objective in (("off", {}), ("on", {"guidance_loss_scale": SCALE}))
    ]
    plain, guided = (result.validation for result in points)
    assert plain[0]["loss"] == guided[0]["loss"] and plain[-1]["loss"] != guided[-1]["loss"]


def test_missing_parts_of_guidance_loss_are_refused_and_its_cost_is_told(tiny_flux, tmp_path):
    plain = training_data(sample("a", 4, 4), with_empty(sample("b", 4, 4)))
    message = "guidance_loss_scale is 1.75 and there is no empty caption for a; switch encode_empty_caption on in Prep"
    with pytest.raises(ValueError, match=message):
        train(tiny_flux, plain, tmp_path, objective={"guidance_loss_scale": SCALE})
    for wrong in (-1.0, 0.5, 101.0):
        with pytest.raises(ValueError, match=f"guidance_loss_scale is {wrong}; set it to 0 .off., or above 1 and up"):
            ObjectiveOptions(guidance_loss_scale=wrong)
    samples = data().samples
    costs, embedded = check_guidance_loss(replace(OBJECTIVE, guidance=1.0), samples, "FLUX.1", True)
    assert "runs the model without the LoRA twice more per step" in costs and "experimental" in costs
    assert embedded.startswith("FLUX.1 trains with guidance 1, at which its output has no guidance")
    assert len(check_guidance_loss(OBJECTIVE, samples, "FLUX.1", True)) == 1
    assert check_guidance_loss(ObjectiveOptions(), samples, "FLUX.1", True) == ()
    narrow = latents_to_data([{"samples": torch.randn(1, 16, 8, 8)}], [[[torch.randn(1, 20, 64), {}]]], 1)
    narrow = with_empty_caption(narrow, [[torch.randn(1, 7, 48), {}]])
    with pytest.raises(ValueError, match="empty has text of width 48 but the model takes 64; encode the empty caption"):
        train(tiny_flux, narrow, tmp_path, objective={"guidance_loss_scale": SCALE})
    with pytest.raises(ValueError, match="guidance_loss_scale is 1.75 and training_adapter is undo, which removes"):
        check_guidance_loss(OBJECTIVE, samples, "FLUX.1", True, "undo")
    watcher = Watcher()
    train(tiny_flux, data(), tmp_path, watcher, steps=1, objective={"guidance_loss_scale": SCALE})
    assert costs in watcher.notes


def test_latents_take_the_empty_caption_of_core_with_what_comes_from_their_own_pictures():
    latent = {"samples": torch.randn(1, 16, 8, 8)}
    reference_latent = torch.randn(1, 16, 8, 8)
    caption = [torch.randn(1, 20, 64), {"pooled_output": torch.randn(1, 32), "attention_mask": torch.ones(1, 20)}]
    caption[1] |= {"reference_latents": [reference_latent], "frame_rate": 24.0}
    with torch.inference_mode():  # a node for edit models puts the reference that it is given on the empty one too
        empty = [torch.randn(1, 7, 64), {"pooled_output": torch.randn(1, 32), "reference_latents": [latent["samples"]]}]
    plain = latents_to_data([latent], [[caption]], 1)
    result = with_empty_caption(plain, [empty])
    (item,) = result.samples
    assert item.empty_length == 7 and item.load().empty_prompt is None
    read = item.load(SampleVariant(empty_caption=True))
    assert torch.equal(read.text, caption[0]) and torch.equal(read.empty_prompt.text, empty[0])
    assert not read.empty_prompt.text.is_inference()
    conditioning = read.empty_prompt.conditioning
    assert conditioning.keys() == {"pooled_output", "reference_latents", "frame_rate"}
    assert torch.equal(conditioning["pooled_output"], empty[1]["pooled_output"])
    assert torch.equal(conditioning["reference_latents"][0], read.conditioning["reference_latents"][0])
    assert result.fingerprint != plain.fingerprint
    with pytest.raises(ValueError, match="empty has 2 conditionings; connect one CLIP Text Encode without text"):
        with_empty_caption(plain, [empty, empty])
    with pytest.raises(ValueError, match=r"empty has the shape \(2, 7, 64\); it must be \(1, tokens, width\)"):
        with_empty_caption(plain, [[torch.zeros(2, 7, 64), {}]])
