"""Tuning results: the best settings, a table for the user, and the file that stores them."""

import hashlib
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ...common.core import quantised_layout
from ...common.text import quantity
from ...common.untrusted.budgets import TUNE_RESULT
from ...common.untrusted.json_text import read_json
from ..cuda_graphs import memory_allocator, no_cuda_graphs
from ..settings import CompileSettings
from .inputs import StepInputs

FORMAT = 1  # of the stored files
LEAST_GAIN = 0.01  # a smaller gain is not worth a compile


@dataclass(frozen=True)
class Quartiles:
    """Median of some values, between their quartiles.

    low: first quartile.
    median: second quartile.
    high: third quartile.
    """

    low: float
    median: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Quartiles":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(low, median(values), high)

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class MeasuredSettings:
    """Timing of one set of settings.

    settings: values of Compile Model.
    step: milliseconds.
    gain: eager time over compiled time of alternating steps.
    compile_seconds: time of the first steps beyond the median of a step.
    memory_mib: growth of the device memory in use over compiling and timing.
    graphs: graphs that they compile.
    notes: sentences for the user.
    """

    settings: CompileSettings
    step: Quartiles
    gain: Quartiles
    compile_seconds: float
    memory_mib: int
    graphs: int
    notes: tuple[str, ...] = ()

    def faster(self) -> bool:
        return self.gain.median - 1 > max(self.gain.half, LEAST_GAIN)

    def pays_after(self) -> int | None:
        """Count the steps until compiling pays off; None if it is not clear that it ever does."""
        if not self.faster():
            return None
        return math.ceil(1000 * self.compile_seconds / (self.step.median * (self.gain.median - 1)))


@dataclass(frozen=True)
class UnmeasuredSettings:
    """Settings that failed, or were left out.

    settings: values of Compile Model.
    reason: the cause as a sentence.
    failed: True after an error, False if they were left out.
    """

    settings: CompileSettings
    reason: str
    failed: bool

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"settings": asdict(self.settings), "why": self.reason, "failed": self.failed}


@dataclass(frozen=True)
class TuneResult:
    """Result of one tuning.

    key: see `result_key`.
    eager: milliseconds of a step of the uncompiled MODEL.
    measured: settings that were timed.
    unmeasured: settings that failed or were left out.
    time_budget: seconds that the tuning was allowed to take.
    measured_at: local date and time.
    """

    key: dict[str, str]
    eager: Quartiles
    measured: tuple[MeasuredSettings, ...]
    unmeasured: tuple[UnmeasuredSettings, ...]
    time_budget: float
    measured_at: str

    def best(self) -> MeasuredSettings | None:
        """Return the fastest settings if they beat eager by more than the spread of the measurements, else None."""
        faster = [row for row in self.measured if row.faster() and row.step.median < self.eager.median]
        return max(faster, key=lambda row: row.gain.median, default=None)

    def recommendation(self) -> str:
        best = self.best()
        if best is not None:
            setup = f"backend {best.settings.backend}, mode {best.settings.mode}, scope {best.settings.scope}"
            return f"Best: {setup}, {best.gain.median:.2f} times as fast as uncompiled. The MODEL is compiled this way."
        if self.measured:
            return "Nothing was clearly faster than uncompiled, so the MODEL stays uncompiled."
        return "Nothing but the uncompiled model could be measured, so the MODEL stays uncompiled."

    def complete(self, time_budget: float) -> bool:
        """Return True if measuring again within this budget would add nothing."""
        return bool(self.measured) and (time_budget <= self.time_budget or all(u.failed for u in self.unmeasured))

    def text(self) -> str:
        """Format the table and the recommendation."""
        head = f"{self.key['class']}, {self.key['size']}; {self.key['device']}, torch {self.key['torch']}"
        lines = [head, *self._table(), self.recommendation()]
        lines += [f"Failed: {label(u.settings)}: {u.reason}" for u in self.unmeasured if u.failed]
        lines += [f"Left out: {label(u.settings)}: {u.reason}" for u in self.unmeasured if not u.failed]
        lines += [f"{label(row.settings)}: {note}" for row in self.measured for note in row.notes]
        return "\n".join([*lines, f"Measured on {self.measured_at}."])

    def _table(self) -> list[str]:
        rows = [("settings", "ms/step", "gain", "spread", "compile s", "memory MiB", "pays after")]
        rows.append(("eager", f"{self.eager.median:.1f}", "", "", "", "", ""))
        for row in self.measured:
            steps = row.pays_after()
            rows.append(
                (
                    label(row.settings),
                    f"{row.step.median:.1f}",
                    f"{row.gain.median:.2f}x",
                    f"{row.gain.half:.2f}",
                    f"{row.compile_seconds:.1f}",
                    str(row.memory_mib),
                    "-" if steps is None else f"{steps} steps",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]

    def facts(self) -> dict[str, Any]:
        """Export numbers and texts for JSON."""
        best = self.best()
        return {
            "key": self.key,
            "best": None if best is None else asdict(best.settings),
            "recommendation": self.recommendation(),
            "eager": asdict(self.eager),
            "measured": [
                asdict(row) | {"label": label(row.settings), "pays_after": row.pays_after()} for row in self.measured
            ],
            "unmeasured": [row.plain() | {"label": label(row.settings)} for row in self.unmeasured],
            "time_budget": self.time_budget,
            "measured_at": self.measured_at,
        }


def label(settings: CompileSettings) -> str:
    """Format settings such as "stack, default"; a backend other than inductor replaces the mode."""
    return f"{settings.scope}, {settings.mode if settings.backend == 'inductor' else settings.backend}"


def result_key(patcher: ModelPatcher, inputs: StepInputs) -> dict[str, str]:
    """Return the conditions of a result: model class, number formats, GPU, torch, size. No weight is read."""
    base: Any = patcher.model
    model = base.diffusion_model
    dtypes = ", ".join(sorted({_number_format(p) for p in model.parameters()}))
    device = patcher.load_device
    return {
        "class": type(base).__name__,
        "config": _digest(json.dumps(base.model_config.unet_config, sort_keys=True, default=str)),
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "dtypes": f"{dtypes}, computing in {str(base.get_dtype_inference()).removeprefix('torch.')}",
        "loading": f"{type(patcher).__name__}, {patcher.model_size() // 2**20} MiB",  # swapped blocks count by slots
        "attention": optimized_attention.__name__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(device),
        "torch": torch.__version__,
        "size": inputs.size,
        "prompt": inputs.prompt,
        # Only if it rules out some settings, so that stored results of other machines still match.
        **({} if no_cuda_graphs(device) is None else {"allocator": str(memory_allocator(device))}),
    }


def _number_format(weight: Tensor) -> str:
    """Return a quantised weight's layout, which selects kernels and is not in its dtype, else the dtype."""
    quantised = isinstance(weight, QuantizedTensor)
    return quantised_layout(weight) if quantised else str(weight.dtype).removeprefix("torch.")


def _processor(device: torch.device) -> str:
    name = platform.processor() or platform.machine()
    return f"{name}, {quantity(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else device.type


def file_name(key: dict[str, str]) -> str:
    return f"{key['class']}-{_digest(json.dumps(key, sort_keys=True))}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(result: TuneResult) -> str:
    plain = asdict(result) | {"unmeasured": [row.plain() for row in result.unmeasured]}
    return json.dumps({"format": FORMAT, **plain}, indent=1, allow_nan=False)


def read_result(path: Path, key: dict[str, str]) -> TuneResult | None:
    """Read the stored result for `key`; None if there is none.

    Raises ValueError, in a sentence, for a file of another key or version, or a damaged one.
    """
    try:
        content = read_json(path, TUNE_RESULT)
        if content["format"] != FORMAT or content["key"] != key:
            raise ValueError("it is of another version or for another model")
        result = TuneResult(
            key=key,
            eager=_spread(content["eager"]),
            measured=tuple(_measured(row) for row in content["measured"]),
            unmeasured=tuple(
                UnmeasuredSettings(_settings(row["settings"]), str(row["why"]), bool(row["failed"]))
                for row in content["unmeasured"]
            ),
            time_budget=float(content["time_budget"]),
            measured_at=str(content["measured_at"]),
        )
        result.text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"The remembered result {path.name} can't be used ({cause}), so everything is measured again."
        ) from error
    return result


def _measured(row: dict[str, Any]) -> MeasuredSettings:
    fields = row | {
        "settings": _settings(row["settings"]),
        "step": _spread(row["step"]),
        "gain": _spread(row["gain"]),
        "notes": tuple(map(str, row["notes"])),
    }
    fields["settings"].check()
    return MeasuredSettings(**fields)


def _settings(fields: dict[str, Any]) -> CompileSettings:
    """Read stored settings; candidates have no overrides, which name blocks."""
    return CompileSettings(**(fields | {"overrides": ()}))


def _spread(fields: dict[str, Any]) -> Quartiles:
    return Quartiles(float(fields["low"]), float(fields["median"]), float(fields["high"]))
