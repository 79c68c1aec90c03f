"""Seconds and memory of a training step: ours eager and compiled, beside core's TrainLoraNode on the same model.

Run: python benchmarks train_step --size tiny --device cpu > benchmarks/results/train_step_cpu.md
     python benchmarks train_step --path native own --contestants eager compiled
     python benchmarks train_step --size full --device cuda --contestants compiled --swap 0 25 50 90

Every contestant is a process of its own, for all its rounds, on the same weights, samples, batch, rank and dtype. On a
CPU they take turns after a warm-up, round after round, so that other load of the machine affects all of them; the ratio
within a round is the result. A GPU holds one at a time, so there they follow one another. `--family` names one model or
several, `--swap` adds compiled contestants some of whose blocks stream from the host. `--path native own` trains the
same model by ComfyUI's own forward, as for a model without a family in the pack, and by our forward. `--size full` are
the models' real shapes with random weights, for a GPU; `--dry-run` counts their parameters, tokens, FLOP and copied
bytes without one. Only the dry run of the full size has been tried so far: it has not run on a GPU yet.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from comfyui import importable_without_nodes, set_up_comfyui
from families import FULL, MODELS, Picture
from processes import CommandProcess, script

from step.report import CORE, PATHS, WARM_UP, head, machine, report

MODES = ("none", "selective", "full")
KINDS = ("eager", "compiled", "core")
FAMILIES = tuple(family for family in FULL if family != "sdxl")  # which Train LoRA does not know


@dataclass
class Contestant(CommandProcess):
    """A process that takes training steps on command."""

    script: tuple[str, ...] = script("step.contestant")
    dtype: str = ""

    def start(self) -> None:
        """Set it up and take the steps of the warm-up."""
        self.dtype = self.launch().get("inference_dtype", "")
        if not self.ended:
            first = self.ask(do="steps", count=WARM_UP)
            self.first = self.first or first

    def round(self, steps: int) -> None:
        if reply := self.ask(do="steps", count=steps):
            self.rounds.append(reply)


def contestants(args: argparse.Namespace, family: str, file: str, folder: Path) -> list[Contestant]:
    """Make the contestants. file: of a small model; folder: for their logs and caches."""
    common = {
        "size": args.size,
        "family": family,
        "device": args.device,
        "dtype": args.dtype,
        "backend": args.backend,
        "batch_size": args.batch_size,
        "picture": asdict(picture_of(args, family)),
        "rank": args.rank,
        "targets": args.targets,
        "threads": args.threads,
        "prefetch": args.prefetch,
        "file": file,
    }
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # an empty one: compile times are those of a first run
        "OMP_NUM_THREADS": str(args.threads),
    }
    if args.device == "cuda":
        environment.pop("OMP_NUM_THREADS")
    result = []
    for number, (name, spec) in enumerate(contestant_specs(args)):
        result.append(Contestant(name, common | spec, environment=environment, log=folder / f"{number}.log"))
    return result


def contestant_specs(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Return the contestants' names, each with its arguments in addition to the common ones."""

    def our_spec(path: str, compiled: bool, checkpointing: str, swap: float = 0) -> tuple[str, dict[str, Any]]:
        name = f"{PATHS[path]}, {'compiled' if compiled else 'eager'}, {checkpointing}"
        name += f", {swap:g} % swapped" if swap else ""
        modes = {"compiled": compiled, "checkpointing": checkpointing, "swap": swap}
        return name, {"contestant": "ours", "path": path, **modes}

    specs = []
    if "eager" in args.contestants:
        specs += [our_spec(path, False, mode) for mode in MODES for path in args.path]
    if "compiled" in args.contestants:
        specs += [
            our_spec(path, True, args.checkpointing, percent) for percent in (0, *args.swap) for path in args.path
        ]
    if "core" in args.contestants:
        specs.append((CORE, {"contestant": "core", "compiled": False, "checkpointing": "", "swap": 0}))
    return specs


def picture_of(args: argparse.Namespace, family: str) -> Picture:
    options = {name: getattr(args, name) for name in ("width", "height", "frames", "length")}
    return replace(MODELS[args.size][family].picture, **{k: v for k, v in options.items() if v is not None})


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(field_of: Sequence[Contestant], rounds: int, steps: int, together: bool) -> None:
    """Measure the contestants. together: all stay loaded and idle between their turns; else one takes all its rounds
    and ends before the next is set up, as on a GPU that holds one at a time. Each keeps its process for its rounds."""
    if together:
        for contestant in field_of:
            set_up(contestant)
        for number in range(rounds):
            for contestant in field_of:
                take_turn(contestant, number, rounds, steps)
        return
    for contestant in field_of:
        set_up(contestant)
        for number in range(rounds):
            take_turn(contestant, number, rounds, steps)
        contestant.stop()


def set_up(contestant: Contestant) -> None:
    say(f"setting up: {contestant.name}")
    contestant.start()
    if contestant.ended:
        say(f"{contestant.name}: {contestant.ended}")


def take_turn(contestant: Contestant, number: int, rounds: int, steps: int) -> None:
    """Take the steps of one round, and in the last one the counts that are made only once."""
    if contestant.ended:
        return
    contestant.round(steps)
    if number == rounds - 1 and contestant.spec["device"] == "cpu":
        contestant.memory |= contestant.ask(do="memory")
        if contestant.spec["contestant"] == "ours":
            contestant.memory |= contestant.ask(do="held")
    elif number == rounds - 1 and contestant.spec["swap"]:
        contestant.memory |= contestant.ask(do="copies")
    outcome = contestant.ended or f"{median(contestant.rounds[-1]['seconds']):.3f} s a step"
    say(f"round {number + 1} of {rounds}, {contestant.name}: {outcome}")


def work_text(args: argparse.Namespace, family: str, file: str) -> str:
    """Demands of the shape: parameters, tokens, FLOP and copies, and the least time that these take."""
    from step.work import CountedStep

    step = CountedStep(MODELS[args.size][family], file, picture_of(args, family))
    swaps = [(percent, step.count_swap(percent, args.prefetch)) for percent in args.swap]
    work = step.count(args.rank, ("*",) if args.targets == "all" else ())
    assert importable_without_nodes()
    forward, backward, recompute = (part / 1e12 for part in (work.forward, work.backward, work.recompute))
    flop = [figure(part) for part in (forward, backward, recompute)]
    text = (
        f"{family}: {work.parameters / 1e9:.3f} billion parameters, {work.tokens} + {work.text_tokens} tokens. Matrix "
        f"products of one sample: forward {flop[0]} TFLOP, backward {flop[1]}, full recompute {flop[2]}."
    )
    if args.tflops is not None:
        plain = (forward + backward) * args.batch_size / args.tflops
        full = (forward + backward + recompute) * args.batch_size / args.tflops
        text += f" At {args.tflops:g} TFLOP/s a step takes {plain:.3g} s at least, {full:.3g} s with full recompute."
    for percent, swap in swaps:
        text += f" {percent:g} % swapped: {swap.blocks} of {swap.total} blocks, {swap.copies} copies a step, "
        text += f"{swap.bytes / 1e9:.3g} GB"
        text += "." if args.link is None else f", {swap.bytes / 1e9 / args.link:.3g} s at {args.link:g} GB/s."
    return text


def figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def write_file(args: argparse.Namespace, family: str, folder: Path) -> str:
    """The file of a small model; none of one that is made from random weights."""
    folder.mkdir()
    write = MODELS[args.size][family].write
    return "" if write is None else str(write(folder / "model.safetensors"))


def run(args: argparse.Namespace, family: str, file: str, folder: Path) -> list[Contestant]:
    """Measure one family and print its tables."""
    work = work_text(args, family, file)
    field_of = contestants(args, family, file, folder)
    try:
        measure(field_of, args.rounds, args.steps_per_round, together=args.device == "cpu")
    finally:
        for contestant in field_of:
            contestant.stop()
    print(f"\n## {work}\n\n{report(field_of, args)}", flush=True)
    return field_of


def main() -> None:
    args = arguments()
    set_up_comfyui("meta")
    with tempfile.TemporaryDirectory() as scratch:
        files = {family: write_file(args, family, Path(scratch) / family) for family in args.family}
        if args.dry_run:
            for family, file in files.items():
                print(work_text(args, family, file), flush=True)
            return
        print(head(args))
        measured = {family: run(args, family, file, Path(scratch) / family) for family, file in files.items()}
    if args.json:
        figures = {family: {c.name: figures_of(c) for c in field_of} for family, field_of in measured.items()}
        args.json.write_text(json.dumps({"machine": machine(args)} | figures, indent=1), encoding="utf-8")
    if any(c.ended for field_of in measured.values() for c in field_of if c.spec["contestant"] == "ours"):
        sys.exit(1)


def figures_of(c: Contestant) -> dict[str, Any]:
    return {"dtype": c.dtype, "warm_up": c.first, "rounds": c.rounds, "memory": c.memory, "ended": c.ended}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=["flux"])
    parser.add_argument("--contestants", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument(
        "--path", choices=tuple(PATHS), nargs="+", default=["own"], help="ours by our forward, by ComfyUI's, or by both"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each contestant")
    parser.add_argument("--rounds", type=int, help="turns that the steps are spread over; 10 on a CPU, 3 on a GPU")
    parser.add_argument("--batch-size", type=int, default=1)
    for name in ("width", "height", "frames", "length"):
        parser.add_argument(f"--{name}", type=int, help="tokens of the caption" if name == "length" else None)
    parser.add_argument("--checkpointing", choices=MODES, default="full", help="of the compiled contestants")
    parser.add_argument(
        "--swap", type=float, nargs="+", default=[], metavar="PERCENT", help="of the blocks; 0 always runs as well"
    )
    parser.add_argument("--prefetch", type=int, default=1, help="swapped blocks that are copied ahead")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=("all", "default"), default="all", help="which Linears ours trains")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--tflops", type=float, help="what the machine does, for the least time; an H200: 790")
    parser.add_argument("--link", type=float, help="GB/s from the host to the GPU, for the least time of the copies")
    parser.add_argument("--dry-run", action="store_true", help="counts on the meta device and measures nothing")
    parser.add_argument("--json", type=Path, help="writes every figure here")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps: take at least one")
    if unknown := [family for family in args.family if family not in MODELS[args.size]]:
        tiny_families = [family for family in FAMILIES if family in MODELS[args.size]]
        parser.error(f"--family {unknown[0]} is of the full size only; the tiny ones are {', '.join(tiny_families)}")
    pictures = [family for family in args.family if MODELS[args.size][family].picture.frames == 1]
    if args.frames is not None and pictures:
        parser.error(f"--frames: {pictures[0]} trains on pictures")
    if not all(0 <= percent <= 100 for percent in args.swap):
        parser.error("--swap: give percents of the blocks, 0 to 100")
    if any(args.swap) and "compiled" not in args.contestants:
        parser.error("--swap: those that swap are compiled; add compiled to --contestants")
    if args.prefetch < 1:
        parser.error("--prefetch: take at least one")
    args.family = list(dict.fromkeys(args.family))
    args.path = list(dict.fromkeys(args.path))
    args.swap = sorted({percent for percent in args.swap if percent})
    args.tflops = args.tflops or (790.0 if args.size == "full" else None)
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    args.rounds = min(args.steps, args.rounds or (10 if args.device == "cpu" else 3))
    args.steps_per_round = max(1, args.steps // args.rounds)
    return args


if __name__ == "__main__":
    main()
