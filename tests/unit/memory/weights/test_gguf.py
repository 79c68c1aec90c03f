"""Weights in the blocks of GGUF: values as the package `gguf` has them, products, and what waits for backward."""

import json
import sys

import gguf
import pytest
import torch
from tessera.memory.weights.formats import gguf_blocks as blocks
from tessera.memory.weights.formats import gguf_reader as reader
from tessera.memory.weights.formats.stored_format import Format
from tessera.memory.weights.frozen import FrozenWeights, check_readable
from tessera.memory.weights.frozen_linear import FrozenLinear
from tiny.memory.gguf import OTHERS, SCALES, dequantised, kind_of, random_blocks, stored_tensor
from torch import nn

WIDTHS = {name: 768 if blocks.FORMATS[name].values == 256 else 96 for name in SCALES}


def frozen(name, rows, seed=0):
    """(a FrozenLinear of random blocks, its values in fp32)"""
    stored = random_blocks(name, rows, WIDTHS[name], seed)
    return FrozenLinear(stored, None, None, (), Format(name, (rows, WIDTHS[name]), (), {}).text()), dequantised(
        stored, name
    )


def test_every_format_of_ours_has_the_number_and_the_sizes_of_the_package():
    assert set(blocks.FORMATS) == set(SCALES)
    for name, kind in blocks.FORMATS.items():
        assert kind_of(name) == kind.number and gguf.GGML_QUANT_SIZES[kind.number] == (kind.values, kind.size), name


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("name", SCALES)
def test_blocks_are_dequantised_to_the_package_s_values(name, rows, monkeypatch):
    monkeypatch.setattr(blocks, "AT_ONCE", 8 * blocks.FORMATS[name].values)  # in several passes, the last a short one
    stored = random_blocks(name, rows, WIDTHS[name])
    expected = dequantised(stored, name)
    actual = blocks.dequantize_blocks(stored, name, expected.shape, torch.float32)
    assert actual.unique().numel() > 10 and actual.isfinite().all()
    assert torch.equal(actual, expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(blocks.dequantize_blocks(stored, name, expected.shape, dtype), expected.to(dtype))
    # As a file may hold what is no matrix: the rows of bytes are not those of the values.
    flat = stored.reshape(1, -1)
    assert torch.equal(blocks.dequantize_blocks(flat, name, expected.shape, torch.float32), expected)


@pytest.mark.parametrize("rows", [1, 31, 33])
@pytest.mark.parametrize("name", SCALES)
def test_both_products_are_those_of_the_values(name, rows):
    linear, weight = frozen(name, 7)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTHS[name], generator=generator, requires_grad=True)
    grad = torch.randn(rows, 7, generator=generator)
    y = linear.apply(x)
    y.backward(grad)
    for actual, expected in ((y, x.double() @ weight.double().T), (x.grad, grad.double() @ weight.double())):
        assert (actual - expected).norm() <= 1e-6 * expected.norm()
    assert torch.equal(linear.apply_transposed(grad), x.grad) and torch.equal(linear.full(), weight)


def test_only_the_blocks_wait_for_backward():
    linear, _ = frozen("Q4_K", 5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear.apply(torch.randn(3, WIDTHS["Q4_K"], dtype=torch.bfloat16, requires_grad=True))
    assert [tensor.data_ptr() for tensor in saved] == [linear.weight.data_ptr()]


def model_of(weight, patches=None):
    """The FrozenWeights of a MODEL of one Linear."""
    from comfy.model_patcher import ModelPatcher

    root = nn.Module()
    root.diffusion_model = nn.Module()
    root.diffusion_model.layer = nn.Linear(*weight.tensor_shape[::-1], bias=False, device="meta")
    root.diffusion_model.layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    patcher = ModelPatcher(root, torch.device("cpu"), torch.device("cpu"))
    patcher.patches = {"diffusion_model.layer.weight": patches} if patches else {}
    return FrozenWeights(patcher, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("plain", ["F32", "F16", "BF16"])
def test_plain_tensors_are_read_over_their_own_memory(plain):
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[plain]
    values = torch.randn(5, 32).to(dtype)
    memory = values.view(torch.uint8) if plain == "BF16" else values
    weights = model_of(stored_tensor(memory, kind_of(plain), values.shape))
    linear = weights.linear("layer")
    assert type(linear.weight) is torch.Tensor and linear.layout is None and linear.shape == (5, 32)
    assert torch.equal(linear.weight, values) and linear.weight.data_ptr() == memory.data_ptr()
    elsewhere = linear.weight.clone()
    assert weights.repoint("layer.weight", linear.weight, elsewhere) is False
    parameter = weights.patcher.model.diffusion_model.layer.weight
    assert (
        parameter.data_ptr() == elsewhere.data_ptr()
        and parameter.shape == values.shape
        and parameter.tensor_type == kind_of(plain)
    )
    assert torch.equal(weights.linear("layer").weight, values)


def test_a_weight_moves_with_what_the_loader_has_put_on_it():
    stored = random_blocks("Q4_K", 5, 256)
    tensor = stored_tensor(stored, kind_of("Q4_K"), (5, 256))
    tensor.is_largest_weight = True
    weights = model_of(tensor)
    read = weights.linear("layer")
    assert read.weight.data_ptr() == stored.data_ptr() and type(read.weight) is torch.Tensor
    copy = stored.clone()
    assert weights.repoint("layer.weight", read.weight, copy) is False
    parameter = weights.patcher.model.diffusion_model.layer.weight
    assert isinstance(parameter, nn.Parameter) and type(parameter) is type(tensor) and parameter.is_largest_weight
    assert parameter.data_ptr() == copy.data_ptr() and tuple(parameter.shape) == (5, 256) and parameter.patches == []


def lora(up, down, alpha=None, **fields):
    from comfy.weight_adapter.lora import LoRAAdapter

    entries = {"mid": None, "dora": None, "reshape": None} | fields
    return LoRAAdapter(set(), (up, down, alpha, entries["mid"], entries["dora"], entries["reshape"]))


def merged(weight, patches):
    import comfy.lora

    return comfy.lora.calculate_weight(patches, weight.clone(), "layer")


def test_loras_stand_beside_the_blocks_as_one_product():
    stored = random_blocks("Q4_0", 96, 64)
    tensor, weight = stored_tensor(stored, kind_of("Q4_0"), (96, 64)), dequantised(stored, "Q4_0")
    rows, columns = (0, 32, 32), (1, 16, 32)
    patches = [
        (0.7, lora(torch.randn(96, 2), torch.randn(2, 64), alpha=1.0), 1.0, None, None),
        (-1.5, lora(torch.randn(32, 3), torch.randn(3, 64)), 1.0, rows, None),
        (2.0, lora(torch.randn(96, 1), torch.randn(1, 32)), 1.0, columns, None),
    ]
    read = model_of(tensor, patches).linear("layer")
    assert json.loads(read.layout)[0] == "Q4_0" and [tuple(part.shape) for part in read.parts] == [(96, 6), (6, 64)]
    assert read.weight.data_ptr() == stored.data_ptr()
    expected = merged(weight, patches)
    assert (read.full() - expected).norm() <= 1e-6 * expected.norm() and (expected - weight).norm() > weight.norm()
    x = torch.randn(3, 64, requires_grad=True)
    read.apply(x).sum().backward()
    assert (x.grad - expected.sum(0)).norm() <= 1e-5 * x.grad.norm()
    assert torch.equal(tensor.as_subclass(torch.Tensor), stored)


OTHER_PATCHES = {
    "a difference": lambda: (0.5, ("diff", (torch.randn(96, 64),)), 1.0, None, None),
    "a DoRA": lambda: (1.0, lora(torch.randn(96, 2), torch.randn(2, 64), dora=torch.rand(1, 64)), 1.0, None, None),
    "a weaker model": lambda: (1.0, lora(torch.randn(96, 2), torch.randn(2, 64)), 0.5, None, None),
    "a large LoRA": lambda: (1.0, lora(torch.randn(96, 60), torch.randn(60, 64)), 1.0, None, None),
}


@pytest.mark.parametrize("kind", OTHER_PATCHES)
def test_other_patches_are_worked_into_the_values_and_told(kind):
    stored = random_blocks("Q8_0", 96, 64)
    patches = [OTHER_PATCHES[kind]()]
    weights = model_of(stored_tensor(stored, kind_of("Q8_0"), (96, 64)), patches)
    original = stored.clone()
    read = weights.linear("layer")
    expected = merged(dequantised(stored, "Q8_0"), patches)
    assert read.layout is None and (read.weight - expected).norm() <= 1e-6 * expected.norm()
    assert torch.equal(stored, original)
    (note,) = reader.held_in_full_notes(weights.patcher.model.diffusion_model, weights.patcher.patches, torch.float32)
    assert note.startswith(
        "Weights that the GGUF file holds under a LoRA that is large or of another kind are converted to"
    )


def test_weights_on_which_patches_still_lie_are_not_read():
    tensor = stored_tensor(random_blocks("Q4_0", 5, 64), kind_of("Q4_0"), (5, 64))
    weights = model_of(tensor)
    weights.patcher.model.diffusion_model.layer.weight.patches = [([], "key")]
    with pytest.raises(ValueError, match="^The MODEL is still in use elsewhere"):
        weights.linear("layer")


def test_a_format_of_the_package_alone_is_held_in_full_and_told():
    (name,) = OTHERS
    stored = random_blocks(name, 5, 512)
    weights = model_of(stored_tensor(stored, kind_of(name), (5, 512)))
    check_readable(weights.patcher.model.diffusion_model.layer.weight)
    read = weights.linear("layer")
    assert read.layout is None and torch.equal(read.weight, dequantised(stored, name))
    (note,) = reader.held_in_full_notes(weights.patcher.model.diffusion_model, {}, torch.bfloat16)
    assert note.startswith(
        f"Weights that the GGUF file holds as {name} are converted to bfloat16 while it trains (0.00 GiB)"
    )


def test_a_format_that_nothing_reads_is_named_with_the_fix(monkeypatch):
    unknown = stored_tensor(torch.zeros(5, 34, dtype=torch.uint8), 99, (5, 32))
    with pytest.raises(ValueError) as refused:
        check_readable(unknown)
    assert str(refused.value) == (
        "model holds weights in GGUF's 99, which neither Tessera nor the installed package gguf reads; update gguf, or "
        "load a file in another, such as Q8_0 or Q4_K_S."
    )
    (name,) = OTHERS
    other = stored_tensor(random_blocks(name, 5, 256), kind_of(name), (5, 256))
    monkeypatch.setitem(sys.modules, "gguf", None)
    reader._package_reads.cache_clear()
    with pytest.raises(ValueError) as refused:
        check_readable(other)
    reader._package_reads.cache_clear()
    assert str(refused.value) == (
        f"model holds weights in GGUF's {name}, which the package gguf reads; install it, or load a file in another, "
        "such as Q8_0 or Q4_K_S."
    )
    check_readable(stored_tensor(random_blocks("Q6_K", 5, 256), kind_of("Q6_K"), (5, 256)))  # ours needs no package
