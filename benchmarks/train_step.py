"""Seconds and memory of a training step: ours eager and compiled, beside core's TrainLoraNode on the same model.

Run: python benchmarks/train_step.py --size tiny --device cpu > benchmarks/results/train_step_cpu.md

Every contestant is a process of its own on the same weights, pictures, batch, rank and dtype. After a warm-up they take
turns, round after round, so that whatever else the machine does weighs on all of them; what counts is the ratio within
a round. `--size full` is FLUX.1's real shape with random weights, for a GPU; `--dry-run` counts its parameters, tokens
and FLOP without one. Only the dry run of the full size has been tried so far: it has not run on a GPU yet.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import Told
from train_step_report import CORE, WARM_UP, head, machine, report

MODES = ("none", "selective", "full")


@dataclass
class Contestant(Told):
    """A process that takes steps when it is told to."""

    script: str = "train_step_contestant.py"
    dtype: str = ""

    def start(self) -> None:
        """Sets it up and takes the steps of the warm-up."""
        self.dtype = self.launch().get("inference_dtype", "")
        if not self.ended:
            first = self.ask(do="steps", count=WARM_UP)
            self.first = self.first or first

    def round(self, steps: int) -> None:
        if reply := self.ask(do="steps", count=steps):
            self.rounds.append(reply)


def contestants(args: argparse.Namespace, folder: Path) -> list[Contestant]:
    shared = {
        "size": args.size,
        "device": args.device,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "tokens": args.tokens,
        "text_tokens": args.text_tokens,
        "rank": args.rank,
        "targets": args.targets,
        "threads": args.threads,
        "file": str(write_tiny(folder)) if args.size == "tiny" else "",
    }
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # an empty one: compile times are those of a first run
        "OMP_NUM_THREADS": str(args.threads),
    }
    if args.device == "cuda":
        environment.pop("OMP_NUM_THREADS")
    chosen = [(f"ours, eager, {mode}", "ours", False, mode) for mode in MODES]
    chosen.append((f"ours, compiled, {args.checkpointing}", "ours", True, args.checkpointing))
    chosen.append((CORE, "core", False, ""))
    made = []
    for number, (name, contestant, compiled, mode) in enumerate(chosen):
        spec = shared | {"contestant": contestant, "compiled": compiled, "checkpointing": mode}
        made.append(Contestant(name, spec, environment=environment, log=folder / f"{number}.log"))
    return made


def write_tiny(folder: Path) -> Path:
    from train_step_model import SHAPES, load_tiny_writers

    shape = SHAPES["tiny"]
    return load_tiny_writers().write_flux(
        folder / "tiny_flux.safetensors",
        hidden=shape.hidden,
        depth=shape.depth,
        depth_single=shape.depth_single,
        context_dim=shape.context_dim,
        vec_dim=shape.vec_dim,
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(field_of: Sequence[Contestant], rounds: int, steps: int, together: bool) -> None:
    """together: all stay loaded and stand still between their turns; else each is set up for its turn alone, as on a
    GPU that holds one at a time."""
    if together:
        for contestant in field_of:
            say(f"setting up: {contestant.name}")
            contestant.start()
    for number in range(rounds):
        for contestant in field_of:
            if contestant.ended:
                continue
            if not together:
                contestant.start()
            contestant.round(steps)
            if number == rounds - 1 and contestant.spec["device"] == "cpu":
                contestant.memory |= contestant.ask(do="memory")
                if contestant.spec["contestant"] == "ours":
                    contestant.memory |= contestant.ask(do="held")
            if not together:
                contestant.stop()
        say(f"round {number + 1} of {rounds}")


def work_text(args: argparse.Namespace) -> str:
    """What the shape asks for: parameters, tokens, FLOP, and the least time that these take."""
    from train_step_model import SHAPES, count_work, importable_without_nodes, set_up_comfyui

    command = sys.argv[:]
    set_up_comfyui("meta")
    sys.argv[:] = command
    shape = SHAPES[args.size].with_tokens(args.tokens, args.text_tokens)
    work = count_work(shape, args.rank, ("*",) if args.targets == "all" else ())
    assert importable_without_nodes()
    forward, backward, recompute = (part / 1e12 for part in (work.forward, work.backward, work.recompute))
    text = (
        f"{work.parameters / 1e9:.3f} billion parameters, {shape.tokens} + {shape.text_tokens} tokens. Matrix products "
        f"of one picture: forward {forward:.3g} TFLOP, backward {backward:.3g}, full recompute {recompute:.3g}."
    )
    if args.tflops is None:
        return text
    plain = (forward + backward) * args.batch_size / args.tflops
    full = (forward + backward + recompute) * args.batch_size / args.tflops
    return f"{text} At {args.tflops:g} TFLOP/s a step takes {plain:.3g} s at least, {full:.3g} s with full recompute."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each contestant")
    parser.add_argument("--rounds", type=int, help="turns that the steps are spread over; 10 on a CPU, 3 on a GPU")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of a picture; 1024 (tiny) or 4096 (full)")
    parser.add_argument("--text-tokens", type=int, help="of a caption; 128 (tiny) or 512 (full)")
    parser.add_argument("--checkpointing", choices=MODES, default="full", help="of the compiled contestant")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=("all", "default"), default="all", help="which Linears ours trains")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument(
        "--tflops", type=float, help="what the machine does, for the least time of a step; an H200: 790"
    )
    parser.add_argument("--dry-run", action="store_true", help="counts on the meta device and measures nothing")
    parser.add_argument("--json", type=Path, help="writes every figure here")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps: take at least one")
    args.tflops = args.tflops or (790.0 if args.size == "full" else None)
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    args.rounds = min(args.steps, args.rounds or (10 if args.device == "cpu" else 3))
    args.steps_per_round = max(1, args.steps // args.rounds)
    work = work_text(args)
    if args.dry_run:
        print(work)
        return

    with tempfile.TemporaryDirectory() as scratch:
        field_of = contestants(args, Path(scratch))
        try:
            measure(field_of, args.rounds, args.steps_per_round, together=args.device == "cpu")
        finally:
            for contestant in field_of:
                contestant.stop()
    print(f"{head(args, work)}\n\n{report(field_of, args)}")
    if args.json:
        figures = {
            c.name: {"dtype": c.dtype, "warm_up": c.first, "rounds": c.rounds, "memory": c.memory, "ended": c.ended}
            for c in field_of
        }
        args.json.write_text(json.dumps({"machine": machine(args), "contestants": figures}, indent=1), encoding="utf-8")
    if any(c.ended for c in field_of if c.spec["contestant"] == "ours"):
        sys.exit(1)


if __name__ == "__main__":
    main()
