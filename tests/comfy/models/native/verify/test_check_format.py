"""The first step's check of reading: a weight that training reads otherwise than ComfyUI does stops the run."""

from typing import Any

import pytest
import torch
from tessera.memory.weights.check_format import compare_formats
from tessera.memory.weights.frozen import FrozenWeights
from tessera.models.native.forward.shadow import Shadow
from tiny.memory.quantised import LAYER, core_layer
from tiny.models.flux import QUANTISED
from tiny.native import ROWS, build, data_of
from tiny.train.training import make_trainer

CPU = torch.device("cpu")
BY_NAME = {row.name: row for row in ROWS}


def mismatch(weights: FrozenWeights, read: Any) -> Any:
    """Return the mismatch layer, None without one; ComfyUI's own layer must have run."""
    compared = compare_formats(weights, {LAYER: read.apply})
    assert len(compared.kinds) == 1 and not compared.unknown
    return compared.mismatch


def quantised(storage: str, dtype: torch.dtype = torch.float32, width: int = 128) -> FrozenWeights:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, width, generator=generator) * 0.02
    return FrozenWeights(core_layer(storage, weight, torch.randn(64, generator=generator)), CPU, dtype)


def lora_on(patcher: Any, keys: list[str]) -> Any:
    """The MODEL with a difference on these weights, as a loader of LoRAs puts it there."""
    clone = patcher.clone()
    shapes = {key: clone.model.get_parameter(f"diffusion_model.{key}").shape for key in keys}
    clone.add_patches(
        {f"diffusion_model.{key}": ("diff", (0.1 * torch.randn(shape),)) for key, shape in shapes.items()}
    )
    return clone


@pytest.mark.parametrize("storage", QUANTISED)
def test_a_scale_that_is_dropped_is_found_in_each_format(storage):
    weights = quantised(storage)
    read = weights.linear(LAYER)
    assert mismatch(weights, read) is None
    narrow = quantised(storage, torch.bfloat16)
    assert mismatch(narrow, narrow.linear(LAYER)) is None
    if read.layout is None:
        wrong = read._replace(scale=None, weight=read.weight if read.scale is not None else 2 * read.weight)
    else:
        wrong = read._replace(parts=tuple(part.double().mul(2).to(part.dtype) for part in read.parts))
    difference = mismatch(weights, wrong)
    assert difference is not None and difference.name == LAYER and difference.difference > 0.5
    unbiased = mismatch(weights, read._replace(bias=None))
    assert unbiased is not None and unbiased.difference > 0.5


@pytest.mark.parametrize("storage", QUANTISED)
def test_a_format_with_a_lora_is_read_as_exactly_as_one_without(storage):
    """At a real width: core's own product in int4 rounds its input too, the more the wider it is. The rounding of the
    LoRA into the format, at random, is up to 20 % and must not hide a fault."""
    weights = quantised(storage, width=2048)
    assert mismatch(weights, weights.linear(LAYER)) is None
    torch.manual_seed(0)
    for size in (1e-5, 1e-2):
        patched = quantised(storage, width=2048)
        patched.patcher.add_patches({f"diffusion_model.{LAYER}.weight": ("diff", (size * torch.randn(64, 2048),))})
        read = patched.linear(LAYER)
        assert mismatch(patched, read) is None
    stronger = compare_formats(patched, {LAYER: lambda x: 1.02 * read.apply(x)}).mismatch
    assert stronger is not None and 0.01 < stronger.difference < 0.03
    assert mismatch(patched, read._replace(bias=None)).difference > 0.5
    assert mismatch(patched, weights.linear(LAYER)).difference > 0.2  # without the LoRA


def test_a_layer_that_comfyui_cannot_run_is_named(monkeypatch):
    weights = quantised("int8")

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel")

    layer = weights.patcher.model.get_submodule(f"diffusion_model.{LAYER}")
    monkeypatch.setattr(type(layer), "forward_comfy_cast_weights", fails)
    compared = compare_formats(weights, {LAYER: weights.linear(LAYER).apply})
    assert compared.mismatch is None and not compared.kinds
    assert [kind.partition(" ")[0] for kind in compared.unknown] == ["Linear"]


def test_a_dtype_that_dynamic_vram_casts_to_is_read_by_both(monkeypatch):
    """It notes on the module what the weight is cast to at each use, such as fp8 for a bf16 file."""
    patcher = build(BY_NAME["z-image"], torch.bfloat16)
    linears = [n for n, m in patcher.model.diffusion_model.named_modules() if hasattr(m, "in_features")]
    patched = lora_on(patcher, [f"{name}.weight" for name in linears])
    for name in linears:
        patcher.model.diffusion_model.get_submodule(name).weight_comfy_model_dtype = torch.float8_e5m2
    for model in (patcher, patched):
        assert Shadow(model, FrozenWeights(model, CPU, torch.bfloat16)).mismatch() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sd1.5", "sdxl", "z-image", "hunyuan-video", "ltx-video", "minimax-h3"])
def test_weights_that_are_read_right_pass_with_loras_and_swapped_blocks_too(name, dtype):
    patcher = build(BY_NAME[name], dtype)
    linear = next(n for n, m in patcher.model.diffusion_model.named_modules() if hasattr(m, "in_features"))
    patched = lora_on(patcher, [f"{linear}.weight", f"{linear}.bias"] if name == "sd1.5" else [f"{linear}.weight"])
    for model in (patcher, patched):
        weights = FrozenWeights(model, CPU, dtype)
        attributes = [dict(vars(module)) for module in model.model.diffusion_model.modules()]
        assert Shadow(model, weights).mismatch() is None
        assert attributes == [dict(vars(module)) for module in model.model.diffusion_model.modules()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["z-image", "sd1.5"])
def test_a_weight_two_percent_too_large_is_found_under_dynamic_vram(name, dtype, monkeypatch):
    """Its modules read through a handle to memory that comes and goes, here an empty one."""
    patcher = build(BY_NAME[name], dtype)
    for module in patcher.model.diffusion_model.modules():
        if getattr(module, "weight", None) is not None:
            module._v = object()
    shadow = Shadow(patcher, FrozenWeights(patcher, CPU, dtype))
    assert shadow.mismatch() is None
    linear = FrozenWeights.linear

    def wrong(self: Any, name: str, **options: Any) -> Any:
        read = linear(self, name, **options)
        return read._replace(weight=1.02 * read.weight)

    monkeypatch.setattr(FrozenWeights, "linear", wrong)
    difference = shadow.mismatch()
    assert difference is not None and 0.01 < difference.difference < 0.03
    assert all(
        hasattr(module, "_v") for module in patcher.model.modules() if getattr(module, "weight", None) is not None
    )


@pytest.mark.parametrize("kind", ["GroupNorm", "Conv2d", "LayerNorm"])
def test_other_modules_that_are_read_wrong_are_found(kind, monkeypatch):
    patcher = build(BY_NAME["sd1.5"])
    shadow = Shadow(patcher, FrozenWeights(patcher, CPU, torch.float32))
    stored = FrozenWeights.stored

    def wrong(self: Any, name: str) -> Any:
        module = patcher.model.diffusion_model.get_submodule(name.rpartition(".")[0])
        return stored(self, name) * (1.1 if type(module).__name__ == kind else 1.0)

    monkeypatch.setattr(FrozenWeights, "stored", wrong)
    difference = shadow.mismatch()
    assert difference is not None and difference.difference > 0.05
    assert type(patcher.model.diffusion_model.get_submodule(difference.name)).__name__ == kind


def test_the_first_step_of_a_run_ends_in_a_sentence(monkeypatch, tmp_path):
    row = BY_NAME["sd1.5"]
    trainer = make_trainer(build(row), data_of(row), tmp_path, save_every=0)
    linear = FrozenWeights.linear

    def without_bias(self: Any, name: str, **options: Any) -> Any:
        return linear(self, name, **options)._replace(bias=None)

    monkeypatch.setattr(FrozenWeights, "linear", without_bias)
    with pytest.raises(ValueError, match="model is a .* is read .*% differently than ComfyUI reads it, so its LoRA"):
        trainer.run()
    trainer.close()
