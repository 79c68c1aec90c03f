"""A session of a user: sizes, prompts, LoRAs and batches change from picture to picture."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from families import Picture
from figures import markdown_table
from processes import Measured

from infer.report import CORE, EAGER, ended, find, total

STEPS = 2  # of a picture: one that may compile, and one that must not
SIZES = ((256, 256), (320, 192), (384, 256))
PROMPTS = (64, 77, 128)  # tokens
LORAS = ("", "A", "B")
BATCHES = (1, 2)


def pictures(sizes: int = 3, prompts: int = 3) -> list[Picture]:
    """In the order in which they are sampled, the last named changing fastest: LoRA, size, prompt, batch."""
    return [
        Picture(width, height, length, batch=batch, lora=lora)
        for lora, (width, height), length, batch in product(LORAS, SIZES[:sizes], PROMPTS[:prompts], BATCHES)
    ]


def shape(picture: Picture) -> tuple[int, ...]:
    return (picture.width, picture.height, picture.length, picture.batch)


def late_steps(session_pictures: Sequence[Picture], replies: Sequence[dict[str, Any]]) -> int:
    """Steps that compiled although they were not the first of their shape."""
    shapes_seen: set[tuple[int, ...]] = set()
    late = 0
    for picture, reply in zip(session_pictures, replies, strict=True):
        for step in reply["compiled"]:
            late += bool(step["graphs"]) and shape(picture) in shapes_seen
            shapes_seen.add(shape(picture))
    return late


def by_lora(session_pictures: Sequence[Picture], replies: Sequence[dict[str, Any]]) -> str:
    """Graphs made without a LoRA, with the first, with the second."""
    return " / ".join(
        str(total([r for p, r in zip(session_pictures, replies, strict=True) if p.lora == lora], "graphs"))
        for lora in LORAS
    )


def compile_cpu_seconds(replies: Sequence[dict[str, Any]]) -> float:
    """CPU seconds of the steps in which dynamo compiled something or tried to."""
    return sum(
        cpu
        for reply in replies
        for cpu, step in zip(reply["step_cpu_seconds"], reply["compiled"], strict=True)
        if step["seconds"]
    )


def session_report(field_of: Sequence[Measured], session_pictures: Sequence[Picture]) -> str:
    run = [c for c in field_of if c.rounds and not c.ended]
    core = find(run, CORE)
    steps = len(session_pictures) * STEPS
    header = ["session", "graphs (no LoRA / A / B)", "recompiles", f"steps that compiled, of {steps}"]
    header += ["of them not the first of their shape", "calls refused a graph by the limit"]
    header += [
        "compile seconds",
        "of core's",
        "CPU seconds of compiling steps",
        "of core's",
        "most deviation from eager",
    ]
    rows = []
    for c in run:
        if c.name == EAGER:
            continue
        seconds, cpu = total(c.rounds, "seconds"), compile_cpu_seconds(c.rounds)
        parts = ["", ""]
        if core not in (None, c):
            assert core is not None
            parts = [f"{seconds / total(core.rounds, 'seconds'):.2f}", f"{cpu / compile_cpu_seconds(core.rounds):.2f}"]
        rows.append(
            [
                c.name,
                f"{total(c.rounds, 'graphs')} ({by_lora(session_pictures, c.rounds)})",
                str(total(c.rounds, "recompiles")),
                str(sum(bool(step["graphs"]) for reply in c.rounds for step in reply["compiled"])),
                str(late_steps(session_pictures, c.rounds)),
                str(total(c.rounds, "over_limit")),
                f"{seconds:.0f}",
                parts[0],
                f"{cpu:.0f}",
                parts[1],
                f"{max(reply.get('deviation', 0.0) for reply in c.rounds):.0e}",
            ]
        )
    return "\n\n".join([markdown_table(header, rows), *ended(field_of)])
