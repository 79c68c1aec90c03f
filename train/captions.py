"""Captions encoded with the CLIP of the graph, by themselves or together with control pictures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import comfy.utils
import torch
from torch import Tensor

from ..models.text import PLUS, CaptionTokens, QwenImageText, TextPolicy
from .dataset import shortlist
from .fingerprint import fingerprint, weights_fingerprint
from .items import Item
from .jobs import Interrupted, Job, Progress
from .picture_jobs import BYTES, VERSION, Cut

# The area at which the text encoder sees control pictures, and the pixels of a token of it, as core's nodes have them.
_SEEN_AREA = {True: 384 * 384, False: 1024 * 1024}
_SEEN_TOKEN = 28 * 28


@dataclass(frozen=True)
class Caption:
    """A caption that may have to be encoded. longest: the most tokens that it may have; dropped: how many are over."""

    job: Job
    longest: int | None
    dropped: int


def read_captions(
    items: Sequence[Item],
    controls: Sequence[tuple[Cut, ...]],
    clip: Any,
    policy: TextPolicy,
    max_length: int | None,
    style: str,
    progress: Progress,
    interrupted: Interrupted,
) -> list[Caption]:
    """The caption of each item; those that are encoded alike are tokenised once and share a job.

    controls: of each item. Qwen-Image's text encoder sees them, in the `style` of its edit model.
    Raises ValueError for captions with a text at which the encoder stops.
    """
    encoder = (weights_fingerprint(clip.patcher), clip.layer_idx)
    sees = isinstance(policy, QwenImageText)
    wanted = [(item.caption, of if sees else ()) for item, of in zip(items, controls, strict=True)]
    made: dict[tuple[str, tuple[Cut, ...]], Caption] = {}
    distinct = dict.fromkeys(wanted)
    stops: dict[str, str] = {}
    for index, (text, seen) in enumerate(distinct):
        interrupted()
        progress(index, len(distinct), f"Reading captions: {index} of {len(distinct)}")
        if (stop := policy.stop_text(clip, text)) is not None:
            stops[text] = stop
        if seen:
            assert isinstance(policy, QwenImageText)
            made[text, seen] = _seeing(clip, policy, text, seen, style, encoder)
            continue
        tokens = policy.tokenize(clip, text, max_length)
        length = tokens.length or _tokens(tokens)
        job = Job(
            fingerprint("caption", VERSION, json.dumps(tokens.tokens), encoder),
            policy.outputs(tokens.length),
            length * policy.width(clip) * BYTES,
            partial(encode_caption, clip, tokens, policy),
            f"the caption {text[:40]!r}",
        )
        made[text, seen] = Caption(job, tokens.length, tokens.dropped)
    if stops:
        raise ValueError(
            f"The captions of {shortlist([item.name for item in items if item.caption in stops])} hold the text "
            f"{next(iter(stops.values()))!r}, at which {policy.family}'s text encoder stops; remove it from them."
        )
    return [made[one] for one in wanted]


@torch.inference_mode()
def encode_caption(clip: Any, caption: CaptionTokens, policy: TextPolicy) -> dict[str, Tensor]:
    """Encode one caption with a ComfyUI CLIP: {"cond": (1, L, D), "pooled_output": (1, P), …}, as many as the family
    has, on core's device.

    Equal to `clip.encode_from_tokens_scheduled(clip.tokenize(text))` bit for bit where the tokens are. Hooks on the
    CLIP are not honoured: they follow a sampling schedule, which training does not have.
    """
    encoded = clip.encode_from_tokens(caption.tokens, return_dict=True)
    assert encoded.get("attention_mask") is None or "attention_mask" in policy.outputs(caption.length)
    result = {name: encoded[name] for name in policy.outputs(caption.length)}
    assert caption.length in (None, result["cond"].shape[1]), (result["cond"].shape, caption.length)
    return result


def _seeing(
    clip: Any, policy: QwenImageText, text: str, controls: tuple[Cut, ...], style: str, encoder: Any
) -> Caption:
    tokens = policy.tokenize_edit(clip, text, len(controls), style)
    keys = [cut.key for cut in controls]
    length = _tokens(tokens) + len(controls) * (_SEEN_AREA[style == PLUS] // _SEEN_TOKEN)

    def encode() -> dict[str, Tensor]:
        seen = [_seen(cut.load(), style) for cut in controls]
        return encode_caption(clip, policy.tokenize_edit(clip, text, len(controls), style, seen), policy)

    key = fingerprint("edit caption", VERSION, style, json.dumps(tokens.tokens), keys, encoder)
    shapes = policy.outputs(None)
    name = f"the caption {text[:40]!r}"
    return Caption(Job(key, shapes, length * policy.width(clip) * BYTES, encode, name), None, 0)


def _seen(picture: Tensor, style: str) -> Tensor:
    """A control picture (1, H, W, 3) at the size at which core's node shows it to the text encoder."""
    height, width = picture.shape[1:3]
    scale = sqrt(_SEEN_AREA[style == PLUS] / (width * height))
    upright = picture.movedim(-1, 1)
    scaled = comfy.utils.common_upscale(upright, round(width * scale), round(height * scale), "area", "disabled")
    return scaled.movedim(1, -1)


def _tokens(tokens: CaptionTokens) -> int:
    return sum(len(pairs) for pairs in next(iter(tokens.tokens.values())))
