"""Wildcards in captions, by ComfyUI's rule for prompts: `a {red|blue} fox` is `a red fox` or `a blue fox`.

Braces may be nested and alternatives may be empty. `\\{`, `\\}` and `\\|` are literal characters
(Comfy-Org/ComfyUI_frontend, formatUtil.ts: processDynamicPrompt).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch

from ...common.untrusted.budgets import WILDCARDS

_SIGN = re.compile(r"\\.|[{}|]|[^\\{}|]+|\\", re.DOTALL)
_ESCAPED = ("\\{", "\\}", "\\|")


class WildcardError(ValueError):
    """Unmatched or too deeply nested brace.

    place: index of the brace in the text, from 0.
    """

    def __init__(self, place: int, wrong: str) -> None:
        super().__init__(wrong)
        self.place = place


def _part_texts(part: "str | tuple[Wildcards, ...]") -> list[tuple[str, float]]:
    """Return the texts of a part, each with its probability."""
    if isinstance(part, str):
        return [(part, 1.0)]
    return [(text, likely / len(part)) for choice in part for text, likely in choice.texts()]


@dataclass(frozen=True)
class Wildcards:
    """Text with wildcards.

    parts: plain text, or the equally likely alternatives of a pair of braces.
    """

    parts: tuple["str | tuple[Wildcards, ...]", ...]

    @cached_property
    def count(self) -> int:
        """Number of ways to choose the alternatives; ways that give the same text count separately."""
        return prod(sum(choice.count for choice in part) for part in self.parts if not isinstance(part, str))

    @cached_property
    def longest(self) -> int:
        """Characters of the longest text, trigger words left out."""
        return sum(
            len(part) if isinstance(part, str) else max(choice.longest for choice in part) for part in self.parts
        )

    @cached_property
    def even(self) -> bool:
        """True if all ways are equally likely, unlike in `{a|{b|c}}`, where a has one half."""
        choices = [part for part in self.parts if not isinstance(part, str)]
        return all(
            len({choice.count for choice in part}) == 1 and all(choice.even for choice in part) for part in choices
        )

    def texts(self) -> Iterator[tuple[str, float]]:
        """Yield the text of each way with its probability."""
        for way in product(*map(_part_texts, self.parts)):
            yield "".join(text for text, _ in way), prod(likely for _, likely in way)

    def sample(self, generator: torch.Generator) -> tuple[tuple[int, ...], str]:
        """Sample one way; returns the indices of the chosen alternatives, and the text."""
        indices: list[int] = []
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += part
                continue
            index = int(torch.randint(len(part), (), generator=generator))
            inner, inner_text = part[index].sample(generator)
            indices += (index, *inner)
            text += inner_text
        return tuple(indices), text


def parse_wildcards(text: str) -> Wildcards:
    """Parse the braces of a text.

    Raises WildcardError for an unmatched brace, for too deeply nested ones and for too many.
    """
    levels: list[list[list[str | tuple[Wildcards, ...]]]] = [[[]]]  # alternatives so far, for each open brace
    opened: list[int] = []
    pairs = 0
    for match in _SIGN.finditer(text):
        sign, place = match.group(), match.start()
        if sign == "{":
            if len(opened) == WILDCARDS.depth:
                raise WildcardError(place, f"a '{{' within {WILDCARDS.depth} others; use fewer")
            pairs += 1
            if pairs > WILDCARDS.items:
                raise WildcardError(place, f"a '{{' after {WILDCARDS.items} others; use fewer")
            levels.append([[]])
            opened.append(place)
        elif sign == "}":
            if not opened:
                raise WildcardError(place, "a '}' without a '{' before it; add one, or write \\} for the sign itself")
            opened.pop()
            alternatives = levels.pop()
            levels[-1][-1].append(tuple(Wildcards(tuple(parts)) for parts in alternatives))
        elif sign == "|" and opened:
            levels[-1].append([])
        else:
            levels[-1][-1].append(sign[1] if sign in _ESCAPED else sign)
    if opened:
        raise WildcardError(opened[-1], "a '{' without a '}' after it; add one, or write \\{ for the sign itself")
    return Wildcards(tuple(levels[0][0]))
