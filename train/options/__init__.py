"""What a user may set about a run, as frozen dataclasses with the defaults that unconnected options take.

Each class checks its own values when it is made, so that bad input ends before any work is done.
"""

from .memory import ATTENTION, CHECKPOINTING, MemoryOptions
from .network import ALGORITHMS, INITS, LOW_NOISE, NONE, SAME, NetworkOptions
from .objective import (
    HUBER_SCHEDULES,
    LOSSES,
    MOST_MODE_SCALE,
    RESOLUTION_SAMPLINGS,
    SIGMA_RANGE,
    STRATIFIED,
    TIMESTEP_SAMPLING,
    WEIGHTINGS,
    ObjectiveOptions,
)
from .optimizer import LR_SCHEDULERS, OPTIMIZERS, OptimizerOptions
from .validation import ValidationOptions

__all__ = [
    "ALGORITHMS",
    "ATTENTION",
    "CHECKPOINTING",
    "HUBER_SCHEDULES",
    "INITS",
    "LOSSES",
    "LOW_NOISE",
    "LR_SCHEDULERS",
    "MOST_MODE_SCALE",
    "NONE",
    "OPTIMIZERS",
    "RESOLUTION_SAMPLINGS",
    "SAME",
    "SIGMA_RANGE",
    "STRATIFIED",
    "TIMESTEP_SAMPLING",
    "WEIGHTINGS",
    "MemoryOptions",
    "NetworkOptions",
    "ObjectiveOptions",
    "OptimizerOptions",
    "ValidationOptions",
]
