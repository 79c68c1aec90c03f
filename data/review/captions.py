"""Faults of captions: missing, empty, equal, too long, or without the trigger words."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...common.untrusted.budgets import WORDS, check_size
from ...models.catalogue.registry import text_policy
from ..layouts.subsets import Example, Subset
from .findings import EMPTY, EQUAL, LONG, NO_CAPTION, NO_TRIGGER, Finding

CLIP_TOKENS = 75  # that CLIP reads at once, besides the start and the end
TRAINED_TOKENS = 512  # of the longest captions that T5 and other encoders of whole sentences met in training
_CLIP_SEQUENCE = 77

Tokens = Mapping[str, Sequence[Sequence[tuple[Any, ...]]]]


def read_texts(subsets: Sequence[Subset]) -> tuple[dict[str, str], list[Finding]]:
    """Read the captions of a layout: texts by name, and findings on those that are missing or can't be read."""
    texts: dict[str, str] = {}
    findings: list[Finding] = []
    for subset in subsets:
        for example in subset.examples:
            try:
                text = _read(subset, example)
            except ValueError as error:
                findings.append(Finding(example.name, NO_CAPTION, str(error)))
                continue
            if text is None:
                findings.append(Finding(example.name, NO_CAPTION))
            else:
                texts[example.name] = text
    return texts, findings


def _read(subset: Subset, example: Example) -> str | None:
    """Read the caption of an example, the longest of several; None if there is none."""
    source = example.caption
    if source is None:
        return None
    text = max(source.read().split("\n"), key=len) if source.per_line else source.read()
    return subset.caption_text(text).strip()


def caption_faults(
    texts: Mapping[str, str], trigger_words: str, length: Callable[[str], tuple[int, int]] | None
) -> Iterator[Finding]:
    """Yield the faults of captions, by name.

    trigger_words: words that each caption should hold; empty for none.
    length: function that returns the tokens of a caption, and how many its encoder takes.
    Raises OverBudget for too many trigger words.
    """
    check_size(WORDS, "trigger_words", characters=len(trigger_words))
    equal: dict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        if not text:
            yield Finding(name, EMPTY)
            continue
        equal[text].append(name)
        if trigger_words.strip() and not _holds(text, trigger_words.strip()):
            yield Finding(name, NO_TRIGGER)
        if length is not None:
            tokens, most = length(text)
            if tokens > most:
                yield Finding(name, LONG, f"{tokens} tokens, {most} are read")
    for text, names in equal.items():
        if 1 < len(names) == len(texts):
            yield Finding(names[0], EQUAL, f"all have {text[:60]!r}")
        elif len(names) > 1:
            for name in names[1:]:
                yield Finding(name, EQUAL, f"as {names[0]}")


def _holds(text: str, words: str) -> bool:
    """Return whether a text holds the words as whole ones, in any case."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None


def caption_length(clip: Any) -> Callable[[str], tuple[int, int]]:
    """Make the function that counts the tokens of a caption, and tells how many the text encoders take.

    CLIP alone reads CLIP_TOKENS at once, and a longer caption in several pieces. Others read a caption whole, but were
    trained on TRAINED_TOKENS at most.
    """
    policy = text_policy(clip)
    empty = {name: _count(sequences) for name, sequences in policy.tokenize(clip, "").tokens.items()}

    def length(text: str) -> tuple[int, int]:
        tokens: Tokens = policy.tokenize(clip, text).tokens
        lengths = {len(sequence) for sequences in tokens.values() for sequence in sequences}
        most = CLIP_TOKENS if lengths == {_CLIP_SEQUENCE} else TRAINED_TOKENS
        return max(_count(sequences) - empty[name] for name, sequences in tokens.items()), most

    return length


def _count(sequences: Sequence[Sequence[tuple[Any, ...]]]) -> int:
    """Count the tokens without the padding at the end of each sequence, and without the frame of all but the first."""
    total = 0
    for number, sequence in enumerate(sequences):
        end = len(sequence)
        while end > 1 and _token(sequence[end - 1]) == _token(sequence[end - 2]):
            end -= 1
        total += end - (2 if number else 0)
    return total


def _token(pair: tuple[Any, ...]) -> Any:
    return pair[0] if isinstance(pair[0], int) else id(pair[0])
