"""Compare LoRAs with every family, swapped and compiled: the same pictures, no graph more for a LoRA, nothing left."""

import gc
import weakref
from functools import partial

import comfy.model_management
import comfy.sample
import comfy.utils
import folder_paths
import nodes as core
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import save_file
from tessera.lora import source
from tessera.memory.host.flat_weights import plain_tensors, weight_refs
from tessera.nodes.loras import compare as node
from tessera.nodes.loras.compare import TesseraCompareLoras
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tiny.compile.compiling import Graphs, compiled, make_lora
from tiny.models.sampling import conditioning, empty_latent

SIZE = {"width": 32, "height": 48}
SAMPLER = {**SIZE, "steps": 2, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple", "seed": 4, "seeds": 1}
FAMILIES = {"flux2": "", "qwen_image": "wan_vae", "wan_vace": "wan_vae"}  # VACE is none that is trained


class Flux2Vae:
    """Any 128 channels to a picture of 16 x 16 pixels a cell."""

    latent_channels = 128

    def decode(self, latent):
        return latent[:, :3].movedim(1, -1).repeat_interleave(16, 1).repeat_interleave(16, 2)


@pytest.fixture
def loras(lora_folder):
    """Names of two LoRAs of rank 2 and one of rank 3, where ComfyUI lists them, for a model."""
    names = ["model_a", "model_b", "model_c"]

    def write(model, ending=""):
        for seed, (name, rank) in enumerate(zip(names, (2, 2, 3), strict=True)):
            save_file(make_lora(model, seed + len(ending), rank), lora_folder / f"{name}{ending}.safetensors")
        folder_paths.filename_list_cache.clear()
        return names

    yield write
    for path in lora_folder.glob("model_*.safetensors"):
        path.unlink()
    folder_paths.filename_list_cache.clear()
    comfy.model_management.unload_all_models()


def vae_of(name, files):
    return Flux2Vae() if name == "flux2" else tiny.load_vae(files[FAMILIES[name]])


def run(model, vae, name, **changes):
    inputs = {"loras": "model_*", "run": "none", "strengths": "1", "without_lora": True, **SAMPLER, **changes}
    inputs.setdefault("negative", conditioning(name, 16, 1))
    with torch.inference_mode():
        return TesseraCompareLoras.execute(model, vae, conditioning(name, 16), **inputs).result


def core_picture(model, vae, name, lora, strength=1.0):
    with torch.inference_mode():
        if lora is not None:
            (model,) = core.LoraLoaderModelOnly().load_lora_model_only(model, f"{lora}.safetensors", strength)
        texts, latent = (conditioning(name, 16), conditioning(name, 16, 1)), {"samples": empty_latent(name, 32, 48)}
        (sampled,) = core.KSampler().sample(model, 4, 2, 2.0, "euler", "simple", *texts, latent)
        return core.VAEDecode().decode(vae, sampled)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_of_every_family_are_those_of_core_s_nodes(name, tiny_files, loras):
    model, vae = tiny.load_model(name, tiny_files[name]), vae_of(name, tiny_files)
    names = loras(model)
    _, pictures = run(model, vae, name, strengths="-1")
    expected = [core_picture(model, vae, name, lora, -1.0) for lora in (None, *names)]
    assert [picture.shape for picture in pictures] == [(1, 48, 32, 3)] * 4
    assert all(torch.equal(actual, other) for actual, other in zip(pictures, expected, strict=True))
    assert len({picture.numpy().tobytes() for picture in pictures}) == 4


def test_compiled_experts_one_of_them_swapped_have_the_same_graphs_for_every_lora(tiny_files, tmp_path, loras):
    low = tiny.load_wan(tiny.write_wan(tmp_path / "low.safetensors", seed=5))
    plain, vae = [tiny.load_wan(tiny_files["wan"]), low], vae_of("wan_vace", tiny_files)
    loras(plain[0], "_high_noise")
    loras(plain[1], "_low_noise")
    _, expected = run(plain[0], vae, "wan", model_low_noise=plain[1], switch_step=1)
    torch._dynamo.reset()
    with torch.inference_mode(False):
        swapped = TesseraBlockSwap.execute(plain[0], 1, 1, "auto").result[0]
        (high, _), (low, _) = compiled(swapped), compiled(plain[1])
    counted, pair = Graphs(), {"model_low_noise": low, "switch_step": 1}
    run(high, vae, "wan", loras="model_a", without_lora=False, **pair)
    first = counted()
    _, pictures = run(high, vae, "wan", **pair)
    assert first > 0 and (counted(), counted.breaks) == (first, 0)
    assert len(pictures) == 4 and all(
        torch.equal(picture, other) for picture, other in zip(pictures, expected, strict=True)
    )
    torch._dynamo.reset()


def loaded(kind, folder):
    with torch.inference_mode():
        model = tiny.load_flux(tiny.write_flux(folder / "flux.safetensors", fp8=kind == "fp8"))
    with torch.inference_mode(False):
        return TesseraBlockSwap.execute(model, 2, 1, "auto").result[0] if kind == "swapped" else model


@pytest.mark.parametrize("kind", ["fp8", "swapped"])
def test_the_model_is_off_its_device_as_it_was_and_no_lora_is_in_memory_however_it_ends(
    kind, tiny_vae, tmp_path, loras, monkeypatch
):
    model = loaded(kind, tmp_path)
    loras(model)
    weights = bytes_of(model)
    read, load = [], source.read_tensors

    def read_tensors(path):
        lora, metadata = load(path)
        read.extend(map(weakref.ref, lora.values()))
        return lora, metadata

    monkeypatch.setattr(source, "read_tensors", read_tensors)
    run(model, tiny_vae, "flux", loras="model_a", steps=1, cfg=1.0)
    check_left(model, weights, read)

    events, sample = [], comfy.sample.sample
    monkeypatch.setattr(
        comfy.sample, "sample", lambda *args, **kwargs: (sample(*args, **kwargs), events.append("s"))[0]
    )

    class Decodes:
        latent_channels = 16

        def decode(self, latent):
            events.append("d")
            return tiny_vae.decode(latent)

    for expected_events in (
        ["s"] * 3,
        [*["s"] * 4, "d"],
    ):  # between the pictures of a LoRA, and between two that are decoded
        events.clear()
        monkeypatch.setattr(
            node, "throw_exception_if_processing_interrupted", partial(cancelled, events, expected_events)
        )
        with pytest.raises(InterruptProcessingException):
            run(model, Decodes(), "flux", loras="model_a", steps=1, cfg=1.0, seeds=2)
        assert events == expected_events
        check_left(model, weights, read)


def cancelled(events, expected_events):
    if events == expected_events:
        raise InterruptProcessingException


def bytes_of(model):
    places = weight_refs("", model.model)
    return {name: part.reshape(-1).view(torch.uint8).clone() for name, part in plain_tensors(places)}


def check_left(model, weights, read):
    gc.collect()
    assert read and not any(tensor() is not None for tensor in read)
    entries = comfy.model_management.current_loaded_models
    assert not any(entry.model is not None and entry.model.is_clone(model) for entry in entries) and not model.backup
    remaining = bytes_of(model)
    assert remaining.keys() == weights.keys() and all(torch.equal(remaining[name], weights[name]) for name in weights)
    read.clear()
