"""Caption inputs that both folder nodes share."""

from typing import Any

from comfy_api.latest import io

from ...data.captions.options import MOST_VARIANTS, CaptionOptions


def caption_inputs() -> list[Any]:
    """Build inputs with the names and defaults of CaptionOptions' fields."""
    return [
        io.Float.Input(
            "caption_dropout",
            default=CaptionOptions.caption_dropout,
            min=0.0,
            max=1.0,
            step=0.01,
            optional=True,
            tooltip="How often (0 to 1) a picture is shown with an empty prompt instead of its caption and trigger "
            "words. Use 0.05 to 0.1 for models that sample with CFG, and 0 for models without, such as FLUX.1.",
        ),
        io.Boolean.Input(
            "shuffle_tags",
            default=CaptionOptions.shuffle_tags,
            optional=True,
            advanced=True,
            tooltip="On: the comma-separated tags of a caption are shuffled, so their order isn't learnt. For tag "
            "captions (booru style); leave it off for sentences.",
        ),
        io.Int.Input(
            "keep_tokens",
            default=CaptionOptions.keep_tokens,
            min=0,
            max=255,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags and tag_dropout: how many tags at the start of each caption stay in place. "
            "Trigger words always stay and don't count.",
        ),
        io.Float.Input(
            "tag_dropout",
            default=CaptionOptions.tag_dropout,
            min=0.0,
            max=0.99,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip="How often (0 to 0.99) each tag is left out of a caption, except those of keep_tokens. 0.05 to "
            "0.1 helps if a LoRA works only with all its tags. For tag captions only.",
        ),
        io.Boolean.Input(
            "caption_per_line",
            default=CaptionOptions.caption_per_line,
            optional=True,
            advanced=True,
            tooltip="On: each line of a caption file is a separate caption, and one is picked at random each time "
            "the picture is shown. Off: all lines together are one caption.",
        ),
        io.Boolean.Input(
            "wildcards",
            default=CaptionOptions.wildcards,
            optional=True,
            advanced=True,
            tooltip="On: {red|blue} in a caption becomes red or blue at random each time the picture is shown, as in "
            r"ComfyUI's prompts. Braces can be nested; write \{, \} and \| for the characters themselves. Off: braces "
            "are plain text.",
        ),
        io.Int.Input(
            "caption_variants",
            default=CaptionOptions.caption_variants,
            min=1,
            max=MOST_VARIANTS,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags, tag_dropout and wildcards: how many versions of a caption are encoded before "
            "training. Each takes 1 to 31 MB of disk; raise it if you have few pictures that are shown often.",
        ),
        io.String.Input(
            "keep_tokens_separator",
            default=CaptionOptions.keep_tokens_separator,
            optional=True,
            advanced=True,
            tooltip="For shuffle_tags and tag_dropout: in captions that contain it, tags before it stay first and "
            "tags after a second one stay last; keep_tokens is then ignored. Change it if your captions use another "
            "separator.",
        ),
    ]
