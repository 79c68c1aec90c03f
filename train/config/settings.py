"""Settings of a training run: memory options, validation options and the complete TrainSettings."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ...common.file_names import plain_name
from ...common.fingerprint import changed_fields, fingerprint
from ...common.text import finite, one_of, quantity, quoted, within
from ...common.untrusted.budgets import SETTINGS, check_size
from ...data.samples import TrainingData
from ...lora.options import NetworkOptions
from ...memory.host.pinning import PIN_MEMORY
from ...memory.low_bit.matmul import LOW_BIT_MATMULS, OFF
from ...memory.low_bit.quantize import AS_STORED, QUANTIZE
from ..objective.options import ObjectiveOptions
from ..optim.options import OptimizerOptions
from ..optim.schedule import ENDLESS_SCHEDULERS

CHECKPOINTING = ("none", "selective", "full", "auto")
ATTENTION = ("auto", "sdpa", "flash-attn", "cudnn")
VERIFY = ("auto", "on", "off")
MOST_HELD_OUT = 0.9
MOST_SIGMAS = 100


@dataclass(frozen=True)
class MemoryOptions:
    """Memory options: checkpointing, attention kernel, block swap, low-bit matmuls and quantizing (TESSERA_MEMORY).

    checkpointing: one of CHECKPOINTING; 'auto' takes the fastest that fits.
    attention: one of ATTENTION.
    activation_budget: fraction of the activations to keep, 0 to 1; read by selective checkpointing only.
    blocks_to_swap: number of blocks streamed from the host; -1 takes as many as needed.
    prefetch_blocks: number of blocks copied ahead.
    pin_memory: pinning of the swapped blocks' host memory, one of PIN_MEMORY.
    offload_activations: keep the block inputs that full checkpointing saves on the host.
    low_bit_matmul: matmul of the blocks' frozen Linears, forward and backward, one of LOW_BIT_MATMULS; 'auto'
        depends on the card.
    quantize: format in which the blocks' frozen Linears of 16 and 32 bits are stored during training, one of QUANTIZE.
    shard: each device of one machine holds a shard of every swapped block, which is gathered from all of them.
    verify: certificate before the first step, one of VERIFY; 'auto' makes one for models that no test covers by name.
    """

    checkpointing: str = "auto"
    attention: str = "auto"
    activation_budget: float = 0.5
    blocks_to_swap: int = 0
    prefetch_blocks: int = 1
    pin_memory: str = "auto"
    offload_activations: bool = False
    low_bit_matmul: str = OFF
    quantize: str = AS_STORED
    shard: bool = False
    verify: str = "auto"

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
        one_of("low_bit_matmul", self.low_bit_matmul, LOW_BIT_MATMULS)
        one_of("quantize", self.quantize, QUANTIZE)
        one_of("verify", self.verify, VERIFY)


def parse_sigmas(text: str) -> tuple[float, ...]:
    """Parse noise levels, separated by commas, semicolons, spaces or lines, into rising order, each once.

    Raises ValueError for one that is not above 0 and up to 1, for more than MOST_SIGMAS, or a text too long.
    """
    check_size(SETTINGS, "sigmas", characters=len(text))
    sigmas: set[float] = set()
    for entry in text.replace(",", " ").replace(";", " ").split():
        try:
            sigma = float(entry)
        except ValueError:
            sigma = 0.0
        if not 0 < sigma <= 1:
            raise ValueError(f"sigmas has {quoted(entry)}; give numbers above 0 and up to 1, such as 0.2, 0.5, 0.8.")
        sigmas.add(sigma)
    if len(sigmas) > MOST_SIGMAS:
        raise ValueError(f"sigmas has {len(sigmas)} noise levels; give at most {MOST_SIGMAS}.")
    return tuple(sorted(sigmas))


@dataclass(frozen=True)
class ValidationOptions:
    """Validation options: held-out data and measuring interval (TESSERA_VALIDATION).

    part: fraction of the files to hold out, 0 to 0.9; ignored if `data` is given.
    every_n_steps: optimizer steps between two measurements; the last step is always measured.
    at_start: measure before the first step too.
    keep_best: write the LoRA with the lowest loss to a file.
    seed: seed of the split and of the validation noise.
    min_sigma: lower end of the sigma range, 0 to 1.
    max_sigma: upper end of the sigma range, 0 to 1; losses are measured at the nine deciles between the two.
    data: validation samples from outside the training data; None holds out `part`.
    sigmas: text of noise levels to measure at in place of the deciles, see `parse_sigmas`; empty takes the deciles.
    loss_by_picture: measure single training pictures too, see `watch.picture_losses`.
    """

    part: float = 0.1
    every_n_steps: int = 100
    at_start: bool = True
    keep_best: bool = True
    seed: int = 0
    min_sigma: float = 0.0
    max_sigma: float = 1.0
    data: TrainingData | None = None
    sigmas: str = ""
    loss_by_picture: bool = False

    def __post_init__(self) -> None:
        finite(self)
        within("part", self.part, 0.0, MOST_HELD_OUT)
        if self.part == 0 and self.data is None:
            raise ValueError(
                "part is 0 and data is not connected, so there is nothing to validate on; set part above 0 (such as "
                "0.1)."
            )
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; set it to 1 or more.")
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise ValueError(
                f"min_sigma is {self.min_sigma} and max_sigma {self.max_sigma}; min_sigma must be the smaller one, "
                "both between 0 and 1."
            )
        if not self.noise_levels:
            raise ValueError(
                f"sigmas is {quoted(self.sigmas)}, and none of them is between min_sigma {self.min_sigma:g} and "
                f"max_sigma {self.max_sigma:g}; add one that is, or widen them."
            )

    @cached_property
    def listed_sigmas(self) -> tuple[float, ...]:
        """The noise levels of `sigmas`. Raises ValueError for one that is none."""
        return parse_sigmas(self.sigmas)

    @property
    def noise_levels(self) -> tuple[float, ...]:
        """The `sigmas` from `min_sigma` to `max_sigma`, or else the nine deciles of the uniform distribution
        between the two: 0.1 to 0.9 by default.

        They do not depend on the objective, so that runs with different timestep sampling are comparable.
        """
        low, high = self.min_sigma, self.max_sigma
        if self.listed_sigmas:
            return tuple(sigma for sigma in self.listed_sigmas if low <= sigma <= high)
        return tuple(low + (high - low) * k / 10 for k in range(1, 10))

    def facts(self) -> dict[str, Any]:
        """Return the options as plain values, with the data replaced by its fingerprint."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain if self.data is None else plain | {"part": 0.0, "data": self.data.fingerprint}


@dataclass(frozen=True)
class TrainSettings:
    """All settings of a run.

    output_name: path of the LoRA below the LoRA folder, without its ending.
    steps: optimizer steps.
    batch_size: samples of a micro-batch.
    gradient_accumulation: micro-batches of an optimizer step.
    seed: seed of every random number of the run.
    compile: 'auto' or 'off'.
    save_every: optimizer steps between two saves; 0 with `save_every_epochs` 0 saves at the end only.
    resume: 'off', 'latest' or the path of a state below the LoRA folder.
    network: options of the LoRA.
    optimizer: options of optimizer, schedule and EMA.
    objective: options of noise, timestep sampling and loss.
    memory: options of checkpointing, attention and block swap.
    save_every_epochs: epochs between two saves, 0 is off.
    keep_last: number of newest intermediate LoRAs to retain, 0 retains all.
    validation: None trains without validation.
    continued: if no run has this lineage, 'latest' resumes a run that reached these settings from others.
    """

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

    @property
    def samples_per_step(self) -> int:
        """Number of samples of an optimizer step."""
        return self.batch_size * self.gradient_accumulation

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
                f"save_every is {quantity(self.save_every, 'step')} and save_every_epochs is {self.save_every_epochs}; "
                "set one of them to 0."
            )
        if self.keep_last < 0:
            raise ValueError(f"keep_last is {self.keep_last}; set it to 0 (keep all) or more.")
        if self.compile not in ("auto", "off"):
            raise ValueError(f"compile is {self.compile!r}; choose 'auto' or 'off'.")

    @property
    def names_state(self) -> bool:
        """True if `resume` is the path of a state."""
        return self.resume not in ("off", "latest")

    @property
    def can_go_on(self) -> bool:
        """True if a run can continue after `steps` is raised: its learning rate does not depend on its length."""
        return self.optimizer.lr_scheduler in ENDLESS_SCHEDULERS

    def lineage(self, data: str, model: str) -> str:
        """Fingerprint of everything that determines the steps of a run.

        Runs of one lineage may differ in memory options, except for low_bit_matmul and quantize, and in length if
        the schedule does not depend on it.
        Options at their default are left out, so that adding an option does not change the key of existing runs.

        data: fingerprint of the training data.
        model: fingerprint of the model's weights.
        """
        facts = {
            "data": data,
            "model": model,
            "batch_size": self.batch_size,
            "gradient_accumulation": self.gradient_accumulation,
            "seed": self.seed,
            # The options of the low noise expert belong to that expert's own run.
            "network": changed_fields(self.network.for_high_noise()),
            "optimizer": changed_fields(self.optimizer),
            # The boundary is already in min_sigma and max_sigma of each expert.
            "objective": {k: v for k, v in changed_fields(self.objective).items() if k != "expert_boundary"},
        }
        if not self.can_go_on:
            facts["steps"] = self.steps
        if self.memory.low_bit_matmul != OFF:
            facts["low_bit_matmul"] = self.memory.low_bit_matmul
        if self.memory.quantize != AS_STORED:
            facts["quantize"] = self.memory.quantize
        return fingerprint(facts)

    def key(self, lineage: str) -> str:
        """Fingerprint of lineage, length, memory, compile and validation options. Equal keys mean the same run."""
        memory = changed_fields(self.memory)
        memory.pop("shard", None)  # only another source of the same bytes
        memory.pop("verify", None)
        whole = {"lineage": lineage, "steps": self.steps, "memory": memory, "compile": self.compile}
        if self.validation is not None:
            default = ValidationOptions().facts()
            whole["validation"] = {k: v for k, v in self.validation.facts().items() if v != default[k]}
        return fingerprint(whole)
