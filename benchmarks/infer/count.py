"""Count torch's compilations by dynamo's own records, not by the pack's reports."""

from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics


class CompileCount:
    """Counts compilations since the last call of `since`. Call it often: torch keeps only the last 64 compilations."""

    def __init__(self) -> None:
        self._last: Any = None
        self._graphs = self._breaks = 0
        self.since()

    def since(self) -> dict[str, float]:
        """graphs: dynamo's count of unique graphs; recompiles: graphs made because those at hand did not fit; seconds:
        of all compiling, tracing included; breaks: graphs that ended early; over_limit: how often dynamo refused to
        make a graph, so that the part runs eager."""
        entries = get_compilation_metrics()
        last = next((i for i, entry in enumerate(entries) if entry is self._last), -1)
        new = entries[last + 1 :]
        self._last = entries[-1] if entries else None
        graphs, self._graphs = self._graphs, counters["stats"]["unique_graphs"]
        breaks, self._breaks = self._breaks, sum(counters["graph_break"].values())
        refused = [e for e in new if "recompile limit" in str(e.fail_reason) or "recompile_limit" in str(e.fail_reason)]
        return {
            "graphs": self._graphs - graphs,
            "recompiles": sum(1 for e in new if e.recompile_reason and e.has_guarded_code and e.graph_op_count),
            "seconds": sum(e.duration_us or 0 for e in new) / 1e6,
            "breaks": self._breaks - breaks,
            "over_limit": len(refused),
        }
