"""Activation checkpointing: select the part of a block's activations that is saved for backward.

`full` saves only a block's inputs, around the compiled block or the eager one. `selective` saves a part of the
expensive results: inside a compiled block the partitioner chooses them under a budget, in eager mode a policy over ops.
Both selective forms always save attention's outputs, which take the most time for their bytes.
Blocks contain no random ops (dropout masks are inputs), so no RNG state has to be saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .recompute import run_twice

CHANGE = "_make_closure_patcher"  # private method of torch's config modules: a cheaper `patch` for hot code

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
MATMUL_OPS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def matmul_ops() -> set[Any]:
    """Return the matmul ops; selective checkpointing saves a part of their results."""
    op_names = ("stored_linear", "quantised_linear", "low_bit_linear")
    return MATMUL_OPS | {getattr(torch.ops.tessera, name).default for name in op_names}


def attention_ops() -> set[Any]:
    """Return the attention ops, whose results selective checkpointing always saves."""
    tessera_ops = (getattr(torch.ops.tessera, name, None) for name in ("ragged_attention", "flash_attention"))
    return ATTENTION_OPS | {op.default for op in tessera_ops if op is not None}


def _policy(budget: float) -> Callable[..., CheckpointPolicy]:
    """Build a policy that saves all attention results and the fraction `budget` of the matmuls', evenly spaced."""
    attention, matmuls = attention_ops(), matmul_ops()
    matmul_counts = {False: 0, True: 0}  # by is_recompute: the decisions of forward and recompute must agree

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in attention:
            return CheckpointPolicy.MUST_SAVE if budget > 0 else CheckpointPolicy.PREFER_RECOMPUTE
        if op in matmuls:
            count = matmul_counts[context.is_recompute]
            matmul_counts[context.is_recompute] = count + 1
            if int((count + 1) * budget) > int(count * budget):
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def full(run: Callable[..., Any]) -> Callable[..., Any]:
    """Checkpoint `run`: save only its inputs."""

    def run_checkpointed(*args: Any) -> Any:
        return run_twice(run, *args)

    return run_checkpointed


def selective_eager(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Checkpoint `run` with a policy over ops. budget: fraction of the matmul results to save, 0 to 1."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(budget))

    def run_checkpointed(*args: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run_checkpointed


def _save_attention(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Mark attention as MUST_SAVE in a joint graph of forward and backward, before partitioning."""
    attention = attention_ops()
    for node in graph.graph.nodes:
        if node.target in attention:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


def partitioner_settings(budget: float) -> dict[str, Any]:
    """Return the torch._functorch settings of a compiled block. budget: fraction of the savable activations to save."""
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch_config, "is_non_builtin_to_include"):
        # Weigh our custom ops (attention, linears on stored weights) by their FLOP formulas too; otherwise they count
        # as free and are always recomputed.
        settings["is_non_builtin_to_include"] = True
    if budget > 0:
        # By its FLOP count, attention looks cheaper to recompute than a wide matmul.
        settings["joint_custom_pass"] = _save_attention
    return settings


def selective_compiled(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Set the partitioner's budget around a compiled `run`: fraction of the savable activations to save, 0 to 1."""
    # Makes a quarter of the Python calls of `patch`, which matters around each block of each step.
    change: Callable[[], Callable[[], None]] = getattr(functorch_config, CHANGE)(**partitioner_settings(budget))

    def run_budgeted(*args: Any) -> Any:
        revert = change()
        try:
            return run(*args)
        finally:
            revert()

    return run_budgeted
