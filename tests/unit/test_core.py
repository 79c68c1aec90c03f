"""Private touches of ComfyUI stand in one module, and do what they say on the ComfyUI that is installed."""

import ast
import re
from pathlib import Path

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from tessera.common import core

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = re.compile(
    r"_qdata|_layout_cls|_params|backup|hook_backup|__closure__|cached_patcher_init|current_loaded_models|"
    r"extra_reserved_memory|discard_cuda_async_error|\*_comfy_model_dtype|(convert|set)_\*"
)


def touches(file: Path) -> list[str]:
    """The private attributes that a file reads, by `.name` or by getattr."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            asked = node.args[1]
            parts = asked.values if isinstance(asked, ast.JoinedStr) else [asked]
            found += ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)]
    return [name for name in found if PRIVATE.fullmatch(name)]


def test_private_touches_of_comfyui_stand_in_core():
    files = [
        file
        for layer in ("compile", "data", "lora", "memory", "models", "nodes", "train", "common")
        for file in (ROOT / layer).rglob("*.py")
    ]
    found = {str(file.relative_to(ROOT)): names for file in files if (names := touches(file))}
    assert len(found.pop("common/core.py")) >= 10
    assert not found


def test_a_patched_weight_has_its_original_laid_aside(tiny_flux):
    key = "diffusion_model.img_in.weight"
    patcher = tiny_flux.clone()
    before = patcher.model.diffusion_model.img_in.weight.clone()
    patcher.add_patches({key: ("diff", (torch.ones_like(before),))})
    assert not core.is_patched(patcher) and core.original_weights(patcher) == {}
    patcher.patch_model()
    try:
        assert core.is_patched(patcher) and key in core.replaced_keys(patcher)
        assert torch.equal(core.original_weights(patcher)[key], before)
        assert [original.shape for original in core.patched_originals(patcher)] == [before.shape]
    finally:
        patcher.unpatch_model()
    assert not core.is_patched(patcher)


def test_a_quantised_weight_is_its_data_and_its_scales():
    weight = QuantizedTensor.from_float(torch.randn(16, 16), "TensorCoreFP8E4M3Layout", scale="recalculate")
    data, params = core.quantised_data(weight), core.quantised_params(weight)
    assert data.dtype is torch.float8_e4m3fn and tuple(params.orig_shape) == (16, 16)
    torch.testing.assert_close(weight.dequantize(), data.float() * params.scale)
    assert core.quantised_layout(weight) == "TensorCoreFP8E4M3Layout"


def test_a_function_gives_what_it_closed_over():
    one, two = object(), object()
    assert core.closed_over(lambda: (one, two)) == [one, two]
    assert core.closed_over(print) == []


@pytest.mark.parametrize(
    ("loader", "path"),
    [(None, ""), ((print, ("a.safetensors",)), "a.safetensors"), ((print, ()), ""), ((print, (3,)), "")],
)
def test_the_file_of_a_model_is_known_where_its_loader_says_it(tiny_flux, loader, path):
    patcher = tiny_flux.clone()
    patcher.cached_patcher_init = loader
    assert core.has_loader(patcher) == (loader is not None) and core.loaded_from(patcher) == path
