"""Failed guards of a graph, collected one by one from torch's tree of guards, as text.

Torch writes a guard as the condition that it checks. The actual value is appended; for a tensor all differences are
listed, whereas torch stops at the first. Torch's scope names are removed.
"""

import logging
import operator
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .expressions import value_of

logger = logging.getLogger(__name__)


# Guards over several values at once: checking one alone would leave its state half updated.
_RELATIONAL = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING"}


def failed_guards(manager: Any, values: dict[str, Any]) -> tuple[str, ...]:
    """Find all guards of one graph that do not hold for the locals `values`.

    Torch names the first failure and stops, in an order that changes with each failure, so its answer does not show how
    near a graph is. Here the tree of guards is checked value by value; torch's own answer is added.
    """
    if not hasattr(manager, "root") or manager.root is None or hasattr(manager, "invalidation_reason"):
        return (str(getattr(manager, "invalidation_reason", "the graph was made invalid")).strip(),)
    info = manager.check_verbose(values)
    reported = [] if info.result or len(info.verbose_code_parts) != 1 else [tidy(info.verbose_code_parts[0])]
    failures: list[str] = []
    try:
        failures = list(dict.fromkeys(_walk(manager, values)))
    except Exception:
        logger.debug("the guards could not be asked one by one", exc_info=True)
    manager.check_verbose(values)  # leaves the relational guards in the state of a full check
    if reported and reported[0].startswith("GLOBAL_STATE"):
        # Another grad mode gives every tensor other dispatch keys.
        failures = [guard for guard in failures if "dispatch key" not in guard]
    # For a tensor torch reports only the first difference, and `failures` has them all.
    matches = [re.match(r"tensor '.*' (?=[a-z_ ]+ mismatch)|.*", text) for text in reported]
    texts = [m.string for m in matches if m and not any(text.startswith(m.group()) for text in failures)] + failures
    return tuple(texts) or ("no guard fails any more",)


def _walk(manager: Any, values: dict[str, Any]) -> Iterable[str]:
    names = ChainMap({"L": values, "G": manager.global_scope["G"]}, manager.closure_vars, manager.global_scope)
    for leaf in (*manager.root.get_leaf_guards(), *manager.root.get_epilogue_lambda_guards()):
        if type(leaf).__name__ == "LAMBDA_GUARD" and leaf(values) is False:
            yield from (tidy(part) for part in leaf.verbose_code_parts() if _false(part, names))
    pending = list(manager.root.get_child_managers())
    while pending:
        child = pending.pop(0)
        try:
            value = value_of(child.get_source(), names)
        except Exception:  # the value is gone: a guard further up says so
            continue
        failing = set()
        for leaf in child.get_leaf_guards():
            guard = type(leaf).__name__
            if guard not in _RELATIONAL and leaf(value) is False:
                failing.add(guard)
                yield from differences(guard, leaf.verbose_code_parts(), value)
        if "TYPE_MATCH" in failing:
            continue  # the contents of another class are irrelevant
        pending += child.get_child_managers()
        for pair in getattr(child, "get_key_value_managers", dict)().values():
            pending += [entry for entry in pair if entry is not None]


def _false(part: str, names: Mapping[str, Any]) -> bool:
    """Return True if one condition of a shape guard fails; those that can't be evaluated alone count as failed."""
    try:
        return not value_of(part, names)
    except Exception:
        return True


def distance(guards: Sequence[str]) -> tuple[int, int]:
    """Rank a graph by its failed guards: by kinds of difference, then by differences."""
    kinds = {re.sub(r"'.*?'|\d+|\w{0,99}\[.{0,200}\]\S*", "", guard.partition(", actual")[0]) for guard in guards}
    # A missing value hides the guards on it.
    missing_values = sum(bool(re.match(r"\w+Error on ", guard)) for guard in guards)
    return len(kinds), len(guards) + missing_values


_CHECK_TENSOR = re.compile(
    r"check_tensor\((?P<name>.*?), (?P<type>\w+), DispatchKeySet\((?P<keys>.*?)\), (?P<dtype>torch\.\w+), "
    r"device=(?P<device>\w+), requires_grad=(?P<grad>\w+), size=\[(?P<size>.*?)\], stride=\[(?P<stride>.*?)\]\)"
)


def differences(guard: str, parts: Sequence[str], value: Any) -> Iterable[str]:
    """Describe how `value` fails a guard of the kind `guard`. parts: the guard's conditions as torch writes them."""
    for part in parts:
        expected = _CHECK_TENSOR.match(part)
        if expected and isinstance(value, torch.Tensor):
            yield from _tensor_differences(expected.groupdict(), value)
        else:
            actual = _short(value, guard)
            yield f"{tidy(part)}, actual {actual}" if actual else tidy(part)


def _tensor_differences(expected: dict[str, str], tensor: torch.Tensor) -> Iterable[str]:
    """Describe all differences in torch's words; torch itself stops at the first."""
    name = f"tensor '{_without_scope(expected['name'])}'"
    keys = expected["keys"].split(", ")
    size = [None if n == "None" else int(n) for n in expected["size"].split(", ") if n]
    stride = [None if n == "None" else int(n) for n in expected["stride"].split(", ") if n]
    device = next((key.lower() for key in keys if key in ("CPU", "CUDA", "XPU", "MPS", "HPU", "Meta")), None)
    mismatches = []
    if expected["type"] != type(tensor).__name__:
        mismatches.append(f"type mismatch. expected {expected['type']}, actual {type(tensor).__name__}")
    if expected["dtype"] != str(tensor.dtype):
        mismatches.append(f"dtype mismatch. expected {expected['dtype']}, actual {tensor.dtype}")
    if device is not None and (device, expected["device"]) != (tensor.device.type, str(tensor.device.index)):
        expected_device = device if expected["device"] == "None" else f"{device}:{expected['device']}"
        mismatches.append(f"device mismatch. expected {expected_device}, actual {tensor.device}")
    # Outside inference mode guards see the keys of an ordinary tensor on an inference tensor.
    elif ("ADInplaceOrView" in keys) == (tensor.is_inference() and torch.is_inference_mode_enabled()):
        guarded, actual = ("an inference tensor", "an ordinary tensor")[:: -1 if tensor.is_inference() else 1]
        mismatches.append(f"dispatch key set mismatch. expected {guarded}, actual {actual}")
    if expected["grad"] != str(tensor.requires_grad):
        mismatches.append(f"requires_grad mismatch. expected {expected['grad']}, actual {tensor.requires_grad}")
    if len(size) != tensor.dim():
        mismatches.append(f"rank mismatch. expected {len(size)}, actual {tensor.dim()}")
    else:
        mismatches += [
            f"size mismatch at index {i}. expected {guarded}, actual {actual}"
            for i, (guarded, actual) in enumerate(zip(size, tensor.shape, strict=True))
            if guarded not in (None, actual)
        ]
        # Another size implies other strides: they count separately only if the dimensions are in another order.
        other = any(guarded not in (None, actual) for guarded, actual in zip(stride, tensor.stride(), strict=True))
        if other and (not mismatches or _order(stride, tensor.shape) != _order(tensor.stride(), tensor.shape)):
            mismatches.append(f"stride mismatch. expected [{expected['stride']}], actual {list(tensor.stride())}")
    if not mismatches:
        mismatches.append(f"dispatch key set mismatch. expected DispatchKeySet({expected['keys']})")
    return (f"{name} {text}" for text in mismatches)


def _order(stride: Sequence[int | None], shape: Sequence[int]) -> list[int] | None:
    """Return the dimensions from the largest stride to the smallest; None if a stride is not known."""
    steps = [(step, i) for i, (step, n) in enumerate(zip(stride, shape, strict=True)) if n != 1]
    if any(step is None for step, _ in steps):
        return None
    return [i for _, i in sorted(steps, key=lambda pair: -(pair[0] or 0))]


def _short(value: Any, guard: str) -> str:
    if guard in ("LENGTH_CHECK", "DICT_LENGTH", "TUPLE_ITERATOR_LEN"):
        return str(operator.length_hint(value))
    if guard == "DICT_CONTAINS":
        return ""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return repr(value)[:100]
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name}" if name else str(type(value))


def _without_scope(text: str) -> str:
    """Shorten `L['block']._modules['norm']._parameters['weight']` to `block.norm.weight`."""
    text = re.sub(r"""\bL\[\s*['"](.*?)['"]\s*\]""", r"\1", text)
    return re.sub(r"""\._(?:modules|parameters|buffers)\[['"](.*?)['"]\]""", r".\1", text)


def tidy(part: str) -> str:
    """Strip the source line at the end and torch's scope names from a guard's text."""
    return _without_scope(part.partition("  #")[0]).strip()
