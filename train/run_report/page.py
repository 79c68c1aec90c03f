"""Page of a run's report, or of two runs side by side: HTML without scripts or parts from elsewhere."""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, Template
from PIL import Image

from .contents import RunReport

# label and its text in each report.
Row = tuple[str, list[str]]


def report_page(reports: Sequence[RunReport], curve: Image.Image | None, strip: Image.Image | None) -> str:
    """Render the page of one report, or of two side by side, with the settings in which they differ. Returns HTML.

    curve, strip: pictures of the losses and of the previews, if any.
    """
    settings = _table([{**report.settings, **report.other_settings} for report in reports])
    differing = [(label, texts) for label, texts in settings if len(set(texts)) > 1]
    alike = [(label, texts) for label, texts in settings if len(set(texts)) == 1]
    is_single = len(reports) == 1
    return _template().render(
        reports=reports,
        curve=_inline(curve, "PNG"),
        strip=_inline(strip, "WEBP"),
        settings=_table([report.settings for report in reports]) if is_single else differing,
        other_settings=_table([report.other_settings for report in reports]) if is_single else alike,
        measures=_table([report.measures for report in reports]),
        data=_table([report.data for report in reports]),
        versions=_table([report.versions for report in reports]),
    )


@cache
def _template() -> Template:
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _table(columns: Sequence[Mapping[str, str]]) -> list[Row]:
    """Join the columns of the reports by their labels, in the order of the first that has each."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [(label, [column.get(label, "") for column in columns]) for label in labels]


def _inline(image: Image.Image | None, format: str) -> str:
    """Encode an image as a data URI; empty without one."""
    if image is None:
        return ""
    image.save(buffer := BytesIO(), format, quality=85)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
