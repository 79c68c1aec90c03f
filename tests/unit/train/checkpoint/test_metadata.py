"""Metadata of a LoRA file: true, strings only, no path of a disk, a hash that fits the file."""

import dataclasses
import hashlib
import json
from datetime import datetime
from pathlib import Path

import torch
from safetensors import safe_open
from tessera.lora.files.formats import save_lora
from tessera.lora.files.header import for_file
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.lora.options import NetworkOptions
from tessera.models.family import Origin
from tessera.models.flux.names import FLUX1_NAMES
from tessera.models.name_table import read_recorded
from tessera.models.native.names import names_of
from tessera.train.checkpoint.metadata import RunFacts, metadata_for
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions

FACTS = RunFacts(
    output_name="styles/my cat",
    family="flux",
    variant="dev",
    origin=Origin("flux-1-dev", "https://github.com/black-forest-labs/flux", "flux1", "networks.lora_flux"),
    base_model="flux1-dev.safetensors",
    steps=120,
    batch_size=2,
    gradient_accumulation=3,
    seed=2**60 + 1,
    network=NetworkOptions(rank=4, alpha=2.0, include=("double_blocks.*.img_attn.*",)),
    optimizer=OptimizerOptions(learning_rate=2e-4, warmup_steps=7),
    objective=ObjectiveOptions(guidance=1.5),
    memory=MemoryOptions(checkpointing="full"),
    resolution="1024x960",
    samples=40,
    started="2026-03-01T10:00:00+00:00",
    finished="2026-03-01T11:00:00+00:00",
    final_loss=0.25,
    tessera_version="0.1.0",
    comfyui_version="0.30.0",
    torch_version="2.14.0",
)


def lora() -> LoraModel:
    generator = torch.Generator().manual_seed(0)
    part = LowRank(torch.randn(4, 8, generator=generator), torch.randn(24, 4, generator=generator), 2.0)
    return LoraModel.from_modules({"double_blocks.0.img_attn.qkv": part, "single_blocks.0.modulation.lin": part})


def metadata_and_data(path: Path) -> tuple[dict[str, str], bytes]:
    """The header's metadata and the bytes after the header, read by the format's definition."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"], content[8 + length :]


def test_the_run_is_described_in_strings():
    metadata = metadata_for(FACTS, lora())
    assert all(type(key) is str and type(value) is str for key, value in metadata.items())
    expected = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "flux-1-dev/lora",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": "my cat",
        "modelspec.date": "2026-03-01T11:00:00+00:00",
        "modelspec.resolution": "1024x960",
        "ss_output_name": "my cat",
        "ss_sd_model_name": "flux1-dev.safetensors",
        "ss_base_model_version": "flux1",
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": "4",
        "ss_network_alpha": "2.0",
        "ss_learning_rate": "0.0002",
        "ss_steps": "120",
        "ss_seed": str(2**60 + 1),
        "ss_total_batch_size": "6",
        "ss_num_train_images": "40",
        "ss_gradient_checkpointing": "True",
    }
    assert {key: metadata.get(key) for key in expected} == expected
    started = datetime(2026, 3, 1, 10).timestamp() - datetime(1970, 1, 1).timestamp()
    assert float(metadata["ss_training_started_at"]) == started


def test_the_trigger_words_of_all_folders_are_the_trigger_phrase_each_once():
    phrases = ["ohwx fox, ", "ohwx fox", "", "a wolf"]
    data = {"made_with": {"folders": [{"trigger_words": phrase} for phrase in phrases]}}
    assert metadata_for(dataclasses.replace(FACTS, data=data), lora())["modelspec.trigger_phrase"] == "ohwx fox, a wolf"
    assert "modelspec.trigger_phrase" not in metadata_for(FACTS, lora())


def test_all_settings_are_there_as_json():
    settings = json.loads(metadata_for(FACTS, lora())["tessera"])
    network = settings["network"]
    assert (network["rank"], network["alpha"], network["include"]) == (4, 2.0, ["double_blocks.*.img_attn.*"])
    assert settings["objective"]["guidance"] == 1.5
    assert settings["optimizer"]["warmup_steps"] == 7
    assert settings["torch_version"] == "2.14.0"


def test_the_model_is_called_what_its_family_says():
    origin = Origin("wan2.1", "https://github.com/Wan-Video/Wan2.1")
    metadata = metadata_for(dataclasses.replace(FACTS, origin=origin), lora())
    assert metadata["modelspec.architecture"] == "wan2.1/lora"
    assert metadata["modelspec.implementation"] == "https://github.com/Wan-Video/Wan2.1"
    assert not {"ss_base_model_version", "ss_network_module"} & set(metadata)


def test_the_names_of_a_model_without_a_table_stand_in_a_key_of_their_own():
    table = names_of(["layers.0.attention.qkv", "layers.1.attention.qkv"])
    metadata = metadata_for(dataclasses.replace(FACTS, modules=table.recorded()), {})
    assert read_recorded(metadata["tessera_modules"]) == table
    plain = metadata_for(dataclasses.replace(FACTS, modules=FLUX1_NAMES.recorded()), {})
    assert "tessera_modules" not in plain
    assert metadata["tessera"] == plain["tessera"]


def test_unknown_fields_are_not_written():
    metadata = metadata_for(dataclasses.replace(FACTS, base_model="", finished="", final_loss=None), lora())
    assert not {"ss_sd_model_name", "modelspec.date", "ss_training_finished_at"} & set(metadata)
    assert json.loads(metadata["tessera"])["final_loss"] is None


def test_absolute_paths_are_cut_to_the_file_name():
    folders = ("/home/ann/", "C:\\Users\\ann\\", "\\\\nas\\ann\\", "~/ann/", "file:///home/ann/")
    for path in (folder + "flux.safetensors" for folder in folders):
        network = NetworkOptions(include=(path,))
        metadata = metadata_for(dataclasses.replace(FACTS, base_model=path, output_name=path, network=network), lora())
        assert "ann" not in json.dumps(metadata)
        assert metadata["ss_sd_model_name"] == metadata["modelspec.title"] == "flux.safetensors"


def test_paths_inside_of_text_are_cut_too_and_other_text_stays():
    lines = ("path='/home/ann (b), c/y.bin'", r"disk='C:\\Users\\ann b\\z.bin'", r"nas='\\\\nas\\ann\\n'", "n=(1)")
    args = "\n".join((*lines, "list=['~/ann/k', '/ann/l/m']", "r='a/b'"))
    optimizer = OptimizerOptions(optimizer="custom", optimizer_class="torch.optim.Adam", optimizer_args=args)
    metadata = metadata_for(dataclasses.replace(FACTS, optimizer=optimizer), lora())
    assert "ann" not in json.dumps(metadata)
    cut = "path='y.bin'\ndisk='z.bin'\nnas='n'\nn=(1)\nlist=['k', 'm']\nr='a/b'"
    assert json.loads(metadata["tessera"])["optimizer"]["optimizer_args"] == cut
    assert metadata["ss_optimizer_args"] == cut.replace("\n", ", ")
    texts = {
        "prose": "see /ann/b/c, x=/ann b/d, 1/2 and/or https://a.b/c/d and </p> / x",
        "json": json.dumps({"a": ["/ann/x/y"], "b": 'a "q"\nb'}),
        "text": json.dumps({"a": 'f(1)\nb "c"'}, indent=2),
        "modelspec.thumbnail": "data:image/jpeg;base64,/9j/4AAQ/ann+",
    }
    header = for_file(texts, lora(), "kohya")
    assert header["prose"] == "see c, x=d, 1/2 and/or https://a.b/c/d and </p> / x"
    assert json.loads(header["json"]) == {"a": ["y"], "b": 'a "q"\nb'}
    assert all(header[name] == texts[name] for name in ("text", "modelspec.thumbnail"))


def test_a_loss_that_is_no_number_still_gives_valid_json():
    metadata = metadata_for(dataclasses.replace(FACTS, final_loss=float("nan")), lora())
    assert json.loads(metadata["tessera"])["final_loss"] == "nan"


def test_the_hash_is_that_of_the_bytes_after_the_header(tmp_path: Path):
    model = lora()
    model.metadata = metadata_for(FACTS, model)
    for layout in ("kohya", "comfyui", "diffusers"):
        for dtype in ("fp32", "bf16", "fp16"):
            path = tmp_path / f"{layout}-{dtype}.safetensors"
            save_lora(path, model, layout, dtype)
            metadata, data = metadata_and_data(path)
            digest = hashlib.sha256(data).hexdigest()
            assert metadata["modelspec.hash_sha256"] == f"0x{digest}"
            assert metadata["sshs_model_hash"] == digest
            with safe_open(path, "pt") as file:
                assert file.metadata() == metadata


def test_a_file_names_the_implementation_that_its_keys_follow(tmp_path: Path):
    model = lora()
    model.metadata = metadata_for(FACTS, model)
    save_lora(tmp_path / "a", model, "diffusers")
    metadata, _ = metadata_and_data(tmp_path / "a")
    assert metadata["modelspec.implementation"] == "diffusers"
    assert "ss_network_module" not in metadata
