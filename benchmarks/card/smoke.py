"""Every CUDA path on a small FLUX, against the resident eager run of the same process. `--device cpu` tests the kit.

The optimizer's rate is 1e-12, so that every step's gradients can be compared; attention is torch's plain one, which is
deterministic, so that streamed eager runs have to equal the resident one to the bit. Stress puts sleeps on the streams:
`slow compute` keeps the device far behind the host (a copy that does not wait overwrites what is read), `slow copy`
holds each copy up (a block that does not wait reads the block before).
"""

import argparse
import contextlib
import gc
import tempfile
from pathlib import Path

from kit import Checks, set_up

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--limit", type=float, default=200)
parser.add_argument("--only", default="", help="part of a check's name")
parser.add_argument("--backend", default="inductor")
args = parser.parse_args()

import torch  # noqa: E402

tiny = set_up(args.device)
CUDA = args.device == "cuda"
checks = Checks(args.limit)
folder = Path(tempfile.mkdtemp())
DTYPE = torch.bfloat16 if CUDA else torch.float32
HIDDEN, GRIDS, TEXTS = (
    (512, [(16, 16), (8, 32), (32, 8)], [64] * 3) if CUDA else (128, [(4, 4), (2, 8), (8, 2)], [16] * 3)
)
SIDE, STEPS, DEEP = 256 if CUDA else 64, 3, 3

import comfy.model_management as management  # noqa: E402
from tessera.compile.attach import compile_model  # noqa: E402
from tessera.compile.settings import CompileSettings  # noqa: E402
from tessera.lora.options import NetworkOptions  # noqa: E402
from tessera.memory.swap import slot_ring, training  # noqa: E402
from tessera.models.swapped_model import SwapSettings, swap  # noqa: E402
from tessera.train.optim.options import OptimizerOptions  # noqa: E402
from tessera.train.settings import MemoryOptions  # noqa: E402
from tiny.compiling import make_lora, with_lora  # noqa: E402
from tiny.sampling import sample  # noqa: E402

if CUDA:
    for enable in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)

FILES = {}


def file(kind: str) -> Path:
    if kind not in FILES:
        extra = {"bf16": {}, "fp8": {"fp8": True}, "mxfp8": {"quantised": "mxfp8"}}[kind]
        path = folder / f"{kind}.safetensors"
        FILES[kind] = tiny.write_flux(path, hidden=HIDDEN, depth=DEEP, depth_single=DEEP, dtype=DTYPE, **extra)
    return FILES[kind]


def load(kind: str):
    with torch.inference_mode():
        return tiny.load_flux(file(kind), DTYPE if kind == "bf16" else None)


@contextlib.contextmanager
def stressed(how: str):
    """how: '', 'slow compute', 'slow copy' or both."""
    if not CUDA or not how:
        yield
        return
    run, back, copy = training.BlockSwap.run, slot_ring.SlotRing.backward, slot_ring.SlotRing._copy
    sleep = lambda: torch.cuda._sleep(4_000_000)  # noqa: E731  (about 2 ms)

    def slow_run(self, *a):
        out = run(self, *a)
        sleep()
        return out

    def slow_back(self, j):
        back(self, j)
        sleep()

    def slow_copy(self, j):
        stream = getattr(self.stream, "stream", None) or self.stream.link.stream
        if self.occupants[j % self.count] != j:
            with torch.cuda.stream(stream):
                sleep()
        copy(self, j)

    if "compute" in how:
        training.BlockSwap.run, slot_ring.SlotRing.backward = slow_run, slow_back
    if "copy" in how:
        slot_ring.SlotRing._copy = slow_copy
    try:
        yield
    finally:
        training.BlockSwap.run, slot_ring.SlotRing.backward, slot_ring.SlotRing._copy = run, back, copy


def train(kind="bf16", compiled=False, stress="", evict=False, batch=1, network=None, sdpa_default=False, **memory):
    """(losses, gradients of each step, facts)"""
    grads = []
    swapped = memory.get("blocks_to_swap", 0)
    if CUDA and sdpa_default:
        torch.backends.cuda.enable_flash_sdp(True), torch.backends.cuda.enable_cudnn_sdp(True)
    trainer = tiny.make_trainer(
        load(kind),
        tiny.make_data(GRIDS, TEXTS),
        Path(tempfile.mkdtemp(dir=folder)),
        backend=args.backend if compiled else None,
        steps=STEPS,
        batch_size=batch,
        optimizer=OptimizerOptions(learning_rate=1e-12, weight_decay=0.0),
        network=NetworkOptions(**({"rank": 8, "alpha": 8.0, "include": ("*",)} | (network or {}))),
        memory=MemoryOptions(**({"checkpointing": "none"} | memory)),
    )
    try:
        tiny.fill_up_matrices(trainer)
        clip, notes = trainer.learner.clip, []
        trainer.observer.note = notes.append

        def kept():
            grads.append(torch.cat([p.grad.detach().float().flatten().cpu() for p in trainer.network.parameters()]))
            if evict:
                management.free_memory(1e30, trainer.device)  # as a preview's VAE asks for it
            return clip()

        trainer.learner.clip = kept
        with stressed(stress):
            trainer.run()
        ring = trainer.placed.swap.ring if trainer.placed.swap else None
        facts = {k: trainer.facts()[k] for k in ("graphs_planned", "graphs_compiled", "graph_breaks", "block_copies")}
        facts["notes"] = notes
        pinned = all(m.is_pinned() for m in ring.flat_weights) if ring else None
        assert not swapped or swapped < 0 or ring is not None
        return list(trainer.progress.loss), grads, facts | {"pinned": pinned}
    finally:
        trainer.close()
        gc.collect()
        if CUDA and sdpa_default:
            torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.enable_cudnn_sdp(False)


def error(found, want) -> float:
    assert all(torch.isfinite(g).all() for g in found), "a gradient is not finite"
    return max(float((f - w).norm() / w.norm()) for f, w in zip(found, want, strict=True))


REFERENCES = {}


def reference(**how):
    key = tuple(sorted((k, repr(v)) for k, v in how.items()))
    if key not in REFERENCES:
        REFERENCES[key] = train(**how)
    return REFERENCES[key]


def check_train(bound, same=(), **how):
    want = reference(**{k: how[k] for k in ("kind", "batch", "network", "sdpa_default") if k in how})
    losses, grads, facts = train(**how)
    far = error(grads, want[1])
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, want[0], strict=True))
    enough = not how.get("compiled") or (
        facts["graphs_compiled"] == facts["graphs_planned"] > 0 and not facts["graph_breaks"]
    )
    lock = how.get("pin_memory") != "on" or not CUDA or facts["pinned"]
    shown = {k: v for k, v in facts.items() if k != "notes"}
    text = f"gradients off by {far:.1e} (bound {bound:.0e}), loss by {loss:.1e}, {shown}"
    return far <= bound and enough and lock, text + "".join(f"\n        note: {n}" for n in facts["notes"])


BIT = 1e-6 if CUDA else 1e-5
ROUNDING = 4e-2 if CUDA else 1e-4
A = {"pin_memory": "on"}
CASES = [("train: run to run, resident eager", BIT, {})]
for n, p in ((3, 1), (6, 1), (6, 3)):
    CASES.append(
        (f"train: eager none, swap {n}, {p} ahead, page-locked", BIT, A | {"blocks_to_swap": n, "prefetch_blocks": p})
    )
CASES += [
    ("train: eager none, swap 6, staged", BIT, {"blocks_to_swap": 6, "pin_memory": "off"}),
    ("train: eager selective, swap 3", BIT, A | {"blocks_to_swap": 3, "checkpointing": "selective"}),
    (
        "train: eager full, swap 6, activations on the host",
        BIT,
        A | {"blocks_to_swap": 6, "checkpointing": "full", "offload_activations": True},
    ),
    (
        "train: eager full, swap 6, evicted between the steps",
        BIT,
        A | {"blocks_to_swap": 6, "checkpointing": "full", "evict": True},
    ),
    ("train: resident eager full, evicted between the steps", BIT, {"checkpointing": "full", "evict": True}),
    ("train: batch 2, swap 6", BIT, A | {"blocks_to_swap": 6, "batch": 2}),
    (
        "train: dropout on the device's generator, full, swap 6",
        BIT,
        A | {"blocks_to_swap": 6, "checkpointing": "full", "network": {"dropout": 0.3}},
    ),
    ("train: automatic (-1, auto)", BIT, {"blocks_to_swap": -1, "checkpointing": "auto"}),
    ("train: fp8 scaled, eager full, swap 6", BIT, A | {"kind": "fp8", "blocks_to_swap": 6, "checkpointing": "full"}),
    ("train: mxfp8, eager full, swap 6", BIT, A | {"kind": "mxfp8", "blocks_to_swap": 6, "checkpointing": "full"}),
]
for stress in ("slow compute", "slow copy", "slow compute, slow copy"):
    for pin in ("on", "off"):
        CASES.append(
            (f"race: {stress}, pin {pin}, none", BIT, {"stress": stress, "blocks_to_swap": 6, "pin_memory": pin})
        )
    CASES.append(
        (
            f"race: {stress}, full with offload, 2 ahead",
            BIT,
            A
            | {
                "stress": stress,
                "blocks_to_swap": 6,
                "prefetch_blocks": 2,
                "checkpointing": "full",
                "offload_activations": True,
            },
        )
    )
COMPILED = {"compiled": True}
CASES += [
    ("train: compiled none", ROUNDING, COMPILED),
    ("train: compiled full", ROUNDING, COMPILED | {"checkpointing": "full"}),
    ("train: compiled selective", ROUNDING, COMPILED | {"checkpointing": "selective"}),
    (
        "train: compiled full, swap 6, page-locked",
        ROUNDING,
        COMPILED | A | {"checkpointing": "full", "blocks_to_swap": 6},
    ),
    ("train: compiled none, swap 6, staged", ROUNDING, COMPILED | {"blocks_to_swap": 6, "pin_memory": "off"}),
    (
        "race: compiled full, offload, slow both",
        ROUNDING,
        COMPILED
        | A
        | {
            "checkpointing": "full",
            "blocks_to_swap": 6,
            "offload_activations": True,
            "stress": "slow compute, slow copy",
        },
    ),
    (
        "train: compiled full, fp8 scaled, swap 6",
        ROUNDING,
        COMPILED | A | {"kind": "fp8", "checkpointing": "full", "blocks_to_swap": 6},
    ),
    ("train: compiled none, torch's own choice of attention", ROUNDING, COMPILED | {"sdpa_default": True}),
    (
        "train: eager none, swap 6, torch's own choice of attention",
        ROUNDING,
        A | {"blocks_to_swap": 6, "sdpa_default": True},
    ),
]


def sampled(make):
    model = load("bf16")
    latent = sample(make(model), "flux", width=SIDE, height=SIDE, length=64, steps=3).float().cpu()
    del model
    management.unload_all_models()
    gc.collect()
    return latent


def check_sample(bound, make, lora=False):
    name = f"lora {lora}"
    if name not in REFERENCES:
        REFERENCES[name] = sampled(lambda m: with_lora(m, make_lora(m, inside="_blocks."), 0.7) if lora else m)
    wrapped = (lambda m: with_lora(make(m), make_lora(m, inside="_blocks."), 0.7)) if lora else make
    found, want = sampled(wrapped), REFERENCES[name]
    far = float((found - want).norm() / want.norm())
    return far <= bound, f"latent off by {far:.1e} (bound {bound:.0e})"


def swapped(count, ahead=1, pin="on"):
    return lambda model: swap(model, SwapSettings(count, ahead, pin))[0]


def compiled(mode="default", swap_count=0, **more):
    def make(model):
        model = swapped(swap_count)(model) if swap_count else model
        return compile_model(model, CompileSettings(args.backend, mode, **more))[0]

    return make


SAMPLES = [
    ("sample: run to run", BIT, lambda m: m, False),
    ("sample: swap 3", BIT, swapped(3), False),
    ("sample: swap 6, 2 ahead", BIT, swapped(6, 2), False),
    ("sample: swap 6, staged", BIT, swapped(6, 1, "off"), False),
    ("sample: swap 6 with a LoRA in the slots", ROUNDING, swapped(6), True),
    ("sample: swap -1", BIT, swapped(-1), False),
    ("sample: compiled", ROUNDING, compiled(), False),
    ("sample: compiled, swap 6", ROUNDING, compiled(swap_count=6), False),
    ("sample: compiled, swap 6, with a LoRA", ROUNDING, compiled(swap_count=6), True),
    ("sample: compiled, reduce-overhead (CUDA graphs)", ROUNDING, compiled("reduce-overhead"), False),
    ("sample: compiled, scope stack", ROUNDING, compiled(scope="stack"), False),
]


def two_trainings():
    """ComfyUI's own state after a run: the MODEL samples as before, and nothing is left on the device."""
    model = load("bf16")
    before = sample(model, "flux", width=SIDE, height=SIDE, length=64, steps=2).float().cpu()
    management.unload_all_models()
    train(blocks_to_swap=6, checkpointing="full")
    held = torch.cuda.memory_allocated() / 2**20 if CUDA else 0.0
    again = sample(model, "flux", width=SIDE, height=SIDE, length=64, steps=2).float().cpu()
    management.unload_all_models()
    return bool(
        (before == again).all()
    ) and held < 64, f"the same: {bool((before == again).all())}, {held:.0f} MiB left"


def main() -> None:
    backend = torch.cuda.get_allocator_backend() if CUDA else "cpu"
    checks.show(f"torch {torch.__version__}, allocator {backend}, {torch.cuda.get_device_name() if CUDA else 'cpu'}")
    for name, bound, how in CASES:
        if args.only in name:
            checks.run(name, lambda b=bound, h=how: check_train(b, **h), need=25 if how.get("compiled") else 8)
    for name, bound, make, lora in SAMPLES:
        if args.only in name:
            checks.run(name, lambda b=bound, m=make, lo=lora: check_sample(b, m, lo), need=8)
    if args.only in "after a run":
        checks.run("after a run", two_trainings, need=8)
    checks.end(f"smoke-{backend}")


main()
