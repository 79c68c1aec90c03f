"""Encoding of prompts that belong to no picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...common.progress import Interrupted, Progress
from ...common.text import quoted
from ...models.text import TextPolicy
from ..cache import Cache, check_space, missing_jobs, run_jobs
from ..samples import Prompt
from .text import caption_job, encoder_key


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt with its place in the cache.

    key: key in the cache, which changes with the prompt's numbers.
    prompt: the encoded prompt.
    """

    key: str
    prompt: Prompt


def encode_prompts(
    clip: Any, policy: TextPolicy, texts: Sequence[str], cache_dir: Path, progress: Progress, interrupted: Interrupted
) -> dict[str, EncodedPrompt]:
    """Encode each text once, those that the cache lacks.

    Returns the prompts by their texts. Raises ValueError for a text at which the encoder stops.
    """
    distinct = list(dict.fromkeys(texts))
    for text in distinct:
        if (stop := policy.stop_text(clip, text)) is not None:
            raise ValueError(
                f"The prompt {quoted(text)} holds the text {quoted(stop)}, at which {policy.family}'s text encoder "
                "stops; remove it."
            )
    encoder, cache = encoder_key(clip, policy), Cache(cache_dir)
    jobs = [caption_job(clip, policy, text, policy.tokenize(clip, text), encoder).job for text in distinct]
    missing = missing_jobs(cache, jobs)
    check_space(cache.folder, missing)
    run_jobs(cache, missing, "prompts", progress, interrupted)
    return {
        text: EncodedPrompt(job.key, as_prompt(cache.read(job.key), {}))
        for text, job in zip(distinct, jobs, strict=True)
    }


def as_prompt(encoded: Mapping[str, Tensor], image_conditioning: Mapping[str, Any]) -> Prompt:
    """Join an encoded caption with the conditioning that comes from the images. Numbers are stored without axes."""
    entries = {name: tensor if tensor.ndim else tensor.item() for name, tensor in encoded.items() if name != "cond"}
    return Prompt(encoded["cond"], {**entries, **image_conditioning})
