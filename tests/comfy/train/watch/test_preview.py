"""Previews: a picture at a step is what core's nodes make of the LoRA saved at that step, and the run is as without."""

import json

import comfy.model_management
import nodes as core
import numpy as np
import pytest
import tiny
import torch
from comfy.quant_ops import QuantizedTensor
from PIL import Image
from tessera.compile.attach import compiled_model_of
from tessera.compile.settings import CompileSettings
from tessera.memory.host import flat_weights
from tessera.memory.host.flat_weights import parts_of, plain_tensors, restore_inference_mode, weight_refs, with_parts
from tessera.memory.swap import training
from tessera.memory.weights.frozen import FrozenWeights
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.nodes.model.compile import TesseraCompileModel
from tessera.train.preview.sampling import Sampling, zeroed
from tessera.train.report.errors import TrainingStopped
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch import previewer as module
from tessera.train.watch.previewer import Preview, Previewer
from tiny.compile.compiling import Graphs
from tiny.memory.alive import Since, size_of
from tiny.models.sampling import conditioning, unload_outside_inference_mode
from tiny.train.runs import Watcher, run_settings, sample, training_data

SIZE = {"width": 64, "height": 48, "steps": 2}
TEXTS = {"workflow": '{"nodes": ["ä"]}', "prompt": "{}"}


def preview(vae, seed=5, every=2, text=0, at_start=True, use_ema=True, **changes):
    values = {**SIZE, "seed": seed, **changes}
    return Preview(Sampling(vae, conditioning("flux", 16, text), **values), every, at_start, use_ema)


def one_size():
    return training_data(sample("a", 4, 6), sample("b", 6, 4))


def run(model, root, previews=(), watcher=None, **changes):
    changes = {"steps": 4, "optimizer": {"learning_rate": 0.05}, **changes}
    watchers = [Previewer(previews, model, texts=TEXTS)] if previews else []
    compile_settings = CompileSettings("eager")
    return train_lora(
        RunRequest(model, one_size(), run_settings(**changes), root, watcher or Watcher(), compile_settings, watchers)
    )


def core_picture(model, vae, lora, seed, text=0):
    """Core's Load LoRA, KSampler and VAE Decode, as 8 bits. lora: a file, or None."""
    import comfy.sd
    import comfy.utils

    with torch.inference_mode():
        if lora is not None:
            model, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0)
        latent = core.EmptyLatentImage().generate(64, 48)[0]
        positive = conditioning("flux", 16, text)
        (sampled,) = core.KSampler().sample(model, seed, 2, 1.0, "euler", "simple", positive, positive, latent)
        (picture,) = core.VAEDecode().decode(vae, sampled)
        comfy.model_management.unload_all_models()
    return np.clip(255.0 * picture[0].numpy(), 0, 255).astype(np.uint8)


def read(folder, name):
    with Image.open(folder / "previews" / name, formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGB"))


def test_the_picture_at_a_step_is_what_core_makes_of_the_lora_saved_at_it(tiny_flux, tiny_vae, tmp_path):
    latent = core.EmptyLatentImage().generate(64, 48)[0]  # it wins over the width
    previews = [preview(tiny_vae, seeds=2), preview(tiny_vae, text=3, latent_image=latent, width=16)]
    previews.append(preview(tiny_vae, use_ema=False))
    result = run(tiny_flux, tmp_path, previews, optimizer={"learning_rate": 0.05, "ema_decay": 0.5})
    folder = result.path.parent
    files = [f"previews/step{step:06d}_{row}.png" for step in (0, 2, 4) for row in range(4)]
    assert result.summary["previews"] == {"sheet": "previews/sheet.png", "files": files, "graphs_compiled": 0}
    with Image.open(folder / "previews" / "sheet.png", formats=["PNG"]) as sheet:
        assert sheet.text == TEXTS
    pictures = {}
    for step, lora in {0: None, 2: folder / "tiny_steps" / "tiny-step000002.safetensors", 4: result.path}.items():
        for row, (seed, text) in enumerate([(5, 0), (6, 0), (5, 3)]):
            pictures[step, row] = read(folder, f"step{step:06d}_{row}.png")
            assert np.array_equal(pictures[step, row], core_picture(tiny_flux, tiny_vae, lora, seed, text)), (step, row)
        stepped = read(folder, f"step{step:06d}_3.png")  # the prompt of row 0 with the weights that are stepped
        assert np.array_equal(stepped, pictures[step, 0]) == (step == 0)
    assert len({picture.tobytes() for picture in pictures.values()}) == 9
    with Image.open(folder / "previews" / "step000002_1.png", formats=["PNG"]) as picture:
        said = json.loads(picture.text["tessera"])
    assert (said["step"], said["title"], said["settings"]["seed"]) == (2, "prompt 1, seed 6", 6)


def loaded(tmp_path, fp8):
    """A MODEL as a loader node gives it."""
    path = tmp_path / "flux.safetensors"
    with torch.inference_mode():
        return tiny.load_flux(path if path.exists() else tiny.write_flux(path, fp8=fp8))


def bytes_of(model):
    places = weight_refs("", model.model)
    return {name: part.reshape(-1).view(torch.uint8).clone() for name, part in plain_tensors(places)}


@pytest.mark.parametrize("fp8", [False, True])
def test_the_run_is_bit_for_bit_that_without_and_leaves_the_random_states(tiny_vae, tmp_path, fp8):
    tiny_flux = loaded(tmp_path, fp8)
    weights = bytes_of(tiny_flux)
    quiet = run(tiny_flux, tmp_path / "quiet", network={"dropout": 0.3})
    torch.manual_seed(11)
    state = torch.get_rng_state()
    previews = [preview(tiny_vae, every=1, use_ema=False, sampler_name="euler_ancestral")]
    previewed = run(tiny_flux, tmp_path / "seen", previews, watcher := Watcher(), network={"dropout": 0.3})
    assert not any("failed" in note for note in watcher.notes) and not tiny_flux.backup
    remaining = bytes_of(tiny_flux)
    assert remaining.keys() == weights.keys() and all(torch.equal(remaining[name], weights[name]) for name in weights)
    assert torch.equal(torch.get_rng_state(), state)
    assert previewed.loss == quiet.loss and previewed.summary["key"] == quiet.summary["key"]
    assert all(torch.equal(previewed.lora[name], quiet.lora[name]) for name in quiet.lora)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_scaled_fp8_model_that_was_unloaded_outside_inference_mode_is_previewed_and_trained_on(
    tiny_vae, tmp_path, swapped
):
    fresh, reloaded = loaded(tmp_path, True), loaded(tmp_path, True)
    weights = bytes_of(reloaded)
    unload_outside_inference_mode(reloaded)
    for place in weight_refs("", fresh.model):  # copies too: in the mapped file they lie otherwise aligned
        place.table[place.attribute] = with_parts(tensor := place.tensor(), [p.clone() for p in parts_of(tensor)])
    # As on a loader's MODEL, of which a LoRA covers some layers and leaves others.
    network, memory = {"include": ("single_blocks.*.linear1",)}, {"blocks_to_swap": 3 if swapped else 0}
    previews = [preview(tiny_vae, every=1)]
    quiet = run(fresh, tmp_path / "fresh", previews, steps=2, network=network, memory=memory)
    previewed = run(
        reloaded, tmp_path / "again", previews, watcher := Watcher(), steps=2, network=network, memory=memory
    )
    assert not any("failed" in note for note in watcher.notes) and not reloaded.backup
    assert previewed.loss == quiet.loss and previewed.summary["previews"] == quiet.summary["previews"]
    for file in quiet.summary["previews"]["files"]:
        name = file.removeprefix("previews/")
        assert np.array_equal(read(quiet.path.parent, name), read(previewed.path.parent, name)), name
    remaining = bytes_of(reloaded)
    assert remaining.keys() == weights.keys() and all(torch.equal(remaining[name], weights[name]) for name in weights)


def test_ordinary_quantised_weights_are_put_back_as_loaded_over_the_same_memory(tmp_path):
    weights = unload_outside_inference_mode(model := loaded(tmp_path, True))
    lay = {name: part.data_ptr() for name, part in plain_tensors(weight_refs("", model.model))}
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference tensor"):
        torch.nn.Parameter(weights[0].to("cpu"), requires_grad=False)  # as core's _quantized_apply moves it
    restore_inference_mode(model.model)
    assert {name: part.data_ptr() for name, part in plain_tensors(weight_refs("", model.model))} == lay
    current_weights = [w for w in model.model.parameters() if isinstance(w, QuantizedTensor)]
    with torch.inference_mode():
        copies = [torch.nn.Parameter(weight.to("cpu"), requires_grad=False) for weight in current_weights]
    assert len(copies) == len(weights) and all(weight.is_inference() for weight in current_weights)
    assert all(torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(copies, weights, strict=True))
    restore_inference_mode(model.model)
    after = [w for w in model.model.parameters() if isinstance(w, QuantizedTensor)]
    assert all(a is b for a, b in zip(current_weights, after, strict=True))


def test_a_model_that_cannot_be_unloaded_after_a_preview_ends_the_run_with_its_state_saved(
    tiny_flux, tiny_vae, tmp_path, monkeypatch
):
    unpatch = type(tiny_flux).unpatch_model

    def fails(patcher, *args, **kwargs):
        if len(patcher.backup) > 0 and comfy.model_management.current_loaded_models:
            raise RuntimeError("no")
        return unpatch(patcher, *args, **kwargs)

    monkeypatch.setattr(type(tiny_flux), "unpatch_model", fails)
    with pytest.raises(TrainingStopped, match="not take the model off the device after the preview at step 2.* resume"):
        run(tiny_flux, tmp_path, [preview(tiny_vae, at_start=False)])
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert (folder / "tiny_steps" / "tiny-step000002.safetensors").is_file()
    with pytest.raises(ValueError, match="The MODEL is still in use elsewhere"):
        FrozenWeights(tiny_flux, torch.device("cpu"), torch.float32)


class Notes(Watcher):
    """Record of what lies on the device, what is compiled, and what this run has made and holds (how many parameters,
    how many bytes of all tensors) after each step."""

    def __init__(self, model):
        super().__init__(at_step=self.look)
        self.counted = Graphs()
        self.model = model
        self.loaded = []
        self.graphs = []
        self.holdings = []
        self.new_tensors = Since()

    def look(self, step):
        self.loaded.append([type(e.model).__name__ for e in comfy.model_management.current_loaded_models])
        compiled_model = compiled_model_of(self.model)
        in_preview = compiled_model.report().counts().graphs if compiled_model else 0
        self.graphs.append((self.counted(), in_preview))
        tensors = self.new_tensors()
        self.holdings.append((sum(isinstance(t, torch.nn.Parameter) for t in tensors), size_of(tensors)))


def test_a_preview_leaves_nothing_behind_and_training_compiles_nothing_anew(tiny_flux, tiny_vae, tmp_path, monkeypatch):
    model = TesseraCompileModel.execute(tiny_flux, "eager").args[0]
    weights = {name: (t.data_ptr(), t.clone()) for name, t in model.model.state_dict().items()}
    torch._dynamo.reset()
    watcher = Notes(model)
    sampled = module.sample_latent
    while_sampled = []

    def sample_latent(*args):
        while_sampled.extend(type(e.model).__name__ for e in comfy.model_management.current_loaded_models)
        return sampled(*args)

    monkeypatch.setattr(module, "sample_latent", sample_latent)
    result = run(model, tmp_path, [preview(tiny_vae, every=1)], watcher, compile="auto")
    assert watcher.loaded == [["ResidentWeights"]] * 4 and "ResidentWeights" not in while_sampled
    assert watcher.holdings == [watcher.holdings[0]] * 4 and min(watcher.holdings[0]) > 0
    # Two kinds of blocks: a graph of each in training, and of each in previews.
    assert watcher.graphs == [(4, 2)] * 4
    phases = [text for text in watcher.phases if text.startswith("Training")]
    assert phases == ["Training; the first step compiles and takes longer"] * 2 + ["Training"] * 3
    assert result.summary["graphs_compiled"] == result.summary["graphs_planned"] == 2
    assert result.summary["previews"]["graphs_compiled"] == 2
    assert comfy.model_management.current_loaded_models == []
    for name, tensor in model.model.state_dict().items():
        assert tensor.data_ptr() == weights[name][0] and torch.equal(tensor, weights[name][1]), name


def test_a_preview_that_fails_is_told_and_training_goes_on(tiny_flux, tiny_vae, tmp_path):
    quiet = run(tiny_flux, tmp_path / "quiet")
    failures = iter([torch.OutOfMemoryError("out of memory"), ValueError("no"), None])

    class Vae:
        latent_channels = 16

        def decode(self, latent):
            if (error := next(failures, None)) is not None:
                raise error
            return tiny_vae.decode(latent)

    broken = preview(Vae(), every=1, at_start=False)
    watcher = Watcher()
    result = run(tiny_flux, tmp_path / "broken", [broken], watcher, steps=4)
    assert result.loss == quiet.loss
    notes = [note for note in watcher.notes if "preview" in note]
    assert notes == [
        "The preview at step 1 failed (out of memory; make the previews smaller); training goes on and the next one "
        "is tried.",
        "The preview at step 2 failed (no); no more are made.",
    ]
    assert "previews" not in result.summary and not watcher.sheets


def test_cancel_while_a_preview_is_made_keeps_what_was_trained_and_the_run_goes_on_as_if_uninterrupted(
    tiny_flux, tiny_vae, tmp_path
):
    class Cancels(Watcher):
        in_preview = False

        def phase(self, text):
            self.in_preview = text == "Preview at step 3"

        def check_interrupted(self):
            if self.in_preview:
                raise comfy.model_management.InterruptProcessingException

    previews = [preview(tiny_vae, every=3)]
    whole = run(tiny_flux, tmp_path / "whole", previews)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(tiny_flux, tmp_path / "broken", previews, Cancels())
    (folder,) = (tmp_path / "broken").iterdir()
    assert (folder / "tiny_steps" / "tiny-step000003.safetensors").is_file()
    assert comfy.model_management.current_loaded_models == []
    resumed = run(tiny_flux, tmp_path / "broken", previews, watcher := Watcher())
    assert "Resumed at step 3." in watcher.notes and resumed.loss == whole.loss
    assert resumed.summary["previews"] == whole.summary["previews"]
    for name in ["step000003_0.png", "sheet.png"]:
        assert np.array_equal(read(folder, name), read(whole.path.parent, name))


def test_previews_that_cannot_be_sampled_are_refused_before_anything_is_trained(tiny_flux, tiny_vae, other_family):
    def refused(match, *args, **changes):
        with pytest.raises(ValueError, match=match):
            Previewer([preview(*args, **changes)], tiny_flux)

    refused("preview: vae decodes latents of 4 channels and the model makes 16; connect", other_family["vae"])
    refused("preview: width is 70; the model takes multiples of 8, such as 64", tiny_vae, width=70)
    refused("preview: frames is 5, but the model makes pictures; set it to 1", tiny_vae, frames=5)
    narrow = Preview(Sampling(tiny_vae, [[torch.zeros(1, 4, 8), {}]], **SIZE))
    with pytest.raises(ValueError, match="preview: positive of prompt 1 has text of width 8 and the model takes"):
        Previewer([narrow], tiny_flux)
    for changes, match in [
        ({"sampler_name": "none"}, "sampler_name is 'none', which this ComfyUI does not have"),
        ({"latent_image": {"samples": torch.zeros(2, 16, 8, 8)}}, "latent_image holds 2 latents; make it of batch"),
        ({"every": -1}, "every_n_steps is -1; set it to 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            preview(tiny_vae, **changes)


def test_negative_prompt_is_that_of_core_s_conditioning_zero_out_without_one():
    positive = conditioning("flux", 16)
    ((text, extra),), ((core_text, core_extra),) = zeroed(positive), core.ConditioningZeroOut().zero_out(positive)[0]
    assert torch.equal(text, core_text) and not text.any()
    assert extra.keys() == core_extra.keys() and not extra["pooled_output"].any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("swap_site", ["training", "model"])
def test_swapped_blocks_are_previewed_and_trained_on_as_without_swap(tiny_vae, tmp_path, monkeypatch, swap_site, fp8):
    source = loaded(tmp_path, fp8)
    plain = run(source, tmp_path / "plain", [preview(tiny_vae, every=1)], steps=3)
    with torch.inference_mode(False):
        model = TesseraBlockSwap.execute(source, 3, 1, "auto").result[0] if swap_site == "model" else source
    picture = core_picture(model, tiny_vae, None, 5)  # which makes a ring, for flat buffers
    rings, ring = [], training.SlotRing
    monkeypatch.setattr(training, "SlotRing", lambda *args: rings.append(ring(*args)) or rings[-1])
    monkeypatch.setattr(flat_weights, "into_flat", lambda *_: pytest.fail("copies blocks that training holds"))
    lay, shared_sizes = [], []

    def look(_):
        parts = list(plain_tensors(weight_refs("", model.model)))
        masters = {master.untyped_storage().data_ptr() for master in rings[-1].flat_weights}
        lay.append({name: part.data_ptr() for name, part in parts})
        shared_sizes.append(sum(part.nbytes for _, part in parts if part.untyped_storage().data_ptr() in masters))

    memory = {"blocks_to_swap": 3}
    swapped = run(
        model, tmp_path / "swapped", [preview(tiny_vae, every=1)], Watcher(at_step=look), steps=3, memory=memory
    )
    assert swapped.loss == plain.loss and swapped.summary["blocks_swapped"] == 3
    for file in plain.summary["previews"]["files"]:
        name = file.removeprefix("previews/")
        assert np.array_equal(read(plain.path.parent, name), read(swapped.path.parent, name)), name
    monkeypatch.undo()
    assert np.array_equal(core_picture(model, tiny_vae, None, 5), picture)
    assert lay[0] == lay[1] == lay[2]  # the masters that the MODEL shares with training have not moved
    assert shared_sizes[0] == shared_sizes[1] == shared_sizes[2] > 10**6
