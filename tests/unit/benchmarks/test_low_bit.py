"""Bytes of real models with their blocks in 8 bit, counted from their shapes; loading holds what is counted."""

import sys
from math import prod
from pathlib import Path

import pytest
import tiny
import torch
from comfy.quant_ops import QuantizedTensor

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from tessera.memory.host.flat_weights import parts_of
from tessera.nodes.model.model_file import open_quantized

from studies.low_bit import GIB, held_bytes, real_shapes


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_loading_holds_what_is_counted(quantize: str, tmp_path: Path) -> None:
    sizes = (128, 1, 2, tiny.T5_WIDTH, tiny.CLIP_WIDTH, True)
    path = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=2, dtype=torch.bfloat16)
    with torch.inference_mode():
        model, _ = open_quantized(str(path), {}, quantize, False)
    weights = list(model.model.diffusion_model.parameters())
    in_8_bit = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    byte_count = sum(part.nbytes for weight in in_8_bit for part in parts_of(weight))
    # A CPU computes in fp32, and the loader keeps all others so.
    byte_count += 2 * sum(weight.numel() for weight in weights if not isinstance(weight, QuantizedTensor))
    assert len(in_8_bit) == 16 and byte_count == held_bytes(tiny.models.flux.flux_shapes(*sizes), quantize)


@pytest.mark.parametrize(
    ("name", "blocks", "least", "upper"),
    [("flux", ("double_blocks.", "single_blocks."), 11, 11.2), ("wan", ("blocks.",), 13, 14)],
)
def test_real_models_in_int8_fit(name: str, blocks: tuple[str, ...], least: float, upper: float) -> None:
    shapes = real_shapes(name)
    inside = [shape for key, shape in shapes.items() if key.startswith(blocks) and len(shape) == 2]
    inside = [shape for shape in inside if shape[0] > 6]  # no table of shifts
    wide = 2 * sum(map(prod, shapes.values()))
    expected = wide - sum(map(prod, inside)) + 4 * sum(shape[0] for shape in inside)  # a scale of fp32 for each row
    assert held_bytes(shapes, "int8") == expected
    assert held_bytes(shapes, "as stored") == wide
    assert least * GIB < expected < upper * GIB
