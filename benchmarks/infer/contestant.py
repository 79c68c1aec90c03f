"""One contestant of the inference benchmark, in a process of its own: a loader, a LoRA, a compile node and a sampler.

Its parent sends one JSON command per line and gets one JSON reply per line: `{"do": "sample", "picture": {…}, "steps":
4}` samples as core's KSampler does, and replies with the time and with what torch compiled.
"""

import argparse
import gc
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from comfyui import DTYPES, importable_without_nodes, set_up_comfyui
from families import Model, Picture, tiny
from processes import take_over_stdout

from infer.count import CompileCount
from infer.models import MODELS
from step.turns import Memory

SEED = 0
# name → (rank, substring of the layers' names, strength): A goes on all layers, B on the double blocks' attention.
LORAS = {"A": (4, "", 1.0), "B": (8, "_attn.", 0.6)}
compiling = import_module("tiny.compile.compiling")


def skip_transformer_options(guards: Any) -> list[bool]:
    """Return True for each guard that core's TorchCompileModel keeps."""
    return ["transformer_options" not in guard.name for guard in guards]


def compile_as_core(model: Any, backend: str) -> Any:
    """Compile as core's TorchCompileModel does, whose file imports the node API, absent on a bare GPU machine."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone(disable_dynamic=True)
    options = {"guard_filter_fn": skip_transformer_options}
    set_torch_compile_wrapper(model=clone, backend=backend, options=options)
    return clone


def compile_as_ours(model: Any, spec: dict[str, Any]) -> Any:
    settings = import_module("tessera.compile.settings").CompileSettings(
        backend=spec["backend"], dynamic=spec["dynamic"], scope=spec["scope"]
    )
    return import_module("tessera.compile.attach").compile_model(model, settings)[0]


class Graph:
    """Loader, LoRA loader, compile node. As in ComfyUI a node runs again only if its inputs changed."""

    def __init__(self, spec: dict[str, Any], model: Model):
        self.spec = spec
        self.loaded = model.load(spec["file"], spec["device"], DTYPES[spec["dtype"]])
        self.lora: str | None = None
        self.model: Any = None

    def model_with(self, lora: str) -> Any:
        if self.model is None or lora != self.lora:
            self.lora, self.model = lora, self._compiled(self._patched(lora))
        return self.model

    def _patched(self, lora: str) -> Any:
        if not lora:
            return self.loaded
        rank, inside, strength = LORAS[lora]
        return compiling.with_lora(self.loaded, compiling.make_lora(self.loaded, rank, rank, inside), strength)

    def _compiled(self, model: Any) -> Any:
        if self.spec["contestant"] == "core":
            return compile_as_core(model, self.spec["backend"])
        if self.spec["contestant"] == "ours":
            return compile_as_ours(model, self.spec)
        return model


class Sampler:
    """Sample, and measure the time and the compilations of each step."""

    def __init__(self, graph: Graph, inputs: str):
        self.graph, self.inputs = graph, inputs
        self.cuda = graph.spec["device"] == "cuda"
        self.count = CompileCount()

    def sample(self, picture: Picture, steps: int) -> tuple[torch.Tensor, dict[str, Any]]:
        import comfy.sample

        times = [self._synchronised_time()]
        cpu_times = [cpu_seconds()]
        compiled: list[dict[str, Any]] = []

        def after_step(*_: Any) -> None:
            times.append(self._synchronised_time())
            cpu_times.append(cpu_seconds())
            compiled.append(self.count.since())

        self.count.since()
        model = self.graph.model_with(picture.lora)
        positive = tiny.conditioning(self.inputs, picture.length, SEED)
        negative = tiny.conditioning(self.inputs, picture.length, SEED + 1)
        latent = tiny.empty_latent(self.inputs, picture.width, picture.height, picture.batch, picture.frames)
        latent = comfy.sample.fix_empty_latent_channels(model, latent)
        noise = comfy.sample.prepare_noise(latent, SEED)
        out = comfy.sample.sample(
            model,
            noise,
            steps,
            1.0,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            callback=after_step,
            disable_pbar=True,
            seed=SEED,
        )
        assert len(compiled) == steps
        return out, {
            "seconds": self._synchronised_time() - times[0],
            "cpu_seconds": cpu_seconds() - cpu_times[0],
            "step_seconds": differences(times),
            "step_cpu_seconds": differences(cpu_times),
            "compiled": compiled,
        }

    def _synchronised_time(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def cpu_seconds() -> float:
    """CPU seconds of this process and of the compilers that it started."""
    return sum(os.times()[:4])


def differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def deviation(out: torch.Tensor, file: Path) -> float:
    """Return the distance of `out` from the result of the eager contestant in `file`, relative to its norm."""
    expected = torch.load(file)
    return ((out - expected).norm() / expected.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", help="JSON, from infer.py")
    spec = json.loads(parser.parse_args().spec)
    reply = take_over_stdout()
    set_up_comfyui(spec["device"])
    if spec["device"] == "cpu":
        torch.set_num_threads(spec["threads"])
    free = torch.cuda.mem_get_info()[0] if spec["device"] == "cuda" else 0
    model = MODELS[spec["size"]][spec["family"]]
    with torch.inference_mode():  # as ComfyUI runs its nodes
        sampler = Sampler(Graph(spec, model), model.inputs())
        memory = Memory(spec["device"], free)
        reply({"ready": True})
        for line in sys.stdin:
            command = json.loads(line)
            gc.collect()
            memory.start()
            out, figures = sampler.sample(Picture(**command["picture"]), command["steps"])
            figures |= memory.figures()
            reference = Path(command["reference"])
            if spec["contestant"] == "eager":
                torch.save(out, reference)
            elif reference.exists():
                figures["deviation"] = deviation(out, reference)
            assert spec["contestant"] == "core" or importable_without_nodes()
            reply(figures)


if __name__ == "__main__":
    main()
