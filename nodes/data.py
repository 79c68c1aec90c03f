"""The nodes of Tessera/data: from a folder of pictures, or from core's latents, to training data."""

from comfy.model_management import throw_exception_if_processing_interrupted
from comfy.utils import ProgressBar
from comfy_api.latest import io, ui

from ..train.dataset import Dataset, folder_fingerprint, scan_folder
from ..train.latents import latents_to_data
from ..train.plan_picture import draw_plan
from ..train.prepare import Progress, prepare, summary
from ..train.tokens import FITS, RAGGED_EDGE
from .events import show_text
from .images import image_tensor
from .settings import cache_folder, list_picture_folders, resolve_folder

DatasetType = io.Custom("TESSERA_DATASET")
TrainingDataType = io.Custom("TESSERA_TRAINING_DATA")


class TesseraImageFolder(io.ComfyNode):
    """Pictures with their captions from a folder."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraImageFolder",
            display_name="Training Images",
            category="Tessera/data",
            description="Pictures to train on, each with a caption in a text file of the same name beside it. "
            "Chain several folders through the dataset input.",
            search_aliases=["dataset", "training images", "caption", "lora"],
            inputs=[
                io.Combo.Input(
                    "folder",
                    options=list_picture_folders(),
                    tooltip="The folder with pictures (jpg, png, webp, avif, bmp, tiff) and captions, subfolders "
                    "included. Folders under ComfyUI's input and datasets folders are listed, up to six levels deep; "
                    "others have to be allowed in the file tessera.json in ComfyUI's user folder.",
                ),
                io.String.Input(
                    "caption_extension",
                    default=".txt",
                    optional=True,
                    tooltip="The ending of the caption files: a.jpg takes a.txt. Change it if yours end otherwise, "
                    "such as .caption.",
                ),
                io.Int.Input(
                    "repeats",
                    default=1,
                    min=1,
                    max=1000,
                    optional=True,
                    tooltip="How many times an epoch shows each picture of this folder. Raise it for a small folder "
                    "that is chained with a large one.",
                ),
                io.String.Input(
                    "trigger_words",
                    default="",
                    optional=True,
                    tooltip="Words put before every caption, followed by a comma, to call the LoRA by later. Leave "
                    "empty if your captions already hold them.",
                ),
                DatasetType.Input(
                    "dataset",
                    optional=True,
                    tooltip="Another data set, whose pictures come before these. Connect it to train on several "
                    "folders.",
                ),
            ],
            outputs=[DatasetType.Output(display_name="dataset", tooltip="The pictures and captions, not encoded yet.")],
        )

    @classmethod
    def validate_inputs(cls, folder):
        if folder is None:  # linked: its value is not known yet, and execute checks it
            return True
        try:
            resolve_folder(folder)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, folder, caption_extension=".txt", **kwargs):
        if folder is None or caption_extension is None:  # linked: not known yet, so taken as changed
            return float("nan")
        try:
            return folder_fingerprint(resolve_folder(folder), caption_extension)
        except ValueError as error:  # told to the user by execute
            return str(error)

    @classmethod
    def execute(
        cls, folder, caption_extension=".txt", repeats=1, trigger_words="", dataset: Dataset | None = None
    ) -> io.NodeOutput:
        scanned = scan_folder(
            resolve_folder(folder), caption_extension=caption_extension, repeats=repeats, trigger_words=trigger_words
        )
        return io.NodeOutput(scanned if dataset is None else dataset + scanned)


class TesseraPrepareDataset(io.ComfyNode):
    """Pictures and captions encoded for training."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraPrepareDataset",
            display_name="Prepare Dataset",
            category="Tessera/data",
            description="Chooses for each picture the grid of tokens that crops it least, and encodes pictures and "
            "captions once: what has been encoded is kept on disk and taken from there.",
            search_aliases=["dataset", "bucket", "encode", "cache latents", "lora"],
            # So that the plan can be looked at before anything is trained, and is shown again when nothing changed.
            is_output_node=True,
            inputs=[
                DatasetType.Input("dataset", tooltip="The pictures and captions, from Training Images."),
                io.Vae.Input("vae", tooltip="The VAE of the model that will be trained: ae.safetensors for FLUX.1."),
                io.Clip.Input(
                    "clip", tooltip="The text encoders of the model that will be trained: clip_l and t5xxl for FLUX.1."
                ),
                io.Float.Input(
                    "megapixels",
                    default=1.0,
                    min=0.01,
                    max=16.0,
                    step=0.01,
                    optional=True,
                    tooltip="The size that pictures are trained at, in units of 1024 x 1024 pixels. 0.25 (512 x 512) "
                    "trains about four times as fast, with less detail.",
                ),
                io.Int.Input(
                    "max_graphs",
                    default=1,
                    min=1,
                    max=8,
                    optional=True,
                    tooltip="The number of different token counts allowed; each is compiled once. More lets pictures "
                    "of unusual shape be cropped less. Raise it if the plan shows much cropping. It works with "
                    "fit whole grids only: a ragged edge takes one.",
                ),
                io.Combo.Input(
                    "fit",
                    options=list(FITS),
                    default=RAGGED_EDGE,
                    optional=True,
                    tooltip="ragged edge: one graph fits any shape with hardly any cropping; the last row of tokens "
                    "may be cut short. whole grids: every grid has exactly the same number of tokens, at more "
                    "cropping; choose it if the plan shows that your pictures lose little.",
                ),
                io.Combo.Input(
                    "max_text_length",
                    options=["512", "256"],
                    default="512",
                    optional=True,
                    tooltip="The longest caption in tokens; longer ones are cut, shorter ones take 256. FLUX.1 schnell "
                    "takes 256, FLUX.1 dev 512. On disk a caption takes about 4 MB at 256 tokens and 8 MB at 512.",
                    advanced=True,
                ),
            ],
            outputs=[
                TrainingDataType.Output(display_name="data", tooltip="What Train LoRA trains on."),
                io.Image.Output(display_name="plan", tooltip="The grids, and what is cropped of each picture."),
                io.String.Output(display_name="summary", tooltip="The same in words."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, dataset: Dataset, vae, clip, megapixels=1.0, max_graphs=1, fit=RAGGED_EDGE, max_text_length="512"
    ) -> io.NodeOutput:
        prepared = prepare(
            dataset,
            vae,
            clip,
            megapixels=megapixels,
            max_graphs=max_graphs,
            fit=fit,
            max_text_length=int(max_text_length),
            cache_dir=cache_folder(),
            progress=_show_progress(cls.hidden.unique_id),
            interrupted=throw_exception_if_processing_interrupted,
        )
        plan = image_tensor(draw_plan(prepared.plan, prepared.sizes))
        text = summary(prepared)
        shown = {"summary": text, "notes": list(prepared.notes), "mean_crop": prepared.plan.mean_crop}
        images = ui.PreviewImage(plan, cls=cls).as_dict()["images"]
        return io.NodeOutput(prepared.data, plan, text, ui={"images": images, "text": [text], "tessera": [shown]})


class TesseraLatentsToDataset(io.ComfyNode):
    """Training data from latents and conditioning of core's nodes."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TesseraLatentsToDataset",
            display_name="Latents to Training Data",
            category="Tessera/data",
            description="Takes what core's VAE Encode, CLIP Text Encode, Make Training Dataset, Load Training Dataset "
            "and Resolution Bucket give.",
            search_aliases=["dataset", "latents", "lora"],
            is_input_list=True,
            inputs=[
                io.Latent.Input("latents", tooltip="The encoded pictures: one latent, a batch, or a list of either."),
                io.Conditioning.Input(
                    "positive",
                    tooltip="The encoded captions: one for each picture, in the same order, or one for all pictures.",
                ),
                io.Int.Input(
                    "max_graphs",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    tooltip="The number of different token counts allowed; each is compiled once. Latents of more are "
                    "cropped. Raise it to crop less.",
                ),
            ],
            outputs=[TrainingDataType.Output(display_name="data", tooltip="What Train LoRA trains on.")],
        )

    @classmethod
    def execute(cls, latents, positive, max_graphs=(1,)) -> io.NodeOutput:
        data = latents_to_data(latents, positive, max_graphs[0])
        return io.NodeOutput(data, ui={"tessera": [{"pictures": len(data.samples), "notes": list(data.notes)}]})


def _show_progress(node_id: str | None) -> Progress:
    """The bar of the running node, and a line of text on it where ComfyUI's server runs."""
    bar = ProgressBar(1, node_id=node_id)

    def show(done: int, total: int, text: str) -> None:
        bar.update_absolute(done, total)
        show_text(node_id, text)

    return show


NODES = [TesseraImageFolder, TesseraPrepareDataset, TesseraLatentsToDataset]
