"""Access to ComfyUI's private state, which it neither documents nor offers as an interface.

A newer ComfyUI may rename any of it, so this is the first file to read after an update. Features that some versions
lack are probed with `getattr` or `hasattr`.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Return ComfyUI's own list of the models that it holds on devices, not a copy.

    Removing an entry makes ComfyUI forget the model. The `model` of an entry is None if the patcher is gone and only
    the weights are still held.
    """
    return comfy.model_management.current_loaded_models


def held_models() -> list[tuple[Any, ModelPatcher]]:
    """Return (entry, patcher) for each live patcher: an entry's own reference is weak, and may die any time."""
    return [(entry, patcher) for entry in loaded_models() if (patcher := entry.model) is not None]


def usable_memory(patcher: Any) -> int:
    """Return the bytes of its device that the MODEL may use, less ComfyUI's reserve; may be negative.

    If ComfyUI reports it, weights of models under dynamic VRAM count as free: they are evicted on demand.
    """
    ask = getattr(patcher, "get_free_memory", comfy.model_management.get_free_memory)
    return int(ask(patcher.load_device)) - int(comfy.model_management.extra_reserved_memory())


def bytes_to_unload(device: torch.device) -> int:
    """Count the bytes of the models on the device that ComfyUI unloads for another, without those counted as free."""
    # ComfyUI keeps the entry of a MODEL that is gone as long as anything holds its weights.
    on_device = [(entry, patcher) for entry, patcher in held_models() if entry.device == device]
    counted = hasattr(ModelPatcher, "get_free_memory")
    return sum(entry.model_loaded_memory() for entry, patcher in on_device if not (counted and patcher.is_dynamic()))


def make_room_to_lock(size: int) -> None:
    """Have ComfyUI unpin as much of its own pinned memory as `size` more bytes would put above its limit."""
    make_room = getattr(comfy.model_management, "ensure_pin_registerable", None)
    if make_room is not None:
        make_room(size)


def count_locked(size: int) -> None:
    """Add our pinned bytes to ComfyUI's count, which it limits; negative for unpinned bytes."""
    if hasattr(comfy.model_management, "TOTAL_PINNED_MEMORY"):
        comfy.model_management.TOTAL_PINNED_MEMORY += size


def discard_cuda_error() -> None:
    """Clear a failed call's error from CUDA, or the next CUDA call of any code would report it again."""
    comfy.model_management.discard_cuda_async_error()


# Calls of `execution.py` at the end of each node, under dynamic VRAM: (module, function).
_AT_END_OF_NODE = (
    ("comfy.model_management", "reset_cast_buffers"),  # buffers of casts and copies, pinned patches
    ("comfy.model_prefetch", "cleanup_prefetch_queues"),  # prefetched weights, recorded allocations
    ("comfy_aimdo.model_vbar", "vbars_reset_watermark_limits"),  # evicted weights may come back
)


def end_of_node() -> None:
    """Free the buffers that ComfyUI frees at the end of a node.

    A node that samples or encodes many times calls this after each pass, as ComfyUI would between nodes; otherwise the
    buffers stay until the node ends.
    """
    if not comfy.memory_management.aimdo_enabled:  # ComfyUI calls these only then, and they wait for the GPU
        return
    for module, name in _AT_END_OF_NODE:
        give_back = getattr(sys.modules.get(module), name, None)  # a module not imported holds nothing
        if give_back is not None:
            give_back()


def loaded_from(patcher: Any) -> str:
    """Return the path of the file that ComfyUI loaded the MODEL from; empty if unknown."""
    loader = getattr(patcher, "cached_patcher_init", None)  # (function, its arguments, …)
    return loader[1][0] if loader and loader[1] and isinstance(loader[1][0], str) else ""


def _takes(function: Any, *names: str) -> bool:
    """Return whether a function takes arguments of these names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or one written in C
        return False
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) or all(name in parameters for name in names)


def can_leave_dynamic_vram(patcher: Any) -> bool:
    """Return whether ComfyUI can reload the MODEL from its source without dynamic VRAM."""
    loader = getattr(patcher, "cached_patcher_init", None)
    takes_it = _takes(patcher.clone, "disable_dynamic", "model_override")
    return loader is not None and takes_it and _takes(loader[0], "disable_dynamic")


def clone_without_dynamic_vram(patcher: Any, loaded: Any) -> tuple[Any, Any]:
    """Clone a MODEL without dynamic VRAM; also return the override that its model was loaded to.

    loaded: override returned with an earlier clone, None to load the model now.
    """
    clone = patcher.clone(disable_dynamic=True, model_override=loaded)
    return clone, clone.get_clone_model_override()


def load_without_dynamic_vram(path: str, options: dict[str, Any]) -> Any:
    """Load a diffusion model as core's loader does, without dynamic VRAM if ComfyUI supports that."""
    dynamic_options = {"disable_dynamic": True} if _takes(comfy.sd.load_diffusion_model, "disable_dynamic") else {}
    return comfy.sd.load_diffusion_model(path, model_options=options, **dynamic_options)


def load_tensors(path: str, tensors: dict[str, Tensor], metadata: Any, options: dict[str, Any], dynamic: bool) -> Any:
    """Load a diffusion model from a file's tensors and metadata, as core's loader does from the file.

    dynamic: use dynamic VRAM if ComfyUI has it on. Raises ValueError if they are not those of a diffusion model.
    """
    load = comfy.sd.load_diffusion_model_state_dict
    dynamic_options = {"disable_dynamic": True} if not dynamic and _takes(load, "disable_dynamic") else {}
    model = load(tensors, model_options=options, metadata=metadata, **dynamic_options)
    if model is None:
        name = Path(path).name
        raise ValueError(f"Could not detect model type of {name}: it isn't a diffusion model that this ComfyUI knows.")
    return model


def load_text_encoders(tensors: list[dict[str, Tensor]], kind: Any, options: dict[str, Any]) -> Any:
    """Load text encoders from their tensors, without dynamic VRAM if supported. kind: a `comfy.sd.CLIPType`."""
    dynamic_options = (
        {"disable_dynamic": True} if _takes(comfy.sd.load_text_encoder_state_dicts, "disable_dynamic") else {}
    )
    return comfy.sd.load_text_encoder_state_dicts(tensors, clip_type=kind, model_options=options, **dynamic_options)


def remember_loader(model: Any, load: Callable[..., Any], *args: Any) -> None:
    """Set how ComfyUI reloads the MODEL. load: takes these arguments, then whether dynamic VRAM is allowed."""

    def reload(*args: Any, disable_dynamic: bool = False) -> Any:
        return load(*args, not disable_dynamic)

    model.cached_patcher_init = (reload, args)


def lazy_loading_code() -> CodeType | None:
    """Return the code that clones a file's weight for a Linear made under dynamic VRAM; None if unknown."""
    loader = getattr(comfy.ops.disable_weight_init, "_lazy_load_from_state_dict", None)
    return getattr(loader, "__code__", None)


class PartialPatcher(ModelPatcher):
    """ModelPatcher that excludes some modules from loading, unloading and patching by ComfyUI."""

    def left_out(self, module: nn.Module) -> bool:
        raise AssertionError(f"{type(self).__name__} has no left_out")

    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        # An entry is a tuple of sizes, a name, the module and its parameters; the order differs between releases.
        entries = super()._load_list(*args, **kwargs)
        return [entry for entry in entries if not any(self.left_out(m) for m in entry if isinstance(m, nn.Module))]


# Encoders

# Methods of core's VAE that encode in tiles, which `VAE.encode` calls on an out-of-memory error.
_TILED = ("encode_tiled_", "encode_tiled_1d", "encode_tiled_3d", "_encode_tiled_owned")


def without_tiled_encoding(vae: Any, instead: Callable[..., Any]) -> Any:
    """Copy the VAE shallowly, with `instead` in place of tiled encoding, for which core has no switch."""
    whole = copy.copy(vae)
    for name in _TILED:
        setattr(whole, name, instead)
    return whole


# Patched weights


def is_patched(patcher: Any) -> bool:
    """Return whether weights of the MODEL are patched in place, with their originals in a backup."""
    return bool(patcher.backup)


def patched_originals(patcher: Any) -> list[Tensor]:
    """Return the originals of the weights patched in the MODEL, except those patched by hooks."""
    return [saved.weight for saved in patcher.backup.values()]


def original_weights(patcher: Any) -> dict[str, Tensor]:
    """Return the originals, by key, of the weights that ComfyUI patched in place, by hooks too."""
    originals = {key: saved[0] for key, saved in getattr(patcher, "hook_backup", {}).items()}
    return originals | {key: saved.weight for key, saved in patcher.backup.items()}


def replaced_keys(patcher: Any) -> set[str]:
    """Return the keys of weights and objects that ComfyUI restores when it unloads the MODEL."""
    return {*patcher.backup, *patcher.object_patches_backup}


def bypass_managers(injection: Any) -> list[Any]:
    """Return the bypass adapter managers of an injection; ComfyUI holds them in its function's closure.

    A manager's `adapters` map module names to (adapter, strength). Empty for other kinds of injection.
    """
    closure = getattr(injection.inject, "__closure__", None) or ()
    return [cell.cell_contents for cell in closure if hasattr(cell.cell_contents, "adapters")]


def weight_conversion(module: nn.Module, parameter: str) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return the functions with which a quantised layer reads a parameter to patch and stores the patched one.

    Either is None for a layer whose parameter is patched directly.
    """
    return getattr(module, f"convert_{parameter}", None), getattr(module, f"set_{parameter}", None)


# Dtypes and quantised weights


def intended_dtype(module: nn.Module, parameter: str) -> torch.dtype | None:
    """Return the dtype in which ComfyUI intends to use a parameter; None if it sets none.

    Under dynamic VRAM a parameter stays in the dtype of its file and is cast at each use.
    """
    return getattr(module, f"{parameter}_comfy_model_dtype", None)


def casts_weights(module: nn.Module) -> bool | None:
    """Return whether the layer's class casts its weights at each use; None for other kinds of layers."""
    return getattr(type(module), "comfy_cast_weights", None)


def quantised_data(weight: Any) -> Tensor:
    """Return the stored data of a QuantizedTensor."""
    return weight._qdata


def quantised_params(weight: Any) -> Any:
    """Return the parameters of a QuantizedTensor's layout, a dataclass with scales and the original shape."""
    return weight._params


def quantised_layout(weight: Any) -> str:
    """Return the name of a QuantizedTensor's layout class."""
    return weight._layout_cls


# Text generation


def can_generate_text(clip: Any) -> bool:
    """Return whether ComfyUI can have a CLIP write text: its language model must know the end of an answer."""
    modules = clip.cond_stage_model.modules() if hasattr(clip, "generate") else ()
    configs = (getattr(getattr(module, "model", None), "config", None) for module in modules)
    return any(hasattr(config, "stop_tokens") for config in configs)


@contextmanager
def quiet_progress(interrupted: Callable[[], None]) -> Iterator[None]:
    """Have ComfyUI's own loops call `interrupted` at each step, in place of showing a bar of their own."""
    previous_hook = comfy.utils.PROGRESS_BAR_HOOK

    def step(*values: Any, **options: Any) -> None:
        interrupted()

    comfy.utils.set_progress_bar_global_hook(step)
    try:
        yield
    finally:
        comfy.utils.set_progress_bar_global_hook(previous_hook)


# Features

COMFY_COMPILER = "disable_comfy_compiler"  # option of the command line, and key of the transformer options


def version() -> str:
    """Return ComfyUI's version."""
    return str(comfyui_version.__version__)


def command_line() -> list[str]:
    """Return the options that ComfyUI was started with; empty in a program with its own options."""
    return sys.argv[1:] if comfy.options.args_parsing else []


def features() -> dict[str, Any]:
    """Return ComfyUI's version and which of the optional features used by the pack it has."""
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
