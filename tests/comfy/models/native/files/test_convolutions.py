"""LoRA on the convolutions of U-Nets: gradients, files, warm starts, and what is refused."""

import json
from typing import Any

import pytest
import torch
from tessera.data.samples import FIRST_VARIANT
from tessera.lora.files.formats import FORMATS, convert, save_lora
from tessera.lora.files.lora_model import MODULES
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import choose_targets, describe_network
from tessera.lora.source import LoraSource
from tessera.lora.warm_start import read_warm_start
from tessera.models.adapters.base import DropMask
from tessera.models.catalogue.registry import family_of
from tessera.models.convolutions import convolutions, layer_shapes, weight_shapes
from tessera.models.native.forward.blocks import flatten
from tessera.train.checkpoint.metadata import collect_facts, metadata_for
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.batch import make_batch
from tiny.lora.lora_files import loaded_in_comfyui, patched_deltas
from tiny.native import ROWS, build, data_of
from tiny.native.reference import plain_model, raw_output, tokens, training
from tiny.train.reference_gradients import gradient, lora_gradients
from tiny.train.training import fill_up_matrices, make_trainer, micro_batch
from torch import Tensor

BY_NAME = {row.name: row for row in ROWS}
# The first and the last convolution, those of residual blocks, their shortcuts, down- and upsampling, and proj_in
# and proj_out, which are Linears in SDXL.
PATTERNS = (
    "input_blocks.0.0",
    "out.2",
    "*.in_layers.2",
    "*.out_layers.3",
    "*.skip_connection",
    "*.op",
    "*.conv",
    "*.proj_in",
    "*.proj_out",
    "*.attn1.to_q",
)
SIDES = "down", "up"


def network(**changes: Any) -> NetworkOptions:
    return NetworkOptions(**{"rank": 4, "alpha": 8.0, "include": PATTERNS} | changes)


def trainer_of(name: str, folder: Any, mode: str = "none", **changes: Any) -> Any:
    row = BY_NAME[name]
    settings = {"memory": MemoryOptions(checkpointing=mode, blocks_to_swap=changes.pop("blocks_to_swap", 0))}
    return make_trainer(build(row), data_of(row), folder, **settings | {"network": network(), "steps": 2} | changes)


def first_batch(trainer: Any) -> Any:
    sample, settings = trainer.context.data.samples[0], trainer.settings
    pairs = [(sample, sample.load(FIRST_VARIANT))]
    return make_batch(
        trainer.context.patcher,
        trainer.context.family,
        pairs,
        settings.objective,
        trainer.device,
        settings.seed,
        (0, 0),
        trainer.train_step.batches.strata,
    )


def written_out(name: str, trainer: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss of the first sample and the LoRA's gradients, by autograd over core's forward with W + s·up·down in
    place of each weight."""
    row = BY_NAME[name]
    sample = trainer.context.data.samples[0]
    settings = trainer.settings
    pairs = [(sample, sample.load(FIRST_VARIANT))]
    batch = make_batch(
        trainer.context.patcher,
        trainer.context.family,
        pairs,
        settings.objective,
        trainer.device,
        settings.seed,
        (0, 0),
        trainer.train_step.batches.strata,
    )
    (group,) = batch.inputs.groups
    model = plain_model(build(row))
    masters, scale = {}, settings.network.alpha / settings.network.rank
    for layer, pair in trainer.network.pairs.items():
        down, up = masters[layer] = [p.detach().clone().requires_grad_() for p in pair]
        module = model.diffusion_model.get_submodule(layer)
        weight = module._parameters.pop("weight")
        module.weight = weight + scale * (up @ down).view(weight.shape)
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), training():
        out = raw_output(model, row, sample, group.x[0].clone(), group.sigma, None)
        loss = (tokens(out[0], sample.tokens) - batch.target[0]).square().mean()
        loss.backward()
    gradients = {f"{n}.{side}": gradient(p) for n, pair in masters.items() for side, p in zip(SIDES, pair, strict=True)}
    return float(loss.detach()), gradients


def check_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((actual[name] - value).norm()) <= 3e-3 * max(float(value.norm()), 1e-4 * largest), name


@pytest.mark.parametrize("name", ["sdxl", "sd1.5"])
def test_convolutions_have_the_gradients_of_the_merged_weight(name, tmp_path):
    expected = None
    for mode, swapped in (("none", 0), ("full", 2)):
        trainer = trainer_of(name, tmp_path / mode, mode, blocks_to_swap=swapped)
        convs = convolutions(trainer.context.patcher.model.diffusion_model)
        assert convs.keys() <= trainer.network.adapters.keys()
        fill_up_matrices(trainer)
        expected = expected or written_out(name, trainer)
        loss = trainer.train_step.forward_backward([micro_batch(0)])
        assert abs(loss - expected[0]) <= 1e-4 * expected[0]
        check_gradients(lora_gradients(trainer), expected[1])
        trainer.close()


def test_a_residual_block_with_its_convolutions_is_one_graph(tmp_path):
    torch._dynamo.reset()
    trainer = trainer_of("sd1.5", tmp_path)
    fill_up_matrices(trainer)
    block = next(block for _, block in trainer.placed.weights.transformer.blocks() if block.kind == "ResBlock")
    adapters = [layer.adapter for name, layer in block.linears().items() if name.endswith("_layers.2")]
    assert len(adapters) == 1
    tensors, call = flatten((torch.randn(1, 32, 8, 12), torch.randn(1, 128)), {}, 1)
    mask = DropMask((torch.rand(1, 96, 4) > 0.5).float())
    results = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        out = run(*tensors, call, {"in_layers.2": mask})
        results.append([out, *torch.autograd.grad(out.square().sum(), list(adapters[0].parameters()))])
    for result, other in zip(*results, strict=True):
        assert float((result - other).detach().norm()) <= 1e-5 * float(result.detach().norm())
    unmasked = block(*tensors, call, {})
    assert float((unmasked - results[0][0]).detach().norm()) >= 1e-3 * float(unmasked.detach().norm())  # the mask drops
    trainer.close()
    torch._dynamo.reset()


def test_a_warm_start_keeps_the_update_at_its_rank_and_the_best_of_it_below(tmp_path):
    trainer = trainer_of("sd1.5", tmp_path / "first")
    fill_up_matrices(trainer)
    lora = trainer.network.snapshot()
    lora.metadata[MODULES] = trainer.context.family.names.recorded()
    trainer.close()
    save_lora(tmp_path / "a.safetensors", lora, "kohya")
    source = LoraSource.from_file(tmp_path / "a.safetensors", "start_from")
    for rank in (4, 6, 2):
        options = network(rank=rank, alpha=2.0 * rank, start_from=source)
        trainer = trainer_of("sd1.5", tmp_path / str(rank), network=options)
        start, notes = read_warm_start(
            options, trainer.context.family, trainer.context.patcher.model, list(trainer.network.adapters)
        )
        assert start is not None and notes == [] and not start.dense
        warnings = trainer.apply_warm_start(start)
        assert bool(warnings) == (rank == 2)
        for name, adapter in trainer.network.adapters.items():
            module = lora.modules()[name]
            expected = 2.0 * module.up.flatten(1) @ module.down.flatten(1)
            left, sizes, right = torch.linalg.svd(expected)
            best = left[:, :rank] * sizes[:rank] @ right[:rank] if rank < 4 else expected
            actual = (adapter.scale * adapter.up @ adapter.down).detach()
            assert float((actual - best).norm()) <= 1e-4 * float(expected.norm()), name
        trainer.close()


@pytest.mark.parametrize("name", ["sdxl", "sd1.5"])
def test_core_loads_the_file_in_each_format_and_its_forward_is_the_trainer_s(name, tmp_path, caplog):
    trainer, row = trainer_of(name, tmp_path), BY_NAME[name]
    fill_up_matrices(trainer)
    batch, sample = first_batch(trainer), trainer.context.data.samples[0]
    with torch.no_grad():
        expected = trainer.placed.velocity(batch.inputs, (0, 0))[0]
    lora = trainer.network.snapshot()
    lora.metadata[MODULES] = trainer.context.family.names.recorded()
    (group,), names = batch.inputs.groups, set(trainer.network.adapters)
    for layout in FORMATS:
        tensors = convert(lora, layout)
        model = build(row)
        patched = loaded_in_comfyui(model, tensors, caplog)
        deltas = patched_deltas(model, patched)
        assert deltas.keys() == names
        merged = plain_model(build(row))
        for layer, delta in deltas.items():
            merged.diffusion_model.get_submodule(layer).weight.data += delta.float()
        with torch.no_grad():
            actual = raw_output(merged, row, sample, group.x[0].clone(), group.sigma, None)[0]
        assert float((tokens(actual, sample.tokens) - expected).norm()) <= 1e-4 * float(expected.norm())
    kohya = convert(lora, "kohya")
    key = {"sdxl": "input_blocks_1_0_in_layers_2", "sd1.5": "down_blocks_0_resnets_0_conv1"}[name]
    assert kohya[f"lora_unet_{key}.lora_down.weight"].shape == (4, 32, 3, 3)
    assert kohya[f"lora_unet_{key}.lora_up.weight"].shape == (32, 4, 1, 1)
    assert float(kohya[f"lora_unet_{key}.alpha"]) == 8
    trainer.close()


def test_the_file_tells_kohya_s_conv_dim(tmp_path):
    options = network(rank_patterns="*.in_layers.2: rank=2 alpha=1\n*.out_layers.3: rank=2 alpha=1")
    trainer = trainer_of("sdxl", tmp_path, network=options)
    facts = collect_facts(trainer.settings, trainer.context.family, trainer.context.patcher, trainer.context.data, "")
    header = metadata_for(facts, trainer.network.snapshot())
    assert json.loads(header["ss_network_args"]) == {"conv_dim": "2", "conv_alpha": "1.0"}
    trainer.close()
    trainer = trainer_of("sdxl", tmp_path, network=network(include=("*.to_q",)))
    assert "ss_network_args" not in metadata_for(facts, trainer.network.snapshot())
    trainer.close()


def test_the_numbers_of_convolutions_are_counted_and_shown(tmp_path):
    trainer = trainer_of("sdxl", tmp_path)
    family, model = family_of(build(BY_NAME["sdxl"])), trainer.context.patcher.model
    total = sum(p.numel() for p in trainer.network.parameters())
    assert total == sum(4 * sum(layer_shapes(model)[name]) for name in trainer.network.adapters)
    text = describe_network(network(), family, model)
    assert f"lora on {len(trainer.network.adapters)} of {len(weight_shapes(model))} layers" in text
    assert f"{total:,} trained numbers" in text and "32×32×3×3" in text
    trainer.close()


def test_a_pattern_that_linears_match_means_these_alone():
    model = build(BY_NAME["sd1.5"])
    family = family_of(model)
    convs = convolutions(model.model.diffusion_model)
    for include in ((), ("*",), ("input_blocks.*",)):
        assert not convs.keys() & set(choose_targets(family, model.model, NetworkOptions(include=include)))
    targets = choose_targets(family, model.model, network(exclude=("input_blocks.*",)))
    assert convs.keys() & set(targets) == {name for name in convs if not name.startswith("input_blocks.")}


def test_layers_that_are_neither_linear_nor_convolution_are_the_sentence_for_no_match():
    model = build(BY_NAME["sd1.5"])
    with pytest.raises(ValueError, match=r"The pattern '\*.in_layers.0' in targets matches no layer of this model"):
        choose_targets(family_of(model), model.model, network(include=("*.in_layers.0",)))


@pytest.mark.parametrize("algorithm", ["dora", "loha", "lokr", "oft"])
def test_other_algorithms_name_the_convolution_that_they_cannot_have(algorithm):
    model = build(BY_NAME["sd1.5"])
    options = network(algorithm=algorithm, include=("*.in_layers.2", "*.to_q"))
    with pytest.raises(ValueError, match=f"algorithm is {algorithm}, which has no form for convolutions such as"):
        choose_targets(family_of(model), model.model, options)


def test_dropout_is_drawn_for_convolutions_inside_blocks_and_the_norm_is_limited(tmp_path):
    """A cell of one drop mask stands for one place of the picture; without a drop the result is the plain one."""
    losses = {}
    for p in (0.0, 0.5):
        options = network(include=("*.in_layers.2",), dropout=p, rank_dropout=p, scale_weight_norms=0.05)
        trainer = trainer_of("sdxl", tmp_path / str(p), "full", network=options)
        fill_up_matrices(trainer, 0.5)
        losses[p] = trainer.train_step.forward_backward([micro_batch(0)])
        trainer.learner.max_norm.apply()
        for adapter in trainer.network.adapters.values():
            norm = float((adapter.scale * adapter.up @ adapter.down).detach().norm())
            assert abs(norm - 0.05) <= 1e-5
        trainer.close()
    assert losses[0.0] != losses[0.5]


def test_pissa_starts_at_the_model_and_saves_what_changed(tmp_path):
    plain = trainer_of("sd1.5", tmp_path / "plain")
    options = network(init="pissa", rank_patterns="input_blocks.0.0: rank=2")
    trainer = trainer_of("sd1.5", tmp_path / "pissa", network=options)
    loss, expected = (candidate.train_step.forward_backward([micro_batch(0)]) for candidate in (trainer, plain))
    assert float(abs(loss - expected)) <= 1e-6 * float(expected)
    tensors = trainer.network.snapshot()
    down, up = (tensors[f"lora_unet_input_blocks_0_0.lora_{side}.weight"] for side in SIDES)
    assert down.shape == (4, 4, 3, 3) and up.shape == (32, 4, 1, 1)
    assert float((up.flatten(1) @ down.flatten(1)).norm()) <= 1e-6 * float(up.norm() * down.norm())
    for candidate in (plain, trainer):
        candidate.close()
