"""Products of a run: which Linears of the blocks multiply in low precision, forward and back, and why others do not."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from ...common.text import joined, shortlist
from ...compile.settings import CompileSettings
from ...memory.weights.cards import card_of, fits, obstacle, preferred
from ...memory.weights.products import AUTO, FULL, LEAST_ROWS, MULTIPLE, ErrorMeter, Products
from ...models.family import Block
from ...models.layers.lora_linear import LoraLayer, LoraLinear

INDUCTOR = CompileSettings()
SIDES = ("forward", "backward")
# The largest error of a layer's product, as a part of the full one's norm: what real layers lie below by a half or more
# where a product suits them, and above by a factor where a few large channels take the steps of a row.
LIMIT = 0.06
Blocks = Sequence[tuple[str, Block]]
Place = tuple[str, str]
"""Kind of a block, and name of a layer inside it."""


class _Choice(NamedTuple):
    """The products of a layer.

    block, layer: kind of its block, and its name inside it.
    forward, backward: FULL, INT8 or FP8.
    why: of one that multiplies in full, in a direction or in both.
    """

    block: str
    layer: str
    forward: str
    backward: str
    why: str = ""


class BlockProducts:
    """Chooses the products of the Linears in a run's blocks.

    A Linear can multiply in low precision only in what it is stored in: nothing is stored a second time. Of those that
    can, the first micro-batches of a run show which lose too much by it. The decision is made once for the layers of
    one name in all blocks of a kind, which share their graphs, by the worst of them.

    asked: the option, FULL, INT8, FP8 or AUTO.
    tried: the products that the device has of what is asked, the fastest first.
    missing: why there are none.
    full: the directions, of SIDES, in which layers lose too much; None before that is decided.
    errors: of the worst layer of each place, forward and back, where this run has measured them.
    choices: how often each was made.
    micro_batches: by which layers are measured.
    """

    micro_batches: ClassVar[int] = 4

    def __init__(
        self,
        asked: str,
        device: torch.device,
        dtype: torch.dtype,
        kept: Mapping[str, Any] | None = None,
        compile_settings: CompileSettings | None = INDUCTOR,
    ):
        """kept: the decision in the state that the run goes on from, see `kept`. compile_settings: of the blocks; None
        runs them eagerly."""
        self.asked, self.device = asked, device
        self.tried: tuple[str, ...] = ()
        self.missing = ""
        self.full: dict[Place, tuple[str, ...]] | None = None
        self.errors: dict[Place, tuple[float, float]] = {}
        self.choices: Counter[_Choice] = Counter()
        if asked == AUTO:
            fuses = compile_settings is not None and compile_settings.backend == INDUCTOR.backend
            self.tried, self.missing = preferred(card_of(device), dtype, fuses)
        elif asked != FULL:
            self.missing = obstacle(asked, card_of(device), dtype) or ""
            self.tried = () if self.missing else (asked,)
        if kept and kept["asked"] == asked:
            self.adopt(kept)

    @property
    def undecided(self) -> bool:
        """True where layers multiply in low precision of which it is not known yet what they lose."""
        return self.full is None and any(choice[2:4] != (FULL, FULL) for choice in self.choices)

    def kept(self) -> dict[str, Any]:
        """Return the decision for the run's states, by which a run that goes on multiplies alike; empty without one."""
        if self.full is None:
            return {}
        return {"asked": self.asked, "full": [[*place, *sides] for place, sides in self.full.items()]}

    def adopt(self, kept: Mapping[str, Any]) -> None:
        """Take the decision of another run or device, as `kept` gives it."""
        self.full = {(block, layer): tuple(sides) for block, layer, *sides in kept["full"]}

    def set(self, blocks: Blocks) -> None:
        """Let the Linears multiply by what is chosen for each."""
        self.choices.clear()
        for _, block in blocks:
            for name, layer in block.linears().items():
                products, why = self._choose((block.kind, name), layer)
                forward, backward = (FULL, FULL) if products is None else products[:2]
                self.choices[_Choice(block.kind, name, forward, backward, why)] += 1
                if isinstance(layer, LoraLinear):
                    layer.multiply_in(products)

    @contextmanager
    def switched_off(self, blocks: Blocks) -> Iterator[None]:
        """Multiply in full within the context. The blocks' structures stay what they are for their graphs."""
        linears = [x for _, block in blocks for x in block.linears().values() if isinstance(x, LoraLinear)]
        before = [linear.products for linear in linears]
        try:
            for linear in linears:
                linear.products = None
            yield
        finally:
            for linear, products in zip(linears, before, strict=True):
                linear.products = products

    @contextmanager
    def measured(self, blocks: Blocks) -> Iterator[None]:
        """Multiply in full within the context, measure what the products would give, and decide by that at its end."""
        meters: list[tuple[Place, LoraLinear, ErrorMeter]] = []
        for _, block in blocks:
            for name, layer in block.linears().items():
                if isinstance(layer, LoraLinear) and layer.products is not None:
                    layer.meter = ErrorMeter(self.device)
                    meters.append(((block.kind, name), layer, layer.meter))
        try:
            yield
        finally:
            for _, layer, _ in meters:
                layer.meter = None
        worst: dict[Place, tuple[float, float]] = {}
        for place, _, meter in meters:
            found = (error if error == error else math.inf for error in meter.errors())
            forward, backward = (max(pair) for pair in zip(found, worst.get(place, (0.0, 0.0)), strict=True))
            worst[place] = forward, backward
        self.errors = worst
        over = {
            place: tuple(side for side, error in zip(SIDES, errors, strict=True) if error > LIMIT)
            for place, errors in worst.items()
        }
        self.full = {place: sides for place, sides in over.items() if sides}

    def _choose(self, place: Place, layer: LoraLayer) -> tuple[Products | None, str]:
        """Return the products of a layer, and why it multiplies in full: in both directions (None), or in one."""
        if not self.tried:
            return None, self.missing
        if not isinstance(layer, LoraLinear):
            return None, "a convolution"
        frozen = layer.frozen()
        found = next((products for one in self.tried if (products := frozen.low_precision(one))), None)
        if found is None:
            return None, f"stored as {frozen.format_name}"
        if not fits(frozen.shape):
            return None, f"a side is not a multiple of {MULTIPLE}"
        sides = (self.full or {}).get(place, ())
        if not sides:
            return found, ""
        forward, backward = (FULL if side in sides else getattr(found, side) for side in SIDES)
        found = found._replace(forward=forward, backward=backward)
        return (None if found[:2] == (FULL, FULL) else found), self._loss(place, sides)

    def _loss(self, place: Place, sides: Sequence[str]) -> str:
        if place not in self.errors:
            return f"too inexact in the {joined([_going(side) for side in sides])} pass when the run started"
        off = (f"{self.errors[place][SIDES.index(side)]:.2g} going {_going(side)}" for side in sides)
        return f"off by {joined(list(off))}"

    def notes(self) -> Iterator[str]:
        """Yield the line that says what multiplies how; none where nothing is asked for."""
        if self.asked == FULL:
            return
        if not self.tried:
            yield f"products is {self.asked}, but all layers multiply in full: {self.missing}."
            return
        counts: Counter[str] = Counter()
        full: dict[str, list[str]] = {}
        for choice, count in self.choices.items():
            low = [side for side in SIDES if getattr(choice, side) != FULL]
            if low:
                only = "" if len(low) == 2 else f" going {_going(low[0])} only"
                counts[f"in {getattr(choice, low[0])}{only}"] += count
            if choice.why:
                full.setdefault(choice.why, []).append(f"{choice.layer} of {choice.block}")
        left = "; ".join(f"{shortlist(names)} ({why})" for why, names in full.items())
        if not counts:
            mend = ""
            if not self.full:
                mend = (
                    f"; use a model stored in {' or '.join(self.tried)} (base converts a 16-bit one), or set products "
                    "to full"
                )
            yield f"products is {self.asked}, but all layers multiply in full: {left}{mend}."
            return
        first, *more = sorted(counts, key=len)
        told = f"{counts[first]} of the {self.choices.total()} layers of the blocks multiply {first}"
        told += "".join(f" and {counts[how]} {how}" for how in more)
        rest = f" In full: {left}." if left else ""
        yield f"products is {self.asked}: {told}, where they see {LEAST_ROWS} tokens or more.{rest}"

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary: of each layer of each kind of block its products, the errors that this run
        has measured of them, and how many there are; none where nothing is asked for."""
        if self.asked == FULL:
            return {}
        rows = []
        for choice, count in self.choices.items():
            row: dict[str, Any] = {name: value for name, value in choice._asdict().items() if value}
            for side, error in zip(SIDES, self.errors.get(choice[:2], ()), strict=False):
                row[f"{side}_error"] = round(error, 5) if math.isfinite(error) else "not finite"
            rows.append(row | {"count": count})
        return {"products": {"asked": self.asked, "layers": rows}}


def _going(side: str) -> str:
    return {"forward": "forward", "backward": "back"}[side]
