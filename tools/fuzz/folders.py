"""Folders that a stranger packed: archives, dataset files of other trainers, lists of captions, and odd names."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import hostile
from hypothesis import strategies as st
from tessera.data.folders.dataset import Places, folder_fingerprint, scan_images, scan_videos
from tessera.data.layouts.archives import unpack
from tessera.data.layouts.caption_lists import match_lists, read_list
from tessera.data.layouts.files import all_files
from tessera.data.layouts.layout import LAYOUTS
from tessera.data.media.clip_windows import Extraction
from watch import Broken

MEMBERS = st.lists(
    st.tuples(
        st.sampled_from(("a.png", "in/a.png", "in/a.txt", "../a.png", "/a.png", "a.png/b.png", "c:a.png", "con.png"))
        | hostile.texts(300).map(lambda text: text + ".png"),
        st.sampled_from((b"", b"a fox", hostile.pictures()[0], bytes(3 << 20), b"1" * 300_000)),
        st.sampled_from((tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)),
    ),
    max_size=5,
)
HEADERS = st.dictionaries(
    st.sampled_from(("path", "size", "GNU.sparse.map", "GNU.sparse.major", "GNU.sparse.size", "hdrcharset")),
    st.sampled_from(("0", "1", "-1", "9" * 30, "0,1,2,3", "BINARY", "1" * 50_000)) | hostile.texts(100),
    max_size=3,
)


def zipped(members: list[tuple[str, bytes, bytes]]) -> bytes:
    """Pack members as a zip file; the kind of one counts in a tar alone."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, content, _ in members:
            packed.writestr(zipfile.ZipInfo(name or "a"), content, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def tarred(members: list[tuple[str, bytes, bytes]], headers: dict[str, str], packing: str) -> bytes:
    """Pack members as a tar. headers: of PAX, for each. packing: "gz" or empty."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{packing}", format=tarfile.PAX_FORMAT) as packed:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(content) if kind == tarfile.REGTYPE else 0, "a.png"
            info.pax_headers = headers
            packed.addfile(info, io.BytesIO(content))
    return data.getvalue()


@st.composite
def archives(draw: st.DrawFn) -> tuple[str, bytes]:
    """Names and bytes of archives, some of them damaged."""
    members = draw(MEMBERS)
    ending = draw(st.sampled_from((".zip", ".tar", ".tar.gz")))
    packing = "gz" if ending.endswith("gz") else ""
    data = zipped(members) if ending == ".zip" else tarred(members, draw(HEADERS), packing)
    return f"a{ending}", draw(st.just(data) | hostile.damaged([data]))


def read_archive(folder: Path, archive: tuple[str, bytes]) -> None:
    """Unpack an archive. Raises Broken for a file outside of the cache, and for what an error leaves there."""
    name, data = archive
    (folder / "photos").mkdir()
    (folder / "photos" / name).write_bytes(data)
    try:
        unpack(folder / "photos" / name, folder / "cache", lambda: None)
    except ValueError:
        if any(path.is_file() for path in (folder / "cache").rglob("*")):
            raise Broken("an archive that is refused left files") from None
        raise
    finally:
        outside = [path for path in folder.rglob("*") if path.is_symlink() or not path.resolve().is_relative_to(folder)]
        stray = [path for path in folder.iterdir() if path.name not in ("photos", "cache")]
        if outside or stray or len(list((folder / "photos").iterdir())) > 1:
            raise Broken("an archive wrote outside of its folder")


# Dataset files

BLOCK_FIELDS = {
    "image_dir": ("in", ".", "../out", "/", "in/in"),
    "image_directory": ("in", "/etc"),
    "folder_path": ("in", "."),
    "metadata_file": ("list.jsonl", "in"),
    "image_jsonl_file": ("list.jsonl",),
    "control_directory": ("in", ["in", "in"]),
    "mask_path": ("in",),
    "num_repeats": (3, 10**9),
    "caption_extension": (".txt", "png"),
    "class_tokens": ("fox",),
    "trigger_word": ("[trigger]", "fox"),
    "caption_prefix": ("a ",),
    "keep_tokens": (1,),
    "frame_sample": (4,),
    "target_frames": ([1, 25],),
    "loss_multiplier": (1.0,),
    "flip_aug": (True,),
}
BLOCKS = st.lists(hostile.objects(BLOCK_FIELDS), max_size=3)
DATASETS = st.fixed_dictionaries(
    {},
    optional={
        "general": hostile.objects(BLOCK_FIELDS),
        "datasets": BLOCKS | st.lists(st.fixed_dictionaries({"subsets": BLOCKS}), max_size=2),
        "config": st.fixed_dictionaries({"process": st.lists(st.fixed_dictionaries({"datasets": BLOCKS}), max_size=2)}),
    },
)
YAML_PIECES = ("a: &a {x: 1}\n", "b: &b {<<: [*a, *a]}\n", "<<: [*b, *b]\n", "- ", "[", "{", "a.b.", "!!set ", "? ")
DATASET_TEXTS = st.one_of(
    DATASETS.map(hostile.dumped),  # JSON is YAML too
    DATASETS.map(lambda value: "\n".join(toml_lines(value, ""))),
    hostile.json_texts(tuple(BLOCK_FIELDS)),
    st.lists(
        st.tuples(st.sampled_from(YAML_PIECES), st.sampled_from((1, 2, 30, 5000))).map(lambda pair: pair[0] * pair[1])
        | hostile.texts(2000),
        max_size=5,
    ).map("".join),
)


def toml_lines(value: Any, name: str) -> list[str]:
    """Write plain values as TOML. name: of the table, empty at the top."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [line for item in value for line in (f"[[{name}]]", *toml_lines(item, name))]
    if not isinstance(value, dict):
        return []
    tables = {key: item for key, item in value.items() if isinstance(item, dict | list)}
    lines = [f"{json.dumps(key)} = {hostile.dumped(item)}" for key, item in value.items() if key not in tables]
    return lines + [line for key, item in tables.items() for line in toml_lines(item, f"{name}.{key}".strip("."))]


# Lists of captions

ROW = hostile.objects(
    {
        "file_name": ("a.png", "in/b.png", "../a.png"),
        "text": ("a fox",),
        "tags": (["a", "b"],),
        "control_path_1": ("x",),
    }
)
LIST_TEXTS = st.one_of(
    st.lists(ROW.map(hostile.dumped) | hostile.texts(500) | hostile.json_texts(("file_name",)), max_size=5).map(
        "\n".join
    ),
    st.lists(ROW, max_size=4).map(hostile.dumped),
    hostile.json_texts(("file_name", "text")),
    hostile.texts(),
    st.tuples(st.sampled_from(("file_name,text\n", "a," * 5000 + "\n", "a.png: ", " " * 300 + "a.jpg ", "\n" * 5000)))
    .map("".join)
    .flatmap(lambda start: hostile.texts().map(start.__add__)),
)
LIST_NAMES = st.sampled_from(("metadata.jsonl", "metadata.csv", "captions.json", "captions.txt", "prompts.tsv"))


def read_caption_list(folder: Path, name_and_text: tuple[str, str]) -> None:
    """Read a list, and match it to files."""
    name, text = name_and_text
    write_photos(folder)
    (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    match_lists([read_list(folder / name)], all_files(folder))


# Whole folders

FILE_NAMES = st.sampled_from(
    (
        *("10_fox/a.png", "1_reg/a.png", "1024px_2_fox/a.png", "a_mask.png", "a-masklabel.png", "masks/a.png"),
        *("a_0.png", "a_1111111111.png", "conditioning/a_0.png", "a.TXT", "a.caption", "a.json", "b.png", "a.mask"),
        *("metadata.jsonl", "captions.txt", "d.toml", "d.yaml", "config.json", "a.zip", "a.mp4", "e\u0301.png"),
    )
) | hostile.texts(60).map(lambda text: "".join(letter for letter in text if letter not in "/\0")[:60] + ".png")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, bytes], str]:
    """Files of a folder by name, and the choice of a layout."""
    contents = st.one_of(
        hostile.texts(500).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.sampled_from((hostile.pictures()[0], b"", b"\xff\xfe\xff", b"\xff\xfe\0\0a")),
    )
    files = draw(st.dictionaries(FILE_NAMES, contents, max_size=6))
    for name in files.keys() & {"d.toml", "d.yaml", "config.json"}:
        files[name] = draw(DATASET_TEXTS).encode("utf-8", "surrogatepass")
    for name in files.keys() & {"metadata.jsonl", "captions.txt"}:
        files[name] = draw(LIST_TEXTS).encode("utf-8", "surrogatepass")
    return files, draw(st.sampled_from(LAYOUTS))


def write_photos(folder: Path) -> None:
    """Write two pictures with captions, one of them in a folder."""
    (folder / "in").mkdir(exist_ok=True)
    for place in ("a", "in/b"):
        (folder / f"{place}.png").write_bytes(hostile.pictures()[0])
        (folder / f"{place}.txt").write_text("a fox")


def write_all(photos: Path, files: dict[str, bytes]) -> None:
    """Write two pictures, and the files by name."""
    write_photos(make(photos))
    for name, content in files.items():
        path = photos / name
        if not path.parent.is_file() and not path.is_dir():
            make(path.parent)
            path.write_bytes(content)


def read_folder(folder: Path, files_and_layout: tuple[dict[str, bytes], str]) -> None:
    """Read a folder as both folder nodes do, and its fingerprint. Raises Broken for a file from elsewhere."""
    files, layout = files_and_layout
    write_all(folder / "photos", files)
    scan(folder / "photos", layout, folder / "cache")


def read_dataset(folder: Path, ending_and_text: tuple[str, str]) -> None:
    """Read a folder with a dataset file."""
    ending, text = ending_and_text
    write_photos(make(folder / "photos"))
    (folder / "photos" / "list.jsonl").write_text('{"file_name": "a.png", "text": "a"}')
    (folder / "photos" / f"dataset{ending}").write_text(text, encoding="utf-8", errors="surrogatepass")
    make(folder / "out")
    scan(folder / "photos", "auto", folder / "cache")


def scan(photos: Path, layout: str, cache: Path) -> None:
    """Read a folder's state and its pictures, else its clips. Raises Broken for a file from elsewhere."""
    places = Places(layout, open_archive=lambda archive: unpack(archive, cache, lambda: None))
    folder_fingerprint(photos, ".txt", places=Places(layout))
    try:
        dataset = scan_images(photos, places=places)
    except ValueError:
        dataset = scan_videos(photos, Extraction(), places=places)
    for entry in dataset.entries:
        if not any(entry.path.resolve().is_relative_to(place) for place in (photos, cache)):
            raise Broken(f"{entry.path} was read, which is not in the folder")


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
