"""The step benchmark: its arithmetic, what it counts without a GPU, and its tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.models.catalogue.registry import FAMILIES as KNOWN
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import figures
from families import FULL, TINY, Picture
from processes import HERE, CommandProcess, Measured
from thinned import one_in

from infer.models import count_work
from step.contestant import CountedCopies, held_for_backward, make_trainer, train_core
from step.data import for_core, random_data
from step.report import report
from step.train_step import FAMILIES, arguments, contestant_specs, measure
from step.work import CountedStep

TRAINED = [family for family in FAMILIES if family in TINY]


def small(name: str) -> Picture:
    """Sample that a small family trains on here: a picture, or a clip of two latent frames."""
    return Picture(64, 96, 16, frames=5 if TINY[name].picture.frames > 1 else 1)


def test_a_ratio_is_taken_within_each_round_so_that_a_slow_round_does_not_weigh():
    measured = [[1.0, 1.0, 9.0], [10.0, 10.0, 10.0], [2.0, 2.0, 2.0]]
    core = [[2.0, 2.0, 2.0], [30.0, 30.0, 90.0], [3.0, 3.0, 3.0]]
    assert figures.ratio_by_round(core, measured) == figures.Spread(1.5, 2.0, 3.0)


def test_contestants_of_unequal_rounds_are_no_ratio():
    with pytest.raises(ValueError):
        figures.ratio_by_round([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize(
    ("percent", "total", "blocks"), [(0, 57, 0), (25, 57, 14), (50, 57, 29), (90, 57, 51), (100, 4, 4), (1, 4, 1)]
)
def test_percents_of_blocks_are_the_nearest_number_and_one_at_least(percent: float, total: int, blocks: int):
    assert figures.swapped_blocks(percent, total) == blocks


def test_the_least_time_of_a_swapped_step_is_computing_or_copying_whichever_is_greater():
    seconds = [[2.0, 2.0], [6.0, 6.0]]
    assert figures.times_the_least(seconds, [[1.0, 1.0], [4.0, 4.0]], copying=2.0) == figures.Spread(1.0, 1.25, 1.5)


def test_the_peak_of_allocations_is_found_in_order_of_time():
    events = [(3.0, -50), (1.0, 100), (2.0, 50), (4.0, 20)]
    assert figures.peak_and_rest(events) == (150, 120)


def test_copies_of_a_trace_count_if_they_are_large_and_to_the_device():
    def copy(name: str, size: int, microseconds: float) -> dict[str, Any]:
        return {"cat": "gpu_memcpy", "name": name, "dur": microseconds, "args": {"bytes": size}}

    events = [
        copy("Memcpy HtoD (Pinned -> Device)", 2**24, 500.0),
        copy("Memcpy HtoD (Pinned -> Device)", 2**25, 1500.0),
        copy("Memcpy HtoD (Pageable -> Device)", 4, 3.0),
        copy("Memcpy DtoD (Device -> Device)", 2**26, 9.0),
        {"cat": "kernel", "name": "gemm", "dur": 100.0, "args": {}},
        {"name": "process_name", "ph": "M"},
    ]
    assert figures.copies_to_device(events) == (2**24 + 2**25, pytest.approx(2e-3))


def test_every_family_that_trains_is_counted_at_full_size():
    assert {FULL[name].kind.replace("_", "-") for name in FAMILIES} == {family.name for family in KNOWN}


# FLOP of attention's forward by hand: two products of queries × keys × width in each block, two FLOP each.
@pytest.mark.parametrize(
    ("name", "attention"),
    one_in(
        3,
        [
            ("flux2_klein", 4 * 4608**2 * 3072 * 25),
            ("flux", 4 * 4608**2 * 3072 * 57),
            ("chroma", 4 * 4608**2 * 3072 * 57),
            ("wan_1.3b", 4 * 32760 * (32760 + 512) * 1536 * 30),
            ("qwen_image", 4 * 4224**2 * 3072 * 60),
        ],
    ),
)
def test_our_step_at_full_size_computes_what_cores_model_does_and_back(name: str, attention: int):
    model = FULL[name]
    work = CountedStep(model, "", model.picture).count(16, ("*",))
    core = count_work(model, "", model.picture)
    assert work.parameters == core.parameters
    # The LoRA of rank 16 adds about a hundredth.
    assert core.flop < work.forward < 1.02 * core.flop
    # No gradients of weights; flash attention goes back with five products.
    assert work.backward == pytest.approx(work.forward + 1.5 * attention, rel=0.01)
    assert 0.99 * work.forward < work.recompute <= work.forward


def contestant_spec(**overrides: Any) -> dict[str, Any]:
    spec = {"rank": 4, "targets": "default", "batch_size": 1, "compiled": False, "checkpointing": "full"}
    return spec | {"swap": 0, "prefetch": 1, "dtype": "fp32"} | overrides


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a small family, written once."""
    folder, files = tmp_path_factory.mktemp("benchmark"), {}

    def file(name: str) -> str:
        if name not in files:
            files[name] = str(TINY[name].write(folder / f"{name}.safetensors"))
        return files[name]

    return file


@pytest.mark.parametrize(("percent", "prefetch"), [(50, 1), (100, 2)])
@pytest.mark.parametrize("name", TRAINED)
def test_the_copies_of_the_dry_run_are_those_of_a_step(
    name: str, percent: float, prefetch: int, small_file: Any, tmp_path: Path
):
    file = small_file(name)
    counted = CountedStep(TINY[name], file, small(name)).count_swap(percent, prefetch)
    patcher = TINY[name].load(file, "cpu", torch.float32)
    trainer = make_trainer(
        contestant_spec(swap=percent, prefetch=prefetch), patcher, random_data(patcher, small(name), 2), tmp_path
    )
    try:
        copies = CountedCopies(trainer)
        for index in (0, 1):
            trainer.train_step.forward_backward([tiny.micro_batch(index)])
            trainer.train_step.optimizer_step()
        first = copies.since(2)
        trainer.train_step.forward_backward([tiny.micro_batch(0)])
        step = copies.since(1)
        assert len(trainer.placed.weights.swap.blocks) == counted.blocks
    finally:
        trainer.close()
    assert step == {"copies": counted.copies, "copied_bytes": counted.bytes}
    assert first["copies"] >= step["copies"]  # nothing is there before the first


class Stop(BaseException):
    """Exception that ends core's loop from inside, as no error of its own does."""


@pytest.mark.parametrize("name", TRAINED)
def test_cores_node_trains_on_the_same_samples(name: str, small_file: Any, monkeypatch: pytest.MonkeyPatch):
    with torch.inference_mode():
        patcher = TINY[name].load(small_file(name), "cpu", torch.float32)
    data = random_data(patcher, small(name), 2)
    latents, positive = for_core(data)
    assert torch.equal(latents[1]["samples"][0], data.samples[1].load().latent)
    assert torch.equal(positive[1][0][0], data.samples[1].load().text)
    steps = []

    def after_step(optimizer: Any, *_: Any) -> None:
        steps.append(
            all(p.grad.isfinite().all() for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
        )
        if len(steps) == 2:
            raise Stop

    class Waiting:
        def wait(self) -> None: ...

    hook = register_optimizer_step_post_hook(after_step)
    try:
        with pytest.raises(Stop):
            train_core(contestant_spec(), Waiting(), patcher, data)
    finally:
        hook.remove()
    assert steps == [True, True]


def test_a_contestant_that_cannot_take_part_says_why(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()\n"
        'print(\'{"skipped": "it does not train this model here (TypeError: no)"}\', flush=True)\n'
    )
    process = CommandProcess("core", {}, script=(str(script),), log=tmp_path / "log")
    assert process.launch() == {"ready": True} and not process.ended
    assert process.ask(do="steps", count=1) == {} == process.ask(do="steps", count=1)
    process.stop()
    assert process.ended == "it does not train this model here (TypeError: no)"


def test_a_contestant_that_hangs_is_ended_when_its_time_is_over(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint('{}', flush=True)\nsys.stdin.readline()\ntime.sleep(60)\n")
    process = CommandProcess("slow", {}, script=(str(script),), log=tmp_path / "log", limit=30.0)
    assert process.launch() == {} and not process.ended
    process.limit = 0.1
    assert process.ask(do="steps", count=1) == {} and process.ended == "no reply in 0 s"
    process.stop()


class Recorded:
    """A contestant that writes down what is asked of it."""

    def __init__(self, name: str, requests: list[str], device: str):
        self.name = name
        self.requests = requests
        self.ended = ""
        self.spec = {"device": device, "swap": 0, "contestant": "core"}
        self.rounds: list[dict[str, Any]] = []
        self.memory: dict[str, Any] = {}

    def start(self) -> None:
        self.requests.append(f"{self.name} starts")

    def round(self, steps: int) -> None:
        self.requests.append(self.name)
        self.rounds.append({"seconds": [1.0] * steps})

    def ask(self, do: str) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        self.requests.append(f"{self.name} stops")


def test_a_contestant_keeps_its_process_for_its_rounds(capsys: pytest.CaptureFixture[str]):
    requests: list[str] = []
    measure([Recorded(name, requests, "cuda") for name in "ab"], rounds=2, steps=3, together=False)
    assert requests == ["a starts", "a", "a", "a stops", "b starts", "b", "b", "b stops"]
    assert "round 2 of 2, a: 1.000 s a step" in capsys.readouterr().err
    requests.clear()
    measure([Recorded(name, requests, "cpu") for name in "ab"], rounds=2, steps=3, together=True)
    assert requests == ["a starts", "b starts", "a", "b", "a", "b"]


def test_percents_add_compiled_contestants_and_0_is_the_one_that_runs_anyway():
    args = arguments(["--swap", "50", "0", "25", "50", "--contestants", "compiled", "core"])
    names = ["ours, compiled, full", "ours, compiled, full, 25 % swapped", "ours, compiled, full, 50 % swapped"]
    specs = contestant_specs(args)
    assert [name for name, _ in specs] == [*names, "core TrainLoraNode"]
    assert [spec["swap"] for _, spec in specs] == [0, 25, 50, 0]


def test_either_path_or_both_train_in_each_mode():
    options = ["--path", "native", "own", "--contestants", "eager", "compiled", "--swap", "50"]
    specs = contestant_specs(arguments(options))
    eager = [f"{name}, eager, {mode}" for mode in ("none", "selective", "full") for name in ("native", "ours")]
    compiled = [f"{name}, compiled, full{swap}" for swap in ("", ", 50 % swapped") for name in ("native", "ours")]
    assert [name for name, _ in specs] == [*eager, *compiled]
    assert [spec["path"] for _, spec in specs] == ["native", "own"] * 5
    assert {spec.get("path") for _, spec in contestant_specs(arguments([]))} == {"own", None}


def test_the_native_contestant_trains_by_comfyui_s_forward_and_counts_its_calls(small_file: Any, tmp_path: Path):
    def measured_counts(path: str) -> dict[str, float]:
        patcher = TINY["flux"].load(small_file("flux"), "cpu", torch.float32)
        spec, data = contestant_spec(path=path, checkpointing="none"), random_data(patcher, small("flux"), 1)
        trainer = make_trainer(spec, patcher, data, tmp_path / path)
        try:
            assert trainer.context.family.own_forward == (path == "own")
            return held_for_backward(trainer)
        finally:
            trainer.close()

    own_counts, native = measured_counts("own"), measured_counts("native")
    # Ten Linears and an attention are in each block, and the forward is more than a block.
    for counts in (own_counts, native):
        assert 30 < counts["block_operations"] < counts["operations"] / 6
        assert counts["block_operations"] < counts["block_python_calls"] < counts["python_calls"]
    # Ours turns q and k and splits heads without the tables and copies of ComfyUI's forward.
    assert own_counts["operations"] < native["operations"] < 1.35 * own_counts["operations"]
    assert native["held_mib"] == pytest.approx(own_counts["held_mib"], rel=0.05)
    assert 0 < native["saved_tensors"] <= 1.05 * own_counts["saved_tensors"]


@pytest.mark.parametrize(
    ("command_line", "said"),
    [
        (["--swap", "101"], "--swap: give percents of the blocks, 0 to 100"),
        (["--swap", "50", "--contestants", "core"], "--swap: those that swap are compiled; add compiled"),
        (["--family", "wan_1.3b"], "--family wan_1.3b is of the full size only; the tiny ones are flux, "),
        (["--prefetch", "0"], "--prefetch: take at least one"),
        (["--family", "wan", "flux", "--frames", "5"], "--frames: flux trains on pictures"),
    ],
)
def test_bad_arguments_end_in_a_sentence(command_line: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        arguments(command_line)
    assert said in capsys.readouterr().err


def swapped(percent: float, blocks: int, seconds: list[float], **extra: float) -> Measured:
    facts = {"graphs_compiled": 2, "graph_breaks": 0, "blocks_swapped": blocks, "driver_mib": 1000.0 - blocks}
    rounds = [{"seconds": [s], "cpu_seconds": [s], "peak_mib": 10.0, **facts, **extra} for s in seconds]
    spec = {"swap": percent, "compiled": True}
    name = "ours, compiled, full" + (f", {percent:g} % swapped" if percent else "")
    return Measured(name, spec, {"compile_seconds": 30.0}, rounds)


def test_a_native_step_stands_beside_the_own_one_of_the_same_round():
    common = {"graphs_compiled": 2, "graph_breaks": 0, "driver_mib": 1.0}

    def contestant(path: str, seconds: list[float]) -> Measured:
        rounds = [{"seconds": [s], "cpu_seconds": [s / 2], "peak_mib": 10.0, **common} for s in seconds]
        spec = {"path": path, "compiled": False, "checkpointing": "full", "swap": 0}
        counts = {"python_calls": 1000, "block_python_calls": 90.4, "held_mib": 1.0}
        return Measured(f"{path}, eager, full", spec, {}, rounds, counts)

    field_of = [contestant("native", [1.1, 4.4]), contestant("own", [1.0, 2.0])]
    text = report(field_of, arguments(["--path", "native", "own"]))
    ratio = "1.65 (1.10 to 2.20)"
    assert (
        f"| native, eager, full | 2.750 (1.100 to 4.400) | {ratio} |  | 1.375 (0.550 to 2.200) | {ratio} |  |" in text
    )
    assert "| own, eager, full | 1.500 (1.000 to 2.000) |  |  | 0.750" in text
    assert "| native, eager, full | 1000 | 90 |  |  |  |  |" in text
    assert "the own forward's" not in report(field_of[1:], arguments([]))


def test_the_swap_table_of_a_gpu_compares_with_the_least_time_of_each_round():
    half = swapped(50, 20, [1.2, 4.0], copies=36, copied_bytes=20e9, link=20e9)
    half.memory = {"copied_bytes": 20e9, "copying_seconds": 1.25}
    text = report([swapped(0, 0, [0.5, 2.0]), half], arguments(["--device", "cuda", "--swap", "50"]))
    assert (
        "| 20 (50 %) | 36 | 20.000 | 2.600 (1.200 to 4.000) | 2.20 (2.00 to 2.40) | 980 | 20.0 | 16.0 | 7.7 | "
        "1.60 (1.20 to 2.00) |" in text
    )
    assert "| 0 (0 %) | 0 | 0.000 | 1.250 (0.500 to 2.000) |  | 1000 |  |  |  |  |" in text


def test_the_swap_table_of_a_cpu_holds_counts_only_and_says_so():
    field_of = [swapped(0, 0, [0.5]), swapped(50, 3, [0.6], copies=2, copied_bytes=5e6, link=1e9)]
    text = report(field_of, arguments(["--swap", "50"]))
    assert "| 3 (50 %) | 2 | 0.005 |\n" in text
    assert "only the counts mean anything" in text
    assert "swaps" not in report(field_of[:1], arguments([]))


@pytest.mark.wide
def test_a_whole_run_of_a_small_family_gives_its_tables(tmp_path: Path):
    command = [sys.executable, str(HERE), "train_step", "--family", "wan", "--steps", "1", "--swap", "50"]
    command += ["--width", "128", "--height", "96", "--length", "16", "--json", str(tmp_path / "figures.json")]
    command += ["--backend", "aot_eager"]  # the soonest compiled
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    contestants = json.loads((tmp_path / "figures.json").read_text())["wan"]
    assert len(contestants) == 6 and not [c["ended"] for c in contestants.values() if c["ended"]]
    compiled = [c["rounds"][-1] for name, c in contestants.items() if "compiled" in name]
    assert len(compiled) == 2
    for last in compiled:
        assert last["graphs_compiled"] > 0 and last["graph_breaks"] == 0
    assert "| core TrainLoraNode |" in process.stdout and "only the counts mean anything" in process.stdout
