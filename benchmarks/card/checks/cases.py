"""The cases of smoke: training in rows that hold every pair of options, and sampling."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from card.case import Case, Group
from card.checks.pairs import Options, Row, covering_rows

BLOCKS = 6  # of the small model
SOME = 3
NATIVE, ASYNC = "native", "cudaMallocAsync"
ALLOCATORS = (NATIVE, ASYNC)
KEEP: dict[str, dict[str, Any]] = {
    "none": {"checkpointing": "none"},
    "selective": {"checkpointing": "selective"},
    "full": {"checkpointing": "full"},
    "full with offload": {"checkpointing": "full", "offload_activations": True},
}
PLACES = ("page-locked", "staged", "file")
SWAPS = {"nothing swapped": 0, "all swapped": BLOCKS, "some swapped": SOME}
STORED: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"stored": "fp8"},
    "int8": {"stored": "int8"},
    "mxfp8": {"stored": "mxfp8"},
    "fp8 multiplied": {"stored": "fp8", "low_bit_matmul": "fp8"},
    "int8 multiplied": {"stored": "int8 rotated", "low_bit_matmul": "int8"},
}
# The default value first. The page names the values of a case that are not the default.
OPTIONS: Options = {
    "allocator": ALLOCATORS,
    "mode": ("eager", "compiled"),
    "checkpointing": tuple(KEEP),
    "swap": tuple(SWAPS),
    "place": ("", *PLACES),
    "stored": tuple(STORED),
    "delay": ("", "delay compute", "delay copy", "delay both"),
    "ahead": ("", "2 ahead"),
    "batch": ("", "batch 2"),
    "dropout": ("", "dropout"),
    "evicted": ("", "evicted between the steps"),
}
GRAPH = ("mode", "stored", "batch", "dropout")  # options that change the graphs; selective checkpointing does too
# The least seconds of a case, on a card whose graphs compile in 5 to 20 s.
EAGER_SECONDS, COMPILED_SECONDS = 2.0, 8.0
TUNED_SECONDS = 120.0  # an H100 had not chosen its products in 105


def excludes(row: Row) -> bool:
    """Return whether options exclude each other: without swap there is no place, prefetch or delayed copy."""
    swap, place = row.get("swap"), row.get("place")
    if swap is not None and place is not None and (swap == "nothing swapped") != (place == ""):
        return True
    late = row.get("delay") in ("delay copy", "delay both") or row.get("ahead")
    return bool(late) and (swap == "nothing swapped" or place == "")


@cache
def training_rows(allocators: tuple[str, ...]) -> tuple[Row, ...]:
    """Return rows that cover every pair; first each checkpointing mode compiled, under each allocator."""
    options = {**OPTIONS, "allocator": allocators}
    first = [{"allocator": a, "mode": "compiled", "checkpointing": c, "stored": "bf16"} for c in KEEP
             for a in allocators]  # fmt: skip
    return tuple(covering_rows(options, excludes, first, GRAPH))


def training_case(row: Row) -> Case:
    """Return the case of a row."""
    plain = {name: values[0] for name, values in OPTIONS.items()}
    always = ("mode", "checkpointing")
    names = [name for name in OPTIONS if name in always or (name != "allocator" and row[name] != plain[name])]
    values = [row[name] for name in names]
    settings: dict[str, Any] = {"do": "train", "compiled": row["mode"] == "compiled", "swap": SWAPS[row["swap"]]}
    settings |= KEEP[row["checkpointing"]] | STORED[row["stored"]]
    settings["prefetch_blocks"] = 2 if row["ahead"] else 1
    settings["batch"] = 2 if row["batch"] else 1
    settings["dropout"] = 0.3 if row["dropout"] else 0.0
    settings["delay"] = row["delay"].removeprefix("delay ")
    settings["evict"], settings["place"] = bool(row["evicted"]), row["place"]
    return Case(
        f"train: {', '.join(values)}", settings, 120.0, COMPILED_SECONDS if settings["compiled"] else EAGER_SECONDS
    )


def other_cases() -> Iterator[Case]:
    """Yield the cases that are no row of options."""
    plain = {"do": "train", "checkpointing": "none"}
    yield Case("train: eager, none, run to run", plain, 120.0, EAGER_SECONDS)
    yield Case("train: automatic", plain | {"swap": -1, "checkpointing": "auto"}, 120.0, EAGER_SECONDS)
    swapped = plain | {"swap": BLOCKS, "place": "page-locked"}
    yield Case("train: torch's own attention, eager, none, all swapped", swapped | {"attention": "any"}, 120.0,
               EAGER_SECONDS)  # fmt: skip
    yield Case("a MODEL after a run", {"do": "after a run"}, 120.0, 3.0)


def samples() -> Iterator[Case]:
    """Sampling, the CUDA graphs apart."""
    yield _sample("run to run")
    for place in PLACES:
        yield _sample(f"all swapped, {place}", swap=BLOCKS, place=place)
    yield _sample("all swapped, 2 ahead, delay copy", swap=BLOCKS, place="page-locked", prefetch=2, delay="copy")
    yield _sample("some swapped", swap=SOME, place="page-locked")
    yield _sample("automatic swap", swap=-1)
    yield _sample("all swapped, with a LoRA", swap=BLOCKS, place="page-locked", lora=True)
    yield _sample("compiled", COMPILED_SECONDS, mode="default")
    yield _sample("compiled, all swapped, with a LoRA", COMPILED_SECONDS, mode="default", swap=BLOCKS,
                  place="page-locked", lora=True)  # fmt: skip
    yield _sample("compiled, scope stack", COMPILED_SECONDS, mode="default", scope="stack")
    yield _sample("compiled, scope model", COMPILED_SECONDS, mode="default", scope="model")
    yield _sample("compiled, max-autotune-no-cudagraphs", TUNED_SECONDS, mode="max-autotune-no-cudagraphs")


def graph_samples() -> Iterator[Case]:
    """Sampling with CUDA graphs, which need the native allocator."""
    yield _sample("compiled, reduce-overhead", COMPILED_SECONDS, mode="reduce-overhead")
    yield _sample("compiled, all swapped, reduce-overhead", COMPILED_SECONDS, mode="reduce-overhead", swap=BLOCKS,
                  place="page-locked")  # fmt: skip
    yield _sample("compiled, max-autotune", TUNED_SECONDS, mode="max-autotune")


def _sample(name: str, least: float = EAGER_SECONDS, **settings: Any) -> Case:
    return Case(f"sample: {name}", {"do": "sample", **settings}, 180.0, least)


def group(allocator: str, cases: Iterator[Case] | list[Case]) -> Group:
    """Return a group that runs with this allocator of torch; "" if there is no choice."""
    if not allocator:
        return Group({"kind": "checks.smoke", "allocator": ""}, tuple(cases))
    renamed = tuple(case.with_name(f"{case.name}, {allocator}") for case in cases)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{allocator}"}
    return Group({"kind": "checks.smoke", "allocator": allocator}, renamed, environment)


def smoke(device: str) -> Iterator[Group]:
    """All cases, the most worth first: each allocator's first rows, all other rows, and sampling."""
    allocators = ALLOCATORS if device == "cuda" else ("",)
    rows = training_rows(allocators)
    first = len(KEEP) * len(allocators)
    for part in (rows[:first], rows[first:]):
        for allocator in allocators:
            yield group(allocator, [training_case(row) for row in part if row["allocator"] == allocator])
    yield group(allocators[0], [*graph_samples(), *samples(), *other_cases()])
    if len(allocators) > 1:  # which ComfyUI sets by itself on CUDA 13
        endings = ("run to run", "all swapped, page-locked", "compiled, all swapped, with a LoRA")
        yield group(ASYNC, [case for case in [*samples(), *other_cases()] if case.name.endswith(endings)])
