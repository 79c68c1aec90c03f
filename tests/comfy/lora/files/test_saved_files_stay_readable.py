"""What version 0.1 saved is read as its bytes stand: caches, LoRAs and states in tests/data/saved_by_0_1."""

import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import folder_paths
import pytest
import tessera
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny.data import image_encoders
from tiny.nodes.prompt import awaited

SAVED = Path(__file__).resolve().parents[3] / "data" / "saved_by_0_1"
RUNS = json.loads((SAVED / "runs.json").read_text(encoding="utf-8"))
FORMATS = {"kohya": "bf16", "comfyui": "fp16", "diffusers": "fp32"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEP = 3
# What a LoRA's header says of the moment, the machine and the numbers that came out.
OF_THE_DAY = {"modelspec.date", "ss_training_started_at", "ss_training_finished_at"}
OF_THE_DAY |= {"modelspec.hash_sha256", "sshs_model_hash"}
FACTS_OF_THE_DAY = {"started", "finished", "final_loss", "tessera_version", "comfyui_version", "torch_version"}
# Options that nodes got since, and what each is where nobody sets it.
ADDED = {
    "training_adapter": None,
    "training_adapter_strength": 1.0,
    "training_adapter_low_noise": "same",
    "training_adapter_strength_low_noise": 1.0,
    "guidance_loss_scale": 0.0,
    "sample_ratio": 1.0,
    "products": "full",
    "base": "as stored",
    "shard": False,
    "loaded_base": "as stored",
    "verify": "auto",
}


def node_of(kind):
    nodes = awaited(awaited(tessera.comfy_entrypoint()).get_node_list())
    (node,) = [node for node in nodes if node.GET_SCHEMA().node_id == kind]
    return node


def call(kind, **inputs):
    """The outputs of a node, with what is not given at the defaults that it shows."""
    node = node_of(kind)
    shown = node.INPUT_TYPES()
    entries = {**shown.get("required", {}), **shown.get("optional", {})}
    given = {name: entry[1]["default"] for name, entry in entries.items() if len(entry) > 1 and "default" in entry[1]}
    with torch.inference_mode():
        return awaited(node.PREPARE_CLASS_CLONE(None).execute(**(given | inputs))).result


def load_encoders(name, models):
    """(VAE, CLIP) of a family."""
    if name == "flux":
        clip = tiny.load_clip(models / "clip_l.safetensors", models / "t5.safetensors")
        return tiny.load_vae(models / "vae.safetensors"), clip
    if name == "flux2":
        vae, clip = image_encoders.load_flux2_vae(), image_encoders.load_klein_clip()
        vae.first_stage_model.load_state_dict(load_file(models / "flux2_vae.safetensors"))
        clip.cond_stage_model.load_state_dict(load_file(models / "klein.safetensors"))
        return vae, clip
    vae = tiny.load_vae(models / "wan_vae.safetensors")
    if name == "wan":
        return vae, tiny.load_wan_clip(models / "umt5.safetensors")
    clip = image_encoders.load_seeing_qwen_clip(models / "qwen.safetensors")
    visual = clip.cond_stage_model.qwen25_7b.transformer.visual
    visual.load_state_dict(load_file(models / "qwen_vision.safetensors"))
    return vae, clip


def refuse(*_args, **_kwargs):
    raise AssertionError("what is in the cache is encoded again")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with zipfile.ZipFile(SAVED / "models.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module", params=RUNS)
def saved(request, models, tmp_path_factory):
    """One family: the MODEL, the data that Prepare Dataset gives with encoders that refuse to encode, and the run."""
    name, base = request.param, tmp_path_factory.mktemp("base")
    shutil.copytree(SAVED / "input", base / "input")
    shutil.copytree(SAVED / name / "cache", base / "user" / "tessera" / "cache")
    before = folder_paths.get_input_directory(), folder_paths.get_user_directory()
    folder_paths.set_input_directory(str(base / "input"))
    folder_paths.set_user_directory(str(base / "user"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            # The dtype of a VAE is a part of its keys, and core goes by the device.
            patch.setattr("comfy.model_management.vae_dtype", lambda *_, **__: torch.float32)
            vae, clip = load_encoders(name, models)
            vae.encode = clip.encode_from_tokens = refuse
            asked, dataset = RUNS[name], None
            for kind in ("TesseraImageFolder", "TesseraVideoFolder"):
                if kind in asked:
                    (dataset,) = call(kind, **asked[kind], dataset=dataset)
            prepare = asked["TesseraPrepareDataset"]
            data, *_ = call("TesseraPrepareDataset", dataset=dataset, vae=vae, clip=clip, **prepare)
            model = tiny.LOADERS[name](models / f"{name}.safetensors", torch.float32)
            (run,) = (path.parent for path in (SAVED / name).glob("*/summary.json"))
            cache = base / "user" / "tessera" / "cache"
            yield SimpleNamespace(name=name, asked=asked, data=data, model=model, run=run, cache=cache)
    finally:
        folder_paths.set_input_directory(before[0])
        folder_paths.set_user_directory(before[1])


@pytest.fixture
def output(tmp_path):
    """An empty output folder of ComfyUI."""
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path / "output"))
    (tmp_path / "output" / "loras").mkdir(parents=True)
    yield tmp_path / "output"
    folder_paths.set_output_directory(before)


def put_in(output, saved, *patterns):
    """Puts the files of the saved run that fit into the output folder, and returns their folder there."""
    folder = output / "loras" / saved.run.name
    folder.mkdir()
    for pattern in patterns:
        for file in saved.run.glob(pattern):
            shutil.copy(file, folder)
    return folder


def train(saved, **changes):
    """(LORA_MODEL, losses, path of the file) of the saved run's Train LoRA node."""
    asked = saved.asked
    options = {
        "network": call("TesseraLoraNetwork", **asked["TesseraLoraNetwork"])[0],
        "optimizer": call("TesseraOptimizer", **asked["TesseraOptimizer"])[0],
    }
    if "TesseraValidation" in asked:
        options["validation"] = call("TesseraValidation", **asked["TesseraValidation"])[0]
    inputs = {**options, **asked["TesseraTrainLora"], **changes}
    lora, loss, path, *_ = call("TesseraTrainLora", model=saved.model, data=saved.data, **inputs)
    return lora, loss["loss"], Path(path)


def header_of(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    different = [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ]
    assert not different, different


def bytes_of(tensor):
    return tensor.dtype, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_encoded_is_found_and_read_as_it_stands(saved):
    """Encoding anything again would have raised while the data was prepared."""
    assert contents(saved.cache) == contents(SAVED / saved.name / "cache")
    files = (SAVED / saved.name / "cache").rglob("*.safetensors")
    there = {bytes_of(tensor) for file in files for tensor in load_file(file).values()}
    for sample in saved.data.samples:
        read = sample.load()
        beside = [part for part in read.conditioning.values() if part is not None]
        tensors = [t for part in beside for t in (part if isinstance(part, list) else [part])]
        assert all(bytes_of(tensor) in there for tensor in (read.latent, read.text, *tensors)), sample.name


def test_a_finished_run_is_returned_from_its_files(saved, output):
    folder = put_in(output, saved, "*")
    before = contents(output)
    lora, loss, path = train(saved)
    assert contents(output) == before and path == folder / f"{saved.name}.safetensors"
    assert_same_tensors(dict(lora), load_file(saved.run / path.name))
    assert loss == json.loads((saved.run / "summary.json").read_text(encoding="utf-8"))["loss"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_lora_is_saved_in_each_format_with_the_bytes_and_the_header_that_it_had(saved, output, format):
    put_in(output, saved, "*")
    lora, _, _ = train(saved)
    (path,) = call("TesseraSaveLora", lora=lora, filename_prefix="again", format=format, dtype=FORMATS[format])
    expected = SAVED / saved.name / f"{format}.safetensors"
    assert_same_tensors(load_file(path), load_file(expected))
    assert header_of(path) == header_of(expected)


def updates(lora):
    """(down, alpha / rank · up) of each module of a LoRA in kohya's names; the ratio is a power of two here."""
    modules = {name.partition(".")[0] for name in lora}
    pairs = {name: (lora[f"{name}.lora_down.weight"], lora[f"{name}.lora_up.weight"]) for name in modules}
    return {name: (down, up * (lora[f"{name}.alpha"] / len(down))) for name, (down, up) in pairs.items()}


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_begins_from_a_lora_of_each_format_as_it_stands(saved, output, lora_folder, format):
    """At a rate of zero a run ends where it began."""
    name = f"{saved.name}-{format}.safetensors"
    shutil.copy(SAVED / saved.name / f"{format}.safetensors", lora_folder / name)
    folder_paths.filename_list_cache.clear()
    network = call("TesseraLoraNetwork", **saved.asked["TesseraLoraNetwork"], start_from=name)[0]
    optimizer = call("TesseraOptimizer", lr_scheduler="curve", lr_curve="0:0, 100:1")[0]
    lora, _, _ = train(saved, steps=1, network=network, optimizer=optimizer, validation=None)
    found, dtype = updates(lora), DTYPES[FORMATS[format]]
    trained = updates(load_file(saved.run / f"{saved.name}.safetensors"))
    assert found.keys() == trained.keys()
    for module, pair in trained.items():
        assert all(torch.equal(a, b.to(dtype).float()) for a, b in zip(found[module], pair, strict=True)), module


def test_a_state_is_read_and_written_again_as_it_stands(saved, output):
    """A run that is no longer than its state trains nothing and saves what it has read. A state is saved before its
    step is validated, so that a run which goes on does that first."""
    put_in(output, saved, f"state-{STEP:06d}.tessera", "*-best.safetensors")
    _, loss, path = train(saved, steps=STEP)
    again, stored = (folder / f"state-{STEP:06d}.tessera" for folder in (path.parent, saved.run))
    assert path.parent.name != saved.run.name
    assert_same_tensors(load_file(again), load_file(stored))
    found, expected = (json.loads(header_of(file)["tessera"]) for file in (again, stored))
    # Checkpointing was full by default then; what auto chooses now stands beside.
    assert found.pop("machine").keys() == expected.pop("machine").keys() | {"checkpointing"}
    if "validation" in expected:
        points, before = found["validation"]["points"], expected["validation"]["points"]
        assert points[: len(before)] == before and [point["step"] for point in points[len(before) :]] == [STEP]
        del points[len(before) :]
    assert without_added(found, expected) == expected and loss == expected["loss"]


def make_unbeatable(best):
    """Has a best LoRA say that its validation loss was zero, so that a run which knows it keeps no other."""
    header = header_of(best)
    header["tessera_best"] = json.dumps(json.loads(header["tessera_best"]) | {"loss": 0.0})
    save_file(load_file(best), best, header)


def distance(one, other):
    """The Euclidean distance of two LoRAs as `updates` gives them."""
    pairs = [pair for name in other for pair in zip(one[name], other[name], strict=True)]
    return sum(float((a.double() - b.double()).square().sum()) for a, b in pairs) ** 0.5


def test_a_run_goes_on_from_its_state(saved, output):
    """At its step, with the optimizer, the schedule and the random draws as they were: it ends where the run ended that
    was never stopped. Other processors give other last digits, and an optimizer makes them larger."""
    folder = put_in(output, saved, f"state-{STEP:06d}.tessera", "*-best.safetensors")
    for best in folder.glob("*-best.safetensors"):
        make_unbeatable(best)
    resume = f"{folder.name}/state-{STEP:06d}.tessera"
    assert node_of("TesseraTrainLora").validate_inputs(resume=resume) is True
    start, _, path = train(saved, steps=STEP)
    shutil.rmtree(path.parent)  # of that run, whose state would do as well
    lora, loss, path = train(saved)
    whole = json.loads((saved.run / "summary.json").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert path.parent == folder and summary["key"] == whole["key"]
    # A run from step 0 on would have saved the LoRA of that step again.
    assert set(summary["files"]) <= set(whole["files"]) - {f"{saved.name}-step{STEP:06d}.safetensors"}
    if "validation" in whole:
        assert summary["validation"]["best"] == whole["validation"]["best"] | {"loss": 0.0}
    assert loss[:STEP] == whole["loss"][:STEP]
    assert loss[STEP:] == pytest.approx(whole["loss"][STEP:], rel=1e-4)
    found, stored, before = map(updates, (lora, load_file(saved.run / path.name), start))
    assert found.keys() == stored.keys()
    off, moved = distance(found, stored), distance(before, stored)
    assert moved > 0 and off <= 0.01 * moved
    assert_same_header(header_of(path), header_of(saved.run / path.name))


def without_added(found, before):
    """Less the options that version 0.1 did not have, each of which is as nobody has set it."""
    if isinstance(found, list) and isinstance(before, list) and len(found) == len(before):
        return [without_added(one, other) for one, other in zip(found, before, strict=True)]
    if not (isinstance(found, dict) and isinstance(before, dict)):
        return found
    added = {name: value for name, value in found.items() if name in ADDED and name not in before}
    assert added == {name: ADDED[name] for name in added}
    return {name: without_added(found[name], before.get(name)) for name in found if name not in added}


def assert_same_header(found, expected):
    """Each field is there and says the same, but for those of the day."""
    assert found.keys() == expected.keys()
    facts, before = (json.loads(header.pop("tessera")) for header in (found, expected))
    facts = without_added(facts, before)
    assert facts.keys() == before.keys() and FACTS_OF_THE_DAY <= facts.keys()
    assert before["memory"].pop("checkpointing") == "full" and facts["memory"].pop("checkpointing") == "auto"
    assert [name for name in found if found[name] != expected[name] and name not in OF_THE_DAY] == []
    assert [name for name in facts if facts[name] != before[name] and name not in FACTS_OF_THE_DAY] == []
