"""Failed guards of a graph, found one by one through torch's tree of guards, as text.

Torch writes a guard as the condition that it checks. The actual value is put behind it; of a tensor all differences
are listed, where torch stops at the first. Torch's names of scopes are left out.
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


# Guards over several values at once: asking one by itself would leave it half asked.
_RELATIONAL = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING"}


def failed_guards(manager: Any, values: dict[str, Any]) -> tuple[str, ...]:
    """Find all guards of one graph that do not hold for the locals `values`.

    Torch names the first that fails and stops, in an order that moves with each failure, so a graph cannot be found to
    be near or far from it. The tree of guards is asked value by value here; torch's own answer is added.
    """
    if not hasattr(manager, "root") or manager.root is None or hasattr(manager, "invalidation_reason"):
        return (str(getattr(manager, "invalidation_reason", "the graph was made invalid")).strip(),)
    info = manager.check_verbose(values)
    own = [] if info.result or len(info.verbose_code_parts) != 1 else [tidy(info.verbose_code_parts[0])]
    found: list[str] = []
    try:
        found = list(dict.fromkeys(_walk(manager, values)))
    except Exception:
        logger.debug("the guards could not be asked one by one", exc_info=True)
    manager.check_verbose(values)  # leaves the relational guards as a whole check does
    if own and own[0].startswith("GLOBAL_STATE"):
        # Another grad mode gives every tensor other dispatch keys.
        found = [guard for guard in found if "dispatch key" not in guard]
    # Of a tensor torch tells the first difference only, and found has them all.
    same = [re.match(r"tensor '.*' (?=[a-z_ ]+ mismatch)|.*", text) for text in own]
    texts = [each.string for each in same if each and not any(text.startswith(each.group()) for text in found)] + found
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
        failing = [
            leaf for leaf in child.get_leaf_guards() if type(leaf).__name__ not in _RELATIONAL and leaf(value) is False
        ]
        for leaf in failing:
            yield from differences(type(leaf).__name__, leaf.verbose_code_parts(), value)
        if any(type(leaf).__name__ == "TYPE_MATCH" for leaf in failing):
            continue  # what another class holds says nothing
        pending += child.get_child_managers()
        for pair in getattr(child, "get_key_value_managers", dict)().values():
            pending += [each for each in pair if each is not None]


def _false(part: str, names: Mapping[str, Any]) -> bool:
    """Return True if one condition of a shape guard fails; those that cannot be asked alone count as failed."""
    try:
        return not value_of(part, names)
    except Exception:
        return True


def distance(guards: Sequence[str]) -> tuple[int, int]:
    """Rank a graph by its failed guards: by kinds of difference, then by differences."""
    kinds = {re.sub(r"'.*?'|\d+|\w{0,99}\[.{0,200}\]\S*", "", guard.partition(", actual")[0]) for guard in guards}
    # A value that is not there hides what would have been asked of it.
    hidden = sum(bool(re.match(r"\w+Error on ", guard)) for guard in guards)
    return len(kinds), len(guards) + hidden


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
    """In torch's words, but all of them: torch stops at the first."""
    name = f"tensor '{_without_scope(expected['name'])}'"
    keys = expected["keys"].split(", ")
    size = [None if n == "None" else int(n) for n in expected["size"].split(", ") if n]
    stride = [None if n == "None" else int(n) for n in expected["stride"].split(", ") if n]
    device = next((key.lower() for key in keys if key in ("CPU", "CUDA", "XPU", "MPS", "HPU", "Meta")), None)
    found = []
    if expected["type"] != type(tensor).__name__:
        found.append(f"type mismatch. expected {expected['type']}, actual {type(tensor).__name__}")
    if expected["dtype"] != str(tensor.dtype):
        found.append(f"dtype mismatch. expected {expected['dtype']}, actual {tensor.dtype}")
    if device is not None and (device, expected["device"]) != (tensor.device.type, str(tensor.device.index)):
        known = device if expected["device"] == "None" else f"{device}:{expected['device']}"
        found.append(f"device mismatch. expected {known}, actual {tensor.device}")
    # Outside inference mode an inference tensor has the key of an ordinary one as far as guards see.
    elif ("ADInplaceOrView" in keys) == (tensor.is_inference() and torch.is_inference_mode_enabled()):
        was, is_now = ("an inference tensor", "an ordinary tensor")[:: -1 if tensor.is_inference() else 1]
        found.append(f"dispatch key set mismatch. expected {was}, actual {is_now}")
    if expected["grad"] != str(tensor.requires_grad):
        found.append(f"requires_grad mismatch. expected {expected['grad']}, actual {tensor.requires_grad}")
    if len(size) != tensor.dim():
        found.append(f"rank mismatch. expected {len(size)}, actual {tensor.dim()}")
    else:
        found += [
            f"size mismatch at index {i}. expected {wanted}, actual {is_}"
            for i, (wanted, is_) in enumerate(zip(size, tensor.shape, strict=True))
            if wanted not in (None, is_)
        ]
        # Another size brings other strides: they count by themselves where the dimensions lie in another order.
        other = any(wanted not in (None, is_) for wanted, is_ in zip(stride, tensor.stride(), strict=True))
        if other and (not found or _order(stride, tensor.shape) != _order(tensor.stride(), tensor.shape)):
            found.append(f"stride mismatch. expected [{expected['stride']}], actual {list(tensor.stride())}")
    if not found:
        found.append(f"dispatch key set mismatch. expected DispatchKeySet({expected['keys']})")
    return (f"{name} {text}" for text in found)


def _order(stride: Sequence[int | None], shape: Sequence[int]) -> list[int] | None:
    """The dimensions from the widest step to the narrowest; None where a step is not known."""
    steps = [(step, i) for i, (step, n) in enumerate(zip(stride, shape, strict=True)) if n != 1]
    if any(step is None for step, _ in steps):
        return None
    return [i for _, i in sorted(steps, key=lambda each: -(each[0] or 0))]


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
    """`L['block']._modules['norm']._parameters['weight']` as `block.norm.weight`."""
    text = re.sub(r"""\bL\[\s*['"](.*?)['"]\s*\]""", r"\1", text)
    return re.sub(r"""\._(?:modules|parameters|buffers)\[['"](.*?)['"]\]""", r".\1", text)


def tidy(part: str) -> str:
    """Strip a guard's text of the source line behind it and of torch's names of scopes."""
    return _without_scope(part.partition("  #")[0]).strip()
