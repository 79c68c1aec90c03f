"""Training Images and Training Clips."""

from dataclasses import fields, replace
from typing import Any

from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io

from ...data.captions.options import CaptionOptions
from ...data.folders.dataset import Dataset, scan_images, scan_videos
from ...data.folders.options import FolderOptions
from ...data.layouts.kinds import VIDEOS
from ...data.layouts.layout import AUTO
from ...data.media.clip_windows import EXTRACTIONS, HEAD, Extraction, parse_target_frames
from ..common.folder_access import TRY_IT, check_readable, list_image_folders, list_video_folders, resolve_folder
from ..common.types import DatasetType
from . import folder_inputs, image_inputs
from .caption_inputs import caption_inputs
from .image_inputs import NONE
from .places import fingerprint_of_folder, folder_or_none, other_folder, read_places


class TesseraImageFolder(io.ComfyNode):
    """Pictures with their captions from a folder."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraImageFolder",
            display_name="Training Images",
            category="Tessera/data",
            description="Loads pictures to train on, each with its caption in a text file of the same name next to "
            "it. Chain several folders through the dataset input.",
            search_aliases=["dataset", "training images", "caption", "lora"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    **folder_inputs.choices(list_image_folders(), "input/my_pictures", [TRY_IT]),
                    tooltip="The folder with pictures (jpg, png, webp, avif, bmp, tiff, jp2, tga) and captions, "
                    "subfolders "
                    "included. Folders under ComfyUI's input and datasets folders are listed, up to six levels deep; "
                    "allow others in the file tessera.json in ComfyUI's user folder.",
                ),
                folder_inputs.caption_extension("a.jpg"),
                folder_inputs.repeats("picture"),
                folder_inputs.trigger_words(),
                folder_inputs.dataset(),
                io.Combo.Input(
                    "control_folder",
                    options=[NONE, *list_image_folders()],
                    default=NONE,
                    optional=True,
                    advanced=True,
                    tooltip="For edit models (Qwen-Image-Edit, FLUX.1 Kontext, FLUX.2): the folder with the pictures "
                    "before the edit. a.jpg uses a.png there, or a_0.png, a_1.png, … for several.",
                ),
                image_inputs.mask_folder("pictures"),
                image_inputs.alpha_mask(),
                image_inputs.unmasked_weight(),
                *image_inputs.views("picture"),
                *image_inputs.weight("pictures"),
                *caption_inputs(),
                *image_inputs.preservation(),
                folder_inputs.sample_ratio("pictures"),
                folder_inputs.layout(),
                image_inputs.leave_out(),
            ],
            outputs=[DatasetType.Output(display_name="dataset", tooltip="The pictures and captions, not encoded yet.")],
        )

    @classmethod
    def validate_inputs(cls, folder=None, control_folder=NONE, mask_folder=NONE):
        optional_folders = {
            "control_folder": folder_or_none(control_folder),
            "mask_folder": folder_or_none(mask_folder),
        }
        return check_readable({"folder": folder} | optional_folders)

    @classmethod
    def fingerprint_inputs(
        cls, folder, caption_extension=".txt", control_folder=NONE, mask_folder=NONE, layout=AUTO, **kwargs
    ):
        return fingerprint_of_folder(
            folder, caption_extension, layout, control_folder=control_folder, mask_folder=mask_folder
        )

    @classmethod
    def execute(
        cls,
        folder,
        caption_extension=".txt",
        repeats=1,
        trigger_words="",
        dataset: Dataset | None = None,
        control_folder=NONE,
        mask_folder=NONE,
        layout=AUTO,
        leave_out="",
        **inputs,
    ) -> io.NodeOutput:
        treatment, captions = _split_options(inputs)
        scanned = scan_images(
            resolve_folder(folder),
            caption_extension=caption_extension,
            repeats=repeats,
            trigger_words=trigger_words,
            control_folder=other_folder(control_folder),
            mask_folder=other_folder(mask_folder),
            options=treatment,
            captions=captions,
            places=read_places(layout),
            leave_out=leave_out,
            interrupted=throw_exception_if_processing_interrupted,
        )
        return io.NodeOutput(scanned if dataset is None else dataset + scanned)


class TesseraVideoFolder(io.ComfyNode):
    """Clips with their captions from a folder of video files."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraVideoFolder",
            display_name="Training Clips",
            category="Tessera/data",
            description="Cuts clips from the video files of a folder to train a video model on. Each file has its "
            "caption in a text file of the same name next to it. Chain it with pictures and other folders through "
            "the dataset input.",
            search_aliases=["dataset", "training videos", "video", "wan", "caption", "lora"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    **folder_inputs.choices(list_video_folders(), "input/my_clips"),
                    tooltip="The folder with video files (mp4, webm, mkv, mov, gif, avi, m4v, wmv, ts, mxf and more) "
                    "and captions, subfolders "
                    "included. Folders under ComfyUI's input and datasets folders are listed, up to six levels deep; "
                    "allow others in the file tessera.json in ComfyUI's user folder.",
                ),
                folder_inputs.caption_extension("a.mp4"),
                folder_inputs.repeats("clip"),
                io.String.Input(
                    "target_frames",
                    default="25",
                    optional=True,
                    tooltip="How many frames a clip has; write several numbers, such as 1, 25, 49, to get clips of "
                    "each length. The VAE needs 4n + 1 frames (MiniMax H3: 17n + 5), so other numbers are lowered. "
                    "More frames show longer motion and need more memory and time. full ignores it.",
                ),
                io.Float.Input(
                    "fps",
                    default=16.0,
                    min=0.0,
                    max=240.0,
                    step=0.001,
                    optional=True,
                    tooltip="Frames per second of the clips; frames are dropped or repeated to match. Use 16 for Wan "
                    "2.1 and 2.2 14B, 24 for Wan 2.2 5B. 0 uses every frame.",
                ),
                io.Combo.Input(
                    "extraction",
                    options=list(EXTRACTIONS),
                    default=HEAD,
                    optional=True,
                    tooltip="Which clips are cut from a file. head: its first frames. chunk: one after the other. "
                    "slide: one every frame_stride frames. uniform: frame_sample of them, spread evenly. full: all "
                    "frames up to max_frames as one clip; target_frames is ignored.",
                ),
                folder_inputs.dataset(),
                folder_inputs.trigger_words(),
                io.Int.Input(
                    "frame_stride",
                    default=10,
                    min=1,
                    max=100000,
                    optional=True,
                    advanced=True,
                    tooltip="For slide: how many frames after one clip the next one starts, at the rate of fps. Lower "
                    "it for more clips that overlap more.",
                ),
                io.Int.Input(
                    "frame_sample",
                    default=4,
                    min=1,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="For uniform: how many clips of each length are cut from a file. Raise it for long, "
                    "varied files.",
                ),
                io.Int.Input(
                    "max_frames",
                    default=81,
                    min=1,
                    max=100000,
                    optional=True,
                    advanced=True,
                    tooltip="For full: the most frames of a clip; longer files are cut off at the end. Lower it if "
                    "memory is short.",
                ),
                image_inputs.mask_folder("clips"),
                image_inputs.unmasked_weight(),
                *image_inputs.views("clip"),
                *image_inputs.weight("clips"),
                *caption_inputs(),
                *image_inputs.preservation(),
                folder_inputs.sample_ratio("clips"),
                folder_inputs.layout(),
            ],
            outputs=[DatasetType.Output(display_name="dataset", tooltip="The clips and captions, not encoded yet.")],
        )

    @classmethod
    def validate_inputs(cls, folder=None, mask_folder=NONE):
        return check_readable({"folder": folder, "mask_folder": folder_or_none(mask_folder)})

    @classmethod
    def fingerprint_inputs(cls, folder, caption_extension=".txt", mask_folder=NONE, layout=AUTO, **kwargs):
        return fingerprint_of_folder(folder, caption_extension, layout, VIDEOS, mask_folder=mask_folder)

    @classmethod
    def execute(  # noqa: PLR0913
        cls,
        folder,
        caption_extension=".txt",
        repeats=1,
        target_frames="25",
        fps=16.0,
        extraction=HEAD,
        dataset: Dataset | None = None,
        trigger_words="",
        frame_stride=10,
        frame_sample=4,
        max_frames=81,
        mask_folder=NONE,
        layout=AUTO,
        **inputs,
    ) -> io.NodeOutput:
        frames, notes = parse_target_frames(target_frames)
        treatment, captions = _split_options(inputs)
        scanned = scan_videos(
            resolve_folder(folder),
            Extraction(frames, fps, extraction, frame_stride, frame_sample, max_frames),
            caption_extension=caption_extension,
            repeats=repeats,
            trigger_words=trigger_words,
            mask_folder=other_folder(mask_folder),
            options=treatment,
            captions=captions,
            places=read_places(layout),
            interrupted=throw_exception_if_processing_interrupted,
        )
        scanned = replace(scanned, notes=(*scanned.notes, *notes))
        return io.NodeOutput(scanned if dataset is None else dataset + scanned)


def _split_options(inputs: dict[str, Any]) -> tuple[FolderOptions, CaptionOptions]:
    """Split inputs, named after the fields, into image options and caption options."""
    pictures = {field.name for field in fields(FolderOptions)} & inputs.keys()
    captions = {name: value for name, value in inputs.items() if name not in pictures}
    return FolderOptions(**{name: inputs[name] for name in pictures}), CaptionOptions(**captions)
