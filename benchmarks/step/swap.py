"""Cost of block swap in a step, as a table."""

from collections.abc import Sequence
from statistics import median

from figures import markdown_table, ratio_by_round, spread, times_the_least
from processes import Measured

GB = 1e9
ON_CPU = """Block swap on a CPU streams from host memory to host memory: only the counts mean anything, of blocks, of
copies and of bytes. The seconds above hold copies that nothing hides."""
ON_GPU = """Every contestant of this table is compiled. The link is what large copies from page-locked memory reach
while nothing else runs. While it copies: bytes by the time that the device spent on copies, in one step under the
profiler; over the step: bytes by the seconds of the step. The least time of a step is the greater one of the step that
swaps nothing, in the same round, and of the bytes by the link."""


def swap_report(field_of: Sequence[Measured], cpu: bool) -> str:
    """field_of: the compiled contestants that ran, that which swaps nothing among them if it did."""
    resident = next((c for c in field_of if not c.spec["swap"]), None)
    header = ["blocks swapped", "copies a step", "GB copied a step"]
    if not cpu:
        header += ["seconds", "times the resident step", "in all, by the driver, MiB", "link, GB/s"]
        header += ["while it copies, GB/s", "over the step, GB/s", "times the least time"]
    rows = [_counts(c) + ([] if cpu else _times(c, resident)) for c in field_of]
    return f"{markdown_table(header, rows)}\n\n{ON_CPU if cpu else ON_GPU}"


def _counts(c: Measured) -> list[str]:
    """Of the last round, in which the copies of the first step play no part."""
    last = c.rounds[-1]
    row = [f"{last['blocks_swapped']} ({c.spec['swap']:g} %)"]
    return [*row, f"{last.get('copies', 0):g}", f"{last.get('copied_bytes', 0) / GB:.3f}"]


def _times(c: Measured, resident: Measured | None) -> list[str]:
    seconds = c.round_values("seconds")
    row = [spread(sum(seconds, [])).text(3)]
    other = resident is not None and resident is not c
    row.append(ratio_by_round(seconds, resident.round_values("seconds")).text() if resident and other else "")
    row.append(f"{max(reply['driver_mib'] for reply in c.rounds):.0f}")
    if not c.spec["swap"]:
        return [*row, "", "", "", ""]
    last = c.rounds[-1]
    copying = c.memory.get("copying_seconds")
    row += [f"{last['link'] / GB:.1f}", f"{c.memory['copied_bytes'] / copying / GB:.1f}" if copying else ""]
    row.append(f"{last['copied_bytes'] / median(sum(seconds, [])) / GB:.1f}")
    least = last["copied_bytes"] / last["link"]
    row.append(times_the_least(seconds, resident.round_values("seconds"), least).text() if resident and other else "")
    return row
