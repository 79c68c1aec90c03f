"""The loader of ComfyUI-GGUF itself: what it loads of a file trains, previews and compiles.

Run where the environment variable TESSERA_GGUF_PACK names a folder with that pack.
"""

import importlib.util
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import comfy.model_management
import comfy.sd
import folder_paths
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from tessera.compile.settings import CompileSettings
from tessera.memory.weights import frozen
from tessera.memory.weights.frozen import unload
from tessera.train.preview.sampling import Sampling
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Preview, Previewer
from tiny.memory.gguf import SCALES, flux_state, native_model, write_gguf
from tiny.memory.gguf_runs import both_forwards, loha, memory_of, plain_lora, with_lora
from tiny.models.sampling import conditioning
from tiny.native import NAMED
from tiny.native.step import trainer_of
from tiny.train.runs import Watcher, mixed_data, run_settings, train
from tiny.train.training import micro_batch

PACK = os.environ.get("TESSERA_GGUF_PACK", "")
pytestmark = pytest.mark.skipif(not PACK, reason="TESSERA_GGUF_PACK names no folder with ComfyUI-GGUF")
# It widens in fp16: 2⁻¹¹ of each value.
HALF = 2e-3


@pytest.fixture(scope="module")
def load_unet(tmp_path_factory):
    """Load a state dict through a GGUF file and the pack's own node, under inference mode as ComfyUI runs it."""
    path = Path(PACK)
    spec = importlib.util.spec_from_file_location("gguf_pack", path / "__init__.py", submodule_search_locations=[PACK])
    pack = importlib.util.module_from_spec(spec)
    folder = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gguf_pack", pack)
        spec.loader.exec_module(pack)
        for name in ("unet", "diffusion_models", "unet_gguf"):
            patch.setitem(folder_paths.folder_names_and_paths, name, ([str(folder)], {".gguf"}))

        def load(state, **advanced):
            number = len(list(folder.iterdir()))
            file = write_gguf(folder / f"{number}.gguf", state)
            with torch.inference_mode():
                node = pack.NODE_CLASS_MAPPINGS["UnetLoaderGGUFAdvanced"]()
                return node.load_unet(file.name, **advanced)[0]

        load.layers = sys.modules["gguf_pack.ops"].GGMLOps
        yield load


@pytest.mark.parametrize("name", SCALES)
def test_the_forward_is_the_pack_s_own(name, load_unet):
    model = load_unet(flux_state(name, "BF16", hidden=256, depth=1), dequant_dtype="float32")
    expected, actual, transformer = both_forwards(model)
    assert (actual - expected).norm() <= 2e-6 * expected.norm()
    stored = [linear for n, linear in transformer.linears().items() if "_blocks." in n and linear.layout is not None]
    assert len(stored) >= 10 + 2  # linear2's width of 1280 is a multiple of 256 too


@pytest.mark.parametrize("lora", [plain_lora, loha], ids=["LoRA", "LoHa"])
def test_loras_on_it_stay_in_force(lora, load_unet):
    model = load_unet(flux_state("Q5_1"), dequant_dtype="float32")
    initial = memory_of(model)
    bare, _, _ = both_forwards(model)
    expected, actual, _ = both_forwards(with_lora(model, lora()))
    assert (actual - expected).norm() <= 2e-6 * expected.norm() and (expected - bare).norm() > 0.02 * bare.norm()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in memory_of(model).items())
    repeated, _, _ = both_forwards(model)
    assert torch.equal(repeated, bare)


def test_the_pack_s_own_fp16_comes_near(load_unet):
    expected, actual, _ = both_forwards(with_lora(load_unet(flux_state("Q4_0")), plain_lora()))
    assert (actual - expected).norm() <= HALF * expected.norm()


def test_swapped_and_previewed_it_trains_as_resident(load_unet, tiny_vae, tmp_path):
    model = with_lora(load_unet(flux_state("Q4_0")), plain_lora())
    initial = memory_of(model)
    memory = {"checkpointing": "none"}
    plain = train(model, mixed_data(), tmp_path / "plain", batch_size=2, memory=memory)
    preview = Preview(Sampling(tiny_vae, conditioning("flux", 16, 0), width=64, height=48, steps=1), 3, True, True)
    watcher = Watcher()
    swapped = train_lora(
        RunRequest(
            model,
            mixed_data(),
            run_settings(batch_size=2, memory=memory | {"blocks_to_swap": 2}),
            tmp_path / "swapped",
            watcher,
            CompileSettings("aot_eager"),
            [Previewer([preview], model)],
        )
    )
    assert len(watcher.sheets) == 3 and not any("failed" in note for note in watcher.notes), watcher.notes
    assert swapped.loss == plain.loss and swapped.lora.keys() == plain.lora.keys()
    assert all(torch.equal(swapped.lora[key], tensor) for key, tensor in plain.lora.items())
    unload()
    assert all(torch.equal(weight, initial[name]) for name, weight in memory_of(model).items())
    with torch.inference_mode():
        trained, _ = comfy.sd.load_lora_for_models(model, None, swapped.lora, 1.0, 0)
        comfy.model_management.load_models_gpu([trained])
        patched = [w for w in trained.model.diffusion_model.parameters() if getattr(w, "patches", None)]
    unload()
    assert len(patched) == 2 * 8 + 2 * 2 and not any(getattr(w, "patches", None) for w in trained.model.parameters())


@pytest.mark.parametrize("mismatch", [False, True])
def test_a_model_without_a_forward_of_ours_is_checked_against_the_pack_s_layers(
    mismatch, load_unet, tmp_path, monkeypatch
):
    row = next(row for row in NAMED if row.name == "z-image")
    model = native_model(row, "Q4_0", load_unet.layers)
    patch = LoRAAdapter(set(), (torch.randn(256, 2), torch.randn(2, 256), None, None, None, None))
    name = next(
        n
        for n, m in model.model.named_modules()
        if getattr(m, "weight", None) is not None and m.weight.shape == (256, 256)
    )
    model.add_patches({f"{name}.weight": patch}, 0.5)
    if mismatch:
        factors_of = frozen.factors_of
        monkeypatch.setattr(frozen, "factors_of", lambda *args: tuple(0 * factor for factor in factors_of(*args)))
    trainer = trainer_of(row, tmp_path, "none", model)
    with pytest.raises(ValueError, match="is read .* differently than ComfyUI") if mismatch else nullcontext():
        trainer.train_step.forward_backward([micro_batch(0)])
    trainer.close()
