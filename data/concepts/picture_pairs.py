"""Training data of a slider from pictures that differ in one attribute, paired by name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from ...common.fingerprint import fingerprint
from ...common.text import shortlist
from ..preparation.empty_caption import OF_IMAGES
from ..samples import FIRST_VARIANT, PICTURE_SLIDER, Sample, SampleTensors, SampleVariant, TrainingData
from .prompt_data import check_plain


def pair_pictures(positive: TrainingData, negative: TrainingData) -> TrainingData:
    """Pair the pictures of both by their names without endings.

    Caption, mask, repeats and weights of a pair are those of its picture in `positive`.

    Raises ValueError for data that does not pair.
    """
    for data in (positive, negative):
        check_plain(data)
        _check_pictures(data)
    if "" not in (positive.family, negative.family) and positive.family != negative.family:
        raise ValueError(
            f"positive was prepared for {positive.family} and negative for {negative.family}; prepare both with the "
            "VAE and text encoders of the model that will be trained."
        )
    partners = _by_name(negative)
    alone = [sample.name for sample in positive.samples if _name(sample) not in partners]
    alone += [sample.name for name, sample in partners.items() if name not in _by_name(positive)]
    if alone:
        raise ValueError(
            f"These pictures have no partner of the same name in the other folder: {shortlist(alone)}; give both "
            "pictures of a pair one name."
        )
    pairs = [(sample, partners[_name(sample)]) for sample in positive.samples]
    unlike = [
        sample.name
        for sample, other in pairs
        if (sample.grid, sample.tokens, sample.image_variants) != (other.grid, other.tokens, other.image_variants)
    ]
    if unlike:
        raise ValueError(
            f"These pictures are cut to another size than their partners: {shortlist(unlike)}; give both pictures of a "
            "pair the same width and height, and both Prepare Datasets the same settings."
        )
    samples = tuple(_paired(sample, other) for sample, other in pairs)
    return replace(
        positive,
        samples=samples,
        fingerprint=fingerprint(PICTURE_SLIDER, positive.fingerprint, negative.fingerprint),
        notes=tuple(dict.fromkeys((*positive.notes, *negative.notes))),
        made_with={**positive.made_with, "concept": {"kind": PICTURE_SLIDER, "negative": negative.fingerprint}},
        family=positive.family or negative.family,
    )


def _check_pictures(data: TrainingData) -> None:
    """Raise ValueError for samples that are not a plain picture with a caption."""
    for reason, names in (
        ("regularisation pictures", [s.name for s in data.samples if s.regularisation]),
        ("control pictures or start pictures", [s.name for s in data.samples if _has_images(s)]),
    ):
        if names:
            raise ValueError(f"A slider from pictures takes no {reason}, such as {shortlist(names)}; leave them out.")


def _has_images(sample: Sample) -> bool:
    return bool(sample.references or sample.clean_frames or sample.conditioning & set(OF_IMAGES))


def _by_name(data: TrainingData) -> Mapping[str, Sample]:
    return {_name(sample): sample for sample in data.samples}


def _name(sample: Sample) -> str:
    """Return a file's path without its ending; of a file at several sizes, with the size."""
    file = sample.file or sample.name
    return str(PurePosixPath(file).with_suffix("")) + sample.name.removeprefix(file)


def _paired(sample: Sample, other: Sample) -> Sample:
    return replace(
        sample, class_caption=False, empty_length=0, concept=PICTURE_SLIDER, load=partial(_load, sample, other)
    )


def _load(sample: Sample, other: Sample, variant: SampleVariant = FIRST_VARIANT) -> SampleTensors:
    opposite = other.load(SampleVariant(image=variant.image)).latent
    return replace(sample.load(variant), opposite=opposite)
