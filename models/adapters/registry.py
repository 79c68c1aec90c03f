"""The table of adapter algorithms."""

from .base import Adapter, AdapterSpec
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
    """The class of an adapter."""
    return PissaAdapter if spec.init == "pissa" else ADAPTERS[spec.algorithm]
