"""Caption options of a folder."""

from dataclasses import dataclass

from ...common.text import finite, joined, quoted
from .tags import TagRules

MOST_VARIANTS = 1000
"""Limit of the variants of one caption; more are neither encoded nor counted."""


@dataclass(frozen=True)
class CaptionOptions:
    """Caption options of a folder.

    caption_dropout: probability that a showing has the empty prompt in place of its caption.
    shuffle_tags: sample the order of the tags.
    keep_tokens: number of leading tags that stay in place, see TagRules.
    tag_dropout: probability that a tag is left out.
    caption_per_line: each line of a caption file is a caption of its own.
    wildcards: expand `{a|b}` to either alternative.
    caption_variants: number of variants to sample of a caption that has more.
    keep_tokens_separator: mark that ends the fixed tags of a caption, see TagRules.
    Raises ValueError for values out of range and for options that contradict each other.
    """

    caption_dropout: float = 0.0
    shuffle_tags: bool = False
    keep_tokens: int = 0
    tag_dropout: float = 0.0
    caption_per_line: bool = False
    wildcards: bool = False
    caption_variants: int = 8
    keep_tokens_separator: str = "|||"

    def __post_init__(self) -> None:
        finite(self)
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout is {self.caption_dropout:g}; set it between 0 and 1.")
        if not 0 <= self.tag_dropout < 1:
            raise ValueError(f"tag_dropout is {self.tag_dropout:g}; set it to 0 or more and below 1.")
        if self.keep_tokens < 0:
            raise ValueError(f"keep_tokens is {self.keep_tokens}; set it to 0 or more.")
        if "," in self.keep_tokens_separator:
            raise ValueError(
                f"keep_tokens_separator is {quoted(self.keep_tokens_separator)}, but commas separate tags; set it to "
                "something else, such as |||."
            )
        if not 1 <= self.caption_variants <= MOST_VARIANTS:
            raise ValueError(f"caption_variants is {self.caption_variants}; set it between 1 and {MOST_VARIANTS}.")
        if self.caption_variants == 1 and (options := self.sampled()):
            raise ValueError(
                f"caption_variants is 1, so {joined(options)} would always show the same version of each caption; set "
                f"it to 2 or more, or switch {joined(options)} off."
            )
        if self.caption_dropout == 1 and (unseen := [*self.sampled(), *["caption_per_line"] * self.caption_per_line]):
            raise ValueError(
                f"caption_dropout is 1, so no caption is ever shown and {joined(unseen)} can do nothing; lower "
                f"caption_dropout, or switch {joined(unseen)} off."
            )

    @property
    def tags(self) -> TagRules:
        """Rules for captions of tags."""
        return TagRules(self.shuffle_tags, self.tag_dropout, self.keep_tokens, self.keep_tokens_separator.strip())

    def sampled(self) -> list[str]:
        """List the names of the options that are on and make variants to sample from."""
        switches = {"shuffle_tags": self.shuffle_tags, "tag_dropout": self.tag_dropout, "wildcards": self.wildcards}
        return [name for name, value in switches.items() if value]
