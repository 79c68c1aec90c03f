"""Crops of control images, aligned with the crops of their targets so that unedited parts stay in place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

from ..buckets.grids import RAGGED_EDGE, WHOLE_GRIDS, Grid, Placement, place
from ..buckets.planner import BucketPlan, plan_buckets
from ..folders.items import Item
from ..media.frames import Pixels

# Log aspects (width / height) that differ by no more than this count as equal: resizing rounds sides to pixels.
SAME_SHAPE = 0.01
# A control image on the grid of its target has that grid's whole token count. With a ragged edge each grid has its own,
# so beyond this many counts (or max_graphs, if that is more) there would be too many graphs to compile.
MOST_COUNTS = 4


@dataclass(frozen=True)
class ControlPlan:
    """Result of `place_controls`.

    placements: a whole grid for each control image of each item.
    notes: crop loss, and how to avoid crops that differ from those of the targets.
    """

    placements: tuple[tuple[Placement, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Control:
    """One control image of an item.

    item: image or video that it belongs to.
    pixels: the control image.
    result: placement of the item.
    """

    item: Item
    pixels: Pixels
    result: Placement

    @property
    def fits(self) -> bool:
        """True if the control image has the aspect of its target."""
        return abs(_shape(*self.pixels.size) - _shape(*self.item.pixels.size)) <= SAME_SHAPE

    @property
    def own_grid(self) -> Grid:
        """Grid of the target, with one frame."""
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

    plan: plan of the target images, at `megapixels`.
    control_megapixels: requested area of control images.

    A control image with the aspect of its target takes the target's grid, and so loses the same edges, if both sizes
    are equal and that makes at most MOST_COUNTS token counts (or max_graphs; with whole grids there are no more than
    the targets have). All others share grids of one token count.
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
    within_limit = plan.fit == WHOLE_GRIDS or counts <= max(max_graphs, MOST_COUNTS)
    together = within_limit and control_megapixels == megapixels
    other_placements = iter(
        _plan([c for c in controls if not (together and c.fits)], control_megapixels, plan.pixels_per_token)
    )
    placed = [
        place(c.pixels.size, c.own_grid, c.own_grid.tokens, plan.pixels_per_token)
        if together and c.fits
        else next(other_placements)
        for c in controls
    ]
    remaining = iter(placed)
    placements = tuple(tuple(next(remaining) for _ in item.controls) for item in items)
    notes = [_crop_note(controls, placed)]
    if any(c.fits and not _alike(c.result.grid, p.grid) for c, p in zip(controls, placed, strict=True)):
        notes.append(_apart_note(plan, megapixels, control_megapixels, counts, within_limit))
    return ControlPlan(placements, tuple(notes))


def _plan(controls: Sequence[_Control], megapixels: float, pixels_per_token: int) -> Sequence[Placement]:
    """Plan control images separately from their targets, on whole grids of one token count."""
    if not controls:
        return ()
    return plan_buckets(
        [control.pixels.size for control in controls],
        megapixels=megapixels,
        pixels_per_token=pixels_per_token,
        fit=WHOLE_GRIDS,
        weights=[control.item.showings_per_epoch for control in controls],
    ).placements


def _shape(height: int, width: int) -> float:
    """Compute the log aspect."""
    return log(width / height)


def _alike(grid: Grid, other: Grid) -> bool:
    return abs(_shape(grid.height, grid.width) - _shape(other.height, other.width)) <= SAME_SHAPE


def _crop_note(controls: Sequence[_Control], placed: Sequence[Placement]) -> str:
    weights = [control.item.showings_per_epoch for control in controls]
    mean = sum(p.crop * weight for p, weight in zip(placed, weights, strict=True)) / sum(weights)
    counts = " or ".join(map(str, sorted({p.tokens for p in placed})))
    return (
        f"Control pictures take {counts} tokens each. Cropping cuts off {mean:.2%} on average, "
        f"{max(p.crop for p in placed):.2%} at worst."
    )


def _apart_note(plan: BucketPlan, megapixels: float, control_megapixels: float, counts: int, within_limit: bool) -> str:
    return (
        f"Control pictures are cropped differently from their results (which lose {plan.mean_crop:.2%} on average and "
        f"{plan.worst_crop:.2%} at worst), so the parts that an edit doesn't change shift a little. To crop both the "
        f"same way, {' and '.join(_remedies(megapixels, control_megapixels, counts, within_limit))}."
    )


def _remedies(megapixels: float, control_megapixels: float, counts: int, within_limit: bool) -> Iterator[str]:
    if control_megapixels != megapixels:
        yield f"set control_megapixels to {megapixels:g}, like megapixels"
    if not within_limit:
        yield f"choose fit {WHOLE_GRIDS} (with {RAGGED_EDGE} they would take {counts} token counts, each compiled)"
