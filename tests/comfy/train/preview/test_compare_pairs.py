"""Compare LoRAs with Wan 2.2's two experts: pairs are found by their names, and each clip is that of two KSampler
(Advanced) with the two LoRAs loaded."""

from pathlib import Path

import comfy.model_management
import folder_paths
import nodes as core
import pytest
import tiny
import torch
from PIL import Image
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.nodes.loras.compare import TesseraCompareLoras
from tessera.nodes.loras.compare_columns import read_pair_strengths
from tessera.nodes.loras.expert_pairs import Pair, pairs
from tessera.nodes.loras.lora_list import run_folder
from tessera.nodes.options.preview import TesseraPreview
from tessera.train.experts import ExpertObserver, plan_experts
from tessera.train.preview import compare as module
from tessera.train.train_lora import RunRequest, train_lora
from tiny.models.sampling import conditioning
from tiny.models.wan import wan_sample
from tiny.train.runs import Watcher, run_settings, training_data

HIGH_RUN, LOW_RUN = "pair_high_noise (001)", "pair_low_noise (001)"
SIZE = {"width": 32, "height": 32, "steps": 4}
SAMPLER = {**SIZE, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple", "seed": 3}
TEXT = {"negative": conditioning("wan", 10, 1), "frames": 5}


def lora_of(seed, name="blocks.0.self_attn.q"):
    draw = torch.Generator().manual_seed(seed)
    return LoraModel.from_modules(
        {name: LowRank(torch.randn(4, 128, generator=draw), 0.2 * torch.randn(128, 4, generator=draw), 4.0)},
        {"ss_output_name": f"fresh_high_noise{seed}"},
    )


FILES = [
    *(f"{HIGH_RUN}/pair_high_noise{end}" for end in ("", "-step000020", "-step000100", "-best")),
    *(f"{LOW_RUN}/pair_low_noise{end}" for end in ("", "-step000020", "-step000100", "-best")),
    *("own_high_noise", "own_low_noise", "lone_low_noise", "both", "saved/own_high_noise_00001"),
    *("saved/own_low_noise_00001", "saved/own_low_noise_00002", "light_HIGH", "light_LOW", "old", "old_low_noise"),
    *("two_high_noise (001)/two_high_noise", "two_low_noise (001)/two_low_noise"),
    *("two_low_noise (002)/two_low_noise", "twin (001)/twin", "twin_high_noise (001)/twin_high_noise"),
    *("twin_low_noise (001)/twin_low_noise", "v[2] (001)/v[2]", "v[2] (001)/v[2]_low_noise"),
]


@pytest.fixture(scope="module")
def files(lora_folder):
    """Runs of a pair and pairs of other origins, where ComfyUI lists LoRAs."""
    for seed, name in enumerate(FILES):
        save_lora(lora_folder / f"{name}.safetensors", lora_of(seed))
    save_lora(lora_folder / "of_flux.safetensors", lora_of(0, "double_blocks.0.img_attn.qkv"))
    folder_paths.filename_list_cache.clear()
    return lora_folder


@pytest.fixture(scope="module")
def vae(tiny_files):
    return tiny.load_vae(tiny_files["wan_vae"])


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return [tiny.load_wan(tiny.write_wan(folder / f"{seed}.safetensors", layers=1, seed=seed)) for seed in (1, 2)]


def file(name):
    return f"{name}.safetensors"


def halves(end=""):
    return Pair(file(f"{HIGH_RUN}/pair_high_noise{end}"), file(f"{LOW_RUN}/pair_low_noise{end}"))


def run(experts, vae, **changes):
    inputs = {"loras": "", "run": "none", "strengths": "1", "without_lora": True, **SAMPLER, "seeds": 1, **TEXT}
    inputs |= {"model_low_noise": experts[1], **changes}
    with torch.inference_mode():
        return TesseraCompareLoras.execute(experts[0], vae, conditioning("wan", 10), **inputs)


def core_clip(experts, vae, pair, strengths, seed, text=0, boundary_step=3, sampler="euler"):
    """Core's Load LoRA on each expert and two KSampler (Advanced) over an empty video latent, decoded."""
    latent = {"samples": torch.zeros(1, 16, 2, 4, 4)}
    node, sampler_options = (
        core.KSamplerAdvanced(),
        (4, 2.0, sampler, "simple", conditioning("wan", 10, text), conditioning("wan", 10, 1)),
    )
    with torch.inference_mode():
        high, low = (
            model if name is None else core.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]
            for model, name, strength in zip(experts, pair, strengths, strict=True)
        )
        (half,) = node.sample(high, "enable", seed, *sampler_options, latent, 0, boundary_step, "enable")
        (whole,) = node.sample(low, "disable", seed, *sampler_options, half, boundary_step, 10000, "disable")
        return core.VAEDecode().decode(vae, whole)[0]


def test_every_clip_is_that_of_two_advanced_samplers_with_a_lora_on_each_expert(experts, vae, files, monkeypatch):
    sheets, draw = [], module.render_sheet
    monkeypatch.setattr(module, "render_sheet", lambda *args: sheets.append(args) or draw(*args))
    loaded, load = [], comfy.model_management.load_models_gpu

    def load_models_gpu(models, *args, **kwargs):
        loaded.extend(model.model for model in models if hasattr(model.model, "diffusion_model"))
        return load(models, *args, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", load_models_gpu)
    more_prompts = TesseraPreview.execute(
        vae, conditioning("wan", 10, 3), 5, True, **SAMPLER, **TEXT, seeds=1, label="a fox"
    )
    lines = f"{LOW_RUN}/pair_low_noise\nlight_HIGH + light_LOW\nnone + lone_low_noise"
    output = run(experts, vae, loras=lines, strengths="1, 0.5/0", more_prompts=more_prompts.result[0])
    _, clips = output.result
    # One after the other: each expert is loaded once for a column, not once for a clip.
    order = ["high" if model is experts[0].model else "low" for model in loaded]
    assert [item for item, previous in zip(order, [None, *order], strict=False) if item != previous] == [
        "high",
        "low",
    ] * 6
    monkeypatch.undo()

    nothing, strength_pairs = (None, None), [(1.0, 1.0), (0.5, 0.0)]
    file_pairs = [(file(f"{HIGH_RUN}/pair_high_noise"), file(f"{LOW_RUN}/pair_low_noise"))]
    file_pairs.append((file("light_HIGH"), file("light_LOW")))
    columns = [(nothing, (0.0, 0.0)), *((names, strengths) for names in file_pairs for strengths in strength_pairs)]
    columns.append(((None, file("lone_low_noise")), (0.0, 1.0)))
    rows = [(3, 0), (3, 3)]
    expected = [core_clip(experts, vae, *column, *row) for row in rows for column in columns]
    assert len(clips) == len(expected) == 12 and clips[0].shape == (5, 32, 32, 3)
    assert all(torch.equal(item, other) for item, other in zip(clips, expected, strict=True))
    assert len({clip.numpy().tobytes() for clip in clips}) == 12
    ((titles, names, _, _),) = sheets
    assert titles == ["prompt 1, seed 3", "a fox, seed 3"]
    assert names[:3] == ["without LoRA", "pair x 1", "pair x 0.5/0"]
    assert names[3:5] == ["light_HIGH + light_LOW x 1", "light_HIGH + light_LOW x 0.5/0"]
    assert names[5:] == ["lone_low_noise (low noise only) x 1"]


@pytest.mark.parametrize(
    ("changes", "boundary_step"),
    [({}, 3), ({"expert_boundary": 0.92}, 2), ({"switch_step": 1}, 1), ({"sampler_name": "dpmpp_2m_sde"}, 3)],
)
def test_the_experts_change_hands_where_the_user_says_so(experts, vae, files, changes, boundary_step):
    output = run(experts, vae, loras="own_low_noise", without_lora=False, seeds=2, **changes)
    names, sampler = (file("own_high_noise"), file("own_low_noise")), changes.get("sampler_name", "euler")
    for clip, seed in zip(output.result[1], (3, 4), strict=True):
        assert torch.equal(
            clip, core_clip(experts, vae, names, (1.0, 1.0), seed, boundary_step=boundary_step, sampler=sampler)
        )


def test_loras_of_the_graph_are_paired_by_their_inputs(experts, vae, files):
    loras = {f"lora{number}": lora_of(number) for number in (4, 5)}
    high, low = {"lora0": loras["lora4"], "lora1": None}, {"lora0": loras["lora5"]}
    output = run(experts, vae, without_lora=False, lora_models=high, lora_models_low_noise=low)
    names = FILES[4] + ".safetensors", FILES[5] + ".safetensors"  # which hold the same
    assert torch.equal(output.result[1][0], core_clip(experts, vae, names, (1.0, 1.0), 3))


def test_either_half_names_a_pair_and_either_run_all_of_its_saves(files):
    saves = [halves("-step000020"), halves("-step000100"), halves(), halves("-best")]
    assert pairs("", HIGH_RUN) == pairs("", LOW_RUN) == pairs("pair_*/*", "none") == pairs("pair_*/*", LOW_RUN) == saves
    own_pair = Pair(file("own_high_noise"), file("own_low_noise"))
    for line in ("own", "own_high_noise", "own_low_noise.safetensors", "own_*", "own\nown_low_noise"):
        assert pairs(line, "none") == [own_pair]
    numbered = Pair(file("saved/own_high_noise_00001"), file("saved/own_low_noise_00001"))
    assert pairs("saved\\own_00001", "none") == pairs("saved/own_low_noise_00001", "none") == [numbered]
    for line in ("old", "old_low_noise"):  # which once was the high noise half's name
        assert pairs(line, "none") == [Pair(file("old"), file("old_low_noise"))]
    twin = Pair(file("twin_high_noise (001)/twin_high_noise"), file("twin_low_noise (001)/twin_low_noise"))
    assert pairs("twin_low_noise (001)/*", "none") == [twin]  # and not another run that has the same number
    assert pairs("v[2] (*)/*", "none") == [Pair(file("v[2] (001)/v[2]"), file("v[2] (001)/v[2]_low_noise"))]
    assert pairs("light_HIGH + light_LOW", "none") == [Pair(file("light_HIGH"), file("light_LOW"))]
    assert pairs("both + both", "none") == [Pair(file("both"), file("both"))]
    assert pairs("none + lone_low_noise", "none") == [Pair(None, file("lone_low_noise"))]
    assert [pair.title for pair in saves] == ["pair-step000020", "pair-step000100", "pair", "pair-best"]
    assert (halves().name, numbered.name) == ("pair (001)/pair", "saved/own_00001")
    fingerprint = TesseraCompareLoras.fingerprint_inputs
    file_names = fingerprint(loras="own_high_noise", run="none", model_low_noise=None)
    assert [name for name, _ in file_names] == [own_pair.high, own_pair.low]
    assert [name for name, _ in fingerprint(loras="own_high_noise", run="none")] == [own_pair.high]


def test_runs_that_were_trained_alike_are_a_pair(experts, files):
    data = training_data(wan_sample("a", (1, 2, 2)))
    results = []
    for rate in (0.01, 0.02):
        settings = run_settings(
            output_name="sets/film", steps=2, save_every=1, optimizer={"learning_rate": rate}, validation={"part": 0.5}
        )
        data = training_data(wan_sample("a", (1, 2, 2)), wan_sample("b", (1, 2, 2)))
        planned = plan_experts(*experts, data, settings)
        observers = [ExpertObserver(Watcher(), expert, number, 2) for number, expert in enumerate(planned)]
        with torch.inference_mode(False):
            observed = zip(planned, observers, strict=True)
            results.append(
                [train_lora(RunRequest(e.model, data, e.settings, files, observer)) for e, observer in observed]
            )
    folder_paths.filename_list_cache.clear()
    runs = [[result.path.parent.relative_to(files).as_posix() for result in pair] for pair in results]
    assert len({folder for pair in runs for folder in pair}) == 4
    for high, low in runs:
        pair_list = pairs("", high)
        assert pair_list == pairs("", low) and len(pair_list) == 3
        folders = {tuple(str(run_folder(half)) for half in (pair.high, pair.low)) for pair in pair_list}
        assert folders == {(high, low)}
        assert all(Path(pair.low).name == Path(pair.high).name.replace("high", "low") for pair in pair_list)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"loras": "lone_low_noise"},
            "lone_low_noise has no high noise half: there is no lone_high_noise in its",
        ),
        ({"loras": "lone_low_noise"}, "or write 'none \\+ lone_low_noise' to compare this half alone"),
        ({"loras": "saved/own_low_noise_00002"}, "has no high noise half: there is no own_high_noise_00002 in"),
        (
            {"loras": "both"},
            "both says neither high_noise nor low_noise in its name; .* or 'both \\+ both' to put",
        ),
        (
            {"loras": "two_high_*/*"},
            "has 2 low noise halves .* write the one that you mean, such as 'two_high_noise .001.",
        ),
        ({"loras": "own_high_noise + nothing"}, "'nothing' isn't a LoRA that ComfyUI lists"),
        ({"loras": "nothing"}, "'nothing' isn't a LoRA that ComfyUI lists"),
        ({"loras": "none + none"}, "'none \\+ none' isn't a pair; write the two names as 'high \\+ low'"),
        (
            {"loras": "light_* + light_LOW"},
            "'light_\\*' stands for 2 LoRAs; name one of them in 'light_\\* \\+ light",
        ),
        ({"loras": "own_high_noise + of_flux"}, "of_flux.safetensors doesn't change this model"),
        ({"loras": "none + lone_low_noise", "strengths": "1/0"}, "strengths are 0 for lone_low_noise"),
        ({"loras": "own", "strengths": "0/0"}, "strengths is '0/0'; give .* or one for each expert, such as 1/0.6"),
        (
            {"loras": "own", "expert_boundary": 0.9, "switch_step": 2},
            "expert_boundary is 0.9 and switch_step is 2",
        ),
        ({"loras": "own", "expert_boundary": 1.0}, "expert_boundary is 1; set it to 0 .the model's own. or below 1"),
        ({"loras": "own", "switch_step": -1}, "switch_step is -1; set it to 0"),
        ({"loras": "own", "clips": "all"}, "clips is 'all'; choose one of middle frame, 3 frames"),
        (
            {"loras": "own", "switch_step": 4},
            "switch_step is 4, and prompt 1 has 4 steps, which leaves no steps for",
        ),
        (
            {"lora_models": {"lora0": lora_of(0)}},
            "lora0 has no low noise half; connect Train LoRA's lora_low_noise to",
        ),
        (
            {"lora_models_low_noise": {"lora0": lora_of(0)}},
            "lora0 has no high noise half; connect Train LoRA's",
        ),
        ({"loras": "own", "model_low_noise": None}, "'own' isn't a LoRA"),
        (
            {"loras": "own_high_noise + own_low_noise", "model_low_noise": None},
            "two experts; connect model_low_noise",
        ),
        (
            {"loras": "both", "model_low_noise": None, "switch_step": 2},
            "switch_step is for two experts; connect",
        ),
        ({"loras": "both", "model_low_noise": None, "expert_boundary": 0.5}, "expert_boundary is for two experts"),
        ({"loras": "both", "model_low_noise": None, "lora_models_low_noise": {"lora0": lora_of(0)}}, "for two experts"),
    ],
)
def test_half_pairs_and_what_contradicts_itself_are_told_before_anything_is_sampled(
    experts, vae, files, changes, match, monkeypatch
):
    monkeypatch.setattr(module, "sample_latents", lambda *_: pytest.fail("sampled"))
    with pytest.raises(ValueError, match=match):
        run(experts, vae, **changes)


def test_models_that_are_no_pair_are_refused(experts, vae, files, tiny_flux, tiny_files):
    vace = tiny.load_wan(tiny_files["wan_vace"])
    for high, low, match in [
        (experts[0], experts[0].clone(), "are the same weights; connect the high noise expert to model"),
        (experts[0], tiny_flux, "connect the two experts of one Wan 2.2 model"),
        (tiny_flux, tiny_flux.clone(), "are the same weights"),
        (vace, experts[0], "model is a WAN21_Vace and model_low_noise a WAN21; connect"),
        (
            vace,
            tiny.load_wan(tiny_files["wan_vace"]),
            "set switch_step, as on your KSampler \\(Advanced\\), or",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            run((high, low), vae, loras="own")
    assert module.two_experts(vace, tiny.load_wan(tiny_files["wan_vace"]), switch_step=2).switch_step == 2


def test_strengths_may_differ_between_the_experts():
    assert read_pair_strengths("1, 0.5;1/0.5 1") == [(1.0, 1.0), (0.5, 0.5), (1.0, 0.5)]
    for text in ("", "0", "1/", "/1", "1/2/3", "nan", "101"):
        with pytest.raises(ValueError, match="strengths is"):
            read_pair_strengths(text)


@pytest.mark.parametrize(("clips", "frames"), [("3 frames", [[0, 2, 4]]), ("animation", [[n] for n in range(5)])])
def test_the_grid_shows_frames_of_a_clip_or_runs(experts, vae, files, clips, frames):
    output = run(experts, vae, loras="own", clips=clips, fps=10.0, steps=2)
    grid, pair_clips = output.result
    assert len(pair_clips) == 2 and len(grid) == len(frames) and pair_clips[0].shape == (5, 32, 32, 3)
    for sheet, numbers in zip(grid, frames, strict=True):
        for number in numbers:
            for clip, offset in zip(
                pair_clips, (8, 64), strict=True
            ):  # cells of 48 and spaces of 8, a clip in their middle
                picture = torch.floor(255 * clip[number]) / 255
                across = range(offset, min(offset + 17, sheet.shape[1] - 31))
                places = [(y, x) for y in range(sheet.shape[0] - 31) for x in across]
                assert sum(torch.equal(sheet[y : y + 32, x : x + 32], picture) for y, x in places) == 1
    ui = output.ui
    (image,) = ui["images"]
    with Image.open(Path(folder_paths.get_temp_directory(), image["subfolder"], image["filename"])) as picture:
        assert getattr(picture, "n_frames", 1) == len(frames)
        assert picture.size == (grid.shape[2], grid.shape[1])
        if clips == "animation":
            picture.load()
            assert picture.info["duration"] == 100
    assert ui["animated"] == (clips == "animation",)
