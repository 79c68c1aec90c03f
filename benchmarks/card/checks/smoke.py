"""Every CUDA path on a small FLUX, against the resident eager run of the same process, and against one in fp32.

The optimizer's rate is 1e-12, so that every step's gradients can be compared. Eager streamed runs add in the same order
as the resident run, so they have to equal it bit for bit; their attention is torch's math kernel, which is
deterministic. Compiled runs, and other attention kernels, round differently: they may be no farther from the fp32 run
than the resident bf16 run is, which is the noise floor of the case. Compiled runs also have to make exactly the planned
graphs.

Delays expose a missing wait: `compute` keeps the device far behind the host, so that a copy which does not wait
overwrites data that is still read; `copy` delays every copy, so that a block which does not wait reads the old data.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch
from comfyui import set_up_comfyui
from torch import Tensor

from card.checks.attention import choose_attention
from card.page import FAILED, OK

SLEEP = 4_000_000  # cycles: about 2 ms
STEPS, DEEP = 3, 3
LEFT = 64 * 2**20  # bytes that a run may leave on the device
SLACK = 1.25  # two roundings of one size are not at one distance, by chance
APART = ("stored", "low_bit_matmul", "batch", "dropout")  # by which runs give other gradients


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    set_up_comfyui(spec["device"])
    smoke = Smoke(spec)
    runs = {"train": smoke.check_training, "sample": smoke.check_sample, "after a run": smoke.check_after_a_run}
    return lambda settings, figures: runs[settings["do"]](
        **{k: v for k, v in settings.items() if k not in ("do", "common")}
    )


class Smoke:
    """The small model, and its results in resident eager runs."""

    def __init__(self, spec: dict[str, Any]):
        import tiny

        self.tiny, self.backend = tiny, spec["backend"]
        self.cuda, self.dtype = spec["device"] == "cuda", torch.bfloat16
        self.hidden, self.side = (512, 256) if self.cuda else (128, 64)
        self.grids, self.texts = (
            ([(16, 16), (8, 32), (32, 8)], [64] * 3) if self.cuda else ([(2, 4), (4, 2), (1, 8)], [8] * 3)
        )
        self.folder = Path(tempfile.mkdtemp())
        self.references: dict[str, Any] = {}
        if self.cuda and (allocator := torch.cuda.get_allocator_backend()) != spec["allocator"]:
            raise ValueError(f"The allocator is {allocator} and not {spec['allocator']}.")

    def load(self, stored: str = "", mapped: bool = False, dtype: torch.dtype | None = None) -> Any:
        """The MODEL as a loader gives it, computing in bf16 on a CPU too. stored: how its file is quantised; mapped:
        its weights stay in the file; dtype: another one to compute in."""
        from tessera.memory.host.mapped_file import KeepMapped

        dtype = dtype or self.dtype
        file = self.folder / f"{stored or 'plain'}.safetensors"
        if not file.exists():
            kind = {"quantised": stored} if stored else {}
            sizes = {"hidden": self.hidden, "depth": DEEP, "depth_single": DEEP, "dtype": self.dtype}
            self.tiny.write_flux(file, **sizes, **kind)
        with torch.inference_mode():
            with KeepMapped() if mapped else nullcontext():
                model = self.tiny.load_flux(file, None if stored else dtype)
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
        return model

    # Training

    def check_training(self, compiled: bool = False, **settings: Any) -> dict[str, Any]:
        case = {name: settings[name] for name in APART if settings.get(name)}
        key = f"train {sorted(case.items())}"
        resident = self.reference(key, lambda: self.train(**case))["gradients"]
        in_full = {name: value for name, value in case.items() if name != "low_bit_matmul"}
        fp32 = self.reference(f"{key} in fp32", lambda: self.train(dtype=torch.float32, **in_full))["gradients"]
        result = self.train(compiled=compiled, **settings)
        exact = not compiled and "attention" not in settings
        judged = judge(result["gradients"], resident, fp32, exact)
        wrong = list(judged.wrong)
        if compiled and (result["graphs"] != result["planned"] or not result["graphs"] or result["breaks"]):
            wrong.append(f"{result['graphs']} graphs and {result['breaks']} breaks, {result['planned']} were planned")
        if settings.get("delay") and not all(result["delays"]):
            wrong.append("no delay was put in, so nothing was checked")
        if settings.get("swap", 0) > 0:
            wrong += self.wrong_place(settings["place"], result)
        text = "; ".join([f"gradients {judged.text}", *wrong, *result["notes"]])
        return {"state": FAILED if wrong else OK, "text": text, "figures": judged.figures}

    def wrong_place(self, place: str, result: dict[str, Any]) -> list[str]:
        """Return a sentence for each way in which the flat weights are not in the requested place."""
        wrong = [] if result["copies"] else ["nothing was copied"]
        locked = self.cuda and place == "page-locked"
        if result["locked"] is not locked:
            wrong.append(f"page-locked is {result['locked']}")
        if result["in_file"] is not (place == "file"):
            wrong.append(f"streaming from the file is {result['in_file']}")
        return wrong

    def reference(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.references:
            self.references[key] = make()
        return self.references[key]

    def train(
        self,
        compiled: bool = False,
        stored: str = "",
        batch: int = 1,
        dropout: float = 0.0,
        attention: str = "",
        delay: str = "",
        evict: bool = False,
        swap: int = 0,
        place: str = "",
        dtype: torch.dtype | None = None,
        **memory: Any,
    ) -> dict[str, Any]:
        """Return the gradients of each step as vectors, and facts of the run. delay, evict: see the cases.

        Compiled blocks use torch's own choice of attention, as a user's blocks do.
        """
        from tessera.lora.options import NetworkOptions
        from tessera.memory.host.flat_buffer import ScatteredBuffer
        from tessera.train.config.settings import MemoryOptions
        from tessera.train.optim.options import OptimizerOptions

        choose_attention(plain=not compiled and attention != "any")
        options: dict[str, Any] = {"checkpointing": "none", "blocks_to_swap": swap, **memory}
        options["pin_memory"] = {"page-locked": "on", "staged": "off"}.get(place, "auto")
        with no_free_ram(place == "file"):
            trainer = self.tiny.make_trainer(
                self.load(stored, mapped=place == "file", dtype=dtype),
                self.tiny.make_data(self.grids, self.texts),
                Path(tempfile.mkdtemp(dir=self.folder)),
                backend=self.backend if compiled else None,
                steps=STEPS,
                batch_size=batch,
                optimizer=OptimizerOptions(learning_rate=1e-12, weight_decay=0.0),
                network=NetworkOptions(rank=8, alpha=8.0, include=("*",), dropout=dropout),
                memory=MemoryOptions(**options),
            )
            try:
                self.tiny.fill_up_matrices(trainer)
                gradients, notes = record(trainer, evict)
                with delays(trainer, delay, self.cuda) as delayed:
                    trainer.run()
                ring = trainer.placed.weights.swap.ring if trainer.placed.weights.swap else None
                if ring is not None and ring.locking is not None:
                    ring.locking.wait()
                host = list(ring.flat_weights) if ring else []
                facts = trainer.summary()
                return {
                    "gradients": gradients,
                    "graphs": facts["graphs_compiled"],
                    "planned": facts["graphs_planned"],
                    "breaks": facts["graph_breaks"],
                    "copies": ring.copies if ring else 0,
                    "locked": all(weights.is_pinned() for weights in host),
                    "in_file": any(isinstance(weights, ScatteredBuffer) for weights in host),
                    "delays": delayed,
                    "notes": notes,
                }
            finally:
                trainer.close()
                gc.collect()
                if self.cuda:
                    torch.cuda.empty_cache()  # other processes need the card too

    # Sampling

    def check_sample(self, lora: bool = False, mode: str = "", **settings: Any) -> dict[str, Any]:
        resident = self.reference(f"sample {lora}", lambda: self.sample(lora))
        fp32 = self.reference(f"sample {lora} in fp32", lambda: self.sample(lora, dtype=torch.float32))
        # With streamed weights a LoRA is added at another point, in another precision.
        judged = judge([self.sample(lora, mode, **settings)], [resident], [fp32], exact=not mode and not lora)
        text = "; ".join([f"the latent {judged.text}", *judged.wrong])
        return {"state": FAILED if judged.wrong else OK, "text": text, "figures": judged.figures}

    def sample(
        self,
        lora: bool,
        mode: str = "",
        scope: str = "blocks",
        swap: int = 0,
        place: str = "",
        prefetch: int = 1,
        delay: str = "",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        from tessera.compile.attach import compile_model
        from tessera.compile.settings import CompileSettings
        from tessera.models.catalogue.swapped_model import SwapSettings
        from tessera.models.catalogue.swapped_model import swap as swap_blocks
        from tiny.compile.compiling import make_lora, with_lora

        choose_attention(plain=not mode)
        with no_free_ram(place == "file"):
            model = self.load(mapped=place == "file", dtype=dtype)
            adapter = make_lora(model, inside="_blocks.") if lora else None
            if swap:
                pin = {"page-locked": "on", "staged": "off"}.get(place, "auto")
                model = swap_blocks(model, SwapSettings(swap, prefetch, pin))[0]
            if mode:
                model = compile_model(model, CompileSettings(self.backend, mode, scope=scope))[0]
            if adapter:
                model = with_lora(model, adapter, 0.7)
            with delays(None, delay, self.cuda):
                return self.latent(model, 3)

    def latent(self, model: Any, steps: int) -> Tensor:
        import comfy.model_management
        from tiny.models.sampling import sample

        latent = sample(model, "flux", width=self.side, height=self.side, length=self.texts[0], steps=steps)
        comfy.model_management.unload_all_models()
        gc.collect()
        return latent.float().cpu()

    def check_after_a_run(self) -> dict[str, Any]:
        """A run leaves ComfyUI as it was: a MODEL samples as before, and nothing is left on the device."""
        choose_attention(plain=True)
        model = self.load()
        first = self.latent(model, 2)
        self.train(swap=2 * DEEP, place="staged", checkpointing="full")
        allocated = torch.cuda.memory_allocated() if self.cuda else 0
        choose_attention(plain=True)
        is_equal = torch.equal(self.latent(model, 2), first)
        text = f"samples {'the same' if is_equal else 'something else'}, {allocated / 2**20:.0f} MiB are left"
        return {"state": OK if is_equal and allocated < LEFT else FAILED, "text": text}


class Judged(NamedTuple):
    """text: the deviation; wrong: sentences on why it is too large."""

    text: str
    wrong: list[str]
    figures: dict[str, float]


def judge(run: Sequence[Tensor], resident: Sequence[Tensor], fp32: Sequence[Tensor], exact: bool) -> Judged:
    """Judge a run by the resident one of the same precision and by one in fp32, step by step.

    exact: it has to equal the resident one bit for bit; else it may be as far from fp32 as the resident one is.
    """

    def farthest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        return max(distance(a, b) for a, b in zip(a, b, strict=True))

    floor = farthest(resident, fp32)
    to_fp32 = farthest(run, fp32)
    to_resident = farthest(run, resident)
    figures = {"differs": to_resident, "from_fp32": to_fp32, "noise_floor": floor}
    if to_resident == 0.0:
        return Judged(f"equal the resident run's bit for bit; noise floor {floor:.1e}", [], figures)
    within = to_fp32 <= SLACK * floor
    text = f"differ by {to_resident:.1e} from the resident run and by {to_fp32:.1e} from fp32; noise floor {floor:.1e}"
    if within and not exact:
        return Judged(text, [], figures)
    fault = "not bit for bit, though the order of additions is the same" if within else "above the noise floor"
    return Judged(text, [fault], figures)


def distance(tensor: Tensor, want: Tensor) -> float:
    """Return the difference relative to the norm of the expected tensor."""
    if not torch.isfinite(tensor).all():
        return float("inf")
    return float((tensor - want).norm() / want.norm())


def record(trainer: Any, evict: bool) -> tuple[list[Tensor], list[str]]:
    """Return lists that the run fills with its gradients and its notes. evict: unload the weights between the steps, as
    the VAE of a preview does."""
    import comfy.model_management

    clip = trainer.learner.clip
    gradients = []
    notes = []

    def clipped() -> Tensor:
        parameters = trainer.network.parameters()
        gradients.append(torch.cat([p.grad.detach().float().flatten().cpu() for p in parameters]))
        if evict:
            comfy.model_management.free_memory(1e30, trainer.device)
        return clip()

    trainer.learner.clip, trainer.observer.note = clipped, notes.append
    return gradients, notes


@contextmanager
def no_free_ram(short: bool) -> Iterator[None]:
    """Report no free RAM to the pack, so that weights in a mapped file stay there."""
    real = psutil.virtual_memory
    with patch.object(psutil, "virtual_memory", lambda: real()._replace(available=1)) if short else nullcontext():
        yield


@contextmanager
def delays(trainer: Any, kind: str, cuda: bool) -> Iterator[list[int]]:
    """Put sleeps on the computing stream around each block, forward and back (`compute`), in front of each copy on a
    stream of its own (`copy`), or both. Yield a list of the number of each kind.

    Without a GPU only the places are counted. trainer: None for a MODEL that samples, which supports only `copy`.
    """
    kinds = ("compute", "copy") if kind == "both" else (kind,) if kind else ()
    count = dict.fromkeys(kinds, 0)
    counted: list[int] = []

    def sleep(kind: str) -> None:
        count[kind] += 1
        if cuda:
            torch.cuda._sleep(SLEEP)

    copy = Tensor.copy_

    def slow_copy(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not cuda or (self.is_cuda != source.is_cuda and _on_own_stream()):
            sleep("copy")
        return copy(self, source, *args, **kwargs)

    runner = trainer.placed.execution.runner if trainer is not None else None
    try:
        if "copy" in kinds:
            Tensor.copy_ = slow_copy
        if "compute" in kinds:
            trainer.placed.execution.runner = SlowRunner(runner, lambda: sleep("compute"))
        yield counted
    finally:
        if "copy" in kinds:
            del Tensor.copy_
        if "compute" in kinds:
            trainer.placed.execution.runner = runner
        counted += count.values()


def _on_own_stream() -> bool:
    return torch.cuda.current_stream() != torch.cuda.default_stream()


class SlowRunner:
    """A run's runner of blocks, with `sleep` called around each block, and in backward once the gradients of its
    outputs are computed."""

    def __init__(self, runner: Any, sleep: Callable[[], None]):
        self.__dict__["runner"], self.__dict__["sleep"] = runner, sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.runner, name, value)

    def __call__(self, *args: Any) -> Any:
        self.sleep()
        out = self.runner(*args)
        self.sleep()
        outputs: Sequence[Any] = out if isinstance(out, list | tuple) else [out]
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.sleep())
        return out
