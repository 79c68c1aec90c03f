"""A MODEL with swapped blocks in ComfyUI's hands: patches, hooks, injections, unloading, saving, errors.

Pictures are compared bit for bit with those of the same MODEL without block swap, loaded by turns on the same base.
"""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import tiny
import torch
from comfy.model_patcher import ModelPatcher
from tessera.memory.host.flat_weights import parts_of
from tessera.memory.swap import oom_retry
from tessera.memory.swap.forward import SwappedForward
from tessera.memory.swap.patcher import SwapPatcher, swap_model
from tiny.compile.compiling import memory_for_weights
from tiny.models.sampling import conditioning, sample, sample_prompts

BLOCKS = ("double_blocks.0", "double_blocks.1", "single_blocks.0", "single_blocks.1")
QKV = "diffusion_model.double_blocks.0.img_attn.qkv"


def load(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL as a loader node makes it."""
    with torch.inference_mode():
        return tiny.load_flux(path, dtype)


def unload() -> None:
    """As ComfyUI does it when the next prompt needs the memory."""
    with torch.inference_mode():
        mm.unload_all_models()


def blocks_of(model: Any, *names: str) -> dict[str, Any]:
    return {f"diffusion_model.{n}": model.model.diffusion_model.get_submodule(n) for n in names or BLOCKS}


def swapped(model: Any, *names: str, prefetch: int = 1) -> SwapPatcher:
    return swap_model(model, blocks_of(model, *names), prefetch, pinned=False)


def lora_of(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """A LoRA on every matrix of the model, and a difference on one norm inside a block."""
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for name, module in model.model.diffusion_model.named_modules():
        if hasattr(module, "in_features"):
            rows, columns = module.weight.shape
            lora[f"diffusion_model.{name}.lora_down.weight"] = 0.1 * torch.randn(4, columns, generator=generator)
            lora[f"diffusion_model.{name}.lora_up.weight"] = 0.1 * torch.randn(rows, 4, generator=generator)
    return lora


def with_lora(model: Any, strength: float = 0.7, seed: int = 1) -> Any:
    return comfy.sd.load_lora_for_models(model, None, lora_of(model, seed), strength, 0.0)[0]


def picture(model: Any, **settings: Any) -> torch.Tensor:
    return sample(model, "flux", **settings)


def assert_no_traces(model: Any) -> None:
    assert not any(isinstance(vars(m).get("forward"), SwappedForward) for m in model.model.modules())


def assert_true_sizes(model: SwapPatcher) -> None:
    """While all of the rest is loaded: the rest and the slots, counted by hand."""
    swap = model.swap
    inside = {key for key in model.model.state_dict() if key in swap.weights.keys}
    rest = sum(t.nbytes for key, t in model.model.state_dict().items() if key not in inside)
    assert (
        swap.held_bytes()
        == swap.slot_bytes()
        == swap.ring.slots.count * max(layout.size for layout in swap.weights.layouts)
    )
    assert model.loaded_size() == model.model_size() == rest + swap.slot_bytes()
    assert model.current_loaded_device() == model.load_device


# Other patchers, loading and unloading.


def test_loras_strengths_siblings_and_unloads_in_a_row(tiny_flux: Any) -> None:
    plain = tiny_flux
    loras = [(0.7, 1), (0.3, 1), (0.7, 2)]
    expected = [picture(with_lora(plain, *lora)) for lora in loras]
    bare = picture(plain)
    model = swapped(plain)
    assert torch.equal(picture(model), bare)
    for (strength, seed), want in zip(loras, expected, strict=True):
        assert torch.equal(picture(with_lora(model, strength, seed)), want)
        assert torch.equal(picture(model), bare)
        assert_true_sizes(model)
    stronger = with_lora(model, *loras[0])
    assert torch.equal(picture(stronger), expected[0])
    assert torch.equal(picture(with_lora(plain, *loras[2])), expected[2])  # the base without swap, in between
    assert_no_traces(plain)
    assert model.swap.held_bytes() == 0
    assert torch.equal(picture(stronger), expected[0])
    mm.unload_all_models()
    assert model.loaded_size() == 0 and model.swap.held_bytes() == 0
    assert_no_traces(plain)
    assert torch.equal(picture(stronger), expected[0])
    mm.free_memory(1e32, model.load_device)
    assert model.loaded_size() == 0 and model.swap.held_bytes() == 0
    assert torch.equal(picture(plain), bare)
    assert torch.equal(picture(stronger.clone()), expected[0])


def test_a_clone_that_is_collected_takes_nothing_along(tiny_flux: Any) -> None:
    want = picture(with_lora(tiny_flux))
    model = with_lora(swapped(tiny_flux))
    assert torch.equal(picture(model), want)
    mm.load_models_gpu([model])
    model.clone()
    gc.collect()
    assert model.swap.attached and all(
        isinstance(vars(b)["forward"], SwappedForward) for b in model.swap.weights.blocks.values()
    )
    assert torch.equal(picture(model.clone()), want)


def test_copies_have_ended_when_the_slots_are_to_be_patched_otherwise(tiny_flux: Any, monkeypatch: Any) -> None:
    model = with_lora(swapped(tiny_flux))
    mm.load_models_gpu([model])
    ring = model.swap.ring
    ring.forward(0)
    settled: list[Any] = []
    monkeypatch.setattr(ring.stream, "settle", lambda: settled.append(list(ring.slots.occupants)))
    model.swap.invalidate()
    assert settled == [[0, 1]] and ring.slots.occupants == [None, None]


def test_the_last_swapped_clone_that_is_collected_ends_the_swap(tiny_flux: Any) -> None:
    bare = picture(tiny_flux)
    model = with_lora(swapped(tiny_flux))
    picture(model)
    mm.load_models_gpu([model])
    slots = [weakref.ref(slot) for slot in model.swap.ring.slots.tensors]
    loaded = model.loaded_size()
    slot_bytes = model.swap.slot_bytes()
    del model
    gc.collect()
    assert all(slot() is None for slot in slots)
    assert tiny_flux.loaded_size() == loaded - slot_bytes
    assert_no_traces(tiny_flux)
    assert torch.equal(picture(tiny_flux), bare)


def test_a_model_that_is_collected_frees_its_masters(tiny_files: dict[str, Path]) -> None:
    model = swapped(tiny.load_flux(tiny_files["flux"]))
    picture(model)
    mm.load_models_gpu([model])
    flats = [weakref.ref(flat) for flat in model.swap.ring.flat_weights]
    weight = weakref.ref(model.model.diffusion_model.single_blocks[0].linear1.weight)
    assert all(flat() is not None for flat in flats)
    del model
    mm.unload_all_models()
    gc.collect()
    assert all(flat() is None for flat in flats) and weight() is None


def test_two_patchers_that_swap_other_blocks_take_turns_and_share_masters(tiny_flux: Any) -> None:
    want = picture(with_lora(tiny_flux))
    bare = picture(tiny_flux)
    first = swapped(tiny_flux, "double_blocks.0", "single_blocks.0")
    second = with_lora(swapped(tiny_flux, "single_blocks.0", "single_blocks.1"))
    linear = tiny_flux.model.diffusion_model.single_blocks[0].linear1
    home = None
    for _ in range(2):
        assert torch.equal(picture(first), bare)
        assert second.swap.held_bytes() == 0
        home = home or linear.weight.untyped_storage().data_ptr()
        assert torch.equal(picture(second), want)
        assert first.swap.held_bytes() == 0
        assert linear.weight.untyped_storage().data_ptr() == home  # no second copy
    # Without ComfyUI in between as well.
    first.partially_load(first.load_device, 1e32)
    second.partially_load(second.load_device, 1e32)
    assert not first.swap.attached and second.swap.attached


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_the_resident_rest_may_be_loaded_in_part(tiny_flux: Any, monkeypatch: Any, share: float) -> None:
    want = picture(with_lora(tiny_flux))
    model = with_lora(swapped(tiny_flux, "double_blocks.1", "single_blocks.0"))
    rest = model.model_size() - model.swap.slot_bytes()
    limit = model.swap.slot_bytes() + share * rest
    whole = mm.LoadedModel.model_load
    monkeypatch.setattr(mm.LoadedModel, "model_load", lambda self, memory=0, **kw: whole(self, limit, **kw))
    mm.unload_all_models()
    assert torch.equal(picture(model), want)
    assert model.lowvram_patch_counter() > 0
    assert model.swap.slot_bytes() <= model.loaded_size() <= limit
    parts = [m for m in model.model.modules() if getattr(m, "comfy_patched_weights", False)]
    counted = sum(t.nbytes for m in parts for t in m.state_dict().values())
    assert model.loaded_size() == counted + model.swap.held_bytes()
    # Room enough later: the rest follows, and the slots are there once.
    monkeypatch.setattr(mm.LoadedModel, "model_load", whole)
    assert torch.equal(picture(model), want)
    assert_true_sizes(model)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fraction", [0.25, 0.9, 1.2])
def test_between_two_pictures_the_room_may_become_less_by_a_part_of_the_slots(tiny_flux: Any, whole, fraction) -> None:
    want = picture(with_lora(tiny_flux))
    mm.unload_all_models()
    model = swapped(with_lora(tiny_flux), *BLOCKS[2:])
    size, slots = model.model_size(), model.swap.slot_bytes()
    with memory_for_weights(size + slots if whole else size - (size - slots) // 3):
        torch.testing.assert_close(picture(model), want, rtol=0, atol=1e-4)
        loaded = model.loaded_size()
    assert (loaded == size) is whole
    room = loaded - int(fraction * slots)
    with memory_for_weights(room):
        torch.testing.assert_close(picture(model), want, rtol=0, atol=1e-4)
    assert slots <= model.loaded_size() <= room
    mm.unload_all_models()


def test_buffers_of_modules_without_a_parameter_go_to_the_device_as_in_a_full_load(tiny_flux: Any) -> None:
    class Angles(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.ones(4))

    whole = Angles()
    holder = torch.nn.Sequential(Angles(), torch.nn.Linear(2, 2))
    linear = torch.nn.Linear(2, 2)
    for module in (whole, holder, linear):
        SwapPatcher._move_own(module, torch.device("meta"))
    assert whole.frequencies.is_meta
    # A module of its own each, which ComfyUI has moved or which is asked for by itself.
    assert not holder[0].frequencies.is_meta and not holder[1].weight.is_meta and not linear.weight.is_meta


def test_memory_that_comfyui_asks_back_is_freed_from_the_rest_first_and_then_all(tiny_flux: Any) -> None:
    want = picture(with_lora(tiny_flux))
    model = with_lora(swapped(tiny_flux, "double_blocks.1", "single_blocks.0"))
    mm.load_models_gpu([model])
    loaded = model.loaded_size()
    freed = model.partially_unload(model.offload_device, loaded // 4)
    assert freed >= loaded // 4 and model.loaded_size() == loaded - freed
    assert model.swap.attached
    assert torch.equal(picture(model), want)
    assert_true_sizes(model)
    entry = next(e for e in mm.current_loaded_models if e.model is model)
    # More than the rest holds: core takes the model off as a whole.
    assert entry.model_unload(model.loaded_size() - model.swap.slot_bytes() // 2)
    mm.current_loaded_models.remove(entry)
    assert model.loaded_size() == 0 and model.swap.held_bytes() == 0
    assert torch.equal(picture(model), want)


def test_the_offload_device_is_the_host_where_comfyui_keeps_models_on_the_gpu(tiny_flux: Any) -> None:
    tiny_flux.offload_device = torch.device("meta")  # a device whose name alone is looked at
    model = swapped(tiny_flux)
    assert model.offload_device == torch.device("cpu")
    assert model.clone().offload_device == torch.device("cpu")


# What other nodes do to a MODEL. Each takes the MODEL and gives one that differs.


def object_patched_forward(model: Any) -> Any:
    """A block's forward is replaced by a function that closes over the block."""
    clone = model.clone()
    block = clone.model.diffusion_model.double_blocks[0]
    original_forward = type(block).forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        img, txt = original_forward(block, *args, **kwargs)
        return 2 * img, txt

    clone.add_object_patch("diffusion_model.double_blocks.0.forward", doubled)
    return clone


def object_patched_linear_forward(model: Any) -> Any:
    clone = model.clone()
    linear = clone.model.get_submodule(QKV)
    original_forward = type(linear).forward
    clone.add_object_patch(f"{QKV}.forward", lambda x: 1.5 * original_forward(linear, x))
    return clone


def object_patched_module(model: Any) -> Any:
    clone = model.clone()
    original = clone.model.get_submodule(QKV)
    with torch.inference_mode(False):
        other = copy.deepcopy(original)
        other.weight = torch.nn.Parameter(original.weight.data * 1.5, requires_grad=False)
    clone.add_object_patch(QKV, other)
    return clone


def object_patched_weight(model: Any) -> Any:
    clone = model.clone()
    with torch.inference_mode(False):
        weight = torch.nn.Parameter(clone.model.get_submodule(QKV).weight.data * 1.5, requires_grad=False)
    clone.add_object_patch(f"{QKV}.weight", weight)
    return clone


def weight_wrapper(model: Any) -> Any:
    clone = model.clone()
    clone.add_weight_wrapper(f"{QKV}.weight", lambda weight: 1.5 * weight)
    clone.add_weight_wrapper(f"{QKV}.bias", lambda bias: bias + 0.1)
    return clone


def compute_dtype(model: Any) -> Any:
    clone = model.clone()
    clone.set_model_compute_dtype(torch.bfloat16)
    return clone


def bypass_lora(model: Any) -> Any:
    return comfy.sd.load_bypass_lora_for_models(model, None, lora_of(model, 5), 0.6, 0.0)[0]


def injected_forward(model: Any) -> Any:
    """A node that replaces a block's forward while the MODEL is in use, around the one it finds."""
    from comfy.patcher_extension import PatcherInjection

    clone = model.clone()
    block = clone.model.diffusion_model.single_blocks[1]

    def inject(_: Any) -> None:
        original_forward = block.forward
        block.forward = lambda *args, **kwargs: 0.5 * original_forward(*args, **kwargs)
        block.original_forward = original_forward

    def eject(_: Any) -> None:
        block.forward = block.original_forward
        del block.original_forward

    clone.set_injections("test", [PatcherInjection(inject, eject)])
    return clone


def replaced_block(model: Any) -> Any:
    clone = model.clone()

    def replace(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {**out, "img": 1.5 * out["img"]}

    clone.set_model_patch_replace(replace, "dit", "double_block", 0)
    return clone


def attention_override(model: Any) -> Any:
    clone = model.clone()

    def override(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return 0.5 * attention(*args, **kwargs)

    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    return clone


CHANGES = [
    object_patched_forward,
    object_patched_linear_forward,
    object_patched_module,
    object_patched_weight,
    weight_wrapper,
    compute_dtype,
    bypass_lora,
    injected_forward,
    replaced_block,
    attention_override,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_patches_of_other_nodes_on_a_block_hold_and_end_as_without_swap(tiny_flux: Any, change: Any) -> None:
    masters = {key: t.clone() for key, t in tiny_flux.model.state_dict().items()}
    # All are made while nothing is loaded, as some read the weights that they change.
    model = swapped(tiny_flux)
    plain, plain_lora = change(tiny_flux), change(with_lora(tiny_flux))
    changed, changed_lora = change(model), change(with_lora(model))
    bare = picture(tiny_flux)
    want = picture(plain)
    want_lora = picture(plain_lora)
    assert not torch.equal(want, bare) and not torch.equal(want_lora, want)

    assert torch.equal(picture(model), bare)
    assert torch.equal(picture(changed), want)
    assert torch.equal(picture(model), bare)
    assert torch.equal(picture(changed_lora), want_lora)
    assert torch.equal(picture(changed_lora), want_lora)
    mm.unload_all_models()
    assert torch.equal(picture(changed_lora), want_lora)
    assert torch.equal(picture(plain), want)
    assert torch.equal(picture(model), bare)
    mm.unload_all_models()
    assert_no_traces(tiny_flux)
    after = tiny_flux.model.state_dict()
    assert after.keys() == masters.keys() and all(torch.equal(after[key], masters[key]) for key in masters)


def test_a_model_that_was_patched_before_it_is_swapped_keeps_its_patches(tiny_flux: Any) -> None:
    for change in (with_lora, object_patched_module, weight_wrapper, bypass_lora):
        mm.unload_all_models()
        changed = change(tiny_flux)
        want = picture(changed)  # from here on its object patches are in force
        assert torch.equal(picture(swapped(changed)), want)
        assert torch.equal(picture(changed), want)


def hooked_picture(model: Any, lora: dict[str, torch.Tensor], *, both_prompts: bool = True) -> torch.Tensor:
    """A picture with a LoRA whose strength changes on the way, on the positive prompt and another on the negative."""

    def hooks(strength: float) -> Any:
        group = comfy.hooks.create_hook_lora(lora, strength, 0.0)
        frames = comfy.hooks.HookKeyframeGroup()
        frames.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.0))
        frames.add(comfy.hooks.HookKeyframe(strength=0.2, start_percent=0.5))
        group.set_keyframes_on_hooks(frames)
        return group

    with torch.inference_mode():
        positive = comfy.hooks.set_hooks_for_conditioning(conditioning("flux", 16, 0), hooks(0.8))
        negative = conditioning("flux", 16, 1)
        if both_prompts:
            negative = comfy.hooks.set_hooks_for_conditioning(negative, hooks(0.4))
    return sample_prompts(model, positive, negative, torch.zeros(1, 16, 8, 8), steps=4, cfg=2.0)


@pytest.mark.parametrize("both_prompts", [True, False], ids=["on both prompts", "on one prompt"])
@pytest.mark.parametrize("baked", [False, True], ids=["alone", "over a LoRA"])
def test_hook_loras_change_by_prompt_and_step_and_never_reach_the_masters(
    tiny_flux: Any, both_prompts: bool, baked: bool
) -> None:
    lora = lora_of(tiny_flux, 3)
    base = with_lora(tiny_flux) if baked else tiny_flux
    unhooked = picture(base)
    want = hooked_picture(base, lora, both_prompts=both_prompts)
    mm.unload_all_models()
    masters = {key: t.clone() for key, t in tiny_flux.model.state_dict().items()}
    model = swapped(base)
    assert torch.equal(hooked_picture(model, lora, both_prompts=both_prompts), want)
    assert torch.equal(picture(model), unhooked)
    assert torch.equal(hooked_picture(model, lora, both_prompts=both_prompts), want)
    after = tiny_flux.model.state_dict()
    assert all(torch.equal(after[key], masters[key]) for key in masters if key in model.swap.weights.keys)
    mm.unload_all_models()
    assert all(torch.equal(t, masters[key]) for key, t in tiny_flux.model.state_dict().items())


@pytest.mark.parametrize(("both_prompts", "call"), [(True, 1), (True, 6), (False, 2), (False, 6)])
def test_room_that_is_made_amid_sampling_leaves_the_hooks_as_they_are(
    tiny_flux, monkeypatch, both_prompts, call
) -> None:
    lora = lora_of(tiny_flux, 3)
    want = hooked_picture(with_lora(tiny_flux), lora, both_prompts=both_prompts)
    mm.unload_all_models()
    model, calls = swapped(with_lora(tiny_flux), *BLOCKS[2:]), [0]
    monkeypatch.setattr(oom_retry, "LEAST", 2**18)
    oom_retry.retry_on_oom(model, True, lambda sentence: None)
    last = model.model.diffusion_model.final_layer
    forward = last.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise torch.OutOfMemoryError("no room for activations")
        return forward(*args, **kwargs)

    monkeypatch.setattr(last, "forward", run)
    # A LoRA under the hooks' is added at each use from there on, so that the last bits differ.
    torch.testing.assert_close(hooked_picture(model, lora, both_prompts=both_prompts), want, rtol=0, atol=1e-4)
    assert model.model.lowvram_patch_counter > 0
    mm.unload_all_models()


def test_control_residuals_reach_the_blocks(tiny_flux: Any) -> None:
    from comfy.controlnet import ControlBase

    class Residuals(ControlBase):
        def get_control(self, x: Any, *_: Any) -> Any:
            value = torch.ones(1, 16, 128)
            return {"input": [0.3 * value, 0.1 * value], "output": [0.2 * value, 0.4 * value]}

        def get_models(self) -> list[Any]:
            return []

        def copy(self) -> "Residuals":
            return self

    def controlled(model: Any) -> torch.Tensor:
        positive = [[text, {**extra, "control": Residuals()}] for text, extra in conditioning("flux", 16)]
        return sample_prompts(model, positive, positive, torch.zeros(1, 16, 8, 8))

    bare, want = picture(tiny_flux), controlled(tiny_flux)
    assert not torch.equal(bare, want)
    assert torch.equal(controlled(swapped(tiny_flux)), want)


# Errors.


@pytest.mark.parametrize("error", [RuntimeError, mm.InterruptProcessingException])
@pytest.mark.parametrize("inside", [True, False], ids=["inside a block", "between blocks"])
def test_an_error_in_mid_run_leaves_the_model_and_its_siblings_usable(
    tiny_flux: Any, error: type[BaseException], inside: bool
) -> None:
    bare, want = picture(tiny_flux), picture(with_lora(tiny_flux))
    model = with_lora(swapped(tiny_flux))
    calls = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error()
        return args[-1] if args else None

    broken = model.clone()
    if inside:
        attention = broken.model_options["transformer_options"]

        def override(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            fail()
            return function(*args, **kwargs)

        attention["optimized_attention_override"] = override
    else:

        def replace(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            fail()
            return extra["original_block"](args)

        broken.set_model_patch_replace(replace, "dit", "single_block", 0)
    with pytest.raises(error):
        picture(broken, steps=4)
    # At once, without an unload in between: nothing of a slot is left in the modules.
    assert all(
        ref.tensor().untyped_storage().data_ptr()
        not in {s.untyped_storage().data_ptr() for s in model.swap.ring.slots.tensors}
        for refs in model.swap.weights.refs
        for ref in refs
    )
    assert torch.equal(picture(model), want)
    assert torch.equal(picture(tiny_flux), bare)


def test_slots_that_find_no_memory_leave_the_model_unloaded_and_usable(tiny_flux: Any, monkeypatch: Any) -> None:
    import tessera.memory.swap.slot_ring as slot_ring

    want = picture(with_lora(tiny_flux))
    model = with_lora(swapped(tiny_flux))

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room for slots")

    with monkeypatch.context() as short:
        short.setattr(slot_ring, "empty_bytes", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            picture(model)
        assert model.swap.held_bytes() == 0 and model.loaded_size() == 0
        assert_no_traces(tiny_flux)
    assert torch.equal(picture(model), want)


# Saving and copying.


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "saved.safetensors"
    with torch.inference_mode():
        comfy.sd.save_checkpoint(str(path), model)
    return comfy.utils.load_torch_file(str(path))


def assert_same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert first.keys() == other.keys()
    assert all(torch.equal(first[key], other[key]) and first[key].dtype == other[key].dtype for key in first)


@pytest.mark.parametrize("file", ["fp32", "scaled fp8"])
@pytest.mark.parametrize("lora", [False, True])
def test_saving_gives_the_files_and_names_of_the_unswapped_model(tmp_path: Path, file: str, lora: bool) -> None:
    settings = {"dtype": torch.bfloat16, "fp8": True} if file == "scaled fp8" else {}
    plain = load(tiny.write_flux(tmp_path / "flux.safetensors", **settings))
    base = with_lora(plain) if lora else plain
    want = saved(base, tmp_path)
    unload()
    bare = {key: t.clone() for key, t in base.model_state_dict().items()}
    model = swapped(base, "double_blocks.1", "single_blocks.0", "single_blocks.1")
    picture(model)
    assert_same(saved(model, tmp_path), want)  # loaded
    inside = [key for key in bare if key in model.swap.weights.keys]
    for state in (model.model.state_dict(), model.model_state_dict()):
        assert list(state) == list(bare)
        assert inside and all(torch.equal(state[key], bare[key]) for key in inside)
    unload()
    assert_same(dict(model.model_state_dict()), bare)
    assert_same(saved(model, tmp_path), want)


def test_a_patch_on_a_norm_of_a_swapped_block_is_saved_as_well(tiny_flux: Any, tmp_path: Path) -> None:
    key = "diffusion_model.double_blocks.0.img_attn.norm.query_norm.weight"
    state = tiny_flux.model.state_dict()
    key = key if key in state else key.replace("weight", "scale")
    base = tiny_flux.clone()
    assert base.add_patches({key: ("diff", (torch.full_like(state[key], 0.5),))}) == [key]
    want, picture_wanted = saved(base, tmp_path), picture(base)
    model = swapped(base)
    assert torch.equal(picture(model), picture_wanted)
    assert_same(saved(model, tmp_path), want)


def test_a_deep_copy_of_a_loaded_model_is_an_ordinary_one(tiny_flux: Any) -> None:
    inputs = torch.ones(1, 16, 8, 8), torch.tensor([0.5]), torch.ones(1, 16, tiny.T5_WIDTH)
    pooled = torch.ones(1, tiny.CLIP_WIDTH)
    with torch.no_grad():
        want = tiny_flux.model.diffusion_model(*inputs, pooled, guidance=torch.tensor([3.5]))
        model = swapped(tiny_flux)
        mm.load_models_gpu([model])
        other = copy.deepcopy(model.model.diffusion_model)
        assert not any(isinstance(vars(m).get("forward"), SwappedForward) for m in other.modules())
        copies = model.swap.ring.copies
        assert torch.equal(other(*inputs, pooled, guidance=torch.tensor([3.5])), want)
        assert model.swap.ring.copies == copies
        assert torch.equal(model.model.diffusion_model(*inputs, pooled, guidance=torch.tensor([3.5])), want)
        assert model.swap.ring.copies == copies + 4


def test_clones_on_another_model_swap_the_blocks_of_that_model(tiny_files: dict[str, Path]) -> None:
    plain = tiny.load_flux(tiny_files["flux"])
    want = picture(with_lora(plain))
    model = with_lora(swapped(plain))
    assert type(model.clone(disable_dynamic=True)) is SwapPatcher
    other = model.clone(force_deepcopy=True)
    assert other.model is not model.model and other.swap is not model.swap
    assert {id(b) for b in other.swap.weights.blocks.values()}.isdisjoint(
        {id(b) for b in model.swap.weights.blocks.values()}
    )
    assert torch.equal(picture(other), want)
    assert torch.equal(picture(model), want)


# Stored formats.

FORMATS = {
    "bf16": ({"dtype": torch.bfloat16}, None),
    "plain fp8": ({"dtype": torch.float8_e4m3fn}, torch.float8_e4m3fn),
    "scaled fp8": ({"dtype": torch.bfloat16, "fp8": True}, None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_stored_formats_stream_as_stored(tmp_path: Path, name: str) -> None:
    settings, load_options = FORMATS[name]
    plain = load(tiny.write_flux(tmp_path / "flux.safetensors", **settings), load_options)
    bare, want = picture(plain), picture(with_lora(plain, 0.1))
    unload()
    inside = blocks_of(plain).values()
    stored = max(mm.module_size(block) for block in inside)
    masters = {key: t.clone() for key, t in plain.model.state_dict().items()}
    model = swapped(plain)
    assert torch.equal(picture(model), bare)
    home = parts_of(plain.model.get_submodule(QKV).weight)[0].untyped_storage().data_ptr()
    with torch.inference_mode():
        mm.load_models_gpu([model])
    for j, (weights, slots) in enumerate(zip(model.swap.tensors.originals, model.swap.tensors.over_slots, strict=True)):
        model.swap.ring.forward(j)
        for weight, slot in zip(weights, slots, strict=True):
            for part, slot_part in zip(parts_of(weight), parts_of(slot), strict=True):
                assert torch.equal(part.float(), slot_part.float())
                assert (
                    slot_part.untyped_storage().data_ptr()
                    == model.swap.ring.slots.tensor(j).untyped_storage().data_ptr()
                )
    assert torch.equal(picture(with_lora(model, 0.1)), want)
    unload()
    assert torch.equal(picture(with_lora(model, 0.1)), want)
    # The masters stay where they were, also after ComfyUI has moved the modules.
    assert parts_of(plain.model.get_submodule(QKV).weight)[0].untyped_storage().data_ptr() == home
    assert not torch.equal(bare, want) and want.isfinite().all()
    # A slot takes what is stored, and what aligning each tensor costs.
    tensors = max(len(layout.fields) for layout in model.swap.weights.layouts)
    assert stored * 0.95 <= model.swap.ring.slots.size <= stored + 256 * tensors
    unload()
    assert torch.equal(picture(with_lora(plain, 0.1)), want)
    unload()
    assert_same(dict(plain.model.state_dict()), masters)


# Bad input.


def test_a_model_without_blocks_to_swap_is_one_sentence(tiny_flux: Any) -> None:
    with pytest.raises(ValueError, match="blocks_to_swap: this model has no blocks to swap"):
        swap_model(tiny_flux, {}, 1, False)


def test_a_patcher_that_loads_in_its_own_way_is_refused(tiny_flux: Any) -> None:
    class Other(ModelPatcher):
        pass

    other = Other(tiny_flux.model, tiny_flux.load_device, tiny_flux.offload_device)
    with pytest.raises(ValueError, match="block swap doesn't work with this loader"):
        swapped(other)


@pytest.mark.parametrize(
    ("prefetch", "sentence"), [(0, "so 1 is used"), (3, "nothing is saved"), (9, "nothing is saved")]
)
def test_an_odd_prefetch_is_said_and_the_picture_is_right(tiny_flux: Any, prefetch: int, sentence: str) -> None:
    want = picture(with_lora(tiny_flux))
    model = swapped(tiny_flux, prefetch=prefetch)
    assert len(model.notes) == 1 and sentence in model.notes[0]
    assert torch.equal(picture(with_lora(model)), want)
    assert swapped(tiny_flux, prefetch=2).notes == []


def test_memory_that_can_not_be_pinned_is_said_once_and_plain_memory_is_taken(tiny_flux: Any, caplog: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    want = picture(tiny_flux)
    model = swap_model(tiny_flux, blocks_of(tiny_flux), 1, pinned=True)
    with caplog.at_level(logging.INFO):
        assert torch.equal(picture(model), want)
        mm.unload_all_models()
        assert torch.equal(picture(model), want)
    assert len(model.notes) == 1 and "4 of 4 swapped blocks could not be page-locked" in model.notes[0]
    assert sum(record.message == model.notes[0] for record in caplog.records) == 1


def test_a_weight_of_another_kind_in_a_swapped_block_is_refused_when_it_is_loaded(tiny_flux: Any) -> None:
    bare = picture(tiny_flux)
    model = swapped(tiny_flux)
    clone = model.clone()
    other = clone.model.get_submodule(QKV).weight.data.to(torch.bfloat16)
    clone.add_object_patch(f"{QKV}.weight", torch.nn.Parameter(other, requires_grad=False))
    with pytest.raises(ValueError, match="put weights of other shapes or dtypes into .*double_blocks.0 "):
        picture(clone)
    assert torch.equal(picture(model), bare)


def test_a_lora_that_changes_a_shape_is_refused_when_it_is_loaded(tiny_flux: Any) -> None:
    key = f"{QKV}.weight"
    weight = tiny_flux.model.state_dict()[key]
    model = swapped(tiny_flux)
    model.add_patches({key: ("diff", (torch.zeros(weight.shape[0] + 1, weight.shape[1]), {"pad_weight": True}))})
    with pytest.raises(ValueError, match="changes the shape of .*qkv.weight"):
        picture(model)
    assert model.loaded_size() == 0
