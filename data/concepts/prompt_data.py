"""Training data of a slider or an erasure: the samples' captions give way to the concept's prompts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ...common.progress import Interrupted, Progress
from ...common.text import shortlist
from ...models.catalogue.registry import text_policy
from ...models.text import TextPolicy
from ..encode.prompts import EncodedPrompt, encode_prompts
from ..preparation.empty_caption import beside_picture
from ..samples import (
    FIRST_VARIANT,
    Prompt,
    Sample,
    SampleTensors,
    SampleVariant,
    TargetPrompt,
    TrainingData,
    check_training_samples,
)
from .prompts import Concept, Term


def with_concept(
    data: TrainingData, concept: Concept, clip: Any, cache_dir: Path, progress: Progress, interrupted: Interrupted
) -> TrainingData:
    """Replace the captions of all samples by the prompts of a concept.

    The terms become caption variants, all of one length if the text encoders' policy pads them, so that they need no
    more graphs than a caption does. Regularisation samples keep their captions and are trained to stay as they are.

    Raises ValueError for data or text encoders that do not fit, before anything is encoded.
    """
    policy = text_policy(clip)
    _check_data(data, policy)
    encoded = encode_prompts(clip, policy, concept.texts, cache_dir, progress, interrupted)
    _check_width(data, encoded)
    return with_prompts(data, concept, encoded, policy)


def with_prompts(
    data: TrainingData, concept: Concept, encoded: Mapping[str, EncodedPrompt], policy: TextPolicy
) -> TrainingData:
    """Replace the captions of all samples by the encoded prompts of a concept, see `with_concept`."""
    prompts = {text: prompt.prompt for text, prompt in encoded.items()}
    samples = tuple(_concept_sample(sample, concept, prompts, policy) for sample in data.samples)
    keys = [
        ([encoded[text].key for text in term.texts], [(target.weight, target.direction) for target in term.targets])
        for term in concept.terms
    ]
    facts = {"kind": concept.kind, "prompts": [_describe(term) for term in concept.terms]}
    return replace(
        data,
        samples=samples,
        fingerprint=fingerprint(data.fingerprint, concept.kind, keys),
        made_with={**data.made_with, "concept": facts},
        family=data.family or policy.family,
    )


def check_plain(data: TrainingData) -> None:
    """Raise ValueError for data that is a concept's already, or that has nothing to train on."""
    if concept := next((sample.concept for sample in data.samples if sample.concept), ""):
        raise ValueError(f"data is for {concept} already; connect the data of Prepare Dataset.")
    check_training_samples(sample.regularisation for sample in data.samples)


def _check_data(data: TrainingData, policy: TextPolicy) -> None:
    check_plain(data)
    if data.family and data.family != policy.family:
        raise ValueError(
            f"clip is for {policy.family}, but data was prepared for {data.family}; connect the text encoders of the "
            "model that will be trained."
        )
    names = [sample.name for sample in data.samples if sample.references]
    if policy.sees_controls and names:
        raise ValueError(
            f"data has control pictures ({shortlist(names)}), which {policy.family}'s text encoders read together with "
            "a caption; prepare it without them."
        )


def _check_width(data: TrainingData, encoded: Mapping[str, EncodedPrompt]) -> None:
    width, other = data.samples[0].load().text.shape[-1], next(iter(encoded.values())).prompt.text.shape[-1]
    if width != other:
        raise ValueError(
            f"clip gives text of width {other}, but data has text of width {width}; connect the text encoders of the "
            "model that will be trained."
        )


def _concept_sample(sample: Sample, concept: Concept, prompts: Mapping[str, Prompt], policy: TextPolicy) -> Sample:
    without_captions = replace(sample, class_caption=False, empty_length=0, concept=concept.kind)
    if sample.regularisation:
        return replace(without_captions, load=partial(_load_kept, sample))
    lengths = sorted({prompt.text.shape[1] for prompt in prompts.values()})
    entries = {name for prompt in prompts.values() for name in prompt.conditioning}
    return replace(
        without_captions,
        text_length=policy.shared_length(lengths),
        text_lengths=tuple(lengths) if policy.whole_grids else (),
        caption_variants=len(concept.terms),
        caption_weights=concept.probabilities,
        caption_dropout=0.0,
        conditioning=sample.conditioning | entries,
        load=partial(_load, sample, concept.terms, prompts),
    )


def _load(
    sample: Sample,
    terms: tuple[Term, ...],
    prompts: Mapping[str, Prompt],
    variant: SampleVariant = FIRST_VARIANT,
) -> SampleTensors:
    tensors = sample.load(SampleVariant(image=variant.image))
    term = terms[variant.caption or 0]
    texts = {text: beside_picture(prompts[text], tensors.conditioning) for text in term.texts}
    targets = tuple(TargetPrompt(texts[target.text], target.weight, target.direction) for target in term.targets)
    prompt = texts[term.prompt]
    return replace(tensors, text=prompt.text, conditioning=prompt.conditioning, targets=targets)


def _load_kept(sample: Sample, variant: SampleVariant = FIRST_VARIANT) -> SampleTensors:
    tensors = sample.load(variant)
    return replace(tensors, targets=(TargetPrompt(Prompt(tensors.text, tensors.conditioning), 1.0),))


def _describe(term: Term) -> dict[str, Any]:
    """Describe a term for the metadata of a LoRA: the prompt, and the weights of its target."""
    targets = [[target.text, target.weight, target.direction] for target in term.targets]
    return {"prompt": term.prompt, "target": targets}
