"""Crops of control images: as their results are cropped, so that what the edit left alone stays in its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from ..buckets.grids import RAGGED_EDGE, WHOLE_GRIDS, Grid, Placement, place
from ..buckets.planner import BucketPlan, plan_buckets
from ..folders.items import Item
from ..media.frames import Pixels

# Shapes (width / height) that differ by no more are one.
SAME_SHAPE = 0.01
# References are whole grids, of as many token counts as results have grids; beyond this many (or max_graphs, if that
# is more) a ragged edge, which is there to compile little, would compile too much.
MOST_COUNTS = 4


@dataclass(frozen=True)
class ControlPlan:
    """placements: a whole grid for each control picture of each item. notes: what is lost, and why if it need not."""

    placements: tuple[tuple[Placement, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Control:
    item: Item
    pixels: Pixels
    result: Placement

    @property
    def fits(self) -> bool:
        """Tell if it has the aspect of its result."""
        return abs(_shape(*self.pixels.size) - _shape(*self.item.pixels.size)) <= SAME_SHAPE

    @property
    def own_grid(self) -> Grid:
        return replace(self.result.grid, frames=1)


def place_controls(
    items: Sequence[Item],
    plan: BucketPlan,
    *,
    megapixels: float,
    control_megapixels: float,
    max_graphs: int,
) -> ControlPlan:
    """Place each control image on a whole grid.

    plan: of the results, at `megapixels`. A control picture with the shape of its result takes its result's grid, and
    so loses the same edges, if both are wanted at one size and that makes no more than MOST_COUNTS token counts (or
    max_graphs; with whole grids there are no more than the results have). All others share grids of one token count.
    """
    controls = [
        _Control(item, pixels, placement)
        for item, placement in zip(items, plan.placements, strict=True)
        for pixels in item.controls
    ]
    if not controls:
        return ControlPlan(((),) * len(items))
    fitting = [control for control in controls if control.fits]
    counts = len({control.own_grid.tokens for control in fitting})
    few = plan.fit == WHOLE_GRIDS or counts <= max(max_graphs, MOST_COUNTS)
    together = few and control_megapixels == megapixels
    others = iter(_plan([c for c in controls if not (together and c.fits)], control_megapixels, plan.pixels_per_token))
    placed = [
        place(c.pixels.size, c.own_grid, c.own_grid.tokens, plan.pixels_per_token)
        if together and c.fits
        else next(others)
        for c in controls
    ]
    each = iter(placed)
    placements = tuple(tuple(next(each) for _ in item.controls) for item in items)
    notes = [_crop_note(controls, placed)]
    if any(c.fits and not _alike(c.result.grid, p.grid) for c, p in zip(controls, placed, strict=True)):
        notes.append(_apart_note(plan, megapixels, control_megapixels, counts, few))
    return ControlPlan(placements, tuple(notes))


def _plan(controls: Sequence[_Control], megapixels: float, pixels_per_token: int) -> Sequence[Placement]:
    if not controls:
        return ()
    return plan_buckets(
        [control.pixels.size for control in controls],
        megapixels=megapixels,
        pixels_per_token=pixels_per_token,
        fit=WHOLE_GRIDS,
        weights=[control.item.repeats for control in controls],
    ).placements


def _shape(height: int, width: int) -> float:
    return log(width / height)


def _alike(grid: Grid, other: Grid) -> bool:
    return abs(_shape(grid.height, grid.width) - _shape(other.height, other.width)) <= SAME_SHAPE


def _crop_note(controls: Sequence[_Control], placed: Sequence[Placement]) -> str:
    repeats = [control.item.repeats for control in controls]
    mean = sum(p.crop * n for p, n in zip(placed, repeats, strict=True)) / sum(repeats)
    counts = " or ".join(map(str, sorted({p.tokens for p in placed})))
    return (
        f"Control pictures take {counts} tokens each. Lost to cropping: {mean:.2%} of one in the mean, "
        f"{max(p.crop for p in placed):.2%} at worst."
    )


def _apart_note(plan: BucketPlan, megapixels: float, control_megapixels: float, counts: int, few: bool) -> str:
    return (
        f"Control pictures are cropped otherwise than their results, which lose {plan.mean_crop:.2%} in the mean and "
        f"{plan.worst_crop:.2%} at worst, so what the edit leaves alone moves a little. To crop both alike, "
        f"{' and '.join(_remedies(megapixels, control_megapixels, counts, few))}."
    )


def _remedies(megapixels: float, control_megapixels: float, counts: int, few: bool) -> Iterator[str]:
    if control_megapixels != megapixels:
        yield f"set control_megapixels to {megapixels:g}, as megapixels is"
    if not few:
        yield f"choose fit {WHOLE_GRIDS} (with {RAGGED_EDGE} they would take {counts} token counts, each compiled)"
