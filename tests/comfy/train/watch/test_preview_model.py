"""Previews on another MODEL: train on the base, look at the LoRA on what was distilled from it."""

import runpy
from dataclasses import replace
from pathlib import Path

import comfy.model_management
import comfy.sd
import comfy.utils
import nodes as core
import numpy as np
import pytest
import tiny
import torch
from tessera.compile.settings import CompileSettings
from tessera.lora.base import with_base
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.nodes.model.compile import TesseraCompileModel
from tessera.nodes.options.preview import TesseraPreview
from tessera.train.preview.sampling import Sampling
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch import previewer as module
from tessera.train.watch.other_model import check_one_model, on_other_models
from tessera.train.watch.previewer import Preview, Previewer
from tiny.lora.lora_files import random_updates
from tiny.models.sampling import conditioning
from tiny.native import ROWS, build, data_of, sample_of
from tiny.train.runs import Watcher, run_settings

PREVIEW = runpy.run_path(str(Path(__file__).with_name("test_preview.py")))
preview = PREVIEW["preview"]
core_picture = PREVIEW["core_picture"]
read = PREVIEW["read"]
Cancelled = comfy.model_management.InterruptProcessingException


@pytest.fixture
def turbo(tmp_path):
    """A MODEL of the same layers and other weights, without guidance, as a loader node gives it."""
    with torch.inference_mode():
        return tiny.load_flux(tiny.write_flux(tmp_path / "turbo.safetensors", guidance=False, seed=9))


def run(model, root, previews=(), watcher=None, **changes):
    settings = run_settings(**{"steps": 2, "save_every": 1, "optimizer": {"learning_rate": 0.05}, **changes})
    targets = on_other_models(previews, model, settings.network)
    watchers = [Previewer(targets, with_base(model, settings.network))] if targets else []
    compile_settings = CompileSettings("eager")
    return train_lora(
        RunRequest(model, PREVIEW["one_size"](), settings, root, watcher or Watcher(), compile_settings, watchers)
    )


def lora_for(model, factor, name):
    updates = {layer: replace(part, up=factor * part.up) for layer, part in random_updates(model).items()}
    tensors = convert(LoraModel.from_modules(updates))
    return LoraSource(name, name, lambda: tensors), tensors


def test_a_preview_is_what_core_makes_of_the_saved_lora_on_that_model_and_the_run_is_as_without(
    tiny_flux, turbo, tiny_vae, tmp_path
):
    """The base LoRA is on it, the training adapter is not; other prompts of the chain stay on the trained model."""
    base, tensors = lora_for(tiny_flux, 1.0, "base.safetensors")
    adapter, _ = lora_for(tiny_flux, -0.5, "adapter.safetensors")
    network = {"base_lora": base, "base_strength": 0.2, "training_adapter": adapter, "training_adapter_strength": 0.1}
    previews = [replace(preview(tiny_vae, every=1), model=turbo), preview(tiny_vae, every=1)]
    previews.append(replace(preview(tiny_vae, every=1, seed=6), model=turbo))
    first, second, third = on_other_models(previews, tiny_flux, NetworkOptions(**network))
    assert first.model is third.model is not turbo and second.model is None
    copies = {name: tensor.clone() for name, tensor in turbo.model.state_dict().items()}
    result = run(tiny_flux, tmp_path / "seen", previews, network=network)
    quiet = run(tiny_flux, tmp_path / "quiet", network=network)
    assert result.loss == quiet.loss and result.summary["key"] == quiet.summary["key"]
    assert all(torch.equal(result.lora[name], quiet.lora[name]) for name in quiet.lora)

    second, other = (
        comfy.sd.load_lora_for_models(base_model, None, tensors, 0.2, 0)[0] for base_model in (tiny_flux, turbo)
    )
    folder = result.path.parent
    for step, lora in {0: None, 1: folder / "tiny_steps" / "tiny-step000001.safetensors", 2: result.path}.items():
        for row, (model, seed) in enumerate([(other, 5), (second, 5), (other, 6)]):
            actual = read(folder, f"step{step:06d}_{row}.png")
            assert np.array_equal(actual, core_picture(model, tiny_vae, lora, seed)), (step, row)
    starts = [read(folder, f"step{step:06d}_0.png") for step in (0, 1, 2)]
    assert len({picture.tobytes() for picture in starts}) == 3
    assert not np.array_equal(starts[0], core_picture(turbo, tiny_vae, None, 5))
    comfy.model_management.unload_all_models()
    state = turbo.model.state_dict()
    assert not turbo.patches and all(torch.equal(state[name], tensor) for name, tensor in copies.items())


def test_before_the_first_step_it_shows_that_model_and_nothing_of_the_trained_one(tiny_flux, turbo, tiny_vae, tmp_path):
    """DoRA's file holds the lengths of the trained model's weights from the start on."""
    previews = [replace(preview(tiny_vae, every=1), model=turbo)]
    result = run(tiny_flux, tmp_path, previews, network={"algorithm": "dora"}, steps=1)
    plain, end = core_picture(turbo, tiny_vae, None, 5), read(result.path.parent, "step000001_0.png")
    assert np.array_equal(read(result.path.parent, "step000000_0.png"), plain)
    assert np.array_equal(end, core_picture(turbo, tiny_vae, result.path, 5)) and not np.array_equal(end, plain)


def test_the_block_swap_and_compiling_of_that_model_are_used_and_the_device_holds_one_model(
    tiny_flux, turbo, tiny_vae, tmp_path, monkeypatch
):
    plain = run(tiny_flux, tmp_path / "plain", [replace(preview(tiny_vae, every=1), model=turbo)])
    with torch.inference_mode(False):
        model = TesseraBlockSwap.execute(turbo, 3, 1, "auto").result[0]
    model = TesseraCompileModel.execute(model, "eager").args[0]
    torch._dynamo.reset()
    sampled, loaded = module.sample_latent, []

    def sample_latent(stages, *args):
        latent = sampled(stages, *args)
        loaded.append([entry.model.model is turbo.model for entry in comfy.model_management.current_loaded_models])
        return latent

    monkeypatch.setattr(module, "sample_latent", sample_latent)
    at_step = []
    watcher = Watcher(at_step=lambda _: at_step.append(len(comfy.model_management.current_loaded_models)))
    result = run(tiny_flux, tmp_path / "both", [replace(preview(tiny_vae, every=1), model=model)], watcher)
    assert not any("failed" in note for note in watcher.notes)
    assert loaded == [[True]] * 3 and at_step == [1, 1]
    assert comfy.model_management.current_loaded_models == []
    assert result.loss == plain.loss and result.summary["previews"]["graphs_compiled"] == 2
    for step in (0, 1, 2):
        first, second = (read(trained_run.path.parent, f"step{step:06d}_0.png") for trained_run in (plain, result))
        assert np.abs(first.astype(int) - second.astype(int)).max() <= 1


def test_a_preview_that_fails_or_is_cancelled_keeps_what_was_trained_and_the_sheet_goes_on(
    tiny_flux, turbo, tiny_vae, tmp_path, monkeypatch
):
    quiet = run(tiny_flux, tmp_path / "quiet")
    previews = [replace(preview(tiny_vae, every=1, at_start=False), model=turbo)]
    sampled = module.sample_latent

    def full(stages, *args):
        assert stages.model.model is turbo.model
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(module, "sample_latent", full)
    result = run(tiny_flux, tmp_path / "full", previews, watcher := Watcher())
    assert result.loss == quiet.loss and all(torch.equal(result.lora[name], quiet.lora[name]) for name in quiet.lora)
    assert [note for note in watcher.notes if "failed" in note] == [
        "The preview at step 1 failed (out of memory; make the previews smaller); training goes on and the next one "
        "is tried.",
        "The preview at step 2 failed (out of memory; make the previews smaller); no more are made.",
    ]
    assert comfy.model_management.current_loaded_models == []

    calls = iter([None, Cancelled])

    def cancelled(*args):
        if (error := next(calls, None)) is not None:
            raise error
        return sampled(*args)

    monkeypatch.setattr(module, "sample_latent", cancelled)
    with pytest.raises(Cancelled):
        run(tiny_flux, tmp_path / "cancelled", previews)
    resumed = run(tiny_flux, tmp_path / "cancelled", previews, watcher := Watcher())
    assert "Resumed at step 2." in watcher.notes and resumed.loss == quiet.loss
    files = [f"previews/step00000{step}_0.png" for step in (1, 2)]
    assert resumed.summary["previews"]["files"] == files
    for step, lora in ((1, "tiny_steps/tiny-step000001.safetensors"), (2, "tiny.safetensors")):
        picture = read(resumed.path.parent, f"step00000{step}_0.png")
        assert np.array_equal(picture, core_picture(turbo, tiny_vae, resumed.path.parent / lora, 5))
    on_turbo, plain_shot = (
        module.rows_of([entry])[0].shot(1) for entry in (previews[0], replace(previews[0], model=None))
    )
    assert on_turbo.same_row(on_turbo) and not on_turbo.same_row(plain_shot)


def test_a_model_that_the_lora_does_not_fit_is_refused_before_anything_is_trained(
    tiny_flux, turbo, tiny_vae, tiny_files, tmp_path
):
    def refused(model, match, **changes):
        with pytest.raises(ValueError, match=match):
            run(
                tiny_flux, tmp_path / "refused", [preview(tiny_vae), replace(preview(tiny_vae, **changes), model=model)]
            )
        assert not (tmp_path / "refused").exists()

    message = (
        "preview: model of prompt 2 does not take this LoRA: it trains double_blocks.0.img_attn.qkv of 384 x 128, "
    )
    refused(
        tiny.load_wan(tiny_files["wan"]), f"{message}and that MODEL has no such layer; connect one of the architecture"
    )
    with torch.inference_mode():
        larger = tiny.load_flux(tiny.write_flux(tmp_path / "large.safetensors", hidden=256))
    refused(larger, f"{message}and that MODEL has one of 768 x 256; connect one")
    refused(turbo, "preview: width is 70; the model takes multiples of 8, such as 64", width=70)
    with torch.inference_mode():
        wider = tiny.load_flux(tiny.write_flux(tmp_path / "wide.safetensors", context_dim=96))
    refused(wider, "preview: positive of prompt 2 has text of width .* and the model takes 96")
    assert on_other_models([preview(tiny_vae)], tiny_flux, NetworkOptions(include=("nothing",)))[0].model is None

    tensors = {"diffusion_model.guidance_in.in_layer.diff": torch.zeros(128, 256)}
    network = NetworkOptions(base_lora=LoraSource("base.safetensors", "x", lambda: tensors))
    with pytest.raises(
        ValueError, match="base_lora: base.safetensors changes nothing in the model of prompt 1 of prev"
    ):
        on_other_models([replace(preview(tiny_vae), model=turbo)], tiny_flux, network)


def test_a_model_of_comfyui_s_own_forward_is_seen_on_its_turbo(tiny_vae, tmp_path):
    row = next(row for row in ROWS if row.name == "z-image")
    base = build(row)
    turbo = build(row, seed=1)
    read_ = sample_of(row).load()
    positive = [[read_.text, dict(read_.conditioning)]]
    sampling = Sampling(tiny_vae, positive, positive, width=64, height=48, steps=2, seed=5)
    settings = run_settings(steps=1, optimizer={"learning_rate": 0.05})
    entries = on_other_models([Preview(sampling, 0, model=turbo)], base, settings.network)
    result = train_lora(
        RunRequest(base, data_of(row, 1), settings, tmp_path, Watcher(), watchers=[Previewer(entries, base)])
    )
    for step, lora in ((0, None), (1, comfy.utils.load_torch_file(str(result.path)))):
        with torch.inference_mode():
            model = turbo if lora is None else comfy.sd.load_lora_for_models(turbo, None, lora, 1.0, 0)[0]
            latent = core.EmptyLatentImage().generate(64, 48)[0]
            (sampled,) = core.KSampler().sample(model, 5, 2, 1.0, "euler", "simple", positive, positive, latent)
            (picture,) = core.VAEDecode().decode(tiny_vae, sampled)
        expected = np.clip(255.0 * picture[0].numpy(), 0, 255).astype(np.uint8)
        assert np.array_equal(read(result.path.parent, f"step00000{step}_0.png"), expected), step


def test_a_convolution_that_is_trained_has_to_be_in_it_too(tiny_vae):
    row = next(row for row in ROWS if row.name == "sd1.5")
    base, turbo = build(row), build(row, seed=1)
    entries, network = (
        [replace(preview(tiny_vae), model=turbo)],
        NetworkOptions(include=("input_blocks.1.0.in_layers.2",)),
    )
    assert on_other_models(entries, base, network)[0].model is turbo
    other = build(next(row for row in ROWS if row.name == "sdxl"))
    other.model.diffusion_model.input_blocks[1][0].in_layers[2] = torch.nn.Conv2d(3, 3, 3)
    with pytest.raises(
        ValueError, match=r"it trains input_blocks.1.0.in_layers.2 of \d+ x \d+ x 3 x 3, and that MODEL h"
    ):
        on_other_models([replace(entries[0], model=other)], base, network)


def test_two_experts_take_none_and_the_node_hands_it_on(turbo, tiny_vae):
    positive = conditioning("flux", 16, 0)
    entries = TesseraPreview.execute(tiny_vae, positive, 2, True, model=turbo, width=64, height=48).args[0]
    assert entries[0].model is turbo
    with pytest.raises(ValueError, match="preview: prompt 1 has a model of its own, and two experts are trained"):
        check_one_model(entries)
    check_one_model([replace(entries[0], model=None)])
