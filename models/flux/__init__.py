"""FLUX.1."""

from .blocks import DoubleBlock, SingleBlock
from .family import Flux
from .transformer import FluxInputs

__all__ = ["DoubleBlock", "Flux", "FluxInputs", "SingleBlock"]
