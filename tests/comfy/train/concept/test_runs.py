"""Runs of sliders and erasures: the same bits after a resume, no graph more than planned, and what they refuse."""

from dataclasses import replace

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from tessera.data.concepts.picture_pairs import pair_pictures
from tessera.data.concepts.prompt_data import with_concept
from tessera.data.samples import FIRST_VARIANT
from tessera.lora.negation import negated
from tessera.lora.options import NetworkOptions
from tessera.models.adapters.registry import algorithms_with
from tessera.models.wan.text import WanText
from tessera.train.config.settings import MemoryOptions
from tessera.train.train_lora import RunRequest, train_lora
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.data.other_encoders import load_z_image_clip
from tiny.lora.lora_files import patched_deltas
from tiny.native import ROWS, build, data_of
from tiny.train.concepts import concept_data, erasure_data, erasure_of, picture_data, slider_data, slider_of
from tiny.train.learning import with_lora
from tiny.train.ranks import STEP, assert_close, assert_equal, errors_of
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import (
    Watcher,
    masked_data,
    mixed_data,
    planned_experts,
    run_settings,
    sample,
    train,
    training_data,
)

Z_IMAGE = next(row for row in ROWS if row.name == "z-image")


def z_image_data(folder, concept):
    clip = load_z_image_clip(Z_IMAGE.text[1])
    return with_concept(data_of(Z_IMAGE), concept, clip, folder, lambda *_: None, lambda: None)


def with_regularisation():
    """Pictures of an erasure, and two that the model keeps with captions of their own."""
    regularisation = [replace(sample(f"kept {i}", 4, 4), regularisation=True) for i in range(2)]
    return concept_data(erasure_of(), training_data(sample("a", 4, 4), sample("b", 2, 8), *regularisation))


CASES = {
    "slider with masks, an average and dropout": (
        lambda: concept_data(slider_of(keep="a dog"), masked_data()),
        {"optimizer": {"ema_decay": 0.5}, "network": {"dropout": 0.3, "module_dropout": 0.2}, "batch_size": 2},
    ),
    "erasure with regularisation, in int8": (
        with_regularisation,
        {
            "gradient_accumulation": 2,
            "memory": {"quantize": "int8", "low_bit_matmul": "int8", "checkpointing": "selective"},
        },
    ),
    "pictures with lokr and swap": (
        picture_data,
        {"network": {"algorithm": "lokr"}, "memory": {"blocks_to_swap": 3, "checkpointing": "full"}, "batch_size": 2},
    ),
    "slider with loha and huber": (
        lambda: concept_data(slider_of(attributes="male\nfemale"), mixed_data()),
        {"network": {"algorithm": "loha"}, "objective": {"loss": "huber", "stratified": "epoch"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_same_bits(case, tiny_flux, tmp_path):
    make, changes = CASES[case]
    resumed_as_whole(tiny_flux, make(), tmp_path, **changes)


def test_a_resumed_run_on_comfyuis_own_forward_has_the_same_bits(tmp_path):
    data = z_image_data(tmp_path / "cache", slider_of(positive="a very old person"))
    resumed_as_whole(build(Z_IMAGE), data, tmp_path, memory={"checkpointing": "full"})


def test_a_run_that_plans_its_memory_and_proves_itself_first_trains_a_slider(tmp_path):
    data, watcher = z_image_data(tmp_path / "cache", slider_of()), Watcher()
    memory = {"checkpointing": "auto", "blocks_to_swap": -1, "verify": "on"}
    result = train(build(Z_IMAGE), data, tmp_path, watcher, steps=2, memory=memory)
    assert len(result.loss) == 2 and result.summary["memory_plan"]
    assert any("gradients within" in note for note in watcher.notes), watcher.notes


KINDS = {
    "slider": lambda: concept_data(slider_of(attributes="male\nfemale", keep="a dog"), mixed_data()),
    "prompts of two lengths": lambda: concept_data(slider_of(), mixed_data(), {"an old person": 300}),
    "erasure": lambda: concept_data(erasure_of(), mixed_data()),
    "pictures": picture_data,
}


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_those_planned_for_all_aspect_ratios_and_prompts(kind, tiny_flux, tmp_path):
    torch._dynamo.reset()
    graphs, data = Graphs(), KINDS[kind]()
    memory = MemoryOptions(checkpointing="full", blocks_to_swap=2)
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=6, memory=memory)
    trainer.run()
    tokens = {item.tokens for item in data.samples}
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 2 * len(tokens) and graphs.breaks == 0
    trainer.close()


def test_comfyuis_own_forward_compiles_each_length_of_prompt_once_as_planned(tmp_path):
    torch._dynamo.reset()
    concept = slider_of(positive="a very very old person", keep="a dog and a cat")
    data = z_image_data(tmp_path / "cache", concept)
    lengths = {
        target.prompt.text.shape[1]
        for number in range(2)
        for target in data.samples[0].load(replace(FIRST_VARIANT, caption=number)).targets
    }
    graphs = Graphs()
    trainer = tiny.make_trainer(build(Z_IMAGE), data, tmp_path, backend="eager", steps=6)
    runner = trainer.placed.execution.runner
    assert len(lengths) > 1 and runner.rules.graphs == len(data.graph_keys()) == len(lengths)
    trainer.run()
    assert graphs() <= runner.planned_graphs and graphs.breaks == 0 and not runner.failed
    trainer.close()


def move_all(trainer):
    """Move every weight of the LoRA off its start."""
    with torch.no_grad():
        for index, p in enumerate(trainer.network.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", algorithms_with("odd_in"))
def test_a_negated_adapter_is_its_file_at_strength_minus_one(algorithm, dtype, tiny_files, tmp_path):
    """Forward by ComfyUI's patched weights, backward by the gradient at the negated factor, bit for bit."""
    model = tiny.load_flux(tiny_files["flux"], dtype)
    network = NetworkOptions(rank=4, alpha=4.0, algorithm=algorithm)
    trainer = tiny.make_trainer(model, slider_data(), tmp_path, network=network)
    move_all(trainer)
    inputs = trainer.train_step.batches.make(tiny.micro_batch(0), (0, 0)).inputs

    def gradients():
        trainer.learner.zero_grad()
        trainer.learner.backward(trainer.placed.velocity(inputs, (0, 0)).float().square().sum())

    initial = {name: p.clone() for name, p in trainer.network.master_weights().items()}
    plain = patched_deltas(model, with_lora(model, RunLora(trainer.network.snapshot())))
    with negated(trainer.network):
        negative = patched_deltas(model, with_lora(model, RunLora(trainer.network.snapshot())))
        gradients()
    actual = {name: p.grad.clone() for name, p in named_parameters(trainer)}
    after = trainer.network.master_weights()
    assert all(torch.equal(initial[name], after[name]) for name in initial)
    assert plain and all(torch.allclose(negative[name], -plain[name], atol=2e-3) for name in plain)
    with torch.no_grad():
        for adapter in trainer.network.adapters.values():
            adapter.get_parameter(adapter.odd_in).neg_()
    gradients()
    for name, p in named_parameters(trainer):
        adapter = trainer.network.adapters[name.rpartition(".")[0]]
        expected = -p.grad if name.endswith(f".{adapter.odd_in}") else p.grad
        assert torch.equal(actual[name], expected), name
    trainer.close()


class RunLora:
    """A LoRA in the place of a run's result."""

    def __init__(self, lora):
        self.lora = lora


def named_parameters(trainer):
    return [
        (f"{name}.{key}", p)
        for name, adapter in trainer.network.adapters.items()
        for key, p in adapter.named_parameters()
    ]


def test_an_error_in_the_negated_pass_leaves_the_adapter_as_it_was(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, slider_data(), tmp_path)
    move_all(trainer)
    initial = {name: p.clone() for name, p in trainer.network.master_weights().items()}
    backward, calls = trainer.learner.backward, []

    def failing(loss):
        calls.append(loss)
        if len(calls) == 2:
            raise InterruptProcessingException
        backward(loss)

    trainer.learner.backward = failing
    with pytest.raises(InterruptProcessingException) as interruption:
        trainer.train_step.forward_backward([tiny.micro_batch(0)])
    after = trainer.network.master_weights()
    assert interruption.tb is not None  # its frames hold the step
    assert len(calls) == 2 and all(torch.equal(initial[name], after[name]) for name in initial)
    trainer.close()


@pytest.mark.parametrize("name", one_in(2, ["slider_data", "picture_data", "erasure_data"]))
def test_several_processes_train_the_same_lora(name, ranks, tiny_flux, tmp_path):
    make = {"slider_data": slider_data, "picture_data": picture_data, "erasure_data": erasure_data}[name]
    alone = train(tiny_flux, make(), tmp_path / "1", **STEP)
    for size in (2, 3):
        answers = ranks.train(size, tmp_path / str(size), STEP, data=name, data_from="tiny.train.concepts")
        assert not any(errors_of(answers)), answers
        assert answers[0]["loss"] == pytest.approx(alone.loss, rel=1e-5)
        assert_close(ranks.lora(), dict(alone.lora))
        assert_equal(ranks.lora(1), ranks.lora())


def test_two_experts_share_a_slider(tmp_path):
    files = [str(tiny.write_wan(tmp_path / f"{seed}.safetensors", layers=1, seed=seed)) for seed in (1, 2)]
    experts, clips = planned_experts(files, run_settings(steps=2, output_name="film"))
    data = concept_data(slider_of(), clips, policy=WanText())
    for expert in experts:
        result = train_lora(RunRequest(expert.model, data, expert.settings, tmp_path / "runs", Watcher()))
        assert len(result.loss) == 2 and all(loss > 0 for loss in result.loss)


def test_a_concept_says_what_it_costs_and_refuses_what_does_not_go_with_it(tiny_flux, tmp_path):
    watcher = Watcher()
    train(tiny_flux, slider_data(), tmp_path, watcher, steps=1)
    assert "A slider runs the model three times without the LoRA and twice with it per step." in watcher.notes
    wrong = [
        ({"objective": {"preservation_weight": 1.0}}, "preservation_weight is 1 and data is for a slider, which has a"),
        ({"objective": {"guidance_loss_scale": 1.5}}, "guidance_loss_scale is 1.5 and data is for a slider, which has"),
        ({"validation": {"part": 0.3}}, "validation measures how well pictures are learnt and data is for a slider"),
        ({"network": {"algorithm": "dora"}}, "algorithm is dora, whose change does not turn with its strength"),
        ({"network": {"init": "pissa"}}, "algorithm is lora with init pissa, whose change does not turn with its"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            train(tiny_flux, slider_data(), tmp_path, **changes)
    assert algorithms_with("odd_in") == ["lora", "loha", "lokr"]
    train(tiny_flux, erasure_data(), tmp_path, steps=1, network={"algorithm": "dora"})  # no sign to turn
    plain = training_data(sample("a", 4, 4))
    settings = run_settings()
    keys = {settings.lineage(data.fingerprint, "model") for data in (plain, slider_data(), erasure_data())}
    stronger = concept_data(slider_of(guidance_scale=3.0)), concept_data(slider_of(guidance_scale=2.0))
    assert len(keys) == 3 and stronger[0].fingerprint != stronger[1].fingerprint


def test_pictures_that_make_no_pair_are_named():
    pair = training_data(sample("old/a.png", 4, 4), sample("old/b.png", 2, 8))
    with pytest.raises(ValueError, match="no partner of the same name in the other folder: old/b.png, old/c.jpg; give"):
        pair_pictures(pair, training_data(sample("old/a.jpg", 4, 4), sample("old/c.jpg", 2, 8)))
    with pytest.raises(ValueError, match="cut to another size than their partners: old/b.png; give both"):
        pair_pictures(pair, training_data(sample("old/a.jpg", 4, 4), sample("old/b.jpg", 8, 2)))
    regularisation = training_data(sample("old/a.png", 4, 4), replace(sample("k", 4, 4), regularisation=True))
    with pytest.raises(ValueError, match="A slider from pictures takes no regularisation pictures, such as k; leave"):
        pair_pictures(regularisation, pair)
    with pytest.raises(
        ValueError, match="data is for a slider from pictures already; connect the data of Prepare Dataset."
    ):
        pair_pictures(picture_data(), picture_data())
    with pytest.raises(ValueError, match="positive was prepared for FLUX.1 and negative for Wan; prepare both"):
        pair_pictures(replace(pair, family="FLUX.1"), replace(pair, family="Wan"))


def test_conditioning_of_a_picture_stays_beside_each_prompt():
    plain = sample("a", 4, 4)
    entries = {"guidance": 3.5, "reference_latents": [torch.randn(1, 16, 8, 8)]}
    caption = {**plain.load().conditioning, "attention_mask": torch.ones(1, 16)}
    read = replace(plain.load(), conditioning=caption | entries)
    item = replace(plain, conditioning=frozenset(read.conditioning), load=lambda *_: read)
    (prompted,) = concept_data(slider_of(), training_data(item)).samples
    tensors = prompted.load()
    assert {"guidance", "reference_latents", "pooled_output"} <= prompted.conditioning
    for conditioning in (tensors.conditioning, *(target.prompt.conditioning for target in tensors.targets)):
        assert conditioning.keys() == {"guidance", "reference_latents", "pooled_output"}
        assert conditioning["reference_latents"] is entries["reference_latents"] and conditioning["guidance"] == 3.5
