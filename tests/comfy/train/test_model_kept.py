"""The MODEL that came in is what it was after training, and what is on it is trained on."""

import gc
import threading
import weakref

import comfy.model_management
import comfy.sd
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import load_file, save_file
from tessera.memory.weights import frozen
from tiny.memory.alive import Since
from tiny.train.runs import Watcher, cancel_at, mixed_data, train

LAYERS = ["double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.2", "single_blocks.0.linear1", "final_layer.linear"]
STRENGTH = 0.7
ALPHA = 2.0
RANK = 4


@pytest.fixture
def some_lora(tiny_files):
    """(kohya tensors, the weights of the fp32 file with STRENGTH of the LoRA merged in)."""
    weights = load_file(tiny_files["flux"])
    generator = torch.Generator().manual_seed(5)
    lora = {}
    for layer in LAYERS:
        weight = weights[f"{layer}.weight"]
        down = torch.randn(RANK, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        up = torch.randn(weight.shape[0], RANK, generator=generator)
        name = "lora_unet_" + layer.replace(".", "_")
        lora |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(ALPHA)}
        merged = weight.double() + STRENGTH * (ALPHA / RANK) * (up.double() @ down.double())
        weights[f"{layer}.weight"] = merged.float()
    return lora, weights


def picture_of(model):
    """All that has to be the same after training: each weight's bytes and place, and everything on the patcher."""
    weights = {name: (t.data_ptr(), t.detach().clone()) for name, t in model.model.state_dict().items()}
    grads = [p.requires_grad for p in model.model.parameters()]
    state = {"patches": dict(model.patches), "uuid": model.patches_uuid, "options": repr(model.model_options)}
    state |= {"injections": dict(model.injections), "objects": dict(model.object_patches), "grads": grads}
    return weights, state | {"mode": model.model.training, "hooks": len(model.callbacks)}


def assert_untouched(model, snapshot):
    weights, state = picture_of(model)
    assert weights.keys() == snapshot[0].keys() and state == snapshot[1]
    for name, (place, tensor) in weights.items():
        assert place == snapshot[0][name][0] and torch.equal(tensor, snapshot[0][name][1]), name


@pytest.mark.parametrize("end", ["finished", "cancelled"])
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "with a LoRA"])
def test_weights_patches_and_sampling_are_the_same_before_and_after_training(
    end, patched, tiny_flux, some_lora, tmp_path
):
    model = comfy.sd.load_lora_for_models(tiny_flux, None, some_lora[0], STRENGTH, 0)[0] if patched else tiny_flux
    picture = tiny.sample(model, "flux")
    comfy.model_management.unload_all_models()  # ComfyUI leaves other flags on weights that it has patched once
    snapshot = picture_of(model)
    assert torch.equal(tiny.sample(model, "flux"), picture)
    # Sampling has left the MODEL loaded, with its patches written into the weights.
    if end == "finished":
        train(model, mixed_data(), tmp_path, steps=2)
    else:
        with pytest.raises(BaseException) as stopped:
            train(model, mixed_data(), tmp_path, cancel_at(1))
        assert type(stopped.value).__name__ == "InterruptProcessingException"
    assert_untouched(model, snapshot)
    assert torch.equal(tiny.sample(model, "flux"), picture)


def test_training_gives_all_its_memory_back(tiny_flux, tmp_path):
    train(tiny_flux, mixed_data(), tmp_path / "first", steps=2)
    new_tensors = Since()
    result = train(tiny_flux, mixed_data(), tmp_path / "second", steps=2)
    comfy.model_management.unload_all_models()
    assert not [t for t in new_tensors() if isinstance(t, torch.nn.Parameter) and t.requires_grad]
    assert not [name for name, t in result.lora.items() if t.requires_grad]


def test_a_model_that_nobody_holds_any_more_may_go_while_all_are_unloaded(tiny_flux, tiny_files, monkeypatch):
    """ComfyUI's list has weak references: a garbage collection may end a MODEL between two looks at it."""
    alone = tiny.load_flux(tiny_files["flux"])
    comfy.model_management.load_models_gpu([alone])
    comfy.model_management.load_models_gpu([tiny_flux])  # it is first in the list, so it is looked at first
    alone.itself = alone  # as any cycle that waits for the collector
    freed = weakref.ref(alone)
    original = frozen.puts_back_under_inference

    def collected_first(patcher):
        gc.collect()
        return original(patcher)

    monkeypatch.setattr(frozen, "puts_back_under_inference", collected_first)
    del alone
    frozen.unload()
    gc.collect()
    assert freed() is None and not comfy.model_management.current_loaded_models


def test_a_cancelled_run_gives_its_memory_back_while_its_error_is_still_held(tiny_flux, tmp_path):
    """ComfyUI holds it, and with it the frames of the run, for as long as it tells of it."""
    new_tensors = Since()
    with pytest.raises(InterruptProcessingException) as stopped:
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(1), optimizer={"ema_decay": 0.9})
    assert not [t for t in new_tensors() if isinstance(t, torch.nn.Parameter) and t.requires_grad]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tessera-reader")]
    assert stopped.value.__traceback__ is not None


def test_a_lora_on_the_model_is_trained_upon_as_if_it_were_merged_into_the_file(tiny_flux, some_lora, tmp_path):
    lora, weights = some_lora
    save_file(weights, tmp_path / "merged.safetensors")
    merged = train(tiny.load_flux(tmp_path / "merged.safetensors"), mixed_data(), tmp_path / "merged", batch_size=2)
    plain = train(tiny_flux, mixed_data(), tmp_path / "plain", batch_size=2)
    weight_lora = comfy.sd.load_lora_for_models(tiny_flux, None, lora, STRENGTH, 0)[0]
    bypass_lora = comfy.sd.load_bypass_lora_for_models(tiny_flux, None, lora, STRENGTH, 0)[0]
    results = {}
    for name, model in {"weights": weight_lora, "bypass": bypass_lora}.items():
        watcher = Watcher()
        snapshot = picture_of(model)
        results[name] = train(model, mixed_data(), tmp_path / name, watcher, batch_size=2)
        assert_untouched(model, snapshot)
        assert results[name].loss == pytest.approx(merged.loss, rel=1e-5)
        assert ([n for n in watcher.notes if "bypass" in n] != []) == (name == "bypass")
        assert results[name].summary["key"] != plain.summary["key"]
    assert max(abs(a - b) / b for a, b in zip(plain.loss, merged.loss, strict=True)) > 1e-3


def test_a_model_loaded_under_inference_mode_trains_to_the_same_lora(tiny_files, tiny_flux, tmp_path):
    with torch.inference_mode():  # as the executor runs core's loader nodes
        loaded = tiny.load_flux(tiny_files["flux"])
    assert loaded.model.diffusion_model.img_in.weight.is_inference()
    first = train(loaded, mixed_data(), tmp_path / "inference")
    second = train(tiny_flux, mixed_data(), tmp_path / "ordinary")
    assert first.loss == second.loss
    assert all(torch.equal(first.lora[name], second.lora[name]) for name in second.lora)
