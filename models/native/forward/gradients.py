"""Find an operation without a gradient in a ComfyUI block before training starts, and name both."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Torch's error messages for an operation without a backward, with its name.
_FALLBACK = r"an autograd kernel was not registered"
_MISSING = tuple(
    map(
        re.compile,
        (
            r"Trying to backward through ([\w.:]+) but no autograd formula was registered",
            r"derivative for '?([\w.:]+)'? is not implemented",
            rf"([\w.:]+): {_FALLBACK}",
            r"([\w. -]+?)(?:\(\))?:? (?:operations|functions).* (?:don't|do not) support auto",
        ),
    )
)


def check_gradients(owner: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a block and its backward once. Returns its output, detached from the graph.

    owner: name of the block, for the message.
    args: tensors among them that require a gradient stand in for outputs of earlier blocks; their gradients are not
        changed.

    Raises ValueError for a block with an operation that has no gradient. Outputs require a gradient if the block's do,
    so that successive calls check a whole model and hold the graph of one block at a time.
    """
    inputs = [x.detach().requires_grad_() if _has_gradient(x) else x for x in args]
    try:
        with torch.enable_grad():
            out = function(*inputs)
        parts = (out,) if isinstance(out, Tensor) else tuple(out)
        ends = [part for part in parts if _has_gradient(part)]
        floating = any(part.is_floating_point() for part in parts)
        if floating and not ends and any(map(_has_gradient, inputs)):
            raise ValueError(_sentence(owner, "something"))
        _backward(ends)
    except (RuntimeError, UserWarning) as error:
        explained = explain_missing_gradient(error, owner)
        if explained is None:
            raise
        raise explained from error
    cut = tuple(part.detach().requires_grad_() if _has_gradient(part) else part for part in parts)
    return cut[0] if isinstance(out, Tensor) else cut


def explain_missing_gradient(error: BaseException, owner: str) -> ValueError | None:
    """Name the operation without a gradient that a torch error reports; None for an error of another kind.

    owner: name of the block, or of the model.
    """
    text = str(error)
    for pattern in _MISSING:
        match = pattern.search(text)
        if match:
            name = match[1].replace("::", ".").removesuffix(".default").removeprefix("aten.").strip()
            return ValueError(_sentence(owner, name))
    return None


def _sentence(owner: str, operation: str) -> str:
    return f"model can't be trained: its {owner} runs {operation}, which has no gradient; choose another model."


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _backward(ends: list[Tensor]) -> None:
    """Compute the gradients of all leaves, and discard them."""
    leaves = _leaves(ends)
    if leaves:
        with warnings.catch_warnings():
            # Torch warns about an op without any formula, and drops its gradient.
            warnings.filterwarnings("error", message=f".*{_FALLBACK}")
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends])


def _leaves(ends: list[Tensor]) -> list[Tensor]:
    nodes = [end.grad_fn for end in ends]
    visited, leaves = set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)  # only on nodes that hold a leaf
        if leaf is not None:
            leaves.append(leaf)
        nodes += [following for following, _ in node.next_functions]
    return leaves
