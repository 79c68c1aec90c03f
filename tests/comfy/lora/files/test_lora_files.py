"""LoRA files in the programs that read them: ComfyUI and diffusers get the same delta W from each format.

delta W is written out here as alpha / rank · up @ down. Which diffusers module holds which rows is ComfyUI's table
(`comfy.utils.flux_to_diffusers`), not ours.
"""

import json
import logging
from pathlib import Path

import folder_paths
import pytest
import torch
from comfy_api.latest import io
from comfy_extras.nodes_train import LoraModelLoader, LossGraphNode, SaveLoRA, _setup_lora_adapters
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.lora.files.formats import convert, save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.nodes.loras.save import TesseraLossPlot, TesseraSaveLora, prefix_of_run
from tiny.lora.lora_files import (
    RANK,
    assert_same_deltas,
    loaded_in_comfyui,
    patched_deltas,
    random_update,
    random_updates,
)


@pytest.fixture
def modules(tiny_flux) -> dict[str, LowRank]:
    """A random update with an alpha of its own for every Linear of the tiny FLUX."""
    updates = random_updates(tiny_flux)
    assert len(updates) == 2 + 3 * 2 + 2 * 10 + 2 * 3 + 2
    return updates


def test_cores_nodes_take_our_lora(tiny_flux, modules, caplog):
    lora = LoraModel.from_modules(modules, {"ss_steps": "3"})
    with caplog.at_level(logging.WARNING):
        patched = LoraModelLoader.execute(tiny_flux, lora, 1.0).args[0]
    assert caplog.records == []
    assert_same_deltas(patched_deltas(tiny_flux, patched), modules, 1e-5)
    SaveLoRA.execute(lora, "loras/by_core", 3)
    (file,) = Path(folder_paths.get_output_directory(), "loras").glob("by_core_3_steps_*.safetensors")
    saved = load_file(file)
    assert saved.keys() == lora.keys()
    assert all(torch.equal(saved[key], lora[key]) for key in lora)


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
@pytest.mark.parametrize("algorithm", ["LoRA", "LoKr"])
def test_the_lora_of_cores_trainer_is_saved_whole(tiny_flux, tmp_path: Path, caplog, layout: str, algorithm: str):
    trained, _ = _setup_lora_adapters(tiny_flux.clone(), {}, algorithm, torch.float32, RANK)
    generator = torch.Generator().manual_seed(0)
    plain = {key: value.detach().clone() for key, value in trained.items()}
    for tensor in plain.values():
        if tensor.dim():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, plain, caplog))
    assert len(expected) > 60
    save_lora(tmp_path / "a.safetensors", plain, layout, "fp32")
    actual = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, load_file(tmp_path / "a.safetensors"), caplog))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


def test_save_lora_numbers_its_files_writes_none_twice_and_tells_the_frontend(modules):
    lora = LoraModel.from_modules(modules, {"ss_sd_model_name": "/home/somebody/flux.safetensors"})
    other = LoraModel({**lora, next(iter(lora)): next(iter(lora.values())) + 1}, lora.metadata, lora.names)
    saves = [(lora, "bf16"), (other, "bf16"), (lora, "bf16"), (lora, "fp32"), (other, "bf16")]
    with torch.inference_mode():
        outputs = [TesseraSaveLora.execute(saved, "loras/mine", "comfyui", dtype) for saved, dtype in saves]
    folder = Path(folder_paths.get_output_directory(), "loras")
    numbers = (1, 2, 1, 3, 2)
    assert [output.args[0] for output in outputs] == [str(folder / f"mine_0000{i}.safetensors") for i in numbers]
    assert [output.ui["tessera"][0]["is_new"] for output in outputs] == [True, True, False, True, False]
    assert len(list(folder.glob("mine_*"))) == 3
    (ui_entry,) = outputs[1].ui["tessera"]
    assert (ui_entry["filename"], ui_entry["subfolder"], ui_entry["type"]) == (
        "mine_00002.safetensors",
        "loras",
        "output",
    )
    assert ui_entry["notes"][0] == "ComfyUI reads this file." and ui_entry["notes"][1].startswith(
        "diffusers reads nothing"
    )
    json.dumps(outputs[1].ui, allow_nan=False)
    with safe_open(folder / "mine_00002.safetensors", "pt") as file:
        assert file.metadata() == {"ss_sd_model_name": "flux.safetensors"}
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}
    assert load_file(folder / "mine_00002.safetensors").keys() == convert(lora, "comfyui").keys()


@pytest.mark.parametrize(
    ("metadata", "prefix"),
    [
        ({"tessera": '{"output_name": "styles/cats"}', "ss_output_name": "cats"}, "loras/styles/cats"),
        ({"ss_output_name": "film"}, "loras/film"),
        ({"tessera": '{"output_name": "../../cats"}', "ss_output_name": "/srv/cats"}, "loras/lora"),
        ({}, "loras/lora"),
    ],
)
def test_lora_without_a_prefix_is_saved_under_the_name_of_its_run(metadata, prefix):
    assert prefix_of_run(LoraModel({}, metadata)) == prefix


def test_a_saved_lora_carries_the_workflow_that_its_user_asks_for(modules, tmp_path):
    """Under the names that the frontend reads, and of a folder elsewhere the last name only."""
    lora = LoraModel.from_modules(modules, {"ss_tag": "kept"})
    (tmp_path / "secret" / "faces").mkdir(parents=True)
    prompt = {"1": {"class_type": "TesseraImageFolder", "inputs": {"folder": str(tmp_path / "secret" / "faces")}}}
    workflow = {"nodes": [{"id": 1, "widgets_values": ["loras/mine", 'a "quoted" caption']}]}

    def headers(workflow, **options):
        hidden = {io.Hidden.prompt: prompt, io.Hidden.extra_pnginfo: {"workflow": workflow}}
        clone = TesseraSaveLora.PREPARE_CLASS_CLONE({"hidden_inputs": hidden})
        output = clone.execute(lora, "loras/with_workflow", "kohya", "bf16", **options)
        with safe_open(output.args[0], "pt") as file:
            return file.metadata(), output.ui["tessera"][0]["notes"]

    metadata, notes = headers(workflow, save_workflow=True)
    assert json.loads(metadata["workflow"]) == workflow and metadata["ss_tag"] == "kept"
    assert "secret" not in json.dumps(metadata)
    assert not any("save_workflow" in note for note in notes)
    # What is in view is no reason to write the same LoRA again.
    assert headers({**workflow, "extra": {"scale": 2}}, save_workflow=True)[0] == metadata
    assert headers(workflow)[0] == {"ss_tag": "kept"}
    metadata, notes = headers(
        {"nodes": ['"' * 1_000_000]}, save_workflow=True
    )  # four letters each in the file's header
    assert metadata == {"ss_tag": "kept"} and notes[-1].startswith("save_workflow: the workflow is too large")


@pytest.mark.parametrize("prefix", ["../mine", "loras/../../mine", "/srv/mine", "C:\\mine", "..\\mine", "~/mine"])
def test_save_lora_stays_inside_the_output_folder(prefix: str):
    lora = LoraModel.from_modules({"img_in": random_update(8, 8, 0)})
    with pytest.raises(ValueError, match="filename_prefix is .*; give a name inside ComfyUI's output folder"):
        TesseraSaveLora.execute(lora, prefix, "kohya", "bf16")


def test_save_lora_wants_a_name_not_a_folder():
    with pytest.raises(ValueError, match="filename_prefix is 'loras/', which is a folder; add a file name"):
        TesseraSaveLora.execute(LoraModel.from_modules({"img_in": random_update(8, 8, 0)}), "loras/", "kohya", "bf16")


def test_the_loss_plot_takes_cores_losses_and_core_takes_ours():
    with torch.inference_mode():
        plot = TesseraLossPlot.execute({"loss": [0.5, 0.4, 0.45]}, 0.9, False)
    assert plot.args[0].shape == (1, 512, 1024, 3) and plot.args[0].dtype == torch.float32
    (preview,) = plot.ui.as_dict()["images"]
    assert Path(folder_paths.get_temp_directory(), preview["subfolder"], preview["filename"]).exists()
    assert LossGraphNode.execute({"loss": [0.5, 0.4, 0.45], "seconds": [1.0, 1.0, 1.0]}, "graph").ui
    with pytest.raises(ValueError, match="loss is empty"):
        TesseraLossPlot.execute({"loss": []}, 0.9, False)
    with pytest.raises(ValueError, match="no series called 'loss'"):
        TesseraLossPlot.execute({"losses": [1.0]}, 0.9, False)
