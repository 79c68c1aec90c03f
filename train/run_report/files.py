"""Files of a run's report: `report.html` and `report.png` in the run's folder, and the picture of its LoRA."""

import filecmp
import shutil
from collections.abc import Mapping
from pathlib import Path

from PIL.PngImagePlugin import PngInfo

from ...common.files import write_atomically
from ..preview.gallery import previews_folder, read_index
from ..runs.run_folder import RunFolder
from ..runs.run_names import REPORT_PAGE, REPORT_PICTURE
from ..runs.run_record import SUMMARY
from .contents import read_report
from .page import report_page
from .pictures import curve_picture, preview_strip, report_picture


def page_of(*folders: RunFolder) -> str:
    """Make the page of one run, or of two side by side. Raises OSError if a folder is gone."""
    reports = [read_report(folder) for folder in folders]
    return report_page(reports, curve_picture(reports), preview_strip(folders))


def has_report(folder: RunFolder) -> bool:
    """Return whether the report is there and no older than the run's summary. Raises OSError without a summary."""
    try:
        written = (folder.path / REPORT_PICTURE).stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return written >= (folder.path / SUMMARY).stat().st_mtime_ns


def write_lora_picture(folder: RunFolder) -> None:
    """Copy the last preview of the first prompt beside the LoRA: model browsers show such a file as its picture.

    A picture from elsewhere stays. Raises OSError if it can't be written.
    """
    previews = previews_folder(folder.path)
    shots = [] if previews is None else sorted(read_index(previews), key=lambda shot: shot.step)
    candidates = [previews / shot.file for shot in shots if previews is not None and shot.row == 0]
    if not candidates:
        return
    shot = candidates[-1]
    target = folder.lora_path.with_suffix(f".preview{shot.suffix}")
    if target.exists() and not any(filecmp.cmp(target, candidate, shallow=False) for candidate in candidates):
        return

    def copy(temporary: Path) -> None:
        shutil.copyfile(shot, temporary)

    write_atomically(target, copy)


def write_report(folder: RunFolder, texts: Mapping[str, str]) -> None:
    """Write the page and the picture of a run's report.

    texts: text chunks of the picture, by keyword, such as the workflow.

    Raises OSError if they can't be written.
    """
    report = read_report(folder)
    curve, strip = curve_picture([report]), preview_strip([folder])
    page, picture = report_page([report], curve, strip), report_picture(report, curve, strip)
    metadata = PngInfo()
    for keyword, text in texts.items():
        metadata.add_text(keyword, text)

    def write_page(temporary: Path) -> None:
        temporary.write_text(page, encoding="utf-8")

    write_atomically(folder.path / REPORT_PAGE, write_page)
    write_atomically(folder.path / REPORT_PICTURE, lambda temporary: picture.save(temporary, "PNG", pnginfo=metadata))
