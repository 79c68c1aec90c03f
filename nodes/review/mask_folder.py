"""Mask Folder: masks of a folder's pictures by ComfyUI's own segmentation models."""

from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io
from PIL import Image
from torch import Tensor

from ...common.core import end_of_node
from ...common.text import quantity
from ...data.layouts.kinds import IMAGES
from ...data.layouts.layout import AUTO, read_layout
from ...data.media.images import inspect_image, load_image
from ...data.review.drawn_masks import mask_place, save_mask
from ..common.folder_access import check_readable, list_image_folders, resolve_folder
from ..common.progress import node_progress
from ..data import folder_inputs
from ..data.places import shown_places
from .mask_places import place_in_input

DETECT, REMOVE = "SAM3_Detect", "RemoveBackground"  # ids of core's nodes
_SIDE = 1536  # pixels of the longer side of what a model sees; it reduces them itself
_MOST_NAMED = 20
Segment = Callable[[Tensor], Tensor]
"""Function of an image (1, H, W, 3) that returns its mask, (1, H, W), 0 to 1."""


class TesseraMaskFolder(io.ComfyNode):
    """Masks beside the pictures of a folder, by a segmentation model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraMaskFolder",
            display_name="Mask Folder (Tessera)",
            category="Tessera/data",
            description="Makes a mask for each picture of a folder, by SAM3 and a prompt or by a background removal "
            "model of ComfyUI, and saves it beside the picture, where Training Images reads it.",
            search_aliases=["segment", "masked loss", "sam3", "birefnet", "remove background", "mask dataset"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                io.Combo.Input(
                    "folder",
                    **folder_inputs.choices(list_image_folders(), "input/my_pictures"),
                    tooltip="The folder with pictures, the same as in Training Images. It must be inside ComfyUI's "
                    "input folder.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    optional=True,
                    tooltip="On: masks that are there already are replaced, drawn ones too. Off: only pictures "
                    "without a mask get one.",
                ),
                io.Float.Input(
                    "threshold",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="For SAM3: how sure it must be that it sees what the prompt names. Lower it if masks are "
                    "missing, raise it if they hold other things.",
                ),
                folder_inputs.layout(),
                io.Model.Input(
                    "model", optional=True, tooltip="A SAM3 model, from ComfyUI's own loaders. It needs conditioning."
                ),
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="What SAM3 should find, such as a face or a dog: a CLIP Text Encode with SAM3's text "
                    "encoder.",
                ),
                io.BackgroundRemoval.Input(
                    "bg_removal_model",
                    optional=True,
                    tooltip="A model such as BiRefNet, from Load Background Removal Model: everything but the "
                    "background is learnt. In place of SAM3.",
                ),
            ],
            outputs=[io.String.Output(display_name="report", tooltip="Which pictures got a mask, and which did not.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        return check_readable({"folder": folder})

    @classmethod
    def execute(
        cls,
        folder: str,
        overwrite: bool = False,
        threshold: float = 0.5,
        layout: str = AUTO,
        model: Any = None,
        conditioning: Any = None,
        bg_removal_model: Any = None,
    ) -> io.NodeOutput:
        segment = _segment(model, conditioning, bg_removal_model, threshold)
        path = resolve_folder(folder)
        request = shown_places(layout).request(
            path, IMAGES, ".txt", interrupted=throw_exception_if_processing_interrupted
        )
        subsets = read_layout(request).subsets
        examples = [example for subset in subsets for example in subset.examples]
        if not examples:
            raise ValueError(f"The folder {path.name!r} holds no pictures; put pictures into it, or choose another.")
        progress = node_progress(cls.hidden.unique_id)
        masked: list[str] = []
        empty: list[str] = []
        for number, example in enumerate(examples):
            throw_exception_if_processing_interrupted()
            progress(number, len(examples), f"Making masks: {number} of {len(examples)}")
            if example.mask is not None and not overwrite:
                continue
            place, _ = place_in_input(mask_place(example, None))
            mask = _mask(segment, example.path, example.name)
            end_of_node()
            if mask.max() == 0:
                empty.append(example.name)
                continue
            save_mask(place, _png(mask), inspect_image(example.path, example.name).size)
            masked.append(example.name)
        progress(len(examples), len(examples), f"Making masks: {len(examples)} of {len(examples)}")
        report = _report(len(examples), masked, empty)
        return io.NodeOutput(report, ui={"tessera": [{"report": report}]})


def _segment(model: Any, conditioning: Any, bg_removal_model: Any, threshold: float) -> Segment:
    """Make the function that segments a picture, by one of core's nodes."""
    if bg_removal_model is not None and model is not None:
        raise ValueError("model and bg_removal_model are both connected; disconnect one of them.")
    if bg_removal_model is not None:
        return lambda image: _core_node(REMOVE).execute(bg_removal_model, image).args[0]
    if model is None:
        raise ValueError("Neither model nor bg_removal_model is connected; load SAM3 or a background removal model.")
    if conditioning is None:
        raise ValueError(
            "conditioning is not connected, so SAM3 doesn't know what to find; connect a CLIP Text Encode with SAM3's "
            "text encoder."
        )
    return lambda image: _core_node(DETECT).execute(model, image, conditioning, threshold=threshold).args[0]


def core_node(name: str) -> Any:
    """Return the class of one of ComfyUI's nodes by its id; None if this ComfyUI has none."""
    return import_module("nodes").NODE_CLASS_MAPPINGS.get(name)


def _core_node(name: str) -> Any:
    """Return a node of ComfyUI. Raises ValueError if this ComfyUI has none of that name."""
    node = core_node(name)
    if node is None:
        raise ValueError(f"This ComfyUI has no node {name}; update ComfyUI.")
    return node


def _mask(segment: Segment, path: Path, name: str) -> np.ndarray:
    """Segment a picture: (H, W) levels from 0 to 255."""
    height, width = inspect_image(path, name).size
    scale = min(1.0, _SIDE / max(height, width))
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    with torch.inference_mode():
        mask = segment(load_image(path, (0, 0, width, height), rows, columns, name=name))
    levels: np.ndarray = (mask[0].float().clamp(0, 1) * 255 + 0.5).to(torch.uint8).cpu().numpy()
    return levels


def _png(levels: np.ndarray) -> bytes:
    data = BytesIO()
    Image.fromarray(levels).save(data, "PNG")
    return data.getvalue()


def _report(count: int, masked: list[str], empty: list[str]) -> str:
    lines = [f"{len(masked)} of {quantity(count, 'picture')} got a mask; {count - len(masked) - len(empty)} had one."]
    if empty:
        rest = len(empty) - _MOST_NAMED
        listed = ", ".join(empty[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        lines.append(f"Nothing was found in these, so they have none: {listed}.")
    return "\n".join(lines)


NODES: list[type[io.ComfyNode]] = [TesseraMaskFolder]
