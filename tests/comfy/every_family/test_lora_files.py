"""LoRA files of every family in the programs that read them: ComfyUI and diffusers get the same delta W of each format.

delta W is written out here as alpha / rank · up @ down.
"""

import logging
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from family_cases import CASES, cases, every_case, marks_of
from safetensors import safe_open
from tessera.lora.files.formats import FORMATS, save_lora
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.files.readers import PROGRAMS
from tessera.lora.patterns import match_targets
from tessera.models.blocks import linear_shapes
from tessera.models.catalogue.registry import family_of
from tiny.lora.foreign_loras import foreign
from tiny.lora.lora_files import assert_same_deltas, delta, loaded_in_comfyui, patched_deltas, random_updates
from tiny.models.family_case import ALL, FamilyCase, relative_error
from tiny.train.runs import train, training_data
from torch import Tensor

DTYPES = {"fp32": 1e-5, "bf16": 6e-3, "fp16": 1e-3}


def updates_of(case: FamilyCase, model: Any, names: str = ALL) -> dict[str, Any]:
    """A random update with an alpha of its own for every Linear that a LoRA trains, or for those by default."""
    updates = {n: u for n, u in random_updates(model).items() if not n.startswith(case.never_trained or "/")}
    assert len(updates) == case.linears
    return {name: part for name, part in updates.items() if names == ALL or case.is_target(name)}


def saved(updates: dict[str, Any], path: Path, layout: str, dtype: str = "fp32") -> Path:
    save_lora(path, LoraModel.from_modules(updates), layout, dtype)
    return path


def files() -> list[Any]:
    return [
        pytest.param(
            case,
            layout,
            dtype,
            id=f"{case.name}-{layout}-{dtype}",
            marks=marks_of(case, "files") if (layout, dtype) == ("kohya", "bf16") else (),
        )
        for case in cases("files")
        for layout in case.layouts
        for dtype in DTYPES
    ]


@pytest.mark.parametrize(("case", "layout", "dtype"), files())
def test_comfyui_loads_every_key_and_gets_the_same_update(case_file, tmp_path, caplog, case, layout, dtype):
    model = case.load(case_file(case))
    updates = updates_of(case, model, case.layouts[layout])
    file = saved(updates, tmp_path / "a.safetensors", layout, dtype)
    patched = loaded_in_comfyui(model, comfy.utils.load_torch_file(str(file), safe_load=True), caplog)
    assert_same_deltas(patched_deltas(model, patched), updates, DTYPES[dtype])


@every_case("files")
def test_the_default_targets_are_those_of_other_trainers(case_file, case):
    model = case.load(case_file(case))
    names = list(linear_shapes(model.model))
    targets = match_targets(names, family_of(model).default_targets, ())
    assert targets == [name for name in names if case.is_target(name)]
    assert len(targets) == case.targets


@every_case("files")
def test_a_trained_file_holds_the_default_targets_and_says_what_it_is(case_file, tmp_path, case):
    model = case.load(case_file(case))
    data = training_data(*case.batches()[case.main_batches[-1]]())
    result = train(model, data, tmp_path, steps=2, save_every=0)
    with safe_open(result.path, "pt") as file:
        header, keys = file.metadata(), set(file.keys())
    assert {name: header[name] for name in case.header()} == case.header()
    flat = {f"lora_unet_{n.replace('.', '_')}" for n in linear_shapes(model.model) if case.is_target(n)}
    assert keys == {f"{name}.{part}" for name in flat for part in ("lora_down.weight", "lora_up.weight", "alpha")}


def with_adapter(case: FamilyCase, model: Any, path: Path, caplog: Any) -> Any:
    """diffusers' model with the file's LoRA on it, after seeing that it takes every key."""
    kit = case.diffusers()
    transformer = kit.build(model)
    state = kit.mixin.lora_state_dict(str(path))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []
    return transformer


def in_diffusers() -> list[Any]:
    pairs = [(case, layout) for case in cases("diffusers") if case.diffusers() for layout in case.diffusers().layouts]
    return [pytest.param(case, layout, id=f"{case.name}-{layout}") for case, layout in pairs]


@pytest.mark.parametrize(("case", "layout"), in_diffusers())
def test_diffusers_loads_every_key_and_gets_the_same_update(case_file, tmp_path, caplog, case, layout):
    model, kit = case.load(case_file(case)), case.diffusers()
    updates = updates_of(case, model, kit.layouts[layout])
    transformer = with_adapter(case, model, saved(updates, tmp_path / "a.safetensors", layout), caplog)
    expected = kit.rows(model, {f"{name}.weight": delta(part) for name, part in updates.items()})
    layers = {name: layer for name, layer in transformer.named_modules() if hasattr(layer, "get_delta_weight")}
    assert {f"{name}.weight" for name in layers} == {name for name, tensor in expected.items() if tensor.any()}
    for name, layer in layers.items():
        if name not in kit.differs.get(layout, ()):
            delta_expected = expected[f"{name}.weight"]
            assert (layer.get_delta_weight("a").double() - delta_expected).norm() <= 1e-5 * delta_expected.norm(), name


def taken_by_comfyui(case: FamilyCase, model: Any, updates: dict[str, Any], path: Path) -> set[str]:
    """The modules whose weights ComfyUI's loader changes as they were trained."""
    patched, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(path)), 1.0, 0.0)
    deltas = patched_deltas(model, patched)
    return {
        name for name, part in updates.items() if name in deltas and relative_error(deltas[name], delta(part)) < 1e-5
    }


def taken_by_diffusers(case: FamilyCase, model: Any, updates: dict[str, Any], path: Path) -> set[str]:
    """The modules all of whose parts diffusers' model gets as they were trained; none where its loader fails."""
    kit = case.diffusers()
    transformer = kit.build(model)
    try:
        transformer.load_lora_adapter(kit.mixin.lora_state_dict(str(path)), prefix="transformer", adapter_name="a")
    except (AssertionError, IndexError, KeyError, ValueError):
        return set()
    loaded = {
        n: part.get_delta_weight("a").detach() for n, part in transformer.named_modules() if hasattr(part, "lora_A")
    }
    rows = kit.rows(model, {f"{name}.weight": delta(part) for name, part in updates.items()})
    right = {n for n, tensor in loaded.items() if relative_error(tensor, rows[f"{n}.weight"]) < 1e-5}
    names = family_of(model).names
    return {name for name in updates if right.issuperset(names.diffusers(name))}


TAKEN = dict(zip(PROGRAMS, (taken_by_comfyui, taken_by_diffusers), strict=True))
# diffusers' converter of kohya's names for FLUX.1 knows the real size only:
# tests/comfy/models/flux/test_full_size_files.py.
AT_FULL_SIZE = {("flux-dev", "kohya"), ("chroma", "kohya")}


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("row", ["flux-dev", "flux2-dev", "qwen-image", "wan-2.1-i2v", "chroma"])
def test_sentences_of_save_lora_on_a_format_hold_for_comfyui_and_diffusers(case_file, tmp_path, row, layout):
    """Of all layers, and of those that a program that refuses the file is said to take without the others."""
    case = CASES[row]
    model = case.load(case_file(case))
    table, updates = family_of(model).names, updates_of(case, model)
    for program, loads in TAKEN.items():
        if program == "diffusers" and (row, layout) in AT_FULL_SIZE:
            continue
        refused = [g for g in table.gaps if (g.program, g.format, g.refuses) == (program, layout, True)]
        remaining = {
            n: part for n, part in updates.items() if not any(fnmatchcase(n, p) for g in refused for p in g.names)
        }
        for saved_updates in [updates, remaining][: 1 + len(refused)]:
            file = saved(saved_updates, tmp_path / "a.safetensors", layout)
            assert loads(case, model, saved_updates, file) == saved_updates.keys() - table.left_out(
                program, layout, list(saved_updates)
            ), program


@pytest.mark.parametrize("form", ["loha", "lokr", "oft", "diff"])
def test_diffusers_takes_no_file_of_another_kind_than_plain_lora(case_file, tmp_path, form):
    case = CASES["qwen-image"]
    model = case.load(case_file(case))
    shapes = linear_shapes(model.model)
    save_lora(tmp_path / "a.safetensors", foreign(form, {f"diffusion_model.{n}": shapes[n] for n in shapes}), "kohya")
    assert taken_by_diffusers(case, model, random_updates(model), tmp_path / "a.safetensors") == set()


@every_case("diffusers")
def test_with_the_lora_diffusers_runs_as_comfyui_does(case_file, tmp_path, caplog, case):
    model = case.load(case_file(case))
    kit = case.diffusers()
    guidance = 3.5
    sigma = 0.6
    sample = case.batches()[kit.batches[-1]]()[0]

    def velocities(patched_model: Any, diffusers_model: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            diffusers_velocity = kit.velocity(diffusers_model, sample, sample.load().latent, sigma, guidance)
        return case.core_velocity(patched_model, sample, sigma, guidance), diffusers_velocity

    comfy.model_management.load_models_gpu([model], force_full_load=True)
    base, base_there = velocities(model, kit.build(model))
    assert relative_error(base_there, base) < 1e-4
    updates = updates_of(case, model)
    transformer = with_adapter(case, model, saved(updates, tmp_path / "a.safetensors", "diffusers"), caplog)
    patched, _ = comfy.sd.load_lora_for_models(model, None, LoraModel.from_modules(updates), 1.0, 0.0)
    comfy.model_management.load_models_gpu([patched], force_full_load=True)
    try:
        core_velocity, diffusers_velocity = velocities(patched, transformer)
    finally:
        patched.detach()
    assert (core_velocity - base).norm() > 0.1 * base.norm()
    assert (core_velocity - diffusers_velocity).norm() < 1e-4 * (core_velocity - base).norm()
