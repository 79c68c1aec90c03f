"""What a user may do wrong, or a machine, ends in one sentence that names it, with nothing trained lost."""

import contextlib
import importlib.util
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import islice

import comfy.latent_formats
import comfy.ops
import pytest
import safetensors.torch
import torch
from comfy.model_management import InterruptProcessingException
from comfy_server import ServerFailure, error_of
from tessera.data.loader import batch_order
from tessera.data.samples import TrainingData
from tessera.models.catalogue.registry import family_of
from tessera.nodes.train.run import outputs, summary_payload
from tessera.train.loop.train_step import TrainStep
from tessera.train.loop.trainer import Trainer
from tessera.train.report.errors import TrainingStopped
from tessera.train.train_lora import RunRequest, train_lora
from tiny.native import ROWS, build, sample_of
from tiny.nodes.prompt import node
from tiny.train.runs import Watcher, cancel_at, mixed_data, run_settings, sample, train, training_data


def changed(original, **fields):
    """The sample with other tensors."""
    tensors = replace(original.load(), **fields)
    return replace(original, load=lambda *_: tensors)


def assert_refused(model, data, root, sentence, error=ValueError, **settings):
    """Refused in one sentence before a model is loaded, a folder made or a step trained."""
    watcher = Watcher()
    with pytest.raises(error, match=sentence) as refused:
        train(model, data, root, watcher, **settings)
    assert "Loading the model" not in watcher.phases and not watcher.losses
    assert not list(root.iterdir()) if root.exists() else True
    assert "\n" not in str(refused.value)


# Before anything is loaded.


def test_a_model_that_makes_sound_is_named(other_family, tmp_path):
    model = other_family["model"]
    model.model.latent_format = comfy.latent_formats.StableAudio1()
    sentence = "model is a WAN21_Vace, which Train LoRA cannot train: it doesn't make pictures or video"
    assert_refused(model, mixed_data(), tmp_path, sentence)


class ComfyFluxWrapper(torch.nn.Module):
    """Stand-in for the transformer that ComfyUI-nunchaku puts into ComfyUI's own model: it has no `params`."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = {"guidance_embed": True}
        self.dtype = torch.float32


class PackedTensor(torch.Tensor):
    """A weight as another pack's loader may keep it: bytes, with the shape of what they stand for."""

    shape = property(lambda self: self.values_shape)


def nunchaku_model(model):
    model.model.diffusion_model = ComfyFluxWrapper(model.model.diffusion_model)


def foreign_model(model):
    layer = model.model.diffusion_model.single_blocks[1].linear2
    weight = torch.zeros(len(layer.weight), 20, dtype=torch.uint8).as_subclass(PackedTensor)
    weight.values_shape = layer.weight.shape
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight.values_shape = weight.values_shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nunchaku_model, "model runs FLUX.1 as a ComfyFluxWrapper"),
        (foreign_model, "model has weights of type PackedTensor"),
    ],
)
def test_a_model_of_another_pack_s_loader_is_named_before_anything_is_read(change, message, tiny_flux, tmp_path):
    change(tiny_flux)
    watcher = Watcher()
    with pytest.raises(
        ValueError, match=f"^{message}, which training can't read; load it from a safetensors"
    ) as refused:
        train(tiny_flux, mixed_data(), tmp_path, watcher)
    assert not watcher.phases and not list(tmp_path.iterdir()) and "\n" not in str(refused.value)


def test_a_relative_of_core_s_own_with_another_transformer_is_named(tiny_flux):
    tiny_flux.model.__class__ = type("FluxSister", (type(tiny_flux.model),), {})
    tiny_flux.model.diffusion_model = comfy.ops.disable_weight_init.Linear(1, 1)
    with pytest.raises(ValueError, match="^model is a FluxSister, which Train LoRA cannot train: it has no blocks of"):
        family_of(tiny_flux)


def test_a_model_that_another_pack_has_compiled_is_not_taken_for_one(tiny_flux):
    tiny_flux.model.diffusion_model = torch.compile(tiny_flux.model.diffusion_model, backend="eager")
    assert family_of(tiny_flux).name == "flux"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": torch.zeros(1, 16, 32)}, "data has text of width 32 but the model takes 64; prepare the data with"),
        ({"latent": torch.zeros(4, 8, 8)}, "data has latents of 4 channels, but the model takes 16; prepare the data"),
        ({"conditioning": {"pooled_output": torch.zeros(1, 8)}}, "data has pooled text of width 8 but the model takes"),
    ],
    ids=["text width", "latent channels", "pooled width"],
)
def test_data_of_another_family_is_refused(fields, sentence, tiny_flux, tmp_path):
    first = changed(sample("picture 0", 4, 4), **fields)
    assert_refused(tiny_flux, TrainingData((first,), "other"), tmp_path, sentence)


def test_data_of_another_family_with_the_same_shapes_is_refused(tiny_flux, tmp_path):
    data = TrainingData((sample("picture 0", 4, 4),), "wan", family="Wan")
    sentence = "data was prepared for Wan, but the model is FLUX.1; prepare it with the VAE"
    assert_refused(tiny_flux, data, tmp_path, sentence)


def test_a_ragged_edge_is_refused_where_comfyui_s_own_forward_runs(tmp_path):
    row = ROWS[0]
    whole = sample_of(row, "picture 0")
    short = replace(sample_of(row, "picture 1"), tokens=whole.tokens - 1)
    sentence = r"data has grids with a ragged edge \(picture 1\), which .* doesn't support; set fit to whole grids on"
    assert_refused(build(row), TrainingData((whole, short), "ragged"), tmp_path, sentence)


def test_a_clip_is_refused(tiny_flux, tmp_path):
    clip = replace(sample("clip 7", 4, 4), grid=(5, 4, 4), tokens=80)
    data = TrainingData((sample("picture 0", 4, 4), clip), "clip")
    assert_refused(tiny_flux, data, tmp_path, "clip 7 is a clip of 5 frames; FLUX.1 trains on pictures")


def test_empty_data_are_refused(tiny_flux, tmp_path):
    assert_refused(tiny_flux, TrainingData((), "none"), tmp_path, "data is empty; connect Prepare Dataset")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"network": {"rank": 0}}, "rank is 0; set it to 1 or more"),
        ({"network": {"include": ("img_in, txt_in",)}}, r"'img_in, txt_in' .* a comma; write one pattern per line"),
        (
            {"network": {"include": ("*.img_attn.*, *.txt_attn.*",)}},
            r"in targets matches no layer, because it has a comma; write one pattern per line",
        ),
        ({"network": {"include": ("*.attn1.*",)}}, r"pattern '\*.attn1.\*' in targets matches no layer of this model"),
        ({"output_name": "../other"}, "output_name is '../other'; use a plain name such as 'my_lora'"),
        ({"output_name": "a/../../b"}, "output_name is .*without '..', drive letters or a leading slash"),
        ({"output_name": "/etc/passwd"}, "output_name is '/etc/passwd'; use a plain name"),
        ({"output_name": "C:\\loras\\a"}, "output_name is .*use a plain name"),
        ({"output_name": ""}, "output_name is ''; use a plain name"),
        ({"optimizer": {"warmup_steps": 6}}, "warmup_steps is 6 and the run has 6 steps; set warmup_steps below 6"),
        (
            {"memory": {"attention": "flash-attn"}},
            "attention is 'flash-attn', which is not installed here; choose 'auto'",
        ),
        ({"memory": {"attention": "cudnn"}}, "attention is 'cudnn', which needs a GPU and fp16 or bf16, not cpu in"),
        ({"resume": "tiny-1234/state-000004.tessera"}, "resume: there is no state 'tiny-1234/state-000004.tessera'"),
        ({"resume": "../outside.tessera"}, "resume: there is no state '../outside.tessera'; choose one of the list"),
        ({"steps": 0}, "steps is 0; set it to 1 or more"),
        ({"batch_size": 0}, "batch_size is 0; set it to 1 or more"),
        ({"gradient_accumulation": 0}, "gradient_accumulation is 0; set it to 1 or more"),
        ({"save_every": -1}, r"save_every is -1; set it to 0 \(at the end only\) or more"),
        ({"compile": "on"}, "compile is 'on'; choose 'auto' or 'off'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(settings, sentence, tiny_flux, tmp_path):
    (tmp_path / "outside.tessera").write_bytes(b"not a state")
    if "flash-attn" in sentence and importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed here")
    assert_refused(tiny_flux, mixed_data(), tmp_path / "loras", sentence, **settings)


def test_a_file_that_is_no_state_and_a_state_past_the_last_step_are_refused(tiny_flux, tmp_path):
    with pytest.raises(BaseException):  # noqa: B017 (Cancel, as ComfyUI raises it)
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(5))
    (folder,) = tmp_path.iterdir()
    (folder / "state-000009.tessera").write_bytes((folder / "summary.json").read_bytes())
    with pytest.raises(ValueError, match="state-000009.tessera is incomplete or from another version; choose another"):
        train(tiny_flux, mixed_data(), tmp_path, resume=f"{folder.name}/state-000009.tessera")
    with pytest.raises(ValueError, match="that state is already at step 5, but steps is 3; raise steps"):
        train(tiny_flux, mixed_data(), tmp_path, resume=f"{folder.name}/state-000005.tessera", steps=3)
    with pytest.raises(ValueError, match="resume: that state was trained with rank 4 .* here has 2; set rank to 4"):
        train(tiny_flux, mixed_data(), tmp_path, resume=f"{folder.name}/state-000005.tessera", network={"rank": 2})
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("conditioning", "sentence"),
    [
        ({"control": object()}, "positive carries control, which training can't apply"),
        (
            {"attention_mask": torch.ones(1, 32, 32), "attention_mask_img_shape": (4, 4)},
            "positive carries an attention mask",
        ),
        (
            {"reference_latents": [torch.zeros(1, 4, 8, 8)]},
            "reference picture has 4 latent channels and the model takes 16; encode it with the model's own VAE",
        ),
        (
            {"reference_latents": [torch.zeros(1, 16, 1, 8, 8)]},
            r"reference picture has the shape \(1, 16, 1, 8, 8\), as VAEs for video give it, .*; encode it with the",
        ),
    ],
)
def test_a_conditioning_that_the_forward_cannot_honour_is_named(conditioning, sentence, tiny_flux, tmp_path):
    plain = sample("picture 0", 4, 4)
    data = TrainingData((changed(plain, conditioning={**plain.load().conditioning, **conditioning}),), "odd")
    with pytest.raises(ValueError, match=sentence):
        train(tiny_flux, data, tmp_path)


# While it trains.


def kept_lora(root, step):
    (folder,) = root.iterdir()
    lora = safetensors.torch.load_file(folder / "tiny_steps" / f"tiny-step{step:06d}.safetensors")
    assert all(tensor.isfinite().all() for tensor in lora.values())
    return folder, lora


def test_a_loss_that_is_not_a_number_stops_the_run_names_the_step_and_keeps_what_was_good(tiny_flux, tmp_path):
    data = training_data(*(sample(f"picture {i}", 4, 4) for i in range(8)))
    # In the first epoch each sample has a step of its own.
    (fifth,) = list(islice(batch_order(data.samples, 1, run_settings().seed), 5))[4]
    samples = list(data.samples)
    samples[fifth] = changed(samples[fifth], latent=torch.full((16, 8, 8), float("nan")))
    poisoned = TrainingData(tuple(samples), data.fingerprint)
    watcher = Watcher()
    with pytest.raises(
        TrainingStopped,
        match="at step 5; lower learning_rate. Everything up to step 4 is saved: to continue .*, choose tiny \\(001\\)",
    ):
        train(tiny_flux, poisoned, tmp_path / "bad", watcher, save_every=0)
    assert len(watcher.losses) == 4
    folder, lora = kept_lora(tmp_path / "bad", 4)
    reference = train(tiny_flux, data, tmp_path / "four", steps=4).lora
    assert all(torch.equal(lora[name], reference[name]) for name in reference)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"], len(summary["loss"])) == ("failed", 4, 4)
    whole = train(tiny_flux, data, tmp_path / "whole")
    repeat = train(tiny_flux, data, tmp_path / "bad")
    assert all(torch.equal(repeat.lora[name], whole.lora[name]) for name in whole.lora)


def test_a_learning_rate_that_blows_the_weights_up_stops_the_run_and_keeps_no_broken_weights(tiny_flux, tmp_path):
    with pytest.raises(TrainingStopped, match=r"The (loss|gradient) became NaN or infinite at step \d; lower"):
        train(tiny_flux, mixed_data(), tmp_path, optimizer={"learning_rate": 1e30}, save_every=1)
    for path in (*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.tessera")):
        tensors = safetensors.torch.load_file(path)
        assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point()), path.name


# A device that fails.


class FailedDevice(RuntimeError):
    """Stands for torch.AcceleratorError, which every call raises once a kernel has failed."""


@pytest.mark.parametrize(
    ("fails_in", "status"), [("optimizer_step", "failed"), ("summary", "finished"), ("close", "finished")]
)
def test_a_device_that_fails_leaves_a_summary_and_its_first_error_is_told(
    fails_in, status, tiny_flux, tmp_path, monkeypatch
):
    def failing(name, real):
        def fail(trainer):
            if name == "close":
                real(trainer)  # the model must not stay for the tests that follow
            raise FailedDevice(name)

        return fail

    parts = {"optimizer_step": TrainStep, "summary": Trainer, "close": Trainer}
    for name in list(parts)[list(parts).index(fails_in) :]:
        monkeypatch.setattr(parts[name], name, failing(name, getattr(parts[name], name)))
    watcher = Watcher()
    with pytest.raises(FailedDevice, match=fails_in):
        train(tiny_flux, mixed_data(), tmp_path, watcher, steps=2)
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"]) == (status, 0 if fails_in == "optimizer_step" else 2)
    assert ("graphs_planned" in summary) == (fails_in == "close")
    assert watcher.ends == [("failed", fails_in)]


# A disk that takes no more.


class FullDisk:
    """While it is full, no file of this process may grow beyond `room` bytes: every larger write fails."""

    def __init__(self, room: int):
        self.limits = pytest.importorskip("resource")  # not on Windows
        self.room = room
        self.previous = self.limits.getrlimit(self.limits.RLIMIT_FSIZE)

    def fill(self) -> None:
        self.limits.setrlimit(self.limits.RLIMIT_FSIZE, (self.room, self.previous[1]))

    def free(self) -> None:
        self.limits.setrlimit(self.limits.RLIMIT_FSIZE, self.previous)


@contextlib.contextmanager
def disk(room):
    full = FullDisk(room)
    try:
        yield full
    finally:
        full.free()


# The LoRA has about 200 kB and the state three times that: nothing fits, or the LoRA does, or not even a summary.
ROOMS = [100_000, 300_000, 400]


@pytest.mark.parametrize("room", ROOMS)
def test_a_full_disk_at_a_save_in_between_is_noted_and_training_goes_on(room, tiny_flux, tmp_path):
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole")
    with disk(room) as full:
        watcher = Watcher(at_step=lambda step: full.fill() if step == 4 else full.free() if step == 5 else None)
        result = train(tiny_flux, mixed_data(), tmp_path / "full", watcher)
    (note,) = [n for n in watcher.notes if "could not be saved" in n]
    assert "Training continues and tries again at the next save." in note
    assert result.summary["status"] == "finished" and note in result.summary["notes"]
    assert all(torch.equal(result.lora[name], whole.lora[name]) for name in whole.lora)
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_full_disk_at_the_end_leaves_the_lora_in_the_graph_and_the_last_whole_state(room, tiny_flux, tmp_path):
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole")
    with disk(room) as full:
        watcher = Watcher(at_step=lambda step: full.fill() if step == 6 else None)
        result = train(tiny_flux, mixed_data(), tmp_path / "full", watcher)
    assert result.loss == whole.loss
    assert all(torch.equal(result.lora[name], whole.lora[name]) for name in whole.lora)
    assert not list(tmp_path.rglob(".*"))
    (folder,) = (tmp_path / "full").iterdir()
    states = sorted(path.name for path in folder.glob("*.tessera"))
    assert states == ["state-000002.tessera", "state-000004.tessera"]
    (note,) = [note for note in watcher.notes if "free some space" in note and "summary.json" not in note]
    restored_watcher = Watcher()
    restored = train(tiny_flux, mixed_data(), tmp_path / "full", restored_watcher)
    assert all(torch.equal(restored.lora[name], whole.lora[name]) for name in whole.lora)
    if room == 300_000:  # the LoRA finds room, its state does not
        assert note.startswith("state-000006.tessera could not be saved: ")
        assert note.endswith("The finished LoRA is saved, but you can't continue from its last step.")
        assert (
            result.saved
            and result.path.is_file()
            and result.summary["status"] == "finished"
            and not restored_watcher.losses
        )
        return
    assert note.startswith("tiny.safetensors could not be saved: ")
    state = f"{folder.name}/state-000004.tessera"
    advice = f"Everything up to step 4 is saved: to continue with other settings, choose {state} under resume."
    graph = (
        "The LoRA is still passed on in the graph: connect Save LoRA and queue again to save it on a disk with room. "
    )
    assert note.endswith(f" {graph}{advice}")
    assert not result.saved and result.copy is None and result.summary["status"] == "unsaved"
    assert "Resumed at step 4." in restored_watcher.notes and restored.saved


def test_a_lora_that_its_folder_does_not_take_at_the_end_is_copied_elsewhere(tiny_flux, tmp_path):
    """A file lies where the folder was: no system makes a LoRA below it."""
    root, spare = tmp_path / "output" / "loras", tmp_path / "temp"

    def take_away(step):
        if step == 2:
            (folder,) = root.iterdir()
            shutil.rmtree(folder)
            folder.write_text("in the way")

    watcher, settings = Watcher(at_step=take_away), run_settings(steps=2, save_every=1)
    result = train_lora(RunRequest(tiny_flux, mixed_data(), settings, root, watcher, spare_folder=spare))
    (folder,) = root.iterdir()
    copy = spare / f"{folder.name}.safetensors"
    assert result.copy == copy and list(spare.iterdir()) == [copy] and not result.saved
    saved = safetensors.torch.load_file(copy)
    assert saved.keys() == result.lora.keys() and all(torch.equal(saved[name], result.lora[name]) for name in saved)
    (note,) = [note for note in watcher.notes if note.startswith("tiny.safetensors could not be saved: ")]
    assert f"on a disk with room, and a copy is in temp/{copy.name} until ComfyUI restarts. " in note
    assert outputs(result)[2] == str(copy) and summary_payload(result)["path"] == ""
    assert outputs(replace(result, copy=None))[2] == ""


def test_a_full_disk_at_cancel_still_ends_the_run_as_cancelled_and_gives_its_memory_back(tiny_flux, tmp_path):
    with disk(400) as full:
        watcher = Watcher(at_step=lambda step: full.fill() if step == 3 else None)
        watcher.before_step = cancel_at(3).before_step
        with pytest.raises(InterruptProcessingException):
            train(tiny_flux, mixed_data(), tmp_path, watcher)
    (note,) = [note for note in watcher.notes if "step000003.safetensors could not be saved" in note]
    assert note.endswith("The last saved state is that of step 2.")
    assert [path.name for path in tmp_path.rglob("*.tessera")] == ["state-000002.tessera"]


def told_of_a_full_disk(model, root, step, **options):
    """Notes of a run whose disk is full from this step on."""
    with disk(400) as full:
        watcher = Watcher(at_step=lambda count: full.fill() if count == step else None)
        assert not train(model, mixed_data(), root, watcher, **options).saved
    return [note for note in watcher.notes if "is still passed on in the graph" in note]


def test_a_full_disk_at_the_end_says_if_nothing_was_saved_before_or_elsewhere(tiny_flux, tmp_path):
    (note,) = told_of_a_full_disk(tiny_flux, tmp_path / "none", 2, steps=2, save_every=0)
    assert note.endswith(" Nothing was saved before that; set save_every to save on the way.")
    (note,) = told_of_a_full_disk(tiny_flux, tmp_path / "all", 1, steps=2, save_every=1)
    assert note.endswith(" Nothing was saved before that.")
    first = train(tiny_flux, mixed_data(), tmp_path, steps=3, save_every=0).path.parent
    state_name = f"{first.name}/state-000003.tessera"
    options = {"steps": 4, "save_every": 0, "resume": state_name, "output_name": "styles/other"}
    (note,) = told_of_a_full_disk(tiny_flux, tmp_path, 4, **options)
    assert (
        f"Everything up to step 3 is saved: to continue with other settings, choose {state_name} under resume" in note
    )


def test_sentence_on_a_run_without_a_loss_names_what_could_be_saved(tiny_flux, tmp_path, monkeypatch):
    finite = TrainStep.finite
    monkeypatch.setattr(
        TrainStep, "finite", lambda self, total: finite(self, total * (math.nan if self.progress.step == 3 else 1))
    )
    with disk(400) as full:
        watcher = Watcher(at_step=lambda step: full.fill() if step == 3 else None)
        with pytest.raises(
            TrainingStopped, match="at step 4; lower learning_rate. Everything up to step 2 is saved: t"
        ):
            train(tiny_flux, mixed_data(), tmp_path, watcher)
    (state,) = tmp_path.rglob("*.tessera")
    assert state.name == "state-000002.tessera"
    # Of a run that goes on elsewhere and makes no step, what is kept is what it went on from.
    monkeypatch.setattr(TrainStep, "finite", lambda self, total: finite(self, total * math.nan))
    state_name = state.relative_to(tmp_path).as_posix()
    with pytest.raises(
        TrainingStopped,
        match=f"Everything up to step 2 is saved: to continue .*, choose {re.escape(state_name)} under resume",
    ):
        train(tiny_flux, mixed_data(), tmp_path, resume=state_name, output_name="other")


def test_a_state_that_finds_no_room_does_not_keep_old_loras(tiny_flux, tmp_path):
    with disk(300_000) as full:
        watcher = Watcher(at_step=lambda step: full.fill() if step == 2 else None)
        train(tiny_flux, mixed_data(), tmp_path, watcher, steps=4, save_every=1, keep_last=1)
    assert any("state-000004.tessera could not be saved" in note for note in watcher.notes)
    assert [path.name for path in tmp_path.rglob("*step*.safetensors")] == ["tiny-step000003.safetensors"]
    assert [path.name for path in tmp_path.rglob("*.tessera")] == ["state-000001.tessera"]


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [({}, {"ema_decay": 0.9}), ({"algorithm": "loha"}, {"optimizer": "lion"}), ({"algorithm": "dora"}, {})],
)
def test_a_disk_without_room_for_the_least_that_a_run_writes_is_told_before_it_trains(
    network, optimizer, tiny_flux, tmp_path, monkeypatch
):
    """What it asks for is no more than what is written, and nearly all of that."""
    options = {"network": network, "optimizer": optimizer, "save_every": 1}
    folder = train(tiny_flux, mixed_data(), tmp_path / "whole", **options, steps=4).path.parent
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    usage = shutil.disk_usage(tmp_path)

    def leave(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))

    for steps, text, states in ((1, "a state of", 1), (2, "2 states of", 2), (4, "3 states of", 3)):
        size = sizes["tiny.safetensors"] + states * sizes["state-000004.tessera"]
        sentence = rf"^output_name: the disk .* MB free, but this run writes at least .* and {text} .*; free some space"
        leave(size * 8 // 10)
        assert_refused(tiny_flux, mixed_data(), tmp_path / f"full {steps}", sentence, **options, steps=steps)
        leave(size)
        train(tiny_flux, mixed_data(), tmp_path / f"enough {steps}", **options, steps=steps)
    # A run that goes on needs room for what is not there yet.
    root = tmp_path / "resumed"
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), root, cancel_at(2), **options, steps=4)
    leave(sizes["tiny.safetensors"] + sizes["state-000004.tessera"])
    (state,) = root.rglob("state-000002.tessera")  # which stays beside the newest two
    with pytest.raises(ValueError, match="writes at least .* and 2 states of"):
        train(tiny_flux, mixed_data(), root, **options, steps=4, resume=state.relative_to(root).as_posix())
    train(tiny_flux, mixed_data(), root, watcher := Watcher(), **options, steps=4)
    assert "Resumed at step 2." in watcher.notes


# Through the server.


def graph(loaders, model="tiny_flux.safetensors", **changes):
    inputs = {"output_name": "bad", "steps": 2, "learning_rate": 1e-3, "rank": 4, "batch_size": 1}
    inputs |= {"gradient_accumulation": 1, "seed": 0, "compile": "off", "save_every": 0, "resume": "latest"}
    return loaders | {
        "model": node("UNETLoader", unet_name=model, weight_dtype="default"),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "train": node("TesseraTrainLora", model=["model", 0], data=["data", 0], **(inputs | changes)),
    }


def test_the_server_shows_the_sentence_on_the_training_node(server, tiny_loaders):
    cases = {
        "output_name is '../../bad'; use a plain name": graph(tiny_loaders, output_name="../../bad"),
        "output_name is '/bad'; use a plain name": graph(tiny_loaders, output_name="/bad"),
    }
    for sentence, prompt in cases.items():
        entry = server.wait(server.queue(prompt))
        assert error_of(entry).startswith("TesseraTrainLora train: ") and sentence in error_of(entry)
    with pytest.raises(ServerFailure, match="rank") as refused:
        server.queue(graph(tiny_loaders, rank=0))
    assert "smaller than min" in str(refused.value)
    assert not list(server.base.rglob("bad*"))
