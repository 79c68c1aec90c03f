"""The workflow that looks through a folder before anything is trained on it, and has its captions written."""

from graph import Graph, list_of_files
from parts import DATA, FOLDER_TALL, PICTURE_TALL, WIDE, hub_file

REPORT_TALL = 700  # with the report and the sheet
CAPTIONS_TALL = 640  # with the gallery
CAPTIONER = hub_file("Krea-2/resolve/main/text_encoders/qwen3vl_4b_fp8_scaled.safetensors", "text_encoders")
NOTE = f"""### 1. Choose your folder
Put pictures into `ComfyUI/input/my_pictures`, press R, and choose the folder in the three nodes that name it.

### 2. Press Run
*Check Folder* shows near-doubles, blurred, small and broken pictures, and faulty captions. Its button has *Training \
Images* leave the pictures out.

### 3. Look at the rest
*Training Images* shows every picture with its caption. The pencil on a picture draws its mask: what is painted is \
learnt. *Mask Folder (Tessera)* makes masks for all of them. *Caption Folder* writes missing captions: get its \
model, select it and *Load CLIP*, and press Ctrl+B to switch both on.
{list_of_files([CAPTIONER])}

Then open a workflow that trains, and choose the same folder."""


def prepare_folder(graph: Graph) -> None:
    graph.column("Check", WIDE)
    graph.note(NOTE, 530)
    check = graph.node("TesseraCheckFolder", tall=REPORT_TALL, folder="input/my_pictures")
    graph.column("Pictures, captions and masks", DATA)
    graph.node("TesseraImageFolder", tall=FOLDER_TALL, folder="input/my_pictures")
    graph.column("Captions by a model", DATA)
    clip = graph.node(
        "CLIPLoader", files=[CAPTIONER], bypassed=True, clip_name=CAPTIONER.name, type="krea2", device="default"
    )
    graph.node("TesseraCaptionFolder", tall=CAPTIONS_TALL, bypassed=True, folder="input/my_pictures", clip=clip[0])
    graph.column("Findings, large", WIDE)
    graph.node("PreviewImage", tall=PICTURE_TALL, title="Sheet", images=check[0])


DESCRIPTIONS = [prepare_folder]
