"""Notes on a folder's captions: separators as plain text, captions that read as sentences, the cost of variants."""

import re
from collections.abc import Iterator, Mapping, Sequence

from ...common.text import joined, quantity, quoted, shortlist
from .options import MOST_VARIANTS, CaptionOptions
from .tags import split_tags
from .variants import CaptionVariants

_FULL_STOP = re.compile(r"\w\. \w")
_SENTENCE_WORDS = 12


def variant_notes(
    options: CaptionOptions, folder: str, texts: Sequence[str], variants: Mapping[str, CaptionVariants]
) -> tuple[str, ...]:
    """List the notes on the captions of a folder.

    folder: its name.
    texts: contents of the caption files.
    variants: caption variants by image name, in the same order.
    """
    sampled_captions = [
        f"{name} ({sum(map(bool, forms.weights))} of {forms.possible}{' or more' * (forms.possible == MOST_VARIANTS)})"
        for name, forms in variants.items()
        if forms.possible
    ]
    note = (
        "These captions have more variants than caption_variants allows, so some were picked at random: "
        f"{shortlist(sampled_captions)}."
    )
    read = dict(zip(variants, texts, strict=True))
    return (
        *[note] * bool(sampled_captions),
        *_separators(options, folder, texts),
        *_sentences(options, folder, read),
    )


def _separators(options: CaptionOptions, folder: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield a note on separators in captions whose tags are left as they are."""
    rules = options.tags
    if not rules.makes_variants:
        if rules.separator and any(rules.separator in text for text in texts):
            yield (
                f"Captions of {folder!r} hold {quoted(rules.separator)}, which is plain text as long as shuffle_tags "
                "and tag_dropout are off."
            )


def _sentences(options: CaptionOptions, folder: str, texts: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on captions that read as sentences and would be treated as tags.

    texts: contents of the caption files by image name.
    """
    rules = options.tags
    if not rules.makes_variants or options.caption_dropout == 1:
        return
    names = [name for name, text in texts.items() if any(map(_reads_as_sentence, split_tags(text, rules).free))]
    if names:
        switches = joined([name for name in ("shuffle_tags", "tag_dropout") if getattr(options, name)])
        yield (
            f"Some captions of {folder!r} look like sentences, but {switches} treats the parts between commas as tags: "
            f"{shortlist(names)}; switch it off for them."
        )


def _reads_as_sentence(tag: str) -> bool:
    """Return whether a text can't be a tag, as it has a full stop inside, or a dozen words."""
    return len(tag.split(None, _SENTENCE_WORDS - 1)) == _SENTENCE_WORDS or _FULL_STOP.search(tag) is not None


def encoding_notes(variants: Sequence[CaptionVariants], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on the number and size of the encoded texts if captions have variants.

    sizes: bytes of each encoded text, by its cache key.
    """
    if all(forms.plain for forms in variants):
        return
    rates = sorted({forms.dropout for forms in variants})
    dropped = " to ".join(f"{rate:.4g}" for rate in dict.fromkeys((rates[0] * 100, rates[-1] * 100)))
    empty = f" The empty prompt takes a caption's place in {dropped} % of showings." if rates[-1] else ""
    max_forms = max(len(forms.texts) for forms in variants)
    yield (
        f"The {quantity(len(variants), 'caption has', 'captions have')} up to {quantity(max_forms, 'form')} each: "
        f"{quantity(len(sizes), 'text')}, each encoded once, about {sum(sizes.values()) / 1e9:.2g} GB on disk.{empty}"
    )
