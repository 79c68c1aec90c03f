"""Captions with the class word in place of the trigger words, for differential output preservation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...common.text import cut, plain_phrase, quoted, shortlist
from ...common.untrusted.budgets import CAPTION_FILE, WORDS, check_size


@dataclass(frozen=True)
class ClassWord:
    """Class word and the words that it replaces.

    words: names of the one subject that is learnt.
    class_name: name of its class.
    """

    words: tuple[str, ...]
    class_name: str

    def caption(self, text: str) -> str | None:
        """Replace each of the words, as whole words in any case; None if the caption has none of them.

        Raises OverBudget for a result that is too long for a caption.
        """
        longest_first = sorted(self.words, key=len, reverse=True)
        pattern = "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in longest_first)
        replaced, count = re.subn(pattern, lambda _: self.class_name, text, flags=re.IGNORECASE)
        check_size(CAPTION_FILE, "A caption with the class_word", characters=len(replaced) if count else 0)
        return replaced if count else None


def read_class_word(class_word: str, trigger_words: str) -> ClassWord:
    """Parse the class_word option.

    `man` replaces the trigger words, as a whole and each of their comma-separated parts; `ohwx=man` replaces ohwx.
    Raises ValueError if there is no word to replace, or too many.
    """
    check_size(WORDS, "class_word", characters=len(class_word))
    check_size(WORDS, "trigger_words", characters=len(trigger_words), items=trigger_words.count(","))
    word, equals, class_name = (part.strip() for part in class_word.partition("="))
    if equals and not (word and class_name):
        raise ValueError(f"class_word is {quoted(class_word)}; write it as word=class, such as ohwx=man.")
    if equals:
        return ClassWord((word,), class_name)
    whole = plain_phrase(trigger_words)
    if not whole:
        raise ValueError(
            f"class_word is {quoted(word)} and trigger_words is empty, so there is no word that it could replace; set "
            f"trigger_words, or write class_word as word=class (such as ohwx={cut(word)}) if the captions already "
            "contain the word."
        )
    parts = (part.strip() for part in whole.split(","))
    return ClassWord(tuple(dict.fromkeys((whole, *filter(None, parts)))), word)


def check_class_captions(rule: ClassWord, folder: str, with_class: int, unmatched: Sequence[str]) -> tuple[str, ...]:
    """Check that captions of a folder have the words, and note the images without them.

    with_class: number of captions that have them.
    unmatched: names of the images whose captions have none.
    Raises ValueError if no caption has them.
    """
    if not with_class:
        raise ValueError(
            f"class_word replaces {quoted(rule.words[0])}, which no caption in the folder {folder!r} contains; write a "
            f"word that they contain, as {cut(rule.words[0])}={cut(rule.class_name)} with it in front."
        )
    if not unmatched:
        return ()
    return (
        f"These captions don't have the word {quoted(rule.words[0])}, so they get no class caption: "
        f"{shortlist(unmatched)}.",
    )
