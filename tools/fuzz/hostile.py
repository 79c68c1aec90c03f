"""Inputs that a stranger might write: long, deep, wide, damaged, and of the wrong kind."""

import io
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from PIL import Image

LONGEST = 60_000  # characters of a text
LARGEST = 4_000_000  # characters of one that is repeated
PIECES = (
    *"a ,.{}|*?[]()<>:;=\"'\\/%~#@&+-_0\n\t\0",
    "{a|b}",
    "(a:1.2)",
    "|||",
    "word ",
    "tag, ",
    "../",
    "-step000010",
    " (001)/",
    "1e999",
    "NaN",
    "0:1, ",
    "x=1\n",
    "file:/",
    "C:\\",
    "\u202e",
    "\ufeff",
    "e\u0301",
    "\U0001f98a",
)
COUNTS = (1, 1, 1, 2, 3, 8, 100, 5000, LONGEST)
NUMBERS = (0, -1, 1, 0.5, 2**31, 2**63, 10**400, 1e308, -1e308, 1e-320, float("inf"), float("nan"), True, None, "", "1")


def texts(longest: int = LONGEST) -> st.SearchStrategy[str]:
    piece = st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    run = st.tuples(piece, st.sampled_from(COUNTS)).map(lambda pair: (pair[0] * pair[1])[:longest])
    return st.lists(run, max_size=6).map(lambda parts: "".join(parts)[:longest])


def repeated(text: str, count: int, most: int = LARGEST) -> str:
    """Repeat a text, as often as the whole stays below `most` characters."""
    return text * max(1, min(count, most // max(1, len(text))))


def values(keys: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """Values of JSON; keys: names that a reader knows."""
    plain = st.sampled_from(NUMBERS) | st.integers(-5, 200) | st.floats(0, 1) | texts(200)
    names = st.sampled_from(tuple(keys) or ("a",)) | texts(20)
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=12
    )


@st.composite
def json_texts(draw: st.DrawFn, keys: Sequence[str] = ()) -> str:
    """JSON, some of it cut, nested thousands of times, or with an entry repeated."""
    text = dumped(draw(values(keys)))
    kind = draw(st.sampled_from(("plain", "plain", "plain", "cut", "deep", "open", "wide")))
    count = draw(st.sampled_from((2, 100, 5000)))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "deep":
        return "[" * count + text + "]" * count
    if kind == "open":
        return '{"a":[' * count + text
    return "[" + repeated(f"{text},", count) + "0]" if kind == "wide" else text


def dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # an integer of more digits than Python prints
        return "0"


def objects(fields: dict[str, Sequence[Any]], keys: Sequence[str] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose fields mostly have one of their usual values."""
    parts = {name: st.sampled_from(tuple(usual)) | values(keys) for name, usual in fields.items()}
    return st.fixed_dictionaries({}, optional=parts)


@st.composite
def damaged(draw: st.DrawFn, whole: Sequence[bytes]) -> bytes:
    """A file with some bytes replaced, cut off, or said twice."""
    data = bytearray(draw(st.sampled_from(tuple(whole))))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(data) - 1) | st.integers(0, min(63, len(data) - 1)))
        piece = draw(st.binary(min_size=1, max_size=8) | st.sampled_from((b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f")))
        data[place : place + len(piece)] = piece
    end = draw(st.none() | st.integers(0, len(data)))
    return bytes(data[:end]) + draw(st.sampled_from((b"", b"", bytes(data[:100]))))


@st.composite
def safetensors_files(draw: st.DrawFn, keys: Sequence[str], metadata: st.SearchStrategy[Any]) -> bytes:
    """Files with a header of safetensors' form, of which offsets, shapes, types and length may be wrong."""
    header: Any = {
        "__metadata__": draw(st.dictionaries(st.sampled_from(("tessera", "ss_tag_frequency", "a")), metadata))
    }
    offset = 0
    for name in draw(st.lists(st.sampled_from(tuple(keys)) | texts(60), max_size=6)):
        rows, columns = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
        size = 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [offset, offset + size]}
        if draw(st.sampled_from((False, False, False, True))):
            header[name] |= draw(objects({"dtype": ("F8_E4M3", "I64", "BOOL"), "shape": ([], [2**40, 2**40], [-1])}))
        offset += size
    text = (
        dumped(header).encode() if draw(st.sampled_from((True, True, True, False))) else draw(json_texts(keys)).encode()
    )
    length = draw(st.sampled_from((len(text),) * 4 + (0, len(text) + 1, 2**40, 2**63)))
    return length.to_bytes(8, "little") + text + bytes(offset)


BOXES = b"moov trak mdia minf stbl stsz stts stsc stco hdlr moof traf trun mdat meta udta free cmov".split()
SIZES = (0, 1, 2, 3, 8, 1000, 50_000_000, 2**31, 2**32 - 1)


def films() -> st.SearchStrategy[bytes]:
    """Boxes of MP4 in any order, and what they claim."""
    kinds = st.sampled_from(BOXES)
    numbers = st.lists(st.sampled_from(SIZES).map(lambda size: size.to_bytes(4, "big")), max_size=6).map(b"".join)
    leaves = st.tuples(kinds, numbers).map(lambda pair: box(*pair))
    trees = st.recursive(
        leaves, lambda inner: st.tuples(kinds, st.lists(inner, max_size=4).map(b"".join)).map(lambda pair: box(*pair))
    )
    return st.lists(trees, max_size=4).map(lambda parts: box(b"ftyp", b"isom" * 2) + b"".join(parts))


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


@cache
def pictures() -> list[bytes]:
    """A small picture in each format that folders hold."""
    files = []
    for format, mode in (
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("JPEG", "RGB"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
        ("BMP", "RGB"),
        ("TIFF", "RGB"),
    ):
        data = io.BytesIO()
        Image.linear_gradient("L").resize((40, 24)).convert(mode).save(data, format)
        files.append(data.getvalue())
    return files
