"""Readers of a stranger's texts and files in this process, each with its inputs."""

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import folders
import hostile
import safetensors.torch
import torch
import with_comfyui
from hypothesis import strategies as st
from tessera.common.untrusted.budgets import CAPTION_FILE, OverBudget
from tessera.data.captioning.instruction import CaptionStyle
from tessera.data.captions.notes import variant_notes
from tessera.data.captions.options import CaptionOptions
from tessera.data.captions.variants import make_caption_variants
from tessera.data.folders.class_words import read_class_word
from tessera.data.media.thumbnails import image_thumbnail, video_thumbnail
from tessera.data.review.captions import caption_faults
from tessera.headless.errors import UsageError
from tessera.headless.workflow import read_workflow, set_input
from tessera.lora.files.formats import FORMATS, convert
from tessera.lora.files.header import for_file
from tessera.lora.files.loading import load_lora
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.files.patches import DoesNotFit
from tessera.lora.files.reader import read_lora
from tessera.lora.options import NetworkOptions
from tessera.lora.patterns import parse_targets
from tessera.lora.plan import adapter_specs, choose_targets
from tessera.lora.source import LoraSource, read_lora_file
from tessera.models.catalogue.registry import family_of
from tessera.nodes.loras.lora_list import lines_of, matching
from tessera.train.checkpoint.metadata import read_best
from tessera.train.checkpoint.state import load_state
from tessera.train.optim.lr_curve import parse_curve
from tessera.train.optim.registry import parse_args
from tessera.train.preview.gallery import read_index
from tessera.train.runs.run_folder import RunFolder
from tessera.train.runs.run_record import RunReader, averaged, thinned


@dataclass(frozen=True)
class Reader:
    """A reader and its inputs.

    read: takes one input; raises ValueError or OSError with a sentence for inputs that it refuses.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    read: Callable[[Any], Any]


def empty_folder() -> Path:
    """Return the folder of inputs, emptied."""
    folder = Path(with_comfyui._base) / "readers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


ROOT_FOLDER = Path(__file__).resolve().parents[2]


def in_folder(read: Callable[[Path, Any], None]) -> Callable[[Any], None]:
    """Make a reader that gets a new folder for its files."""
    return lambda value: read(empty_folder(), value)


# Texts of workflows

LORAS = [f"runs/fox (00{n})/steps/fox-step00{n:04d}.safetensors" for n in range(1, 60)] + ["a" * 58 + ".safetensors"]


def read_lora_lines(text: str) -> None:
    for line in lines_of(text):
        matching(line, LORAS)


@cache
def tiny_model() -> tuple[Any, Any]:
    """A tiny FLUX: (family, model)."""
    path = with_comfyui.tiny.write_flux(Path(tempfile.mkdtemp(dir=with_comfyui._base)) / "flux.safetensors")
    patcher = with_comfyui.tiny.load_flux(path)
    return family_of(patcher), patcher.model


def read_layer_texts(texts: tuple[str, str]) -> None:
    targets, ranks = texts
    include, exclude = parse_targets(targets)
    options = NetworkOptions(include=include, exclude=exclude, rank_patterns=ranks)
    family, model = tiny_model()
    adapter_specs(options, choose_targets(family, model, options))


def read_changes(prompt_and_change: tuple[Any, str]) -> None:
    prompt, change = prompt_and_change
    file = empty_folder() / "workflow.json"
    file.write_text(prompt if isinstance(prompt, str) else hostile.dumped(prompt), encoding="utf-8")
    with suppress(UsageError):
        set_input(read_workflow(file)[0], change)


NODES = st.dictionaries(
    st.sampled_from(("1", "2", "a.b")),
    hostile.objects(
        {
            "class_type": ("TesseraTrainLora", "KSampler"),
            "inputs": ({"steps": 3, "model": ["1", 0], "resume": "latest", "preview": True}, {}),
            "_meta": ({"title": "Train"}, {}),
        }
    ),
    max_size=3,
)
CHANGES = st.tuples(
    st.sampled_from(("TesseraTrainLora.", "1.", "Train.", "", "a.b.")) | hostile.texts(100),
    st.sampled_from(("steps=", "model=", "resume=", "preview=", "x", "=")) | hostile.texts(100),
    st.sampled_from(("3", "[[", "1e999", "true")) | hostile.texts() | hostile.json_texts(),
).map("".join)

# Captions

CAPTION_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "caption_dropout": st.sampled_from((0.0, 0.3, 1.0)),
        "shuffle_tags": st.booleans(),
        "keep_tokens": st.integers(0, 5),
        "tag_dropout": st.sampled_from((0.0, 0.5)),
        "caption_per_line": st.booleans(),
        "wildcards": st.booleans(),
        "caption_variants": st.sampled_from((2, 8, 1000)),
        "keep_tokens_separator": st.sampled_from(("|||", "", "a", "{")),
    },
)


def read_captions(caption_input: tuple[str, dict[str, Any], str]) -> None:
    text, options, trigger = caption_input
    caption_options = CaptionOptions(**options)
    variants = {"a.png": make_caption_variants(text, caption_options, trigger, "a.txt")}
    variant_notes(caption_options, "folder", [text], variants)
    for words, plain in ((trigger, text), (text, trigger)):
        with suppress(OverBudget):
            read_class_word("dog", words).caption(plain[: CAPTION_FILE.characters])
        with suppress(OverBudget):
            list(caption_faults({"a.png": plain[: CAPTION_FILE.characters]}, words, None))


def read_style(style_and_answer: tuple[dict[str, str], str]) -> None:
    fields, answer = style_and_answer
    style = CaptionStyle(**fields)
    style.prompt()
    style.with_trigger(style.finish(answer[:MOST_ANSWERED]))


WORDS = hostile.texts(4000) | hostile.texts(20).map(lambda text: f"{text},w" * 150)
STYLES = st.fixed_dictionaries(
    {"style": st.sampled_from(("sentence", "tags"))},
    optional={"trigger_words": WORDS, "never_use": WORDS, "instruction": hostile.texts()},
)
MOST_ANSWERED = 10_000  # characters of a model's answer

# Run folders

KINDS = ("start", "begin", "step", "saved", "preview", "validation", "note", "end")
RECORD_LINES = hostile.objects(
    {
        "kind": KINDS,
        "step": (0, 1, 2, 10),
        "loss": (0.5, [0.5, 0.4], []),
        "rate": (1e-4,),
        "validation": ([], [[1, 0.5]]),
        "file": ("fox.safetensors",),
        "text": ("a note",),
        "status": ("finished", "cancelled"),
        "seconds": (3.5,),
    }
)
SUMMARY = hostile.objects(
    {
        "loss": ([0.5, 0.4], []),
        "status": ("finished",),
        "validation": ({"points": [{"step": 1, "loss": 0.5}]}, {}),
        "previews": ({}, {"files": []}),
        "steps": (2,),
    }
)
SHOTS = st.lists(
    hostile.objects({"step": (1,), "row": (0,), "title": ("a",), "settings": ({},), "frames": (1,)}), max_size=3
)


@st.composite
def run_folders(draw: st.DrawFn) -> dict[str, str]:
    """Texts of a run folder's files by name."""
    line = RECORD_LINES.map(hostile.dumped) | hostile.json_texts(KINDS)
    lines = draw(st.lists(st.tuples(line, st.sampled_from((1, 1, 1, 2000))), max_size=8))
    files = {"progress.jsonl": "".join(hostile.repeated(f"{text}\n", count) for text, count in lines)}
    run = hostile.objects({"output_name": ("fox",), "steps": (2,), "id": ("x",), "started": ("2026-01-01T00:00:00",)})
    for name, content in (("run.json", run), ("summary.json", SUMMARY), ("index.json", SHOTS)):
        if draw(st.booleans()):
            files[name] = draw(content.map(hostile.dumped) | hostile.json_texts(("loss", "step")))
    return files


def write_run(folder: Path, files: dict[str, str]) -> None:
    """Write a run folder as `run_folders` gives it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "previews").mkdir(exist_ok=True)
    for name, text in files.items():
        place = folder / "previews" / name if name == "index.json" else folder / name
        place.write_text(text, encoding="utf-8", errors="surrogatepass")


def read_run(files: dict[str, str]) -> None:
    folder = empty_folder() / "fox (001)"
    write_run(folder, files)
    reader = RunReader(folder)
    reader.facts()
    points = [point[:3] for point in reader.read().loss.values()]
    json.dumps(thinned(averaged(points, 10)), allow_nan=False)
    RunFolder(folder, "fox").read_summary()
    read_index(folder / "previews")


# Files of tensors

LAYERS = (
    "lora_unet_double_blocks_0_img_attn_qkv",
    "transformer.transformer_blocks.0.attn.to_q",
    "diffusion_model.single_blocks.0.linear1",
    "lora_te1_a",
)
SUFFIXES = "lora_down.weight lora_up.weight alpha lora_A.weight lora_B.weight dora_scale diff w1 hada_w1_a".split()
NAMES = (*LAYERS, *(f"{layer}.{suffix}" for layer in LAYERS for suffix in (*SUFFIXES, "reshape_weight")))


def read_state_file(data: bytes) -> None:
    path = empty_folder() / "state-000010.tessera"
    path.write_bytes(data)
    load_state(path)


def read_lora_for_run(data: bytes) -> None:
    path = empty_folder() / "fox.safetensors"
    path.write_bytes(data)
    read_best(path)
    read_tensors_of_lora(LoraSource.from_file(path, "base_lora").tensors())


def read_tensors_of_lora(tensors: Any) -> None:
    with suppress(DoesNotFit):  # whose callers say which file
        read_lora(tensors, *tiny_model())


def load_lora_file(data: bytes) -> None:
    """Read a file as Load LoRA File does, and write it in each format as Save LoRA does."""
    path = empty_folder() / "fox.safetensors"
    path.write_bytes(data)
    tensors, metadata = read_lora_file(path, "lora_file")
    family, model = tiny_model()
    lora, _ = load_lora(tensors, metadata, family, model, "lora_file: fox.safetensors")
    for format in FORMATS:
        for_file(lora.metadata, convert(lora, format), format)


def load_lora_tensors(tensors: Any) -> None:
    load_lora(tensors, {}, *tiny_model(), "lora_file: fox.safetensors")


SHAPES = st.sampled_from(((4, 128), (384, 4), (128, 4), (), (1,), (0,), (0, 128), (4, 128, 1, 1), (3,)))
LORAS_OF_TENSORS = st.dictionaries(
    st.sampled_from(NAMES) | hostile.texts(60),
    SHAPES.map(torch.zeros) | SHAPES.map(lambda shape: torch.full(shape, float("nan"))),
    max_size=6,
)
METADATA = st.dictionaries(
    st.sampled_from(("tessera", "tessera_modules", "modelspec.sai_model_spec", "ss_network_args")) | hostile.texts(20),
    hostile.texts() | hostile.json_texts(("modules", "double_blocks.{}")),
    max_size=4,
)


def read_metadata(metadata: dict[str, str]) -> None:
    lora = LoraModel({NAMES[0]: torch.zeros(4, 128)}, metadata)
    for_file(metadata, lora, "kohya")
    LoraModel.from_file(dict(lora), metadata)


@cache
def whole_state() -> bytes:
    """A state as a run writes it, in part."""
    metadata = {"tessera": json.dumps({"format": 3, "step": 10, "batches": 10, "loss": [0.5], "lineage": "a"})}
    return safetensors.torch.save({"master.a": torch.zeros(4, 4)}, metadata)


# Pictures and clips


@cache
def clips() -> list[bytes]:
    from tiny.data.films import write_film

    folder = Path(tempfile.mkdtemp(dir=with_comfyui._base))
    return [write_film(folder / f"a{ending}", 3).read_bytes() for ending in (".mp4", ".gif", ".webm")]


def thumbnail(make: Callable[[Path], bytes], ending: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path = empty_folder() / f"a{ending}"
        path.write_bytes(data)
        make(path)

    return read


READERS = (
    Reader("LoRA lines", hostile.texts(12_000), read_lora_lines),
    Reader("targets and rank patterns", st.tuples(hostile.texts(), hostile.texts()), read_layer_texts),
    Reader("learning rate curve", hostile.texts(), parse_curve),
    Reader("optimizer arguments", hostile.texts(), parse_args),
    Reader("workflow and --set", st.tuples(NODES | hostile.json_texts(("1",)), CHANGES), read_changes),
    Reader("captions", st.tuples(hostile.texts(), CAPTION_OPTIONS, hostile.texts(200) | WORDS), read_captions),
    Reader("words of a caption model", st.tuples(STYLES, hostile.texts()), read_style),
    Reader("run folder", run_folders(), read_run),
    Reader("state file", st.deferred(lambda: hostile.damaged([whole_state()])), read_state_file),
    Reader("state header", hostile.safetensors_files(("master.a", "state.0"), hostile.json_texts()), read_state_file),
    Reader("LoRA file", hostile.safetensors_files(NAMES, hostile.texts() | hostile.json_texts()), read_lora_for_run),
    Reader("LoRA tensors", LORAS_OF_TENSORS, read_tensors_of_lora),
    Reader("Load LoRA File", hostile.safetensors_files(NAMES, hostile.texts()), load_lora_file),
    Reader("Load LoRA File, tensors", LORAS_OF_TENSORS, load_lora_tensors),
    Reader("archive", folders.archives(), in_folder(folders.read_archive)),
    Reader(
        "dataset file",
        st.tuples(st.sampled_from((".toml", ".yaml", ".json")), folders.DATASET_TEXTS),
        in_folder(folders.read_dataset),
    ),
    Reader("list of captions", st.tuples(folders.LIST_NAMES, folders.LIST_TEXTS), in_folder(folders.read_caption_list)),
    Reader("folder layout", folders.layouts(), in_folder(folders.read_folder)),
    Reader("LoRA metadata", METADATA, read_metadata),
    Reader("picture", hostile.damaged(hostile.pictures()), thumbnail(image_thumbnail, ".png")),
    Reader("tables of a clip", hostile.films(), thumbnail(video_thumbnail, ".mp4")),
    Reader("clip", st.deferred(lambda: hostile.damaged(clips())), thumbnail(video_thumbnail, ".mp4")),
)
