"""Prompts of sliders and erasures, as terms of the targets that they train towards.

c is the prompt that is trained, v₀ the prediction of the model without the LoRA at the same noisy latent:

    slider   v₀(neutral) ± g·(v₀(positive) − v₀(negative))    c = neutral, with the LoRA at +1 and at −1
    erasure  v₀(target) − g·(v₀(erased) − v₀(target))         c = erased
    keep     v₀(kept)                                         c = kept

The slider is that of Concept Sliders (Gandikota et al. 2023, arXiv 2311.12092), whose code also samples one of its
attributes at a time, trained at both strengths as in ostris/ai-toolkit (ConceptSliderTrainer.py, whose anchor is `keep`
here). The erasure is that of ESD (Gandikota et al. 2023, arXiv 2303.07345) with any target in place of the empty
prompt; with g = 0 it is the model-based ablation of Kumari et al. 2023 (arXiv 2303.13516).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.text import quantity, quoted
from ...common.untrusted.budgets import SETTINGS, check_size
from ..samples import ERASURE, SLIDER

MOST_TERMS = 200


@dataclass(frozen=True)
class WeightedPrompt:
    """Text with the factors of its prediction, see `TargetPrompt`.

    text: the prompt.
    weight: factor of the prediction.
    direction: further factor, negated at a strength of −1.
    """

    text: str
    weight: float
    direction: float = 0.0


@dataclass(frozen=True)
class Term:
    """One prompt that is trained, and its target.

    prompt: what the trained model sees.
    targets: predictions of the frozen model whose sum is the target.
    is_kept: the target is the prediction for the prompt itself.
    """

    prompt: str
    targets: tuple[WeightedPrompt, ...]
    is_kept: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts to encode."""
        return (self.prompt, *(target.text for target in self.targets))


@dataclass(frozen=True)
class Concept:
    """Prompts of a slider or an erasure.

    kind: SLIDER or ERASURE.
    terms: one of them is sampled for each sample of a step.
    """

    kind: str
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if len(self.terms) > MOST_TERMS:
            raise ValueError(f"There are {len(self.terms)} prompts to train; write at most {MOST_TERMS}.")

    @property
    def texts(self) -> list[str]:
        """All texts to encode, each once."""
        return list(dict.fromkeys(text for term in self.terms for text in term.texts))

    def describe(self) -> str:
        """Count the prompts in a sentence for the user."""
        count = sum(term.is_kept for term in self.terms)
        noun = "Pairs of prompts" if self.kind == SLIDER else "Prompts to erase"
        return f"{noun}: {len(self.terms) - count}; prompts that stay: {count}."

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probability of each term: one half for those that are kept together, the other for the rest."""
        count = sum(term.is_kept for term in self.terms)
        halves = 2 if count else 1
        return tuple(1 / (halves * (count if term.is_kept else len(self.terms) - count)) for term in self.terms)


def slider(
    positive: str, negative: str, neutral: str, keep: str, attributes: str, guidance_scale: float = 3.0
) -> Concept:
    """Make the terms of a slider from texts with one prompt a line.

    positive, negative: as many lines each.
    neutral: one line for all, or one for each; empty for the empty prompt.
    keep: prompts whose prediction stays as it was.
    attributes: each is put behind all three prompts of a pair, which makes a pair for each of them.
    guidance_scale: g.

    Raises ValueError for lists that make no pair.
    """
    positives, negatives = lines("positive", positive), lines("negative", negative)
    for name, prompts, example in (
        ("positive", positives, "a photo of a very old person"),
        ("negative", negatives, "a photo of a very young person"),
    ):
        if not prompts:
            raise ValueError(f"{name} is empty; a slider needs a pair of prompts, so write one such as {example!r}.")
    if len(positives) != len(negatives):
        raise ValueError(
            f"positive has {quantity(len(positives), 'prompt')} and negative {len(negatives)}; write one line in "
            "negative for each line of positive."
        )
    neutrals = _one_for_each("neutral", neutral, "positive", len(positives))
    if duplicate := next((text for text, other in zip(positives, negatives, strict=True) if text == other), None):
        raise ValueError(f"positive and negative both have {quoted(duplicate)}, which makes no direction; change one.")
    terms = [
        _pair([_with_attribute(text, attribute) for text in prompts], guidance_scale)
        for prompts in zip(neutrals, positives, negatives, strict=True)
        for attribute in lines("attributes", attributes) or [""]
    ]
    return Concept(SLIDER, (*terms, *_kept_terms(keep, [])))


def erasure(erase: str, target: str, keep: str, guidance_scale: float = 1.0) -> Concept:
    """Make the terms of an erasure from texts with one prompt a line.

    erase: prompts that are moved.
    target: prompts to which they are moved: one line for all, or one for each; empty for the empty prompt.
    keep: prompts whose prediction stays as it was.
    guidance_scale: g.

    Raises ValueError for lists that do not fit together.
    """
    erased = lines("erase", erase)
    if not erased:
        raise ValueError("erase is empty; write the prompt that the model should forget, such as 'Van Gogh'.")
    targets = _one_for_each("target", target, "erase", len(erased))
    if duplicate := next((text for text, other in zip(erased, targets, strict=True) if text == other), None):
        raise ValueError(f"erase and target both have {quoted(duplicate)}, so nothing would change; change one.")
    terms = [
        Term(text, (WeightedPrompt(other, 1 + guidance_scale), WeightedPrompt(text, -guidance_scale)))
        if guidance_scale
        else Term(text, (WeightedPrompt(other, 1.0),))
        for text, other in zip(erased, targets, strict=True)
    ]
    return Concept(ERASURE, (*terms, *_kept_terms(keep, erased)))


def lines(name: str, text: str) -> list[str]:
    """Split a text into its lines, without empty ones. name: of the input, in messages."""
    check_size(SETTINGS, name, characters=len(text))
    return [line.strip() for line in text.splitlines() if line.strip()]


def _one_for_each(name: str, text: str, other_name: str, count: int) -> list[str]:
    """Split a text that has a line for all prompts of another input, or one for each; empty is the empty prompt.

    other_name, count: the other input and the number of its prompts. Raises ValueError for another number of lines.
    """
    prompts = lines(name, text) or [""]
    if len(prompts) == 1:
        return prompts * count
    if len(prompts) != count:
        raise ValueError(
            f"{name} has {quantity(len(prompts), 'prompt')} and {other_name} {count}; write one line for all, or one "
            "for each."
        )
    return prompts


def _pair(prompts: Sequence[str], guidance_scale: float) -> Term:
    """Make the term of a pair. prompts: neutral, positive, negative."""
    neutral, positive, negative = prompts
    return Term(
        neutral,
        (
            WeightedPrompt(neutral, 1.0),
            WeightedPrompt(positive, 0.0, guidance_scale),
            WeightedPrompt(negative, 0.0, -guidance_scale),
        ),
    )


def _with_attribute(text: str, attribute: str) -> str:
    return ", ".join(part for part in (text, attribute) if part)


def _kept_terms(keep: str, erased: Sequence[str]) -> list[Term]:
    """Make the terms of prompts that stay. erased: prompts that can't stay."""
    prompts = lines("keep", keep)
    if duplicate := next((text for text in prompts if text in erased), None):
        raise ValueError(f"erase and keep both have {quoted(duplicate)}; remove it from one of them.")
    return [Term(text, (WeightedPrompt(text, 1.0),), is_kept=True) for text in prompts]
