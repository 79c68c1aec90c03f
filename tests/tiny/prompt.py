"""Pieces of API prompts, as a test writes them down, and a node executed without one."""

import asyncio
import inspect
from typing import Any


def executed(kind: Any, *args: Any, **inputs: Any) -> Any:
    """What a node gives when it is executed, at once or as a coroutine."""
    given = kind.execute(*args, **inputs)
    return asyncio.run(given) if inspect.iscoroutine(given) else given


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def ksampler(model: str, latent: str = "latent", **changes: Any) -> dict[str, Any]:
    """Core's KSampler over the nodes of these names: two Euler steps, the text of `positive` on both sides."""
    links = {"model": [model, 0], "positive": ["positive", 0], "negative": ["positive", 0], "latent_image": [latent, 0]}
    settings = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return node("KSampler", **(links | settings | changes))
