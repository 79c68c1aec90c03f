"""Pieces of API prompts, as a test writes them down, and a node executed without one."""

import asyncio
import contextvars
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def awaited(result: Any) -> Any:
    """Return the result of a node, which is a value or a coroutine. A browser test of this process keeps a loop running
    on its thread, on which no other can: then the coroutine is awaited on a thread of its own, in this one's context
    and grad mode."""
    import torch

    if not inspect.iscoroutine(result):
        return result
    if asyncio._get_running_loop() is None:
        return asyncio.run(result)

    def run(inference: bool, grad: bool) -> Any:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return asyncio.run(result)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            contextvars.copy_context().run, run, torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        ).result()


def executed(kind: Any, *args: Any, **inputs: Any) -> Any:
    """Result of a node that is executed."""
    return awaited(kind.execute(*args, **inputs))


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def ksampler(model: str, latent: str = "latent", **changes: Any) -> dict[str, Any]:
    """Core's KSampler over the nodes of these names: two Euler steps, the text of `positive` on both sides."""
    links = {"model": [model, 0], "positive": ["positive", 0], "negative": ["positive", 0], "latent_image": [latent, 0]}
    settings = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return node("KSampler", **(links | settings | changes))
