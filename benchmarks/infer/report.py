"""The inference benchmark's figures as tables."""

from collections.abc import Sequence
from typing import Any

from figures import markdown_table, ratio_by_round, spread
from processes import Measured

EAGER, CORE = "eager", "core TorchCompileModel"


def total(replies: Sequence[dict[str, Any]], figure: str) -> float:
    """Of all steps of these samples: one of the figures that the count of compilations gives."""
    return sum(step[figure] for reply in replies for step in reply["compiled"])


def per_step(contestant: Measured, figure: str, steps: int) -> list[list[float]]:
    return [[reply[figure] / steps] for reply in contestant.rounds]


def find(field_of: Sequence[Measured], name: str) -> Measured | None:
    return next((c for c in field_of if c.name == name and c.rounds), None)


def ended(field_of: Sequence[Measured]) -> list[str]:
    return [f"{c.name} is not in the tables: {c.ended}." for c in field_of if c.ended]


def ratio(numerator: Measured | None, denominator: Measured, figure: str, steps: int) -> str:
    if numerator is None or numerator is denominator:
        return ""
    return ratio_by_round(per_step(numerator, figure, steps), per_step(denominator, figure, steps)).text()


def speed_report(field_of: Sequence[Measured], steps: int, cpu: bool) -> str:
    run = [c for c in field_of if c.rounds]
    eager, core = find(run, EAGER), find(run, CORE)
    figure, unit = ("cpu_seconds", "CPU seconds") if cpu else ("seconds", "seconds")
    header = ["a step", "seconds"]
    if cpu:
        header.append("CPU seconds")
    header += [f"eager's {unit} are … times these", f"core's {unit} are … times these"]
    rows = []
    for c in run:
        row = [c.name, spread(sum(per_step(c, "seconds", steps), [])).text(3)]
        if cpu:
            row.append(spread(sum(per_step(c, "cpu_seconds", steps), [])).text(3))
        rows.append([*row, ratio(eager, c, figure, steps), ratio(core, c, figure, steps)])
    return "\n\n".join([markdown_table(header, rows), markdown_table(*cost_table(run, core, cpu)), *ended(field_of)])


def cost_table(run: Sequence[Measured], core: Measured | None, cpu: bool) -> tuple[list[str], list[list[str]]]:
    """Cost of compiling: in the first picture, from an empty cache. Later pictures must compile nothing."""
    memory = "peak_mib" if cpu else "driver_mib"
    header = ["compiling", "graphs", "graph breaks", "seconds", "of core's", "CPU seconds of the first picture"]
    header += ["graphs in later pictures", "peak above the loaded model, MiB" if cpu else "in all, by the driver, MiB"]
    header.append("deviation from eager")
    rows = []
    for c in run:
        seconds = total([c.first], "seconds")
        core_ratio = (
            f"{seconds / total([core.first], 'seconds'):.2f}" if core not in (None, c) and c.name != EAGER else ""
        )
        rows.append(
            [
                c.name,
                str(total([c.first], "graphs")),
                str(total([c.first], "breaks")),
                f"{seconds:.0f}",
                core_ratio,
                f"{c.first['cpu_seconds']:.0f}",
                str(total([c.memory, *c.rounds], "graphs")),
                f"{max(reply[memory] for reply in c.rounds):.0f}",
                f"{c.first['deviation']:.0e}" if "deviation" in c.first else "",
            ]
        )
    return header, rows
