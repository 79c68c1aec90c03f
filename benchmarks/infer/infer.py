"""Seconds per step of sampling: eager, core's TorchCompileModel, and Compile Model in each scope, on the same model.

Run: python benchmarks infer --size tiny --device cpu
     python benchmarks infer --session --device cpu

Every contestant is a process of its own with its own empty inductor cache, on the same weights and inputs, and samples
through comfy.sample as core's KSampler. After a warm-up they take turns, round after round, so that whatever else the
machine does weighs on all of them; what counts is the ratio within a round. `--size full` are the real shapes with
random weights, for a GPU; `--dry-run` counts their parameters and FLOP without one. `--session` is a user's session on
a FLUX of seven small blocks. Only the dry run of the full sizes has been tried so far: it has not run on a GPU yet.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from comfyui import set_up_comfyui
from families import FULL, TINY, Picture
from processes import CommandProcess, script

from infer.models import MODELS, count_work
from infer.report import CORE, EAGER, speed_report
from infer.session import STEPS, pictures, session_report
from step.report import machine

# name → (contestant, scope, dynamic).
SPEED = {
    EAGER: ("eager", "", ""),
    CORE: ("core", "", ""),
    "ours, blocks": ("ours", "blocks", "auto"),
    "ours, blocks, dynamic true": ("ours", "blocks", "true"),
    "ours, stack": ("ours", "stack", "auto"),
    "ours, model": ("ours", "model", "auto"),
}
SESSION = {
    EAGER: ("eager", "", ""),
    CORE: ("core", "", ""),
    "ours, dynamic false": ("ours", "blocks", "false"),
    "ours, dynamic auto": ("ours", "blocks", "auto"),
    "ours, dynamic true": ("ours", "blocks", "true"),
}


@dataclass
class Contestant(CommandProcess):
    """A process that samples on command."""

    script: tuple[str, ...] = script("infer.contestant")

    def sample(self, picture: Picture, steps: int) -> dict[str, Any]:
        return self.ask(picture=asdict(picture), steps=steps, reference=self.spec["reference"])

    def warm_up(self, picture: Picture, steps: int) -> None:
        """first: the picture that compiles; memory: one more, in which our regions measure themselves."""
        self.launch()
        first, second = (self.sample(picture, steps) for _ in range(2))
        self.first, self.memory = self.first or first, self.memory or second


def contestants(args: argparse.Namespace, size: str, family: str, folder: Path) -> list[Contestant]:
    model = MODELS[size][family]
    folder.mkdir()
    file = str(model.write(folder / "model.safetensors")) if model.write is not None else ""
    common = {
        "size": size,
        "family": family,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "backend": args.backend,
        "file": file,
        "reference": str(folder / "eager.pt"),
    }
    result = []
    for number, (name, (contestant, scope, dynamic)) in enumerate((SESSION if args.session else SPEED).items()):
        cache = folder / f"cache-{number}"  # empty, and its own: nobody profits from what another compiled
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        if args.device == "cpu":
            environment |= {"OMP_NUM_THREADS": str(args.threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        spec = common | {"contestant": contestant, "scope": scope, "dynamic": dynamic}
        result.append(Contestant(name, spec, environment=environment, log=folder / f"{number}.log"))
    return result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_speed(field_of: Sequence[Contestant], picture: Picture, steps: int, rounds: int, together: bool) -> None:
    """Measure all contestants by turns. together: all stay loaded and idle between their turns; else each is set up for
    its turn alone, as on a GPU that holds one at a time."""
    if together:
        for contestant in field_of:
            say(f"setting up: {contestant.name}")
            contestant.warm_up(picture, steps)
    for number in range(rounds):
        for contestant in field_of if number % 2 == 0 else reversed(field_of):
            if contestant.ended:
                continue
            if not together:
                contestant.warm_up(picture, steps)
            if reply := contestant.sample(picture, steps):
                contestant.rounds.append(reply)
            if not together:
                contestant.stop()
        say(f"round {number + 1} of {rounds}")


def measure_session(field_of: Sequence[Contestant], session_pictures: Sequence[Picture], steps: int) -> None:
    """Picture by picture, each contestant in turn; eager is the first, as the others compare themselves with it."""
    for contestant in field_of:
        contestant.launch()
    for number, picture in enumerate(session_pictures):
        for contestant in field_of:
            if reply := contestant.sample(picture, steps):
                contestant.rounds.append(reply)
        say(f"picture {number + 1} of {len(session_pictures)}")


def run_speed(args: argparse.Namespace, folder: Path) -> dict[str, list[Contestant]]:
    text = f"{args.rounds} rounds of {args.steps} steps each"
    print(head(args, f"Sampling, `{args.size}` on {args.device}", SPEED_TEXT.format(each=text)))
    measured = {}
    for family in args.family:
        say(family)
        field_of = contestants(args, args.size, family, folder / family)
        try:
            measure_speed(field_of, picture_of(args, family), args.steps, args.rounds, args.device == "cpu")
        finally:
            for contestant in field_of:
                contestant.stop()
        print(f"\n## {work_text(args, family, folder)}\n")
        print(speed_report(field_of, args.steps, args.device == "cpu"), flush=True)
        measured[family] = field_of
    return measured


def run_session(args: argparse.Namespace, folder: Path) -> dict[str, list[Contestant]]:
    session_pictures = pictures()
    field_of = contestants(args, "session", "flux", folder / "session")
    try:
        measure_session(field_of, session_pictures, STEPS)
    finally:
        for contestant in field_of:
            contestant.stop()
    print(head(args, f"A user's session on {args.device}", SESSION_TEXT))
    print(f"\n{session_report(field_of, session_pictures)}", flush=True)
    return {"session": field_of}


def figures_of(contestant: Contestant) -> dict[str, Any]:
    return {"name": contestant.name, "first": contestant.first, "rounds": contestant.rounds, "ended": contestant.ended}


def picture_of(args: argparse.Namespace, family: str) -> Picture:
    options = {name: getattr(args, name) for name in ("width", "height", "frames", "length", "batch")}
    return replace(MODELS[args.size][family].picture, **{k: v for k, v in options.items() if v is not None})


def work_text(args: argparse.Namespace, family: str, folder: Path) -> str:
    """Demands of one step, and the least time that it takes."""
    model, picture = MODELS[args.size][family], picture_of(args, family)
    file = str(model.write(folder / f"{family}.safetensors")) if model.write is not None else ""
    work = count_work(model, file, picture)
    text = (
        f"{family}: {work.parameters / 1e9:.3f} billion parameters, latent {'x'.join(map(str, work.latent))}, "
        f"{picture.length} text tokens, {work.flop / 1e12:.3g} TFLOP in one step"
    )
    if args.tflops is None:
        return text
    return f"{text}, {work.flop / 1e12 / args.tflops:.3g} s at least at {args.tflops:g} TFLOP/s"


SPEED_TEXT = """A picture is sampled through `comfy.sample` as core's KSampler does it (euler, cfg 1), {each} after two
pictures of warm-up, by turns. Seconds are of the whole picture divided by its steps: the median (least to greatest);
ratios are taken within each round, above 1 where the contestant of the line needs less. Compiling starts from an empty
cache in each process. Graphs and seconds of compiling are dynamo's own counts."""
SESSION_TEXT = """FLUX.1 of seven small blocks (3 double, 4 single, hidden size 256). 54 pictures of 2 steps: LoRA none,
A (on all layers) and B (attention of the double blocks, at another strength), put on with core's function in front of
the compile node; 256x256, 320x192 and 384x256 pixels; prompts of 64, 77 and 128 tokens; batch 1 and 2, the last named
changing fastest. Each contestant is a process with an empty cache of its own; they take turns picture by picture.
Counts and seconds are dynamo's own. Recompiles are graphs made because those at hand did not fit. CPU seconds hold the
C++ compiler's; unlike seconds they do not depend on what else the machine does."""


def head(args: argparse.Namespace, title: str, method: str) -> str:
    command = "python benchmarks infer " + " ".join(sys.argv[1:])
    threads = f", {args.threads} thread{'s' if args.threads > 1 else ''}" if args.device == "cpu" else ""
    source = f"Made by `{command}` on {date.today()}: {machine(args)}{threads}, {args.dtype}, backend {args.backend}."
    return f"# {title}\n\n{source}\n\n{method}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--family", choices=tuple(FULL), nargs="+", default=["flux"])
    parser.add_argument("--session", action="store_true", help="count what a user's session compiles, on a small FLUX")
    parser.add_argument("--steps", type=int, default=4, help="of one picture")
    parser.add_argument("--rounds", type=int, help="pictures of each contestant; 7 on a CPU, 3 on a GPU")
    for name in ("width", "height", "frames", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, help="tokens of the prompt" if name == "length" else None)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--tflops", type=float, help="what the machine does, for the least time; an H200: 790")
    parser.add_argument("--dry-run", action="store_true", help="counts on the meta device and measures nothing")
    parser.add_argument("--json", type=Path, help="writes every figure here")
    args = parser.parse_args()
    if unknown := [family for family in args.family if family not in MODELS[args.size]]:
        parser.error(f"--family {unknown[0]} is of the full size only; the tiny ones are {', '.join(TINY)}")
    args.tflops = args.tflops or (790.0 if args.size == "full" else None)
    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    args.rounds = args.rounds or (7 if args.device == "cpu" else 3)
    set_up_comfyui("meta")
    with tempfile.TemporaryDirectory() as scratch:
        if args.dry_run:
            for family in args.family:
                print(work_text(args, family, Path(scratch)))
            return
        measured = run_session(args, Path(scratch)) if args.session else run_speed(args, Path(scratch))
    if args.json:
        figures = {title: [figures_of(c) for c in field_of] for title, field_of in measured.items()}
        args.json.write_text(json.dumps({"machine": machine(args)} | figures, indent=1), encoding="utf-8")
    if any(c.ended for field_of in measured.values() for c in field_of if c.spec["contestant"] == "ours"):
        sys.exit(1)


if __name__ == "__main__":
    main()
