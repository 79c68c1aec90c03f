"""The ropes of a training step give the values of comfy-kitchen's kernels, and the gradients of these values."""

import comfy_kitchen
import pytest
import torch
from comfy.ldm.flux.math import rope as table_of_core
from tessera.models.native.forward.ropes import ROPES

BATCH = 2
HEADS = 3
TOKENS = 7
DIM = 8
PAIRED = [name for name in ROPES if not name.endswith("1")]
NORMED = [name for name in ROPES if name.startswith("rms")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotations(dim: int = DIM, rows: int = TOKENS) -> torch.Tensor:
    """(1, rows, dim/2, 2, 2), by core's own function."""
    return table_of_core(torch.arange(rows)[None] * 0.37, dim, 10)


def arguments(name: str, dtype: torch.dtype, heads_first: bool = True, dim: int = DIM) -> dict[str, torch.Tensor]:
    """Arguments of a rope, without its table."""
    torch.manual_seed(0)
    shape = (BATCH, HEADS, TOKENS, dim) if heads_first else (BATCH, TOKENS, HEADS, dim)
    single = name.endswith("1")
    names = ("x",) if single else ("xq", "xk") if name.startswith("apply") else ("q", "k")
    tensors = {argument: torch.randn(shape).to(dtype) for argument in names}
    if name in NORMED:
        scales = ("scale",) if single else ("q_scale", "k_scale")
        tensors |= {argument: (1 + 0.3 * torch.randn(dim)).to(dtype) for argument in scales}
    return tensors


def compared(name: str, **inputs) -> None:
    actual, expected = ROPES[name](**inputs), getattr(comfy_kitchen, name)(**inputs)
    actual, expected = ((x,) if torch.is_tensor(x) else x for x in (actual, expected))
    assert len(actual) == len(expected) == (2 if name in PAIRED else 1)
    for result, reference in zip(actual, expected, strict=True):
        assert result.dtype == reference.dtype and torch.equal(result, reference)
    assert not any(torch.equal(x, y) for x, y in zip(actual, list(inputs.values()), strict=False))


def test_ropes_have_a_form_that_returns_a_new_tensor():
    names = {name for name in dir(comfy_kitchen) if "rope" in name and not name.startswith("_")}
    assert set(ROPES) == {name for name in names if not name.endswith("_")}
    assert len(ROPES) == 8


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_values_are_those_of_the_kernel(name, dtype, heads_first):
    table = rotations()[:, None] if heads_first else rotations()[:, :, None]
    compared(name, **arguments(name, dtype, heads_first), freqs_cis=table)


@pytest.mark.parametrize("name", ROPES)
def test_a_table_in_the_dtype_of_the_model_is_used_in_it(name):
    compared(name, **arguments(name, torch.bfloat16, False), freqs_cis=rotations()[:, :, None].to(torch.bfloat16))


@pytest.mark.parametrize("name", ROPES)
def test_each_sample_may_have_a_table_of_its_own(name):
    table = torch.stack([rotations()[0], rotations()[0].flip(0)])[:, None]
    compared(name, **arguments(name, torch.float32), freqs_cis=table)


@pytest.mark.parametrize("name", [name for name in ROPES if "split_half" not in name])
def test_rows_of_the_table_behind_the_tokens_are_left_out(name):
    compared(name, **arguments(name, torch.float32), freqs_cis=rotations(rows=TOKENS + 4)[:, None])


@pytest.mark.parametrize("name", NORMED)
def test_epsilon_counts(name):
    inputs = arguments(name, torch.float32) | {"freqs_cis": rotations()[:, None]}
    compared(name, **inputs, epsilon=0.5)
    plain, large = (ROPES[name](**inputs, epsilon=epsilon) for epsilon in (1e-6, 0.5))
    assert not torch.equal(plain[0], large[0])


@pytest.mark.parametrize("rot_dim", [0, 4, 6, DIM])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_entries_alone_are_rotated(dtype, rot_dim):
    inputs = arguments("rms_rope_split_half", dtype, heads_first=False)
    table = rotations(rot_dim or DIM)[:, :, None]
    compared("rms_rope_split_half", **inputs, freqs_cis=table, rot_dim=rot_dim)


@pytest.mark.parametrize("name", [name for name in NORMED if name in PAIRED])
def test_one_scale_does_for_both(name):
    inputs = arguments(name, torch.float32) | {"freqs_cis": rotations()[:, None], "k_scale": None}
    compared(name, **inputs)


@pytest.mark.parametrize("name", ROPES)
def test_gradients_are_those_of_the_values(name):
    inputs = {key: value.double().requires_grad_() for key, value in arguments(name, torch.float32).items()}
    table = rotations()[:, None].double()

    def rotated(*values):
        return ROPES[name](**dict(zip(inputs, values, strict=True)), freqs_cis=table)

    assert torch.autograd.gradcheck(rotated, tuple(inputs.values()))


def test_gradients_of_a_partial_rotation_are_those_of_its_values():
    inputs = {
        key: value.double().requires_grad_() for key, value in arguments("rms_rope_split_half", torch.float32).items()
    }
    table = rotations(4)[:, None].double()

    def rotated(q, k, q_scale, k_scale):
        return ROPES["rms_rope_split_half"](q, k, table, q_scale, k_scale, 1e-3, 4)

    assert torch.autograd.gradcheck(rotated, tuple(inputs.values()))
