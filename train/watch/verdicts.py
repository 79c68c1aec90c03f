"""Verdicts on pictures by their relative loss: which learn, which resist, which pull away from held-out ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median
from typing import Any

LEARNS = "learns"
RESISTS = "resists"
PULLS_AWAY = "pulls away"
VERDICTS = (LEARNS, RESISTS, PULLS_AWAY)
OUTLIER = 3.0  # spreads from the median
LEAST_SPREAD = 0.005  # of relative losses: smaller differences are noise
TINY = 1e-12


@dataclass(frozen=True)
class PictureLoss:
    """Losses of one picture.

    name: its file.
    losses: loss with the LoRA at each noise level.
    base: loss of the base model at each of them, with the same noise.
    step: step of the measurement.
    earlier: (step, relative loss) of earlier ones.
    """

    name: str
    losses: tuple[float, ...]
    base: tuple[float, ...]
    step: int
    earlier: tuple[tuple[int, float], ...] = ()

    @property
    def relative(self) -> float:
        """Loss relative to the base model's, the geometric mean over the levels: 1 is no change, below 1 is learnt."""
        return relative_loss(self.losses, self.base)


def relative_loss(losses: Sequence[float], base: Sequence[float]) -> float:
    """Compute the geometric mean of the ratios of the losses."""
    return exp(fmean(log(max(a, TINY) / max(b, TINY)) for a, b in zip(losses, base, strict=True)))


def judge(trained: Sequence[PictureLoss], held_out: Sequence[PictureLoss]) -> dict[str, Any]:
    """Rank the pictures that were measured at the last step, and give each a verdict.

    resists: its relative loss is not below 1 although that of most is, or far above the others' (OUTLIER spreads).
    pulls away: its relative loss is far below the others' and below that of held-out pictures: it is learnt by heart.
    learns: all others.

    The spread is the median distance from the median, times 1.4826 as for a normal distribution.

    Returns plain values: `step`, `median`, `held_out` (mean relative loss of held-out pictures, None without),
    `pictures` (best first, each with `file`, `relative`, `loss`, `base_loss`, `verdict`, `earlier`) and `leave_out`
    (the files that resist, the worst first).
    """
    step = max(picture.step for picture in trained)
    last = sorted((p for p in trained if p.step == step), key=lambda p: (p.relative, p.name))
    middle = median(p.relative for p in last)
    spread = max(LEAST_SPREAD, 1.4826 * median(abs(p.relative - middle) for p in last))
    measured = [p.relative for p in held_out if p.step == step]
    unseen = fmean(measured) if measured else None

    def verdict(relative: float) -> str:
        if relative > middle + OUTLIER * spread or middle < 1 <= relative:
            return RESISTS
        if unseen is not None and relative < min(unseen, middle - OUTLIER * spread):
            return PULLS_AWAY
        return LEARNS

    pictures = [
        {
            "file": p.name,
            "relative": p.relative,
            "loss": fmean(p.losses),
            "base_loss": fmean(p.base),
            "verdict": verdict(p.relative),
            "earlier": [list(point) for point in p.earlier],
        }
        for p in last
    ]
    resisting = [str(picture["file"]) for picture in reversed(pictures) if picture["verdict"] == RESISTS]
    return {"step": step, "median": middle, "held_out": unseen, "pictures": pictures, "leave_out": resisting}


def is_report(report: Any) -> bool:
    """Test that a value read from a file has what `judge` returns, and the number of pictures as `of`."""
    if not isinstance(report, dict):
        return False
    numbers = [report.get(name) for name in ("median", "step", "of")]
    if report.get("held_out") is not None:
        numbers.append(report["held_out"])
    return (
        all(map(_is_number, numbers))
        and _is_list(report.get("leave_out"), _is_text)
        and _is_list(report.get("pictures"), _is_ranked)
        and bool(report["pictures"])
    )


def _is_ranked(picture: Any) -> bool:
    return (
        isinstance(picture, dict)
        and _is_text(picture.get("file"))
        and picture.get("verdict") in VERDICTS
        and _is_number(picture.get("relative"))
        and _is_list(picture.get("earlier"), _is_point)
    )


def _is_list(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_entry, value))


def _is_point(value: Any) -> bool:
    """Test for a (step, relative loss)."""
    return _is_list(value, _is_number) and len(value) == 2


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
