"""Prepare Dataset and Latents to Training Data."""

import torch
from comfy.model_management import throw_exception_if_processing_interrupted
from comfy_api.latest import io, ui

from ...data.buckets.grids import FITS, RAGGED_EDGE
from ...data.buckets.plot import plot_plan
from ...data.buckets.sizes import parse_sizes
from ...data.folders.dataset import Dataset
from ...data.preparation.checks import TEXT_LIMITS
from ...data.preparation.empty_caption import with_empty_caption
from ...data.preparation.from_latents import latents_to_data
from ...data.preparation.prepare import PrepareOptions, prepare, summary
from ...models.text import AS_COMFYUI, EDIT_PROMPTS, PLUS
from ...train.distributed.world import current_world
from ..common.folder_access import cache_folder
from ..common.images import image_tensor
from ..common.progress import node_progress
from ..common.types import DatasetType, TrainingDataType
from .crop_frames import remember_crops
from .folders import TesseraImageFolder, TesseraVideoFolder


class TesseraPrepareDataset(io.ComfyNode):
    """Pictures, clips and captions encoded for training."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraPrepareDataset",
            display_name="Prepare Dataset",
            category="Tessera/data",
            description="Picks the size for each picture and clip that crops it least, and encodes them and their "
            "captions. Everything encoded is saved on disk, so it happens only once.",
            search_aliases=["dataset", "bucket", "encode", "cache latents", "lora"],
            # An output node shows the plan before anything is trained, and again when nothing has changed.
            is_output_node=True,
            inputs=[
                DatasetType.Input(
                    "dataset", tooltip="The pictures, clips and captions, from Training Images and Training Clips."
                ),
                io.Vae.Input(
                    "vae",
                    tooltip="The VAE of the model that will be trained, such as ae.safetensors for FLUX.1 or "
                    "wan_2.1_vae.safetensors for Wan 2.1 and 2.2 14B.",
                ),
                io.Clip.Input(
                    "clip",
                    tooltip="The text encoders of the model that will be trained, such as clip_l and t5xxl for FLUX.1 "
                    "or umt5_xxl for Wan.",
                ),
                io.Float.Input(
                    "megapixels",
                    default=1.0,
                    min=0.01,
                    max=16.0,
                    step=0.01,
                    optional=True,
                    tooltip="The training size of pictures and video frames, in units of 1024 x 1024 pixels. 0.25 "
                    "(512 x 512) trains about four times as fast, with less detail. 0.38 is 832 x 480, a size that "
                    "Wan knows well.",
                ),
                io.Int.Input(
                    "max_graphs",
                    default=1,
                    min=1,
                    max=8,
                    optional=True,
                    tooltip="The number of different token counts allowed; each is compiled once. With more, "
                    "pictures of unusual shape are cropped less. Raise it if the plan shows a lot of cropping. Only "
                    "for fit whole grids: a ragged edge needs one, and up to four for control pictures. Clips of "
                    "different lengths get as many as they need.",
                ),
                io.Combo.Input(
                    "fit",
                    options=list(FITS),
                    default=RAGGED_EDGE,
                    optional=True,
                    tooltip="ragged edge: one compiled graph fits every shape with hardly any cropping; the last row "
                    "of tokens may be shorter. whole grids: all grids have exactly the same number of tokens, with "
                    "more cropping; choose it if the plan shows that little is cropped. Models without a Tessera "
                    "version of their own always use whole grids.",
                ),
                io.Combo.Input(
                    "max_text_length",
                    options=[AS_COMFYUI, *map(str, TEXT_LIMITS)],
                    default=AS_COMFYUI,
                    optional=True,
                    tooltip="For FLUX.1, FLUX.2 and Wan. as ComfyUI: captions of any length, encoded as ComfyUI "
                    "samples them. 512 or 256: longer captions are cut at so many tokens, and those of FLUX.1 padded "
                    "to 256 or 512, as it was trained (schnell to 256).",
                    advanced=True,
                ),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="For Wan 2.1 image to video, with image_to_video on: clip_vision_h, which sees each clip's "
                    "first frame. Wan 2.2 takes none.",
                ),
                io.Boolean.Input(
                    "image_to_video",
                    default=False,
                    optional=True,
                    tooltip="On: each clip's first frame is given to the model as start picture. Switch it on to "
                    "train a Wan image-to-video model (or 5B for image to video), off for text to video.",
                ),
                io.Float.Input(
                    "control_megapixels",
                    default=1.0,
                    min=0.01,
                    max=16.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="The size that control pictures are encoded at, in units of 1024 x 1024 pixels. Edit "
                    "models are made for 1; less trains faster, because control pictures cost tokens too. If it "
                    "equals megapixels, control pictures of the same shape as their results are cropped exactly like "
                    "them.",
                ),
                io.Combo.Input(
                    "edit_prompt",
                    options=list(EDIT_PROMPTS),
                    default=PLUS,
                    optional=True,
                    advanced=True,
                    tooltip="How Qwen-Image's text encoder sees the control pictures. plus: for Qwen-Image-Edit-2509 "
                    "and 2511. first edit: for the first Qwen-Image-Edit, with one control picture each.",
                ),
                io.Boolean.Input(
                    "encode_empty_caption",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="On: an empty caption is encoded too, which guidance_loss_scale of Training Objective "
                    "needs. Folders with caption_dropout already have it.",
                ),
                io.String.Input(
                    "more_megapixels",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="More sizes to train each picture and clip at, such as 0.25, 0.5, besides megapixels. The "
                    "LoRA then works at all of them. One that is smaller than a size is trained at the nearest one "
                    "below its own. Each size is compiled once. Empty trains at megapixels only.",
                ),
            ],
            outputs=[
                TrainingDataType.Output(display_name="data", tooltip="What Train LoRA trains on."),
                io.Image.Output(
                    display_name="plan",
                    tooltip="A chart of the shapes, and how much of each picture is cropped; one for each size.",
                ),
                io.String.Output(display_name="summary", tooltip="The same in words."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(  # noqa: PLR0913
        cls,
        dataset: Dataset,
        vae,
        clip,
        megapixels=1.0,
        max_graphs=1,
        fit=RAGGED_EDGE,
        max_text_length=AS_COMFYUI,
        clip_vision=None,
        image_to_video=False,
        control_megapixels=1.0,
        edit_prompt=PLUS,
        encode_empty_caption=False,
        more_megapixels="",
    ) -> io.NodeOutput:
        check = throw_exception_if_processing_interrupted
        with current_world().after_first(f"prepared {cls.hidden.unique_id}", check):
            prepared = prepare(
                dataset,
                vae,
                clip,
                PrepareOptions(
                    megapixels=megapixels,
                    max_graphs=max_graphs,
                    fit=fit,
                    max_text_length=None if max_text_length == AS_COMFYUI else int(max_text_length),
                    image_to_video=image_to_video,
                    control_megapixels=control_megapixels,
                    edit_prompt=edit_prompt,
                    encode_empty_caption=encode_empty_caption,
                    more_megapixels=parse_sizes(more_megapixels),
                ),
                cache_folder(),
                clip_vision=clip_vision,
                progress=node_progress(cls.hidden.unique_id),
                interrupted=check,
            )
        remember_crops(prepared.crops)
        plan = torch.cat([image_tensor(plot_plan(size.plan, size.sizes)) for size in prepared.plans])
        text = summary(prepared)
        payload = {"summary": text, "notes": list(prepared.notes)}
        images = ui.PreviewImage(plan, cls=cls).as_dict()["images"]
        return io.NodeOutput(prepared.data, plan, text, ui={"images": images, "text": [text], "tessera": [payload]})


class TesseraLatentsToDataset(io.ComfyNode):
    """Training data from latents and conditioning of core's nodes."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraLatentsToDataset",
            display_name="Latents to Training Data",
            category="Tessera/data",
            description="Makes training data from the outputs of core's VAE Encode, CLIP Text Encode, Make Training "
            "Dataset, Load Training Dataset and Resolution Bucket.",
            search_aliases=["dataset", "latents", "lora"],
            is_input_list=True,
            inputs=[
                io.Latent.Input(
                    "latents", tooltip="The encoded pictures or clips: one latent, a batch, or a list of either."
                ),
                io.Conditioning.Input(
                    "positive",
                    tooltip="The encoded captions: one for each picture, in the same order, or one for all pictures. "
                    "Reference latents and WanImageToVideo's start pictures on them are used too.",
                ),
                io.Int.Input(
                    "max_graphs",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="The number of different token counts allowed; each is compiled once. If your latents "
                    "have more, they are cropped. Raise it to crop less.",
                ),
                io.Boolean.Input(
                    "masked_loss",
                    default=False,
                    optional=True,
                    tooltip="On: of a latent with a noise mask (Set Latent Noise Mask, VAE Encode for Inpainting) "
                    "only the masked part is learnt, where it is grey partly. Off: noise masks are ignored.",
                ),
                io.Conditioning.Input(
                    "empty",
                    optional=True,
                    tooltip="The empty caption, from a CLIP Text Encode without text; guidance_loss_scale of "
                    "Training Objective needs it.",
                ),
            ],
            outputs=[TrainingDataType.Output(display_name="data", tooltip="What Train LoRA trains on.")],
        )

    @classmethod
    def execute(cls, latents, positive, max_graphs=(1,), masked_loss=(False,), empty=()) -> io.NodeOutput:
        data = latents_to_data(latents, positive, max_graphs[0], masked_loss[0])
        if empty:
            data = with_empty_caption(data, [entry for entries in empty for entry in entries])
        return io.NodeOutput(data, ui={"tessera": [{"pictures": len(data.samples), "notes": list(data.notes)}]})


NODES = [TesseraImageFolder, TesseraVideoFolder, TesseraPrepareDataset, TesseraLatentsToDataset]
