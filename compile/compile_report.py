"""Compile report: counts, causes and timings of each region."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .report.events import CompileEvent, Recompile, recording
from .report.explain import advice, explain_break
from .report.graph_breaks import Break
from .report.timing import Speed, memory_beside_tensors
from .report.torch_private import unavailable
from .settings import CompileOptions

MIB = 2**20


@dataclass(frozen=True)
class CompileCounts:
    """Counts over all regions.

    graphs: number of graphs.
    graph_breaks: number of places where a graph ended early.
    seconds: spent compiling, tracing included; 0 on a torch that does not report it.
    """

    graphs: int
    graph_breaks: int
    seconds: float


def format_break(place: Break) -> str:
    """Format the place of a graph break, its line of code, and the cause in plain words."""
    location = f"{Path(place.file).name}:{place.line} in {place.function}"
    return f"{location}: `{place.source}`. {explain_break(place.detail)}"


class RegionReport:
    """Record of one region since its creation."""

    def __init__(self, name: str, label: str, options: CompileOptions):
        self.name = name
        self.label = label
        self.options = options
        self.notes: list[str] = []
        self.events: list[CompileEvent] = []
        self.speeds: list[Speed] = []
        self.memory_added = 0
        self.compiled_calls = 0
        self.eager_calls = 0

    def count_eager_call(self) -> None:
        self.eager_calls += 1

    def drop_failed_call(self) -> None:
        """Count a compiled call no longer, since it failed."""
        self.compiled_calls -= 1

    def change_options(self, options: CompileOptions) -> None:
        """Record that the region is compiled with these options from now on."""
        self.options = options

    def watch(self, device: torch.device | None = None, is_backward: bool = False) -> AbstractContextManager[recording]:
        """Record one call of the compiled callable and count it; `drop_failed_call` counts it no longer.

        device: for measuring the memory that compiling takes.
        is_backward: record backwards, which are not counted.
        """
        # Counted here: a method for it would be one more Python call for each block.
        self.compiled_calls += not is_backward
        record = recording(self.name, self.events)
        return record if device is None or self.events else self._weigh(record, device)

    @contextmanager
    def _weigh(self, record: recording, device: torch.device) -> Iterator[recording]:
        """Measure the memory that the first compiling takes."""
        bytes_before = memory_beside_tensors(device)
        try:
            with record:
                yield record
        finally:
            if record.event is not None:
                self.memory_added = max(0, memory_beside_tensors(device) - bytes_before)

    def counts(self) -> CompileCounts:
        breaks = {b for event in self.events for b in event.breaks or ()}
        return CompileCounts(
            sum(event.graphs for event in self.events),
            len(breaks),
            sum(event.seconds or 0.0 for event in self.events),
        )

    def breaks(self) -> list[str]:
        """List graph breaks, each place once."""
        places = dict.fromkeys(b for event in self.events for b in event.breaks or ())
        return [format_break(place) for place in places]

    def recompiles(self) -> list[str]:
        """List the failed guard and the advice for each time that no graph fitted."""
        recompiles = [r for event in self.events for r in event.recompiles or ()]
        return [self._recompile(r) for r in recompiles if r.guards]

    def _recompile(self, recompile: Recompile) -> str:
        guard = recompile.guards[0]
        if self.options.dynamic == "true" and "size mismatch" in guard and "expected 1," in guard:
            # torch makes a size of one a constant
            return f"{guard}. Batch 1 and larger batches have a graph each; further sizes need none."
        return f"{guard}. {advice(guard)}"

    def facts(self) -> dict[str, Any]:
        """Export numbers and texts for JSON."""
        counts = self.counts()
        return {
            "region": self.label,
            "how": asdict(self.options),
            "graphs": counts.graphs,
            "compile_seconds": round(counts.seconds, 2),
            "tracing_seconds": round(sum(event.tracing_seconds or 0.0 for event in self.events), 2),
            "cache_hits": _sum(self.events, "fx_hits"),
            "cache_misses": _sum(self.events, "fx_misses"),
            "autograd_cache_hits": _sum(self.events, "aot_hits"),
            "autograd_cache_misses": _sum(self.events, "aot_misses"),
            "not_cacheable": _sum(self.events, "bypassed"),
            "graph_breaks": self.breaks(),
            "recompiles": self.recompiles(),
            "speed": [asdict(speed) | {"gain": round(speed.gain, 3)} for speed in self.speeds],
            "memory_added_mib": round(self.memory_added / MIB),
            "compiled_calls": self.compiled_calls,
            "eager_calls": self.eager_calls,
            "notes": list(self.notes),
        }


def _sum(events: Sequence[CompileEvent], name: str) -> int:
    return sum(getattr(event, name) or 0 for event in events)


@dataclass(frozen=True)
class CompileReport:
    """Report of all regions of one compiled model, or of one training run.

    heading: first line, which names the settings.
    regions: report of each region.
    notes: sentences for the user.
    """

    heading: str
    regions: list[RegionReport]
    notes: list[str] = field(default_factory=list)

    def counts(self) -> CompileCounts:
        counts = [region.counts() for region in self.regions]
        return CompileCounts(
            sum(c.graphs for c in counts), sum(c.graph_breaks for c in counts), sum(c.seconds for c in counts)
        )

    def facts(self) -> dict[str, Any]:
        counts = self.counts()
        return {
            "heading": self.heading,
            "graphs": counts.graphs,
            "graph_breaks": counts.graph_breaks,
            "compile_seconds": round(counts.seconds, 2),
            "notes": [*self.notes, *unavailable()],
            "regions": [region.facts() for region in self.regions],
        }

    def text(self) -> str:
        """Format the report as a table and sentences."""
        if not any(region.events or region.compiled_calls or region.eager_calls for region in self.regions):
            return "\n".join([self.heading, *self.notes, "Nothing was compiled yet: queue a sampler behind it first."])
        lines = [self.heading, *table(self.regions)]
        for region in self.regions:
            lines += [f"{region.label}: graph break at {text}" for text in region.breaks()]
        lines += [f"Compiled again: {text}" for text in self._recompiles()]
        return "\n".join([*lines, *self.notes, *unavailable()])

    def _recompiles(self) -> list[str]:
        """List each cause once, with the regions that it affected."""
        by_cause: dict[str, list[str]] = {}
        for region in self.regions:
            for text in region.recompiles():
                by_cause.setdefault(text, []).append(region.label)
        return [f"{_first_titles(titles)}: {text}" for text, titles in by_cause.items()]


HEADINGS = (
    "region",
    "graphs",
    "compile s",
    "tracing s",
    "cache hit/miss",
    "calls",
    "eager",
    "ms",
    "eager ms",
    "gain",
    "MiB",
)


def table(regions: Sequence[RegionReport]) -> list[str]:
    """Format a line of headings and one for each region, in columns of equal width."""
    rows = [HEADINGS]
    for region in regions:
        facts = region.facts()
        hits = facts["cache_hits"] + facts["autograd_cache_hits"]
        misses = facts["cache_misses"] + facts["autograd_cache_misses"]
        speed = region.speeds[-1] if region.speeds else None
        rows.append(
            (
                region.label,
                str(facts["graphs"]),
                f"{facts['compile_seconds']:.1f}",
                f"{facts['tracing_seconds']:.1f}",
                f"{hits}/{misses}",
                str(region.compiled_calls),
                str(region.eager_calls),
                f"{speed.compiled_ms:.2f}" if speed else "-",
                f"{speed.eager_ms:.2f}" if speed else "-",
                f"{speed.gain:.2f}x" if speed else "-",
                str(facts["memory_added_mib"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return [
        row[0].ljust(widths[0]) + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _first_titles(titles: list[str]) -> str:
    """Join the first three titles, each once, and count the rest."""
    distinct = list(dict.fromkeys(titles))
    rest = f" and {len(distinct) - 3} more" if len(distinct) > 3 else ""
    return ", ".join(distinct[:3]) + rest
