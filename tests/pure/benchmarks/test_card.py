"""`dev.py card`: its arguments, its cases, what it writes, and what stops it. The processes are stand-ins here."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from card import command, kernels
from card.case import Case, Group
from card.cases import PARTS, groups
from card.page import CUT, FAILED, OK, SKIPPED, Report
from card.plan import plan

dev = sys.modules["tessera_dev"]
H100 = {"card": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "ram_gib": 128.0, "ram_free_gib": 120.0, "torch": "2.14.0"}


def machine(card: float, ram: float = 120.0) -> dict[str, Any]:
    return H100 | {"memory_gib": card, "ram_free_gib": ram}


# Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "smok"], "--part is smok; take one of smoke, flux, swap, nodes, wan, others."),
        (["--device", "cpu", "--size", "full"], "--size is full, which takes a GPU; with --device cpu take tiny."),
        (["--part", "flux", "--limit", "0"], "--limit is 0; take at least a second."),
        (["--minutes", "0"], "--minutes is 0; take more than 0 and less than a day."),
        (["--limit", "60"], "--limit is for each --part; give --minutes for all together."),
        (["--part", "flux", "--minutes", "5"], "--minutes is for all parts together; leave out --part"),
    ],
)
def test_bad_arguments_end_in_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert said in capsys.readouterr().err


def test_twelve_minutes_of_all_parts_unless_one_is_named():
    assert (command.parse([]).part, command.parse([]).minutes) == ([], 12) and command.parse([]).size == "full"
    assert command.parse(["--minutes", "4.5"]).minutes == 4.5
    assert command.parse(["--part", "swap", "flux", "swap"]).part == ["swap", "flux"]
    assert command.parse(["--device", "cpu"]).size == "tiny"


@pytest.fixture
def runs(monkeypatch) -> list[tuple[str, Path]]:
    """Interpreter and ComfyUI that `dev.py card` would run with."""
    calls: list[tuple[str, Path]] = []
    monkeypatch.setattr(command, "run", lambda args, python, comfyui: calls.append((python, comfyui)))
    monkeypatch.setattr(dev, "setup", lambda: ("its own python", Path("its own ComfyUI")))
    monkeypatch.delenv("TESSERA_PYTHON", raising=False)
    return calls


def comfyui(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfy" / "sd.py").touch()
    return folder.resolve()


def test_a_checkout_runs_with_the_environment_of_its_own(runs):
    dev.card([])
    assert runs == [("its own python", Path("its own ComfyUI"))]


def test_a_given_comfyui_runs_with_the_python_that_is_there(runs, tmp_path):
    dev.card(["--comfyui", str(comfyui(tmp_path / "there"))])
    assert runs == [(sys.executable, (tmp_path / "there").resolve())]


def test_a_pack_inside_a_comfyui_runs_with_that_and_its_python(runs, tmp_path, monkeypatch):
    inside = comfyui(tmp_path / "ComfyUI")
    monkeypatch.setattr(dev, "ROOT", inside / "custom_nodes" / "pack")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    dev.card([])
    assert runs == [(sys.executable, inside)]


def test_a_folder_that_is_no_comfyui_is_refused_before_anything_runs(runs, tmp_path):
    with pytest.raises(
        SystemExit, match="--comfyui is .*, but there is no ComfyUI in it; give the folder with main.py."
    ):
        dev.card(["--comfyui", str(tmp_path)])
    assert not runs


# Cases


def test_every_name_stands_once_on_its_page():
    for part, device in product(PARTS, ("cuda", "cpu")):
        names = [c.name for g in groups(part, device, "full" if device == "cuda" else "tiny", H100) for c in g.cases]
        assert names and len(names) == len(set(names))


# The plan


def planned(machine: dict[str, Any]) -> list[str]:
    return [case.name for group in plan("cuda", "full", machine) for case in group.cases]


def test_the_plan_takes_what_no_card_has_shown_in_the_order_of_its_worth():
    names = planned(H100)
    order = [
        "train: compiled, none, native",
        "rates: link",
        "flux, compiled, none",
        "flux, compiled, full, 100 % swapped",
        "flux, compiled, full, 50 % swapped",
        "flux put into fp8, fp8 products, compiled, full",
        "flux put into int8, int8 products, compiled, full",
        "sample: compiled, reduce-overhead, native",
        "nodes: try it",
        "nodes: Block Swap with a LoRA",
        "nodes: Compile Model, reduce-overhead",
        "wan 14B, compiled, full",
        "qwen_image, compiled, full",
        "klein, core's Train LoRA",
        "KSampler, ComfyUI's dynamic VRAM, half the model's memory",
        "nodes: Compile Model, max-autotune",
    ]
    assert [name for name in names if name in order] == order
    assert len(names) == len(set(names))


def test_the_plan_holds_all_of_smoke_and_of_the_nodes():
    names = planned(H100)
    for part in ("smoke", "nodes"):
        assert {case.name for group in groups(part, "cuda", "full", H100) for case in group.cases} <= set(names)


def test_a_real_model_is_made_in_one_process_of_the_plan():
    model_groups = [group for group in plan("cuda", "full", H100) if group.spec["kind"] == "steps"]
    assert (
        len({group.process() for group in model_groups})
        == len(model_groups)
        == len({group.spec["model"] for group in model_groups})
        == 5
    )
    assert all(group.timed for group in model_groups)


def test_a_plan_of_a_small_card_swaps_to_fit():
    assert "flux, compiled, full, swapped to fit" in planned(machine(24.0))


# What has room


def flux(hardware: dict[str, Any]) -> list[Case]:
    return [c for g in groups("flux", "cuda", "full", hardware) for c in g.cases if c.name.startswith("flux, ")]


def test_all_of_flux_fits_an_h100_but_what_eager_keeps():
    missing = {c.name: c.missing for c in flux(H100) if c.missing or "blocks" in c.settings}
    assert missing == {"flux, eager, none, swapped to fit": ""}


def test_cases_that_do_not_fit_are_swapped_or_left_out_with_a_sentence():
    by_name = {c.name: c for c in flux(machine(24.0))}
    assert by_name["flux, compiled, full, swapped to fit"].settings["blocks"] == -1
    assert by_name["flux, compiled, none"].missing == "needs about 45 GB, this card has 26"


def test_a_card_of_8_gb_trains_on_smaller_pictures_with_swap():
    case = flux(machine(8.0))[0]
    assert case.name == "flux, compiled, full, swapped to fit" and case.settings["side"] == 512 and not case.missing


def test_a_machine_with_little_ram_says_so():
    assert flux(machine(79.1, ram=16.0))[0].missing == "needs about 27 GB of RAM, 17 are free"


# A part

WORKER = """
import json, os, sys, time
spec = json.loads(sys.argv[1])
if spec["kind"] == "facts":
    print(json.dumps({"card": "", "torch": "2.14.0", "comfyui": "0.30.0"}), flush=True)
    sys.exit()
print("{}", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    name, how = asked["name"], asked["how"]
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        print("killed by the system", file=sys.stderr, flush=True)
        os._exit(9)
    reply = {"state": how.get("state", "ok"), "text": f"from {os.getpid()}", "spoiled": name == "spoils"}
    if name == "counts":
        kept = json.loads(open(how["file"]).read())
        reply["text"] = f"{len(kept['results'])} results, finished {kept['finished']}"
    if name == "measures":
        reply |= {"figures": {"seconds": 0.5}, "row": {"s a step": "0.500"}, "details": "kernels"}
    if name == "reads":
        reply["text"] = str(asked["before"]["measures"]["seconds"])
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(command, "WORKER", (str(tmp_path / "worker.py"),))


def run_part(folder: Path, *cases: Case, limit: float = 60.0) -> tuple[Report, int]:
    report = Report(folder / "out" / "card_today_flux", "flux", H100, "python dev.py card --part flux")
    args = command.parse([])
    return report, run_groups(args, report, [Group({"kind": "stand-in"}, cases)], limit)


def run_groups(args: Any, report: Report, planned: list[Group], limit: float = 60.0) -> int:
    return command.run_groups(args, report, planned, time.monotonic() + limit, sys.executable, dict(os.environ))


def test_the_files_are_written_after_every_case_and_say_what_is_missing(stand_in, tmp_path):
    file = tmp_path / "out" / "card_today_flux.json"
    counts = Case("counts", {"file": str(file)})
    report, failed = run_part(tmp_path, Case("measures", {}), Case("reads", {}), counts, Case("last", {}))
    record = json.loads(file.read_text())
    assert failed == 0 and record["finished"] and record["machine"] == H100
    assert [r["text"] for r in record["results"][1:3]] == ["0.5", "2 results, finished False"]
    page = report.page_file.read_text()
    assert "- card: NVIDIA H100 80GB HBM3\n- memory: 79.1 GiB\n- torch: 2.14.0" in page
    assert "|  | s a step |\n| --- | ---: |\n| measures | 0.500 |" in page
    assert "4 of 4 cases: 4 ok." in page and "<summary>measures</summary>\n\n```\nkernels\n```" in page
    report.finished = False
    assert "Stopped before its end" in report.summary()


def test_cases_that_hang_die_or_spoil_their_process_leave_the_next_a_new_one(stand_in, tmp_path):
    names = ("first", "second", "spoils", "third", "dies", "fourth", "hangs", "fifth")
    cases = [Case(name, {}, limit=1.0 if name == "hangs" else 20.0) for name in names]
    report, failed = run_part(tmp_path, *cases)
    said = {r["case"]: r["text"] for r in report.results}
    assert said["first"] == said["second"] == said["spoils"]
    assert len({said[name] for name in ("first", "third", "fourth", "fifth")}) == 4
    assert said["dies"] == "ended: killed by the system" and said["hangs"] == "no reply in 1 s"
    assert failed == 2
    page = report.page_file.read_text()
    assert page.index("## Failed or cut off\n\n- dies: ended: killed by the system\n- hangs") < page.index("6 passed")


def test_a_case_without_room_or_time_is_left_out_with_its_reason(stand_in, tmp_path):
    long = Case("long", {}, least=500.0)
    report, failed = run_part(tmp_path, Case("wide", {}, missing="needs about 90 GB, this card has 8"), long)
    assert failed == 0 and [r["state"] for r in report.results] == [SKIPPED, SKIPPED]
    page = report.page_file.read_text()
    assert "- wide: needs about 90 GB, this card has 8\n" in page and "s are left, it takes about 500" in page


def test_a_case_that_the_parts_time_cuts_off_is_no_failure(stand_in, tmp_path):
    report, failed = run_part(tmp_path, Case("hangs", {}, least=0.5), limit=3.0)
    assert failed == 0 and report.results[0]["state"] == CUT and report.count(OK) == report.count(FAILED) == 0
    assert "- hangs: no reply in" in report.page_file.read_text()


def test_a_process_that_has_no_time_to_start_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(command, "WORKER", (str(tmp_path / "worker.py"),))
    report, failed = run_part(tmp_path, Case("first", {}, least=0.5), limit=1.0)
    assert failed == 0 and report.results[0]["state"] == CUT


def test_a_process_that_does_not_start_is_tried_once(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text("raise SystemExit('no module named torch')")
    monkeypatch.setattr(command, "WORKER", (str(tmp_path / "worker.py"),))
    report, failed = run_part(tmp_path, Case("first", {}), Case("second", {}))
    assert failed == 1 and report.results[0]["text"] == "ended: no module named torch"
    assert (report.results[1]["state"], report.results[1]["text"]) == (SKIPPED, "its process does not start")


def test_only_what_is_asked_for_runs(stand_in, tmp_path):
    report = Report(tmp_path / "card", "flux", H100, "")
    args = command.parse(["--only", "one", "two"])
    cases = tuple(Case(name, {}) for name in ("one", "two", "three"))
    run_groups(args, report, [Group({"kind": "stand-in"}, cases)])
    assert [r["case"] for r in report.results] == ["one", "two"]
    assert command.command_of(args, "flux") == "python dev.py card --part flux --only one two"
    assert command.command_of(args, "plan") == "python dev.py card --minutes 12 --only one two"


def process_lines(report: Report) -> list[str]:
    return [result["text"] for result in report.results]


def test_a_process_waits_for_the_next_group_of_its_model(stand_in, tmp_path):
    report = Report(tmp_path / "card", "plan", H100, "")
    group, other = (Group({"kind": "stand-in", "model": name}, (Case(name, {}),)) for name in ("one", "other"))
    repeat = replace(group, cases=(Case("one again", {}),))
    assert run_groups(command.parse([]), report, [group, other, repeat]) == 0
    first, second, third = process_lines(report)
    assert first == third != second


def test_the_next_process_starts_beside_what_is_not_timed(stand_in, tmp_path, monkeypatch):
    started_models: list[str] = []
    begin = command.Processes.begin

    def note(self: Any, group: Group, deadline: float) -> None:
        started_models.append(group.spec["model"])
        begin(self, group, deadline)

    monkeypatch.setattr(command.Processes, "begin", note)
    report = Report(tmp_path / "card", "plan", H100, "")
    names = ("checked", "timed", "last")
    planned = [Group({"kind": "stand-in", "model": name}, (Case(name, {}),), timed=name == "timed") for name in names]
    assert run_groups(command.parse([]), report, planned) == 0
    assert started_models == ["timed"] and len(set(process_lines(report))) == 3


def test_cases_cut_off_by_the_minutes_come_last_and_a_short_one_still_runs(stand_in, tmp_path):
    report = Report(tmp_path / "card", "plan", H100, "")
    cases = (Case("first", {}, least=1.0), Case("long", {}, least=300.0), Case("short", {}, least=1.0))
    groups_ = [Group({"kind": "stand-in"}, cases), Group({"kind": "stand-in"}, (Case("last", {}, least=1.0),))]
    assert run_groups(command.parse([]), report, groups_, limit=30.0) == 0
    states = {result["case"]: result["state"] for result in report.results}
    assert states == {"first": OK, "long": SKIPPED, "short": OK, "last": OK}
    late = Report(tmp_path / "late", "plan", H100, "")
    assert run_groups(command.parse([]), late, groups_, limit=0.0) == 0
    assert {result["state"] for result in late.results} == {SKIPPED} and late.finished


def test_page_is_not_written_without_a_gpu(stand_in, tmp_path):
    args = command.parse(["--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="torch 2.14.0 finds no CUDA device here; with --device cpu the command is"):
        command.run(args, sys.executable, tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends a process without asking it")
def test_a_signal_ends_it_with_its_own_status():
    with pytest.raises(SystemExit) as ended, command.stopped_by_a_signal():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143


def test_a_card_s_name_is_a_file_s():
    assert command.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"


# Kernels


def test_kernels_are_summed_by_kind_and_what_overlaps_counts_once():
    events = [
        ("triton_poi_fused_add_3", 0.0, 2000.0),
        ("nvjet_tst_128x256", 1000.0, 2000.0),
        ("flash_bwd_dq_dk_dv", 5000.0, 1000.0),
        ("Memcpy HtoD (Pinned -> Device)", 0.0, 9000.0),
        ("vectorized_elementwise_kernel", 9000.0, 10.0),
    ]
    assert [kernels.kind_of(name) for name, *_ in events] == ["Triton", "products", "attention", "copies", "other"]
    busy = kernels.busy_seconds((start, start + length) for name, start, length in events if "Mem" not in name)
    assert busy == pytest.approx(4.01e-3)
    text = kernels.table(events)
    assert "5 launches in one step" in text and "       1      9.00  copies" in text
    assert kernels.table([]) == ""


def test_only_what_runs_in_a_compiled_graph_is_compared():
    calls = [("aten::mm", True), ("aten::mm", False), ("aten::addmm", True), ("aten::add", True)]
    calls += [("aten::_scaled_dot_product_flash_attention_backward", True)]
    counts = kernels.launches(calls, ["triton_red_fused_1", "triton_poi_fused_2", "nvjet"])
    assert counts == {"products": 2, "8-bit products": 0, "attention": 1, "triton": 2}


def counted(triton: int, products: int) -> list[dict[str, Any]]:
    def graph(*kinds: str) -> dict[str, Any]:
        return {"kernels": [[kind, "", 1, 100, 0] for kind in kinds]}

    forward = graph(*["triton"] * triton, *["product"] * (products - 1), "thin", "attention")
    return [{"count": 10, "graphs": {"none": {"forward": forward, "backward": graph("triton", "attention")}}}]


def test_the_profiled_step_is_held_against_the_counted_one():
    blocks = counted(triton=4, products=3)
    none = {"triton": 50, "products": 30, "attention": 20, "bytes_of_graphs": 1000, "all": 0.5}
    full = {"triton": 90, "products": 60, "attention": 30, "bytes_of_graphs": 0, "all": 0.7}
    baseline = {"flux, compiled, none": none, "flux, compiled, full": full}
    result = kernels.beside(blocks, baseline, None)
    assert result["state"] == "ok" and "flux, compiled, full: triton 90 counted, 90 here (+0.0%)" in result["details"]
    for name, value in (("triton", 52), ("products", 29), ("bytes_of_graphs", 1031)):
        result = kernels.beside(blocks, baseline | {"flux, compiled, none": none | {name: value}}, None)
        assert result["state"] == "failed" and result["text"].startswith("differs from the count: flux, compiled, none")
    with pytest.raises(ValueError, match="No compiled step was profiled before"):
        kernels.beside(blocks, {}, None)
