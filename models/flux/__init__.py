"""FLUX.1, with Kontext, and FLUX.2."""

from .blocks import DoubleBlock, SingleBlock
from .flux1 import Flux
from .flux2 import Flux2
from .transformer import FluxInputs

__all__ = ["DoubleBlock", "Flux", "Flux2", "FluxInputs", "SingleBlock"]
