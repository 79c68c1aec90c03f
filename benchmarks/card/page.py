"""Results of one part as JSON and as a Markdown page, both rewritten after every case."""

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

OK = "ok"
FAILED = "failed"
SKIPPED = "skipped"
CUT = "cut off"


class Report:
    """Findings of a part so far.

    base: path of its files without a suffix: .json, .md and .log.
    planned: number of cases.
    """

    def __init__(self, base: Path, part: str, machine: dict[str, Any], command: str):
        self.part = part
        self.machine = machine
        self.command = command
        self.json_file, self.page_file = (base.with_name(f"{base.name}.{kind}") for kind in ("json", "md"))
        self.log = base.with_name(f"{base.name}.log")
        self.planned, self.finished = 0, False
        self.results: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.began = datetime.now(timezone.utc)
        base.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        self._write()

    def add(self, name: str, seconds: float, result: dict[str, Any]) -> None:
        """Take one case's result and write both files."""
        self.results.append({"case": name, "seconds": round(seconds, 2), **result})
        self.lines.append(f"{result['state']:8s} {name}: {result['text']} [{seconds:.1f} s]")
        self._write()

    def finish(self) -> None:
        self.finished = True
        self._write()

    def figures(self) -> dict[str, Any]:
        """Figures by case, for those that follow."""
        return {r["case"]: r["figures"] for r in self.results if r.get("figures")}

    def count(self, state: str) -> int:
        return sum(r["state"] == state for r in self.results)

    def summary(self) -> str:
        states = ", ".join(f"{n} {state}" for state in (OK, FAILED, SKIPPED, CUT) if (n := self.count(state)))
        text = f"{len(self.results)} of {self.planned} cases: {states or 'none yet'}"
        return text if self.finished else f"{text}. Stopped before its end"

    def _write(self) -> None:
        content = {"part": self.part, "command": self.command, "began": self.began.isoformat(timespec="seconds")}
        content |= {
            "machine": self.machine,
            "planned": self.planned,
            "finished": self.finished,
            "results": self.results,
        }
        _replace(self.json_file, json.dumps(content, indent=1))
        _replace(self.page_file, page(self))


def page(report: Report) -> str:
    """Return the page: facts of the machine, failures, tables, then the rest folded up."""
    facts = {
        "card": report.machine.get("card"),
        "memory": f"{report.machine.get('memory_gib', 0):.1f} GiB",
        "driver": report.machine.get("driver"),
        **{name: report.machine.get(name) for name in ("torch", "triton", "comfyui", "python", "system", "commit")},
        "RAM": f"{report.machine.get('ram_gib', 0):.0f} GiB",
        "began": report.began.isoformat(timespec="seconds"),
    }
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)
    parts = [f"# {report.part} on {report.machine.get('card')}", f"`{report.command}`", head, f"{report.summary()}."]
    plain = [r for r in report.results if not r.get("row")]
    if failed := [r for r in report.results if r["state"] in (FAILED, CUT)]:
        parts.append("## Failed or cut off\n\n" + "\n".join(_line(r) for r in failed))
    parts += _tables(report.results)
    if skipped := [r for r in plain if r["state"] == SKIPPED]:
        parts.append("## Skipped\n\n" + "\n".join(_line(r) for r in skipped))
    if passed := [r for r in plain if r["state"] == OK]:
        parts.append(_folded(f"{len(passed)} passed", "\n".join(_line(r) for r in passed)))
    parts += [_folded(r["case"], f"```\n{r['details']}\n```") for r in report.results if r.get("details")]
    return "\n\n".join(parts) + "\n"


def _line(result: dict[str, Any]) -> str:
    return f"- {result['case']}: {result['text']}"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _tables(results: list[dict[str, Any]]) -> Iterator[str]:
    """One table of all results that have the same columns."""
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        if result.get("row"):
            tables.setdefault(tuple(result["row"]), []).append(result)
    for columns, rows in tables.items():
        lines = [("", *columns), ("---", *["---:"] * len(columns))]
        lines += [(r["case"], *r["row"].values()) for r in rows]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _replace(file: Path, text: str) -> None:
    """Write whole or not at all: the command may be stopped at any time."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)
