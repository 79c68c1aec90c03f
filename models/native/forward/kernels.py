"""The kernels of a training step over ComfyUI's own forward: differentiable ones in place of those for sampling.

ComfyUI's modules bind the attention chosen at startup by name, and pass it more arguments than ours takes. During a
step all of these names refer to the attention chosen on Training Memory. Comfy-kitchen's ropes have no backward; forms
in torch replace them.

The arguments of these functions change from release to release. Since 0.32 models wrap q, k and v in containers, from
which `take` moves the tensor out.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from traceback import walk_tb
from types import ModuleType
from typing import Any, NamedTuple

import comfy.ldm.modules.attention
import comfy.model_management
import comfy.quant_ops
import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.attention import Attention, sdpa
from ..comfyui.refusals import unusable
from .ropes import ROPES

Function = Callable[..., Any]

# ComfyUI's modules bind the chosen attention under these names; other packs may have replaced it.
CHOSEN = ("optimized_attention", "optimized_attention_masked")
PACKAGES = ("comfy.", "comfy_extras.")

# Arguments of ComfyUI's attention that select an implementation and do not affect the result.
WITHOUT_EFFECT = frozenset(
    {"transformer_options", "low_precision_attention", "preferred_attention", "_inside_attn_wrapper"}
)

_in_force: list[Attention] = []
_watching: list["AttentionCalls"] = []


@contextmanager
def training_kernels(attention: Attention) -> Iterator[None]:
    """Make ComfyUI's forwards run `attention` and differentiable ropes, in training mode.

    It wraps forward and backward, which recomputes forwards; nested it does nothing. The same functions are installed
    each time, so that a graph compiled in one step serves the next.
    """
    if _in_force:
        assert _in_force[0] is attention
        yield
        return
    loaded, modules = len(sys.modules), _modules()
    replaced: list[tuple[_Place, Function, Function]] = []
    management = comfy.model_management
    was_training = management.in_training
    _in_force.append(attention)
    try:
        management.in_training = True
        for place in _places(modules):
            kernel = place.namespace[place.name]
            replacement = place.rope or _attend(attention, kernel)
            replaced.append((place, kernel, replacement))
            place.namespace[place.name] = replacement
        yield
    finally:
        for place, kernel, _ in replaced:
            place.namespace[place.name] = kernel
        management.in_training = was_training
        _in_force.clear()
        if len(sys.modules) != loaded:
            _restore_new(
                set(_modules()) - set(modules), {id(replacement): kernel for _, kernel, replacement in replaced}
            )


class _Place(NamedTuple):
    """One name bound to a kernel.

    namespace: globals of a module, or ComfyUI's table of attentions.
    name: key in the namespace.
    rope: its replacement; None for an attention.
    """

    namespace: dict[str, Any]
    name: str
    rope: Function | None


def _modules() -> tuple[ModuleType, ...]:
    """Return ComfyUI's loaded modules and comfy-kitchen."""
    return _modules_among(tuple(map(id, list(sys.modules.values()))))


@lru_cache(maxsize=1)
def _modules_among(loaded: tuple[int, ...]) -> tuple[ModuleType, ...]:
    """Search the loaded modules; cached, since there are thousands of names."""
    modules = (module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES))
    return tuple(module for module in (*modules, _kitchen()) if module is not None)


def _kitchen() -> Any:
    return getattr(comfy.quant_ops, "ck", None)  # missing if comfy-kitchen is not installed


@lru_cache(maxsize=1)
def _places(modules: tuple[ModuleType, ...]) -> list[_Place]:
    """Find the names bound to a kernel; cached, since the modules hold thousands of names."""
    kitchen, core = _kitchen(), comfy.ldm.modules.attention
    ropes = {id(getattr(kitchen, name)): _rope(name) for name in ROPES if hasattr(kitchen, name)}
    attentions = {id(value) for name, value in vars(core).items() if name.startswith("attention")}
    places = []
    for namespace in (*map(vars, modules), core.REGISTERED_ATTENTION_FUNCTIONS):
        for name, value in namespace.items():
            if id(value) in ropes:
                places.append(_Place(namespace, name, ropes[id(value)]))
            elif id(value) in attentions or (name in CHOSEN and callable(value)):
                places.append(_Place(namespace, name, None))
    return places


def _restore_new(modules: set[ModuleType], kernels: dict[int, Function]) -> None:
    """Restore kernels in modules that were imported while ours were installed.

    kernels: ComfyUI's, by id of ours.
    """
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in kernels:
                setattr(module, name, kernels[id(value)])


@lru_cache(maxsize=64)
def _attend(attention: Attention, kernel: Function) -> Function:
    """Make the replacement of a ComfyUI kernel; one per kernel, so that it can be restored."""
    return core_attention(attention)


@lru_cache(maxsize=64)
def _rope(name: str) -> Function:
    """Make the replacement of the rope of this name."""
    form = ROPES[name]

    def rope(*args: Any, **kwargs: Any) -> Any:
        args = tuple([_opened(value) for value in args])
        try:
            return form(*args, **{key: _opened(value) for key, value in kwargs.items()})
        except (TypeError, AttributeError) as error:
            raise unusable(name, str(error)) from error

    return rope


def _opened(value: Any) -> Any:
    """Take the tensor out of a container; anything else is returned unchanged."""
    take = None if isinstance(value, Tensor) else getattr(value, "take", None)
    return value if take is None else take()


def _tensor(value: Any, argument: str) -> Tensor:
    value = _opened(value)
    if not isinstance(value, Tensor):
        raise unusable("optimized_attention", f"its {argument} is a {type(value).__name__}")
    return value


def kernel_that_raised(error: BaseException) -> str | None:
    """Return the name of ComfyUI's kernel in whose replacement an error was raised; None for one outside of them."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == __file__:
            form = frame.f_locals.get("form")
            return "optimized_attention" if form is None else form.__name__
    return None


@dataclass
class AttentionCalls:
    """Arguments of attention that training runs otherwise than ComfyUI.

    unread: names of arguments that training ignores.
    preferred: names of the kernels that the model asks for in place of the attention chosen in ComfyUI.
    torch_only: True if a call has a mask or a scale, and the attention chosen on Training Memory takes neither.
    """

    unread: set[str] = field(default_factory=set)
    preferred: set[str] = field(default_factory=set)
    torch_only: bool = False

    def add(self, attention: Attention, arguments: Mapping[str, Any], is_plain: bool) -> None:
        """Record a call. is_plain: it has neither a mask nor a scale."""
        self.unread |= arguments.keys() - WITHOUT_EFFECT
        self.torch_only |= not is_plain and attention is not sdpa
        if (kernel := arguments.get("preferred_attention")) is not None:
            function = getattr(kernel, "function", kernel)
            self.preferred.add(str(getattr(function, "__name__", type(kernel).__name__)))


@contextmanager
def watched_calls() -> Iterator[AttentionCalls]:
    """Record the calls of attention by models in this context."""
    calls = AttentionCalls()
    _watching.append(calls)
    try:
        yield calls
    finally:
        _watching.remove(calls)


def core_attention(attention: Attention) -> Function:
    """Wrap our attention in a function with the arguments and result of ComfyUI's torch attention.

    With a mask or a scale, which our attention does not take, torch's SDPA runs.
    """
    limit = comfy.ldm.modules.attention.SDP_BATCH_LIMIT

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run our attention in chunks: q, k, v (B, H, T, D) → (B, T, H·D)."""
        if q.shape[0] <= limit:
            return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        parts = zip(q.split(limit), k.split(limit), v.split(limit), strict=True)
        return torch.cat([plain(*part) for part in parts])

    def attend(
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        heads: int | None = None,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        *extra: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Run attention. q, k, v: (B, T, H·D), or (B, H, T, D) with `skip_reshape`; each may be in a container.

        Returns (B, T, H·D), or (B, H, T, D) with `skip_output_reshape`. mask: (T, S), (B, T, S) or (B, H, T, S), bool
        or additive, or broadcastable to it. With `enable_gqa`, keys and values may have fewer heads. Raises ValueError
        without q, k, v or heads, as after a renaming in ComfyUI.
        """
        if extra:
            raise unusable("optimized_attention", f"{8 + len(extra)} arguments")
        if heads is None:
            raise unusable("optimized_attention", "without heads")
        if not torch.compiler.is_compiling():
            for calls in _watching:
                calls.add(attention, kwargs, mask is None and scale is None)
        q = _tensor(q, "q")
        k = _tensor(k, "k")
        v = _tensor(v, "v")
        mask = None if mask is None else _tensor(mask, "mask")
        if not skip_reshape:
            batch, _, width = q.shape
            dim = width // heads
            kv_heads = k.shape[-1] // dim if enable_gqa else heads
            q = q.reshape(batch, -1, heads, dim).transpose(1, 2)
            k, v = (x.reshape(batch, -1, kv_heads, dim).transpose(1, 2) for x in (k, v))
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if mask is None and scale is None:
            out = plain(q, k, v)
            return out.unflatten(2, (q.shape[1], -1)).transpose(1, 2) if skip_output_reshape else out
        if mask is not None and mask.ndim in (2, 3):
            mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    return attend
