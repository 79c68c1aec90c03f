"""Caption Folder."""

import os
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io

from ...data.captioning.caption_folder import EXISTING, KEEP, CaptionJob, write_captions
from ...data.captioning.instruction import MOST_WORDS, SENTENCE, STYLES, CaptionStyle
from ...data.captioning.tagger import Tagger
from ...data.captioning.vision_language import VisionLanguageModel
from ...data.layouts.kinds import IMAGES
from ...data.layouts.layout import AUTO
from ..common.folder_access import captions_folder, check_readable, list_image_folders, resolve_folder
from ..common.progress import node_progress
from ..data import folder_inputs
from ..data.image_inputs import NONE
from ..data.places import fingerprint_of_folder, may_write_caption, shown_places

TAGGERS = "taggers"

folder_paths.add_model_folder_path(TAGGERS, os.path.join(folder_paths.models_dir, TAGGERS))


def list_taggers() -> list[str]:
    """List the models in ComfyUI's folder of taggers."""
    return [name for name in folder_paths.get_filename_list(TAGGERS) if name.lower().endswith(".onnx")]


class TesseraCaptionFolder(io.ComfyNode):
    """Captions for the pictures of a folder, by a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TesseraCaptionFolder",
            display_name="Caption Folder (Tessera)",
            category="Tessera/data",
            description="Writes a caption beside each picture of a folder, by a vision-language model or a tagger. A "
            "stopped run goes on where it was. Look at the captions in the gallery on the node: Review.",
            search_aliases=["caption", "describe", "tagger", "wd14", "vlm", "dataset", "lora"],
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "folder",
                    **folder_inputs.choices(list_image_folders(), "input/my_pictures"),
                    tooltip="The folder with pictures, subfolders included. Captions are written into folders under "
                    "ComfyUI's input and datasets folders only.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="A model that sees pictures and writes text, from Load CLIP: Qwen3-VL 4B or 8B, Qwen3.5, "
                    "Gemma 3 or Gemma 4. Leave it empty if you choose a tagger.",
                ),
                io.Combo.Input(
                    "tagger",
                    options=[NONE, *list_taggers()],
                    default=NONE,
                    optional=True,
                    tooltip="A WD tagger, in place of clip, for models that are prompted with tags. Put its files "
                    "model.onnx and selected_tags.csv into a folder of models/taggers; it needs the package "
                    "onnxruntime.",
                ),
                io.Combo.Input(
                    "existing_captions",
                    options=list(EXISTING),
                    default=KEEP,
                    optional=True,
                    tooltip="What happens to pictures that have a caption. keep: they are left alone, also with an "
                    "empty file. append: the new caption is added at the end. replace: the old one is overwritten.",
                ),
                io.Combo.Input(
                    "style",
                    options=list(STYLES),
                    default=SENTENCE,
                    optional=True,
                    tooltip="What clip writes: one sentence, a paragraph, or tags with commas between them. Choose "
                    "what you will write as prompts. A tagger always writes tags.",
                ),
                io.Int.Input(
                    "max_words",
                    default=40,
                    min=1,
                    max=MOST_WORDS,
                    optional=True,
                    tooltip="The most words of a caption, or tags. Use 100 or more for a paragraph.",
                ),
                io.String.Input(
                    "trigger_words",
                    default="",
                    optional=True,
                    tooltip="The name that you will prompt for. clip is asked to call the subject so, and it comes "
                    "first in captions without it. Leave trigger_words of Training Images empty then.",
                ),
                io.String.Input(
                    "never_use",
                    default="",
                    optional=True,
                    tooltip="Words that no caption may hold, with commas between them, such as: image, photo of. An "
                    "answer with one of them is asked for again, and then the word is taken out.",
                ),
                io.String.Input(
                    "instruction",
                    default="",
                    multiline=True,
                    optional=True,
                    advanced=True,
                    tooltip="What clip is told, in place of the sentence that style and max_words make. trigger_words "
                    "and never_use are still added.",
                ),
                io.Float.Input(
                    "tag_threshold",
                    default=0.35,
                    min=0.01,
                    max=0.99,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="How sure the tagger must be of a tag. Lower gives more tags, and more wrong ones. Names "
                    "of characters need 0.85 or more.",
                ),
                io.Float.Input(
                    "temperature",
                    default=0.0,
                    min=0.0,
                    max=2.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="How freely clip chooses words. 0: always the likeliest ones. Try 0.7 if it repeats "
                    "itself.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    optional=True,
                    advanced=True,
                    tooltip="Another seed gives other captions if temperature is above 0.",
                ),
                folder_inputs.caption_extension("a.jpg"),
                folder_inputs.layout(),
            ],
            outputs=[io.String.Output(display_name="summary", tooltip="How many captions were written and kept.")],
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
    def execute(  # noqa: PLR0913
        cls,
        folder: str,
        clip: Any = None,
        tagger: str = NONE,
        existing_captions: str = KEEP,
        style: str = SENTENCE,
        max_words: int = 40,
        trigger_words: str = "",
        never_use: str = "",
        instruction: str = "",
        tag_threshold: float = 0.35,
        temperature: float = 0.0,
        seed: int = 0,
        caption_extension: str = ".txt",
        layout: str = AUTO,
    ) -> io.NodeOutput:
        check = throw_exception_if_processing_interrupted
        caption_style = CaptionStyle(style, max_words, trigger_words, never_use, instruction)
        captioner: VisionLanguageModel | Tagger
        if tagger != NONE and clip is not None:
            raise ValueError(
                "clip and tagger are both set, but captions come from one of them; disconnect clip, or set tagger to "
                "none."
            )
        if tagger != NONE:
            captioner = Tagger(Path(folder_paths.get_full_path_or_raise(TAGGERS, tagger)), caption_style, tag_threshold)
        elif clip is not None:
            captioner = VisionLanguageModel(clip, caption_style, temperature, seed, check)
        else:
            raise ValueError("Nothing writes captions yet; connect clip (such as Qwen3-VL), or choose a tagger.")
        request = shown_places(layout).request(resolve_folder(folder), IMAGES, caption_extension, interrupted=check)
        job = CaptionJob(request, captioner, caption_style, existing_captions, captions_folder(), may_write_caption)
        with torch.inference_mode():
            report = write_captions(job, node_progress(cls.hidden.unique_id), check)
        text = report.summary()
        payload = {"summary": text, "notes": list(report.notes())}
        return io.NodeOutput(text, ui={"tessera": [payload]})


NODES: list[type[io.ComfyNode]] = [TesseraCaptionFolder]
