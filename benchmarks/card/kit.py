"""Shared by the scripts: the pack, ComfyUI and tiny models on the path, a time limit, one line for each check."""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

STARTED = time.monotonic()
PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / "benchmarks")]
OUT = Path(os.environ.get("OUT") or Path(tempfile.gettempdir()) / "card-out")
OUT.mkdir(parents=True, exist_ok=True)


def set_up(device: str):
    """Load the pack as `tessera`, without ComfyUI's node API, and return tests/tiny."""
    from comfyui import set_up_comfyui

    set_up_comfyui(device)
    import tiny

    return tiny


class Checks:
    """ok/FAIL lines; what does not run is a line too, with the place in the pack where it broke."""

    def __init__(self, limit: float):
        self.limit, self.lines, self.failed, self.skipped = limit, [], 0, 0

    def left(self) -> float:
        return self.limit - (time.monotonic() - STARTED)

    def show(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def run(self, name: str, check, need: float = 0.0) -> None:
        """Run check() -> (passed, text) and show its line. need: seconds that have to be left."""
        if self.left() < need:
            self.skipped += 1
            self.show(f"skip  {name}: {self.left():.0f} s left")
            return
        started = time.monotonic()
        try:
            passed, text = check()
        except Exception as error:  # noqa: BLE001
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
            ours = [f for f in frames if str(PROJECT) in f.filename] or frames
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            first = (str(error).strip().splitlines() or [""])[0][:220]
            passed, text = False, f"{type(error).__name__} at {where}: {first}"
            with (OUT / "errors.txt").open("a") as file:
                file.write(f"\n===== {name}\n" + "".join(traceback.format_exception(error)))
        self.failed += not passed
        self.show(f"{'ok  ' if passed else 'FAIL'}  {name}: {text} [{time.monotonic() - started:.1f} s]")

    def end(self, title: str) -> None:
        ran = sum(line[:4] in ("ok  ", "FAIL") for line in self.lines)
        self.show(
            f"==== {title}: {ran} ran, {self.failed} failed, {self.skipped} skipped, {time.monotonic() - STARTED:.0f} s"
        )
        (OUT / f"{title}.txt").write_text("\n".join(self.lines))
