"""Plot and text description of the bucket plan."""

from collections import Counter
from collections.abc import Sequence
from math import log

from PIL import Image

from ...common.canvas import FAINT, INK, SOFT, Canvas, Colour
from ...common.text import quantity
from .equal_area import MEGAPIXEL
from .grids import Grid
from .planner import BucketPlan

WIDTH, HEIGHT = 1024, 576
TEXT = 30  # pixels: on a node of 400 the plot is a third as large
LOST = (197, 74, 62)
BUCKET_COLOURS = ((43, 108, 176), (217, 119, 6), (47, 133, 90), (128, 90, 213), (184, 50, 128), (44, 122, 123))
ASPECT_TICKS = ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (8, 1))
HISTOGRAM = (40, 122, 560, 252)
CROPS = (690, 122, 984, 252)
GRIDS = (40, 364, 984, 568)
MOST_GRIDS = 7


def describe_plan(plan: BucketPlan) -> str:
    """Describe the plan in a few lines: token counts, pixels, grids, crop, and comparison with equal-area buckets."""
    lines = [_describe_count(plan, tokens) for tokens in plan.token_counts]
    lines.append(describe_cropping(plan))
    lines.append(
        f"Ordinary buckets would crop {plan.equal_area_crop:.2%} on average, with "
        f"{quantity(plan.equal_area_counts, 'token count')} to compile for instead of {len(plan.token_counts)}."
    )
    if plan.upscaled:
        lines.append(f"{_enlarged(plan)} smaller than the training size and will be enlarged.")
    return "\n".join(lines)


def _describe_count(plan: BucketPlan, tokens: int) -> str:
    """Describe a token count: its pixels, and the images that have it, on how many grids."""
    grids = [placement.grid for placement in plan.placements if placement.tokens == tokens]
    frames = sorted({grid.frames for grid in grids})
    clips = frames != [1]
    shapes = " or ".join("one frame" if t == 1 else f"{t} latent frames of {tokens // t}" for t in frames)
    megapixels = " and ".join(f"{_megapixels(plan, tokens, t):.2f}" for t in frames)
    return (
        f"{tokens} tokens{f', as {shapes}' if clips else ''} ({megapixels} megapixels; {plan.wanted_tokens} tokens "
        f"{'a frame ' if clips else ''}asked for): {_contents(grids)} on {quantity(len(set(grids)), 'grid')}."
    )


def _enlarged(plan: BucketPlan) -> str:
    """Count the images below the training size, with their verb."""
    if all(placement.grid.frames == 1 for placement in plan.placements):
        return quantity(plan.upscaled, "picture is", "pictures are")
    return quantity(plan.upscaled, "picture or clip is", "pictures or clips are")


def describe_cropping(plan: BucketPlan) -> str:
    """Describe how much of the images the plan crops, in one sentence."""
    return f"{plan.mean_crop:.2%} of a picture is cropped on average, {plan.worst_crop:.2%} at most."


def plot_plan(plan: BucketPlan, sizes: Sequence[tuple[int, int]]) -> Image.Image:
    """Plot the plan as an RGB image: aspects of the data set, crop loss of each image, grids and their use.

    sizes: (height, width) in pixels, as given to `plan_buckets`.
    """
    assert len(sizes) == len(plan.placements)
    canvas = Canvas(WIDTH, HEIGHT)
    counts = " / ".join(str(tokens) for tokens in plan.token_counts)
    grids = [placement.grid for placement in plan.placements]
    title = f"{counts} tokens: {_contents(grids)} on {quantity(len(set(grids)), 'grid')}"
    canvas.text(40, 12, title, 36, room=WIDTH - 80)
    _plot_histogram(canvas, plan, sizes)
    _plot_crops(canvas, plan)
    _plot_grids(canvas, plan)
    return canvas.finish()


def _plot_histogram(canvas: Canvas, plan: BucketPlan, sizes: Sequence[tuple[int, int]]) -> None:
    """Plot the aspect ratios on a log axis, coloured by bucket, with the grids as marks under the axis."""
    left, top, right, bottom = HISTOGRAM
    canvas.text(left, top - 54, "Shapes", TEXT)
    aspects = [log(width / height) for height, width in sizes]
    reach = max(log(2.2), 1.06 * max(abs(aspect) for aspect in aspects))
    bins = 41
    bars = Counter(
        (min(bins - 1, int((aspect + reach) / (2 * reach) * bins)), plan.token_counts.index(placement.tokens))
        for aspect, placement in zip(aspects, plan.placements, strict=True)
    )
    tallest = max(sum(bars[bin, bucket] for bucket in range(len(plan.token_counts))) for bin in range(bins))
    bar_width = (right - left) / bins
    for bin in range(bins):
        base = float(bottom)
        for bucket in range(len(plan.token_counts)):
            height = bars[bin, bucket] / tallest * (bottom - top)
            if height:
                x = left + bin * bar_width
                canvas.box(x + 0.5, base - max(height, 1), x + bar_width - 0.5, base, fill=_colour(bucket))
                base -= height
    canvas.line([(left, bottom), (right, bottom)], SOFT, 2)
    for grid, bucket in sorted(_use(plan), key=lambda use: use[0].width / use[0].height):
        x = left + (log(grid.width / grid.height) / reach + 1) / 2 * (right - left)
        canvas.line([(x, bottom + 4), (x, bottom + 16)], _colour(bucket), 4)
    last = -100.0
    for width, height in ASPECT_TICKS:
        x = left + (log(width / height) / reach + 1) / 2 * (right - left)
        if left + 20 <= x <= right - 20 and x - last >= 80:
            canvas.text(x, bottom + 20, f"{width}:{height}", TEXT, SOFT, "ma")
            last = x
    canvas.text(right, top - 54, f"most {tallest:,}", TEXT, SOFT, "ra")


def _plot_crops(canvas: Canvas, plan: BucketPlan) -> None:
    """Plot the crop loss of all images in descending order, with the mean."""
    left, top, right, bottom = CROPS
    canvas.text(left - 80, top - 54, "Cropped", TEXT)
    crops = sorted((placement.crop for placement in plan.placements), reverse=True)
    ceiling = max(0.02, 1.1 * crops[0])
    steps = [crops[min(len(crops) - 1, i * len(crops) // 200)] for i in range(201)]

    def y(crop: float) -> float:
        return bottom - crop / ceiling * (bottom - top)

    tick = next(step for step in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if ceiling / step <= 3)
    for index in range(int(ceiling / tick) + 1):
        canvas.line([(left, y(index * tick)), (right, y(index * tick))], FAINT, 2)
        canvas.text(left - 10, y(index * tick), _percent(index * tick), TEXT, SOFT, "rm")
    curve = [(left + i / 200 * (right - left), y(crop)) for i, crop in enumerate(steps)]
    canvas.polygon([(left, bottom), *curve, (right, bottom)], (243, 214, 209))
    canvas.line(curve, LOST, 4)
    canvas.line([(left, bottom), (right, bottom)], SOFT, 2)
    canvas.line([(left, y(plan.mean_crop)), (right, y(plan.mean_crop))], INK, 2)
    canvas.text(right, top + 2, f"mean {plan.mean_crop:.1%}", TEXT, INK, "ra")
    canvas.text(right, top - 54, f"worst {plan.worst_crop:.1%}", TEXT, LOST, "ra")
    canvas.text((left + right) / 2, bottom + 20, "by picture", TEXT, SOFT, "ma")


def _plot_grids(canvas: Canvas, plan: BucketPlan) -> None:
    """Plot each grid in its proportions, with its size in pixels, its number of images, and their mean crop."""
    left, top, right, bottom = GRIDS
    use = _use(plan)
    crop_sums: dict[tuple[Grid, int], float] = dict.fromkeys(use, 0.0)
    for placement in plan.placements:
        crop_sums[placement.grid, plan.token_counts.index(placement.tokens)] += placement.crop
    canvas.text(left, top - 46, "Grids", TEXT)
    step = min(280.0, (right - left - 120) / len(plan.token_counts))
    for bucket, tokens in enumerate(plan.token_counts if step >= 160 else ()):
        count = sum(p.tokens == tokens for p in plan.placements)
        x = left + 120 + bucket * step
        canvas.box(x, top - 40, x + 24, top - 16, fill=_colour(bucket))
        canvas.text(x + 34, top - 46, f"{tokens}: {count:,}", TEXT, SOFT, room=step - 50)

    entries = sorted(use, key=lambda entry: -use[entry])[: MOST_GRIDS if len(use) <= MOST_GRIDS else MOST_GRIDS - 1]
    entries.sort(key=lambda entry: (entry[1], entry[0].width / entry[0].height))
    cell, base = (right - left) / (len(entries) + (len(entries) < len(use))), bottom - 68
    space = min(cell - 16, base - top)
    longest = max(max(grid.width, grid.height) for grid, _ in entries)
    for index, (grid, bucket) in enumerate(entries):
        middle = left + (index + 0.5) * cell
        width, height = grid.width / longest * space, grid.height / longest * space
        canvas.box(
            middle - width / 2, base - height, middle + width / 2, base, _tint(_colour(bucket)), _colour(bucket), 3
        )
        pixels = plan.pixels_per_token
        frames = "" if grid.frames == 1 else f"x{grid.frames}"
        size = f"{grid.width * pixels}x{grid.height * pixels}{frames}"
        canvas.text(middle, base + 4, size, TEXT, SOFT, "ma", cell - 8)
        canvas.text(middle - 6, base + 34, f"{use[grid, bucket]:,}", TEXT, INK, "ra")
        cropped = f"{-crop_sums[grid, bucket] / use[grid, bucket]:.0%}"
        canvas.text(middle + 6, base + 34, cropped.replace("-0%", "0%"), TEXT, LOST, "la")
    if len(entries) < len(use):
        middle = left + (len(entries) + 0.5) * cell
        canvas.text(middle, base - space / 2, f"{len(use) - len(entries)} more", TEXT, SOFT, "mm")


def _use(plan: BucketPlan) -> Counter[tuple[Grid, int]]:
    """Count the images on each (grid, index of its token count)."""
    return Counter((placement.grid, plan.token_counts.index(placement.tokens)) for placement in plan.placements)


def _colour(bucket: int) -> Colour:
    return BUCKET_COLOURS[bucket % len(BUCKET_COLOURS)]


def _tint(colour: Colour) -> Colour:
    return tuple(round(255 - (255 - channel) * 0.14) for channel in colour)


def _percent(part: float) -> str:
    return f"{100 * part:g} %" if part else "0"


def _megapixels(plan: BucketPlan, tokens: int, frames: int) -> float:
    """Compute the megapixels of one frame."""
    return tokens // frames * plan.pixels_per_token**2 / MEGAPIXEL


def _contents(grids: Sequence[Grid]) -> str:
    """Count the images and videos on these grids."""
    pictures = sum(grid.frames == 1 for grid in grids)
    counts = {"picture": pictures, "clip": len(grids) - pictures}
    return " and ".join(quantity(number, noun) for noun, number in counts.items() if number)
