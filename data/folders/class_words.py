"""Captions with the word of the class in place of the trigger words, for differential output preservation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.text import shortlist


@dataclass(frozen=True)
class ClassWord:
    """words: what calls the one thing that is learnt; of_class: what calls all of its kind."""

    words: tuple[str, ...]
    of_class: str

    def caption(self, text: str) -> str | None:
        """The caption with each of the words replaced, whole and in any case; None where it holds none of them."""
        longest_first = sorted(self.words, key=len, reverse=True)
        pattern = "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in longest_first)
        replaced, count = re.subn(pattern, lambda _: self.of_class, text, flags=re.IGNORECASE)
        return replaced if count else None


def read_class_word(class_word: str, trigger_words: str) -> ClassWord:
    """`man` stands for the trigger words, as a whole and each that commas part; in `ohwx=man` it stands for ohwx.

    Raises ValueError where there is nothing that it could stand for.
    """
    word, equals, named = (part.strip() for part in class_word.partition("="))
    if equals and not (word and named):
        raise ValueError(f"class_word is {class_word!r}; write it as word=class, such as ohwx=man.")
    if equals:
        return ClassWord((word,), named)
    whole = trigger_words.strip().rstrip(",").rstrip()
    if not whole:
        raise ValueError(
            f"class_word is {word!r} and trigger_words is empty, so that there is no word that it could stand for; set "
            f"trigger_words, or write class_word as word=class (such as ohwx={word}) where the captions hold the word "
            f"already."
        )
    parts = (part.strip() for part in whole.split(","))
    return ClassWord(tuple(dict.fromkeys((whole, *filter(None, parts)))), word)


def check_class_captions(rule: ClassWord, folder: str, with_class: int, without: Sequence[str]) -> tuple[str, ...]:
    """ValueError where no caption of a folder holds the words, a note where some don't. without: the names of those."""
    if not with_class:
        raise ValueError(
            f"class_word stands for {rule.words[0]!r}, which no caption of the folder {folder!r} holds; write the word "
            f"that they hold, as {rule.words[0]}={rule.of_class} with it in front."
        )
    if not without:
        return ()
    return (f"Without the word {rule.words[0]!r}, so without a class caption: {shortlist(without)}.",)
