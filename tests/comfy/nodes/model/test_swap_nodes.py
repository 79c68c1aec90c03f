"""Block Swap and Training Memory: how many blocks stream, from what the user asks or from what memory there is."""

import gc
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import tiny
import torch
from comfy.patcher_extension import WrappersMP
from tessera.models.catalogue.swapped_model import SwapSettings, swap, swap_settings_of
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.nodes.options.memory import TesseraMemory
from tessera.nodes.train.inherited_settings import inherited_memory
from tessera.train.config.settings import MemoryOptions
from tiny.models.sampling import sample


@pytest.fixture
def flux(tiny_files: dict[str, Path]) -> Any:
    with torch.inference_mode(False):
        return tiny.load_model("flux", tiny_files["flux"])


def streamed(model: Any) -> list[str]:
    from tessera.memory.swap.inference import SwappedBlocks

    (swapped,) = [a for a in model.attachments.values() if isinstance(a, SwappedBlocks)]
    return [name.removeprefix("diffusion_model.") for name in swapped.weights.blocks]


def test_the_node_swaps_the_single_blocks_of_flux_first_and_the_pictures_are_the_same(flux: Any) -> None:
    with torch.inference_mode():
        swapped = TesseraBlockSwap.execute(flux, 3, 1, "auto").args[0]
    assert streamed(swapped) == ["double_blocks.1", "single_blocks.0", "single_blocks.1"]
    assert torch.equal(sample(swapped, "flux"), sample(flux, "flux"))
    assert swap_settings_of(swapped) == SwapSettings(3, 1, "auto")


def test_minus_one_swaps_what_does_not_fit_and_says_so(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = flux.model_size() + int(flux.memory_required([1, 16, 128, 128]))
    reserved = comfy.model_management.extra_reserved_memory()

    def with_free(memory: int) -> tuple[Any, list[str]]:
        monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: memory + reserved)
        monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])  # what other tests left would count
        return swap(flux, SwapSettings(-1))

    fits, _ = with_free(needed + 2**20)
    assert type(fits) is type(flux)
    tight, notes = with_free(needed - 2**20)
    assert streamed(tight) and notes
    assert tight.model_size() <= flux.model_size() - 2**20


def test_minus_one_counts_what_others_hold_and_passes_over_a_model_that_is_gone(
    flux: Any, tiny_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = flux.model_size() + int(flux.memory_required([1, 16, 128, 128]))
    needed += int(comfy.model_management.extra_reserved_memory())
    loaded: list[Any] = []
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", loaded)
    other = tiny.load_model("schnell", tiny_files["schnell"])
    comfy.model_management.load_models_gpu([other])
    room = needed + 2**20 - other.loaded_size()
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: room)
    assert type(swap(flux, SwapSettings(-1))[0]) is type(flux)
    weights = other.model  # which a node may still hold
    del other
    gc.collect()
    assert [entry.model for entry in loaded] == [None]
    assert streamed(swap(flux, SwapSettings(-1))[0])
    del weights


@pytest.mark.parametrize(("prefetch", "expected"), [(1, 2), (2, 2), (4, 4)])
def test_minus_one_chooses_how_many_are_copied_ahead_too(
    tmp_path: Path, monkeypatch, prefetch: int, expected: int
) -> None:
    """Of twelve blocks in two sizes, of which a few more than fit: two ahead lose least, whatever a block takes."""
    with torch.inference_mode(False):
        flux = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", depth=4, depth_single=8))
    want = sample(flux, "flux")
    comfy.model_management.unload_all_models()
    blocks = [*flux.model.diffusion_model.double_blocks, *flux.model.diffusion_model.single_blocks]
    needed = flux.model_size() + int(flux.memory_required([1, 16, 128, 128]))
    free = needed - 7 * sum(map(comfy.model_management.module_size, blocks)) // 100
    reserved = comfy.model_management.extra_reserved_memory()
    with monkeypatch.context() as small:
        small.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: free + reserved)
        small.setattr(comfy.model_management, "current_loaded_models", [])
        model, notes = swap(flux, SwapSettings(-1, prefetch))
    assert model.swap.options.prefetch == expected and f" blocks stream from RAM, {expected} ahead" in notes[0]
    assert model.model_size() <= flux.model_size() - (needed - free)
    assert swap_settings_of(model) == SwapSettings(-1, prefetch)  # training chooses by what it measures
    assert torch.equal(sample(model, "flux"), want)
    comfy.model_management.unload_all_models()


@pytest.mark.parametrize(("kind", "side"), [("flux", 128), ("flux2", 64)])
def test_minus_one_leaves_room_for_a_megapixel_in_the_models_own_latents(tiny_files, monkeypatch, kind, side) -> None:
    with torch.inference_mode(False):
        model = tiny.load_model(kind, tiny_files[kind])
    shapes: list[Any] = []
    monkeypatch.setattr(type(model), "memory_required", lambda self, shape: shapes.append(shape) or 0)
    swap(model, SwapSettings(-1))
    assert [shape[2:] for shape in shapes] == [[side, side]]


def limited(model: Any, limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The model's last layer finds memory only where no more than `limit` bytes of weights are loaded. Returns what was
    loaded at each try."""
    last = model.model.diffusion_model.final_layer
    forward, sizes = last.forward, []

    def run(*args: Any, **kwargs: Any) -> Any:
        sizes.append(model.loaded_size())
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("no room for activations")
        return forward(*args, **kwargs)

    monkeypatch.setattr(last, "forward", run)
    return sizes


@pytest.mark.parametrize("fits", [True, False], ids=["nothing streams", "some stream"])
def test_weights_make_room_while_sampling_if_minus_one_was_too_little(flux: Any, fits: bool, monkeypatch) -> None:
    from tessera.memory.swap import oom_retry

    monkeypatch.setattr(oom_retry, "LEAST", 2**18)
    want = sample(flux, "flux")
    comfy.model_management.unload_all_models()
    masters = {key: t.clone() for key, t in flux.model.state_dict().items()}
    with monkeypatch.context() as free:
        needed = flux.model_size() + int(flux.memory_required([1, 16, 128, 128]))
        needed += int(comfy.model_management.extra_reserved_memory())
        room = needed + 2**20 * (1 if fits else -1)
        free.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: room)
        model, notes = swap(flux, SwapSettings(-1))
    assert (type(model) is type(flux)) is fits
    note_count = len(notes)
    slots = 0 if fits else model.swap.slot_bytes()
    sizes = limited(model, slots + (model.model_size() - slots) // 4, monkeypatch)
    assert torch.equal(sample(model, "flux"), want)
    assert len(sizes) > 2 and sizes[-1] < sizes[0] and sorted(sizes, reverse=True) == sizes
    assert [
        note for note in notes[note_count:] if "Even with blocks_to_swap -1 the memory was not enough" in note
    ] == notes[note_count:]
    assert len(notes) == note_count + 1  # it happened more than once, and is said once
    comfy.model_management.unload_all_models()
    assert all(torch.equal(t, masters[key]) for key, t in flux.model.state_dict().items())


def test_a_number_of_ones_own_is_kept_and_no_room_at_all_ends_the_run(flux: Any, monkeypatch) -> None:
    model, notes = swap(flux, SwapSettings(2))
    sizes = limited(model, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        sample(model, "flux")
    assert len(sizes) == 1 and not any("suffice" in note for note in notes)
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: 10**12)
    automatic, _ = swap(flux, SwapSettings(-1))
    sizes = limited(automatic, -1, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        sample(automatic, "flux")
    assert len(sizes) > 1


def test_memory_that_spills_while_it_samples_is_told_once(flux: Any, monkeypatch) -> None:
    from tessera.memory.swap.oom_retry import KEY

    model, notes = swap(flux, SwapSettings(2))
    (room,) = model.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    monkeypatch.setattr(room.sysmem, "message", lambda: "About 3.0 GB are in shared GPU memory.")
    sample(model.clone(), "flux")
    assert notes.count("About 3.0 GB are in shared GPU memory.") == 1


def test_training_takes_the_swap_of_the_model_unless_training_memory_has_its_own(flux: Any) -> None:
    swapped, _ = swap(flux, SwapSettings(2, 2, "off"))
    memory, notes = inherited_memory(swapped, MemoryOptions())
    assert (memory.blocks_to_swap, memory.prefetch_blocks, memory.pin_memory) == (2, 2, "off")
    assert notes == ["blocks_to_swap is 2, as set on the MODEL."]
    own_memory = TesseraMemory.execute("none", "auto", blocks_to_swap=1).args[0]
    result, notes = inherited_memory(swapped, own_memory)
    assert result == own_memory and result.blocks_to_swap == 1
    assert notes == ["blocks_to_swap is 1 (from the connected Training Memory), not 2 as set on the MODEL."]
    assert inherited_memory(flux, MemoryOptions()) == (MemoryOptions(), [])


def test_a_swapped_model_trains_as_the_plain_one_and_still_samples(flux: Any, tmp_path: Path) -> None:
    data = tiny.make_data([(4, 4)], [16])
    plain = tiny.make_trainer(flux, data, tmp_path / "plain", steps=2)
    plain.run()
    picture = sample(flux, "flux")
    swapped, _ = swap(flux, SwapSettings(4))
    assert torch.equal(sample(swapped, "flux"), picture)
    memory, _ = inherited_memory(swapped, MemoryOptions())
    trainer = tiny.make_trainer(swapped, data, tmp_path / "swapped", steps=2, memory=memory)
    trainer.run()
    assert trainer.progress.loss == plain.progress.loss and len(trainer.placed.weights.swap.blocks) == 4
    assert torch.equal(sample(swapped, "flux"), picture)
    assert torch.equal(sample(flux, "flux"), picture)


def test_bad_input_is_one_sentence(flux: Any) -> None:
    with pytest.raises(ValueError, match="blocks_to_swap is 9; this model has 4 blocks, so choose 0 to 4."):
        TesseraBlockSwap.execute(flux, 9, 1, "auto")
    with pytest.raises(ValueError, match="not a diffusion model"):
        TesseraBlockSwap.execute(object(), 1, 1, "auto")
    swapped, _ = swap(flux, SwapSettings(1))
    with pytest.raises(ValueError, match="model already has block swap"):
        TesseraBlockSwap.execute(swapped, 1, 1, "auto")


def test_a_model_without_blocks_goes_on_as_it_is_with_one_sentence(flux: Any) -> None:
    picture = sample(flux, "flux")
    other = flux.clone()
    other.add_object_patch("diffusion_model", torch.nn.Linear(2, 2))
    out = TesseraBlockSwap.execute(other, -1, 1, "auto")
    assert type(out.args[0]) is type(flux)
    assert out.ui["tessera"][0]["notes"] == ["Nothing is swapped: this model has no repeated blocks."]
    assert torch.equal(sample(flux, "flux"), picture)


@pytest.mark.parametrize("blocks", [-1, 3])
def test_a_prefetch_of_none_is_said_and_one_is_taken(flux: Any, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    picture = sample(flux, "flux")
    room = flux.model_size() * 8 // 10 + int(flux.memory_required([1, 16, 128, 128]))
    room += int(comfy.model_management.extra_reserved_memory())
    with monkeypatch.context() as small:
        small.setattr(comfy.model_management, "current_loaded_models", [])
        small.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: room)
        out = TesseraBlockSwap.execute(flux, blocks, 0, "auto")
    swapped, notes = out.args[0], out.ui["tessera"][0]["notes"]
    assert notes[-1] == "prefetch_blocks is 0, but at least one block must be copied ahead, so 1 is used."
    assert swapped.swap.options.prefetch == 1
    if blocks == -1:
        assert swapped.model_size() <= flux.model_size() * 8 // 10
    assert torch.equal(sample(swapped, "flux"), picture)
