"""Time of the list of all runs, as the sidebar asks a server for it: 5,000 runs of 2,000 steps each.

Run: COMFYUI_PATH=… python benchmarks run_list > benchmarks/results/run_list.md
Needs ComfyUI's environment and 700 MB in the folder for temporary files. Seconds are those of one machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from with_pack import comfy_server, dev  # noqa: E402


def write_runs(root: Path, count: int, steps: int) -> None:
    """Runs of twenty each of a name, with the record that Train LoRA writes."""
    lines = [{"kind": "start"}, {"kind": "begin", "step": 0, "loss": [], "validation": []}]
    lines += [{"kind": "step", "step": n, "loss": 0.5 + 1 / n, "rate": 1e-4} for n in range(1, steps + 1)]
    lines.append({"kind": "end", "status": "finished", "step": steps, "text": "", "seconds": 900})
    progress = "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines)
    for number in range(count):
        name = f"lora{number // 20:03d}"
        folder = root / f"{name} ({number % 20 + 1:03d})"
        (folder / f"{name}_steps").mkdir(parents=True)
        facts = {"key": f"{number:040x}", "output_name": name, "model": "flux1-dev.safetensors", "steps": steps}
        (folder / "run.json").write_text(json.dumps(facts | {"started": "2026-11-24T00:00:00+00:00"}, indent=1))
        (folder / "progress.jsonl").write_text(progress)
        (folder / f"{name}.safetensors").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        write_runs(Path(base, "output", "loras"), args.runs, args.steps)
        with comfy_server.ComfyServer(Path(base), dev.find_comfyui()) as server:
            process = psutil.Process(server.process.pid)

            def seconds(*paths: str) -> tuple[float, float]:
                """By the clock, and of the server's processor."""
                begin, used = time.perf_counter(), sum(process.cpu_times()[:2])
                for path in paths:
                    server.get(path)
                return time.perf_counter() - begin, sum(process.cpu_times()[:2]) - used

            first = seconds("/tessera/runs")
            repeated = min(seconds("/tessera/runs") for _ in range(5))
            filtered = min(seconds("/tessera/runs?filter=lora1%20flux&page=2") for _ in range(5))
            runs = server.get("/tessera/runs")["runs"]
            assert len(runs) == min(200, args.runs)
            rows = seconds(*(f"/tessera/runs/{run['id']}?points=60" for run in runs[:10]))
    print("# The list of all runs\n")
    print(
        f"{args.runs:,} runs of {args.steps:,} steps each, on a disk whose files are in memory, over HTTP, on "
        f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.0f} by other programs: the processor counts.\n"
    )
    print("| asked | seconds | of the processor |\n|---|---:|---:|")
    for request, (clock, used) in [
        ("the first page, right after the server's start", first),
        ("the first page again, the least of 5", repeated),
        ("the third page of those that two words find, the least of 5", filtered),
        ("state and curve of ten rows, one after the other", rows),
    ]:
        print(f"| {request} | {clock:.2f} | {used:.2f} |")
    print("\nMade by `python benchmarks run_list > benchmarks/results/run_list.md`.")


if __name__ == "__main__":
    main()
