"""Qwen Image 2.1 trains by name, on a class of ours that does what its stored sources do."""

from typing import Any
from unittest.mock import patch

import comfy.lora
import comfy.utils
import pytest
import torch
from tessera.lora.files.formats import convert, save_lora
from tessera.lora.files.lora_model import MODULES, LoraModel, LowRank
from tessera.lora.files.reader import read_lora
from tessera.models.catalogue.registry import family_of
from tessera.models.convolutions import layer_shapes
from tessera.models.native.names import native_names
from tessera.train.config.settings import MemoryOptions
from tiny.native.reference import plain_model, tokens, training, with_lora
from tiny.native.rows import qwen_image21
from tiny.native.rows.qwen_image21 import CHANNELS, LAYERS, TEXT, load
from tiny.native.step import batch_of, difference
from tiny.train.reference_gradients import gradient, lora_gradients
from tiny.train.runs import train, training_data
from tiny.train.training import fill_up_matrices, make_trainer, micro_batch

BOUND = 3e-5


@pytest.fixture(autouse=True)
def newer():
    with qwen_image21.newer_comfyui():
        yield


def data(*names: str) -> Any:
    from tessera.data.samples import Sample, SampleTensors

    def make_sample(name: str, seed: int) -> Any:
        source = torch.Generator().manual_seed(seed)
        tensors = SampleTensors(
            torch.randn(CHANNELS, 4, 6, generator=source), torch.randn(1, 5, TEXT, generator=source), {}
        )
        return Sample(name, (1, 4, 6), 24, 5, lambda *_: tensors)

    return training_data(*(make_sample(name, seed) for seed, name in enumerate(names)))


def trainer_of(folder, fused=True, backend=None, batch_size=1, **memory):
    options = {"checkpointing": "none"} | memory
    trainer = make_trainer(
        load(fused), data("a", "b"), folder, batch_size=batch_size, backend=backend, memory=MemoryOptions(**options)
    )
    fill_up_matrices(trainer)
    return trainer


def add_gated(x: torch.Tensor, y: torch.Tensor, gates: Any, prefix: int) -> torch.Tensor:
    before, after = gates
    return torch.cat((x[:, :prefix] + y[:, :prefix] * before, x[:, prefix:] + y[:, prefix:] * after), dim=1)


def plain_step(trainer: Any, fused: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of the first sample and the LoRA's gradients, by plain autograd over the class's own forward.

    Sums stand for what it writes in place: autograd's own help with that loses slices at another offset.
    """
    batch = batch_of(trainer)
    (group,) = batch.inputs.groups
    scale = trainer.settings.network.alpha / trainer.settings.network.rank
    masters = {n: [p.detach().clone().requires_grad_() for p in pair] for n, pair in trainer.network.pairs.items()}
    model, options = plain_model(load(fused)), {"sigmas": group.sigma, "cond_or_uncond": [0]}
    with (
        patch.object(qwen_image21, "_add", add_gated),
        training(),
        with_lora(model, {n: (*pair, scale) for n, pair in masters.items()}),
    ):
        raw = model.apply_model(group.x.clone(), group.sigma, transformer_options=options, **group.conds)
        out = tokens(raw[0], batch.target.shape[1])
        (out - batch.target[0]).square().mean().backward()
    names = (("down", 0), ("up", 1))
    return out.detach(), {f"{n}.{side}": gradient(pair[i]) for n, pair in masters.items() for side, i in names}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_forward_and_gradients_are_those_of_its_own_code(fused, tmp_path):
    trainer = trainer_of(tmp_path, fused)
    family = trainer.context.family
    assert (family.title, family.name) == ("Qwen Image 2.1", "qwen-image-2.1")
    layers = 6 if fused else 7  # q, k, v, out, the MLP's in (one or two) and out
    assert len(trainer.network.pairs) == LAYERS * layers
    out, expected = plain_step(trainer, fused)
    with torch.no_grad():
        actual = trainer.placed.velocity(batch_of(trainer).inputs, (0, 0))[0]
    assert float((actual - out).norm()) <= BOUND * float(out.norm())
    trainer.train_step.forward_backward([micro_batch(0)])
    assert difference(lora_gradients(trainer), expected) <= BOUND


def test_swapped_checkpointed_and_compiled_blocks_give_the_same_and_are_one_graph(tmp_path):
    torch._dynamo.reset()
    results = {}
    modes = {
        "plain": {},
        "checkpointed": {"checkpointing": "full"},
        "swapped": {"checkpointing": "full", "blocks_to_swap": 2},
        "compiled": {"backend": "aot_eager"},
    }
    for name, changes in modes.items():
        trainer = trainer_of(tmp_path / name, batch_size=2, **changes)
        results[name] = float(trainer.train_step.forward_backward([micro_batch(0, 1)])), lora_gradients(trainer)
        if name == "compiled":
            assert (
                trainer.placed.execution.runner.planned_graphs
                == trainer.placed.execution.runner.report.counts().graphs
                == 1
            )
        trainer.close()
    loss, expected = results["checkpointed"]
    assert results["swapped"][0] == loss
    assert all(torch.equal(results["swapped"][1][name], value) for name, value in expected.items())
    for name in ("checkpointed", "compiled"):
        assert results[name][0] == pytest.approx(results["plain"][0], rel=1e-6)
        assert difference(results[name][1], results["plain"][1]) <= BOUND
    torch._dynamo.reset()


def test_a_cache_that_a_sampler_left_does_not_reach_training(tmp_path):
    fresh, used = trainer_of(tmp_path / "fresh"), load()
    used.model.diffusion_model.prefix_cache_enabled = True
    with torch.inference_mode():
        context, sigma = torch.randn(1, 5, TEXT), torch.tensor([0.5])
        used.model.apply_model(torch.randn(1, CHANNELS, 4, 6), sigma, c_crossattn=context, transformer_options={})
    assert used.model.diffusion_model.prefix_cache is not None
    used.model.diffusion_model.prefix_cache_enabled = False
    other = make_trainer(used, data("a", "b"), tmp_path / "used", memory=MemoryOptions(checkpointing="none"))
    fill_up_matrices(other)
    losses = [float(candidate.train_step.forward_backward([micro_batch(0)])) for candidate in (other, fresh)]
    assert losses[0] == losses[1]


def updates(model: Any) -> dict[str, LowRank]:
    source = torch.Generator().manual_seed(5)
    return {
        name: LowRank(torch.randn(2, columns, generator=source), torch.randn(rows, 2, generator=source), 1.0)
        for name, (rows, columns) in layer_shapes(model.model).items()
        if name.startswith("transformer_blocks.")
    }


def weights_with(file: Any, fused: bool) -> dict[str, torch.Tensor]:
    """All weights of a model after core's loader has added a file, and a count of what it took."""
    model = load(fused)
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(comfy.utils.load_torch_file(str(file)), keys, log_missing=True)
    patcher = model.clone()
    loaded_keys = patcher.add_patches(patches, 1.0)
    assert len(loaded_keys) == len(patches) > 0
    with torch.inference_mode():
        return {
            key.removeprefix("diffusion_model."): patcher.patch_weight_to_device(key, return_weight=True).clone()
            for key in patcher.model.state_dict()
            if key.endswith(".weight") and "transformer_blocks" in key
        }


@pytest.mark.parametrize("format", ["kohya", "comfyui", "diffusers"])
def test_a_lora_of_a_fused_file_loads_on_fused_and_split_ones(format, tmp_path, caplog):
    model = load()
    table = native_names(model.model)
    lora = LoraModel.from_modules(updates(model), {MODULES: table.recorded()})
    save_lora(tmp_path / "a.safetensors", lora, format)
    fused, split = (weights_with(tmp_path / "a.safetensors", kind) for kind in (True, False))
    assert not [record for record in caplog.records if "not loaded" in record.getMessage()]
    state = model.model.state_dict()
    for name, update in updates(model).items():
        delta = update.scaled_up @ update.down
        expected = state[f"diffusion_model.{name}.weight"] + delta
        assert torch.allclose(fused[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5), name
        parts = table.diffusers(name)
        joined = torch.cat([split[f"{part}.weight"] for part in parts])
        assert torch.allclose(joined, expected, rtol=1e-5, atol=1e-5), name


def test_the_saved_halves_are_read_back_as_the_fused_layer():
    model = load()
    table = native_names(model.model)
    lora = LoraModel.from_modules(updates(model), {MODULES: table.recorded()})
    file = convert(lora)
    assert any(".gate_layer." in key for key in file) and not any("gate_up" in key for key in file)
    reread = LoraModel.from_file(file, lora.metadata)
    assert reread.keys() == lora.keys() and all(torch.equal(reread[key], lora[key]) for key in lora)
    read = read_lora(file, family_of(model), model.model)
    assert not read.unknown and not read.other_weights and read.modules.keys() == updates(model).keys()


def test_a_whole_run_saves_halves_and_hands_on_what_loads(tmp_path):
    result = train(load(), data("a", "b"), tmp_path, steps=2, network={"rank": 2})
    file = comfy.utils.load_torch_file(str(result.path))
    assert sum(".gate_layer.lora_up" in key for key in file) == LAYERS
    model = load()
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(dict(result.lora), keys, log_missing=True)
    assert len(model.clone().add_patches(patches, 1.0)) == LAYERS * 6
