"""Random weights that keep activations near one and leave no parameter without effect."""

from ..common import pack as pack

# isort: split
from tessera_try_it.weights import Shapes as Shapes
from tessera_try_it.weights import fill as fill
from tessera_try_it.weights import linear as linear
