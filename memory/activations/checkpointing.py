"""Activation checkpointing: the part of a block's activations that is saved for backward.

`full` saves a block's inputs only, around the compiled block or the eager one. `selective` saves a part of the
expensive results: inside a compiled block the partitioner chooses them under a budget, in eager a policy over ops does.
Both always save what attention gives: it takes the most time for its bytes.
Nothing random happens inside a block (dropout masks come in as inputs), so no RNG state has to be saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .recompute import run_twice

CHANGE = "_make_closure_patcher"  # of torch's configurations, private: `patch` for code that runs often

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
MATMUL_OPS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def matmul_ops() -> set[Any]:
    """Return the ops of which selective checkpointing keeps a part of the results."""
    names = ("stored_linear", "quantised_linear", "low_linear", "adapted_linear", "adapted_linears")
    own = (getattr(torch.ops.tessera, name, None) for name in names)
    return MATMUL_OPS | {op.default for op in own if op is not None}


def attention_ops() -> set[Any]:
    """Return the ops whose results selective checkpointing always keeps."""
    own = (getattr(torch.ops.tessera, name, None) for name in ("ragged_attention", "flash_attention"))
    return ATTENTION_OPS | {op.default for op in own if op is not None}


def _policy(budget: float) -> Callable[..., CheckpointPolicy]:
    """Save every attention result, and of the matmuls the part `budget`, spread evenly over the block."""
    attention, matmuls = attention_ops(), matmul_ops()
    seen = {False: 0, True: 0}  # a counter each for the forward and for its recompute, which must agree

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in attention:
            return CheckpointPolicy.MUST_SAVE if budget > 0 else CheckpointPolicy.PREFER_RECOMPUTE
        if op in matmuls:
            count = seen[context.is_recompute]
            seen[context.is_recompute] = count + 1
            if int((count + 1) * budget) > int(count * budget):
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def full(run: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint `run`: save nothing but its inputs."""

    def run_checkpointed(*args: Any) -> Any:
        return run_twice(run, *args)

    return run_checkpointed


def selective_eager(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Checkpoint `run` with a policy over ops. budget: part of the matmul results that is saved, 0 to 1."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(budget))

    def run_checkpointed(*args: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run_checkpointed


def _save_attention(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Mark attention in a joint graph of forward and backward, before it is parted, as what has to be saved."""
    attention = attention_ops()
    for node in graph.graph.nodes:
        if node.target in attention:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


def partitioner_settings(budget: float) -> dict[str, Any]:
    """Return the settings of torch._functorch for a compiled block. budget: part of what could be saved that is."""
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch_config, "is_non_builtin_to_include"):
        # Our own ops (attention, linears on stored weights) are weighed by their formulas too; else they count as free
        # and are always computed again.
        settings["is_non_builtin_to_include"] = True
    if budget > 0:
        # Weighed by its FLOP, attention comes out cheaper to compute again than a wide product.
        settings["joint_custom_pass"] = _save_attention
    return settings


def selective_compiled(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Set the partitioner's budget around a compiled `run`: the part of what could be saved that is, 0 to 1."""
    # A quarter of the Python calls of `patch`: it is around each block of each step.
    change: Callable[[], Callable[[], None]] = getattr(functorch_config, CHANGE)(**partitioner_settings(budget))

    def run_budgeted(*args: Any) -> Any:
        revert = change()
        try:
            return run(*args)
        finally:
            revert()

    return run_budgeted
