"""Inputs that Training Images and Training Clips share: augmentation, masks and weights."""

from comfy_api.latest import io

from ...data.folders.options import FLIPS, OFF
from ..common.folder_access import list_image_folders

NONE = "none"


def mask_folder(noun: str) -> io.Input:
    """noun: what the folder holds, pictures or clips."""
    frames = "" if noun == "pictures" else " One mask serves all frames of its file."
    return io.Combo.Input(
        "mask_folder",
        options=[NONE, *list_image_folders()],
        default=NONE,
        optional=True,
        advanced=noun != "pictures",
        tooltip=f"The folder with the masks of these {noun}: a.{'jpg' if noun == 'pictures' else 'mp4'} takes a.png "
        f"there. White is learnt, black is not, grey in part.{frames} Set it to keep backgrounds or other people out "
        f"of the LoRA.",
    )


def alpha_mask() -> io.Input:
    return io.Boolean.Input(
        "alpha_mask",
        default=False,
        optional=True,
        advanced=True,
        tooltip="On: the pictures' own alpha channel is their mask; what is transparent is shown with the colours that "
        "the file holds there and is not learnt. Off: transparent parts show white.",
    )


def unmasked_weight() -> io.Input:
    return io.Float.Input(
        "unmasked_weight",
        default=0.0,
        min=0.0,
        max=1.0,
        step=0.01,
        optional=True,
        advanced=True,
        tooltip="How much what the mask leaves out counts all the same, 0 to 1. 0 leaves it out; raise it to 0.1 if "
        "what is learnt looks pasted in.",
    )


def views(noun: str) -> list[io.Input]:
    """noun: what one of them is called, picture or clip."""
    return [
        io.Combo.Input(
            "flip",
            options=list(FLIPS),
            default=OFF,
            optional=True,
            advanced=True,
            tooltip=f"horizontal: each {noun} is shown mirrored in half of its draws. Choose it for few pictures of "
            f"what has no left and right; a face, text and a logo have.",
        ),
        io.Int.Input(
            "crops",
            default=1,
            min=1,
            max=64,
            optional=True,
            advanced=True,
            tooltip=f"How many crops of each {noun} are encoded, of which every showing draws one. They are spread "
            f"over what would be lost to cropping. Raise it to 2 or 3 for wide panoramas and the like; each takes its "
            f"time to encode.",
        ),
        io.Float.Input(
            "crop_zoom",
            default=1.0,
            min=1.0,
            max=8.0,
            step=0.05,
            optional=True,
            advanced=True,
            tooltip="With crops of 2 or more: all but the first show a smaller part, up to this many times narrower, "
            "drawn at random, but never larger than the file's own pixels. Raise it to 1.5 to learn details of large "
            "pictures.",
        ),
    ]


def weight(noun: str) -> list[io.Input]:
    """noun: what the folder holds, pictures or clips."""
    return [
        io.Float.Input(
            "loss_weight",
            default=1.0,
            min=0.01,
            max=100.0,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip=f"What the loss of these {noun} is multiplied by. 1 is as all others; lower it for regularisation "
            f"that holds back too much (prior_loss_weight elsewhere), or for {noun} of poor quality.",
        ),
        io.Boolean.Input(
            "regularisation",
            default=False,
            optional=True,
            advanced=True,
            tooltip=f"On: these {noun} show what the model is to keep, such as people in general while one face is "
            f"learnt. They take every second showing, whatever their number. Caption them with the class and without "
            f"trigger words; the model's own pictures of it serve best.",
        ),
    ]


def preservation() -> list[io.Input]:
    return [
        io.String.Input(
            "class_word",
            default="",
            optional=True,
            advanced=True,
            tooltip="What the trigger words call one of, such as man, dog or style: it stands in their place in the "
            "class captions, which preservation_weight of Training Objective holds to what the model makes of them "
            "now. Where the captions themselves hold the word that is learnt, write word=class: ohwx=man.",
        ),
        io.Boolean.Input(
            "blank_prompt_preservation",
            default=False,
            optional=True,
            advanced=True,
            tooltip="On: preservation_weight of Training Objective holds what the model makes of the empty prompt, in "
            "place of class captions. For what has no class word, such as a style.",
        ),
    ]
