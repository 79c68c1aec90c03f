"""A backward on another thread than its forward, as autograd runs it for a GPU: the same numbers, copies and graphs.

On a CPU a backward runs on the thread that asks for it, so whatever is bound to a thread (torch's configuration,
`threading.local`, context variables, what dynamo and autograd hold) is there by luck. Here it runs on a new thread with
nothing of the first, once everything that the forward has left unreachable is collected.
"""

import gc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import tiny
import torch
from tessera.train.loop.learner import Learner
from tiny.compile.compiling import Graphs
from tiny.memory import swapping
from tiny.memory.swapping import assert_same_run
from torch import Tensor

STEPS = 2
CHECKPOINTING = ("none", "selective", "full", "full, offloaded")


class BackwardThreads:
    """Replaces the learner's backward by one on a thread of its own. count: backwards so far."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        plain = Learner.backward

        def on_a_thread(learner: Learner, loss: Tensor) -> None:
            errors: list[BaseException] = []

            def backward() -> None:
                try:
                    plain(learner, loss)
                except BaseException as error:
                    errors.append(error)

            self.count += 1
            gc.collect()
            thread = Thread(target=backward)
            thread.start()
            thread.join()
            if errors:
                raise errors[0]

        patch.setattr(Learner, "backward", on_a_thread)


@pytest.fixture(scope="module")
def deep_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_flux(tmp_path_factory.mktemp("deep") / "flux.safetensors", depth=2, depth_single=2)


def combinations() -> Iterator[Any]:
    """List all combinations; half of them, in which each pair of two settings meets, are not `wide`."""
    for checkpointing, swap, backend in product(CHECKPOINTING, (0, 3), (None, "aot_eager")):
        name = f"{checkpointing}-{'swapped' if swap else 'resident'}-{'compiled' if backend else 'eager'}"
        is_repeated = (CHECKPOINTING.index(checkpointing) + bool(swap) + bool(backend)) % 2 == 1
        yield pytest.param(checkpointing, swap, backend, id=name, marks=[pytest.mark.wide] * is_repeated)


@pytest.mark.parametrize(("checkpointing", "swap", "backend"), combinations())
def test_a_backward_on_a_thread_of_its_own_is_the_same_run(
    deep_flux, tmp_path, monkeypatch, checkpointing, swap, backend
) -> None:
    torch._dynamo.reset()
    mode, _, offloaded = checkpointing.partition(", ")
    options = {"checkpointing": mode, "offload_activations": bool(offloaded), "blocks_to_swap": swap}

    def trained(name: str) -> tuple[Any, int]:
        graphs = Graphs()
        model, folder = tiny.load_flux(deep_flux), tmp_path / name
        trainer = swapping.trained(model, swapping.three_pictures(), folder, steps=STEPS, backend=backend, **options)
        assert not graphs.breaks
        return trainer, graphs()

    plain, graphs = trained("plain")
    threads = BackwardThreads(monkeypatch)
    threaded, graphs_of_threads = trained("threads")
    assert threads.count == STEPS
    assert_same_run(threaded, plain)
    assert threaded.train_step.copies == plain.train_step.copies and bool(threaded.train_step.copies) == bool(swap)
    assert graphs_of_threads == graphs == plain.placed.execution.runner.planned_graphs == (2 if backend else 0)
    for region, other in zip(
        threaded.placed.execution.runner.report.regions, plain.placed.execution.runner.report.regions, strict=True
    ):
        assert (region.compiled_calls, region.eager_calls) == (other.compiled_calls, other.eager_calls)
        assert [(e.graphs, e.recompiles) for e in region.events] == [(e.graphs, e.recompiles) for e in other.events]
