"""Loading of a diffusion model's file: as stored, as saved from a compiled model, or with its blocks in 8 bit."""

import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import comfy.model_management
import comfy.utils
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ...common.core import load_tensors, remember_loader
from ...common.untrusted.tensor_files import open_tensors
from ...memory.low_bit.quantize import AS_STORED, quantize_weights, remember_quantize
from ...models.blocks import in_blocks
from .file_names import diffusion_model_tensors, linear_weights

SAFETENSORS = (".safetensors", ".sft")
LONG = 60.0
"""Seconds of requantising above which the result is saved as a file."""
SOURCE = "tessera_source"
"""Metadata key of such a file: VERSION, size and time of its source file."""
VERSION = 1  # of the quantisation to 8 bit
# A model under dynamic VRAM → the tensors and metadata it was loaded from. Its modules hold the same memory for its
# whole lifetime, as dynamic VRAM moves only copies to the device.
_loaded_of: "WeakKeyDictionary[nn.Module, tuple[dict[str, torch.Tensor], Any]]" = WeakKeyDictionary()
CONVOLUTION, NO_LINEAR = "a convolution", "no Linear, or rearranged by ComfyUI while it loads"


@contextmanager
def readable(unet_name: str) -> Iterator[None]:
    """Turn errors of broken or foreign files into a ValueError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"unet_name: {unet_name} can't be read as safetensors ({error}); it's damaged or the download is "
            "incomplete; download it again."
        ) from error


def is_of_compiled(path: str) -> bool:
    """Return True for a safetensors file that was saved from a model with torch.compile on it."""
    if not path.lower().endswith(SAFETENSORS):
        return False
    try:
        with open_tensors(path) as file:
            return any("_orig_mod." in name for name in file.keys())
    except SafetensorError:
        return False  # loading reports the error


def load_of_compiled(path: str, options: dict[str, Any], dynamic: bool) -> Any:
    """Load a file that was saved from a compiled model, otherwise like core's loader.

    Raises ValueError for a file without a diffusion model.
    """
    model = load_tensors(path, *_uncompiled(path), options, dynamic)
    remember_loader(model, load_of_compiled, path, options)
    return model


def _uncompiled(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read tensors and metadata of a file, without the `_orig_mod.` that torch.compile adds to the names of wrapped
    modules, with which core recognises no model."""
    tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    tensors = {key.replace("_orig_mod.", ""): tensor for key, tensor in tensors.items()}
    return tensors, {key: text.replace("_orig_mod.", "") for key, text in (metadata or {}).items()}


def open_quantized(path: str, options: dict[str, Any], quantize: str, dynamic: bool) -> tuple[Any, list[str]]:
    """Load a diffusion model with the Linears of its blocks in 8 bit.

    quantize: one of QUANTIZE except the first. If this takes longer than LONG, the result is saved next to the file and
    read the next time.

    Returns the MODEL and notes for the user. Raises ValueError for a file without a diffusion model, or with names
    other than ComfyUI's.
    """
    tensors, metadata, said = _quantized_tensors(path, quantize)
    return _model_of(tensors, metadata, path, options, quantize, dynamic), said


def _model_of(
    tensors: dict[str, torch.Tensor], metadata: Any, path: str, options: dict[str, Any], quantize: str, dynamic: bool
) -> Any:
    model = load_tensors(path, dict(tensors), metadata, options, dynamic)
    if model.is_dynamic():
        _loaded_of[model.model] = tensors, metadata
    remember_quantize(model, quantize)
    remember_loader(model, _load_again, path, options, quantize, weakref.ref(model.model))
    return model


def _load_again(path: str, options: dict[str, Any], quantize: str, first: Callable[[], Any], dynamic: bool) -> Any:
    """Reload the MODEL, with or without dynamic VRAM.

    first: returns the model loaded before, None if it is gone.
    """
    previous = first()
    if previous not in _loaded_of:
        return open_quantized(path, options, quantize, dynamic)[0]
    return _model_of(*_loaded_of[previous], path, options, quantize, dynamic)


def _quantized_tensors(path: str, quantize: str) -> tuple[dict[str, torch.Tensor], Any, list[str]]:
    cached_file = quantized_file(path, quantize)
    if _source_of(cached_file) == _source(path):
        tensors, metadata = comfy.utils.load_torch_file(str(cached_file), return_metadata=True)
        return tensors, metadata, [f"quantize: loaded from {cached_file.name}, where the blocks are in {quantize}."]
    read, metadata = _uncompiled(path)
    tensors = diffusion_model_tensors(read, metadata)
    del read
    if tensors is None:
        raise ValueError(
            f"quantize is '{quantize}', but the names in {Path(path).name} are not ComfyUI's. Choose a file that was "
            f"made for ComfyUI, or set quantize to '{AS_STORED}'."
        )
    started = time.perf_counter()
    linears = linear_weights(tensors, metadata)
    inside = in_blocks([name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.ndim >= 2])
    names = [name for name in inside if name in linears]
    skipped = [name for name in inside if name not in linears]
    convolutions = [name.removesuffix(".weight") for name in skipped if tensors[name].ndim > 2]
    rest = [name.removesuffix(".weight") for name in skipped if tensors[name].ndim == 2]
    result = quantize_weights(tensors, names, quantize, comfy.model_management.get_torch_device(), _Progress())
    for reason, layers in ((CONVOLUTION, convolutions), (NO_LINEAR, rest)):
        if layers:
            result.skip(reason, layers)
    seconds = time.perf_counter() - started
    said = list(result.notes(quantize, f" in {seconds:.0f} s"))
    if seconds > LONG:
        said.append(_keep(tensors, metadata, path, cached_file))
    return tensors, metadata, said


def quantized_file(path: str, quantize: str) -> Path:
    """Return the file next to a model's that holds its blocks in 8 bit."""
    return Path(path).with_name(f"{Path(path).stem}.{quantize}.safetensors")


def _source(path: str) -> str:
    status = os.stat(path)
    return f"{VERSION} {status.st_size} {status.st_mtime_ns}"


def _source_of(cached_file: Path) -> str | None:
    try:
        with open_tensors(cached_file) as file:
            return (file.metadata() or {}).get(SOURCE)
    except (OSError, SafetensorError):
        return None


def _is_damaged(cached_file: Path) -> bool:
    try:
        with open_tensors(cached_file):
            return False
    except SafetensorError:
        return True


def _keep(tensors: dict[str, torch.Tensor], metadata: Any, path: str, target: Path) -> str:
    """Write the 8-bit file if there is room. Returns a note on it."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    if target.exists() and _is_damaged(target):
        return f"quantize: not saved, because {target.name} already exists and is damaged; delete it."
    if target.exists() and _source_of(target) is None:
        return f"quantize: not saved, because {target.name} already exists and was not made by this node."
    if shutil.disk_usage(target.parent).free < 1.1 * size:
        return (
            f"quantize: not saved, because {target.parent.name} doesn't have {size / 2**30:.1f} GiB of free disk space."
        )
    part = target.with_suffix(".part")
    try:
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(plain, part, {**(metadata or {}), "format": "pt", SOURCE: _source(path)})
        os.replace(part, target)
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: tensors that share memory
        part.unlink(missing_ok=True)
        return f"quantize: not saved as a file: {error}."
    return (
        f"quantize: saved as {target.name} ({size / 2**30:.1f} GiB), and loaded from there from now on. Other loaders "
        "can use it too; delete it if you don't need it."
    )


class _Progress:
    """ComfyUI's progress bar, interruptible by Cancel."""

    def __init__(self) -> None:
        self.bar = comfy.utils.ProgressBar(1)

    def __call__(self, completed: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self.bar.update_absolute(completed, total)
