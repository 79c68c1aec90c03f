"""Parts of tests of compiled MODELs: counting graphs, LoRAs for any tiny model, MODELs that are loaded in part."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ..train.training import observe


class Ops(TorchDispatchMode):
    """Counts the ops that run under it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Graphs:
    """Counts the graphs that dynamo made since this was made, and their breaks. Dynamo's own counters are never reset:
    they include the compilations of earlier tests."""

    def __init__(self) -> None:
        self._graphs, self._breaks = self._counted()

    @staticmethod
    def _counted() -> tuple[int, int]:
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def __call__(self) -> int:
        return self._counted()[0] - self._graphs

    @property
    def breaks(self) -> int:
        return self._counted()[1] - self._breaks


def graphs_after_each_step(trainer: Any, graphs: Graphs) -> tuple[list[int], list[tuple[int, int]]]:
    """Train to the end. Return (the count after each step, the tokens of picture and of text of each micro-batch)."""
    counts: list[int] = []
    keys: list[tuple[int, int]] = []
    velocity = trainer.placed.velocity

    class Watching(type(trainer.observer)):
        def step(self, report: Any) -> None:
            counts.append(graphs())

    def recorded(inputs: Any, rng_key: Any) -> Tensor:
        keys.append((inputs.image_tokens, inputs.text_tokens))
        return velocity(inputs, rng_key)

    trainer.placed.velocity = recorded
    observe(trainer, Watching())
    trainer.run()
    return counts, keys


def graphs_expected(kinds: int, keys: Sequence[tuple[int, int]]) -> list[int]:
    """After each step of one micro-batch: one graph per kind of block for every key met so far, and none besides."""
    return [kinds * len(set(keys[: n + 1])) for n in range(len(keys))]


def compiled(model: Any, **settings: Any) -> tuple[Any, Any]:
    """(a clone of the MODEL that runs compiled, its branch). The backend is `eager` unless another is named: dynamo's
    graphs and guards are those of every backend, and nothing is generated, so that counting is cheap."""
    from tessera.compile.attach import compile_model
    from tessera.compile.settings import CompileSettings

    return compile_model(model, CompileSettings(**({"backend": "eager"} | settings)))


def load_as(loader: str, name: str, path: Path) -> Any:
    """A fresh MODEL as the nodes load it: "core" under inference mode, "ours" outside of it."""
    import tiny

    with torch.inference_mode(loader == "core"):
        return tiny.load_model(name, path)


def make_lora(model: Any, seed: int = 0, rank: int = 2, inside: str = "") -> dict[str, Tensor]:
    """A random LoRA for the matrices of the diffusion model, or those with `inside` in their names."""
    lora = {}
    for key, weight in model.model.state_dict().items():
        if not key.startswith("diffusion_model.") or weight.ndim != 2 or inside not in key:
            continue
        name = key.removesuffix(".weight")
        generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
        up, down = (
            torch.randn(shape, generator=generator) for shape in ((weight.shape[0], rank), (rank, weight.shape[1]))
        )
        lora[f"{name}.lora_up.weight"] = 0.3 * up / rank**0.5
        lora[f"{name}.lora_down.weight"] = down / weight.shape[1] ** 0.5
    return lora


def with_lora(model: Any, lora: dict[str, Tensor], strength: float) -> Any:
    """MODEL that core's LoraLoaderModelOnly gives."""
    import comfy.sd

    with torch.inference_mode():
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


@contextmanager
def memory_for_weights(size: float) -> Iterator[None]:
    """Let ComfyUI load models as on a GPU with this many bytes free for weights: weights that do not fit are cast at
    each use, with their LoRA applied then."""
    from comfy.model_management import LoadedModel

    load = LoadedModel.model_load

    def model_load(self: Any, lowvram_model_memory: float = 0, force_patch_weights: bool = False) -> Any:
        free_bytes = size - self.model_loaded_memory()
        return load(self, free_bytes or 0.1, force_patch_weights)

    LoadedModel.model_load = model_load
    try:
        yield
    finally:
        LoadedModel.model_load = load
