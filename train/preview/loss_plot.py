"""Plot of the loss of a run."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from ...common.canvas import Canvas, Colour

_BACKGROUND = (255, 255, 255)
_GRID = (229, 231, 235)
_AXIS = (107, 114, 128)
_TEXT = (55, 65, 81)
_RAW = (164, 199, 232)
_SMOOTH = (23, 92, 163)
_BAD = (200, 60, 48)
_VALIDATION = (217, 119, 6)
_SAVE = (5, 150, 105)
_RUNS = (_SMOOTH, _VALIDATION)
# Pixels at a height of 512. On a node of 380 pixels the plot is a third as large: text is still 11 pixels high.
TEXT = 32
# Margins around the curve.
LEFT = 124
TOP = 68
RIGHT = 28
BOTTOM = 58


def smoothed(loss: Sequence[float], smoothing: float) -> np.ndarray:
    """Compute the exponential moving average of the loss, one value per step.

    m_t = s·m_(t−1) + (1 − s)·x_t, divided by 1 − s^t to correct the bias of m_0 = 0 (Adam, arXiv 1412.6980, section 3).
    A value that is not finite is left out of the average and gives NaN at its step.
    """
    average, weight = 0.0, 0.0
    result = np.full(len(loss), np.nan)
    for step, value in enumerate(loss):
        if math.isfinite(value):
            average = smoothing * average + (1 - smoothing) * value
            weight = smoothing * weight + (1 - smoothing)
            result[step] = average / weight
    return result


def plot_loss(
    loss: Sequence[float],
    smoothing: float = 0.9,
    log_scale: bool = False,
    width: int = 1024,
    height: int = 512,
    validation: Sequence[tuple[int, float]] = (),
    saves: Sequence[int] = (),
) -> Image.Image:
    """Plot the loss of each step (light) and its moving average (dark) over steps 1 to n. Returns an RGB image.

    Values that are not finite, and on a log scale those of 0 or less, are left out and marked at the bottom.

    smoothing: s of `smoothed`, 0 to below 1.
    validation: (steps done, loss) of each validation, plotted as a line with dots; a measurement before the first step
        is at 0.
    saves: steps at which a LoRA was saved, marked on the axis.

    Raises ValueError if nothing is left to plot.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing is {smoothing}; set it to 0 or more and below 1.")
    if len(loss) == 0:
        raise ValueError("loss is empty; train at least one step.")
    values = np.asarray(loss, dtype=np.float64)
    average = smoothed(values.tolist(), smoothing)
    drawable = np.isfinite(values) & (values > 0 if log_scale else True)
    if not drawable.any():
        fix = "switch log_scale off" if np.isfinite(values).any() else "lower the learning rate and train again"
        raise ValueError(f"loss has no value that can be drawn among its {len(values)}; {fix}.")
    values = np.where(drawable, values, np.nan)
    average = np.where(drawable & ((average > 0) | (not log_scale)), average, np.nan)
    points = [(step, loss) for step, loss in validation if math.isfinite(loss) and (loss > 0 or not log_scale)]
    plotted_values = np.concatenate([values[drawable], [loss for _, loss in points]])
    first = min([1, *(step for step, _ in points)])
    plot = _Plot(width, height, first, len(values), _value_range(plotted_values, log_scale), log_scale)
    plot.axes()
    if smoothing > 0:
        plot.curve(values, _RAW, 1.5)
        plot.curve(average, _SMOOTH, 5)
    else:
        plot.curve(values, _SMOOTH, 3)
    plot.points(points)
    plot.saves([step for step in saves if first <= step <= len(values)])
    plot.marks(np.flatnonzero(~drawable))
    plot.legend(values, average, smoothing, points)
    return plot.canvas.finish()


def plot_runs(
    losses: Mapping[str, Sequence[float]], smoothing: float = 0.9, width: int = 1024, height: int = 512
) -> Image.Image:
    """Plot the moving averages of the losses of up to two runs over their steps. Returns an RGB image.

    losses: loss of each step, by the name of the run.
    smoothing: s of `smoothed`, 0 to below 1.

    Raises ValueError for a run without a finite loss.
    """
    averages = {name: smoothed(loss, smoothing) for name, loss in losses.items()}
    for name, average in averages.items():
        if not np.isfinite(average).any():
            raise ValueError(f"{name} has no loss that can be drawn.")
    values = np.concatenate([average[np.isfinite(average)] for average in averages.values()])
    plot = _Plot(width, height, 1, max(map(len, averages.values())), _value_range(values, False), False)
    plot.axes()
    for colour, average in zip(_RUNS, averages.values(), strict=False):
        plot.curve(average, colour, 5)
    plot.entries(list(zip(_RUNS, averages, strict=False)))
    return plot.canvas.finish()


def _value_range(values: np.ndarray, log_scale: bool) -> tuple[float, float]:
    """Compute the ends of the value axis with a margin, in log10 on a log scale."""
    ends = np.log10([values.min(), values.max()]) if log_scale else np.array([values.min(), values.max()])
    low, high = float(ends[0]), float(ends[1])
    least = 0.1 if log_scale else max(abs(high) * 0.02, 1e-12)
    room = max((high - low) * 0.06, least)
    bottom = low - room
    return (max(bottom, 0.0) if not log_scale and low >= 0 else bottom), high + room


def _round_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return at most `max_ticks` ticks between low and high: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= max_ticks)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return ticks of a log10 axis: 1, 2, 5 per decade if they fit, else whole decades, else linear ticks."""
    for factors in ((1, 2, 5), (1,)):
        ticks = [f * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for f in factors]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if 3 <= len(ticks) <= max_ticks:
            return ticks
    if high - low < 1:
        return [tick for tick in _round_ticks(10**low, 10**high, max_ticks) if tick > 0]
    stride = math.ceil((high - low) / max_ticks)
    return [10.0**d for d in range(math.ceil(low), math.floor(high) + 1, stride)]


MOST_DIGITS = 7  # of a label


def _labels(ticks: Sequence[float]) -> list[str]:
    """Format the ticks in one style, with the fewest digits that are exact."""
    digits = next((count for count in range(1, MOST_DIGITS) if _are_exact(ticks, count)), MOST_DIGITS)
    texts = [f"{tick:.{digits}g}" for tick in ticks]
    if any("e" in text for text in texts) or max(map(abs, ticks)) >= 1e5:
        return [_power_label(tick, digits) for tick in ticks]
    decimals = max(len(text.partition(".")[2]) for text in texts)
    return [f"{tick:.{decimals}f}" for tick in ticks]


def _are_exact(ticks: Sequence[float], digits: int) -> bool:
    """Return whether each tick, written with so many significant digits, is read as the same number."""
    return all(math.isclose(float(f"{tick:.{digits}g}"), tick, rel_tol=1e-6, abs_tol=1e-15) for tick in ticks)


def _power_label(tick: float, digits: int) -> str:
    """Format a tick with a power of ten, without the zeros that Python puts before a short exponent."""
    return f"{tick:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e") if tick else "0"


class _Plot:
    """Plot area and axis scales; positions are in pixels of the finished image."""

    def __init__(self, width: int, height: int, first: int, steps: int, ends: tuple[float, float], log_scale: bool):
        """Set up the canvas and margins. first: step at the left end, 1 or 0. ends: see `_value_range`."""
        self.canvas = Canvas(width, height, _BACKGROUND, 3)
        self.first = first
        self.steps = steps
        self.ends = ends
        self.log_scale = log_scale
        self.unit = unit = height / 512  # scales margins, text and line widths
        self.left, self.right = LEFT * unit, width - RIGHT * unit
        self.top, self.bottom = TOP * unit, height - BOTTOM * unit

    def x(self, step: float) -> float:
        """Convert a step, counted from 0, to a horizontal position. A single step is centred."""
        part = (step + 1 - self.first) / (self.steps - self.first) if self.steps > self.first else 0.5
        return self.left + part * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.ends
        position = math.log10(value) if self.log_scale else value
        return self.bottom - (position - low) / (high - low) * (self.bottom - self.top)

    def line(self, points: Sequence[tuple[float, float]], colour: Colour, width: float) -> None:
        self.canvas.line(points, colour, width * self.unit)

    def dot(self, x: float, y: float, colour: Colour, radius: float) -> None:
        self.canvas.dot(x, y, radius * self.unit, colour)

    def text(self, x: float, y: float, text: str, anchor: str, colour: Colour = _TEXT, size: float = TEXT) -> None:
        self.canvas.text(x, y, text, size * self.unit, colour, anchor)

    def axes(self) -> None:
        unit, (low, high) = self.unit, self.ends
        ticks = _log_ticks(low, high, 6) if self.log_scale else _round_ticks(low, high, 5)
        for tick, label in zip(ticks, _labels(ticks), strict=True):
            self.line([(self.left, self.y(tick)), (self.right, self.y(tick))], _GRID, 2)
            self.text(self.left - 12 * unit, self.y(tick), label, "rm")
        for step in self._step_ticks():
            x, text = self.x(step - 1), f"{step:,}"
            self.line([(x, self.top), (x, self.bottom)], _GRID, 2)
            self.line([(x, self.bottom), (x, self.bottom + 6 * unit)], _AXIS, 2.5)
            half = self.canvas.text_width(text, TEXT * unit) / 2
            self.text(min(x, self.canvas.size[0] - half - 4 * unit), self.bottom + 12 * unit, text, "ma")
        self.line([(self.left, self.top), (self.left, self.bottom), (self.right, self.bottom)], _AXIS, 2.5)
        self.text(self.left - 24 * unit, self.bottom + 12 * unit, "step", "ra", _AXIS)
        if self.log_scale:
            self.text(self.left - 24 * unit, self.top / 2, "log", "rm", _AXIS)

    def _step_ticks(self) -> list[int]:
        if self.steps == 1:
            return list(range(self.first, 2))
        inner = [int(tick) for tick in _round_ticks(1, self.steps, 5) if tick == int(tick) and tick >= 1]
        gap = (inner[1] - inner[0]) * 0.6 if len(inner) > 1 else 0
        first = [] if inner and inner[0] - 1 < gap else [1]
        return sorted({*first, *inner})

    def curve(self, values: np.ndarray, colour: Colour, width: float) -> None:
        """Draw a line through the values, with gaps at NaN; an isolated value is a dot."""
        for run in np.split(np.arange(len(values)), np.flatnonzero(np.diff(np.isnan(values))) + 1):
            if np.isnan(values[run[0]]):
                continue
            if len(run) == 1:
                self.dot(self.x(run[0]), self.y(values[run[0]]), colour, 8 if self.steps == 1 else width)
            else:
                self.line([(self.x(step), self.y(values[step])) for step in self._thinned(run, values)], colour, width)

    def _thinned(self, run: np.ndarray, values: np.ndarray) -> list[int]:
        """Select the steps to draw: all, or in a long run the minimum and maximum of each half pixel column."""
        columns = int(self.right - self.left) * 2
        if len(run) <= 2 * columns:
            return run.tolist()
        steps: list[int] = []
        for part in np.array_split(run, columns):
            steps += sorted({int(part[np.argmin(values[part])]), int(part[np.argmax(values[part])])})
        return steps

    def points(self, points: Sequence[tuple[int, float]]) -> None:
        """Draw validation losses, (steps done, loss)."""
        places = [(self.x(step - 1), self.y(loss)) for step, loss in points]
        if len(places) > 1:
            self.line(places, _VALIDATION, 4)
        for place in places:
            self.dot(*place, _VALIDATION, 8)

    def saves(self, steps: Sequence[int]) -> None:
        """Draw a triangle on the axis at each step with a save."""
        unit = self.unit
        for step in steps:
            x, y = self.x(step - 1), self.bottom
            self.canvas.polygon([(x, y - 18 * unit), (x - 9 * unit, y), (x + 9 * unit, y)], _SAVE)

    def marks(self, steps: np.ndarray) -> None:
        for step in steps[:: max(1, len(steps) // 2000)]:
            self.line([(self.x(step), self.bottom), (self.x(step), self.bottom - 20 * self.unit)], _BAD, 3)

    def legend(
        self, values: np.ndarray, average: np.ndarray, smoothing: float, points: Sequence[tuple[int, float]]
    ) -> None:
        last = int(np.flatnonzero(~np.isnan(values))[-1])
        entries = [(_SMOOTH if smoothing == 0 else _RAW, f"loss {values[last]:.3g}")]
        if smoothing > 0 and not np.isnan(average[last]):
            entries.append((_SMOOTH, f"average {average[last]:.3g}"))
        if points:
            entries.append((_VALIDATION, f"validation {points[-1][1]:.3g}"))
        if missing := int(np.isnan(values).sum()):
            entries.append((_BAD, f"left out {missing:,}"))
        self.entries(entries)

    def entries(self, entries: Sequence[tuple[Colour, str]]) -> None:
        """Draw a legend above the curves: a line in a colour and its text for each entry, shrunk to fit."""
        wide = sum(self.canvas.text_width(text, TEXT * self.unit) for _, text in entries)
        wide += (44 * len(entries) + 28 * (len(entries) - 1)) * self.unit
        part = min(1.0, (self.right - self.left) / wide)
        x = self.left
        y = self.top / 2
        unit = self.unit * part
        for colour, text in entries:
            self.line([(x, y), (x + 32 * unit, y)], colour, 8)
            self.text(x + 44 * unit, y, text, "lm", size=TEXT * part)
            x += self.canvas.text_width(text, TEXT * unit) + 72 * unit
