"""Count what a training step does on a GPU, without one: kernels, bytes and FLOP of each block as it is compiled.

    python benchmarks counted [--rows NAME ...] [--against [FILE]] [--card NAME] [--save FILE] [--write]

Blocks at their real shapes, bf16, a rank-16 LoRA on every Linear, are lowered by inductor for an H100 (`lower.py`), and
what their Triton kernels take of the card is counted in their machine code (`triton_work.py`).
`--rows` counts the rows with one of these parts in their name. `--against` prints them beside the counts in a file, the
committed ones without a name. `--card` prices them for one of the cards of `cost.py`. `--save` writes the counts to
a file. `--write` writes benchmarks/results/counted.json and counted.md, with the rows that were not counted anew as
they are there. All rows take about ten minutes on two cores, the first one two.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from comfyui import set_up_comfyui

from counted.cost import CARDS
from counted.page import NONE, compared, page, priced

RANK = 16
RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "counted.md"
COUNTS = RESULTS / "counted.json"
BEFORE = RESULTS / "counted_before.json"
MEASURED = RESULTS / "counted_measured.json"
WAYS: dict[str, float | None] = {NONE: None}
# The default budget, about half of the memory without recompute, and the least.
SELECTIVE: dict[str, float | None] = {f"selective {budget}": budget for budget in (0.5, 0.4, 0.35, 0.01)}


@dataclass(frozen=True)
class Row:
    """model: of `families.FULL`; side: of a picture, 0 for the model's own size; selective: counted too."""

    model: str
    side: int = 0
    batch: int = 1
    selective: bool = False

    @property
    def name(self) -> str:
        size = f" {self.side}²" if self.side else ""
        return f"{self.model}{size}{f' batch {self.batch}' if self.batch > 1 else ''}"

    @property
    def ways(self) -> dict[str, float | None]:
        return WAYS | (SELECTIVE if self.selective else {})


ROWS = (
    Row("flux", 1024, selective=True),
    Row("flux", 1024, batch=4),
    Row("flux", 512),
    Row("flux", 512, batch=4),
    Row("flux2_klein", 1024),
    Row("qwen_image", 1024, selective=True),
    Row("wan_1.3b"),
    Row("wan", selective=True),
)


def set_up() -> None:
    """Prepare a process that counts. Afterwards it can do nothing else."""
    torch.cuda.is_available = lambda: False
    set_up_comfyui("meta")
    import comfy.model_management  # noqa: F401  it looks for a GPU once

    from counted.lower import pretend_h100

    pretend_h100()
    gc.freeze()


def step_of(row: Row) -> Any:
    from families import MODELS

    from step.work import CountedStep

    model = MODELS["full"][row.model]
    picture = replace(model.picture, width=row.side, height=row.side) if row.side else model.picture
    return CountedStep(model, "", picture)


def calls(row: Row) -> list[list[tuple[torch.nn.Module, tuple[Any, ...]]]]:
    """Return the row's blocks by structure, each with its arguments."""
    return list(step_of(row).calls(RANK, ("*",), row.batch).values())


def count_rest(row: Row) -> dict[str, Any]:
    """Count the launches of a step of the row outside of its blocks."""
    from counted.step import count_outside, count_step
    from step.work import flash

    step = step_of(row)
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: flash(q, k, v)):
        outside = count_outside(step, RANK)
    shapes = [(name, tuple(linear.shape)) for name, linear in step.transformer.linears().items()]
    return {"kept": 0, "kernels": summed([*outside, *count_step(shapes, RANK, torch.bfloat16)])}


def count(row: Row) -> list[dict[str, Any]]:
    """Count one row in a process that was set up: of each structure its blocks, their graphs and the eager block."""
    blocks = []
    for structure_calls in calls(row):
        block, args = structure_calls[-1]
        graphs = lowered(structure_calls, row.ways, measured=True)
        blocks.append(
            {"kind": block.kind, "count": len(structure_calls), "graphs": graphs, "eager": eager(block, args)}
        )
    return blocks


def lowered(
    structure_calls: Sequence[tuple[torch.nn.Module, tuple[Any, ...]]],
    ways: dict[str, float | None],
    names: Sequence[str] = ("forward", "backward"),
    measured: bool = False,
) -> dict[str, dict[str, Any]]:
    """Lower the last block of a structure, as what reaches it requires a gradient: way → graph → kernels."""
    from counted.lower import lower

    gc.disable()  # it takes a seventh of the time
    graphs_by_way = lower(*structure_calls[-1], ways, names, measured)
    gc.enable()
    return {
        way: {name: {"kept": graph.saved_bytes, "kernels": summed(graph.kernels)} for name, graph in parts.items()}
        for way, parts in graphs_by_way.items()
    }


def count_some(cases: Sequence[tuple[str, str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Count single blocks without recompute in a process of its own: the row's name, the kind of block, the graphs."""
    set_up()
    rows, counted = {row.name: row for row in ROWS}, []
    calls_by_row = {name: calls(rows[name]) for name in {name for name, _, _ in cases}}
    for name, kind, graphs in cases:
        (calls_of_kind,) = (group for group in calls_by_row[name] if group[-1][0].kind == kind)
        counted.append(lowered(calls_of_kind, WAYS, graphs)[NONE])
    return counted


def summed(kernels: Sequence[Any]) -> list[list[Any]]:
    """Equal kernels as one line: kind, name, launches, bytes, FLOP, bytes moved, cycles, added up."""
    equal = Counter(kernels)
    lines = [[k.kind, k.name, n, n * k.bytes, n * k.flop, n * bytes_moved(k), n * k.cycles] for k, n in equal.items()]
    return sorted(lines)


def bytes_moved(kernel: Any) -> int:
    return kernel.bytes if kernel.bytes_moved is None else kernel.bytes_moved


def eager(block: torch.nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Launches of the eager block, forward and backward, and the bytes that it saves."""
    from torch.autograd.graph import saved_tensors_hooks

    from counted.gpu_norm import eager_norm
    from counted.lower import Launches
    from step.work import flash

    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    unchanged_args = [a for a in args if isinstance(a, torch.Tensor) and not a.requires_grad]
    excluded = {t.untyped_storage()._cdata for t in (*block.parameters(), *block.buffers(), *unchanged_args)}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() and storage._cdata not in excluded:
            saved[storage._cdata] = storage
        return tensor

    own_kernels = {"scaled_dot_product_attention": lambda q, k, v, **_: flash(q, k, v), "rms_norm": eager_norm}
    on_gpu = patch.object(import_module("tessera.models.layers.norm_rope"), "DEVICES", ("meta",))
    with on_gpu, patch.multiple(torch.nn.functional, **own_kernels):
        with saved_tensors_hooks(pack, lambda tensor: tensor), Launches() as forward:
            out = block(*args, {})
        outs = out if isinstance(out, tuple | list) else (out,)
        gradients = [torch.empty_like(o) for o in outs]
        with Launches() as backward:
            torch.autograd.backward(outs, gradients)
    saved_bytes = sum(storage.nbytes() for storage in saved.values())
    return {
        "forward": {"kept": saved_bytes, "kernels": summed(forward.kernels)},
        "backward": {"kept": 0, "kernels": summed(backward.kernels)},
    }


def processes(number: int) -> ProcessPoolExecutor:
    os.environ["SYMPY_CACHE_SIZE"] = "None"  # for them: sizes are compared over and over
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=set_up)


def in_process(row: Row) -> list[dict[str, Any]]:
    """Count one row in a process of its own."""
    with processes(1) as pool:
        return pool.submit(count, row).result()


def count_all(rows: Sequence[Row]) -> dict[str, Any]:
    """Count rows in two processes, the longest first."""
    import triton

    order = sorted(rows, key=lambda row: -len(row.ways))
    with processes(2) as pool:
        pending = pool.map(count, order)
        rest = pool.submit(count_rest, ROWS[0])
        results = dict(zip((row.name for row in order), pending, strict=True))
    versions = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}
    rows_found = {row.name: results[row.name] for row in rows}
    return versions | {"rank": RANK, "rest": rest.result(), "rows": rows_found}


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def as_json(counted: dict[str, Any]) -> str:
    """As JSON, a kernel a line."""
    text = json.dumps(counted, ensure_ascii=False, indent=None, separators=(",", ":"))
    return text.replace('[["', '[\n["').replace('],["', '],\n["').replace("]]}", "]\n]}") + "\n"


def merged(counted: dict[str, Any]) -> dict[str, Any]:
    """Return the counts, with the committed ones for rows that were not counted again."""
    old = read(COUNTS) if COUNTS.is_file() else counted
    all_rows = old["rows"] | counted["rows"]
    if any(old[name] != counted[name] for name in ("torch", "triton")) and len(counted["rows"]) < len(ROWS):
        raise SystemExit("The committed counts are of other versions of torch or Triton; count all rows.")
    return counted | {"rows": {row.name: all_rows[row.name] for row in ROWS if row.name in all_rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="parts of the names of rows")
    parser.add_argument(
        "--against", nargs="?", type=Path, const=COUNTS, help="a counted.json, the committed one if none is named"
    )
    parser.add_argument("--card", default="H100", choices=CARDS)
    parser.add_argument("--save", type=Path, help="a JSON file for the counts")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    set_up_comfyui("meta")  # the pack's prices
    rows = [row for row in ROWS if args.rows is None or any(part in row.name for part in args.rows)]
    old = read(args.against) if args.against else None
    counted = count_all(rows)
    if old is not None:
        print(compared(old["rows"], counted["rows"]))
    print(priced(counted["rows"], args.card))
    if args.save:
        args.save.write_text(as_json(counted), encoding="utf-8")
    if args.write:
        whole = merged(counted)
        COUNTS.write_text(as_json(whole), encoding="utf-8")
        PAGE.write_text(page(whole, read(BEFORE)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
