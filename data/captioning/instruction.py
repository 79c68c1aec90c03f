"""Style of captions: the instruction for a model, and what is done with its answer."""

import re
from dataclasses import dataclass

from ...common.text import one_of, within
from ...common.untrusted.budgets import INSTRUCTION, WORDS, check_size

SENTENCE = "sentence"
PARAGRAPH = "paragraph"
TAGS = "tags"
STYLES = (SENTENCE, PARAGRAPH, TAGS)
MOST_WORDS = 500
_TEXTS = {
    SENTENCE: "Describe this picture in one sentence of at most {words} words.",
    PARAGRAPH: "Describe this picture in one paragraph of at most {words} words: the subject and what it does, the "
    "surroundings, the light, and what kind of picture it is.",
    TAGS: "Name what this picture shows as at most {words} short tags in lower case, with commas between them.",
}
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?。！？][\"”’)]*(?=\s|\Z)")


@dataclass(frozen=True)
class CaptionStyle:
    """Settings of captions; fields are inputs of Caption Folder.

    style: one of STYLES.
    max_words: words of a caption, or tags.
    trigger_words: name of the subject, which each caption holds.
    never_use: words that no caption holds, with commas between them.
    instruction: text for the model in place of the one of the style.
    """

    style: str = SENTENCE
    max_words: int = 40
    trigger_words: str = ""
    never_use: str = ""
    instruction: str = ""

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        one_of("style", self.style, STYLES)
        within("max_words", self.max_words, 1, MOST_WORDS)
        check_size(WORDS, "trigger_words", characters=len(self.trigger_words))
        check_size(WORDS, "never_use", characters=len(self.never_use), items=self.never_use.count(","))
        check_size(INSTRUCTION, "instruction", characters=len(self.instruction))

    @property
    def trigger(self) -> str:
        """The trigger words without what is around them."""
        return self.trigger_words.strip().strip(",").strip()

    @property
    def never(self) -> tuple[str, ...]:
        """The words that no caption holds."""
        return tuple(filter(None, map(str.strip, self.never_use.split(","))))

    def prompt(self) -> str:
        """Write the instruction for a model."""
        sentences = [self.instruction.strip() or _TEXTS[self.style].format(words=self.max_words)]
        if self.trigger:
            sentences.append(f"The main subject is called {self.trigger}; use this name for it.")
        if self.never:
            sentences.append(f"Never use these words: {', '.join(self.never)}.")
        return " ".join([*sentences, "Answer with the caption alone, without quotes and without an introduction."])

    def max_tokens(self) -> int:
        """Return how many tokens an answer may have: some more than its words, as words have several."""
        return 3 * self.max_words + 32

    def breaks(self, text: str) -> bool:
        """Return whether a text holds a word that no caption may hold."""
        return any(pattern.search(text) for pattern in self._patterns())

    def finish(self, answer: str, whole: bool = True) -> str:
        """Make a caption of an answer: on one line, without words that it may not hold. The trigger words aren't added.

        whole: the model came to an end; otherwise an unfinished last sentence or tag is left out.
        """
        text = " ".join(_THOUGHTS.sub(" ", answer).split()).strip().strip('"“”').strip()
        return self.tags(text.split(","), whole) if self.style == TAGS else self._sentences(text, whole)

    def with_trigger(self, caption: str) -> str:
        """Put the trigger words before a caption that doesn't hold them; an empty one stays empty."""
        if not self.trigger or not caption or self.trigger.lower() in caption.lower():
            return caption
        return f"{self.trigger}, {caption}"

    def tags(self, tags: list[str], whole: bool = True) -> str:
        """Join tags, each once, without those that hold a forbidden word, at most `max_words` of them."""
        complete = tags if whole or len(tags) < 2 else tags[:-1]
        plain = (tag.strip().strip(".").strip() for tag in complete)
        allowed = dict.fromkeys(tag for tag in plain if tag and not self.breaks(tag))
        return ", ".join(list(allowed)[: self.max_words])

    def _sentences(self, text: str, whole: bool) -> str:
        ends = [match.end() for match in _SENTENCE_END.finditer(text)]
        if not whole and ends:
            text = text[: ends[-1]]
        for pattern in self._patterns():
            text = pattern.sub("", text)
        text = re.sub(r" ([,.;:!?])", r"\1", " ".join(text.split()))
        return re.sub(r",(\s*,)+", ",", text).strip(" ,")

    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(_edge(word[0], "<") + re.escape(word) + _edge(word[-1], ""), re.I) for word in self.never]


def _edge(character: str, side: str) -> str:
    """Make the pattern of a word's edge; Chinese and Japanese have no spaces between words."""
    return rf"(?{side}!\w)" if character.isascii() else ""
