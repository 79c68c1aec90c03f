"""The workflow that looks through a folder before anything is trained on it."""

from graph import Graph
from parts import DATA, FOLDER_TALL, PICTURE_TALL, WIDE

REPORT_TALL = 700  # with the report and the sheet
NOTE = """### 1. Choose your folder
Put pictures into `ComfyUI/input/my_pictures`, press R, and choose the folder in both nodes.

### 2. Press Run
*Check Folder* shows near-doubles, blurred, small and broken pictures, and faulty captions. Its button has *Training \
Images* leave the pictures out.

### 3. Look at the rest
*Training Images* shows every picture with its caption. The pencil on a picture draws its mask: what is painted is \
learnt. *Mask Folder (Tessera)* makes masks for all of them.

Then open a workflow that trains, and choose the same folder."""


def prepare_folder(graph: Graph) -> None:
    graph.column("Check", WIDE)
    graph.note(NOTE, 420)
    check = graph.node("TesseraCheckFolder", tall=REPORT_TALL, folder="input/my_pictures")
    graph.column("Pictures, captions and masks", DATA)
    graph.node("TesseraImageFolder", tall=FOLDER_TALL, folder="input/my_pictures")
    graph.column("Findings, large", WIDE)
    graph.node("PreviewImage", tall=PICTURE_TALL, title="Sheet", images=check[0])


DESCRIPTIONS = [prepare_folder]
