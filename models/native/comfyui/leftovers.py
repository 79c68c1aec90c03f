"""State that sampling leaves on a model: caches of prompts, shapes of latents, counters, handles of its memory.

Training must not see it, or a preview would change the training and a resumed run would differ. A fresh model of the
same class and sizes on the meta device shows the initial attributes. Not all that differs from those is a sample's:
loaders and other nodes set attributes too, so that a plain value is reset only if sampling's code writes its name.
"""

import copy
import enum
import logging
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .sampling_writes import written_by_sampling

# Attributes of one object as its constructor sets them: plain values and containers of them, an Inner for another
# object, _FILLED for what is neither.
Fresh = Mapping[str, Any]

OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_SETTINGS = _PLAIN + _CODE + (type, torch.dtype, torch.device, nn.Module)
_CONTAINERS = (list, dict, set)
_VALUES = _SETTINGS + _CONTAINERS + (Tensor, tuple)
_FILLED = object()
_fresh_by_config: dict[Any, dict[str, Fresh] | None] = {}


class Inner(NamedTuple):
    """Attributes of an object that a model or a module holds.

    table: values by name: the fresh ones, or those to reset.
    kind: class of the object.
    """

    table: Mapping[str, Any]
    kind: type


def fresh_attributes(model: Any) -> dict[str, Fresh] | None:
    """Return the attributes of a fresh model, under "", and of the modules of its diffusion model, by name.

    None for a model that can't be made from its configuration. model: a BaseModel.
    """
    config = model.model_config
    key = type(model), type(config), repr(sorted(config.unet_config.items(), key=str))
    if key not in _fresh_by_config:
        _fresh_by_config[key] = _make(model)
    return _fresh_by_config[key]


def _make(model: Any) -> dict[str, Fresh] | None:
    config: Any = object.__new__(type(model.model_config))  # copy.copy trips over its __getattr__
    vars(config).update(vars(model.model_config))
    config.unet_config = dict(config.unet_config)
    level = logging.root.manager.disable
    logging.disable(max(level, logging.INFO))  # it would log the loaded model again
    try:
        fresh = config.get_model({}, "", device=torch.device("meta"))
        module_tables = {
            f"diffusion_model.{name}".rstrip("."): vars(m) for name, m in fresh.diffusion_model.named_modules()
        }
    except Exception:  # a class of another pack may not support this
        logging.getLogger(__name__).debug("no fresh %s", type(model).__name__, exc_info=True)
        return None
    finally:
        logging.disable(level)
    if type(fresh) is not type(model):
        return None
    return {name: _initial_values(table) for name, table in {"": vars(fresh), **module_tables}.items()}


def _initial_values(table: Mapping[str, Any], with_objects: bool = True) -> Fresh:
    """Keep what can be restored of a table. with_objects: look into other objects as well, though not into theirs."""
    values = {}
    for name, value in table.items():
        if name in OF_TORCH:
            continue
        if is_setting(value, _PLAIN):
            values[name] = copy.deepcopy(value)
        elif with_objects and holds_attributes(value):
            values[name] = Inner(_initial_values(vars(value), with_objects=False), type(value))
        else:
            values[name] = _FILLED
    return values


def holds_attributes(value: Any) -> bool:
    """Return whether the value is an object of the model's own with attributes: no setting, tensor or container, and
    nothing that its copies share."""
    is_other = not isinstance(value, _VALUES)
    return is_other and type(getattr(value, "__dict__", None)) is dict and not cannot_be_copied(value)


def is_setting(value: Any, kinds: tuple[type, ...] = _SETTINGS) -> bool:
    """Return whether a loader or another node may have set the value: no tensor, no size, no handle."""
    if isinstance(value, torch.Size):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_setting(inner, kinds) for inner in value)
    if isinstance(value, dict):
        return all(is_setting(inner, kinds) for inner in value.values())
    return isinstance(value, kinds)


class Leftovers:
    """State of samples on one model: for each table of attributes the names to reset, with their fresh values; ABSENT
    for those without one.

    model: a BaseModel.
    """

    def __init__(self, model: Any):
        self._model = model
        self._fresh = fresh_attributes(model) or {}
        self._writes = written_by_sampling(model)
        self._copies: dict[int, Any] = {}  # modules that share a container share the fresh one too

    def in_model(self) -> dict[str, Any]:
        """Collect the attributes of the BaseModel itself."""
        return self._stale(vars(self._model), self._fresh.get(""))

    def in_module(self, name: str, module: nn.Module) -> dict[str, Any]:
        """Collect those of a module of the diffusion model.

        Loaders set settings on ComfyUI's layers, such as a quantised format: those stay.
        """
        fresh = self._fresh.get(f"diffusion_model.{name}".rstrip("."))
        return self._stale(vars(module), fresh, keeps_settings=hasattr(module, "comfy_cast_weights"))

    def _stale(self, table: Mapping[str, Any], fresh: Fresh | None, keeps_settings: bool = False) -> dict[str, Any]:
        if fresh is None:
            return {name: None for name, value in table.items() if name not in OF_TORCH and _holds_sizes(value)}
        values: dict[str, Any] = {}
        for name, value in table.items():
            initial = fresh.get(name, ABSENT)
            if name in OF_TORCH or name.startswith("_tessera") or initial is _FILLED:
                continue
            if isinstance(initial, Inner):
                is_alike = type(value) is initial.kind and holds_attributes(value)
                if is_alike and (inner := self._stale(vars(value), initial.table)):
                    values[name] = Inner(inner, initial.kind)
            elif self._is_stale(name, value, initial, keeps_settings):
                values[name] = self._copy(value, initial)
        return values

    def _is_stale(self, name: str, value: Any, initial: Any, keeps_settings: bool) -> bool:
        is_written = self._is_written(name, value)
        if is_setting(value):
            return bool(is_written and not keeps_settings and value != initial)
        return is_written or initial is ABSENT or not initial

    def _is_written(self, name: str, value: Any) -> bool:
        return name in self._writes.assigned or (isinstance(value, _CONTAINERS) and name in self._writes.filled)

    def _copy(self, value: Any, initial: Any) -> Any:
        if not isinstance(initial, _CONTAINERS):
            return initial
        fresh = copy.deepcopy(initial)
        return self._copies.setdefault(id(value), fresh) if type(value) is type(initial) else fresh


def _holds_sizes(value: Any) -> bool:
    if isinstance(value, list | tuple) and value and not isinstance(value, torch.Size):
        return all(isinstance(inner, torch.Size) for inner in value)
    return isinstance(value, torch.Size)


class _Absent:
    def __deepcopy__(self, memo: Any) -> "_Absent":
        return self


ABSENT = _Absent()


def reset(table: dict[str, Any], fresh_values: Mapping[str, Any], shallow: bool = False) -> None:
    """Write the fresh values of `Leftovers` into a table of attributes, and into those of the objects that it holds.

    shallow: the table is a shallow copy of the MODEL's, so that its objects are copied first.
    """
    for name, value in fresh_values.items():
        if value is ABSENT:
            table.pop(name, None)
        elif isinstance(value, Inner):
            if shallow:
                table[name] = copy.copy(table[name])
            reset(vars(table[name]), value.table)
        else:
            table[name] = value


def as_loaded(model: Any) -> Any:
    """Copy a BaseModel and its diffusion model shallowly, without state left by sampling on either."""
    leftovers = Leftovers(model)
    outer, inner = copy.copy(model), copy.copy(model.diffusion_model)
    outer._modules = {**model._modules, "diffusion_model": inner}
    reset(vars(outer), leftovers.in_model(), shallow=True)
    reset(vars(inner), leftovers.in_module("", inner), shallow=True)
    return outer


def cannot_be_copied(value: Any) -> bool:
    """Return whether the value is a lock, a stream, or a handle of foreign code."""
    if isinstance(value, _VALUES):
        return False
    try:
        value.__reduce_ex__(4)
    except Exception:
        return True
    return False
