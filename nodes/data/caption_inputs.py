"""Caption inputs that both folder nodes share."""

from typing import Any

from comfy_api.latest import io

from ...data.captions.options import MOST_VARIANTS, CaptionOptions


def caption_inputs() -> list[Any]:
    """Inputs with the names and defaults of CaptionOptions' fields."""
    return [
        io.Float.Input(
            "caption_dropout",
            default=CaptionOptions.caption_dropout,
            min=0.0,
            max=1.0,
            step=0.01,
            optional=True,
            tooltip="How often (0 to 1) a picture is shown with the empty prompt in place of its caption and trigger "
            "words. 0.05 to 0.1 keeps what the model does without a prompt in step with the LoRA, which CFG needs; "
            "0 for models that sample without CFG, such as FLUX.1.",
        ),
        io.Boolean.Input(
            "shuffle_tags",
            default=CaptionOptions.shuffle_tags,
            optional=True,
            advanced=True,
            tooltip="On: the tags of a caption, which commas separate, come in changing orders, so that none is learnt "
            "by its place. For captions of tags (booru style); leave it off for sentences.",
        ),
        io.Int.Input(
            "keep_tokens",
            default=CaptionOptions.keep_tokens,
            min=0,
            max=255,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags and tag_dropout: how many tags at the start of each caption stay where they are. "
            "Trigger words always stay and are not counted.",
        ),
        io.Float.Input(
            "tag_dropout",
            default=CaptionOptions.tag_dropout,
            min=0.0,
            max=0.99,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip="How often (0 to 0.99) each tag that is not kept is left out of a caption. 0.05 to 0.1 helps a "
            "LoRA that only works when all tags are given; for captions of tags only.",
        ),
        io.Boolean.Input(
            "caption_per_line",
            default=CaptionOptions.caption_per_line,
            optional=True,
            advanced=True,
            tooltip="On: each line of a caption file is a caption of its own, and one of them is drawn each time the "
            "picture is shown. Off: all lines together are one caption.",
        ),
        io.Boolean.Input(
            "wildcards",
            default=CaptionOptions.wildcards,
            optional=True,
            advanced=True,
            tooltip="On: {red|blue} in a caption is red or blue, drawn each time the picture is shown, as in ComfyUI's "
            r"prompts; braces may stand within braces, and \{, \} and \| are the signs themselves. Off: braces are "
            "text.",
        ),
        io.Int.Input(
            "caption_variants",
            default=CaptionOptions.caption_variants,
            min=1,
            max=MOST_VARIANTS,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags, tag_dropout and wildcards: how many forms of a caption are drawn and encoded "
            "before training, where there are more. Each takes as much disk as a caption (1 to 31 MB); raise it "
            "for few pictures that are shown often.",
        ),
        io.String.Input(
            "keep_tokens_separator",
            default=CaptionOptions.keep_tokens_separator,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags and tag_dropout: in captions that hold it, tags before it stay first, those "
            "after a second one stay last, and keep_tokens is not looked at. Change it if your captions use another.",
        ),
    ]
