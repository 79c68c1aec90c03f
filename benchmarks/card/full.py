"""FLUX.1 at its real shape: seconds and memory of a step by settings, and where the time of one step goes.

The model is made once, on the host; each variant is a Trainer of its own on it. Of each step: host = until everything
is queued (the loop then waits for the loss), wait = until the device is through, rest = the optimizer, and the batch of
the next step before its first kernel. `--size tiny --device cpu` tests the script.
"""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from kit import OUT, STARTED, Checks, set_up

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--size", default="full")
parser.add_argument("--limit", type=float, default=300)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--only", default="")
args = parser.parse_args()

import torch  # noqa: E402

set_up(args.device)
from comfyui import DTYPES  # noqa: E402
from families import MODELS  # noqa: E402
from train_step_contestant import make_trainer  # noqa: E402
from train_step_data import random_data  # noqa: E402

CUDA = args.device == "cuda"
checks = Checks(args.limit)
MODEL = MODELS[args.size]["flux"]
GIB, FLOP, COPY_GB = 2**30, {"none": 172.2, "selective": 172.2, "full": 246.9}, 0.415
# name, compiled, checkpointing, percent of the blocks swapped, more; in the order of how much each is worth knowing
VARIANTS = [
    ("compiled full", True, "full", 0, {}),
    ("compiled selective 0.5", True, "selective", 0, {}),
    ("compiled none", True, "none", 0, {}),
    ("compiled full, fused AdamW", True, "full", 0, {"optimizer": {"optimizer_args": "fused=True"}}),
    ("compiled full, swap 50 %", True, "full", 50, {}),
    ("compiled full, swap 100 %", True, "full", 100, {}),
    ("compiled full, swap 100 %, 2 ahead", True, "full", 100, {"prefetch": 2}),
    ("eager full", False, "full", 0, {}),
    ("compiled full, LoRA on the default Linears", True, "full", 0, {"targets": "default"}),
    ("compiled full, offload", True, "full", 0, {"offload": True}),
    ("compiled full, swap 100 %, staged", True, "full", 100, {"pin": "off"}),
    ("compiled full, swap 100 %, offload", True, "full", 100, {"offload": True}),
    ("eager selective 0.5", False, "selective", 0, {}),
]


def show_time(text: str) -> None:
    print(f"      {time.monotonic() - STARTED:.0f} s: {text}", flush=True)


def synchronise() -> None:
    if CUDA:
        torch.cuda.synchronize()


def make_model():
    file = ""
    if MODEL.write is not None:
        file = str(MODEL.write(Path(tempfile.mkdtemp()) / "model.safetensors"))
    with torch.inference_mode():
        return MODEL.load(file, args.device, DTYPES["bf16" if CUDA else "fp32"], on_host=True)


def trainer_of(patcher, data, compiled, checkpointing, swap, more):
    spec = {
        "compiled": compiled,
        "checkpointing": checkpointing,
        "swap": swap,
        "prefetch": more.get("prefetch", 1),
        "rank": 16,
        "targets": more.get("targets", "all"),
        "batch_size": 1,
        "optimizer": more.get("optimizer", {}),
        "memory": {"pin_memory": more.get("pin", "on"), "offload_activations": more.get("offload", False)},
    }
    return make_trainer(spec, patcher, data, Path(tempfile.mkdtemp()))


class Enough(Exception):
    pass


def steps_of(trainer, count, profile=None):
    """Seconds of each of `count` steps in parts; profile: a torch profiler that is around the last."""
    parts, begun = [], [time.perf_counter()]
    finite, between = trainer.finite, trainer.between_steps

    def timed(total):
        queued = time.perf_counter()
        value = finite(total)
        through = time.perf_counter()
        parts.append({"host": queued - begun[0], "wait": through - queued, "loss": value})
        return value

    def after():
        between()
        if parts:
            now = time.perf_counter()
            parts[-1]["all"] = now - begun[0]
            if profile is not None and len(parts) == count - 1:
                synchronise()
                profile.start()
            begun[0] = time.perf_counter()
            if len(parts) == count:
                raise Enough

    trainer.finite, trainer.between_steps = timed, after
    trainer.saver.save_unsaved_progress = lambda: None
    try:
        trainer.run()
    except Enough:
        pass
    synchronise()
    if profile is not None:
        profile.stop()
    trainer.finite, trainer.between_steps = finite, between
    return parts


def kernels(profile) -> str:
    """Busy time of the device by kinds of kernel, launches, gaps."""
    found = [e for e in profile.events() if str(e.device_type).endswith("CUDA") and e.time_range.elapsed_us() > 0]
    found = [e for e in found if not e.name.startswith(("ProfilerStep", "## "))]
    if not found:
        return "no kernels were seen"
    kinds = {
        "attention": ("flash", "fmha", "cudnn_generated", "sdpa"), "copies": ("Memcpy", "Memset"),
        "gemm": ("gemm", "nvjet", "cutlass", "xmma", "splitK", "cublas"), "triton": ("triton",),
        "foreach/optimizer": ("multi_tensor",),
    }  # fmt: skip
    sums: dict[str, list[float]] = {}
    for e in found:
        kind = next((k for k, names in kinds.items() if any(n.lower() in e.name.lower() for n in names)), "other")
        s = sums.setdefault(kind, [0, 0.0])
        s[0] += 1
        s[1] += e.time_range.elapsed_us() / 1e3
    begin, end = min(e.time_range.start for e in found), max(e.time_range.end for e in found)
    work = sorted((e.time_range.start, e.time_range.end) for e in found if "Memcpy" not in e.name)
    busy, at = 0.0, 0.0
    for s, t in work:
        busy += max(0.0, t - max(s, at))
        at = max(at, t)
    top: dict[str, list[float]] = {}
    for e in found:
        t = top.setdefault(e.name, [0, 0.0])
        t[0] += 1
        t[1] += e.time_range.elapsed_us() / 1e3
    lines = [f"one step {(end - begin) / 1e3:.1f} ms, kernels run {busy / 1e3:.1f} ms, {len(found)} launches"]
    lines += [
        f"  {k:18s} {n:6.0f} launches {ms:8.2f} ms" for k, (n, ms) in sorted(sums.items(), key=lambda kv: -kv[1][1])
    ]
    ordered = sorted(top.items(), key=lambda kv: -kv[1][1])
    (OUT / "kernels.txt").write_text("\n".join(f"{n:6.0f} {ms:9.3f} ms  {name}" for name, (n, ms) in ordered))
    lines += [f"    {n:5.0f} {ms:8.2f} ms  {name[:110]}" for name, (n, ms) in ordered[:22]]
    return "\n".join(lines)


RESULTS = {}


def measure(patcher, data, name, compiled, checkpointing, swap, more):
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    trainer = trainer_of(patcher, data, compiled, checkpointing, swap, more)
    placed = time.perf_counter() - began
    try:
        warm = time.perf_counter()
        steps_of(trainer, 2)
        synchronise()
        warm = time.perf_counter() - warm
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        ring = trainer.placed.swap.ring if trainer.placed.swap else None
        before = (ring.copies, ring.bytes_copied) if ring else (0, 0)
        parts = steps_of(trainer, args.steps)
        copied = (ring.bytes_copied - before[1]) / args.steps / 1e9 if ring else 0.0
        peak = torch.cuda.max_memory_reserved() / GIB if CUDA else 0.0
        profile = None
        if name in ("compiled full", "eager full", "compiled full, swap 100 %") and checks.left() > 45:
            activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
            profile = torch.profiler.profile(activities=activities)
            steps_of(trainer, 2, profile)
        facts = trainer.facts()
    finally:
        trainer.close()
        del trainer
        gc.collect()
    p = {k: median(part[k] for part in parts) for k in ("all", "host", "wait")}
    rate = FLOP[checkpointing] / p["all"]
    row = {
        **p,
        "rest": p["all"] - p["host"] - p["wait"],
        "peak_gib": peak,
        "tflops": rate,
        "copied_gb": copied,
        "placing": placed,
        "warm": warm,
        "compile": facts["compile_seconds"],
        "graphs": facts["graphs_compiled"],
        "spread": [min(q["all"] for q in parts), max(q["all"] for q in parts)],
        "loss": parts[-1]["loss"],
    }
    RESULTS[name] = row
    (OUT / "full.json").write_text(json.dumps(RESULTS, indent=1))
    text = (
        f"{p['all']:.3f} s a step ({row['spread'][0]:.3f} to {row['spread'][1]:.3f}), host {p['host']:.3f}, wait "
        f"{p['wait']:.3f}, rest {row['rest']:.3f}; {rate:.0f} TFLOP/s; peak {peak:.1f} GiB; copied {copied:.1f} GB; "
        f"placing {placed:.0f} s, warm-up {warm:.0f} s, compiling {facts['compile_seconds']} s"
    )
    if profile is not None:
        text += "\n" + kernels(profile)
    return not compiled or facts["graph_breaks"] == 0, text


def main() -> None:
    show_time("imports are done")
    patcher = make_model()
    show_time("the model is made")
    data = random_data(patcher, MODEL.picture, 2)
    for name, *how in VARIANTS:
        if args.only in name:
            checks.run(name, lambda n=name, h=how: measure(patcher, data, n, *h), need=30)
    checks.show("\nvariant | s a step | host | wait | rest | TFLOP/s | peak GiB | GB copied")
    for name, r in RESULTS.items():
        cells = [f"{r[k]:.3f}" for k in ("all", "host", "wait", "rest")]
        checks.show(" | ".join([name, *cells, f"{r['tflops']:.0f}", f"{r['peak_gib']:.1f}", f"{r['copied_gb']:.1f}"]))
    checks.end("full")


main()
