"""What finds no memory is tried again with less on the device: placing the model, and a call of it, which has all that
the first one was given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import pytest
import tiny
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import PatcherInjection, WrappersMP
from tessera.memory.swap import oom_retry
from tessera.memory.swap.slot_ring import SlotRing
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tiny.compile.compiling import make_lora, memory_for_weights, with_lora
from tiny.models.sampling import sample


@pytest.fixture
def flux(tiny_files: dict[str, Path]) -> Any:
    with torch.inference_mode(False):
        return tiny.load_model("flux", tiny_files["flux"])


def automatic(flux: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """With -1 on a device that has room for less than the model."""
    room = flux.model_size() * 8 // 10 + int(flux.memory_required([1, 16, 128, 128]))
    room += int(comfy.model_management.extra_reserved_memory())
    monkeypatch.setattr(oom_retry, "LEAST", 2**18)
    with monkeypatch.context() as small:
        small.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: room)
        small.setattr(comfy.model_management, "current_loaded_models", [])
        model, notes = swap(flux, SwapSettings(-1))
    assert len(model.swap.weights.blocks) > 1
    return model, notes


def cast_with_lora(model: Any, lora: Any) -> Any:
    """As behind core's LoRA loader and Model Compute Dtype."""
    model = with_lora(model, lora, 0.8)
    model.set_model_compute_dtype(torch.float32)
    return model


def full(model: Any, site: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The slots find a place only where no more than `limit` bytes of the other weights are loaded; or so many tries
    find none for the second of these weights. Returns what was loaded at each try, or the weights in a row."""
    sizes: list[Any] = []
    take, place = SlotRing.take, ModelPatcher.patch_weight_to_device

    def take_slots(ring: Any) -> None:
        sizes.append(model.loaded_size())
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("no room for slots")
        take(ring)

    def place_weight(patcher: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        sizes.append(key)
        if len(sizes) % 2 == 0 and len(sizes) <= 2 * limit:
            raise torch.OutOfMemoryError("no room for weights")
        return place(patcher, key, *args, **kwargs)

    if site == "slots":
        monkeypatch.setattr(SlotRing, "take", take_slots)
    else:
        monkeypatch.setattr(ModelPatcher, "patch_weight_to_device", place_weight)
    return sizes


@pytest.mark.parametrize("changed", [False, True], ids=["alone", "cast, with a LoRA"])
@pytest.mark.parametrize("site", ["slots", "resident"])
def test_less_of_a_model_is_placed_if_it_finds_no_place(flux, site, changed, monkeypatch) -> None:
    masters = {key: t.clone() for key, t in flux.model.state_dict().items()}
    base = cast_with_lora(flux, make_lora(flux)) if changed else flux
    want = sample(base, "flux")
    comfy.model_management.unload_all_models()
    model, notes = automatic(base, monkeypatch)
    note_count = len(notes)
    size = model.model_size()
    slots = model.swap.slot_bytes()
    fails = 1 if changed else 2  # ComfyUI loses a LoRA at the first smaller try, and finds it again at the next
    sizes = full(model, site, (size - slots) // (4 * fails) if site == "slots" else fails, monkeypatch)
    assert torch.equal(sample(model, "flux"), want)
    if site == "slots":
        assert len(sizes) > fails and sorted(set(sizes), reverse=True) == sizes and sizes[0] == size - slots
    else:
        assert len(sizes) > 2 * fails
    assert slots <= model.loaded_size() < size
    assert notes[note_count:] == [oom_retry.RETRIED]
    assert torch.equal(sample(model, "flux"), want)
    comfy.model_management.unload_all_models()
    assert all(torch.equal(t, masters[key]) for key, t in flux.model.state_dict().items())


def test_lack_of_any_memory_is_one_sentence(flux: Any, monkeypatch: Any) -> None:
    want = sample(flux, "flux")
    comfy.model_management.unload_all_models()
    for model, _ in (swap(flux, SwapSettings(3)), automatic(flux, monkeypatch)):
        mine = model.swap.options.automatic
        injected: list[Any] = []
        model.set_injections("test", [PatcherInjection(injected.append, injected.remove)])
        said = (
            "is -1, but the GPU doesn't even have room" if mine else "is 3 and prefetch_blocks is 1, and the GPU has no"
        )
        with monkeypatch.context() as small:
            sizes = full(model, "slots", -1, small)
            with pytest.raises(torch.OutOfMemoryError, match=f"blocks_to_swap {said}"):
                sample(model, "flux")
        assert not injected and oom_retry.RETRIED not in model.notes
        assert (len(sizes) > 2) is mine and sizes[-1] < sizes[0] + (not mine)
        assert model.loaded_size() == 0 and model.swap.ring.flat_weights == []
        assert torch.equal(sample(model, "flux"), want)
        comfy.model_management.unload_all_models()


def test_a_load_that_breaks_off_leaves_no_lora_to_another_model(flux: Any, monkeypatch: Any) -> None:
    want = sample(flux, "flux")
    comfy.model_management.unload_all_models()
    model, _ = swap(with_lora(flux, make_lora(flux), 0.8), SwapSettings(3))
    plain, _ = swap(flux, SwapSettings(3))
    size, slots = model.model_size(), model.swap.slot_bytes()
    with memory_for_weights(size - (size - slots) // 2):  # the LoRA's share of what stays out is put on first
        with monkeypatch.context() as small:
            full(model, "resident", 1, small)
            with pytest.raises(torch.OutOfMemoryError, match="blocks_to_swap is 3"):
                sample(model, "flux")
        assert torch.equal(sample(plain, "flux"), want)
    comfy.model_management.unload_all_models()


def test_room_that_does_not_help_is_not_told(monkeypatch: Any) -> None:
    def executor() -> None:
        raise torch.OutOfMemoryError("no room for activations")

    executor.class_obj = SimpleNamespace(current_patcher=object())  # type: ignore[attr-defined]
    freed, said = [1, 0], list[str]()
    monkeypatch.setattr(oom_retry, "_remove_hooks", lambda patcher: None)
    monkeypatch.setattr(oom_retry, "_unload_some", lambda patcher: freed.pop(0))
    with pytest.raises(torch.OutOfMemoryError, match="activations"):
        oom_retry.OomRetry(torch.device("cpu"), True, said.append)(executor)
    assert not freed and not said


@pytest.mark.parametrize("by_name", [False, True])
def test_a_second_try_has_what_a_controlnet_gave(by_name: bool, tiny_files: dict[str, Path], monkeypatch: Any) -> None:
    """Core's UNet takes it out of the lists as it goes."""
    model, notes = swap(tiny.load_model("sdxl", tiny_files["sdxl"]), SwapSettings(2))
    (room,) = model.get_wrappers(WrappersMP.APPLY_MODEL, oom_retry.KEY)
    room.automatic = True
    monkeypatch.setattr(oom_retry, "_unload_some", lambda patcher: 1)
    out = model.model.diffusion_model.out
    fails = [False]
    strength = [0.0]
    forward = out.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if fails[0]:
            fails[0] = False
            raise torch.OutOfMemoryError("no room for activations")
        return forward(*args, **kwargs)

    def control(executor: Any, x: Any, t: Any, concat: Any, text: Any, _: Any, options: Any, **conds: Any) -> Any:
        residuals = {name: [torch.full((1, 1, 1, 1), strength[0])] * 3 for name in ("output", "middle")}
        if by_name:
            return executor(x, t, concat, text, control=residuals, transformer_options=options, **conds)
        return executor(x, t, concat, text, residuals, options, **conds)

    monkeypatch.setattr(out, "forward", run)
    # Around all others.
    model.wrappers[WrappersMP.APPLY_MODEL] = {"control": [control], **model.wrappers[WrappersMP.APPLY_MODEL]}
    bare = sample(model, "sdxl", steps=1)
    strength[0] = 0.5
    want = sample(model, "sdxl", steps=1)
    fails[0] = True
    assert torch.equal(sample(model, "sdxl", steps=1), want) and not torch.equal(want, bare)
    assert not fails[0] and any("the memory was not enough" in note for note in notes)
    comfy.model_management.unload_all_models()
