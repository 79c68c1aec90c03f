"""Run names, normalised so that every file system accepts them."""

import re
from unicodedata import category, name, normalize

from .text import quoted

LONGEST_NAME = 120  # leaves room for the key, the step and the ending within the 255 bytes of a file name
_LONGEST_PATH = 2000  # characters, folders included
ENDING = ".safetensors"
# Device names on Windows, whatever the ending.
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
# Characters reserved by Windows; "/" and "\" separate folders.
_RESERVED = frozenset('<>:"|?*')
# Joiners, which occur inside words of Persian and of Indian scripts, and in emoji.
_JOINERS = frozenset("\u200c\u200d")
_VARIABLE = re.compile(r"%[A-Za-z][^%/]*%")
_FIX = "use a plain name such as 'my_lora' or 'styles/my_lora'"


def plain_name(output_name: str) -> str:
    """Normalise an output name to the run's name: composed letters (NFC), "/" between folders, no spaces around it, and
    no `.safetensors` at the end, which is added to the file.

    Raises ValueError, which names the character, unless it is a relative name that every file system accepts.
    """
    if len(output_name) > _LONGEST_PATH:  # to compose accents takes a time quadratic in their number
        raise ValueError(f"output_name has {len(output_name):,} characters; use at most {_LONGEST_PATH:,}.")
    *folders, last = (part.strip() for part in re.split(r"[/\\]", normalize("NFC", output_name)))
    if last.lower().endswith(ENDING):
        last = last[: -len(ENDING)].rstrip()
    parts = [*folders, last]
    for part in parts:
        if _VARIABLE.search(part):
            raise ValueError(
                f"output_name is {quoted(output_name)}; dates and other %…% don't work here, since a run is found "
                f"again by its name: {_FIX} (filename_prefix of Save LoRA takes %date:yyyy-MM-dd%)."
            )
        if wrong := next((letter for letter in part if not _is_taken(letter)), None):
            raise ValueError(
                f"output_name is {quoted(output_name)}; not every disk takes {_called(wrong)} in a name: {_FIX}."
            )
        if not part.strip(". "):
            raise ValueError(
                f"output_name is {quoted(output_name)}; {_FIX}, without '..', drive letters or a leading slash."
            )
        if _DEVICE.fullmatch(part):
            raise ValueError(f"output_name is {quoted(output_name)}; Windows doesn't allow the name {part!r}: {_FIX}.")
        if (length := len(part.encode())) > LONGEST_NAME:
            raise ValueError(f"output_name has {length} bytes between two slashes; use at most {LONGEST_NAME}.")
    return "/".join(parts)


def _is_taken(letter: str) -> bool:
    kind = category(letter)
    return letter in _JOINERS or not (letter in _RESERVED or kind.startswith("C") or kind in ("Zl", "Zp"))


def _called(letter: str) -> str:
    description = name(letter, f"U+{ord(letter):04X}").lower().replace("u+", "U+")
    return f"{letter!r} ({description})" if letter.isprintable() else description
