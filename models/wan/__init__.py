"""Wan 2.1 and 2.2."""

from .family import Wan
from .transformer import WanInputs

__all__ = ["Wan", "WanInputs"]
