"""Matmul precision of a run: the block Linears in low precision, forward and backward, and why others are not."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from ...common.text import joined, shortlist
from ...compile.settings import CompileSettings
from ...memory.low_bit.devices import card_of, fits, obstacle, preferred
from ...memory.low_bit.error_meter import ErrorMeter
from ...memory.low_bit.matmul import AUTO, FULL, LEAST_ROWS, MULTIPLE, OFF, LowBitMatmul
from ...models.family import Block
from ...models.layers.lora_linear import LoraLayer, LoraLinear

INDUCTOR = CompileSettings()
SIDES = ("forward", "backward")
# Largest error of a layer's matmul, relative to the norm of the full-precision one. Real layers are below it by a half
# or more if low precision suits them, and above by a factor if a few large channels take the steps of a row.
LIMIT = 0.06
Blocks = Sequence[tuple[str, Block]]
Place = tuple[str, str]
"""Kind of a block, and name of a layer inside it."""


class _Choice(NamedTuple):
    """Matmul precision of a layer.

    block: kind of its block.
    layer: its name inside the block.
    forward: FULL, INT8 or FP8 in the forward.
    backward: FULL, INT8 or FP8 in the backward.
    reason: for full precision in one direction or both; empty if both are low.
    """

    block: str
    layer: str
    forward: str
    backward: str
    reason: str = ""


class LowBitPolicy:
    """Choice of the matmul precision of the Linears in a run's blocks.

    A Linear can run a low-precision matmul only in the format that it is stored in: nothing is stored twice. For those
    that can, the first micro-batches of a run show which lose too much by it. The decision is made once for the layers
    of one name in all blocks of a kind, which share their graphs, by the worst of them.

    option: OFF, INT8, FP8 or AUTO.
    precisions: low precisions of the option that the device supports, the fastest first.
    missing: reason why there are none.
    full: the directions, of SIDES, in which layers lose too much; None before the decision.
    errors: errors of the worst layer of each place, forward and backward, if this run has measured them.
    choices: count of each choice.
    micro_batches: number of micro-batches to measure layers on.
    """

    micro_batches: ClassVar[int] = 4

    def __init__(
        self,
        option: str,
        device: torch.device,
        dtype: torch.dtype,
        decision: Mapping[str, Any] | None = None,
        compile_settings: CompileSettings | None = INDUCTOR,
    ):
        """decision: that of the state that the run resumes from, see the method `decision`. compile_settings: of the
        blocks; None runs them eagerly."""
        self.option, self.device = option, device
        self.precisions: tuple[str, ...] = ()
        self.missing = ""
        self.full: dict[Place, tuple[str, ...]] | None = None
        self.errors: dict[Place, tuple[float, float]] = {}
        self.choices: Counter[_Choice] = Counter()
        if option == AUTO:
            fuses = compile_settings is not None and compile_settings.backend == INDUCTOR.backend
            self.precisions, self.missing = preferred(card_of(device), dtype, fuses)
        elif option != OFF:
            self.missing = obstacle(option, card_of(device), dtype) or ""
            self.precisions = () if self.missing else (option,)
        if decision and decision["asked"] == option:
            self.adopt(decision)

    @property
    def undecided(self) -> bool:
        """True if layers have low-precision matmuls whose errors are not measured yet."""
        return self.full is None and any(choice[2:4] != (FULL, FULL) for choice in self.choices)

    def decision(self) -> dict[str, Any]:
        """Return the decision for the run's states, so that a resumed run has the same matmuls; empty without one."""
        if self.full is None:
            return {}
        return {"asked": self.option, "full": [[*place, *sides] for place, sides in self.full.items()]}

    def adopt(self, decision: Mapping[str, Any]) -> None:
        """Adopt the decision of another run or rank, as returned by `decision`."""
        self.full = {(block, layer): tuple(sides) for block, layer, *sides in decision["full"]}

    def set(self, blocks: Blocks) -> None:
        """Set the chosen matmul precision on each Linear."""
        self.choices.clear()
        for _, block in blocks:
            for name, layer in block.linears().items():
                low_bit, reason = self._choose((block.kind, name), layer)
                forward, backward = (FULL, FULL) if low_bit is None else low_bit[:2]
                self.choices[_Choice(block.kind, name, forward, backward, reason)] += 1
                if isinstance(layer, LoraLinear):
                    layer.set_low_bit(low_bit)

    @contextmanager
    def switched_off(self, blocks: Blocks) -> Iterator[None]:
        """Run full-precision matmuls inside the context. The blocks' structures, which key their graphs, stay."""
        linears = [x for _, block in blocks for x in block.linears().values() if isinstance(x, LoraLinear)]
        previous = [linear.low_bit for linear in linears]
        try:
            for linear in linears:
                linear.exchange_low_bit(None)
            yield
        finally:
            for linear, low_bit in zip(linears, previous, strict=True):
                linear.exchange_low_bit(low_bit)

    @contextmanager
    def measured(self, blocks: Blocks) -> Iterator[None]:
        """Run full-precision matmuls inside the context, measure the low-precision errors, and decide at its end."""
        meters: list[tuple[Place, LoraLinear, ErrorMeter]] = []
        for _, block in blocks:
            for name, layer in block.linears().items():
                if isinstance(layer, LoraLinear) and layer.low_bit is not None:
                    meters.append(((block.kind, name), layer, layer.start_meter(self.device)))
        try:
            yield
        finally:
            for _, layer, _ in meters:
                layer.stop_meter()
        worst: dict[Place, tuple[float, float]] = {}
        for place, _, meter in meters:
            meter_errors = (error if error == error else math.inf for error in meter.errors())
            forward, backward = (max(pair) for pair in zip(meter_errors, worst.get(place, (0.0, 0.0)), strict=True))
            worst[place] = forward, backward
        self.errors = worst
        sides_over_limit = {
            place: tuple(side for side, error in zip(SIDES, errors, strict=True) if error > LIMIT)
            for place, errors in worst.items()
        }
        self.full = {place: sides for place, sides in sides_over_limit.items() if sides}

    def _choose(self, place: Place, layer: LoraLayer) -> tuple[LowBitMatmul | None, str]:
        """Return the matmuls of a layer (None is full in both directions), and the reason for full precision."""
        if not self.precisions:
            return None, self.missing
        if not isinstance(layer, LoraLinear):
            return None, "a convolution"
        frozen = layer.frozen()
        choice = next((low_bit for precision in self.precisions if (low_bit := frozen.low_bit_matmul(precision))), None)
        if choice is None:
            return None, f"stored as {frozen.format_name}"
        if not fits(frozen.shape):
            return None, f"a side is not a multiple of {MULTIPLE}"
        sides = (self.full or {}).get(place, ())
        if not sides:
            return choice, ""
        forward, backward = (FULL if side in sides else getattr(choice, side) for side in SIDES)
        choice = choice._replace(forward=forward, backward=backward)
        return (None if choice[:2] == (FULL, FULL) else choice), self._loss(place, sides)

    def _loss(self, place: Place, sides: Sequence[str]) -> str:
        if place not in self.errors:
            return f"too inexact in the {joined([_going(side) for side in sides])} pass when the run started"
        error_texts = (f"{self.errors[place][SIDES.index(side)]:.2g} going {_going(side)}" for side in sides)
        return f"off by {joined(list(error_texts))}"

    def notes(self) -> Iterator[str]:
        """Yield a line on the layers' matmul precision; none if the option is OFF."""
        if self.option == OFF:
            return
        if not self.precisions:
            yield f"low_bit_matmul is {self.option}, but all layers multiply in full: {self.missing}."
            return
        counts: Counter[str] = Counter()
        full: dict[str, list[str]] = {}
        for choice, count in self.choices.items():
            low = [side for side in SIDES if getattr(choice, side) != FULL]
            if low:
                direction = "" if len(low) == 2 else f" going {_going(low[0])} only"
                counts[f"in {getattr(choice, low[0])}{direction}"] += count
            if choice.reason:
                full.setdefault(choice.reason, []).append(f"{choice.layer} of {choice.block}")
        in_full = "; ".join(f"{shortlist(names)} ({reason})" for reason, names in full.items())
        if not counts:
            advice = ""
            if not self.full:
                advice = (
                    f"; use a model stored in {' or '.join(self.precisions)} (quantize converts a 16-bit one), or set "
                    "low_bit_matmul to off"
                )
            yield f"low_bit_matmul is {self.option}, but all layers multiply in full: {in_full}{advice}."
            return
        first, *remaining = sorted(counts, key=len)
        counts_text = f"{counts[first]} of the {self.choices.total()} layers of the blocks multiply {first}"
        counts_text += "".join(f" and {counts[kind]} {kind}" for kind in remaining)
        rest = f" In full: {in_full}." if in_full else ""
        yield f"low_bit_matmul is {self.option}: {counts_text}, where they see {LEAST_ROWS} tokens or more.{rest}"

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary: for each layer of each block type its matmul precision, the errors that
        this run has measured, and the count; empty if the option is OFF."""
        if self.option == OFF:
            return {}
        rows = []
        for choice, count in self.choices.items():
            values = choice._asdict()
            values["why"] = values.pop("reason")
            row: dict[str, Any] = {name: value for name, value in values.items() if value}
            for side, error in zip(SIDES, self.errors.get(choice[:2], ()), strict=False):
                row[f"{side}_error"] = round(error, 5) if math.isfinite(error) else "not finite"
            rows.append(row | {"count": count})
        return {"low_bit_matmul": {"asked": self.option, "layers": rows}}


def _going(side: str) -> str:
    return {"forward": "forward", "backward": "back"}[side]
