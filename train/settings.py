"""Settings of a training run: memory, validation, and all of them together."""

from dataclasses import dataclass, fields
from typing import Any

from ..common.file_names import plain_name
from ..common.fingerprint import changed_fields, fingerprint
from ..common.text import finite, one_of, within
from ..data.samples import TrainingData
from ..lora.options import NetworkOptions
from ..memory.host.pinning import PIN_MEMORY
from .objective.options import ObjectiveOptions
from .optim.options import OptimizerOptions
from .optim.schedule import ENDLESS_SCHEDULERS

CHECKPOINTING = ("none", "selective", "full", "auto")
ATTENTION = ("auto", "sdpa", "flash-attn")
MOST_HELD_OUT = 0.9


@dataclass(frozen=True)
class MemoryOptions:
    """What is kept for backward, which attention kernel runs and which weights stay on the host (TESSERA_MEMORY).

    `checkpointing` 'auto' takes the fastest that fits. `activation_budget` is read by selective checkpointing only: the
    part of the activations that is kept, 0 to 1. `blocks_to_swap` blocks stream from the host (-1: as many as have to),
    `prefetch_blocks` of them are copied ahead; `pin_memory` says whether their host memory is page-locked.
    `offload_activations` keeps on the host what full checkpointing keeps of each block.
    """

    checkpointing: str = "full"
    attention: str = "auto"
    activation_budget: float = 0.5
    blocks_to_swap: int = 0
    prefetch_blocks: int = 1
    pin_memory: str = "auto"
    offload_activations: bool = False

    def __post_init__(self) -> None:
        finite(self)
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        one_of("attention", self.attention, ATTENTION)
        within("activation_budget", self.activation_budget, 0.0, 1.0)
        if self.blocks_to_swap < -1:
            raise ValueError(
                f"blocks_to_swap is {self.blocks_to_swap}; set it to -1 (fit to the free memory), 0 (none) or more."
            )
        if self.prefetch_blocks < 1:
            raise ValueError(f"prefetch_blocks is {self.prefetch_blocks}; set it to 1 or more.")
        one_of("pin_memory", self.pin_memory, PIN_MEMORY)


@dataclass(frozen=True)
class ValidationOptions:
    """What is held out of training and how often the loss is taken on it (TESSERA_VALIDATION).

    part: of the data's pictures, held out by a draw of `seed`; not read where `data` brings pictures of its own.
    every_n_steps: optimizer steps between two measurements; `at_start` adds one before the first, the last step always
    has one. keep_best: whether the LoRA with the least loss is kept as a file. min_sigma, max_sigma: the noise levels
    measured at are the nine deciles between them.
    """

    part: float = 0.1
    every_n_steps: int = 100
    at_start: bool = True
    keep_best: bool = True
    seed: int = 0
    min_sigma: float = 0.0
    max_sigma: float = 1.0
    data: TrainingData | None = None

    def __post_init__(self) -> None:
        finite(self)
        within("part", self.part, 0.0, MOST_HELD_OUT)
        if self.part == 0 and self.data is None:
            raise ValueError("part is 0 and data is not connected, so nothing is held out; set part above 0 (0.1).")
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; set it to 1 or more.")
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise ValueError(
                f"min_sigma is {self.min_sigma} and max_sigma {self.max_sigma}; min_sigma must be the smaller one, "
                "both between 0 and 1."
            )

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The nine deciles of the uniform distribution between `min_sigma` and `max_sigma`: 0.1 to 0.9 by default.

        They are those of no objective, so that runs with different timestep samplings are measured at the same ones.
        """
        low, high = self.min_sigma, self.max_sigma
        return tuple(low + (high - low) * k / 10 for k in range(1, 10))

    def facts(self) -> dict[str, Any]:
        """The options as plain values, the data by its fingerprint."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain if self.data is None else plain | {"part": 0.0, "data": self.data.fingerprint}


@dataclass(frozen=True)
class TrainSettings:
    """Everything that a user sets about a run. `compile` is 'auto' or 'off'; `save_every` counts steps,
    `save_every_epochs` as many showings as there are samples, and with both at 0 it saves at the end only; of these
    LoRAs the newest `keep_last` stay, with 0 all; `resume` is 'off', 'latest' or a state's path below the LoRA
    folder. continued: 'latest' of a run that is not there takes one that came to these settings from others."""

    output_name: str
    steps: int
    batch_size: int
    gradient_accumulation: int
    seed: int
    compile: str
    save_every: int
    resume: str
    network: NetworkOptions
    optimizer: OptimizerOptions
    objective: ObjectiveOptions
    memory: MemoryOptions
    save_every_epochs: int = 0
    keep_last: int = 0
    validation: ValidationOptions | None = None
    continued: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_name", plain_name(self.output_name))
        for name in ("steps", "batch_size", "gradient_accumulation"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more.")
        if self.save_every < 0:
            raise ValueError(f"save_every is {self.save_every}; set it to 0 (at the end only) or more.")
        if self.save_every_epochs < 0:
            raise ValueError(f"save_every_epochs is {self.save_every_epochs}; set it to 0 (off) or more.")
        if self.save_every and self.save_every_epochs:
            raise ValueError(
                f"save_every is {self.save_every} steps and save_every_epochs is {self.save_every_epochs}; set one of "
                "them to 0."
            )
        if self.keep_last < 0:
            raise ValueError(f"keep_last is {self.keep_last}; set it to 0 (keep all) or more.")
        if self.compile not in ("auto", "off"):
            raise ValueError(f"compile is {self.compile!r}; choose 'auto' or 'off'.")

    @property
    def names_state(self) -> bool:
        """Whether `resume` is a state's path."""
        return self.resume not in ("off", "latest")

    def lineage(self, data: str, model: str) -> str:
        """Runs of one lineage go through the same steps; they may differ in how memory is used, and in length where
        the learning rate does not depend on it. Options at their default are left out, so that runs keep their names
        when more can be set."""
        same = {
            "data": data,
            "model": model,
            "batch_size": self.batch_size,
            "gradient_accumulation": self.gradient_accumulation,
            "seed": self.seed,
            # What the second expert begins from and stands on is in its own run.
            "network": changed_fields(self.network.of_high_noise()),
            "optimizer": changed_fields(self.optimizer),
            # Where the experts meet is in the range of each.
            "objective": {k: v for k, v in changed_fields(self.objective).items() if k != "expert_boundary"},
        }
        if self.optimizer.lr_scheduler not in ENDLESS_SCHEDULERS:
            same["steps"] = self.steps
        return fingerprint(same)

    def key(self, lineage: str) -> str:
        """The run's key: equal keys mean the same run."""
        whole = {
            "lineage": lineage,
            "steps": self.steps,
            "memory": changed_fields(self.memory),
            "compile": self.compile,
        }
        if self.validation is not None:
            default = ValidationOptions().facts()
            whole["validation"] = {
                k: v for k, v in self.validation.facts().items() if k not in default or v != default[k]
            }
        return fingerprint(whole)
