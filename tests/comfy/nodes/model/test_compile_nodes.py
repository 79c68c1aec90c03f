"""Compile Model and Compile Report: settings, sentences for bad input, and a session of prompts through the server."""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from comfy.patcher_extension import WrappersMP
from comfy_server import ServerFailure, error_of
from tessera.common.fingerprint import weights_fingerprint
from tessera.compile.attach import compiled_model_of
from tessera.compile.settings import PRESETS, CompileSettings, Override, parse_overrides
from tessera.models.model_patches import trainable_model
from tessera.nodes.model.compile import TesseraCompileModel, TesseraCompileReport
from tessera.nodes.model.model_file import open_quantized
from tessera.nodes.train.inherited_settings import inherited_compile
from tiny.nodes.prompt import ksampler, node
from tiny.train.runs import Watcher, mixed_data, train


def run(node, *args, **values):
    """As ComfyUI runs a node: under inference mode."""
    with torch.inference_mode():
        return node.EXECUTE_NORMALIZED(*args, **values)


def settings_of(model, **values):
    return compiled_model_of(run(TesseraCompileModel, model, **values).result[0]).settings


def notes_of(output):
    return output.ui["tessera"][0]["notes"]


# Compile Model.


def test_a_client_that_only_connects_the_model_gets_the_defaults_that_the_node_shows(tiny_flux):
    defaults = {name: s["default"] for name, (_, s) in TesseraCompileModel.INPUT_TYPES()["optional"].items()}
    assert settings_of(tiny_flux) == settings_of(tiny_flux, **defaults) == CompileSettings()


def test_each_input_reaches_its_setting(tiny_flux):
    changes = {"backend": "aot_eager", "mode": "reduce-overhead", "dynamic": "false", "fullgraph": True}
    changes |= {"cache_size_limit": 3, "scope": "model"}
    for name, value in changes.items():
        assert settings_of(tiny_flux, **{name: value}) == replace(CompileSettings(), **{name: value})
    text = "double_blocks.* dynamic=true\n\nsingle_blocks.0-1 eager  # they gain nothing\n"
    overrides = (Override("double_blocks.*", changes=(("dynamic", "true"),)), Override("single_blocks.0-1", True))
    assert settings_of(tiny_flux, overrides=text).overrides == overrides


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_mode_and_scope_in_and_says_so_where_they_stood_otherwise(tiny_flux, preset):
    mode, scope = PRESETS[preset]
    out = run(TesseraCompileModel, tiny_flux, mode="reduce-overhead", scope="model", preset=preset)
    settings = compiled_model_of(out.result[0]).settings
    assert (settings.mode, settings.scope) == (mode, scope)
    sentence = f"The preset {preset} sets mode {mode} and scope {scope}, in place of reduce-overhead and model."
    assert notes_of(out)[0] == sentence
    explicit = run(TesseraCompileModel, tiny_flux, mode=mode, scope=scope, preset=preset)
    assert not any("preset" in note for note in notes_of(explicit))


def test_the_browser_is_told_what_the_presets_fill_in():
    _, preset = TesseraCompileModel.INPUT_TYPES()["optional"]["preset"]
    assert preset["presets"] == {name: {"mode": mode, "scope": scope} for name, (mode, scope) in PRESETS.items()}
    assert preset["options"] == ["custom", *PRESETS]


@pytest.mark.parametrize(("text", "meant"), [("True", "true"), (True, "true"), ("FALSE", "false"), ("Auto", "auto")])
def test_dynamic_is_taken_in_any_case_of_letters(text, meant, tiny_flux):
    assert TesseraCompileModel.validate_inputs(dynamic=text) is True
    (compiled,) = run(TesseraCompileModel, tiny_flux, dynamic=text).args
    assert compiled_model_of(compiled).settings.dynamic == meant
    assert "dynamic is 'maybe'; choose one of auto" in TesseraCompileModel.validate_inputs(dynamic="maybe")


BAD = [
    ({"backend": "nvfuser"}, "backend 'nvfuser' is not installed; choose one of inductor, cudagraphs, aot_eager"),
    ({"backend": "tvm"}, "backend tvm needs the package tvm, which is not installed; choose inductor."),
    ({"mode": "fastest"}, "mode is 'fastest'; choose one of default, reduce-overhead"),
    ({"dynamic": "maybe"}, "dynamic is 'maybe'; choose one of auto, true, false."),
    ({"scope": "layer"}, "scope is 'layer'; choose one of blocks, stack, model."),
    ({"preset": "fast"}, "preset is 'fast'; choose one of custom, fast start, balanced, maximum speed."),
    ({"cache_size_limit": 0}, "cache_size_limit is 0; it has to be at least 1."),
    ({"overrides": "blocks.* eager"}, "blocks.* matches no block of this model, which has double_blocks.*, single_"),
    ({"overrides": "double_blocks.*"}, "overrides, line 1: double_blocks.* has no setting; write eager or"),
    ({"overrides": "\ndouble_blocks.* eager mode=default"}, "overrides, line 2: eager blocks are not compiled, so"),
    ({"overrides": "double_blocks.* dynamic=true dynamic=false"}, "overrides, line 1: dynamic is given twice."),
    ({"overrides": "double_blocks.* mode=fast"}, "overrides, line 1: mode is 'fast'; choose one of default"),
    ({"overrides": "double_blocks.* scope=stack"}, "overrides, line 1: 'scope=stack' is not known; write eager, back"),
    ({"overrides": "double_blocks.* backend=nvfuser"}, "backend 'nvfuser' is not installed; choose one of"),
]


@pytest.mark.parametrize(("values", "sentence"), BAD, ids=[str(values) for values, _ in BAD])
def test_bad_input_is_one_sentence_before_anything_runs(tiny_flux, values, sentence):
    with pytest.raises(ValueError) as refused:
        run(TesseraCompileModel, tiny_flux, **values)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_models_without_diffusion_are_refused_by_name(tiny_clip):
    for kind in (TesseraCompileModel, TesseraCompileReport):
        with pytest.raises(ValueError, match="^model is a CLIP, not a diffusion model; connect the MODEL of"):
            run(kind, tiny_clip)
        with pytest.raises(ValueError, match="^model is a FluxClipModel_, not a diffusion model"):
            run(kind, tiny_clip.patcher)


def test_sentences_said_while_sampling_join_those_of_the_node(tiny_flux):
    out = run(TesseraCompileModel, tiny_flux, backend="eager", scope="stack", overrides="double_blocks.0 eager")
    assert notes_of(out) == []
    tiny.sample(out.result[0], "flux", steps=1)
    assert notes_of(out) == [
        "scope stack: double_blocks is compiled block by block, because overrides give its blocks different settings."
    ]
    repeated = run(TesseraCompileModel, tiny_flux, backend="eager", scope="stack", overrides="double_blocks.0 eager")
    assert notes_of(repeated) == notes_of(out)


# Compile Report.


def test_the_report_names_each_region_with_what_it_compiled(tiny_flux):
    (model,) = run(TesseraCompileModel, tiny_flux, backend="aot_eager").result
    assert "Nothing was compiled yet" in run(TesseraCompileReport, model).result[0]
    tiny.sample(model, "flux")
    out = run(TesseraCompileReport, model)
    (facts,) = out.ui["tessera"]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert {r["region"]: r["graphs"] for r in facts["regions"]} == {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}
    assert out.result == (facts["text"],)
    assert "DoubleStreamBlock" in facts["text"] and "backend aot_eager" in facts["heading"]


def test_the_report_names_the_base_that_the_model_was_loaded_in(tiny_files):
    with torch.inference_mode():
        loaded, _ = open_quantized(str(tiny_files["flux"]), {}, "int8", False)
    (model,) = run(TesseraCompileModel, loaded, backend="eager").result
    for _ in range(2):
        (text,) = run(TesseraCompileReport, model.clone()).result
        assert text.splitlines()[0].endswith(" blocks of 2 kinds, quantize int8")


def test_a_model_without_compile_model_is_told_so_without_an_error(tiny_flux):
    out = run(TesseraCompileReport, tiny_flux)
    assert out.result == ("This MODEL is not compiled: put Compile Model in front of it.",)
    (facts,) = out.ui["tessera"]
    assert (facts["text"], facts["graphs"], facts["regions"]) == (out.result[0], 0, [])


# Train LoRA.


def test_train_lora_takes_what_it_can_without_cuda_graphs(tiny_flux):
    assert inherited_compile(tiny_flux, "auto") == (None, [])

    def train_settings(**values):
        return inherited_compile(run(TesseraCompileModel, tiny_flux, **values).result[0], "auto")

    assert train_settings(backend="aot_eager", fullgraph=True) == (CompileSettings("aot_eager", fullgraph=True), [])
    mode, lines = "max-autotune-no-cudagraphs", "double_blocks.0 eager\nsingle_blocks.* dynamic=true mode=max-autotune"
    settings, notes = train_settings(mode=mode, dynamic="true", scope="stack", overrides=lines, cache_size_limit=8)
    assert settings == CompileSettings(mode=mode, overrides=parse_overrides(lines))
    assert notes == [
        "Training doesn't use CUDA graphs, so it compiles with backend inductor and mode max-autotune-no-cudagraphs."
    ]
    for values, mode in (
        ({"mode": "reduce-overhead"}, "default"),
        ({"mode": "max-autotune"}, "max-autotune-no-cudagraphs"),
        ({"backend": "cudagraphs"}, "default"),
    ):
        settings, notes = train_settings(**values)
        assert settings == CompileSettings("inductor", mode)
        assert notes == [f"Training doesn't use CUDA graphs, so it compiles with backend inductor and mode {mode}."]


def test_compile_model_changes_nothing_that_a_run_is_known_by(tiny_flux, tmp_path):
    watcher = Watcher()
    fingerprint = weights_fingerprint(tiny_flux)
    trained = train(tiny_flux, mixed_data(), tmp_path, steps=2)
    (model,) = run(TesseraCompileModel, tiny_flux, backend="aot_eager").result
    assert weights_fingerprint(model) == fingerprint
    tiny.sample(model, "flux", steps=1)
    assert weights_fingerprint(model) == weights_fingerprint(tiny_flux) == fingerprint
    _, notes = trainable_model(model)
    assert notes == ()
    retrained = train(model, mixed_data(), tmp_path, watcher, steps=2)
    assert retrained.path == trained.path
    assert any("already finished" in note for note in watcher.notes) and watcher.losses == []
    assert inherited_compile(model, "off") == (None, [])


def test_a_wrapper_of_another_pack_is_still_named_as_left_out(tiny_flux):
    (model,) = run(TesseraCompileModel, tiny_flux, backend="aot_eager").result
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "other", lambda executor, *args, **kwargs: executor(*args))
    _, notes = trainable_model(model)
    assert notes == ("The MODEL carries apply_model wrappers, which training ignores.",)


# Through the server.


def compile_graph(loaders, seed=1, **settings):
    return loaders | {
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "compile": node("TesseraCompileModel", model=["model", 0], **settings),
        "sampled": ksampler("compile", seed=seed),
        "report": node("TesseraCompileReport", model=["compile", 0], after=["sampled", 0]),
        "shown": node("PreviewAny", source=["report", 0]),
    }


def cached_nodes(entry):
    (message,) = [message for kind, message in entry["status"]["messages"] if kind == "execution_cached"]
    return set(message["nodes"])


def test_the_report_of_a_session_is_fresh_in_each_prompt_while_the_graphs_stay(server, tiny_loaders):
    settings = {"backend": "aot_eager", "scope": "stack", "overrides": "double_blocks.0 eager"}
    calls = []
    for seed in (1, 2, 2):
        entry = server.run(compile_graph(tiny_loaders, seed, **settings))
        (report,) = entry["outputs"]["report"]["tessera"]
        assert entry["outputs"]["shown"]["text"] == [report["text"]]
        assert {r["region"]: r["graphs"] for r in report["regions"]} == {"DoubleStreamBlock": 1, "single_blocks": 1}
        calls.append(sum(r["compiled_calls"] for r in report["regions"]))
        # Said while the sampler ran, in the first prompt; the node is cached in the others.
        (said,) = entry["outputs"]["compile"]["tessera"]
        assert said["notes"] == [
            "scope stack: double_blocks is compiled block by block, because overrides give its blocks different "
            "settings."
        ]
    assert 0 < calls[0] < calls[1] == calls[2]
    assert {"compile", "sampled"} <= cached_nodes(entry) and not {"report", "shown"} & cached_nodes(entry)


def test_the_server_refuses_a_backend_that_is_not_there_in_our_words(server, tiny_loaders):
    with pytest.raises(ServerFailure, match="backend 'nvfuser' is not installed; choose one of inductor") as refused:
        server.queue(compile_graph(tiny_loaders, backend="nvfuser"))
    assert "not in list" not in str(refused.value)
    with pytest.raises(ServerFailure, match="mode: 'fastest' not in .*'max-autotune'"):
        server.queue(compile_graph(tiny_loaders, mode="fastest"))


def test_the_server_shows_the_sentence_on_compile_model_before_it_samples(server, tiny_loaders):
    for overrides, sentence in {
        "blocks.* eager": "overrides: blocks.* matches no block of this model, which has double_blocks.*, single_",
        "double_blocks.*": "overrides, line 1: double_blocks.* has no setting",
    }.items():
        entry = server.wait(server.queue(compile_graph(tiny_loaders, overrides=overrides)))
        assert error_of(entry).startswith("TesseraCompileModel compile: ") and sentence in error_of(entry)
    compiled = compile_graph(tiny_loaders)
    compiled["compile"]["inputs"]["model"] = ["clip", 0]
    with pytest.raises(ServerFailure, match="received_type.CLIP. mismatch input_type.MODEL"):
        server.queue(compiled)


def test_the_server_lists_what_torch_can_compile_with(server):
    (node_info,) = server.get("/object_info/TesseraCompileModel").values()
    _, backend = node_info["input"]["optional"]["backend"]
    assert backend["options"][:4] == ["inductor", "cudagraphs", "aot_eager", "eager"]
    assert set(torch._dynamo.list_backends()) <= set(backend["options"])


def test_train_lora_behind_compile_model_compiles_so_and_loses_nothing(server, tiny_loaders):
    graph = compile_graph(tiny_loaders, backend="aot_eager", dynamic="true")
    del graph["sampled"], graph["report"], graph["shown"]
    inputs = {"steps": 3, "learning_rate": 1e-2, "rank": 4, "batch_size": 1, "gradient_accumulation": 1, "seed": 0}
    inputs |= {"save_every": 0, "resume": "off", "data": ["data", 0]}
    graph |= {
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "compiled": node("TesseraTrainLora", model=["compile", 0], output_name="by_node", compile="auto", **inputs),
        "eager": node("TesseraTrainLora", model=["model", 0], output_name="eager", compile="off", **inputs),
    }
    outputs = server.run(graph)["outputs"]
    (compiled,), (eager,) = outputs["compiled"]["tessera"], outputs["eager"]["tessera"]
    report = compiled["compile_report"]
    assert report["heading"] == "Train LoRA: backend aot_eager, mode default, block by block, static shapes"
    assert {region["how"]["backend"] for region in report["regions"]} == {"aot_eager"}
    assert compiled["graphs_compiled"] == compiled["graphs_planned"] == 2
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
