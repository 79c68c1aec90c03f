"""Calls of a forward, counted: Python functions and torch's operations, in all and inside the blocks."""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts the operations that reach a backend. Those that only make a view run no kernel, and do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


class PythonCalls:
    """Counts the calls of Python functions while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._called)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"


def count_calls(trainer: Any, batch: Any) -> dict[str, float]:
    """Count the calls of one forward of our trainer.

    python_calls: of Python functions in the whole forward, with the loss.
    block_python_calls: in one call of a block, the mean of all.
    operations, block_operations: of torch's, likewise; an eager forward's alone.
    """
    compiled = bool(trainer.placed.execution.runner.planned_graphs)
    result: dict[str, float] = {}
    for name, counter in (("python_calls", PythonCalls), *([] if compiled else [("operations", Operations)])):
        result[name] = _counted(counter, lambda: trainer.train_step.losses.batch_loss(batch, (0, 0)))
        result[f"block_{name}"] = _in_blocks(counter, trainer, batch)
    return result


def count_kernels() -> int:
    """Count the fused kernels that inductor has made in this process, of forwards and backwards. Matrix products that
    libraries compute are not among them."""
    from torch._inductor import metrics

    return metrics.generated_kernel_count


def _counted(counter: Any, function: Callable[[], Any]) -> int:
    counting = counter()
    with counting:
        function()
    return counting.count


def _in_blocks(counter: Any, trainer: Any, batch: Any) -> float:
    runner, counts = trainer.placed.execution.runner, []

    def run(*args: Any) -> Any:
        counting = counter()
        with counting:
            out = runner(*args)
        counts.append(counting.count)
        return out

    trainer.placed.execution.runner = run
    try:
        trainer.train_step.losses.batch_loss(batch, (0, 0))
    finally:
        trainer.placed.execution.runner = runner
    return sum(counts) / len(counts)
