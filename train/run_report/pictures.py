"""Pictures of a run's report: its curve, its previews, and the whole report as one picture."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path

from PIL import Image

from ...common.canvas import FAINT, SOFT, Canvas
from ...common.untrusted.budgets import PREVIEW, OverBudget
from ...common.untrusted.regular_files import read_regular
from ..preview.contact_sheet import Cell, render_sheet, spread
from ..preview.gallery import Shot, previews_folder, read_index
from ..preview.loss_plot import plot_loss, plot_runs
from ..preview.thumbnails import small_picture
from ..runs.run_folder import RunFolder
from ..runs.run_record import own_file
from .contents import MOST_CHARACTERS, RunReport

MOST_COLUMNS, MOST_ROWS = 6, 4  # of previews, rows for each run
_SIDE = 192  # pixels of the longer side of a preview
_WIDTH, _EDGE = 1200, 24  # of the picture, in pixels
_TEXT, _LINE = 17, 25
_MOST_LINES = 40


def curve_picture(reports: Sequence[RunReport]) -> Image.Image | None:
    """Plot the loss of a run with its saves and validation, or the losses of two runs; None without a loss to draw."""
    try:
        if len(reports) == 1:
            (report,) = reports
            saves = [save.step for save in report.saves if save.step is not None]
            return plot_loss(report.loss, validation=report.validation, saves=saves)
        return plot_runs({report.name: report.loss for report in reports})
    except ValueError:
        return None


def preview_strip(folders: Sequence[RunFolder]) -> Image.Image | None:
    """Render previews as a contact sheet, a column for each step: of two runs, the steps that both have. None without.

    Of many steps, evenly spaced ones from the first to the last are shown.
    """
    places = [previews_folder(folder.path) for folder in folders]
    shots = [[] if place is None else read_index(place) for place in places]
    common = set.intersection(*({shot.step for shot in run_shots} for run_shots in shots))
    steps = spread(sorted(common), MOST_COLUMNS)
    rows = sorted({shot.row for run_shots in shots for shot in run_shots})[:MOST_ROWS]
    titles: list[str] = []
    cells: dict[Cell, Image.Image] = {}
    for row, (folder, place, run_shots) in product(rows, list(zip(folders, places, shots, strict=True))):
        row_shots = [shot for shot in run_shots if shot.row == row and shot.step in steps]
        if place is None or not row_shots:
            continue
        run_name = f"{folder.path.name}: " if len(folders) > 1 else ""
        titles.append(run_name + str(row_shots[-1].title)[:MOST_CHARACTERS])
        for shot in row_shots:
            picture = _read(place, shot)
            if picture is not None:
                cells[len(titles) - 1, steps.index(shot.step)] = picture
    if not cells:
        return None
    return render_sheet(titles, [f"step {step:,}" for step in steps], cells)


def _read(previews: Path, shot: Shot) -> Image.Image | None:
    """Decode a preview; None for one that can't be read or is over its budget."""
    path = own_file(previews, shot.file)
    try:
        return None if path is None else small_picture(read_regular(path, PREVIEW), _SIDE)
    except (OSError, OverBudget):
        return None


def report_picture(report: RunReport, curve: Image.Image | None, strip: Image.Image | None) -> Image.Image:
    """Draw the report: its name, outcome, curve and previews, and below them its tables in two columns."""
    room = _WIDTH - 2 * _EDGE
    images = [image if image.width <= room else _scaled(image, room) for image in (curve, strip) if image is not None]
    left = list(_lines({"Settings": report.settings}))
    right = list(_lines({"Time and memory": report.measures, "Data": report.data, "Versions": report.versions}))
    saves = {save.file: ", ".join(save.remarks) for save in report.saves if save.remarks}
    right += _lines({"Saves": saves})
    rows = min(_MOST_LINES, max(len(left), len(right)))
    top = _EDGE + 90 + sum(image.height + _EDGE for image in images)
    canvas = Canvas(_WIDTH, top + rows * _LINE + _EDGE, oversampling=1)
    canvas.text(_EDGE, _EDGE, report.name, 32, room=room)
    canvas.text(_EDGE, _EDGE + 48, report.outcome, 20, SOFT, room=room)
    y = _EDGE + 90
    for image in images:
        canvas.paste(image, _EDGE, y)
        y += image.height + _EDGE
    for x, lines in ((_EDGE, left), (_WIDTH // 2 + _EDGE // 2, right)):
        for number, (label, text) in enumerate(lines[:rows]):
            _draw_line(canvas, (x, top + number * _LINE), label, text)
    return canvas.finish()


def _draw_line(canvas: Canvas, place: tuple[float, float], label: str, text: str) -> None:
    """Draw a row of a table; one without a text is a heading."""
    x, y = place
    column = _WIDTH / 2 - 1.5 * _EDGE
    if not text:
        canvas.text(x, y, label, _TEXT, room=column)
        canvas.line([(x, y + _LINE - 3), (x + column, y + _LINE - 3)], FAINT)
        return
    canvas.text(x, y, label, _TEXT, SOFT, room=column * 0.45)
    canvas.text(x + column * 0.48, y, text, _TEXT, room=column * 0.52)


def _lines(tables: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for heading, table in tables.items():
        if table:
            yield from chain([(heading, "")], table.items(), [(" ", " ")])


def _scaled(image: Image.Image, width: int) -> Image.Image:
    return image.resize((width, max(1, image.height * width // image.width)), Image.Resampling.LANCZOS)
