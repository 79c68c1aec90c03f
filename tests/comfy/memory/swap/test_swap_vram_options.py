"""Block swap under ComfyUI's --highvram and --lowvram, each in a process of its own: ComfyUI reads them when it is
imported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tessera_dev import find_comfyui
from thinned import one_in

TESTS = Path(__file__).resolve().parents[3]

# ComfyUI takes the options for nothing where there is no GPU; here the CPU goes the way of one, with as much memory
# as the test says.
SCRIPT = """
import json, sys
support, comfyui, file, option = sys.argv[1:]
sys.argv = ["main.py", option]
sys.path[:0] = [comfyui, support]
import comfy.options
comfy.options.enable_args_parsing()
import with_comfyui
import comfy.model_management as mm
from comfy.cli_args import args

mm.vram_state = mm.VRAMState.HIGH_VRAM if args.highvram else mm.set_vram_to
room, bases = 10**12, []

def free_memory(*_, torch_free_too=False):
    free = room - sum(base.model_loaded_weight_memory for base in bases)
    return (free, free) if torch_free_too else free

mm.get_free_memory = free_memory
mm.minimum_inference_memory = lambda: 0
mm.MIN_WEIGHT_MEMORY_RATIO = 1.0  # all that is free may be taken by weights
mm.extra_reserved_memory = lambda: 0
loading, on_cpu = mm.load_models_gpu, mm.is_device_cpu

def load_as_on_a_gpu(*args, **kwargs):
    mm.is_device_cpu = lambda device: False
    try:
        return loading(*args, **kwargs)
    finally:
        mm.is_device_cpu = on_cpu

mm.load_models_gpu = load_as_on_a_gpu

import folder_paths
import torch
from tessera.nodes.model.load import TesseraLoadDiffusionModel
from test_swap_patcher import picture, with_lora

def load(**inputs):
    folder_paths.get_full_path_or_raise = lambda *_: file
    with torch.inference_mode():
        model = TesseraLoadDiffusionModel.execute("flux", "default", **inputs).args[0]
    bases.append(model.model)
    return model

plain = load()
want = [picture(plain), picture(with_lora(plain))]
model = load(blocks_to_swap=2)
rest = model.model_size() - model.swap.slot_bytes()
if option != "--highvram":
    mm.unload_all_models()
    room = model.swap.slot_bytes() + rest // 2
found, loaded = [], []
for patched in (model, with_lora(model), model, with_lora(model)):
    found.append(picture(patched))
    loaded.append(patched.loaded_size())
print(json.dumps({
    "state": mm.vram_state.name,
    "equal": [torch.equal(a, b) for a, b in zip(found, want * 2)],
    "differ": not torch.equal(*want),
    "loaded": loaded,
    "rest": rest,
    "slots": model.swap.slot_bytes(),
}))
"""


def run(file: Path, option: str) -> dict[str, Any]:
    command = [sys.executable, "-c", SCRIPT, str(TESTS / "support"), str(find_comfyui()), str(file), option]
    paths = os.pathsep.join([str(TESTS / "support"), str(Path(__file__).parent)])
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("option", one_in(2, ["--lowvram", "--highvram"]))
def test_swapped_equals_unswapped_whatever_comfyui_is_started_with(tiny_files: dict[str, Path], option: str) -> None:
    result = run(tiny_files["flux"], option)
    assert result["state"] == {"--highvram": "HIGH_VRAM", "--lowvram": "LOW_VRAM"}[option]
    assert result["equal"] == [True] * 4 and result["differ"]
    for loaded in result["loaded"]:
        if option == "--highvram":
            assert loaded == result["rest"] + result["slots"]  # swapped blocks stay on the host even there
        else:
            assert result["slots"] < loaded <= result["slots"] + result["rest"] // 2
