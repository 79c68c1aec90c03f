"""Tune Compile: what it gives out, what it remembers and when it measures again, and the node through the server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.compile.attach import compile_model, compiled_model_of
from tessera.compile.settings import CompileSettings
from tessera.compile.tune.inputs import StepSize, step_inputs
from tessera.compile.tune.results import (
    MeasuredSettings,
    Quartiles,
    TuneResult,
    UnmeasuredSettings,
    file_name,
    result_key,
    to_json,
)
from tessera.nodes.model import tune as tune_node
from tessera.nodes.model.tune import TesseraTuneCompile
from tiny.compile.compiling import Graphs
from tiny.nodes.prompt import ksampler, node

AOT_EAGER = CompileSettings(backend="aot_eager")
SIZE = {"width": 64, "height": 64, "text_length": 16, "cfg": 1.0}
MEASURED_AT = "2026-08-09 12:00"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tune_node, "tune_folder", lambda: tmp_path / "tune")
    return tmp_path / "tune"


@pytest.fixture(autouse=True)
def quick_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that compiles at once in the place of inductor."""
    monkeypatch.setattr(tune_node, "candidates", lambda device: [CompileSettings(backend="eager")])


def load_wan(tiny_files: dict[str, Path]) -> Any:
    return tiny.load_model("wan", tiny_files["wan"])


def run(model: Any, **values: Any) -> Any:
    """As ComfyUI runs a node: under inference mode."""
    with torch.inference_mode():
        return TesseraTuneCompile.EXECUTE_NORMALIZED(model, **(SIZE | values))


def ui_report(output: Any) -> dict[str, Any]:
    (payload,) = output.ui["tessera"]
    return json.loads(json.dumps(payload, allow_nan=False))


def result_for(model: Any, *rows: MeasuredSettings, unmeasured: tuple[UnmeasuredSettings, ...] = ()) -> TuneResult:
    key = result_key(model, step_inputs(model, StepSize(64, 64, text_length=16, cfg=1.0)))
    return TuneResult(key, Quartiles(100, 100, 100), rows, unmeasured, 300, MEASURED_AT)


def remember(folder: Path, result: TuneResult) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / file_name(result.key)
    file.write_text(to_json(result), encoding="utf-8")
    return file


FAST = MeasuredSettings(AOT_EAGER, Quartiles(45, 50, 55), Quartiles(1.9, 2, 2.1), 20, 200, 1)
LEFT_OUT = UnmeasuredSettings(CompileSettings(scope="stack"), "no time.", failed=False)


def test_tune_compile_measures_shows_a_chart_and_a_table_and_remembers(
    tiny_files: dict[str, Path], own_folder: Path
) -> None:
    model = load_wan(tiny_files)
    output = run(model)
    tuned, chart, text = output.result
    assert chart.shape == (1, 512, 1024, 3) and 0 <= chart.min() < chart.max() <= 1
    facts = ui_report(output)
    assert facts["text"] == text and text.startswith("WAN21, 64x64, batch 1, 16 text tokens, cfg 1;")
    assert [row["label"] for row in facts["measured"]] == ["blocks, eager"]
    assert facts["key"]["torch"] == torch.__version__
    assert len(output.ui["images"]) == 1
    best = facts["best"]
    assert (compiled_model_of(tuned) is None) == (best is None)
    (file,) = own_folder.iterdir()
    graphs = Graphs()
    second = run(load_wan(tiny_files))
    assert graphs() == 0
    assert ui_report(second)["measured"] == facts["measured"]
    assert ui_report(second)["notes"] == [
        f"Remembered from {facts['measured_at']}: nothing was measured. Switch remeasure on to measure again."
    ]
    assert [file] == list(own_folder.iterdir())


def test_remembered_settings_compile_the_model_without_measuring(tiny_files: dict[str, Path], own_folder: Path) -> None:
    model = load_wan(tiny_files)
    remember(own_folder, result_for(model, FAST, unmeasured=(LEFT_OUT,)))
    graphs = Graphs()
    output = run(model)
    assert graphs() == 0
    assert compiled_model_of(output.result[0]).settings == AOT_EAGER
    assert compiled_model_of(model) is None
    assert f"Measured on {MEASURED_AT}." in output.result[2]
    sampled = tiny.sample(output.result[0], "wan", length=16)
    torch.testing.assert_close(sampled, tiny.sample(model, "wan", length=16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reason", ["remeasure", "time_budget", "broken", "size"])
def test_tune_compile_measures_again_if_that_is_asked_for_or_needed(
    reason: str, tiny_files: dict[str, Path], own_folder: Path
) -> None:
    model = load_wan(tiny_files)
    file = remember(own_folder, result_for(model, FAST, unmeasured=(LEFT_OUT,)))
    changes: dict[str, dict[str, Any]] = {
        "remeasure": {"remeasure": True},
        "time_budget": {"time_budget": 301},
        "broken": {},
        "size": {"width": 128},
    }
    if reason == "broken":
        file.write_text("{", encoding="utf-8")
    facts = ui_report(run(model, **changes[reason]))
    assert [row["label"] for row in facts["measured"]] == ["blocks, eager"]
    assert facts["measured_at"] != MEASURED_AT
    notes = {
        "time_budget": f"Measured again, since time_budget is above the 300 s of {MEASURED_AT}.",
        "broken": f"The remembered result {file.name} can't be used (JSONDecodeError: Expecting property name enclosed "
        "in double quotes: line 1 column 2 (char 1)), so everything is measured again.",
    }
    assert facts["notes"] == ([notes[reason]] if reason in notes else [])
    record = json.loads(file.read_text(encoding="utf-8"))
    assert (record["measured_at"] == MEASURED_AT) == (reason == "size")
    assert len(list(own_folder.iterdir())) == (2 if reason == "size" else 1)


def test_a_folder_that_cannot_be_written_costs_a_sentence_not_the_result(
    tiny_files: dict[str, Path], own_folder: Path
) -> None:
    own_folder.write_text("a file stands here")
    facts = ui_report(run(load_wan(tiny_files)))
    assert facts["measured"]
    assert [note.partition(":")[0] for note in facts["notes"]] == [
        f"The remembered result {file_name(facts['key'])} can't be used (NotADirectoryError",
        "The result is not remembered",
    ]


def test_a_result_in_which_everything_failed_is_not_remembered(
    tiny_files: dict[str, Path], own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_node, "candidates", lambda device: [CompileSettings(backend="no_such")])
    model = load_wan(tiny_files)
    output = run(model)
    assert output.result[0] is model
    assert "Failed: blocks, no_such: backend 'no_such' is not installed" in output.result[2]
    assert not own_folder.exists()


def test_tune_compile_takes_the_place_of_a_compile_model_in_front(
    tiny_files: dict[str, Path], own_folder: Path
) -> None:
    model = load_wan(tiny_files)
    remember(own_folder, result_for(model, replace(FAST, gain=Quartiles(1, 1, 1))))
    output = run(compile_model(model, AOT_EAGER)[0])
    assert compiled_model_of(output.result[0]) is None


def test_models_without_diffusion_are_refused(tiny_clip: Any) -> None:
    with pytest.raises(ValueError, match="^model is a CLIP, not a diffusion model; connect the MODEL of"):
        run(tiny_clip)


# Through the server.


def tune_graph(**values: Any) -> dict[str, Any]:
    name = tiny.WAN_NAMES["unet_name"]
    return {
        "model": node("TesseraLoadDiffusionModel", unet_name=name, weight_dtype="default", blocks_to_swap=1),
        "tuned": node("TesseraTuneCompile", model=["model", 0], **values),
    }


def sampling() -> dict[str, Any]:
    return {
        "clip": node("TesseraTinyClipLoader", clip_name1=tiny.WAN_NAMES["clip_name"]),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "latent": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1),
        "sampled": ksampler("tuned"),
        "report": node("TesseraCompileReport", model=["tuned", 0], after=["sampled", 0]),
        "chart": node("PreviewImage", images=["tuned", 1]),
        "text": node("PreviewAny", source=["tuned", 2]),
    }


def test_the_server_measures_with_inductor_and_samples_with_what_it_remembers(server: Any) -> None:
    """As a block streams, the other candidates are left out, however much time there is."""
    graph = tune_graph(**SIZE)
    outputs = server.run(graph)["outputs"]["tuned"]
    (facts,) = outputs["tessera"]
    assert [row["label"] for row in facts["measured"]] == ["blocks, default"]
    assert [(row["label"], row["failed"]) for row in facts["unmeasured"]] == [
        ("stack, default", False),
        ("model, default", False),
    ]
    assert [image["type"] for image in outputs["images"]] == ["temp"]
    folder = server.base / "user" / "tessera" / "tune"
    (file,) = folder.glob("WAN21-*.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["measured_at"] == facts["measured_at"]

    gains = {"low": 1.9, "median": 2.0, "high": 2.1}  # as if it had been much faster with another backend
    record["measured"][0] |= {"gain": gains, "step": dict.fromkeys(gains, 0.001)}
    record["measured"][0]["settings"]["backend"] = "aot_eager"
    file.write_text(json.dumps(record), encoding="utf-8")
    graph["tuned"]["inputs"]["remeasure"] = False  # written out, it is another prompt for ComfyUI's cache
    outputs = server.run(graph | sampling())["outputs"]
    (second,) = outputs["tuned"]["tessera"]
    assert second["notes"][0].startswith("Remembered from ")
    assert second["best"]["backend"] == "aot_eager"
    assert outputs["text"]["text"] == [second["text"]]
    assert len(outputs["chart"]["images"]) == 1
    (report,) = outputs["report"]["tessera"]
    assert report["heading"].startswith("Compile Model: backend aot_eager, mode default, dynamic auto, scope blocks")
    assert report["graphs"] == 1
