"""A preview shows what is trained: with the frozen LoRA beneath it, which the file does not hold."""

import runpy
from pathlib import Path

import comfy.sd
import numpy as np
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.source import LoraSource
from tessera.nodes.train.inherited_settings import shared_lora_notes
from tessera.nodes.train.run import run
from tiny.lora.lora_files import random_updates
from tiny.train.runs import Watcher, run_settings

PREVIEW = runpy.run_path(str(Path(__file__).with_name("test_preview.py")))


def test_a_preview_at_the_start_is_that_of_core_with_the_base_lora(tiny_flux, tiny_vae):
    tensors = convert(LoraModel.from_modules(random_updates(tiny_flux)))
    network = {"base_lora": LoraSource("base.safetensors", "x", lambda: tensors), "base_strength": 0.2}
    settings = run_settings(output_name="with_base", steps=1, network=network)
    result = run(tiny_flux, PREVIEW["one_size"](), settings, Watcher(), {}, [PREVIEW["preview"](tiny_vae, every=0)])
    picture = PREVIEW["read"](result.path.parent, "step000000_0.png")
    loaded, _ = comfy.sd.load_lora_for_models(tiny_flux, None, tensors, 0.2, 0)
    assert np.array_equal(picture, PREVIEW["core_picture"](loaded, tiny_vae, None, 5))
    assert not np.array_equal(picture, PREVIEW["core_picture"](tiny_flux, tiny_vae, None, 5))
    assert shared_lora_notes(settings) == [
        "base_lora base.safetensors is used for both experts; to give the low noise one its own, set "
        "base_lora_low_noise on LoRA Network."
    ]
