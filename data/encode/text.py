"""Captions encoded with the CLIP of the graph, by themselves or together with control pictures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.fingerprint import fingerprint, weights_fingerprint
from ...common.progress import Interrupted, Progress
from ...common.text import shortlist
from ...models.text import CaptionTokens, TextPolicy
from ..cache import EncodeJob
from ..captions.variants import CaptionVariants
from ..folders.items import Item
from ..media.frames import Crop
from .vae import BYTES, VERSION


@dataclass(frozen=True)
class TokenizedCaption:
    """A caption that may have to be encoded. tokens: None where it is encoded together with control pictures, and has
    its length once it is encoded."""

    job: EncodeJob
    tokens: CaptionTokens | None


@dataclass(frozen=True)
class CaptionKeys:
    """Cache keys of the captions of an item. Fingerprints of data hold the field names, which therefore stay.

    forms: of each variant. empty: of the empty prompt. of_class: of the class caption of each variant that has one.
    """

    forms: tuple[str, ...]
    empty: str | None = None
    of_class: tuple[str | None, ...] = ()

    def key(self, caption: int | None) -> str:
        """Key of the variant with this number, of the empty prompt for None."""
        if caption is not None:
            return self.forms[caption]
        assert self.empty is not None
        return self.empty

    def class_key(self, caption: int | None) -> str | None:
        """Key of the class caption of that variant; the empty prompt has none."""
        return None if caption is None or not self.of_class else self.of_class[caption]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(key for key in (*self.forms, *self.of_class, self.empty) if key)


@dataclass(frozen=True)
class ItemCaptions:
    """All captions of an item.

    variants: of its caption.
    empty: the empty prompt, where caption dropout puts it in their place.
    class_captions: the class caption of each variant, None for one without the trigger words.
    """

    variants: tuple[TokenizedCaption, ...]
    empty: TokenizedCaption | None
    class_captions: tuple[TokenizedCaption | None, ...] = ()

    @property
    def all(self) -> tuple[TokenizedCaption, ...]:
        return tuple(caption for caption in (*self.variants, *self.class_captions, self.empty) if caption)

    def keys(self) -> CaptionKeys:
        of_class = tuple(caption.job.key if caption else None for caption in self.class_captions)
        empty = self.empty.job.key if self.empty else None
        return CaptionKeys(tuple(one.job.key for one in self.variants), empty, of_class)

    @property
    def longest(self) -> int:
        """Most tokens of a variant, as far as that is known."""
        return max((caption.tokens.length or 0 for caption in self.all if caption.tokens), default=0)

    @property
    def dropped(self) -> int:
        """Count the tokens cut at the end of the longest variant."""
        return max((caption.tokens.dropped for caption in self.all if caption.tokens), default=0)


def tokenize_captions(
    items: Sequence[Item],
    controls: Sequence[tuple[Crop, ...]],
    clip: Any,
    policy: TextPolicy,
    max_length: int | None,
    style: str,
    progress: Progress,
    interrupted: Interrupted,
) -> list[ItemCaptions]:
    """Tokenize the captions of each item; those that are encoded alike are tokenised once and share a job.

    controls: of each item. Encoders that see them are shown them in the template `style`. Where a family has several
    lengths, all variants of an item take that of its longest one, so that they share its graphs.
    Raises ValueError for captions with a text at which the encoder stops.
    """
    encoder = (weights_fingerprint(clip.patcher), clip.layer_idx)
    forms = [item.caption_variants for item in items]
    texts = [_texts(of) for of in forms]
    wanted = [
        [(text, seen if policy.sees_controls else ()) for text in of] for of, seen in zip(texts, controls, strict=True)
    ]
    made: dict[tuple[str, tuple[Crop, ...]], TokenizedCaption] = {}
    distinct = dict.fromkeys(one for of in wanted for one in of)
    stops: dict[str, str] = {}
    for index, (text, seen) in enumerate(distinct):
        interrupted()
        progress(index, len(distinct), f"Reading captions: {index} of {len(distinct)}")
        if (stop := policy.stop_text(clip, text)) is not None:
            stops[text] = stop
        if seen:
            made[text, seen] = _seeing(clip, policy, text, seen, style, encoder)
        else:
            made[text, seen] = _read(clip, policy, text, policy.tokenize(clip, text, max_length), encoder)
    if stops:
        named = [item.name for item, of in zip(items, texts, strict=True) if not stops.keys().isdisjoint(of)]
        raise ValueError(
            f"The captions of {shortlist(named)} hold the text {next(iter(stops.values()))!r}, at which "
            f"{policy.family}'s text encoder stops; remove it from them."
        )
    read = []
    for form, of in zip(forms, wanted, strict=True):
        captions = [made[one] for one in of]
        if policy.lengths:
            captions = _of_one_length(clip, policy, [text for text, _ in of], captions, encoder)
        by_text = {text: caption for (text, _), caption in zip(of, captions, strict=True)}
        of_class = tuple(None if text is None else by_text[text] for text in form.class_texts)
        own = tuple(by_text[text] for text in form.texts)
        read.append(ItemCaptions(own, by_text[""] if form.dropout else None, of_class))
    return read


def _texts(forms: CaptionVariants) -> tuple[str, ...]:
    """All that is encoded of a caption, each once."""
    of_class = (text for text in forms.class_texts if text is not None)
    return tuple(dict.fromkeys((*forms.texts, *of_class, *([""] if forms.dropout else []))))


def _read(clip: Any, policy: TextPolicy, text: str, tokens: CaptionTokens, encoder: Any) -> TokenizedCaption:
    length = tokens.length or _tokens(tokens)
    job = EncodeJob(
        fingerprint("caption", VERSION, json.dumps(tokens.tokens), encoder),
        policy.outputs(tokens.length),
        length * policy.width(clip) * BYTES,
        partial(encode_caption, clip, tokens, policy),
        f"the caption {text[:40]!r}",
    )
    return TokenizedCaption(job, tokens)


def _of_one_length(
    clip: Any, policy: TextPolicy, texts: Sequence[str], captions: Sequence[TokenizedCaption], encoder: Any
) -> list[TokenizedCaption]:
    """The captions of one item, all as long as the longest of them."""
    tokens = [caption.tokens for caption in captions if caption.tokens]
    assert len(tokens) == len(captions), texts
    length = max(of.length or 0 for of in tokens)
    return [
        caption if of.length == length else _read(clip, policy, text, policy.lengthened(clip, of, length), encoder)
        for text, caption, of in zip(texts, captions, tokens, strict=True)
    ]


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
    clip: Any, policy: TextPolicy, text: str, controls: tuple[Crop, ...], style: str, encoder: Any
) -> TokenizedCaption:
    tokens = policy.tokenize_edit(clip, text, len(controls), style)
    keys = [crop.key for crop in controls]
    length = _tokens(tokens) + len(controls) * policy.control_tokens(style)

    def encode() -> dict[str, Tensor]:
        seen = [policy.resize_control(crop.load(), style) for crop in controls]
        return encode_caption(clip, policy.tokenize_edit(clip, text, len(controls), style, seen), policy)

    key = fingerprint("edit caption", VERSION, style, json.dumps(tokens.tokens), keys, encoder)
    shapes = policy.outputs(None)
    name = f"the caption {text[:40]!r}"
    return TokenizedCaption(EncodeJob(key, shapes, length * policy.width(clip) * BYTES, encode, name), None)


def _tokens(tokens: CaptionTokens) -> int:
    return sum(len(pairs) for pairs in next(iter(tokens.tokens.values())))
