"""Compare with ComfyUI's own: the KSampler with block swap and with dynamic VRAM, and core's trainer."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from comfyui import DTYPES, set_up_comfyui

GB = 1e9
ROOM = 4.0  # GB in addition to half of the model: activations, buffers, the context
WARM_UP, STEPS = 2, 4


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    if spec["how"] == "core":
        return lambda settings, figures: core_trains(spec, settings)
    if spec["how"] == "dynamic VRAM":
        start_dynamic_vram(spec["device"])
    else:
        set_up_comfyui(spec["device"])
    return lambda settings, figures: sample(spec)


# Sampling


def start_dynamic_vram(device: str) -> None:
    """Turn dynamic VRAM on as ComfyUI's main.py does, before and after its modules are loaded."""
    import comfy_aimdo.control as aimdo

    aimdo.init()
    set_up_comfyui(device)
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = comfy.model_management.get_all_torch_devices()
    try:
        working = aimdo.init_devices((d.index, 0) for d in devices)
    except TypeError:  # of comfy-aimdo 0.4.9
        working = aimdo.init_devices(d.index for d in devices)
    if not working:
        raise RuntimeError("comfy-aimdo does not work here, so there is no dynamic VRAM")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def sample(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds of a sampling step, on the second picture. Unless the model is resident, take memory of the
    card until only half of the model fits."""
    from families import MODELS

    from infer.contestant import Sampler

    cuda, mode = spec["device"] == "cuda", spec["how"]
    model = MODELS[spec["size"]][spec["model"]]
    with torch.inference_mode():
        patcher = state_dict_model(spec, model)
        size = patcher.model_size()
    if mode == "swap":
        from tessera.models.catalogue.swapped_model import SwapSettings, swap

        reserved = take_away(size / 2 + ROOM * GB) if cuda else None
        patcher, notes = swap(patcher, SwapSettings(-1 if cuda else 2))
    else:
        reserved, notes = take_away(size / 2 + ROOM * GB) if mode == "dynamic VRAM" else None, []
    sampler = Sampler(_Loaded(patcher, spec), model.inputs())
    picture = model.picture
    with torch.inference_mode():
        sampler.sample(picture, WARM_UP)
        _, measured = sampler.sample(picture, STEPS)
    seconds = median(measured["step_seconds"])
    del reserved
    gc.collect()
    text = "; ".join([f"{seconds:.3f} s a step", *notes])
    return {"text": text, "figures": {"seconds": seconds}, "row": {"s a sampling step": f"{seconds:.3f}"}}


def state_dict_model(spec: dict[str, Any], model: Any) -> Any:
    """Return the MODEL that a loader makes of these weights, which are random and in RAM."""
    import comfy.memory_management
    import comfy.sd

    dtype = DTYPES["bf16" if spec["device"] == "cuda" else "fp32"]
    if model.write is not None:
        return model.load(str(model.write(Path(tempfile.mkdtemp()) / "model.safetensors")), spec["device"], dtype)
    # Under dynamic VRAM modules have no weights until a file is loaded.
    with patch.object(comfy.memory_management, "aimdo_enabled", False):
        source = model.load("", spec["device"], dtype, on_host=True)
    weights = dict(source.model.diffusion_model.state_dict())
    del source
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": dtype})


def take_away(free_bytes: float) -> torch.Tensor | None:
    """Take memory of the card until `free_bytes` bytes are free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return torch.empty(int(free - free_bytes), dtype=torch.uint8, device="cuda") if free > free_bytes else None


class _Loaded:
    """A MODEL with no node before its sampler, in the form that `Sampler` takes."""

    def __init__(self, model: Any, spec: dict[str, Any]):
        self.model, self.spec = model, spec

    def model_with(self, lora: str) -> Any:
        assert not lora
        return self.model


# Training


def core_trains(spec: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Run core's Train LoRA on the same model and data, in its own process, as `train_step.py` does."""
    from dataclasses import asdict, replace

    from families import MODELS
    from processes import CommandProcess, script

    set_up_comfyui("meta")
    model, cuda = MODELS[spec["size"]][spec["model"]], spec["device"] == "cuda"
    picture = model.picture if cuda else replace(model.picture, width=64, height=64, length=16)
    folder = Path(tempfile.mkdtemp())
    spec_of_core = {
        **{name: spec[name] for name in ("size", "device", "backend")},
        **{name: settings[name] for name in ("batch_size", "rank", "targets", "prefetch")},
        **{"family": spec["model"], "dtype": "bf16" if cuda else "fp32", "picture": asdict(picture), "threads": 1},
        **{"contestant": "core", "compiled": False, "checkpointing": "", "swap": 0},
        "file": "" if model.write is None else str(model.write(folder / "model.safetensors")),
    }
    core = CommandProcess(
        "core", spec_of_core, script=script("step.contestant"), log=folder / "log", python=sys.executable
    )
    core.environment = dict(os.environ)
    try:
        core.launch()
        core.ask(do="steps", count=WARM_UP)
        reply = core.ask(do="steps", count=STEPS if cuda else 1)
    finally:
        core.stop()
    if core.ended:
        return {"state": "skipped", "text": core.ended}
    seconds, driver = median(reply["seconds"]), reply.get("driver_mib", 0.0)
    row = {"s a step": f"{seconds:.3f}", "by the driver, GiB": f"{driver / 1024:.1f}"}
    return {"text": f"{seconds:.3f} s a step", "figures": {"all": seconds, "driver_mib": driver}, "row": row}
