"""The table of adapter algorithms."""

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


def adapter_kind(spec: AdapterSpec) -> type[Adapter]:
    """Return the adapter class of a spec."""
    return PissaAdapter if spec.init == "pissa" else ADAPTERS[spec.algorithm]


CONVOLUTIONS = ("lora",)
"""The algorithms that convolutions can have."""


def make_adapter(spec: AdapterSpec, size: tuple[int, int], kernel: tuple[int, ...] | None = None) -> Adapter:
    """Make the adapter of a layer. size: (out, in) of its weight as a matrix. kernel: (height, width) of a
    convolution."""
    if kernel is None:
        return adapter_kind(spec)(spec, *size)
    assert spec.algorithm in CONVOLUTIONS, spec
    return (ConvPissaAdapter if spec.init == "pissa" else ConvLoraAdapter)(spec, *size, kernel)
