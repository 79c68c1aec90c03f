"""What the inference benchmark measures and counts is what it says."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from families import FULL, Picture
from processes import Measured

from infer.contestant import Graph, Sampler, compile_as_core
from infer.count import CompileCount
from infer.models import MODELS, count_work
from infer.report import speed_report
from infer.session import by_lora, compile_cpu_seconds, late_steps, pictures, session_report


@pytest.fixture
def eager(tiny_files: dict[str, Path]) -> Sampler:
    spec = {"contestant": "eager", "dtype": "fp32", "device": "cpu", "file": str(tiny_files["flux"])}
    with torch.inference_mode():
        return Sampler(Graph(spec, MODELS["tiny"]["flux"]), "flux")


def compiled(graphs: int, seconds: float = 0.0) -> dict[str, float]:
    return {"graphs": graphs, "recompiles": 0, "seconds": seconds, "breaks": 0, "over_limit": 0}


def reply(*steps: dict[str, float]) -> dict[str, Any]:
    return {
        "compiled": list(steps),
        "step_cpu_seconds": [1.0 + step["seconds"] for step in steps],
        "seconds": 2.0,
        "cpu_seconds": 2.0,
        "peak_mib": 10.0,
        "deviation": 1e-6,
    }


def test_a_compilation_is_counted_once_as_a_graph_or_as_a_recompile():
    torch._dynamo.reset()
    count = CompileCount()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(3))
    first = count.since()
    assert (first["graphs"], first["recompiles"], first["breaks"]) == (1, 0, 0) and first["seconds"] > 0
    double(torch.ones(3))
    assert count.since() == compiled(0)
    double(torch.ones(4))
    counts = count.since()
    assert (counts["graphs"], counts["recompiles"]) == (1, 1)


def test_graphs_refused_by_the_limit_and_breaks_are_told_apart():
    torch._dynamo.reset()
    count = CompileCount()

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with torch._dynamo.config.patch(recompile_limit=1):
        double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
        double(torch.ones(3))
        double(torch.ones(4))
        limited = count.since()
    assert (limited["graphs"], limited["over_limit"], limited["breaks"]) == (1, 1, 0)
    torch.compile(broken, backend="eager")(torch.ones(3))
    assert count.since()["breaks"] == 1


def test_the_session_is_every_pair_of_sizes_prompts_loras_and_batches():
    session = pictures()
    assert len(session) == len(set(session)) == 3 * 3 * 3 * 2
    assert session[0] == Picture(256, 256, 64)


def test_a_step_is_late_where_its_shape_was_met_before_with_a_lora_or_without():
    session = [Picture(64, 64, 8), Picture(64, 64, 9), Picture(64, 64, 8, lora="A")]
    replies = [
        reply(compiled(2, 3.0), compiled(0)),
        reply(compiled(2), compiled(1, 0.5)),
        reply(compiled(1), compiled(0)),
    ]
    assert late_steps(session, replies) == 2
    assert by_lora(session, replies) == "5 / 1 / 0"
    assert compile_cpu_seconds(replies) == 1 + 3.0 + 1 + 0.5


def test_core_is_called_as_its_node_calls_it(tiny_flux: Any, monkeypatch: pytest.MonkeyPatch):
    from comfy.patcher_extension import WrappersMP
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    calls: list[dict[str, Any]] = []
    compile_it = torch.compile

    def recorded(**arguments: Any) -> Any:
        calls.append(arguments | {"options": dict(arguments["options"])})  # torch takes out of it what it has read
        return compile_it(**arguments)

    monkeypatch.setattr(torch, "compile", recorded)
    node_model, benchmark_model = (
        TorchCompileModel.execute(tiny_flux, "inductor").result[0],
        compile_as_core(tiny_flux, "inductor"),
    )
    filters = [call["options"].pop("guard_filter_fn") for call in calls]
    assert calls[0] == calls[1] and calls[0]["model"] is tiny_flux.model.diffusion_model
    guards = [SimpleNamespace(name=name) for name in ("L['x']", "L['transformer_options']['sigmas']", "")]
    assert filters[0](guards) == filters[1](guards) == [True, False, True]
    wrappers = [model.wrappers[WrappersMP.APPLY_MODEL] for model in (node_model, benchmark_model)]
    assert list(wrappers[0]) == list(wrappers[1]) and type(node_model) is type(benchmark_model)


def test_a_picture_is_what_cores_sampler_gives_and_each_step_is_timed(eager: Sampler):
    with torch.inference_mode():
        out, figures = eager.sample(Picture(64, 96, 16, batch=2), steps=3)
    expected = tiny.sample(eager.graph.loaded, "flux", width=64, height=96, length=16, batch=2, steps=3)
    assert torch.equal(out, expected)
    assert figures["compiled"] == [compiled(0)] * 3
    assert sum(figures["step_seconds"]) <= figures["seconds"]


def test_a_lora_is_put_on_once_and_changes_the_picture(eager: Sampler):
    with torch.inference_mode():
        plain, _ = eager.sample(Picture(64, 64, 16), steps=1)
        first, _ = eager.sample(Picture(64, 64, 16, lora="A"), steps=1)
        model = eager.graph.model
        eager.sample(Picture(64, 96, 16, lora="A"), steps=1)
        assert eager.graph.model is model
        second, _ = eager.sample(Picture(64, 64, 16, lora="B"), steps=1)
        repeated, _ = eager.sample(Picture(64, 64, 16), steps=1)
    assert torch.equal(plain, repeated)
    assert not torch.equal(plain, first) and not torch.equal(first, second) and not torch.equal(plain, second)


# Parameters as published, in billions; FLOP of a forward at the picture that is sampled, where known otherwise.
@pytest.mark.parametrize(
    ("family", "billions"), [("flux", 11.90), ("wan", 14.29), ("qwen_image", 20.43), ("sdxl", 2.57)]
)
def test_the_full_sizes_are_the_real_ones(family: str, billions: float):
    model = FULL[family]
    work = count_work(model, "", model.picture)
    assert work.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    # Two operations for each weight and token at least, where all weights meet every token.
    assert work.flop > (74e12 if family == "flux" else 1e12)


def test_the_tables_compare_within_rounds_and_name_who_ended():
    def measured(name: str, seconds: list[float]) -> Measured:
        rounds = [reply(compiled(0)) | {"seconds": s, "cpu_seconds": s} for s in seconds]
        return Measured(name, {}, reply(compiled(3, 20.0)), rounds, reply(compiled(0)))

    field_of = [
        measured("eager", [4.0, 8.0, 4.0]),
        measured("core TorchCompileModel", [2.0, 4.0, 2.0]),
        measured("ours, blocks", [1.0, 2.0, 4.0]),
        Measured("ours, stack", {}, ended="ended: no message"),
    ]
    text = speed_report(field_of, steps=2, cpu=True)
    assert (
        "| ours, blocks | 1.000 (0.500 to 2.000) | 1.000 (0.500 to 2.000) | 4.00 (1.00 to 4.00) | 2.00 (0.50 to 2.00) |"
        in text
    )
    assert "ours, stack is not in the tables: ended: no message." in text


def test_the_session_table_says_what_part_of_cores_time_ours_compiled():
    session = [Picture(64, 64, 8), Picture(64, 64, 8, lora="A")]
    core = [reply(compiled(1, 40.0), compiled(0)), reply(compiled(1, 60.0), compiled(0))]
    replies = [reply(compiled(2, 20.0), compiled(0)), reply(compiled(0), compiled(0))]
    names = ("eager", "core TorchCompileModel", "ours, dynamic auto")
    field_of = [Measured(n, {}, rounds=r) for n, r in zip(names, (replies, core, replies), strict=True)]
    row = session_report(field_of, session).splitlines()[-1]
    assert row == "| ours, dynamic auto | 2 (2 / 0 / 0) | 0 | 1 | 0 | 0 | 20 | 0.20 | 21 | 0.21 | 1e-06 |"
