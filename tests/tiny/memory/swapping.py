"""Training runs that differ in the place of the weights, and the check that they are the same run."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ..train.training import fill_up_matrices, make_data, make_trainer

THREE_SHAPES = [(4, 4), (2, 8), (8, 2)]


def three_pictures() -> Any:
    """Three shapes of 16 tokens, with captions of 16."""
    return make_data(THREE_SHAPES, [16, 16, 16])


def trained(
    model: Any, data: Any, folder: Path, *, steps: int, batch: int = 1, backend: str | None = None, **memory: Any
) -> Any:
    """A trainer that has made these steps, from a LoRA that is not at its start. `memory` are fields of MemoryOptions,
    whose `checkpointing` is "none" here unless another is named."""
    from tessera.train.config.settings import MemoryOptions

    options = MemoryOptions(**{"checkpointing": "none", **memory})
    trainer = make_trainer(model, data, folder, backend=backend, batch_size=batch, steps=steps, memory=options)
    fill_up_matrices(trainer)
    trainer.run()
    return trainer


def assert_same_run(first: Any, second: Any, unused: Collection[str] = ()) -> None:
    """The losses of each step, the LoRA and the gradients of the last step are the same, bit for bit. `unused`: the
    layers that may get none, in both."""
    assert first.progress.loss == second.progress.loss
    assert first.network.pairs.keys() == second.network.pairs.keys()
    for name, pair in first.network.pairs.items():
        for a, b in zip(pair, second.network.pairs[name], strict=True):
            assert torch.equal(a, b), name
            if a.grad is not None or name not in unused:
                assert torch.equal(a.grad, b.grad), name
            else:
                assert b.grad is None, name
