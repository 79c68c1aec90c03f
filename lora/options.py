"""Options of the adapter to train."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..common.text import finite, one_of
from ..models.adapters.base import DROPOUTS, INITS
from ..models.adapters.registry import ADAPTERS
from .patterns import RankPattern, parse_rank_patterns
from .source import LoraSource

ALGORITHMS = tuple(ADAPTERS)
SAME, NONE = "same", "none"
# Options of the second expert, with their values for a run of one model.
LOW_NOISE: dict[str, Any] = {
    "start_from_low_noise": SAME,
    "base_lora_low_noise": SAME,
    "base_strength_low_noise": 1.0,
    "training_adapter_low_noise": SAME,
    "training_adapter_strength_low_noise": 1.0,
}
# LoRAs under the trained one, with the input of their strength.
_BENEATH = {"base_lora": "base_strength", "training_adapter": "training_adapter_strength"}


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the adapter to train (TESSERA_NETWORK).

    algorithm: one of `models.adapters`.
    rank: of the update's two matrices, or the algorithm's counterpart of it.
    alpha: the update is scaled by alpha / rank.
    include, exclude: glob patterns over module names such as `double_blocks.0.img_attn.qkv`; an empty `include` selects
        the default targets of the model family.
    dropout: probability that an element of the rank activations (after the down projection) is dropped.
    lora_plus_ratio: learning rate of up over that of down, see `param_groups.parameter_groups`.
    scale_weight_norms: above 0, the largest norm of a module's update, see `max_norm.MaxNorm`.
    start_from: a LoRA that training begins from, see `warm_start`.
    base_lora, base_strength: a LoRA that stays frozen under the trained one, and its strength.
    rank_dropout: probability that a rank is dropped for a sample.
    module_dropout: probability that a layer skips its adapter for a sample.
    rank_patterns: ranks and alphas of some layers, see `patterns.parse_rank_patterns`.
    factor: of LoKr. constraint: of OFT.
    init: the initial weights of a LoRA.
    start_from_low_noise, base_lora_low_noise, base_strength_low_noise: for the low noise expert of Wan 2.2: a LoRA,
        NONE, or SAME as the high noise expert (and `base_strength` with it).
    training_adapter, training_adapter_strength: a LoRA that is active only during training, and its strength.
    training_adapter_low_noise, training_adapter_strength_low_noise: the same for the low noise expert.

    Raises ValueError, naming the input, for values out of range and combinations without effect.
    """

    algorithm: str = "lora"
    rank: int = 16
    alpha: float = 16.0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dropout: float = 0.0
    lora_plus_ratio: float = 1.0
    scale_weight_norms: float = 0.0
    start_from: LoraSource | None = None
    base_lora: LoraSource | None = None
    base_strength: float = 1.0
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    rank_patterns: str = ""
    factor: int = -1
    constraint: float = 0.0
    init: str = "kaiming"
    start_from_low_noise: LoraSource | str = SAME
    base_lora_low_noise: LoraSource | str = SAME
    base_strength_low_noise: float = 1.0
    training_adapter: LoraSource | None = None
    training_adapter_strength: float = 1.0
    training_adapter_low_noise: LoraSource | str = SAME
    training_adapter_strength_low_noise: float = 1.0

    def for_high_noise(self) -> "NetworkOptions":
        """Return the options of the high noise expert alone."""
        return replace(self, **LOW_NOISE)

    def for_low_noise(self) -> "NetworkOptions":
        """Return the options of the low noise expert alone."""
        changes = dict(LOW_NOISE)
        if self.start_from_low_noise != SAME:
            changes["start_from"] = _source(self.start_from_low_noise)
        for name, strength in _BENEATH.items():
            if (source := getattr(self, f"{name}_low_noise")) != SAME:
                changes[name] = _source(source)
                changes[strength] = getattr(self, f"{strength}_low_noise") if changes[name] else 1.0
        return replace(self, **changes)

    @property
    def file_ranks(self) -> int:
        """Ranks of a file per rank of the network: 2 for PiSSA, whose file holds its initial weights too."""
        return 2 if self.init == "pissa" else 1

    @cached_property
    def rank_lines(self) -> tuple[RankPattern, ...]:
        """The lines of `rank_patterns`. Raises ValueError for one that can't be read."""
        return parse_rank_patterns(self.rank_patterns)

    @property
    def drops(self) -> bool:
        """Return whether a step has dropout masks of any kind."""
        return any(getattr(self, name) for name in DROPOUTS)

    def __post_init__(self) -> None:
        finite(self)
        one_of("algorithm", self.algorithm, ALGORITHMS)
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; set it to 1 or more (16 suits most LoRAs).")
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha}; set it above 0 (equal to rank keeps the update unscaled).")
        for name in DROPOUTS:
            self._check_dropout(name, getattr(self, name))
        if self.lora_plus_ratio <= 0:
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g}; set it above 0 (1 is off, 4 to 16 is usual)."
            )
        if self.scale_weight_norms < 0:
            raise ValueError(
                f"scale_weight_norms is {self.scale_weight_norms:g}; set it to 0 (off) or more (1 is usual)."
            )
        if self.scale_weight_norms and not (kind := ADAPTERS[self.algorithm]).has_norm:
            *with_norm, last = [name for name, other in ADAPTERS.items() if other.has_norm]
            raise ValueError(
                f"scale_weight_norms is {self.scale_weight_norms:g} and {kind.no_norm}, or algorithm to "
                f"{', '.join(with_norm)} or {last}."
            )
        if self.lora_plus_ratio != 1 and self.algorithm not in ("lora", "dora"):
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g} and {self.algorithm} has no two matrices A and B; set "
                "lora_plus_ratio to 1, or algorithm to lora."
            )
        for name in ("start_from_low_noise", *(f"{name}_low_noise" for name in _BENEATH)):
            if isinstance(choice := getattr(self, name), str):
                one_of(name, choice, (SAME, NONE))
        for end in ("", "_low_noise"):
            for name, strength in _BENEATH.items():
                self._check_beneath(f"{name}{end}", f"{strength}{end}")
        _ = self.rank_lines
        if self.factor != -1 and self.factor < 1:
            raise ValueError(f"factor is {self.factor}; set it to -1 (near the square root) or to 1 or more.")
        if self.constraint < 0:
            raise ValueError(f"constraint is {self.constraint:g}; set it to 0 (none) or above.")

        self._check_init()

    def _check_beneath(self, name: str, strength: str) -> None:
        if not isinstance(source := getattr(self, name), LoraSource):
            return
        if getattr(self, strength) == 0:
            raise ValueError(f"{strength} is 0, at which {name} has no effect; set another, or {name} to none.")
        if name.startswith("training_adapter") and self.algorithm == "dora":
            raise ValueError(
                f"{name} is {source.name} and algorithm is dora, whose file would hold the lengths of weights with "
                f"that adapter in them; set algorithm to lora, or {name} to none."
            )

    def _check_init(self) -> None:
        one_of("init", self.init, INITS)
        suits = {"kaiming": ALGORITHMS, "gaussian": ("lora", "dora"), "pissa": ("lora",)}[self.init]
        if self.algorithm not in suits:
            raise ValueError(
                f"init is {self.init}, which is for {' and '.join(suits)}, and algorithm is {self.algorithm}; set init "
                "to kaiming."
            )
        for name in ("start_from", "start_from_low_noise"):
            if self.init == "pissa" and isinstance(start := getattr(self, name), LoraSource):
                raise ValueError(
                    f"{name} is {start.name} and init is pissa, which begins from the model's own weights; set init to "
                    f"kaiming, or {name} to none."
                )
        if self.init == "pissa" and self.scale_weight_norms:
            raise ValueError(
                f"scale_weight_norms is {self.scale_weight_norms:g} and init is pissa, whose matrices are not small; "
                "set scale_weight_norms to 0, or init to kaiming."
            )

    def _check_dropout(self, name: str, value: float) -> None:
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; set it to 0 or more and below 1.")
        if value and name not in (kinds := ADAPTERS[self.algorithm].drops):
            raise ValueError(
                f"{name} is {value:g} and {self.algorithm} has no rank activations to drop; set it to 0, or use "
                f"{' or '.join(kinds)}."
            )


def _source(choice: LoraSource | str) -> LoraSource | None:
    return choice if isinstance(choice, LoraSource) else None
