"""What torch.compile did between two points in time. The private names of torch that this needs are all here."""

from dataclasses import dataclass

from torch._dynamo.utils import compilation_time_metrics, counters


@dataclass(frozen=True)
class CompileCounts:
    """graphs: compiled since the watch began; graph_breaks likewise; seconds: spent compiling, tracing included."""

    graphs: int
    graph_breaks: int
    seconds: float


class CompileWatch:
    """Counts from dynamo's own counters, relative to the moment it was made."""

    def __init__(self) -> None:
        self._start = self._totals()

    @staticmethod
    def _totals() -> CompileCounts:
        timed = ("_compile.compile_inner", "backward._backward_impl")
        seconds = sum(sum(compilation_time_metrics.get(name, ())) for name in timed)
        return CompileCounts(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), seconds)

    def counts(self) -> CompileCounts:
        now = self._totals()
        return CompileCounts(
            now.graphs - self._start.graphs,
            now.graph_breaks - self._start.graph_breaks,
            now.seconds - self._start.seconds,
        )
