"""Activation checkpointing: the part of a block's activations that is saved for backward.

`full` saves a block's inputs only, around the compiled block or the eager one. `selective` saves a part of the
expensive results: inside a compiled block the partitioner chooses them under a budget, in eager a policy over ops does.
Nothing random happens inside a block (dropout masks come in as inputs), so no RNG state has to be saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
MATMUL_OPS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def _matmul_ops() -> set[Any]:
    return MATMUL_OPS | {torch.ops.tessera.stored_linear.default, torch.ops.tessera.quantised_linear.default}


def _attention_ops() -> set[Any]:
    own = (getattr(torch.ops.tessera, name, None) for name in ("ragged_attention", "flash_attention"))
    return ATTENTION_OPS | {op.default for op in own if op is not None}


def _policy(budget: float) -> Callable[..., CheckpointPolicy]:
    """Save every attention result, and of the matmuls the part `budget`, spread evenly over the block."""
    attention, matmuls = _attention_ops(), _matmul_ops()
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
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    return run_checkpointed


def selective_eager(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Checkpoint `run` with a policy over ops. budget: part of the matmul results that is saved, 0 to 1."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(budget))

    def run_checkpointed(*args: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return run_checkpointed


def selective_compiled(run: Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Set the partitioner's budget around a compiled `run`: the part of what could be saved that is, 0 to 1."""
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch_config, "is_non_builtin_to_include"):
        # Our own ops (attention, linears on stored weights) are weighed by their formulas too; else they count as free
        # and are always computed again.
        settings["is_non_builtin_to_include"] = True

    def run_budgeted(*args: Any) -> Any:
        with functorch_config.patch(settings):
            return run(*args)

    return run_budgeted
