"""The step benchmark's figures as tables."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date

from figures import markdown_table, ratio_by_round, spread
from processes import Measured, processor

from step.swap import swap_report

CORE = "core TrainLoraNode"
PATHS = {"own": "ours", "native": "native"}  # by which forward ours trains, with the contestant's name
WARM_UP = 2  # steps; the first one compiles
ON_CPU = """CPU seconds are what the process itself computed, whatever ran beside it. The peak is the greatest resident
size of the process in the timed steps, less its size with the model loaded: core's holds a second copy of the model,
the compiled one what the compiler left behind. What a step allocates, and what a forward holds for its backward, is
counted by torch's allocator, exactly. Selective checkpointing keeps its tensors itself, so autograd does not list them.
Compiling starts from an empty cache. The figures are of small models on a CPU; they say nothing of the real ones on a
GPU, for which `--size full --device cuda` is there, which has not been run on a GPU yet."""
ON_GPU = """The peak is what torch reserved in the timed steps, less what it had reserved with the model loaded. The
driver's figure counts all that the process holds, the compiler's memory and the weights with it. Compiling starts from
an empty cache."""

FIGURES = "Figures are the median (least to greatest); ratios are taken in each round, above 1 where ours needs less."
ON_PATHS = """Contestants called native train by ComfyUI's own forward, as Train LoRA trains every model that has
no family of ours; the others by our forward of this family. Data, seed and LoRA are the same."""
ON_COUNTS = """Python's calls and torch's operations are those of one eager or compiled forward with the loss; of a
block, the mean over all. Operations that only make a view are left out, and so is what runs inside a compiled graph.
Kernels are those that inductor wrote for all graphs, forward and backward; matrix products of libraries are not among
them. Tensors kept are what autograd was asked to save, weights with them."""
OF_CORE = """Core's node runs with its defaults, but for steps, batch, rank and dtype: the whole model is one
checkpoint, its LoRA is bf16, and it trains adapters on norms and biases too, which cannot be switched off. With a batch
above 1 it runs every caption on every picture.
"""
OF_FLUX = """Its gradients for FLUX are wrong (blocks add to their inputs in place): only the cost is compared here."""
OF_OTHERS = """Only the cost is compared here."""


def report(field_of: Sequence[Measured], args: argparse.Namespace) -> str:
    run = [c for c in field_of if c.rounds]
    core = next((c for c in run if c.name == CORE), None)
    parts = [markdown_table(*time_table(run, core, args.device == "cpu")), markdown_table(*memory_table(run, core))]
    if args.device == "cpu":
        parts.append(markdown_table(*held_table(run)))
        if len(args.path) > 1:
            parts += [markdown_table(*counts_table(run)), ON_COUNTS]
    if any(c.spec["swap"] for c in run):
        parts.append(swap_report([c for c in run if c.spec["compiled"]], args.device == "cpu"))
    parts += [f"{c.name} is not in the tables: {c.ended}." for c in field_of if c.ended]
    return "\n\n".join(parts)


def time_table(run: Sequence[Measured], core: Measured | None, cpu: bool) -> tuple[list[str], list[list[str]]]:
    header = ["a step", "seconds", "core's time is … times ours", "graphs", "graph breaks", "compile seconds"]
    if cpu:
        # CPU time does not depend on other load.
        header[3:3] = ["CPU seconds", "core's CPU time is … times ours"]
    has_pairs = any(own_of(c, run) is not None for c in run)
    if has_pairs:
        header.insert(2, "times the own forward's")
        header[5:5] = ["CPU time, times the own forward's"] if cpu else []
    # The first of a path compiles; the others hit the cache.
    compiled: dict[str, Measured] = {}
    for c in run:
        if c is not core and c.spec["compiled"]:
            compiled.setdefault(c.spec.get("path", "own"), c)
    rows = []
    for c in run:
        row = [c.name]
        for figure in ("seconds", "cpu_seconds") if cpu else ("seconds",):
            row.append(spread(sum(c.round_values(figure), [])).text(3))
            row += [ratio(c, own_of(c, run), figure)] if has_pairs else []
            row.append(ratio(core, c, figure))
        is_ours = c is not core
        row += [str(c.rounds[-1]["graphs_compiled"]), str(c.rounds[-1]["graph_breaks"])] if is_ours else ["", ""]
        row.append(f"{c.first['compile_seconds']:.0f}" if any(c is first for first in compiled.values()) else "")
        rows.append(row)
    return header, rows


def ratio(numerator: Measured | None, denominator: Measured | None, figure: str) -> str:
    if numerator is None or denominator is None or numerator is denominator:
        return ""
    return ratio_by_round(numerator.round_values(figure), denominator.round_values(figure)).text()


def own_of(native: Measured, run: Sequence[Measured]) -> Measured | None:
    """Return the contestant with the same arguments except for the path: our own forward."""
    if native.spec.get("path") != "native":
        return None
    return next((c for c in run if c.spec == {**native.spec, "path": "own"}), None)


MEMORY = {
    "peak_mib": "peak above the loaded model, MiB",
    "step_peak_mib": "most that one step allocates, MiB",
    "allocated_mib": "of it allocated, MiB",
    "driver_mib": "in all, by the driver, MiB",
}


def memory_table(run: Sequence[Measured], core: Measured | None) -> tuple[list[str], list[list[str]]]:
    peaks = {c.name: peaks_of(c) for c in run}
    keys = [key for key in MEMORY if all(key in p for p in peaks.values())]
    header = ["memory", *(text for key in keys for text in (MEMORY[key], "core's is … times ours"))]
    rows = []
    for c in run:
        row = [c.name]
        for key in keys:
            peak = peaks[c.name][key]
            row += [f"{peak:.0f}", f"{peaks[core.name][key] / peak:.2f}" if core not in (None, c) else ""]
        rows.append(row)
    return header, rows


def peaks_of(contestant: Measured) -> dict[str, float]:
    """The greatest figure of all rounds."""
    replies = [*contestant.rounds, contestant.memory]
    figures = {key: [r[key] for r in replies if key in r] for key in MEMORY}
    return {key: max(values) for key, values in figures.items() if values}


def held_table(run: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    header = ["held from forward to backward", "MiB", "of it saved by autograd, MiB", "weights saved by reference, MiB"]
    keys = ("held_mib", "saved_mib", "weights_mib")
    rows = [
        [c.name, *(f"{c.memory[k]:.1f}" if k in c.memory else "" for k in keys)] for c in run if "held_mib" in c.memory
    ]
    return header, rows


def counts_table(run: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Calls of a forward, of the contestants that counted it."""
    header = ["a forward", "Python calls", "of a block", "operations", "of a block", "tensors kept", "kernels"]
    keys = ("python_calls", "block_python_calls", "operations", "block_operations", "saved_tensors", "kernels")
    rows = []
    for c in run:
        if "python_calls" in c.memory:
            counted = {**c.memory, **{k: v for k, v in c.rounds[-1].items() if k == "kernels"}}
            rows.append([c.name, *(f"{counted[k]:.0f}" if k in counted else "" for k in keys)])
    return header, rows


def machine(args: argparse.Namespace) -> str:
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def head(args: argparse.Namespace) -> str:
    command = "python benchmarks train_step " + " ".join(arg for arg in sys.argv[1:])
    threads = f", {args.threads} thread{'s' if args.threads > 1 else ''}" if args.device == "cpu" else ""
    unit = "step" if args.steps_per_round == 1 else "steps"
    rounds = f"{args.rounds} rounds of {args.steps_per_round} {unit} each after {WARM_UP} steps of warm-up, by turns"
    core_text = OF_CORE + (OF_FLUX if any(f.startswith("flux") for f in args.family) else OF_OTHERS)
    parts = [
        f"# A training step, `{args.size}` on {args.device}",
        f"Made by `{command}` on {date.today()}: {machine(args)}{threads}.",
        f"{args.dtype}, batch {args.batch_size}, rank {args.rank}, LoRA on {args.targets} Linears, {rounds}. {FIGURES}",
        *([core_text] if "core" in args.contestants else []),
        *([ON_PATHS] if "native" in args.path else []),
        ON_CPU if args.device == "cpu" else ON_GPU,
    ]
    return "\n\n".join(parts)
