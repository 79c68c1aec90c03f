"""Budgets: size limits for untrusted texts and files.

A workflow, a caption, a run folder or a LoRA may come from anybody. Each reader checks its budget before it works, so
that no input exhausts ComfyUI's time or memory; above it the user gets a one-sentence error.
`docs/untrusted_files.md` lists them.
"""

from dataclasses import dataclass, fields

MB = 1_000_000


@dataclass(frozen=True)
class Budget:
    """Bounds on one kind of input.

    source: name of the input on the page.
    reason: why a real input stays below.
    remedy: advice for a user with a larger input.
    bytes: size of the file or text.
    characters: length of the text.
    items: number of entries, lists and objects at any depth.
    depth: nesting levels of lists and objects.
    pixels: width times height.
    """

    source: str
    reason: str
    remedy: str
    bytes: int = 0
    characters: int = 0
    items: int = 0
    depth: int = 0
    pixels: int = 0

    def bounds(self) -> dict[str, int]:
        """Map the unit of each bound that is set to its value."""
        numbers = ((field.name, getattr(self, field.name)) for field in fields(self) if field.type in (int, "int"))
        return {name: number for name, number in numbers if number}

    def table_row(self) -> str:
        """Format the row of the table in docs/untrusted_files.md."""
        bounds = ", ".join(f"{number:,} {_NOUNS.get(unit, unit)}" for unit, number in self.bounds().items())
        return f"| {self.source} | {bounds} | {self.reason} | {self.remedy} |"


_NOUNS = {"items": "entries", "depth": "levels"}


class OverBudget(ValueError):
    """Raised for an input larger than its budget. The message is for the user."""

    def __init__(self, budget: Budget, name: str, size: str):
        """name: the input, file or field. size: its size, such as "3,000,000 entries"."""
        super().__init__(f"{name} has {size}, more than {budget.source} may have; {budget.remedy}.")


def check_size(budget: Budget, name: str, **sizes: int) -> None:
    """Raise OverBudget for the first size above its bound.

    name: name of the input in the message.
    sizes: sizes by the name of their bound, such as `bytes=2_000_000`.
    """
    for unit, size in sizes.items():
        if size > getattr(budget, unit):
            noun = _NOUNS.get(unit, unit)
            raise OverBudget(budget, name, f"{size:,} {noun} (at most {getattr(budget, unit):,})")


# Texts of workflows

PATTERN_LINES = Budget(
    "a list of LoRAs",
    "a grid takes 32 LoRAs",
    "name fewer, or use * for several at once",
    characters=10_000,
    items=100,
)
LAYER_PATTERNS = Budget(
    "a list of patterns of layers",
    "a model has a few dozen kinds of layers",
    "write fewer patterns, and use * for several layers at once",
    characters=20_000,
    items=1_000,
)
SETTINGS = Budget("a list of settings, such as optimizer_args,", "it has a few lines", "write fewer", characters=10_000)
PATTERN = Budget("a name with *", "names have a few parts", "write more of the name and fewer *", items=16)
WORKFLOW_FILE = Budget(
    "a workflow in a run folder",
    "the largest shared workflows have 5 MB",
    "remove nodes or pictures from it",
    bytes=32 * MB,
    items=2_000_000,
    depth=100,
)

# Captions

CAPTION_FILE = Budget(
    "a caption file", "text encoders read a few thousand letters", "shorten the caption", bytes=MB, characters=20_000
)
CAPTION_JSON = Budget(
    "a caption in JSON",
    "it holds a caption and some tags",
    "shorten the caption, or write it into a text file",
    bytes=MB,
    items=20_000,
    depth=20,
)
CAPTION_LIST = Budget(
    "a list of captions, such as metadata.jsonl",
    "a hundred thousand captions of a paragraph take 50 MB",
    "divide the folder",
    bytes=64 * MB,
    items=500_000,
    depth=20,
)
CAPTION_COLUMNS = Budget(
    "the first line of a table of captions", "it names a dozen columns", "take the others out", items=100
)
CAPTION_LINE = Budget(
    "a line of a list of captions",
    "it holds one caption and some fields",
    "shorten the caption",
    bytes=MB,
    items=20_000,
    depth=20,
)
CAPTION_EDIT = Budget(
    "an edit of captions from a page",
    "it holds one caption, or two texts to search and replace",
    "shorten the text",
    bytes=MB,
    characters=20_000,
    items=50_000,
    depth=5,
)
PAGE_REQUEST = Budget(
    "a request of a page", "it names a run, or the order of a queue", "reload the page", bytes=MB, items=5_000, depth=5
)
CAPTION_LEDGER = Budget(
    "the list of captions that models wrote",
    "it has a line for each picture of a folder",
    "delete the file in tessera/captions of ComfyUI's user folder",
    bytes=64 * MB,
    items=2_000_000,
    depth=5,
)
TAG_TABLE = Budget(
    "the table of a tagger's tags",
    "taggers know up to 100,000 tags",
    "choose another tagger",
    bytes=32 * MB,
    items=500_000,
)
WORDS = Budget(
    "a list of words, such as trigger_words,",
    "it names a subject, or a few dozen words to avoid",
    "write fewer",
    characters=5_000,
    items=200,
)
INSTRUCTION = Budget(
    "an instruction for a model that writes captions", "it is a paragraph", "shorten it", characters=20_000
)
DATASET_FILE = Budget(
    "a dataset file of another trainer",
    "it names a few folders",
    "set layout to plain, or chain a node for each folder",
    bytes=150_000,
    items=10_000,
    depth=20,
)
DATASET_FIELDS = Budget(
    "a folder in a dataset file of another trainer",
    "trainers know about fifty fields",
    "take out those that nothing reads",
    items=200,
)
DATASET_PATH = Budget(
    "a path in a dataset file or a list of captions",
    "systems allow 4,096 bytes",
    "shorten the path",
    characters=4_000,
    items=100,
)
FOLDER = Budget(
    "a folder of pictures or clips",
    "the largest shared ones have 100,000 pictures with captions",
    "divide the folder, and chain a node for each part",
    items=500_000,
)
ARCHIVE = Budget(
    "an archive of pictures or clips",
    "shards have about 1 GB and 10,000 files",
    "unpack it yourself into a folder",
    bytes=200_000 * MB,
    items=200_000,
)
UNPACKED = Budget(
    "what an archive of less than 1 GB unpacks to",
    "pictures and clips are packed already",
    "unpack it yourself into a folder",
    bytes=20_000 * MB,
)
TAGS = Budget(
    "a caption of tags", "captions have up to a hundred", "shorten the caption, or switch shuffle_tags off", items=1_000
)
WILDCARDS = Budget(
    "a caption with wildcards",
    "captions have a few braces",
    "use fewer braces, or switch wildcards off",
    items=200,
    depth=50,
)
LEAVE_OUT = Budget(
    "a list of pictures to leave out",
    "a hundred thousand names take 5 MB",
    "name fewer, or take the pictures out of the folder",
    characters=10_000_000,
)
MASK_FILE = Budget(
    "a mask that is drawn on a page",
    "a grey PNG of 100 megapixels has a few MB",
    "draw the mask in another program and put it beside the picture",
    bytes=64 * MB,
    pixels=100_000_000,
)
MASK_REQUEST = Budget(
    "a page's request to save a mask",
    "it holds the mask in base64",
    "draw the mask in another program and put it beside the picture",
    bytes=100 * MB,
    items=100,
    depth=2,
)
CAPTION_FORMS = Budget(
    "the forms of all captions of a folder",
    "each form is encoded once and kept on disk",
    "lower caption_variants",
    characters=200 * MB,
    items=100_000,
)

# Run folders

RUN_FILE = Budget(
    "run.json", "it says what a run is, in a few KB", "delete the file or the run", bytes=MB, items=20_000, depth=20
)
RUN_SUMMARY = Budget(
    "summary.json",
    "a million steps take 25 MB",
    "delete the file or the run",
    bytes=64 * MB,
    items=3_000_000,
    depth=20,
)
PROGRESS_FILE = Budget("progress.jsonl", "a million steps take 64 MB", "delete the file or the run", bytes=128 * MB)
PROGRESS_LINE = Budget(
    "a line of progress.jsonl",
    "the first line of a resumed run holds the loss of every step",
    "delete the file or the run",
    bytes=32 * MB,
    items=2_200_000,
    depth=8,
)
CURVE = Budget("the curve of a run", "a run has at most a million steps", "delete the file or the run", items=1_000_000)
RUN_NOTES = Budget(
    "the notes of a run", "a run has a few dozen", "delete the file or the run", items=500, characters=4_000
)
PREVIEW_INDEX = Budget(
    "the index of previews",
    "a preview takes 300 bytes",
    "delete the previews folder",
    bytes=16 * MB,
    items=1_000_000,
    depth=8,
)
PREVIEW = Budget(
    "a preview", "a preview is one picture or short clip", "make smaller previews", bytes=64 * MB, pixels=64_000_000
)

# Model and LoRA files

METADATA = Budget(
    "the metadata of a file",
    "the longest known, with a workflow and tag counts, have 8 MB",
    "save the file without metadata",
    bytes=64 * MB,
    items=2_000_000,
    depth=100,
)
LORA_FILE = Budget("a LoRA", "the largest have some 10,000 tensors", "choose another file", items=100_000)
STATE_HEADER = Budget(
    "the header of a state",
    "a state lists its tensors",
    "choose another state",
    bytes=64 * MB,
    items=2_000_000,
    depth=100,
)

TUNE_RESULT = Budget(
    "a result of Tune Compile", "it has a few dozen rows", "delete the file", bytes=4 * MB, items=200_000, depth=20
)

# Pictures

PICTURE = Budget(
    "a picture to be read",
    "170 megapixels of 16 bits, which is the most that is decoded, have 1,400 MB",
    "save it as PNG, or scale it down",
    bytes=2_000 * MB,
)
CLIP = Budget(
    "a clip to be read", "two million are nine hours at 60 a second", "cut it into shorter ones", items=2_000_000
)
THUMBNAIL_IMAGE = Budget(
    "a picture to be shown",
    "it is decoded whole; larger ones can be trained on all the same",
    "none needed: it is trained on, and only its thumbnail is missing",
    bytes=500 * MB,
    pixels=100_000_000,
)
THUMBNAIL_FRAME = Budget(
    "a clip to be shown",
    "8K has 33 megapixels",
    "none needed: it is trained on, and only its thumbnail is missing",
    items=2_000,
    pixels=40_000_000,
)
PIXELS_IN_FLIGHT = Budget(
    "all pictures that pages look at in one moment",
    "a pixel takes about 14 bytes while it is decoded",
    "none needed: the others wait for their turn",
    pixels=64_000_000,
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Budget))
