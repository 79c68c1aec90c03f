"""Options of one folder: views and loss weights of its images, with notes on them."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...common.text import quoted

FLIPS = (OFF, HORIZONTAL) = ("off", "horizontal")


@dataclass(frozen=True)
class FolderOptions:
    """Options of a folder.

    alpha_mask: the alpha channel of the images is their mask.
    unmasked_weight: loss weight of the parts that a mask leaves out, 0 to 1.
    flip: "horizontal" shows each image mirrored as well.
    crops: number of crop windows of each image, all on its one grid.
    crop_zoom: largest ratio of the side of the largest window to that of another, 1 or more (see `make_views`).
    loss_weight: factor of the loss of each image.
    regularisation: the images show content that the model should preserve (see `batch_order` for how often).
    class_word: class word in place of the trigger words, for differential output preservation (see `read_class_word`).
    blank_prompt_preservation: preserve the output for the empty prompt instead.
    sample_ratio: fraction of the folder that an epoch shows, above 0 to 1 (see `batch_order`).
    Raises ValueError for values out of range and for options that contradict each other.
    """

    alpha_mask: bool = False
    unmasked_weight: float = 0.0
    flip: str = OFF
    crops: int = 1
    crop_zoom: float = 1.0
    loss_weight: float = 1.0
    regularisation: bool = False
    class_word: str = ""
    blank_prompt_preservation: bool = False
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.unmasked_weight <= 1:
            raise ValueError(
                f"unmasked_weight is {self.unmasked_weight}; set it between 0 (left out) and 1 (like all others)."
            )
        if self.flip not in FLIPS:
            raise ValueError(f"flip is {quoted(self.flip)}; choose one of {', '.join(FLIPS)}.")
        if self.crops < 1:
            raise ValueError(f"crops is {self.crops}; set it to 1 or more.")
        if not 1 <= self.crop_zoom <= 8:
            raise ValueError(f"crop_zoom is {self.crop_zoom}; set it between 1 (no zoom) and 8.")
        if not 0 < self.loss_weight <= 100:
            raise ValueError(
                f"loss_weight is {self.loss_weight}; set it above 0 and to at most 100 (1 is like all others), or "
                "leave the folder out."
            )
        if not 0 < self.sample_ratio <= 1:
            raise ValueError(
                f"sample_ratio is {self.sample_ratio}; set it above 0 and to at most 1 (all of the folder), raise "
                f"repeats to show it more often, or leave the folder out."
            )
        if self.sample_ratio < 1 and self.regularisation:
            raise ValueError(
                f"sample_ratio is {self.sample_ratio} and regularisation is on, whose pictures take every second "
                "showing, however many there are; set sample_ratio to 1 there."
            )
        if self.blank_prompt_preservation and self.class_word.strip():
            raise ValueError(
                f"class_word is {quoted(self.class_word.strip())} and blank_prompt_preservation is on; only one of "
                "them can be preserved: leave class_word empty, or switch blank_prompt_preservation off."
            )
        if self.regularisation and self.blank_prompt_preservation:
            raise ValueError(
                "blank_prompt_preservation and regularisation are both on; preservation is for the pictures that are "
                "learnt: switch blank_prompt_preservation off for regularisation pictures."
            )
        if self.regularisation and self.class_word.strip():
            raise ValueError(
                f"class_word is {quoted(self.class_word.strip())} and regularisation is on, whose captions "
                "name the class already; leave class_word empty there."
            )


UNCHANGED = FolderOptions()


def folder_notes(folder: str, options: FolderOptions, trigger_words: str, masked: bool) -> Iterator[str]:
    """Yield notes on options of a folder that contradict each other.

    masked: its images have masks.
    """
    if masked and options.unmasked_weight == 1:
        yield f"The masks of {folder!r} have no effect, because with unmasked_weight 1 masked parts count fully."
    if trigger_words.strip() and options.regularisation:
        yield (
            f"trigger_words are also added to the captions of {folder!r}, which is regularisation and should not be "
            "tied to them; leave trigger_words empty there."
        )
