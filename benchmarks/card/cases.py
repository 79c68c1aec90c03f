"""The cases of each part, the ones most worth knowing first, and what of it a card has no room for.

A case runs in the process of its group. What a case needs is a plain estimate of its model: weights, and for each block
so many times one sequence of hidden vectors, as counted for blocks compiled for an H100 (`results/counted.md`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

PARTS = ("smoke", "flux", "swap", "wan", "others")
GB = 1e9


@dataclass(frozen=True)
class Case:
    """how: what the process is told; limit: seconds after which it is taken to hang; least: seconds that it takes at
    least, for want of which it is left out; missing: what it is left out for, as a sentence."""

    name: str
    how: dict[str, Any]
    limit: float = 120.0
    least: float = 5.0
    missing: str = ""


@dataclass(frozen=True)
class Group:
    """Cases of one process. spec: what it is started with; share: of the part's time, which it may take."""

    spec: dict[str, Any]
    cases: tuple[Case, ...]
    environment: dict[str, str] = field(default_factory=dict)
    share: float = 1.0


@dataclass(frozen=True)
class Shape:
    """A model in bf16. weights: GB; blocks: number; sequence: GB of one sequence of hidden vectors."""

    weights: float
    blocks: int
    sequence: float


# By name in `families.FULL`, and smaller pictures after a space.
SHAPES = {
    "flux": Shape(23.8, 57, 0.0283),
    "flux 512²": Shape(23.8, 57, 0.0094),
    "flux2_klein": Shape(7.8, 25, 0.0283),
    "qwen_image": Shape(40.9, 60, 0.0260),
    "wan_1.3b": Shape(2.9, 30, 0.1006),
    "wan": Shape(28.6, 40, 0.3354),
}
# Sequences that a block keeps for backward, and that one block has while it is computed anew.
KEPT, AT_ONCE = {"none": 25.0, "selective": 15.0, "least": 5.0, "full": 2.0}, 30.0
BESIDE = 3.0  # GB: LoRA with its optimizer, CUDA's context, workspaces
SLOTS = 3  # blocks on the card where all are swapped
SPARE_RAM = 3.0  # GB
TRAINED = {"rank": 16, "batch_size": 1, "targets": "all", "prefetch": 1, "swap": 0, "checkpointing": "full"}


def groups(part: str, device: str, size: str, machine: dict[str, Any]) -> list[Group]:
    made = {"smoke": _smoke, "flux": _flux, "swap": _swap, "wan": _wan, "others": _others}[part]
    return [group for group in made(device, _Room(machine, size)) if group.cases]


# What has room


@dataclass(frozen=True)
class _Room:
    """Memory of the machine; a tiny model fits everywhere."""

    machine: dict[str, Any]
    size: str

    def fitted(self, case: Case, model: str) -> Case:
        """The case as it fits: resident, else with as many blocks swapped as have to be, else not at all."""
        if self.size != "full":
            return replace(case, least=5.0)
        shape, how = SHAPES[model], case.how
        card, ram = self.machine["memory_gib"] * 2**30 / GB, self.machine["ram_free_gib"] * 2**30 / GB
        weights = shape.weights * (0.5 if how.get("stored") == "fp8" else 1.0)
        # A loader's model beside the weights that it is made of.
        if (wanted := weights * (2 if "how" in how else 1) + SPARE_RAM) > ram:
            return _without(case, f"needs about {wanted:.0f} GB of RAM, {ram:.0f} are free")
        held = working_set(shape, how["checkpointing"], how.get("budget"), how["compiled"])
        swapped = weights * how["swap"] / 100
        if (wanted := weights - swapped + held) <= 0.95 * card:
            return case
        least = weights * SLOTS / shape.blocks + held
        if not how["swap"] and least <= 0.95 * card:
            return replace(case, name=f"{case.name}, swapped to fit", how=how | {"blocks": -1})
        return _without(case, f"needs about {min(wanted, least):.0f} GB, this card has {card:.0f}")

    def steps(self, model: str, side: int, rows: list[Case], **spec: Any) -> Group:
        """Training steps of one model. rows: in which TRAINED stands for what is not told."""
        shape = f"{model} {side}²" if side else model
        filled = (replace(c, how=TRAINED | {"side": side} | c.how) for c in rows)
        return Group({"kind": "steps", "model": model, **spec}, tuple(self.fitted(c, shape) for c in filled))


def _without(case: Case, reason: str) -> Case:
    return replace(case, missing=reason)


def working_set(shape: Shape, checkpointing: str, budget: float | None, compiled: bool) -> float:
    """GB beside the weights."""
    kept = KEPT["least" if budget is not None and budget < 0.1 else checkpointing]
    once = 0.0 if checkpointing == "none" else AT_ONCE
    eager = 1.0 if compiled or checkpointing == "full" else 1.6
    return BESIDE + shape.sequence * (shape.blocks * kept + once) * eager


# Smoke

SOME, ALL = 3, 6  # of the small model's six blocks
PLACES = ("page-locked", "staged", "file")
KEEP = {
    "none": {"checkpointing": "none"},
    "selective": {"checkpointing": "selective"},
    "full": {"checkpointing": "full"},
    "full with offload": {"checkpointing": "full", "offload_activations": True},
}
DELAYS = ("compute", "copy", "both")
STORED = ("fp8", "int8", "mxfp8")
MULTIPLIED = ("fp8", "int8 turned")  # as they are stored, by `products`
NATIVE, ASYNC = "native", "cudaMallocAsync"


def _smoke(device: str, room: _Room) -> Iterator[Group]:
    if device == "cpu":
        yield Group({"kind": "smoke", "allocator": ""}, tuple(_smoke_cases()))
        return
    yield _on_allocator(NATIVE, tuple(_smoke_cases()), 0.62)
    # ComfyUI sets this one by itself on CUDA 13.
    yield _on_allocator(ASYNC, tuple(case for case in _smoke_cases() if not case.how.get("common")), 1.0)


def _on_allocator(allocator: str, cases: tuple[Case, ...], share: float) -> Group:
    named = tuple(replace(c, name=f"{c.name}, {allocator}") for c in cases)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{allocator}"}
    return Group({"kind": "smoke", "allocator": allocator}, named, environment, share)


def _smoke_cases() -> Iterator[Case]:
    """In the order of worth; those marked `common` say nothing more under a second allocator."""

    def train(name: str, least: float = 2.0, **how: Any) -> Case:
        return Case(f"train: {name}", {"do": "train", "checkpointing": "none", **how}, 120.0, least)

    yield train("eager, none, run to run")
    for delayed, (keep, place) in product(DELAYS, (("none", "page-locked"), ("none", "staged"), ("none", "file"))):
        yield train(f"delay {delayed}, eager, {keep}, all swapped, {place}", delay=delayed, swap=ALL, place=place)
    for delayed, place in product(DELAYS, ("page-locked", "staged")):
        how = {"delay": delayed, "swap": ALL, "place": place, "prefetch_blocks": 2}
        yield train(f"delay {delayed}, eager, full with offload, 2 ahead, {place}", **how, **KEEP["full with offload"])
    yield train("delay both, compiled, full with offload, all swapped", 8.0, compiled=True, delay="both", swap=ALL,
                place="page-locked", **KEEP["full with offload"])  # fmt: skip
    yield train("delay both, compiled, none, all swapped, staged", 8.0, compiled=True, delay="both", swap=ALL,
                place="staged")  # fmt: skip
    yield from _samples()
    yield Case("a MODEL after a run", {"do": "after a run"}, 120.0, 3.0)
    for stored in STORED:
        yield train(f"{stored} stored, eager, none", stored=stored)
        yield train(f"{stored} stored, eager, full, all swapped", stored=stored, swap=ALL, place="page-locked",
                    checkpointing="full")  # fmt: skip
        yield train(f"{stored} stored, compiled, full, all swapped", 8.0, stored=stored, compiled=True, swap=ALL,
                    place="page-locked", checkpointing="full")  # fmt: skip
    for stored in MULTIPLIED:
        how = {"stored": stored, "products": stored.partition(" ")[0]}
        yield train(f"{stored} multiplied, eager, none", **how)
        yield train(f"{stored} multiplied, eager, full, all swapped", swap=ALL, place="page-locked",
                    **how | KEEP["full"])  # fmt: skip
        yield train(f"{stored} multiplied, compiled, full, all swapped", 8.0, compiled=True, swap=ALL,
                    place="page-locked", **how | KEEP["full"])  # fmt: skip
    yield train("eager, full, all swapped, evicted between the steps", evict=True, swap=ALL, place="page-locked",
                checkpointing="full")  # fmt: skip
    yield train("eager, full, evicted between the steps", evict=True, checkpointing="full")
    yield train("automatic", swap=-1, checkpointing="auto")
    yield train("batch 2, eager, none, all swapped", batch=2, swap=ALL, place="page-locked")
    yield train("dropout, eager, full, all swapped", dropout=0.3, swap=ALL, place="page-locked", checkpointing="full")
    yield train("torch's own choice of attention, eager, none, all swapped", attention="any", swap=ALL,
                place="page-locked")  # fmt: skip
    yield train("torch's own choice of attention, compiled, none", 8.0, attention="any", compiled=True)
    yield train("torch's own choice of attention, compiled, selective", 8.0, attention="any", compiled=True,
                checkpointing="selective")  # fmt: skip
    resident = [("nothing swapped", {})]
    swapped = [(f"{word} swapped, {place}", {"swap": count, "place": place})
               for (word, count), place in product((("all", ALL), ("some", SOME)), PLACES)]  # fmt: skip
    for compiled, (keep, options), (where, how) in product((False, True), KEEP.items(), resident + swapped):
        if not compiled and keep == "none" and not how:
            continue  # which is the reference
        name = f"{'compiled' if compiled else 'eager'}, {keep}, {where}"
        how = how | options | {"compiled": compiled, "common": where.startswith("some")}
        yield train(name, 6.0 if compiled else 2.0, **how)


def _samples() -> Iterator[Case]:
    def sample(name: str, least: float = 2.0, **how: Any) -> Case:
        return Case(f"sample: {name}", {"do": "sample", **how}, 180.0, least)

    yield sample("run to run")
    for place in PLACES:
        yield sample(f"all swapped, {place}", swap=ALL, place=place)
    yield sample("all swapped, 2 ahead, delay copy", swap=ALL, place="page-locked", prefetch=2, delay="copy")
    yield sample("some swapped", swap=SOME, place="page-locked")
    yield sample("automatic swap", swap=-1)
    yield sample("all swapped, with a LoRA", swap=ALL, place="page-locked", lora=True)
    yield sample("compiled", 8.0, mode="default")
    yield sample("compiled, all swapped", 8.0, mode="default", swap=ALL, place="page-locked")
    yield sample("compiled, all swapped, with a LoRA", 8.0, mode="default", swap=ALL, place="page-locked", lora=True)
    yield sample("compiled, scope stack", 8.0, mode="default", scope="stack")
    yield sample("compiled, scope model", 8.0, mode="default", scope="model")
    yield sample("compiled, reduce-overhead", 8.0, mode="reduce-overhead")
    yield sample("compiled, max-autotune-no-cudagraphs", 20.0, mode="max-autotune-no-cudagraphs", common=True)
    yield sample("compiled, max-autotune", 20.0, mode="max-autotune")


# Times


def _train(name: str, compiled: bool = True, limit: float = 200.0, least: float = 40.0, **how: Any) -> Case:
    return Case(name, {"compiled": compiled, **how}, limit, least)


def _rates(*names: str) -> Group:
    return Group({"kind": "rates"}, tuple(Case(f"rates: {name}", {"what": name}, 60.0, 3.0) for name in names))


def _flux(device: str, room: _Room) -> Iterator[Group]:
    yield _rates("memory", "products", "attention", "thin", "fp8")
    rows = [
        _train("flux, compiled, full", profiled=True),
        _train("flux, compiled, none", profiled=True, checkpointing="none"),
        _train("flux, compiled, selective", checkpointing="selective"),
        _train("flux, eager, full", compiled=False, profiled=True, least=25.0),
        _train("flux, compiled, selective, least budget", checkpointing="selective", budget=0.01),
        _train("flux, compiled, full, default Linears", targets="default"),
        _train("flux, compiled, none, cudnn attention", checkpointing="none", attention="cudnn"),
        _train("flux, eager, none", compiled=False, checkpointing="none", least=25.0),
    ]
    small = 512 if _too_small(room, "flux", rows[0]) else 0
    main = room.steps("flux", small, rows)
    less = [] if small else [_train("flux 512², compiled, none", checkpointing="none")]
    cases = main.cases + room.steps("flux", 512, less).cases
    yield replace(main, cases=cases, share=0.78)
    if room.size == "full":
        counted = Case("counted: flux", {"row": "flux", "side": small or 1024}, 150.0, 40.0)
        yield Group({"kind": "kernels"}, (counted,))


def _too_small(room: _Room, model: str, case: Case) -> bool:
    """No room for a picture of one megapixel, even with all blocks swapped."""
    return bool("GB, this card" in room.fitted(replace(case, how=TRAINED | case.how), model).missing)


def _swap(device: str, room: _Room) -> Iterator[Group]:
    yield _rates("link")
    rows = [_train("flux, compiled, full")]
    rows += [_train(f"flux, compiled, full, {percent} % swapped", swap=percent) for percent in (100, 50, 25)]
    rows += [
        _train("flux, compiled, full, 100 % swapped, 2 ahead", swap=100, prefetch=2),
        _train("flux, compiled, full, 100 % swapped, staged", swap=100, pin_memory="off"),
        _train("flux, compiled, full, 100 % swapped, offload", swap=100, offload_activations=True),
    ]
    side = 512 if _too_small(room, "flux", rows[1]) else 0
    yield replace(room.steps("flux", side, rows), share=0.7)
    # Both get the same part of the card: what is free is taken away until half of the model fits.
    for how in ("resident", "swap", "dynamic VRAM"):
        names = {"resident": "KSampler, resident", "swap": "KSampler, swap -1, half the model's memory",
                 "dynamic VRAM": "KSampler, ComfyUI's dynamic VRAM, half the model's memory"}  # fmt: skip
        case = room.fitted(Case(names[how], TRAINED | {"how": how, "compiled": True}, 150.0, 25.0), "flux")
        if device == "cpu" and how == "dynamic VRAM":
            case = _without(case, "needs an NVIDIA card")
        elif how == "resident" and case.how.get("blocks"):
            case = _without(case, "the model does not fit this card")
        yield Group({"kind": "beside", "model": "flux", "how": how}, (case,))


def _wan(device: str, room: _Room) -> Iterator[Group]:
    if room.size == "tiny":
        yield room.steps("wan", 0, [_train("wan, compiled, full", profiled=True)])
        return
    rows = [
        _train("wan 1.3B, compiled, full", profiled=True),
        _train("wan 1.3B, compiled, selective, least budget", checkpointing="selective", budget=0.01),
    ]
    yield room.steps("wan_1.3b", 0, rows)
    rows = [
        _train("wan 14B, compiled, full", limit=300.0, least=120.0, steps=2),
        _train("wan 14B, compiled, full, 50 % swapped", limit=300.0, least=100.0, steps=2, swap=50),
    ]
    yield room.steps("wan", 0, rows)


def _others(device: str, room: _Room) -> Iterator[Group]:
    rows = [
        _train("qwen_image, compiled, full", profiled=True),
        _train("qwen_image, compiled, none", checkpointing="none"),
        _train("qwen_image, compiled, full, 50 % swapped", swap=50),
    ]
    yield room.steps("qwen_image", 0, rows)
    rows = [
        _train("klein, compiled, none", checkpointing="none"),
        _train("klein, compiled, full"),
        _train("klein, eager, full", compiled=False, least=20.0),
    ]
    yield room.steps("flux2_klein", 0, rows)
    core = room.fitted(
        Case("klein, core's Train LoRA", TRAINED | {"compiled": False, "checkpointing": "none"}, 150.0, 30.0),
        "flux2_klein",
    )
    if core.how.get("blocks"):  # core's swaps nothing
        core = _without(core, "the model with all it keeps does not fit this card")
    yield Group({"kind": "beside", "model": "flux2_klein", "how": "core"}, (core,))
    if room.size == "full":
        rows = [
            _train("flux stored in fp8, compiled, full", stored="fp8"),
            _train("flux stored in fp8, fp8 products, compiled, full", stored="fp8", products="fp8", profiled=True),
        ]
        yield room.steps("flux", 0, rows, stored="fp8")
        low = {"base": "int8", "products": "int8"}
        yield room.steps("flux", 0, [_train("flux put into int8, int8 products, compiled, full", profiled=True, **low)])
