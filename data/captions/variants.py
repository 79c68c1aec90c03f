"""Caption variants of an image: its lines, wildcards, and the orders and selections of its tags.

All variants that training will show are sampled before anything is encoded, so training needs no text encoder.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...common.rng import generator
from ...common.text import plain_phrase
from ...common.untrusted.budgets import CAPTION_FILE, CAPTION_FORMS, TAGS, WORDS, check_size
from .options import MOST_VARIANTS, CaptionOptions
from .tags import TagRules, split_tags
from .wildcards import WildcardError, Wildcards, parse_wildcards


@dataclass(frozen=True)
class CaptionVariants:
    """Variants of one image's caption.

    texts: distinct texts. Validation uses the first; of tags it is the caption as written.
    weights: probability of each text in training, 1 in sum; 0 for the first text if it was not sampled.
    dropout: probability of the empty prompt in place of any text.
    possible: number of variants to sample from, at most MOST_VARIANTS; 0 if all are taken.
    class_texts: each text with the class word in place of the trigger words, None for a text without trigger words;
        empty if no class captions are requested.
    """

    texts: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)
    dropout: float = 0.0
    possible: int = 0
    class_texts: tuple[str | None, ...] = ()

    @property
    def plain(self) -> bool:
        """True for a single text without caption dropout and class caption."""
        return len(self.texts) == 1 and not self.dropout and not self.class_texts


@dataclass(frozen=True)
class _Caption:
    """One caption of a file.

    text: its text.
    read: the same text with parsed wildcards, or as plain text if wildcards are off.
    """

    text: str
    read: Wildcards


def make_caption_variants(text: str, options: CaptionOptions, trigger_words: str, name: str) -> CaptionVariants:
    """Make the caption variants of a caption file.

    text: content of the file.
    trigger_words: prepended to each variant, with a comma.
    name: file name in messages.

    A caption with at most `caption_variants` variants gets all of them. Of others that many are sampled; the sample
    depends on the text only, and a larger number extends it. If tags are sampled, the caption with all tags in their
    written order comes first, with the probability at which it was sampled. All captions of a file are equally likely.
    Raises ValueError for unmatched braces, with their position, and for trigger words that would never be shown or are
    too long.
    """
    check_size(WORDS, "trigger_words", characters=len(trigger_words))
    words = plain_phrase(trigger_words)
    if options.caption_dropout == 1:
        if words:
            raise ValueError(
                "caption_dropout is 1, so the trigger_words would never be shown; lower caption_dropout, or leave "
                "trigger_words empty."
            )
        return CaptionVariants(("",))
    captions = list(_captions(text, options, name)) or [_Caption("", Wildcards(("",)))]
    weights: dict[str, float] = {}
    possible, any_sampled = 0, False
    for caption in captions:
        _check_sizes(caption, options.tags, name)
        count = _count(caption.read, options.tags)
        variants_of = _all_variants if count <= options.caption_variants else _sampled_variants
        as_written = (
            [(_caption_as_written(caption, options.tags), 0.0)]
            if variants_of is _sampled_variants and options.tags.makes_variants and not weights
            else []
        )
        for form, likely in (*as_written, *variants_of(caption, options)):
            shown_form = ", ".join(filter(None, (words, form.strip())))
            weights[shown_form] = weights.get(shown_form, 0.0) + likely / len(captions)
        check_size(CAPTION_FORMS, f"The caption file {name!r}", items=len(weights))
        possible += count
        any_sampled |= variants_of is _sampled_variants
    return CaptionVariants(
        tuple(weights),
        tuple(weights.values()),
        options.caption_dropout,
        min(possible, MOST_VARIANTS) if any_sampled else 0,
    )


def _check_sizes(caption: _Caption, rules: TagRules, name: str) -> None:
    """Raise OverBudget for a caption whose variants would be too long, or of too many tags."""
    subject = f"A caption of {name!r}"
    check_size(CAPTION_FILE, subject, characters=caption.read.longest)
    if rules.makes_variants:
        check_size(TAGS, subject, items=caption.text.count(","))


def _captions(text: str, options: CaptionOptions, name: str) -> Iterator[_Caption]:
    """Yield the captions of a file, without blank ones."""
    for number, line in enumerate(caption_lines(text, options)):
        if caption := line.strip():
            yield _Caption(caption, _read(line, name, number) if options.wildcards else Wildcards((caption,)))


def caption_lines(text: str, options: CaptionOptions) -> list[str]:
    """Split the content of a file into its captions, blank lines included."""
    return text.split("\n") if options.caption_per_line else [text]


def _read(text: str, name: str, lines_before: int) -> Wildcards:
    """Parse the wildcards of a caption; raises ValueError with line and column in the file."""
    try:
        return parse_wildcards(text)
    except WildcardError as error:
        lines = text[: error.place].split("\n")
        place = f"line {lines_before + len(lines)}, column {len(lines[-1]) + 1}"
        raise ValueError(f"The caption file {name!r} has in {place} {error}, or switch wildcards off.") from error


def _count(caption: Wildcards, rules: TagRules) -> int:
    """Count the variants of a caption; above MOST_VARIANTS the count need not be exact."""
    if caption.count > MOST_VARIANTS or not rules.makes_variants:
        return caption.count
    return sum(split_tags(text, rules).count(rules) for text, _ in caption.texts())


def _all_variants(caption: _Caption, options: CaptionOptions) -> Iterator[tuple[str, float]]:
    """Yield each variant of a caption with its probability."""
    rules = options.tags
    for text, likely in caption.read.texts():
        for form, share in split_tags(text, rules).variants(rules) if rules.makes_variants else [(text, 1.0)]:
            yield form, likely * share


def _caption_as_written(caption: _Caption, rules: TagRules) -> str:
    """Return the caption with all its tags in written order; its wildcards are those of the first sample."""
    tags = split_tags(caption.read.sample(_draws_of(caption))[1], rules)
    return tags.text(tags.free)


def _draws_of(caption: _Caption) -> torch.Generator:
    """Generator seeded by the caption's text, so that each run samples the same variants."""
    return generator(0, "caption form", caption.text)


def _sampled_variants(caption: _Caption, options: CaptionOptions) -> Iterator[tuple[str, float]]:
    """Sample as many variants as allowed, each with the same probability."""
    rules, limit = options.tags, options.caption_variants
    # Equally likely variants are sampled without replacement. Otherwise with replacement: a variant that comes twice
    # has to count twice, or the sample would distort the probabilities.
    alike = caption.read.even and not rules.dropout and (caption.read.count == 1 or not rules.shuffle)
    draws = _draws_of(caption)
    samples_seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    number = 0
    while number < limit:
        way, text = caption.read.sample(draws)
        tag_indices: tuple[int, ...] = ()
        if rules.makes_variants:
            tag_indices, text = split_tags(text, rules).sample(rules, draws)
        if not alike or (way, tag_indices) not in samples_seen:
            samples_seen.add((way, tag_indices))
            number += 1
            yield text, 1 / limit
