"""Captions of the files of a folder, read and made into variants."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...common.progress import Interrupted
from ...common.text import cut, quantity
from ...common.untrusted.budgets import CAPTION_FILE, CAPTION_FORMS, check_size
from ..captions.options import CaptionOptions
from ..captions.variants import CaptionVariants, make_caption_variants
from ..layouts.captions import CaptionSource, caption_file
from ..layouts.files import list_files
from ..layouts.subsets import Example, Subset

_MOST_NAMED = 20  # captions that an error lists


def check_captions_exist(folder: Path, examples: Sequence[Example], extension: str, noun: str) -> None:
    """Raise ValueError for examples without a caption."""
    missing = [example.path for example in examples if example.caption is None]
    if missing:
        raise ValueError(_missing_captions(folder, len(examples), missing, extension, noun))


def read_captions(subsets: Sequence[Subset], interrupted: Interrupted) -> dict[Path, str]:
    """Read the captions of all examples: texts by the example's file.

    interrupted: called before each file; raises to stop.
    Raises ValueError that names every caption file that isn't readable, OverBudget for captions of too many characters.
    """
    texts: dict[Path, str] = {}
    characters = 0
    failed: list[ValueError] = []
    for subset in subsets:
        for example in subset.examples:
            interrupted()
            assert example.caption is not None
            try:
                text = subset.caption_text(example.caption.read())
                check_size(CAPTION_FILE, f"The caption of {example.name!r}", bytes=len(text))
            except ValueError as error:
                failed.append(error)
                continue
            characters += len(text)
            check_size(CAPTION_FORMS, f"The folder {subset.name!r}", characters=characters)
            texts[example.path] = text
    if len(failed) > 1:
        rest = len(failed) - _MOST_NAMED
        listed = " ".join(str(error) for error in failed[:_MOST_NAMED])
        rest_text = f" And {rest} more." if rest > 0 else ""
        raise ValueError(f"{len(failed)} captions can't be read. {listed}{rest_text}") from failed[0]
    if failed:
        raise failed[0]
    return texts


def make_variants(
    subset: Subset, texts: Mapping[Path, str], options: CaptionOptions, trigger_words: str, interrupted: Interrupted
) -> dict[str, CaptionVariants]:
    """Make the caption variants of a subset's examples, by name.

    texts: contents of the caption files.
    interrupted: called before each file; raises to stop.
    Raises ValueError for captions past their budgets, and as `make_caption_variants` does.
    """
    variants: dict[str, CaptionVariants] = {}
    characters = 0
    for example in subset.examples:
        interrupted()
        assert example.caption is not None
        caption_name = _caption_name(example, example.caption)
        several = example.caption.per_line and options.caption_dropout < 1
        own_options = replace(options, caption_per_line=True) if several else options
        forms = make_caption_variants(texts[example.path], own_options, trigger_words, caption_name)
        if (longest := max(map(len, forms.texts))) > CAPTION_FILE.characters:
            raise ValueError(
                f"The caption of {example.name!r} has {longest} characters with its trigger_words, but text encoders "
                f"read only a few thousand; shorten it to at most {CAPTION_FILE.characters}."
            )
        characters += sum(map(len, forms.texts))
        check_size(CAPTION_FORMS, f"The folder {subset.name!r}", characters=characters)
        variants[example.name] = forms
    return variants


def _caption_name(example: Example, caption: CaptionSource) -> str:
    """Name a caption in messages: its path below the chosen folder, or the list that it comes from."""
    if caption.file is not None:
        return str(Path(example.name).parent / caption.file.name) if "/" in example.name else caption.file.name
    return caption.list.name if caption.list is not None else example.name


def _missing_captions(folder: Path, count: int, missing: Sequence[Path], extension: str, noun: str) -> str:
    """Message for images without caption files."""
    example = f"such as {caption_file(missing[0], extension).name!r} for {missing[0].name!r}"
    hint = _other_texts(missing)
    if len(missing) == count:
        return (
            f"The folder {folder.name!r} holds {noun}s ({len(missing)}) but no {extension} caption files; put a text "
            f"file with the same name next to each {noun}, {example} (an empty file means an empty caption){hint}."
        )
    place = f"of {count} {noun}s in {folder.name!r}"
    inside = [file for file in missing if file.is_relative_to(folder)]
    names = list_files(folder, inside) if len(inside) == len(missing) else ", ".join(file.name for file in missing[:5])
    return (
        f"{quantity(len(missing), f'{place} has', f'{place} have')} no {extension} caption file: "
        f"{names}; add one next to each, {example} (an empty file means an empty caption), or "
        f"take the {noun} out of the folder{hint}."
    )


def _other_texts(missing: Sequence[Path]) -> str:
    """Offer the files beside a picture with another extension."""
    first = missing[0]
    beside = (f"{first.stem}{ending}" for ending in (".txt", ".caption", ".cap", ".tags", ".json", ".md"))
    neighbour = next((name for name in beside if first.with_name(name).is_file()), None)
    return f"; beside it is {cut(neighbour)!r}, see caption_extension" if neighbour else ""
