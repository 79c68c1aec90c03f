"""Inputs that Training Images and Training Clips share: augmentation, masks and weights."""

from comfy_api.latest import io

from ...data.folders.options import FLIPS, OFF
from ..common.folder_access import list_image_folders

NONE = "none"


def mask_folder(noun: str) -> io.Input:
    """Build the input mask_folder. noun: contents of the folder, pictures or clips."""
    frames = "" if noun == "pictures" else " One mask is used for all frames of its file."
    return io.Combo.Input(
        "mask_folder",
        options=[NONE, *list_image_folders()],
        default=NONE,
        optional=True,
        advanced=noun != "pictures",
        tooltip=f"The folder with the masks of these {noun}: a.{'jpg' if noun == 'pictures' else 'mp4'} uses a.png "
        f"there. White is learnt, black is not, grey partly.{frames} Use it to keep backgrounds or other people out "
        "of the LoRA.",
    )


def alpha_mask() -> io.Input:
    return io.Boolean.Input(
        "alpha_mask",
        default=False,
        optional=True,
        advanced=True,
        tooltip="On: the alpha channel of the pictures is used as their mask, so transparent parts are not learnt. "
        "Off: transparent parts become white.",
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
        tooltip="How much masked parts still count, 0 to 1. 0 ignores them; raise it to 0.1 if the result looks "
        "pasted in. Without masks it changes nothing.",
    )


def views(noun: str) -> list[io.Input]:
    """Build the inputs of augmentation. noun: name of one file, picture or clip."""
    return [
        io.Combo.Input(
            "flip",
            options=list(FLIPS),
            default=OFF,
            optional=True,
            advanced=True,
            tooltip=f"horizontal: each {noun} is shown mirrored half of the time. Use it if you have few pictures; "
            "not for faces, text or logos, which look wrong mirrored.",
        ),
        io.Int.Input(
            "crops",
            default=1,
            min=1,
            max=64,
            optional=True,
            advanced=True,
            tooltip=f"How many different crops of each {noun} are encoded; one is picked each time. They cover the "
            "parts that a single crop would cut off. Raise it to 2 or 3 for panoramas and the like; each one takes "
            "time to encode.",
        ),
        io.Float.Input(
            "crop_zoom",
            default=1.0,
            min=1.0,
            max=8.0,
            step=0.05,
            optional=True,
            advanced=True,
            tooltip="With crops of 2 or more: all but the first zoom into a random part, up to this factor, but "
            "never enlarge the file's pixels. Raise it to 1.5 to learn details of large pictures.",
        ),
    ]


def weight(noun: str) -> list[io.Input]:
    """Build the inputs of the loss weight. noun: contents of the folder, pictures or clips."""
    return [
        io.Float.Input(
            "loss_weight",
            default=1.0,
            min=0.01,
            max=100.0,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip=f"The loss of these {noun} is multiplied by this. 1 counts like all others; lower it if "
            f"regularisation is too strong (prior_loss_weight elsewhere), or for {noun} of poor quality.",
        ),
        io.Boolean.Input(
            "regularisation",
            default=False,
            optional=True,
            advanced=True,
            tooltip=f"On: these {noun} show what the model should not forget, such as people in general while it "
            "learns one face. Every second showing is one of them, however many there are. Caption them with the "
            "class, without trigger words; pictures made by the model itself work best.",
        ),
    ]


def leave_out() -> io.Input:
    return io.String.Input(
        "leave_out",
        default="",
        multiline=True,
        optional=True,
        advanced=True,
        tooltip="Pictures that are not trained on, one file name in a line, such as a.jpg or sub/a.jpg. Check Folder "
        "fills it in by a click, or connect its leave_out.",
    )


def preservation() -> list[io.Input]:
    return [
        io.String.Input(
            "class_word",
            default="",
            optional=True,
            advanced=True,
            tooltip="The class that your trigger words belong to, such as man, dog or style. In the class captions "
            "it replaces the trigger words, and preservation_weight of Training Objective keeps what the model makes "
            "of those. If your captions already contain the word to learn, write word=class: ohwx=man.",
        ),
        io.Boolean.Input(
            "blank_prompt_preservation",
            default=False,
            optional=True,
            advanced=True,
            tooltip="On: preservation_weight of Training Objective keeps what the model makes of an empty prompt "
            "instead of class captions. For things without a class word, such as a style.",
        ),
    ]
