"""Private touches of ComfyUI: state that it neither documents nor offers as an interface is reached through here.

A newer ComfyUI may rename any of it, so that this is the first file to read when one does. A feature that some
versions lack is asked for by `getattr` or `hasattr`.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import comfy.cli_args
import comfy.memory_management
import comfy.model_management
import comfy.ops
import comfy.options
import comfy.sd
import comfy.utils
import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

# Loading and memory


def loaded_models() -> list[Any]:
    """Give ComfyUI's own list of the models that it holds on devices, not a copy.

    Taking an entry out of it makes ComfyUI forget the model. The `model` of an entry is None where the patcher is gone
    and only the weights are still held.
    """
    return comfy.model_management.current_loaded_models


def held_models() -> list[tuple[Any, ModelPatcher]]:
    """Give the entries whose patcher is there, each with it: an entry's own reference is weak, and may die any time."""
    return [(entry, patcher) for entry in loaded_models() if (patcher := entry.model) is not None]


def usable_memory(patcher: Any) -> int:
    """Measure the bytes that the MODEL may use of its device, less what ComfyUI reserves; may be negative.

    Where ComfyUI can say so, weights of models under dynamic VRAM count as free: they leave when memory is asked for.
    """
    ask = getattr(patcher, "get_free_memory", comfy.model_management.get_free_memory)
    return int(ask(patcher.load_device)) - int(comfy.model_management.extra_reserved_memory())


def bytes_to_unload(device: torch.device) -> int:
    """Count the bytes of the models on the device that ComfyUI unloads for another, beside those that count as free."""
    # ComfyUI keeps what is listed of a MODEL that is gone as long as anything holds its weights.
    there = [(entry, patcher) for entry, patcher in held_models() if entry.device == device]
    counted = hasattr(ModelPatcher, "get_free_memory")
    return sum(entry.model_loaded_memory() for entry, patcher in there if not (counted and patcher.is_dynamic()))


def make_room_to_lock(size: int) -> None:
    """Have ComfyUI unlock as much of its own page-locked memory as with `size` bytes more is above its bound."""
    make_room = getattr(comfy.model_management, "ensure_pin_registerable", None)
    if make_room is not None:
        make_room(size)


def count_locked(size: int) -> None:
    """Count page-locked bytes of ours with ComfyUI's own, which it bounds; negative for what is unlocked."""
    if hasattr(comfy.model_management, "TOTAL_PINNED_MEMORY"):
        comfy.model_management.TOTAL_PINNED_MEMORY += size


def discard_cuda_error() -> None:
    """Take a failed call's error off CUDA's list, from where the next call of anybody would report it once more."""
    comfy.model_management.discard_cuda_async_error()


# Calls of `execution.py` at the end of each node, under dynamic VRAM: (module, function).
_AT_END_OF_NODE = (
    ("comfy.model_management", "reset_cast_buffers"),  # buffers of casts and copies, page-locked patches
    ("comfy.model_prefetch", "cleanup_prefetch_queues"),  # weights copied ahead, recorded allocations
    ("comfy_aimdo.model_vbar", "vbars_reset_watermark_limits"),  # weights that lost their place may come back
)


def end_of_node() -> None:
    """Give back what ComfyUI gives back at the end of a node.

    A node that samples or encodes many times calls it after each, as ComfyUI would between nodes; otherwise the buffers
    stay until the node ends.
    """
    if not comfy.memory_management.aimdo_enabled:  # only then does ComfyUI, whose calls wait for the GPU
        return
    for module, name in _AT_END_OF_NODE:
        give_back = getattr(sys.modules.get(module), name, None)  # what nobody has imported holds nothing
        if give_back is not None:
            give_back()


def loaded_from(patcher: Any) -> str:
    """Give the path of the file from which ComfyUI loaded the MODEL, empty where it does not say."""
    loader = getattr(patcher, "cached_patcher_init", None)  # (function, its arguments, …)
    return loader[1][0] if loader and loader[1] and isinstance(loader[1][0], str) else ""


def _takes(function: Any, *names: str) -> bool:
    """Tell whether a function takes arguments of these names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one written in C
        return False
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(name in parameters for name in names)


def can_leave_dynamic_vram(patcher: Any) -> bool:
    """Tell whether ComfyUI can load the MODEL anew, from where it came, without dynamic VRAM."""
    loader = getattr(patcher, "cached_patcher_init", None)
    takes_it = _takes(patcher.clone, "disable_dynamic", "model_override")
    return loader is not None and takes_it and _takes(loader[0], "disable_dynamic")


def clone_without_dynamic_vram(patcher: Any, loaded: Any) -> tuple[Any, Any]:
    """Clone a MODEL off dynamic VRAM; returns also what its model was loaded to.

    loaded: what an earlier clone returned, None to load the model now.
    """
    clone = patcher.clone(disable_dynamic=True, model_override=loaded)
    return clone, clone.get_clone_model_override()


def load_without_dynamic_vram(path: str, options: dict[str, Any]) -> Any:
    """Load a diffusion model as core's loader does, without dynamic VRAM where ComfyUI can."""
    off = {"disable_dynamic": True} if _takes(comfy.sd.load_diffusion_model, "disable_dynamic") else {}
    return comfy.sd.load_diffusion_model(path, model_options=options, **off)


def load_tensors(path: str, tensors: dict[str, Tensor], metadata: Any, options: dict[str, Any], dynamic: bool) -> Any:
    """Load a diffusion model from a file's tensors and metadata, as core's loader does from the file.

    dynamic: under dynamic VRAM where ComfyUI has it on. Raises ValueError where they are of no diffusion model.
    """
    load = comfy.sd.load_diffusion_model_state_dict
    off = {"disable_dynamic": True} if not dynamic and _takes(load, "disable_dynamic") else {}
    model = load(tensors, model_options=options, metadata=metadata, **off)
    if model is None:
        name = Path(path).name
        raise ValueError(f"Could not detect model type of {name}: it isn't a diffusion model that this ComfyUI knows.")
    return model


def load_text_encoders(tensors: list[dict[str, Tensor]], kind: Any, options: dict[str, Any]) -> Any:
    """Load text encoders from their tensors, without dynamic VRAM where ComfyUI can. kind: a `comfy.sd.CLIPType`."""
    off = {"disable_dynamic": True} if _takes(comfy.sd.load_text_encoder_state_dicts, "disable_dynamic") else {}
    return comfy.sd.load_text_encoder_state_dicts(tensors, clip_type=kind, model_options=options, **off)


def remember_loader(model: Any, load: Callable[..., Any], *args: Any) -> None:
    """Tell ComfyUI how the MODEL is loaded once more. load: takes these arguments, then whether dynamic VRAM may be."""

    def again(*args: Any, disable_dynamic: bool = False) -> Any:
        return load(*args, not disable_dynamic)

    model.cached_patcher_init = (again, args)


def lazy_loading_code() -> CodeType | None:
    """Give the code that clones a file's weight for a Linear made under dynamic VRAM, None where it is not known."""
    found = getattr(comfy.ops.disable_weight_init, "_lazy_load_from_state_dict", None)
    return getattr(found, "__code__", None)


class PartialPatcher(ModelPatcher):
    """ModelPatcher that leaves some modules out of what ComfyUI loads, unloads and patches."""

    def left_out(self, module: nn.Module) -> bool:
        raise AssertionError(f"{type(self).__name__} has no left_out")

    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        # An entry is a tuple of sizes, a name, the module and its parameters, whose order differs between releases.
        entries = super()._load_list(*args, **kwargs)
        return [entry for entry in entries if not any(self.left_out(m) for m in entry if isinstance(m, nn.Module))]


# Encoders

# Methods of core's VAE that encode in tiles, which `VAE.encode` calls upon an out-of-memory error.
_TILED = ("encode_tiled_", "encode_tiled_1d", "encode_tiled_3d", "_encode_tiled_owned")


def without_tiled_encoding(vae: Any, instead: Callable[..., Any]) -> Any:
    """Copy the VAE shallowly, with `instead` in the place of its encoding in tiles, for which core has no switch."""
    whole = copy.copy(vae)
    for name in _TILED:
        setattr(whole, name, instead)
    return whole


# Patched weights


def is_patched(patcher: Any) -> bool:
    """Tell whether weights of the MODEL have patches written into them and their originals laid aside."""
    return bool(patcher.backup)


def patched_originals(patcher: Any) -> list[Tensor]:
    """Give the originals of the weights that stand patched in the MODEL, but for those that hooks patched."""
    return [saved.weight for saved in patcher.backup.values()]


def original_weights(patcher: Any) -> dict[str, Tensor]:
    """Give the originals, by key, of the weights into which ComfyUI has written patches or hooks."""
    originals = {key: saved[0] for key, saved in getattr(patcher, "hook_backup", {}).items()}
    return originals | {key: saved.weight for key, saved in patcher.backup.items()}


def replaced_keys(patcher: Any) -> set[str]:
    """Give the keys of weights and objects that ComfyUI puts back when it unloads the MODEL."""
    return {*patcher.backup, *patcher.object_patches_backup}


def bypass_managers(injection: Any) -> list[Any]:
    """Give the managers of bypass adapters that an injection injects; ComfyUI holds them in its function's closure.

    A manager's `adapters` are (adapter, strength) by the name of the module. Empty for an injection of another kind.
    """
    closure = getattr(injection.inject, "__closure__", None) or ()
    return [cell.cell_contents for cell in closure if hasattr(cell.cell_contents, "adapters")]


def weight_conversion(module: nn.Module, parameter: str) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Give the functions by which a quantised layer reads a parameter to be patched, and stores the patched one.

    Either is None for a layer whose parameter is patched as it is.
    """
    return getattr(module, f"convert_{parameter}", None), getattr(module, f"set_{parameter}", None)


# Dtypes and quantised weights


def intended_dtype(module: nn.Module, parameter: str) -> torch.dtype | None:
    """Give the dtype in which ComfyUI means a parameter to be used, None where it says none.

    Under dynamic VRAM a parameter stays in the dtype of its file and is cast at each use.
    """
    return getattr(module, f"{parameter}_comfy_model_dtype", None)


def casts_weights(module: nn.Module) -> bool | None:
    """Read from the layer's class whether it casts its weights at each use; None for a layer of another kind."""
    return getattr(type(module), "comfy_cast_weights", None)


def quantised_data(weight: Any) -> Tensor:
    """Give the stored data of a QuantizedTensor."""
    return weight._qdata


def quantised_params(weight: Any) -> Any:
    """Give the parameters of a QuantizedTensor's layout, a dataclass with its scales and the original shape."""
    return weight._params


def quantised_layout(weight: Any) -> str:
    """Give the name of a QuantizedTensor's layout class."""
    return weight._layout_cls


# Features

COMFY_COMPILER = "disable_comfy_compiler"  # of the command line, and of the transformer options


def version() -> str:
    """Return ComfyUI's version."""
    return str(comfyui_version.__version__)


def command_line() -> list[str]:
    """Return the options that ComfyUI was started with; none where a program that uses it has options of its own."""
    return sys.argv[1:] if comfy.options.args_parsing else []


def features() -> dict[str, Any]:
    """Return ComfyUI's version and those of its features that the pack uses where they exist."""
    at_end = [name for module, name in _AT_END_OF_NODE if hasattr(sys.modules.get(module), name)]
    return {
        "version": version(),
        "dynamic_vram": bool(getattr(comfy.memory_management, "aimdo_enabled", False)),
        "loads_without_dynamic_vram": _takes(comfy.sd.load_diffusion_model, "disable_dynamic"),
        "lazy_loading": lazy_loading_code() is not None,
        "own_compiler": hasattr(comfy.cli_args.args, COMFY_COMPILER),
        "end_of_node": at_end,
        "tiled_encoding": [name for name in _TILED if hasattr(comfy.sd.VAE, name)],
        "free_memory_of_model": hasattr(ModelPatcher, "get_free_memory"),
        "counts_pinned_memory": hasattr(comfy.model_management, "TOTAL_PINNED_MEMORY"),
    }
