"""Private touches of ComfyUI stand in one module, and do what they say on the ComfyUI that is installed."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import comfy.sd
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter.bypass import BypassInjectionManager
from tessera.common import core
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
PRIVATE = re.compile(
    r"_qdata|_layout_cls|_params|backup|hook_backup|__closure__|cached_patcher_init|current_loaded_models|"
    r"extra_reserved_memory|discard_cuda_async_error|\*_comfy_model_dtype|(convert|set)_\*|get_clone_model_override|"
    r"reset_cast_buffers|cleanup_prefetch_queues|TOTAL_PINNED_MEMORY|ensure_pin_registerable|_apply_model"
)
# What is asked for by a keyword, overridden, or compared as text.
CORE = "common/core.py"
WORDS = {
    "disable_dynamic": CORE,
    "_lazy_load_from_state_dict": CORE,
    "_load_list": CORE,
    "_encode_tiled_owned": CORE,
    "disable_comfy_compiler": CORE,
    "MALLOC_GRAPHS": "memory/comfy_compiler.py",
}
LAYERS = ("compile", "data", "lora", "memory", "models", "nodes", "train", "common")


def touches(file: Path) -> list[str]:
    """The private attributes that a file reads, by `.name` or by getattr."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            argument = node.args[1]
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            names += ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)]
    return [name for name in names if PRIVATE.fullmatch(name)]


def product_files() -> list[Path]:
    return [file for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]


def test_private_touches_of_comfyui_stand_in_core():
    touches_by_file = {str(file.relative_to(ROOT)): names for file in product_files() if (names := touches(file))}
    assert len(touches_by_file.pop(CORE)) >= 10
    assert not touches_by_file


@pytest.mark.parametrize("word", WORDS)
def test_words_of_comfyui_s_own_stand_in_core(word):
    files = [str(file.relative_to(ROOT)) for file in product_files() if word in file.read_text(encoding="utf-8")]
    assert files == [WORDS[word]]


def comfyui_names(file: Path) -> set[str]:
    """Every dotted name of ComfyUI that a file imports, and what it reads of the modules and classes imported."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports: dict[str, str] = {}  # name in the file → dotted name
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                names.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, _, rest = dotted.partition(".")
        if first in imports and re.fullmatch(r"[\w.]+", rest):
            names.add(f"{imports[first]}.{rest}")
    pattern = re.compile(
        r"(comfy|comfy_api|comfy_execution|comfy_aimdo|comfy_kitchen|comfyui_version|folder_paths|server|latent_preview)(\.|$)"
    )
    return {name for name in names if pattern.match(name)}


def missing(name: str) -> bool:
    """Look a dotted name up as far as modules and classes go; what an object holds is known when it runs only."""
    parts = name.split(".")
    target = importlib.import_module(parts[0])
    for n, part in enumerate(parts[1:], 2):
        if not (isinstance(target, ModuleType) or inspect.isclass(target)):
            return False
        if not hasattr(target, part):
            try:
                importlib.import_module(".".join(parts[:n]))
            except ModuleNotFoundError:
                return True
        target = getattr(target, part)
    return False


def test_every_name_of_comfyui_that_is_read_is_there():
    read = {name: file for file in product_files() for name in comfyui_names(file)}
    assert len(read) > 100
    assert not {name: str(file.relative_to(ROOT)) for name, file in read.items() if missing(name)}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import comfy.sd\ncomfy.sd.gone()", {"comfy.sd.gone"}),
        ("from comfy import gone", {"comfy.gone"}),
        ("import comfy.gone", {"comfy.gone"}),
        (
            "from comfy.patcher_extension import CallbacksMP as C\nC.ON_GONE",
            {"comfy.patcher_extension.CallbacksMP.ON_GONE"},
        ),
        ("def f():\n    from comfy import sd\n    return sd.VAE.gone", {"comfy.sd.VAE.gone"}),
    ],
)
def test_a_name_that_is_gone_is_found(source, names, tmp_path):
    file = tmp_path / "a.py"
    file.write_text(source)
    assert {name for name in comfyui_names(file) if missing(name)} == names


def test_the_features_of_the_comfyui_at_hand_are_found():
    features = core.features()
    assert features["version"] == importlib.import_module("comfyui_version").__version__
    for name in ("loads_without_dynamic_vram", "lazy_loading", "free_memory_of_model", "counts_pinned_memory"):
        assert features[name] is True, name
    assert "reset_cast_buffers" in features["end_of_node"] and "encode_tiled_" in features["tiled_encoding"]
    assert features["dynamic_vram"] is False  # on a CPU
    json.dumps(features, allow_nan=False)


def test_a_patched_weight_has_its_original_laid_aside(tiny_flux):
    key = "diffusion_model.img_in.weight"
    patcher = tiny_flux.clone()
    weight = patcher.model.diffusion_model.img_in.weight.clone()
    patcher.add_patches({key: ("diff", (torch.ones_like(weight),))})
    assert not core.is_patched(patcher) and core.original_weights(patcher) == {}
    patcher.patch_model()
    try:
        assert core.is_patched(patcher) and key in core.replaced_keys(patcher)
        assert torch.equal(core.original_weights(patcher)[key], weight)
        assert [original.shape for original in core.patched_originals(patcher)] == [weight.shape]
    finally:
        patcher.unpatch_model()
    assert not core.is_patched(patcher)


def test_a_quantised_weight_is_its_data_and_its_scales():
    weight = QuantizedTensor.from_float(torch.randn(16, 16), "TensorCoreFP8E4M3Layout", scale="recalculate")
    data, params = core.quantised_data(weight), core.quantised_params(weight)
    assert data.dtype is torch.float8_e4m3fn and tuple(params.orig_shape) == (16, 16)
    torch.testing.assert_close(weight.dequantize(), data.float() * params.scale)
    assert core.quantised_layout(weight) == "TensorCoreFP8E4M3Layout"


def test_an_injection_gives_the_managers_of_its_adapters_and_another_one_none():
    manager = BypassInjectionManager()
    bypass = SimpleNamespace(inject=lambda patcher: manager.inject(patcher))
    assert core.bypass_managers(bypass) == [manager]
    other = object()
    for function in (print, lambda: other):
        assert core.bypass_managers(SimpleNamespace(inject=function)) == []


def test_weights_that_leave_when_memory_is_asked_for_count_as_free_and_only_once(tiny_flux, monkeypatch):
    mm = comfy.model_management
    monkeypatch.setattr(mm, "get_free_memory", lambda device: 1000)
    monkeypatch.setattr(mm, "extra_reserved_memory", lambda: 100)
    patcher = tiny_flux.clone()
    assert core.usable_memory(patcher) == 900
    monkeypatch.setattr(ModelPatcher, "get_free_memory", lambda self, device: 1000 + 50)
    assert core.usable_memory(patcher) == 950

    def entry(size, dynamic, device="cpu", is_freed=False):
        model = None if is_freed else SimpleNamespace(is_dynamic=lambda: dynamic)
        return SimpleNamespace(device=torch.device(device), model=model, model_loaded_memory=lambda: size)

    listed = [entry(1, False), entry(20, True), entry(300, False, "meta"), entry(4000, False, is_freed=True)]
    monkeypatch.setattr(mm, "current_loaded_models", listed)
    assert core.bytes_to_unload(torch.device("cpu")) == 1
    monkeypatch.delattr(ModelPatcher, "get_free_memory")
    assert core.usable_memory(patcher) == 900 and core.bytes_to_unload(torch.device("cpu")) == 21


def without_the_switch(path):
    raise AssertionError("called with what it does not take")


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (None, False),
        ((comfy.sd.load_diffusion_model, ("a.safetensors",)), True),
        ((without_the_switch, ("a.safetensors",)), False),
        ((lambda path, **options: None, ("a.safetensors",)), True),
    ],
)
def test_a_loader_is_asked_only_for_what_it_takes(tiny_flux, loader, expected):
    patcher = tiny_flux.clone()
    patcher.cached_patcher_init = loader
    assert core.can_leave_dynamic_vram(patcher) is expected


def test_a_comfyui_whose_clone_has_no_such_switch_is_not_asked(tiny_flux, monkeypatch):
    patcher = tiny_flux.clone()
    patcher.cached_patcher_init = (comfy.sd.load_diffusion_model, ("a.safetensors",))
    monkeypatch.setattr(type(patcher), "clone", lambda self: self)
    assert core.can_leave_dynamic_vram(patcher) is False


@pytest.mark.parametrize("takes_it", [True, False])
def test_a_model_is_loaded_without_dynamic_vram_where_the_loader_can(takes_it, monkeypatch):
    calls = []

    def load(path, model_options):
        calls.append((path, model_options))

    def load_off(path, model_options, disable_dynamic=False):
        calls.append((path, model_options, disable_dynamic))

    monkeypatch.setattr(comfy.sd, "load_diffusion_model", load_off if takes_it else load)
    core.load_without_dynamic_vram("a", {})
    assert calls == [("a", {}, True) if takes_it else ("a", {})]


@pytest.mark.parametrize("entry", [(1, 2, "name", nn.Identity(), {}), (1, "name", nn.Identity()), (nn.Identity(), 3)])
def test_modules_are_left_out_of_a_load_list_wherever_an_entry_holds_them(entry, monkeypatch):
    other_entry = (0, "other", nn.Linear(1, 1), {})
    monkeypatch.setattr(ModelPatcher, "_load_list", lambda self, for_dynamic=False: [entry, other_entry])

    class Patcher(core.PartialPatcher):
        def left_out(self, module):
            return isinstance(module, nn.Identity)

        def __init__(self):
            pass

        def __del__(self):
            pass

    assert Patcher()._load_list(for_dynamic=True) == [other_entry]


@pytest.mark.parametrize(
    ("loader", "path"),
    [(None, ""), ((print, ("a.safetensors",)), "a.safetensors"), ((print, ()), ""), ((print, (3,)), "")],
)
def test_the_file_of_a_model_is_known_where_its_loader_says_it(tiny_flux, loader, path):
    patcher = tiny_flux.clone()
    patcher.cached_patcher_init = loader
    assert core.loaded_from(patcher) == path
