"""Caption encoding with ComfyUI's CLIP, alone or together with control images."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.fingerprint import fingerprint, weights_fingerprint
from ...common.progress import Interrupted, Progress
from ...common.text import quoted, shortlist
from ...models.text import CaptionTokens, TextPolicy
from ..cache import EncodeJob
from ..captions.variants import CaptionVariants
from ..folders.items import Item
from ..media.frames import Crop
from .vae import BYTES, VERSION


@dataclass(frozen=True)
class TokenizedCaption:
    """Caption that may have to be encoded.

    job: its job.
    tokens: None if it is encoded together with control images; its length is then known only after encoding.
    """

    job: EncodeJob
    tokens: CaptionTokens | None


@dataclass(frozen=True)
class CaptionKeys:
    """Cache keys of an item's captions. Fingerprints of data contain the field names, which must therefore not change.

    forms: of each variant.
    empty: of the empty prompt, if there is caption dropout or it was requested.
    of_class: of the class caption of each variant, None for a variant without one.
    """

    forms: tuple[str, ...]
    empty: str | None = None
    of_class: tuple[str | None, ...] = ()

    def key(self, caption: int | None) -> str:
        """Return the key of the variant with this index, or of the empty prompt for None."""
        if caption is not None:
            return self.forms[caption]
        assert self.empty is not None
        return self.empty

    def class_key(self, caption: int | None) -> str | None:
        """Return the key of the class caption of that variant; the empty prompt has none."""
        return None if caption is None or not self.of_class else self.of_class[caption]

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All keys."""
        return tuple(key for key in (*self.forms, *self.of_class, self.empty) if key)


@dataclass(frozen=True)
class ItemCaptions:
    """All captions of an item.

    variants: caption variants.
    empty: empty prompt, if there is caption dropout or it was requested.
    class_captions: class caption of each variant, None for a variant without trigger words.
    """

    variants: tuple[TokenizedCaption, ...]
    empty: TokenizedCaption | None
    class_captions: tuple[TokenizedCaption | None, ...] = ()

    @property
    def all_captions(self) -> tuple[TokenizedCaption, ...]:
        """All captions, without missing ones."""
        return tuple(caption for caption in (*self.variants, *self.class_captions, self.empty) if caption)

    def keys(self) -> CaptionKeys:
        """Cache keys of the captions."""
        class_keys = tuple(caption.job.key if caption else None for caption in self.class_captions)
        empty = self.empty.job.key if self.empty else None
        return CaptionKeys(tuple(caption.job.key for caption in self.variants), empty, class_keys)

    @property
    def longest(self) -> int:
        """Tokens of the longest caption; captions of unknown length count as 0."""
        return max((caption.tokens.length or 0 for caption in self.all_captions if caption.tokens), default=0)

    @property
    def dropped(self) -> int:
        """Largest number of tokens cut off at the end of a caption."""
        return max((caption.tokens.dropped for caption in self.all_captions if caption.tokens), default=0)


def tokenize_captions(
    items: Sequence[Item],
    controls: Sequence[tuple[Crop, ...]],
    clip: Any,
    policy: TextPolicy,
    max_length: int | None,
    style: str,
    progress: Progress,
    interrupted: Interrupted,
    empty: bool = False,
) -> list[ItemCaptions]:
    """Tokenize the captions of each item; identical ones are tokenized once and share a job.

    controls: control crops of each item, for text encoders that see them.
    max_length: tokens at which captions are cut, of families that let the user choose it; None for ComfyUI's own
        lengths.
    style: prompt template for control images, one of EDIT_PROMPTS.
    empty: tokenize the empty prompt of each item too, as caption dropout does.

    With a max_length, all captions of an item are padded to the length of the longest, so that they share a graph.
    Without one, batches pad them, with a mask.
    Raises ValueError for captions with a text at which the encoder stops.
    """
    encoder = encoder_key(clip, policy)
    forms = [item.caption_variants for item in items]
    texts = [_texts(form, empty) for form in forms]
    requests = [
        [(text, crops if policy.sees_controls else ()) for text in item_texts]
        for item_texts, crops in zip(texts, controls, strict=True)
    ]
    tokenized: dict[tuple[str, tuple[Crop, ...]], TokenizedCaption] = {}
    distinct = dict.fromkeys(request for item_requests in requests for request in item_requests)
    stops: dict[str, str] = {}
    for index, (text, crops) in enumerate(distinct):
        interrupted()
        progress(index, len(distinct), f"Reading captions: {index} of {len(distinct)}")
        if (stop := policy.stop_text(clip, text)) is not None:
            stops[text] = stop
        if crops:
            tokenized[text, crops] = _seeing(clip, policy, text, crops, style, encoder)
        else:
            tokenized[text, crops] = caption_job(clip, policy, text, policy.tokenize(clip, text, max_length), encoder)
    if stops:
        names = [
            item.name for item, item_texts in zip(items, texts, strict=True) if not stops.keys().isdisjoint(item_texts)
        ]
        raise ValueError(
            f"The captions of {shortlist(names)} hold the text {quoted(next(iter(stops.values())))}, at which "
            f"{policy.family}'s text encoder stops; remove it from them."
        )
    read = []
    for form, item_requests in zip(forms, requests, strict=True):
        captions = [tokenized[request] for request in item_requests]
        if max_length is not None:
            captions = _pad_to_longest(clip, policy, [text for text, _ in item_requests], captions, encoder)
        by_text = {text: caption for (text, _), caption in zip(item_requests, captions, strict=True)}
        class_captions = tuple(None if text is None else by_text[text] for text in form.class_texts)
        variants = tuple(by_text[text] for text in form.texts)
        read.append(ItemCaptions(variants, by_text[""] if form.dropout or empty else None, class_captions))
    return read


def _texts(forms: CaptionVariants, empty: bool) -> tuple[str, ...]:
    """List the distinct texts to encode for a caption."""
    class_texts = (text for text in forms.class_texts if text is not None)
    return tuple(dict.fromkeys((*forms.texts, *class_texts, *([""] if forms.dropout or empty else []))))


def encoder_key(clip: Any, policy: TextPolicy) -> tuple[Any, ...]:
    """Return all that an encoded caption depends on besides its tokens."""
    return weights_fingerprint(clip.patcher), clip.layer_idx, *policy.key(clip)


def caption_job(clip: Any, policy: TextPolicy, text: str, tokens: CaptionTokens, encoder: Any) -> TokenizedCaption:
    """Make the job of a tokenized caption. encoder: see `encoder_key`."""
    length = tokens.length or _tokens(tokens)
    job = EncodeJob(
        fingerprint("caption", VERSION, json.dumps(tokens.tokens), encoder),
        policy.outputs(tokens.length),
        length * policy.width(clip) * BYTES,
        partial(encode_caption, clip, tokens, policy),
        f"the caption {text[:40]!r}",
    )
    return TokenizedCaption(job, tokens)


def _pad_to_longest(
    clip: Any, policy: TextPolicy, texts: Sequence[str], captions: Sequence[TokenizedCaption], encoder: Any
) -> list[TokenizedCaption]:
    """Pad the captions of one item to the length of the longest."""
    tokens = [caption.tokens for caption in captions if caption.tokens]
    assert len(tokens) == len(captions), texts
    length = max(caption_tokens.length or 0 for caption_tokens in tokens)
    return [
        caption
        if caption_tokens.length == length
        else caption_job(clip, policy, text, policy.lengthened(clip, caption_tokens, length), encoder)
        for text, caption, caption_tokens in zip(texts, captions, tokens, strict=True)
    ]


@torch.inference_mode()
def encode_caption(clip: Any, caption: CaptionTokens, policy: TextPolicy) -> dict[str, Tensor]:
    """Encode one caption with a ComfyUI CLIP.

    Returns {"cond": (1, L, D), "pooled_output": (1, P), …} on core's device, with the outputs of the family.

    Bitwise equal to `clip.encode_from_tokens_scheduled(clip.tokenize(text))` for the same tokens. Hooks of the CLIP are
    ignored: they follow a sampling schedule, which training does not have.
    """
    return policy.collect(clip.encode_from_tokens(caption.tokens, return_dict=True), caption.length)


def _seeing(
    clip: Any, policy: TextPolicy, text: str, controls: tuple[Crop, ...], style: str, encoder: Any
) -> TokenizedCaption:
    """Make the job of a caption that is encoded together with its control images."""
    tokens = policy.tokenize_edit(clip, text, len(controls), style)
    keys = [crop.key for crop in controls]
    # An estimate for the disk space only: the encoder replaces the image placeholders by image tokens.
    length = _tokens(tokens) + len(controls) * policy.control_tokens(style)

    def encode() -> dict[str, Tensor]:
        images = [policy.resize_control(crop.load(), style) for crop in controls]
        return encode_caption(clip, policy.tokenize_edit(clip, text, len(controls), style, images), policy)

    key = fingerprint("edit caption", VERSION, style, json.dumps(tokens.tokens), keys, encoder)
    shapes = policy.outputs(None)
    name = f"the caption {text[:40]!r}"
    return TokenizedCaption(EncodeJob(key, shapes, length * policy.width(clip) * BYTES, encode, name), None)


def _tokens(tokens: CaptionTokens) -> int:
    return max(sum(len(pairs) for pairs in chunks) for chunks in tokens.tokens.values())
