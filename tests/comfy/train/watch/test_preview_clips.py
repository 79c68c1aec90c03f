"""Previews of clips, and of Wan 2.2's two experts, which sample together."""

import comfy.model_management
import comfy.sd
import nodes as core
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.train.config.expert_pair import HIGH, LOW
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.preview import compare
from tessera.train.preview.contact_sheet import render_sheet, to_picture
from tessera.train.preview.sampling import Sampling, Stages, decode, sample_latent
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Partner, Preview, Previewer
from tiny.models.sampling import conditioning
from tiny.models.wan import wan_sample
from tiny.train.runs import Watcher, run_settings, training_data

FRAMES = 5
WIDTH = 48
HEIGHT = 32


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return [tiny.load_wan(tiny.write_wan(folder / f"{seed}.safetensors", layers=1, seed=seed)) for seed in (1, 2)]


def sampling(vae, **changes):
    size = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "steps": 4, "seed": 3, "cfg": 2.0}
    return Sampling(vae, conditioning("wan", 10), negative=conditioning("wan", 10, 1), **size | changes)


def core_clip(high, low, vae, boundary_step=3):
    """Core's two KSampler (Advanced) over an empty video latent, decoded."""
    latent = {"samples": torch.zeros(1, 16, (FRAMES - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)}
    node, sampler_options = (
        core.KSamplerAdvanced(),
        (4, 2.0, "euler", "simple", conditioning("wan", 10), conditioning("wan", 10, 1)),
    )
    with torch.inference_mode():
        (half,) = node.sample(high, "enable", 3, *sampler_options, latent, 0, boundary_step, "enable")
        (whole,) = node.sample(low, "disable", 3, *sampler_options, half, boundary_step, 10000, "disable")
        return core.VAEDecode().decode(vae, whole)[0]


def test_both_experts_sample_as_core_s_advanced_samplers_do_and_a_clip_has_its_file_and_a_place_on_the_sheet(
    experts, tiny_files, tmp_path
):
    high, low = experts
    vae = tiny.load_vae(tiny_files["wan_vae"])
    sheets = []

    class Keeps(Watcher):
        def previewed(self, sheet, step):
            super().previewed(sheet, step)
            sheets.append(sheet)

    other_lora = train_lora(
        RunRequest(high, training_data(wan_sample("a", (1, 2, 2))), run_settings(steps=1), tmp_path / "high", Watcher())
    )
    partner = Partner(high, HIGH, other_lora.lora)
    # Four simple steps at Wan's shift begin at 1, 0.96, 0.89 and 0.73: three of them belong to the high noise expert.
    previews = [Preview(sampling(vae), every_n_steps=0, at_start=False)]
    settings = run_settings(steps=1, optimizer={"learning_rate": 0.05})
    watchers = [Previewer(previews, low, partner)]
    watcher = Keeps()
    result = train_lora(
        RunRequest(
            low, training_data(wan_sample("a", (1, 2, 2))), settings, tmp_path / "low", watcher, watchers=watchers
        )
    )
    assert any("sampled with both experts, which meet at sigma 0.875; the high noise" in n for n in watcher.notes)
    with Image.open(result.path.parent / "previews" / "step000001_0.webp") as clip:
        assert (clip.n_frames, clip.size) == (FRAMES, (WIDTH, HEIGHT))
    with Image.open(result.sheet) as sheet:
        assert sheet.width > WIDTH and sheet.height > HEIGHT

    with_loras = [
        comfy.sd.load_lora_for_models(model, None, dict(lora), 1.0, 0)[0]
        for model, lora in ((high, other_lora.lora), (low, result.lora))
    ]
    expected = core_clip(*with_loras, vae)
    stages = watchers[0]._stages(dict(result.lora))
    with torch.inference_mode():
        frames = decode(vae, sample_latent(stages, previews[0].sampling, 3, lambda: None))
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3) and torch.equal(frames, expected)
    assert not torch.equal(expected, core_clip(*with_loras, vae, boundary_step=2))
    assert not torch.equal(expected, core_clip(high, with_loras[1], vae))
    with Image.open(result.path.parent / "previews" / "step000001_0.webp") as clip:
        clip.seek(FRAMES // 2)
        pixels = np.asarray(clip.convert("L"), dtype=np.float32)
    likeness = [np.corrcoef(pixels.ravel(), frame.mean(-1).numpy().ravel())[0, 1] for frame in expected]
    assert np.argmax(likeness) == FRAMES // 2 and max(likeness) > 0.7, likeness  # the file is lossy
    comfy.model_management.unload_all_models()


def test_sizes_of_clips_are_those_that_the_model_takes(experts, tiny_files):
    vae = tiny.load_vae(tiny_files["wan_vae"])
    with pytest.raises(ValueError, match="frames is 6, which the model does not take; set it to 5 or 9"):
        Previewer([Preview(sampling(vae, frames=6))], experts[0])


def test_the_partner_s_side_decides_which_samples_first(experts, tiny_files):
    high, low = experts
    preview = [Preview(sampling(tiny.load_vae(tiny_files["wan_vae"])))]
    first = Previewer(preview, high, Partner(low, LOW))._stages({})
    second = Previewer(preview, low, Partner(high, HIGH))._stages({})
    for stages in (first, second):
        assert (stages.model.model, stages.low_noise.model) == (high.model, low.model)
        assert stages.boundary == 0.875


def test_they_meet_where_the_run_lets_them_meet(experts, tiny_files):
    high, low = experts
    preview = [Preview(sampling(tiny.load_vae(tiny_files["wan_vae"])))]
    assert Previewer(preview, high, Partner(low, LOW, boundary=0.7))._stages({}).boundary == 0.7


def test_the_node_previews_each_expert_s_run_with_the_other_beside_it(experts, tiny_files, monkeypatch):
    from types import SimpleNamespace

    from tessera.nodes.train.train_lora import TesseraTrainLora

    vae, partners = tiny.load_vae(tiny_files["wan_vae"]), []
    stages = Previewer._stages
    hidden = SimpleNamespace(unique_id="1", prompt=None, extra_pnginfo=None)
    monkeypatch.setattr(TesseraTrainLora, "hidden", hidden, raising=False)
    monkeypatch.setattr(Previewer, "_stages", lambda self, lora: partners.append(self.partner) or stages(self, lora))
    size = {"frames": 1, "width": 32, "height": 32, "steps": 4}
    previews = (Preview(sampling(vae, **size), every_n_steps=0, at_start=False),)
    train = {"output_name": "pair", "steps": 1, "learning_rate": 1e-2, "rank": 2, "batch_size": 1, "seed": 0}
    train |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "off"}
    data = training_data(wan_sample("a", (1, 2, 2)))
    with torch.inference_mode():
        output = TesseraTrainLora.execute(
            model=experts[0],
            model_low_noise=experts[1],
            data=data,
            preview=previews,
            objective=ObjectiveOptions(expert_boundary=0.8),
            **train,
        )
    high, low = output.result[0], output.result[3]
    high_partner, low_partner = partners
    assert (high_partner.model.model, high_partner.side, high_partner.lora) == (experts[1].model, LOW, None)
    assert (low_partner.model.model, low_partner.side) == (experts[0].model, HIGH) and low_partner.lora is high
    assert high_partner.boundary == low_partner.boundary == 0.8
    assert not torch.equal(output.result[6], output.result[7]) and low.keys() == high.keys()
    assert [image["filename"] for image in output.ui["images"]] == ["sheet.png", "sheet.png"]


def test_a_clip_is_compared_whole_and_stands_in_the_grid_with_its_middle_frame(experts, tiny_files, monkeypatch):
    cells = []
    monkeypatch.setattr(compare, "render_sheet", lambda *args: cells.append(args[2]) or render_sheet(*args))
    vae = tiny.load_vae(tiny_files["wan_vae"])
    plain = compare.Column("without LoRA")
    with torch.inference_mode():
        comparison = compare.compare(Stages(experts[0]), [sampling(vae)], [plain], lambda: None, lambda: None)
        latent = {"samples": torch.zeros(1, 16, (FRAMES - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8)}
        (sampled,) = core.KSampler().sample(
            experts[0], 3, 4, 2.0, "euler", "simple", conditioning("wan", 10), conditioning("wan", 10, 1), latent
        )
        expected = core.VAEDecode().decode(vae, sampled)[0]
    (clip,) = comparison.pictures
    assert torch.equal(clip, expected)
    assert np.array_equal(np.asarray(cells[0][0, 0]), np.asarray(to_picture(expected[FRAMES // 2])))
    comfy.model_management.unload_all_models()
