"""Loss by Picture: which training pictures learn, which resist, and a list for the next run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_api.latest import io, ui
from PIL import Image

from ...common.text import quantity, shortlist
from ...train.watch.picture_sheet import draw_sheet
from ...train.watch.verdicts import PULLS_AWAY, RESISTS, is_report
from ..common.images import image_tensor
from ..common.types import LossMapType


class TesseraLossByPicture(io.ComfyNode):
    """Shows the losses by picture of a run, and lists the pictures to leave out."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraLossByPicture",
            display_name="Loss by Picture",
            category="Tessera/output",
            description="Shows which training pictures the LoRA learns, which resist and which pull away from the "
            "pictures set aside, and lists those to leave out next time. Switch loss_by_picture on in Validation.",
            search_aliases=["loss per image", "bad captions", "mislabelled", "which picture hurts"],
            is_output_node=True,
            inputs=[
                LossMapType.Input(
                    "loss", tooltip="loss of Train LoRA (Tessera), with loss_by_picture of Validation on."
                )
            ],
            outputs=[
                io.Image.Output(
                    display_name="sheet", tooltip="A bar for each picture, those that resist most at the top."
                ),
                io.String.Output(
                    display_name="leave_out",
                    tooltip="The pictures that resist, one in a line, for leave_out of Training Images in the next "
                    "run. Look at their captions first.",
                ),
                io.String.Output(display_name="summary", tooltip="The same in words."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, loss: Mapping[str, Any]) -> io.NodeOutput:
        pictures = loss.get("pictures") if isinstance(loss, Mapping) else None
        report = pictures.get("report") if isinstance(pictures, Mapping) else None
        if not isinstance(pictures, Mapping) or not isinstance(report, Mapping) or not is_report(report):
            raise ValueError(
                "loss has no losses of single pictures; connect Validation to Train LoRA with loss_by_picture on, and "
                "train longer if a note on Train LoRA says so."
            )
        sheet = pictures.get("sheet")  # a Path comes from Train LoRA only: a workflow can write a text at most
        image = image_tensor(_read(sheet) if isinstance(sheet, Path) and sheet.is_file() else draw_sheet(report, {}))
        text = describe(report)
        images = ui.PreviewImage(image, cls=cls).as_dict()["images"]
        leave_out = "\n".join(report["leave_out"])
        return io.NodeOutput(image, leave_out, text, ui={"images": images, "text": [text]})


def _read(sheet: Path) -> Image.Image:
    with Image.open(sheet, formats=["PNG"]) as opened:
        return opened.convert("RGB")


def describe(report: Mapping[str, Any]) -> str:
    """Describe the report of `judge` in a few lines."""
    pictures = report["pictures"]
    lines = [
        f"{len(pictures)} of {quantity(report['of'], 'picture')}, measured at step {report['step']} against the base "
        f"model at the same noise. Half of them changed by {_change(report['median'])} or less."
    ]
    if report["held_out"] is not None:
        lines.append(f"Pictures set aside changed by {_change(report['held_out'])}.")
    advice = {
        RESISTS: "Resist (look at their captions, or leave them out)",
        PULLS_AWAY: "Pull away from the pictures set aside (learnt by heart; add pictures like them, or lower repeats)",
    }
    for verdict, words in advice.items():
        entries = [f"{p['file']} {_change(p['relative'])}" for p in reversed(pictures) if p["verdict"] == verdict]
        lines.append(f"{words}: {shortlist(entries) if entries else 'none'}.")
    return "\n".join(lines)


def _change(relative: float) -> str:
    return f"{relative - 1:+.1%}".replace("-", "−").replace("%", " %")


NODES = [TesseraLossByPicture]
