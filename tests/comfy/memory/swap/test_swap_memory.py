"""Cost of swapping on the host: the weights lie there once, also while they move into the masters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import comfy.model_management
import comfy.utils
import pytest
import tiny
import torch
from tessera.memory.swap.training import frozen_modules
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.memory.alive import Since, size_of
from tiny.models.sampling import sample

ROOT = Path(__file__).resolve().parents[4]
MB = 2**20

# Runs on its own, so that only this model is counted.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]) / "tests" / "support"))
import with_comfyui
import tiny, torch
import comfy.model_management
import comfy.sd
from tessera.memory.swap.patcher import swap_model
from tiny.memory.host_memory import Peak, anonymous, settle
from tiny.models.sampling import sample

# Whatever loading and running import is in memory before anything is counted.
warm = tiny.load_flux(tiny.write_flux(Path(sys.argv[2]) / "warm.safetensors"))
blocks = {f"diffusion_model.single_blocks.{i}": b for i, b in enumerate(warm.model.diffusion_model.single_blocks)}
swap = swap_model(warm, blocks, 1, False)
sample(swap, "flux")
comfy.model_management.unload_all_models()
del warm, blocks, swap
settle()

start = anonymous()
with Peak() as loading:
    with torch.inference_mode():
        model = tiny.load_flux(Path(sys.argv[3]), torch.bfloat16)
settle()
held = anonymous() - start
diffusion = model.model.diffusion_model
blocks = {
    f"diffusion_model.{name}.{i}": block
    for name in ("double_blocks", "single_blocks") for i, block in enumerate(getattr(diffusion, name))
}
swapped = swap_model(model, blocks, 1, False)
slots = swapped.swap.slot_bytes()
# On a machine without a GPU the slots are memory of the host; they are counted along.
with Peak() as attaching:
    with torch.inference_mode():
        comfy.model_management.load_models_gpu([swapped])
comfy.model_management.unload_all_models()
settle()
after = anonymous() - start
with Peak() as again:
    comfy.model_management.load_models_gpu([swapped])
size = comfy.model_management.module_size(model.model)
print(json.dumps({
    "size": size, "held": held, "loading": loading.highest - start, "attaching": attaching.highest - start,
    "after": after, "again": again.highest - start, "slots": slots,
}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process")
def test_the_host_holds_the_weights_once_while_they_move_into_the_masters(tmp_path: Path) -> None:
    file = tiny.write_flux(tmp_path / "flux.safetensors", hidden=256, depth=12, depth_single=60, dtype=torch.bfloat16)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path), str(file)],
        capture_output=True,
        text=True,
        # glibc keeps freed buffers of some megabytes for itself, more or fewer as threads happen to run.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "MALLOC_MMAP_THRESHOLD_": str(2**16)},
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    measured = json.loads(process.stdout.splitlines()[-1])
    size = measured["size"]
    assert 150 * MB < size < 300 * MB and measured["slots"] < size / 15
    for moment in ("held", "loading", "attaching", "after", "again"):
        assert measured[moment] < 1.1 * size, (moment, measured)


FORMATS = {
    "fp32": ({}, None),
    "fp32 with a LoRA": ({}, None),
    "fp8": ({"dtype": torch.float8_e4m3fn}, torch.float8_e4m3fn),
    "scaled fp8": ({"dtype": torch.bfloat16, "fp8": True}, None),
}


@pytest.mark.parametrize("stored", one_in(3, FORMATS))
def test_training_on_a_swapped_model_takes_over_its_masters_and_gives_them_back(stored: str, tmp_path: Path) -> None:
    """Sampled before, the MODEL has masters of its own; training has others, and the weights are there once."""
    file_options, load_options = FORMATS[stored]
    file = tiny.write_flux(tmp_path / "flux.safetensors", depth=3, depth_single=7, **file_options)
    measure = Since()
    with torch.inference_mode():
        model, _ = swap(tiny.load_flux(file, load_options), SwapSettings(10))
        matrices = [f"diffusion_model.single_blocks.{i}.linear1.weight" for i in range(7)] if "LoRA" in stored else []
        weights = [comfy.utils.get_attr(model.model, key) for key in matrices]
        model.add_patches(
            {k: ("diff", (torch.ones(1, 1).expand_as(w),)) for k, w in zip(matrices, weights, strict=True)}
        )
        patched = sum(weight.nbytes for weight in weights)  # training has these beside the model's own
        del weights
        picture = sample(model, "flux")
        comfy.model_management.unload_all_models()
    size = size_of(measure())
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(
        model, data, tmp_path, steps=1, memory=MemoryOptions(checkpointing="full", blocks_to_swap=10)
    )
    blocks = [
        sum(m.held_bytes() for m in frozen_modules(block).values()) for block in trainer.placed.weights.swap.blocks
    ]
    # The master weights and their gradients, which are there from the start on.
    lora = sum(group.master.nbytes + group.gradient.nbytes for group in trainer.network.flat)
    beside = trainer.placed.weights.swap.held_bytes() + lora
    assert size_of(measure()) - size - beside - patched < max(blocks) / 4
    assert sum(blocks) > size / 2
    trainer.run()
    trainer.close()
    del trainer
    assert size_of(measure()) - size < max(blocks) / 4
    assert torch.equal(sample(model, "flux"), picture)
    comfy.model_management.unload_all_models()
    assert size_of(measure()) - size < max(blocks) / 4
