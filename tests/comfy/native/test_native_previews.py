"""Previews of models that people train by name are what ComfyUI's own nodes sample with the LoRA that was saved."""

import comfy.sd
import comfy.utils
import nodes as core
import pytest
import torch
from tessera.train.preview.previewer import Preview, Previewer
from tessera.train.preview.sampling import Sampling
from tessera.train.train_lora import train_lora
from tiny.native import NAMED, build, data_of
from tiny.native.latents import Latents
from tiny.runs import Watcher, run_settings

STEPS, SEED = 2, 5


def of_core(model, lora, positive, empty):
    """Core's Load LoRA and KSampler."""
    with torch.inference_mode():
        model, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0)
        (sampled,) = core.KSampler().sample(model, SEED, STEPS, 1.0, "euler", "simple", positive, positive, empty)
    return sampled["samples"]


@pytest.mark.parametrize("row", NAMED, ids=str)
def test_a_preview_is_what_comfyui_samples_with_the_lora(row, tmp_path):
    model, data, vae = build(row), data_of(row, 1), Latents()
    read = data.samples[0].load()
    positive, empty = [[read.text, dict(read.conditioning)]], {"samples": torch.zeros(1, *row.latent)}
    preview = Preview(Sampling(vae, positive, steps=STEPS, seed=SEED, latent_image=empty), every_n_steps=0)
    watcher = Watcher()
    settings = run_settings(steps=2, save_every=0, optimizer={"learning_rate": 0.05})
    result = train_lora(model, data, settings, tmp_path, watcher, None, [Previewer([preview], model)])
    assert not any("failed" in note for note in watcher.notes), watcher.notes
    before, after = vae.seen
    assert torch.equal(after, of_core(build(row), result.path, positive, empty))
    assert not torch.equal(after, before) and after.isfinite().all()
