"""Compare LoRAs: each picture is that of core's nodes, under its name; what can't be compared is told at once."""

import shutil

import comfy.model_management
import folder_paths
import nodes as core
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import save_file
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.nodes.loras.compare import TesseraCompareLoras
from tessera.nodes.loras.compare_columns import compared_files, read_strengths
from tessera.nodes.loras.lora_list import listed_runs, loras_named
from tessera.nodes.options.preview import TesseraPreview
from tessera.train.preview import compare as module
from tessera.train.preview.contact_sheet import render_sheet, to_picture
from tiny.models.sampling import conditioning, unload_outside_inference_mode

RUN = "film (001)"
SAMPLER = {"width": 64, "height": 48, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 4}


def lora_of(seed, name="double_blocks.0.img_attn.qkv", size=(384, 128)):
    draw = torch.Generator().manual_seed(seed)
    return LoraModel.from_modules(
        {name: LowRank(torch.randn(4, size[1], generator=draw), 0.2 * torch.randn(size[0], 4, generator=draw), 4.0)},
        {"ss_output_name": "fresh"},
    )


@pytest.fixture(scope="module")
def files(lora_folder):
    """A run with two saves and its end, a LoRA of Wan and a broken one, and no other where ComfyUI lists LoRAs."""
    ends = ["-step000100", "-step000020", ""]
    for seed, end in enumerate(ends):
        save_lora(lora_folder / RUN / f"film{end}.safetensors", lora_of(seed))
    save_lora(lora_folder / "of_wan.safetensors", lora_of(9, "blocks.0.self_attn.q", (128, 128)))
    save_file({**lora_of(0), "lora_unet_img_in.alpha": torch.ones(4)}, lora_folder / "broken.safetensors")
    folder_paths.filename_list_cache.clear()
    return [f"{RUN}/film{end}.safetensors" for end in ("-step000020", "-step000100", "")]


def test_the_saves_of_runs_are_listed_by_step(lora_folder, files):
    places = [
        f"styles/who ({number})/{name}"
        for number in ("001", "002")
        for name in ("who_steps/who-step000020", "who_steps/who-step000100", "who")
    ]
    for name in reversed(places):
        save_lora(lora_folder / f"{name}.safetensors", lora_of(1))
    folder_paths.filename_list_cache.clear()
    names = [f"{name}.safetensors" for name in places]
    assert listed_runs() == [RUN, "styles/who (001)", "styles/who (002)"]
    assert loras_named("", "styles/who (002)") == names[3:]
    assert loras_named("styles/who (*)/*", "none") == names
    # A run that was stopped at step 50, and then continued.
    save_lora(lora_folder / names[5], LoraModel(lora_of(1), metadata={"ss_steps": "50"}))
    in_order = [names[3], names[5], names[4]]
    assert loras_named("", "styles/who (002)") == loras_named("styles/who (002)/*", "none") == in_order
    titles = ["who-step000020", "who (step 50)", "who-step000100 (newest)"]
    assert [entry.title for entry in compared_files(in_order)] == titles
    assert [entry.title for entry in compared_files(names[5:])] == ["who"]
    shutil.rmtree(lora_folder / "styles")
    folder_paths.filename_list_cache.clear()


def run(model, vae, **changes):
    inputs = {"loras": "", "run": "none", "strengths": "1", "without_lora": True, **SAMPLER, "seeds": 1, **changes}
    with torch.inference_mode():
        output = TesseraCompareLoras.execute(model, vae, conditioning("flux", 16), **inputs)
    return output.result


def core_picture(model, vae, name, strength, seed, text=0):
    with torch.inference_mode():
        if name is not None:
            (model,) = core.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)
        positive = conditioning("flux", 16, text)
        (latent,) = core.EmptyLatentImage().generate(64, 48)
        (sampled,) = core.KSampler().sample(model, seed, 2, 1.0, "euler", "simple", positive, positive, latent)
        return core.VAEDecode().decode(vae, sampled)[0]


def test_a_scaled_fp8_model_that_was_unloaded_outside_inference_mode_is_compared(tiny_vae, files, tmp_path):
    with torch.inference_mode():
        model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", fp8=True))
    unload_outside_inference_mode(model)
    _, pictures = run(model, tiny_vae, loras=f"{RUN}/film")
    assert [tuple(picture.shape) for picture in pictures] == [(1, 48, 64, 3)] * 2
    for picture, name in zip(pictures, (None, files[2]), strict=True):
        assert torch.equal(picture, core_picture(model, tiny_vae, name, 1.0, 4))


def test_every_picture_is_that_of_core_s_nodes_and_stands_in_the_grid_under_its_name(
    tiny_flux, tiny_vae, files, monkeypatch
):
    sheets = []
    monkeypatch.setattr(module, "render_sheet", lambda *args: sheets.append(args) or render_sheet(*args))
    sampler = {**SAMPLER, "width": 64, "height": 48, "seeds": 1}
    more_prompts = TesseraPreview.execute(
        tiny_vae, conditioning("flux", 16, 3), 5, True, **sampler, label="a fox"
    ).result[0]
    grid, pictures = run(
        tiny_flux, tiny_vae, loras=f"{RUN}/film", run=RUN, strengths="1, 0.5", seeds=2, more_prompts=more_prompts
    )
    columns = [(None, 0.0)] + [(name, s) for name in (files[2], files[0], files[1]) for s in (1.0, 0.5)]
    rows = [(4, 0), (5, 0), (4, 3)]
    expected = [core_picture(tiny_flux, tiny_vae, *column, *row) for row in rows for column in columns]
    assert len(pictures) == len(expected) == 21
    assert all(torch.equal(picture, other) for picture, other in zip(pictures, expected, strict=True))
    assert len({picture.numpy().tobytes() for picture in expected}) == 21

    ((titles, names, cells, _),) = sheets
    assert titles == ["prompt 1, seed 4", "prompt 1, seed 5", "a fox, seed 4"]
    assert (
        names[:3] == ["without LoRA", "film (newest) x 1", "film (newest) x 0.5"]
        and names[-1] == "film-step000100 x 0.5"
    )
    assert np.array_equal(np.asarray(cells[2, 6]), np.asarray(to_picture(expected[-1][0])))
    assert grid.shape[0] == 1 and grid.shape[2] > 7 * 64 and grid.shape[1] > 3 * 48
    wide, whole = np.asarray(cells[0, 0]), (255 * grid[0].numpy()).round().astype(np.uint8)
    # The first picture stands in its place, pixel by pixel.
    places = [(y, x) for y in range(whole.shape[0] - 48) for x in range(16)]
    assert sum(np.array_equal(whole[y : y + 48, x : x + 64], wide) for y, x in places) == 1


def test_a_lora_of_the_graph_is_compared_too_and_the_model_is_as_it_was(tiny_flux, tiny_vae, files):
    patches = dict(tiny_flux.patches)
    lora = lora_of(0)
    _, pictures = run(tiny_flux, tiny_vae, without_lora=False, lora_models={"lora0": lora, "lora1": None})
    assert len(pictures) == 1
    assert torch.equal(pictures[0], core_picture(tiny_flux, tiny_vae, f"{RUN}/film-step000100.safetensors", 1.0, 4))
    assert tiny_flux.patches == patches
    comfy.model_management.unload_all_models()


def test_a_file_that_core_reads_in_part_is_shown_as_a_whole_and_said(tiny_flux, tiny_vae, files, lora_folder):
    lora = lora_of(5)
    save_lora(lora_folder / "plain.safetensors", lora)
    save_file(
        {key.replace("lora_unet_", "lycoris_module_"): tensor for key, tensor in lora.items()},
        lora_folder / "strange.safetensors",
    )
    folder_paths.filename_list_cache.clear()
    inputs = {"run": "none", "strengths": "1", "without_lora": False, **SAMPLER, "seeds": 1}
    with torch.inference_mode():
        positive = conditioning("flux", 16)
        output = TesseraCompareLoras.execute(tiny_flux, tiny_vae, positive, loras="strange", **inputs)
    assert torch.equal(output.result[1][0], core_picture(tiny_flux, tiny_vae, "plain.safetensors", 1.0, 4))
    ((note,),) = (entry["notes"] for entry in output.ui["tessera"])
    assert "ComfyUI's LoRA loaders read strange.safetensors otherwise (double_blocks.0.img_attn.qkv.weight)" in note
    for name in ("plain", "strange"):
        (lora_folder / f"{name}.safetensors").unlink()
    folder_paths.filename_list_cache.clear()
    comfy.model_management.unload_all_models()


def test_a_run_is_in_the_order_of_its_steps_and_lines_stand_for_what_is_listed(files):
    assert listed_runs() == [RUN] and loras_named("", RUN) == files
    assert loras_named(f"{RUN}/film\n\n{RUN}/*", "none") == [files[2], files[0], files[1]]
    assert loras_named(f"{RUN}\\film-step000100.safetensors", "none") == [files[1]]
    assert read_strengths("0.6, 1;-1 1") == [0.6, 1.0, -1.0]
    fingerprint = TesseraCompareLoras.fingerprint_inputs
    original = fingerprint(loras=f"{RUN}/*", run="none")
    assert original == fingerprint(loras=f"{RUN}/*", run="none") != fingerprint(loras=f"{RUN}/film", run="none")
    assert TesseraCompareLoras.validate_inputs(run=RUN) is True
    assert "there is no run 'gone' any more" in TesseraCompareLoras.validate_inputs(run="gone")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({}, "loras is empty; name LoRAs, choose a run"),
        ({"loras": "../secret"}, "loras: '../secret' isn't a LoRA that ComfyUI lists"),
        ({"loras": "/etc/*"}, "isn't a LoRA that ComfyUI lists"),
        ({"loras": "of_wan"}, "loras: of_wan.safetensors doesn't change this model"),
        (
            {"loras": "broken"},
            "loras: broken.safetensors does not fit this model .*has 4 numbers in place of one.*; take it",
        ),
        ({"run": RUN, "strengths": "0"}, "strengths is '0'; give one or more numbers other than 0"),
        ({"run": RUN, "strengths": "strong"}, "strengths is 'strong'"),
        ({"run": RUN, "height": 44}, "height is 44; the model takes multiples of 8, such as 40"),
    ],
)
def test_loras_that_cannot_be_compared_are_told_before_anything_is_sampled(
    tiny_flux, tiny_vae, files, changes, match, monkeypatch
):
    monkeypatch.setattr(module, "sample_latents", lambda *_: pytest.fail("sampled"))
    with pytest.raises(ValueError, match=match):
        run(tiny_flux, tiny_vae, **changes)


def test_long_names_are_cut_in_their_middle_and_empty_places_stay_empty():
    picture = to_picture(torch.full((32, 48, 3), 0.5))
    sheet = render_sheet(["a row", "another"], ["x" * 400, "b"], {(0, 0): picture, (1, 1): picture})
    pixels = np.asarray(sheet)
    assert (pixels == 127).all(-1).sum() == 2 * 32 * 48
    assert sheet.width < 200 and sheet.height < 300
    many_cells = {(0, column): picture.resize((1024, 1024)) for column in range(40)}
    assert max(render_sheet(["a row"], [str(column) for column in range(40)], many_cells).size) <= 8192
