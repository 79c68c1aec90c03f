"""Differential output preservation: its gradients against an fp64 reference, its graphs, its draws, its refusals."""

from dataclasses import replace

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import load_file
from tessera.data.samples import Prompt, SampleVariant
from tessera.lora.options import NetworkOptions
from tessera.models.adapters.registry import ADAPTERS
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.train.reference_row import ReferenceRow
from tiny.train.runs import Watcher, cancel_at, sample, train, training_data

WEIGHT = 0.7
OBJECTIVE = ObjectiveOptions(preservation_weight=WEIGHT)
FP32 = 1e-4


def with_class(item):
    """The sample with a class caption, whose numbers are a function of its name."""
    tensors, class_tensors = item.load(), sample(f"the class of {item.name}", *item.grid[1:]).load()
    both_prompts = replace(tensors, class_prompt=Prompt(class_tensors.text, class_tensors.conditioning))
    return replace(
        item, class_caption=True, load=lambda choice=None: both_prompts if choice and choice.class_caption else tensors
    )


def data():
    """Two samples with class captions and one without, of one token count."""
    return training_data(with_class(sample("a", 4, 4)), sample("b", 2, 8), with_class(sample("c", 8, 2)))


def with_classes(trainer, *indices):
    """A micro-batch as the trainer draws it."""
    samples = trainer.context.data.samples
    return [(index, SampleVariant(class_caption=samples[index].class_caption)) for index in indices]


def reference(trainer, tensors, indices):
    """The loss and the gradients of a batch in fp64, written out: mean((v − (noise − x0))²) of each sample, and of
    those with a class caption WEIGHT times mean((v_class − v_class without the LoRA)²)."""
    settings, weights = trainer.settings, {name: t.double() for name, t in tensors.items()}
    lora, masters = tiny.reference_masters(trainer)
    total = torch.zeros((), dtype=torch.float64)
    for place, index in enumerate(indices):
        item = trainer.context.data.samples[index]
        read = item.load(SampleVariant(class_caption=True))
        row = ReferenceRow(settings, weights, item, read, 0, place)
        total = total + (row.velocity(read, lora) - row.target).square().mean()
        if read.class_prompt:
            with torch.no_grad():
                frozen = row.velocity(read.class_prompt, {})
            total = total + WEIGHT * (row.velocity(read.class_prompt, lora) - frozen).square().mean()
    (total / len(indices)).backward()
    return float(total.detach()) / len(indices), {name: p.grad for name, p in masters.items()}


MODES = {
    "eager": (None, MemoryOptions(checkpointing="none")),
    "compiled": ("aot_eager", MemoryOptions(checkpointing="none")),
    "swapped": ("aot_eager", MemoryOptions(checkpointing="none", blocks_to_swap=3)),
    "full": (None, MemoryOptions(checkpointing="full", blocks_to_swap=2, offload_activations=True)),
    "full, compiled": ("aot_eager", MemoryOptions(checkpointing="full", blocks_to_swap=2, offload_activations=True)),
    "selective": (None, MemoryOptions(checkpointing="selective")),
}


@pytest.mark.parametrize("mode", one_in(3, ("eager", "compiled", "selective", "swapped", "full, compiled", "full")))
def test_gradients_equal_the_fp64_reference(mode, tiny_files, tiny_flux, tmp_path):
    backend, memory = MODES[mode]
    settings = {"batch_size": 2, "objective": OBJECTIVE, "memory": memory}
    trainer = tiny.make_trainer(tiny_flux, data(), tmp_path, backend=backend, **settings)
    tiny.fill_up_matrices(trainer)
    initial = {name: master.clone() for name, master in trainer.network.master_weights().items()}
    loss = trainer.train_step.forward_backward([with_classes(trainer, 0, 1)])
    assert 0 < trainer.summary()["preservation_loss"] < loss
    expected_loss, expected = reference(trainer, load_file(tiny_files["flux"]), (0, 1))
    assert abs(loss - expected_loss) < FP32 * expected_loss
    tiny.check_gradients(trainer, expected, FP32)
    after = trainer.network.master_weights()
    assert all(torch.equal(initial[name], after[name]) for name in initial)
    trainer.close()


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 3), ("full", 5)])
def test_preservation_adds_no_graph(checkpointing, passes, tiny_flux, tmp_path):
    """passes: two forwards and the frozen one, and with checkpointing the two that are computed again."""
    torch._dynamo.reset()
    graphs = Graphs()
    memory, network = MemoryOptions(checkpointing=checkpointing), NetworkOptions(rank=2, alpha=2.0, dropout=0.2)
    settings = {"batch_size": 2, "steps": 3, "memory": memory, "network": network, "objective": OBJECTIVE}
    trainer = tiny.make_trainer(tiny_flux, data(), tmp_path, backend="aot_eager", **settings)
    trainer.run()
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 2
    assert graphs.breaks == 0
    calls = sum(region.compiled_calls for region in trainer.placed.execution.runner.report.regions)
    assert calls == 3 * passes * 4  # every batch of two has a class caption, and there are four blocks
    trainer.close()


@pytest.mark.parametrize("algorithm", [*sorted(ADAPTERS), "pissa"])
def test_switched_off_the_model_is_as_it_came_and_what_is_trained_comes_back(algorithm, tiny_flux, tmp_path):
    kind = {"init": "pissa"} if algorithm == "pissa" else {"algorithm": algorithm}
    network = NetworkOptions(rank=4, alpha=4.0, **kind)
    trainer = tiny.make_trainer(tiny_flux, data(), tmp_path, network=network, objective=OBJECTIVE)
    inputs = batch_of(trainer).inputs
    start = trainer.placed.velocity(inputs, None).detach()
    with torch.no_grad():
        for index, p in enumerate(trainer.network.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))
    trained, masters = trainer.placed.velocity(inputs, None).detach(), trainer.network.master_weights()
    initial = {name: master.clone() for name, master in masters.items()}
    frozen = trainer.placed.velocity_without(inputs)
    assert not frozen.requires_grad
    torch.testing.assert_close(frozen, start, rtol=1e-5, atol=1e-6)
    assert (trained - start).abs().max() > 1e-3
    assert all(torch.equal(masters[name], initial[name]) for name in initial)

    def interrupt(*_):
        raise InterruptProcessingException

    trainer.placed.weights.transformer.forward = interrupt
    with pytest.raises(InterruptProcessingException):
        trainer.placed.velocity_without(inputs)
    assert all(torch.equal(masters[name], initial[name]) for name in initial)
    trainer.close()


def batch_of(trainer):
    from tessera.train.objective.batch import make_batch

    item = trainer.context.data.samples[0]
    options, read = trainer.settings.objective, item.load(SampleVariant(class_caption=True))
    return make_batch(
        trainer.context.patcher, trainer.context.family, [(item, read)], options, trainer.device, 3, (0, 0)
    )


def test_a_resumed_run_learns_the_same_and_a_weight_of_0_is_a_run_without(tiny_flux, tmp_path):
    options = {"objective": {"preservation_weight": 1.0}, "batch_size": 2, "network": {"rank": 4, "dropout": 0.2}}
    whole = train(tiny_flux, data(), tmp_path / "whole", **options)
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, data(), tmp_path / "cancelled", cancel_at(3), **options)
    resumed = train(tiny_flux, data(), tmp_path / "cancelled", **options)
    assert whole.loss == resumed.loss
    assert all(torch.equal(whole.lora[name], resumed.lora[name]) for name in whole.lora)
    disabled = train(tiny_flux, data(), tmp_path / "off", **options | {"objective": {}})
    plain = [sample("a", 4, 4), sample("b", 2, 8), sample("c", 8, 2)]
    plain_run = train(tiny_flux, training_data(*plain), tmp_path / "none", **options | {"objective": {}})
    assert disabled.loss == plain_run.loss != whole.loss


def test_preservation_holds_the_class(tiny_flux, tmp_path):
    """After the same steps the class caption's output has moved much less, while the loss has fallen."""
    distances = {}
    for weight in (0.0, 5.0):
        objective = ObjectiveOptions(preservation_weight=weight)
        class_data = training_data(with_class(sample("a", 4, 4)))
        trainer = tiny.make_trainer(
            tiny_flux,
            class_data,
            tmp_path / str(weight),
            steps=12,
            objective=objective,
            optimizer=OptimizerOptions(learning_rate=5e-3),
        )
        inputs = batch_of(trainer).preserved.inputs
        start = trainer.placed.velocity(inputs, None).detach()
        trainer.run()
        distances[weight] = float((trainer.placed.velocity(inputs, None).detach() - start).square().mean())
        trainer.close()
    assert distances[5.0] < 0.5 * distances[0.0]


def test_preservation_that_is_impossible_is_refused_or_told(tiny_flux, tmp_path):
    plain = training_data(sample("a", 4, 4))
    with pytest.raises(ValueError, match="preservation_weight is 1 and no caption has a class word .*; set class_word"):
        train(tiny_flux, plain, tmp_path, objective={"preservation_weight": 1.0})
    with pytest.raises(ValueError, match="preservation_weight is -1.0; set it between 0.0 and 100.0"):
        ObjectiveOptions(preservation_weight=-1.0)
    watcher = Watcher()
    train(tiny_flux, data(), tmp_path, watcher, steps=1, objective={"preservation_weight": 1.0})
    assert [note for note in watcher.notes if "so they preserve nothing: b" in note]


def test_clip_with_a_clean_frame_is_held_but_for_that_frame_whatever_its_mask(tmp_path):
    """Wan 2.2 5B is given its first frame, where no sampler reads its output; a mask is for the loss alone."""
    model = tiny.load_wan(tiny.write_wan(tmp_path / "wan.safetensors", variant="2.2-5b"))
    clip = tiny.wan_sample("a", (3, 4, 2), "2.2-5b", clean_frames=1)
    read, other = clip.load(), tiny.wan_sample("class", (3, 4, 2), "2.2-5b").load()
    masked = replace(read, weights=torch.rand(24), class_prompt=Prompt(other.text, other.conditioning))
    clip = replace(clip, class_caption=True, load=lambda *_: masked)
    trainer = tiny.make_trainer(model, training_data(clip), tmp_path, objective=OBJECTIVE)
    tiny.fill_up_matrices(trainer)
    batch = batch_of(trainer)
    assert batch.preserved.weights.tolist() == [[0.0] * 8 + [1.0] * 16]
    assert batch.weights[0, 8:].tolist() == masked.weights[8:].tolist()
    assert torch.equal(batch.preserved.inputs.tokens, batch.inputs.tokens)
    assert not torch.equal(batch.preserved.inputs.text, batch.inputs.text)
    frozen = trainer.placed.velocity_without(batch.preserved.inputs)
    velocity = trainer.placed.velocity(batch.preserved.inputs, (0, 0)).detach()
    distance = (velocity - frozen)[:, 8:].double().square().mean()
    _, preservation = (float(loss.detach()) for loss in trainer.train_step.losses(batch, (0, 0)))
    assert preservation == pytest.approx(WEIGHT * float(distance), rel=1e-5) and preservation > 0
    trainer.close()
