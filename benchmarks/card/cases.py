"""The cases of each part, the most informative ones first, and whether each fits a card.

A case runs in the process of its group. Its memory is estimated from its model: the weights, and for each block a
multiple of one sequence of hidden vectors, as counted for blocks compiled for an H100 (`results/counted.md`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from card.case import Case, Group
from card.checks.cases import smoke
from card.nodes.cases import nodes

PARTS = ("smoke", "flux", "swap", "nodes", "wan", "others")
GB = 1e9


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
# Sequences that a block saves for backward, and that one block holds while it is recomputed.
KEPT, AT_ONCE = {"none": 25.0, "selective": 15.0, "least": 5.0, "full": 2.0}, 30.0
BESIDE = 3.0  # GB: LoRA with its optimizer, CUDA's context, workspaces
SLOTS = 3  # blocks on the card if all are swapped
SPARE_RAM = 3.0  # GB
TRAINED = {"rank": 16, "batch_size": 1, "targets": "all", "prefetch": 1, "swap": 0, "checkpointing": "full"}


def groups(part: str, device: str, size: str, machine: dict[str, Any]) -> list[Group]:
    """Return the groups of one part."""
    room = _Room(machine, size)
    checks: dict[str, Callable[[str], Iterator[Group]]] = {"smoke": smoke, "nodes": nodes}
    if part in checks:
        candidates = checks[part](device)
    else:
        timed = {"flux": _flux, "swap": _swap, "wan": _wan, "others": _other_models}[part](device, room)
        candidates = (replace(group, timed=True) for group in timed)
    return [group for group in candidates if group.cases]


# What fits


@dataclass(frozen=True)
class _Room:
    """Memory of the machine; a tiny model fits everywhere."""

    machine: dict[str, Any]
    size: str

    def fitted(self, case: Case, model: str) -> Case:
        """Return the case as it fits: resident, else with as many blocks swapped as necessary, else skipped."""
        if self.size != "full":
            return replace(case, least=5.0)
        shape, settings = SHAPES[model], case.settings
        card, ram = self.machine["memory_gib"] * 2**30 / GB, self.machine["ram_free_gib"] * 2**30 / GB
        weights = shape.weights * (0.5 if settings.get("stored") == "fp8" else 1.0)
        # A loader's model in addition to the weights that it is made from.
        if (needed := weights * (2 if "how" in settings else 1) + SPARE_RAM) > ram:
            return _mark_missing(case, f"needs about {needed:.0f} GB of RAM, {ram:.0f} are free")
        working = working_set(shape, settings["checkpointing"], settings.get("budget"), settings["compiled"])
        swapped = weights * settings["swap"] / 100
        if (needed := weights - swapped + working) <= 0.95 * card:
            return case
        least = weights * SLOTS / shape.blocks + working
        if not settings["swap"] and least <= 0.95 * card:
            return replace(case, name=f"{case.name}, swapped to fit", settings=settings | {"blocks": -1})
        return _mark_missing(case, f"needs about {min(needed, least):.0f} GB, this card has {card:.0f}")

    def steps(self, model: str, side: int, rows: list[Case], **spec: Any) -> Group:
        """Return a group of training steps of one model. rows: cases; TRAINED has the defaults of their settings."""
        shape = f"{model} {side}²" if side else model
        filled = (replace(c, settings=TRAINED | {"side": side} | c.settings) for c in rows)
        return Group({"kind": "steps", "model": model, **spec}, tuple(self.fitted(c, shape) for c in filled))


def _mark_missing(case: Case, reason: str) -> Case:
    return replace(case, missing=reason)


def working_set(shape: Shape, checkpointing: str, budget: float | None, compiled: bool) -> float:
    """Estimate the GB needed in addition to the weights."""
    sequences = KEPT["least" if budget is not None and budget < 0.1 else checkpointing]
    recomputed = 0.0 if checkpointing == "none" else AT_ONCE
    eager = 1.0 if compiled or checkpointing == "full" else 1.6
    return BESIDE + shape.sequence * (shape.blocks * sequences + recomputed) * eager


# Times


def _train(name: str, compiled: bool = True, limit: float = 200.0, least: float = 40.0, **settings: Any) -> Case:
    return Case(name, {"compiled": compiled, **settings}, limit, least)


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
    smaller = [] if small else [_train("flux 512², compiled, none", checkpointing="none")]
    cases = main.cases + room.steps("flux", 512, smaller).cases
    yield replace(main, cases=cases, share=0.78)
    if room.size == "full":
        counted = Case("counted: flux", {"row": "flux", "side": small or 1024}, 150.0, 40.0)
        yield Group({"kind": "kernels"}, (counted,))


def _too_small(room: _Room, model: str, case: Case) -> bool:
    """Return whether a picture of one megapixel does not fit, even with all blocks swapped."""
    return bool("GB, this card" in room.fitted(replace(case, settings=TRAINED | case.settings), model).missing)


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
    # Both get the same part of the card: free memory is taken until only half of the model fits.
    for mode in ("resident", "swap", "dynamic VRAM"):
        names = {"resident": "KSampler, resident", "swap": "KSampler, swap -1, half the model's memory",
                 "dynamic VRAM": "KSampler, ComfyUI's dynamic VRAM, half the model's memory"}  # fmt: skip
        case = room.fitted(Case(names[mode], TRAINED | {"how": mode, "compiled": True}, 150.0, 25.0), "flux")
        if device == "cpu" and mode == "dynamic VRAM":
            case = _mark_missing(case, "needs an NVIDIA card")
        elif mode == "resident" and case.settings.get("blocks"):
            case = _mark_missing(case, "the model does not fit this card")
        yield Group({"kind": "beside", "model": "flux", "how": mode}, (case,))


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


def _other_models(device: str, room: _Room) -> Iterator[Group]:
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
    if core.settings.get("blocks"):  # core's swaps nothing
        core = _mark_missing(core, "the model with all it keeps does not fit this card")
    yield Group({"kind": "beside", "model": "flux2_klein", "how": "core"}, (core,))
    if room.size == "full":
        rows = [
            _train("flux stored in fp8, compiled, full", stored="fp8"),
            _train(
                "flux stored in fp8, fp8 products, compiled, full", stored="fp8", low_bit_matmul="fp8", profiled=True
            ),
        ]
        yield room.steps("flux", 0, rows, stored="fp8")
    rows = [
        _train(f"flux put into {low}, {low} products, compiled, full", profiled=True, quantize=low, low_bit_matmul=low)
        for low in ("fp8", "int8")
    ]
    yield room.steps("flux", 0, rows)
