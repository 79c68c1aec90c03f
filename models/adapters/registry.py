"""The table of adapter algorithms."""

from collections.abc import Collection

from .base import Adapter, AdapterSpec
from .conv import ConvLoraAdapter, ConvPissaAdapter
from .dora import DoraAdapter
from .loha import LohaAdapter
from .lokr import LokrAdapter
from .lora import LoraAdapter
from .oft import OftAdapter
from .pissa import PissaAdapter

ADAPTERS: dict[str, type[Adapter]] = {
    kind.algorithm: kind for kind in (LoraAdapter, LohaAdapter, LokrAdapter, DoraAdapter, OftAdapter)
}


VARIANTS: dict[tuple[str, str], type[Adapter]] = {(kind.algorithm, kind.init): kind for kind in (PissaAdapter,)}
"""Adapters that replace that of their algorithm for one initialisation."""

CONVOLUTIONS: dict[type[Adapter], type[ConvLoraAdapter]] = {
    LoraAdapter: ConvLoraAdapter,
    PissaAdapter: ConvPissaAdapter,
}
"""The same on a convolution, for those that have it."""

INITS = tuple(dict.fromkeys(init for kind in ADAPTERS.values() for init in kind.inits))


def kind_of(algorithm: str, init: str) -> type[Adapter]:
    """Return the adapter class of an algorithm with an initialisation."""
    return VARIANTS.get((algorithm, init), ADAPTERS[algorithm])


def adapter_kind(spec: AdapterSpec) -> type[Adapter]:
    """Return the adapter class of a spec."""
    return kind_of(spec.algorithm, spec.init)


def algorithms_with(fact: str) -> list[str]:
    """List the algorithms whose class has a fact, such as "fits_any", the simplest first."""
    return [name for name, kind in ADAPTERS.items() if getattr(kind, fact)]


def algorithm_of_file(name: str, suffixes: Collection[str]) -> str:
    """Return the algorithm of an update in a file, or the name of ComfyUI's reader of it if there is none.

    suffixes: of its tensors, in kohya's names.
    """
    return next((kind.algorithm for kind in ADAPTERS.values() if kind.reads_as(name, suffixes)), name)


def make_adapter(spec: AdapterSpec, size: tuple[int, int], kernel: tuple[int, ...] | None = None) -> Adapter:
    """Make the adapter of a layer. size: (out, in) of its weight as a matrix. kernel: (height, width) of a
    convolution."""
    kind = adapter_kind(spec)
    return kind(spec, *size) if kernel is None else CONVOLUTIONS[kind](spec, *size, kernel)
