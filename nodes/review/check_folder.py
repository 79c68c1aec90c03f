"""Check Folder: faults of the pictures and captions of a folder, before anything is trained."""

from typing import Any

import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io, ui

from ...data.cache import Cache
from ...data.layouts.kinds import IMAGES
from ...data.layouts.layout import AUTO, read_layout
from ...data.review.captions import caption_length
from ...data.review.check import CheckOptions, check_folder
from ..common.folder_access import TRY_IT, cache_folder, check_readable, list_image_folders, resolve_folder
from ..common.images import image_tensor
from ..common.progress import node_progress
from ..common.vision import vision_encoder
from ..data import folder_inputs
from ..data.places import fingerprint_of_folder, read_places


class TesseraCheckFolder(io.ComfyNode):
    """Faults of the pictures and captions of a folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCheckFolder",
            display_name="Check Folder (Tessera)",
            category="Tessera/data",
            description="Looks for near-doubles, blurred, small, enlarged and broken pictures, borders, odd colours, "
            "and captions that are missing, empty, equal or too long. What was measured is kept on disk, so the next "
            "check takes seconds.",
            search_aliases=["duplicates", "dataset check", "blur", "clean dataset", "curate", "quality"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "folder",
                    **folder_inputs.choices(list_image_folders(), "input/my_pictures", [TRY_IT]),
                    tooltip="The folder with pictures, the same as in Training Images.",
                ),
                io.Float.Input(
                    "megapixels",
                    default=1.0,
                    min=0.01,
                    max=16.0,
                    step=0.01,
                    optional=True,
                    tooltip="The size at which you train, as on Prepare Dataset, in units of 1024 x 1024 pixels. "
                    "Pictures are judged at this size.",
                ),
                io.Float.Input(
                    "factor",
                    default=1.4,
                    min=1.1,
                    max=8.0,
                    step=0.05,
                    optional=True,
                    tooltip="How much a picture may be enlarged, or how much more pixels a side it may have than "
                    "detail, before it is listed. Raise it to 2 if too many pictures are listed as small or blurred.",
                ),
                io.String.Input(
                    "trigger_words",
                    default="",
                    optional=True,
                    tooltip="Words that every caption should hold; captions without them are listed. Leave it empty "
                    "if Training Images adds the words.",
                ),
                folder_inputs.caption_extension("a.jpg"),
                folder_inputs.layout(),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="The text encoders that you train with: captions that are longer than they take are "
                    "listed. Without it, lengths are not looked at.",
                ),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="Any CLIP vision model, from Load CLIP Vision: it also finds near-doubles that were "
                    "cropped or changed. Without it, pictures are compared by a hash of their brightness.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="sheet", tooltip="The first 60 pictures with findings, and the findings."),
                io.String.Output(display_name="report", tooltip="All findings in words."),
                io.String.Output(
                    display_name="leave_out",
                    tooltip="Broken, double, blurred, enlarged and small pictures, one name in a line, for leave_out "
                    "of Training Images. Of near-doubles the one with the most detail is not in it.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        return check_readable({"folder": folder})

    @classmethod
    def fingerprint_inputs(
        cls, folder: str | None, caption_extension: str | None = ".txt", layout: str | None = AUTO, **_: Any
    ) -> object:
        return fingerprint_of_folder(folder, caption_extension, layout)

    @classmethod
    def execute(
        cls,
        folder: str,
        megapixels: float = 1.0,
        factor: float = 1.4,
        trigger_words: str = "",
        caption_extension: str = ".txt",
        layout: str = AUTO,
        clip: Any = None,
        clip_vision: Any = None,
    ) -> io.NodeOutput:
        path = resolve_folder(folder)
        request = read_places(layout).request(
            path, IMAGES, caption_extension, interrupted=throw_exception_if_processing_interrupted
        )
        listing = read_layout(request)
        if not listing.subsets:
            raise ValueError(f"The folder {path.name!r} holds no pictures; put pictures into it, or choose another.")
        with torch.inference_mode():
            check = check_folder(
                listing,
                Cache(cache_folder()),
                CheckOptions(
                    megapixels,
                    factor,
                    trigger_words,
                    None if clip is None else caption_length(clip),
                    None if clip_vision is None else vision_encoder(clip_vision),
                ),
                node_progress(cls.hidden.unique_id),
                throw_exception_if_processing_interrupted,
            )
        sheet = image_tensor(check.sheet)
        images = ui.PreviewImage(sheet, cls=cls).as_dict()["images"]
        payload = {"report": check.report, "leave_out": check.left_out, "folder": folder}
        return io.NodeOutput(sheet, check.report, check.left_out, ui={"images": images, "tessera": [payload]})


NODES: list[type[io.ComfyNode]] = [TesseraCheckFolder]
