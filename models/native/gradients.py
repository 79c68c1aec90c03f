"""Find an operation without a gradient in a block of ComfyUI's before anything is trained, and name both."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Torch's words on an operation whose backward is missing, with its name.
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


def check_gradients(where: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a block and its backward once. Returns what it gives, cut off from the graph.

    where: name of the block, for the message.
    args: those of them that are tensors with a gradient stand for what earlier blocks gave; theirs is not changed.

    Raises ValueError for a block with an operation that has no gradient. Outputs require a gradient where the block's
    do, so that calls one after the other check a whole model and hold the graph of one block at a time.
    """
    inputs = [x.detach().requires_grad_() if _has_gradient(x) else x for x in args]
    try:
        with torch.enable_grad():
            out = function(*inputs)
        parts = (out,) if isinstance(out, Tensor) else tuple(out)
        ends = [part for part in parts if _has_gradient(part)]
        floating = any(part.is_floating_point() for part in parts)
        if floating and not ends and any(map(_has_gradient, inputs)):
            raise ValueError(_sentence(where, "something"))
        _backward(ends)
    except (RuntimeError, UserWarning) as error:
        found = explain_missing_gradient(error, where)
        if found is None:
            raise
        raise found from error
    cut = tuple(part.detach().requires_grad_() if _has_gradient(part) else part for part in parts)
    return cut[0] if isinstance(out, Tensor) else cut


def explain_missing_gradient(error: BaseException, where: str) -> ValueError | None:
    """Name the operation without a gradient from which an error of torch tells; None for an error of another kind.

    where: name of the block, or of the model.
    """
    text = str(error)
    for pattern in _MISSING:
        found = pattern.search(text)
        if found:
            name = found[1].replace("::", ".").removesuffix(".default").removeprefix("aten.").strip()
            return ValueError(_sentence(where, name))
    return None


def _sentence(where: str, operation: str) -> str:
    return f"model can't be trained: its {where} runs {operation}, which has no gradient; choose another model."


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _backward(ends: list[Tensor]) -> None:
    """Compute the gradients of all leaves, and keep none."""
    leaves = _leaves(ends)
    if leaves:
        with warnings.catch_warnings():
            # Torch warns of an op without any formula, and drops the gradient there.
            warnings.filterwarnings("error", message=f".*{_FALLBACK}")
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends])


def _leaves(ends: list[Tensor]) -> list[Tensor]:
    nodes = [end.grad_fn for end in ends]
    seen, found = set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of the nodes that hold a leaf
        if leaf is not None:
            found.append(leaf)
        nodes += [following for following, _ in node.next_functions]
    return found
