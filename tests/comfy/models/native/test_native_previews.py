"""Previews of models that people train by name are what ComfyUI's own nodes sample with the LoRA that was saved."""

import comfy.sd
import comfy.utils
import nodes as core
import pytest
import torch
from comfy_extras.nodes_lt import EmptyLTXVLatentVideo, LTXVConcatAVLatent
from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV
from tessera.models.catalogue.registry import family_of
from tessera.train.preview.sampling import Sampling
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Preview, Previewer, check_previews
from tiny.native import NAMED, ROWS, build, data_of
from tiny.native.latents import Latents
from tiny.train.runs import Watcher, run_settings

STEPS, SEED = 2, 5


def core_picture(model, lora, positive, empty):
    """Core's Load LoRA and KSampler."""
    with torch.inference_mode():
        model, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0)
        (sampled,) = core.KSampler().sample(model, SEED, STEPS, 1.0, "euler", "simple", positive, positive, empty)
    return sampled["samples"]


@pytest.mark.parametrize("row", NAMED, ids=str)
def test_a_preview_is_what_comfyui_samples_with_the_lora(row, tmp_path):
    model = build(row)
    data = data_of(row, 1)
    vae = Latents()
    read = data.samples[0].load()
    positive, empty = [[read.text, dict(read.conditioning)]], {"samples": torch.zeros(1, *row.latent)}
    preview = Preview(Sampling(vae, positive, steps=STEPS, seed=SEED, latent_image=empty), every_n_steps=0)
    watcher = Watcher()
    settings = run_settings(steps=2, save_every=0, optimizer={"learning_rate": 0.05})
    result = train_lora(RunRequest(model, data, settings, tmp_path, watcher, None, [Previewer([preview], model)]))
    assert not any("failed" in note for note in watcher.notes), watcher.notes
    before, after = vae.decoded
    assert torch.equal(after, core_picture(build(row), result.path, positive, empty))
    assert not torch.equal(after, before) and after.isfinite().all()


def pair_of_minimax():
    return EmptyMiniMaxH3LatentAV.execute(96, 64, 22).args[0]


def pair_of_ltx():
    """Join what core's nodes join for LTX-2, whose empty latent of sound takes a VAE for its length alone."""
    video = EmptyLTXVLatentVideo.execute(96, 64, 9).args[0]
    return LTXVConcatAVLatent.execute(video, {"samples": torch.zeros(1, 8, 9, 16)}).args[0]


@pytest.mark.parametrize("has_latent", [False, True], ids=["of its own", "given"])
@pytest.mark.parametrize(
    ("name", "pair", "frames"),
    [("minimax-h3", pair_of_minimax, 22), ("ltx-2", pair_of_ltx, 9), ("ltx-2.3", pair_of_ltx, 9)],
)
def test_a_model_that_makes_sound_is_sampled_with_it_and_shows_the_video(name, pair, frames, has_latent, tmp_path):
    (row,) = (row for row in ROWS if row.name == name)
    model = build(row)
    data = data_of(row, 1)
    vae = Latents()
    read, empty = data.samples[0].load(), pair()
    positive = [[read.text, dict(read.conditioning)]]
    size = {"latent_image": empty} if has_latent else {"width": 96, "height": 64, "frames": frames}
    preview = Preview(Sampling(vae, positive, steps=STEPS, seed=SEED, **size), every_n_steps=0)
    watcher = Watcher()
    settings = run_settings(steps=2, save_every=0, optimizer={"learning_rate": 0.05})
    result = train_lora(RunRequest(model, data, settings, tmp_path, watcher, None, [Previewer([preview], model)]))
    assert not any("failed" in note for note in watcher.notes), watcher.notes
    before, after = vae.decoded
    video, sound = core_picture(build(row), result.path, positive, empty).unbind()
    assert torch.equal(after, video) and after.isfinite().all() and sound.numel() > 0
    assert not torch.equal(after, before)


def test_a_latent_without_the_sound_that_a_model_cannot_do_without_is_told():
    (row,) = (row for row in ROWS if row.name == "minimax-h3")
    model, read = build(row), data_of(row, 1).samples[0].load()
    video = {"samples": pair_of_minimax()["samples"].unbind()[0]}
    preview = Preview(Sampling(Latents(), [[read.text, {}]], latent_image=video))
    with pytest.raises(
        ValueError, match=r"latent_image has no sound, which this model makes beside its video; connect"
    ):
        check_previews([preview], family_of(model), model)
    preview = Preview(Sampling(Latents(), [[read.text, {}]], width=96, height=64, frames=9))
    with pytest.raises(ValueError, match="frames is 9, which the model does not take; set it to 5 or 22"):
        check_previews([preview], family_of(model), model)
