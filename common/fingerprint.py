"""Fingerprints of weights and values: equal fingerprints mean equal numbers."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .core import bypass_managers, intended_dtype, original_weights

_COLUMNS = 1024  # 8-byte words per row of the column sums: 8 KiB are hashed for a tensor of any size
_SAMPLES = 4096  # words at an even stride, which detect changes that column sums miss: swapped rows

# A module's weights count as constant during its lifetime: patches have their own key.
_weights_of: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
_patches_of: "WeakKeyDictionary[nn.Module, dict[Any, str]]" = WeakKeyDictionary()


def fingerprint(*values: Any) -> str:
    """Make a stable hex name (40 characters) for nested values: tensors, numbers, strings, bytes, lists, dicts,
    adapters."""
    digest = blake2b(digest_size=20)
    _feed(digest, values)
    return digest.hexdigest()


def changed_fields(options: Any) -> dict[str, Any]:
    """Collect the fields of a dataclass that differ from their default, recursively for nested dataclasses.

    A fingerprint of them stays the same when an option is added. A field without a default is always included."""
    values = {field.name: (getattr(options, field.name), _default(field)) for field in fields(options)}
    return {name: _plain(value) for name, (value, default) in values.items() if default is MISSING or value != default}


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return changed_fields(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def weights_fingerprint(patcher: Any) -> str:
    """Fingerprint the weights of a ComfyUI model patcher: those of its unpatched model, and its patches.

    Every byte of every parameter counts, so a single changed element changes it. The model's own weights are read once
    in its lifetime, its patches once for each `patches_uuid`. It is the same loaded or not, patched in place or not, on
    the device or the host.
    """
    model = patcher.model
    if model not in _weights_of:
        _weights_of[model] = _fingerprint_weights(patcher)
    patches = _patches_of.setdefault(model, {})
    if patcher.patches_uuid not in patches:
        patches[patcher.patches_uuid] = fingerprint(sorted(patcher.patches.items()))
    adapters = fingerprint([_injected(group) for _, group in sorted(patcher.injections.items())])
    return fingerprint(_weights_of[model], patches[patcher.patches_uuid], adapters)


def _fingerprint_weights(patcher: Any) -> str:
    originals = original_weights(patcher)
    digest = blake2b(digest_size=20)
    for name, tensor in sorted(_named_weights(patcher.model), key=lambda entry: entry[0]):
        digest.update(name.encode())
        feed_tensor(digest, originals.get(name, tensor))
    return digest.hexdigest()


def _named_weights(model: nn.Module):
    yield from _named_parameters(model)
    yield from _named_buffers(model)


def _named_parameters(model: nn.Module):
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            # Under dynamic VRAM a weight keeps its file's dtype until used; the dtype at use is the one that counts.
            dtype = intended_dtype(module, name)
            plain = type(parameter.data) is Tensor and dtype not in (None, parameter.dtype)
            yield f"{prefix}.{name}" if prefix else name, parameter.data.to(dtype) if plain else parameter


def _named_buffers(model: nn.Module):
    for prefix, module in model.named_modules():
        # The sampling schedule is a setting that nodes swap on the loaded model, not a weight.
        if prefix == "model_sampling" or prefix.startswith("model_sampling."):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _injected(group: list) -> list:
    """Collect the adapters of bypass injections."""
    adapters: list = []
    for injection in group:
        managers = bypass_managers(injection)
        adapters.append([sorted(manager.adapters.items()) for manager in managers] or injection.inject.__qualname__)
    return adapters


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        feed_tensor(digest, value)
    elif isinstance(value, bytes):
        digest.update(b"bytes%d:" % len(value))
        digest.update(value)
    elif isinstance(value, Mapping):
        digest.update(b"map%d:" % len(value))
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            _feed(digest, (key, item))
    elif isinstance(value, (list, tuple)):
        digest.update(b"list%d:" % len(value))
        for item in value:
            _feed(digest, item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value).encode()
        digest.update(b"%s%d:" % (type(value).__name__.encode(), len(text)))
        digest.update(text)
    elif isinstance(value, nn.Module):
        _feed(digest, (type(value).__qualname__, sorted(value.state_dict().items())))
    elif hasattr(value, "weights"):  # comfy.weight_adapter's adapters
        rows = getattr(value, "row_offset", None)  # of a LoKr applied to a part of the layer it was trained on
        _feed(digest, (type(value).__qualname__, value.weights, *([] if rows is None else [rows])))
    else:
        _feed(digest, getattr(value, "__qualname__", type(value).__qualname__))


@torch.inference_mode()
def feed_tensor(digest: Any, tensor: Tensor) -> None:
    """Feed dtype, shape and bytes of a tensor, on any device, quantised or not, to a hashlib digest.

    Large tensors are reduced on their device: the bytes are viewed as 64-bit words in rows of 1024 and each column is
    summed with wrap-around, so that changing one element changes a sum; only the sums and a sample are hashed.
    """
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if type(tensor).__name__ == "QuantizedTensor":
        quantised: Any = tensor
        parts, layout = quantised.__tensor_flatten__()
        digest.update(f"{layout.get('layout_cls')}{sorted(layout.get('non_tensor_fields', {}).items())}".encode())
        for part in parts:
            feed_tensor(digest, getattr(tensor, part))
        return
    if tensor.is_meta or tensor.numel() == 0:
        return
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() <= _COLUMNS * 8:
        digest.update(raw.cpu().numpy().tobytes())
        return
    if raw.storage_offset() % 8:
        raw = raw.clone()
    rows = raw.numel() // (_COLUMNS * 8)
    words = raw[: rows * _COLUMNS * 8].view(torch.int64)
    sample = words[:: max(1, words.numel() // _SAMPLES)][:_SAMPLES]
    for part in (words.view(rows, _COLUMNS).sum(0), sample, raw[rows * _COLUMNS * 8 :]):
        digest.update(part.cpu().numpy().tobytes())
