"""Guards that failed, as text: all that differs, in torch's wording, without its names of scopes.

Torch writes a guard as the condition that it checks. What the value is instead is put behind it; of a tensor all the
differences are told, where torch stops at the first.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def distance(guards: Sequence[str]) -> tuple[int, int]:
    """How far a graph is whose guards failed so: by kinds of difference, then by differences."""
    kinds = {re.sub(r"'.*?'|\d+|\w*\[.*\]\S*", "", guard.partition(", actual")[0]) for guard in guards}
    # A value that is not there hides what would have been asked of it.
    hidden = sum(bool(re.match(r"\w+Error on ", guard)) for guard in guards)
    return len(kinds), len(guards) + hidden


_CHECK_TENSOR = re.compile(
    r"check_tensor\((?P<name>.*?), (?P<type>\w+), DispatchKeySet\((?P<keys>.*?)\), (?P<dtype>torch\.\w+), "
    r"device=(?P<device>\w+), requires_grad=(?P<grad>\w+), size=\[(?P<size>.*?)\], stride=\[(?P<stride>.*?)\]\)"
)


def differences(guard: str, parts: Sequence[str], value: Any) -> Iterable[str]:
    """How `value` fails a guard of the kind `guard` whose conditions torch writes as `parts`."""
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
    """A guard as torch writes it, without the source line behind it and without torch's names of scopes."""
    return _without_scope(part.partition("  #")[0]).strip()
