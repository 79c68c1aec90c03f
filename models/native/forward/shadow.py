"""A shadow copy of ComfyUI's model: its modules and forward, over weights that autograd may save.

The MODEL itself is never changed. A forward leaves any state on the shadow's modules.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_not
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ....memory.weights.check_format import LOADING, FormatMismatch, check_format, has_known_forward
from ....memory.weights.frozen import FrozenWeights, share_outside_inference_mode
from ....memory.weights.residency import FrozenModule
from ...convolutions import convolutions
from ...layers.lora_conv import LoraConv
from ...layers.lora_linear import LoraLinear
from ..comfyui.entries import Running
from ..comfyui.leftovers import OF_TORCH, Inner, Leftovers, cannot_be_copied, holds_attributes, is_setting, reset

_NOT_COPIED = object()
_MUTABLE = (dict, list, set)


class _LayerOfShadow:
    """A layer that ComfyUI calls with only x, so that its dropout mask is set on it before its block runs.

    mask: of the step, or None.
    samples: the batch size; if x has as many rows, each is one sample.
    shapes_seen: (samples, rows) of its calls while they are recorded, else None.
    place: its name in its block, and the block's running state; None outside blocks.
    """

    mask: Any
    samples: int
    shapes_seen: set[tuple[int, int]] | None
    place: tuple[str, Running] | None

    def _begin(self) -> None:
        self.mask = None
        self.samples = 1
        self.shapes_seen = None
        self.place = None

    def put_into_block(self, name: str, running: Running) -> None:
        """Set its name in its block, and the block's running state."""
        self.place = name, running

    def begin_call(self, samples: int, mask: Any) -> None:
        """Set the batch size and the mask of the block's next call."""
        self.samples = samples
        self.mask = mask

    def end_call(self) -> None:
        self.mask = None

    def record_shapes(self) -> None:
        """Record the (samples, rows) of its calls from now on."""
        self.shapes_seen = set()

    def recorded_shapes(self) -> set[tuple[int, int]]:
        """Return the recorded (samples, rows), and stop recording."""
        shapes, self.shapes_seen = self.shapes_seen, None
        return shapes or set()


class NativeLinear(_LayerOfShadow, LoraLinear):
    """A Linear of the shadow, which ComfyUI calls with x of any shape (…, in)."""

    def __init__(self, weights: FrozenWeights, name: str, module: nn.Module):
        super().__init__(weights, name)
        self.in_features, self.out_features = module.in_features, module.out_features
        self._begin()

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if not torch.compiler.is_compiling() and self.place is not None:
            self.place[1].check(self.place[0])
        if self.adapter is None:
            return self.frozen().apply(x)
        shape = x.shape[:-1]
        # An adapter takes (samples, rows, in). Tokens of all samples in one row count as one sample.
        rows = x.reshape(shape[0] if shape[0] == self.samples else 1, -1, x.shape[-1])
        if self.shapes_seen is not None:
            self.shapes_seen.add((rows.shape[0], rows.shape[1]))
        out = super().forward(rows, self.mask)
        return out.reshape(*shape, out.shape[-1])


class NativeConv(_LayerOfShadow, LoraConv):
    """A convolution of the shadow, like `NativeLinear`. Its dropout mask has h·w rows."""

    def __init__(self, weights: FrozenWeights, name: str, module: nn.Conv2d):
        super().__init__(weights, name, module)
        for attribute in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
            setattr(self, attribute, getattr(module, attribute))
        self._begin()

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if not torch.compiler.is_compiling() and self.place is not None:
            self.place[1].check(self.place[0])
        out = super().forward(x, self.mask)
        if self.shapes_seen is not None and self.adapter is not None:
            self.shapes_seen.add((len(out), out[0, 0].numel()))
        return out


NativeLayer = NativeLinear | NativeConv


class SharedTensors(FrozenModule):
    """The parameters and buffers of one module of the shadow, stored in that module's own `_buffers`.

    names: of its parameters; all other entries are buffers, as in the MODEL.
    """

    def __init__(self, weights: FrozenWeights, prefix: str, module: nn.Module, original: nn.Module):
        super().__init__()
        self.weights, self.prefix = weights, prefix
        self.names = tuple(name for name, value in original._parameters.items() if value is not None)
        self.source_buffers = {name: value for name, value in original._buffers.items() if value is not None}
        module._parameters.clear()
        self._buffers = module._buffers
        self._buffers |= {name: None for name, value in original._parameters.items() if value is None}
        self.take()

    def take(self) -> None:
        for name in self.names:
            self._buffers[name] = self.weights.stored(self._name(name))
        for name, buffer in self.source_buffers.items():
            self._buffers[name] = share_outside_inference_mode(buffer).to(self.weights.home(self._name(name)))

    def repoint(self, name: str, source: Tensor, target: Tensor) -> bool:
        return True if name in self.source_buffers else self.weights.repoint(self._name(name), source, target)

    def _name(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


class Shadow:
    """ComfyUI's model with replaced modules.

    base: copy of the MODEL's BaseModel, whose `apply_model` returns the raw output.
    layers: the Linears, and the convolutions that can have an adapter, by the MODEL's own module names.
    tensors: those of all other modules, by module name.
    swapped: the blocks, by module name, whose weights are on the host.
    """

    def __init__(self, patcher: ModelPatcher, weights: FrozenWeights):
        model, self._weights = patcher.model, weights
        self.swapped = weights.on_host
        with torch.inference_mode(False):
            memo: dict[int, Any] = {}
            self.layers: dict[str, Any] = {}
            convs = convolutions(model.diffusion_model)
            for name, module in model.diffusion_model.named_modules():
                if is_linear(module):
                    memo[id(module)] = self.layers[name] = self.make_linear(weights, name, module)
                elif name in convs:
                    memo[id(module)] = self.layers[name] = NativeConv(weights, name, convs[name])
            leftovers = Leftovers(model)
            stale: dict[str, dict[str, Any]] = {}
            for name, module in model.diffusion_model.named_modules():
                stale[name] = leftovers.in_module(name, module)
                memo |= _stand_ins(module, stale[name])
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        memo.setdefault(id(tensor), torch.empty(0))  # `SharedTensors` reads them
            diffusion_model = copy.deepcopy(model.diffusion_model, memo)
            self.tensors: dict[str, SharedTensors] = {}
            for name, module in diffusion_model.named_modules():
                if name in self.layers:
                    continue
                for attribute in LOADING:
                    vars(module).pop(attribute, None)
                reset(vars(module), stale[name])
                original = model.diffusion_model.get_submodule(name)
                if any(v is not None for v in (*original._parameters.values(), *original._buffers.values())):
                    self.tensors[name] = SharedTensors(weights, name, module, original)
        self.base = copy.copy(model)
        self.base._modules = {**model._modules, "diffusion_model": diffusion_model}
        self.base._modules["model_sampling"] = raw_output(patcher.get_model_object("model_sampling"))
        reset(vars(self.base), leftovers.in_model(), shallow=True)
        mutable = {n: v for n, v in vars(self.base).items() if type(v) in _MUTABLE and n not in OF_TORCH}
        vars(self.base).update({n: copy.copy(v) for n, v in mutable.items()})  # a forward may fill them
        self.base.current_patcher = None

    def make_linear(self, weights: FrozenWeights, name: str, module: nn.Module) -> nn.Module:
        """Make the replacement for a Linear of the MODEL."""
        return NativeLinear(weights, name, module)

    @property
    def diffusion_model(self) -> nn.Module:
        return self.base._modules["diffusion_model"]

    def mismatch(self) -> FormatMismatch | None:
        """Find a module whose weights are read differently than by ComfyUI."""
        return check_format(self._weights, {n: partial(self._run, n) for n in (*self.layers, *self.tensors)})

    def _run(self, name: str, x: Tensor) -> Tensor:
        """Run one module in fp32 on freshly read weights: if its block is swapped, it may hold those of another."""
        module = self.diffusion_model.get_submodule(name)
        if name in self.layers and not isinstance(module, NativeConv):
            return self._weights.linear(name, without_quantize=True).to(self._weights.device).apply(x)
        module, weights = copy.copy(module), self._weights
        read = {part: weights.stored(f"{name}.{part}") for part in ("weight", "bias") if part in module._buffers}
        on_device = {part: None if tensor is None else tensor.to(weights.device) for part, tensor in read.items()}
        vars(module)["_buffers"] = module._buffers | on_device
        vars(module)["comfy_cast_weights"] = True  # for any dtype of x
        vars(module)["place"] = None  # it has its weights although its block is not running
        out: Tensor = module(x)
        return out

    def state(self) -> list[tuple[Any, Any]]:
        """Record all attributes of the modules for `restore`, except weights, which are swapped; and the content of
        what a forward may fill: dicts, lists and sets, and objects of the diffusion model's own."""
        modules = (module for module in self.diffusion_model.modules() if not isinstance(module, FrozenModule))
        tables: list[dict[str, Any]] = [*map(vars, modules)]
        tables += [vars(value) for value in _own_values(tables) if holds_attributes(value)]
        tables.append(vars(self.base))
        containers = [value for value in _own_values(tables) if type(value) in _MUTABLE]
        return [(container, copy.copy(container)) for container in (*tables, *containers)]


def _own_values(tables: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of tables of attributes without those that torch keeps on a module."""
    return [value for table in tables for name, value in table.items() if name not in OF_TORCH]


def _stand_ins(module: nn.Module, stale: Mapping[str, Any]) -> dict[int, Any]:
    """Map the id of each attribute of a module that isn't copied to what stands for it in the copy."""
    memo: dict[int, Any] = {}
    for attribute, value in vars(module).items():
        # A copy's destruction would free the MODEL's own memory.
        if value is not None and (attribute in LOADING or _is_replaced(attribute, value, stale)):
            memo[id(value)] = _stand_in(value, stale.get(attribute))
        elif cannot_be_copied(value):
            memo[id(value)] = value
        elif holds_attributes(value):
            memo.update({id(inner): inner for inner in vars(value).values() if cannot_be_copied(inner)})
    return memo


def _is_replaced(attribute: str, value: Any, stale: Mapping[str, Any]) -> bool:
    """Return whether a stale attribute gets a fresh value; not a setting, since others may hold the same True or 1."""
    return attribute in stale and not is_setting(value) and not isinstance(stale[attribute], Inner)


def _stand_in(value: Any, initial: Any) -> Any:
    """Return the fresh container for one of its kind, which others may hold too."""
    is_container = type(value) in _MUTABLE and type(value) is type(initial)
    return initial if is_container else _NOT_COPIED


def restore(state: list[tuple[Any, Any]]) -> None:
    """Restore the attributes: a forward may cache values computed from a prompt there."""
    for container, saved in state:
        # Compared in C, as there are thousands; reordered entries count as changed.
        if type(container) is dict:
            if container.keys() != saved.keys() or any(map(is_not, container.values(), saved.values())):
                container.clear()
                container.update(saved)
        elif type(container) is list:
            container[:] = saved
        else:
            container.clear()
            container.update(saved)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear that runs torch's or ComfyUI's forward; not subclasses with their own."""
    return hasattr(module, "in_features") and hasattr(module, "weight") and has_known_forward(module)


def raw_output(model_sampling: nn.Module) -> nn.Module:
    """Copy a model sampling so that it returns the model's raw output instead of the denoised latent."""
    raw = copy.copy(model_sampling)
    vars(raw)["calculate_denoised"] = _own_output
    return raw


def _own_output(sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor:
    return model_output
