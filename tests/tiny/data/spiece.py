"""A SentencePiece model of single characters, written by hand: enough for a tokenizer whose words do not matter.

The fields are those of sentencepiece_model.proto: ModelProto.pieces is 1, its piece, score and type are 1, 2 and 3.
"""

import string
import struct

UNKNOWN, CONTROL = 2, 3
SPECIAL = (("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN))  # umT5's first ids: 0, 1 and 2
SPACE = "\u2581"
CHARACTERS = SPACE + string.ascii_letters + string.digits + string.punctuation
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
GEMMA = (("<pad>", CONTROL), ("</s>", CONTROL), ("<s>", CONTROL), ("<unk>", UNKNOWN))  # Gemma's first ids


def _bytes_field(number: int, content: bytes) -> bytes:
    assert len(content) < 128, "a length of one byte is written"
    return bytes([number << 3 | 2, len(content)]) + content


def _piece(text: str, kind: int | None = None) -> bytes:
    body = _bytes_field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", 0.0)
    return _bytes_field(1, body if kind is None else body + bytes([3 << 3, kind]))


def spiece_model(special: tuple[tuple[str, int], ...] = SPECIAL) -> bytes:
    """The serialized model: padding, end and unknown, then a piece for each printable ASCII character.

    special: pieces in place of these first ones.
    """
    return b"".join([*(_piece(*piece) for piece in special), *map(_piece, CHARACTERS)])
