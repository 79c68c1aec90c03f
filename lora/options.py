"""Options of the adapter to train."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..common.text import finite, one_of
from ..models.adapters.base import DROPOUTS, Adapter
from ..models.adapters.registry import ADAPTERS, INITS, algorithms_with, kind_of
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
    include: glob patterns over module names such as `double_blocks.0.img_attn.qkv`, the layers to train; if empty, the
        default targets of the model family.
    exclude: glob patterns of layers that are left out of these.
    dropout: probability that an element of the rank activations (after the down projection) is dropped.
    lora_plus_ratio: learning rate of up over that of down, see `param_groups.parameter_groups`.
    scale_weight_norms: above 0, the largest norm of a module's update, see `max_norm.MaxNorm`.
    start_from: a LoRA that training begins from, see `warm_start`; None for new weights.
    base_lora: a LoRA that stays frozen under the trained one; None without one.
    base_strength: strength of base_lora.
    rank_dropout: probability that a rank is dropped for a sample.
    module_dropout: probability that a layer skips its adapter for a sample.
    rank_patterns: ranks and alphas of some layers, see `patterns.parse_rank_patterns`.
    factor: target factor of LoKr's factorisation; -1 factorises near the square root.
    constraint: OFT's norm limit; 0 for none.
    init: the initial weights of a LoRA.
    start_from_low_noise: start_from of the low noise expert of Wan 2.2: a LoRA, NONE, or SAME as the high noise expert.
    base_lora_low_noise: base_lora of the low noise expert: a LoRA, NONE, or SAME as the high noise expert, with its
        strength.
    base_strength_low_noise: strength of base_lora_low_noise, if that is a LoRA.
    training_adapter: a LoRA that is active only during training; None without one.
    training_adapter_strength: strength of training_adapter.
    training_adapter_low_noise: training_adapter of the low noise expert: a LoRA, NONE, or SAME as the high noise
        expert, with its strength.
    training_adapter_strength_low_noise: strength of training_adapter_low_noise, if that is a LoRA.

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
    def kind(self) -> type[Adapter]:
        """The class of its adapters."""
        return kind_of(self.algorithm, self.init)

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
        if self.lora_plus_ratio != 1 and not ADAPTERS[self.algorithm].has_pair:
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g} and {self.algorithm} has no two matrices A and B; set "
                f"lora_plus_ratio to 1, or algorithm to {algorithms_with('has_pair')[0]}."
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
        self._check_norm()

    def _check_norm(self) -> None:
        if not self.scale_weight_norms or (kind := self.kind).has_norm:
            return
        *with_norm, last = algorithms_with("has_norm")
        other = "" if kind.init else f", or algorithm to {', '.join(with_norm)} or {last}"
        raise ValueError(f"scale_weight_norms is {self.scale_weight_norms:g} and {kind.no_norm}{other}.")

    def _check_beneath(self, name: str, strength: str) -> None:
        if not isinstance(source := getattr(self, name), LoraSource):
            return
        if getattr(self, strength) == 0:
            raise ValueError(f"{strength} is 0, at which {name} has no effect; set another, or {name} to none.")
        if name.startswith("training_adapter") and (cause := ADAPTERS[self.algorithm].no_training_adapter):
            raise ValueError(
                f"{name} is {source.name} and algorithm is {self.algorithm}, {cause}; set algorithm to "
                f"{algorithms_with('fits_any')[0]}, or {name} to none."
            )

    def _check_init(self) -> None:
        one_of("init", self.init, INITS)
        inits = ADAPTERS[self.algorithm].inits
        if self.init not in inits:
            suits = [name for name, kind in ADAPTERS.items() if self.init in kind.inits]
            raise ValueError(
                f"init is {self.init}, which is for {' and '.join(suits)}, and algorithm is {self.algorithm}; set init "
                f"to {inits[0]}."
            )
        for name in ("start_from", "start_from_low_noise"):
            if self.kind.starts_from_weights and isinstance(start := getattr(self, name), LoraSource):
                raise ValueError(
                    f"{name} is {start.name} and init is {self.init}, which begins from the model's own weights; set "
                    f"init to {inits[0]}, or {name} to none."
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
