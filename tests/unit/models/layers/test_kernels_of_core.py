"""Attention of ComfyUI's models gives the same under the kernels of a training step as without, and has gradients."""

from collections.abc import Callable
from typing import NamedTuple

import comfy.ldm.cosmos.predict2
import comfy.ldm.ernie.model
import comfy.ldm.hidream_o1.attention
import comfy.ldm.ideogram4.model
import comfy.ldm.joyimage.model
import comfy.ldm.lightricks.model
import comfy.ldm.lumina.model
import comfy.ldm.minimax.model
import comfy.model_management
import comfy.ops
import comfy_kitchen
import pytest
import torch
from comfy.ldm.flux.math import rope
from tessera.models.layers.attention import attention_function
from tessera.models.native.forward.kernels import training_kernels
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

SDPA = attention_function("auto", torch.device("cpu"), torch.float64)
OPERATIONS = comfy.ops.disable_weight_init
SETTINGS = {"operations": OPERATIONS, "dtype": torch.float64, "device": "cpu"}
B = 2
T = 6
H = 2
D = 8
WIDTH = H * D


def table(dim: int = D) -> Tensor:
    """(1, T, 1, dim/2, 2, 2)."""
    return rope(torch.arange(T)[None] * 0.7, dim, 10).double()[:, :, None]


class Case(NamedTuple):
    """A module of core's that reaches a rope.

    kitchen: the rope of comfy-kitchen that runs without gradients; in_training: that which runs with them, if any.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[[], dict[str, object]]
    kitchen: str
    in_training: str = ""
    shape: tuple[int, ...] = (B, T, WIDTH)


def lumina(kv_heads: int) -> nn.Module:
    return comfy.ldm.lumina.model.JointAttention(WIDTH, H, kv_heads, True, operation_settings=SETTINGS)


def lightricks() -> nn.Module:
    return comfy.ldm.lightricks.model.CrossAttention(WIDTH, heads=H, dim_head=D, **SETTINGS)


def rotation_of_lightricks() -> Tensor:
    return table().expand(-1, -1, H, -1, -1, -1)


CASES = {
    "anima": Case(
        lambda: comfy.ldm.cosmos.predict2.Attention(WIDTH, None, H, D, **SETTINGS),
        lambda: {"rope_emb": table()},
        *("rms_rope_split_half", "rms_rope_split_half"),
    ),
    "minimax h3": Case(
        lambda: comfy.ldm.minimax.model.Attention(WIDTH, H, D, 1e-3, **SETTINGS),
        lambda: {"rope_freqs": table(4)},
        *("rms_rope_split_half_", "rms_rope_split_half"),
        (T, WIDTH),
    ),
    "ernie": Case(
        lambda: comfy.ldm.ernie.model.ErnieImageAttention(WIDTH, H, D, **SETTINGS),
        lambda: {"image_rotary_emb": table()},
        *("rms_rope_split_half", "apply_rope_split_half"),
    ),
    "joyimage": Case(
        lambda: comfy.ldm.joyimage.model.JoyImageAttention(WIDTH, H, D, **SETTINGS),
        lambda: {"txt": torch.randn(B, 3, WIDTH, dtype=torch.float64), "image_rotary_emb": table()},
        *("rms_rope", "rms_rope"),
    ),
    "ideogram 4": Case(
        lambda: comfy.ldm.ideogram4.model.Ideogram4Attention(WIDTH, H, **SETTINGS),
        lambda: {"attn_mask": None, "freqs_cis": table()},
        "rms_rope_split_half",
    ),
    "lumina": Case(lambda: lumina(H), lambda: {"x_mask": None, "freqs_cis": table()}, "rms_rope"),
    "lumina, few keys": Case(lambda: lumina(1), lambda: {"x_mask": None, "freqs_cis": table()}, "rms_rope1"),
    "ltx, halves": Case(lightricks, lambda: {"pe": (rotation_of_lightricks(), True)}, "apply_rope_split_half"),
    "ltx, pairs": Case(lightricks, lambda: {"pe": (rotation_of_lightricks(), False)}, "apply_rope"),
}


def make_case(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, object], Tensor]:
    """A case's module, arguments and x; the same numbers in each dtype."""
    case = CASES[name]
    torch.manual_seed(0)
    module, arguments = case.make(), tree_map_only(Tensor, lambda value: value.to(dtype), case.arguments())
    for parameter in module.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.4)
    return module.to(dtype), arguments, torch.randn(case.shape, dtype=torch.float64).to(dtype)


def combined(out: object) -> Tensor:
    return torch.cat([part.flatten() for part in out]) if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_core_s_own_kernels(name, monkeypatch):
    kitchen, reached = CASES[name].kitchen, []
    kernel = getattr(comfy_kitchen, kitchen)

    def watched(*args, **kwargs):
        reached.append(kitchen)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(comfy_kitchen, kitchen, watched)
    module, arguments, x = make_case(name, torch.float32)
    with torch.no_grad():
        expected = combined(module(x, **arguments))
        assert reached
        reached.clear()
        with training_kernels(SDPA):
            actual = combined(module(x, **arguments))
    assert not reached
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_values(name):
    module, arguments, x = make_case(name, torch.float64)
    direction, step = torch.randn_like(x), 1e-5
    with training_kernels(SDPA):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(combined(module(leaf, **arguments)).square().sum(), leaf)
        with torch.no_grad():
            sums = [combined(module(x + sign * step * direction, **arguments)).square().sum() for sign in (1, -1)]
    torch.testing.assert_close((gradient * direction).sum(), (sums[0] - sums[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].in_training])
def test_core_s_own_kernels_have_no_gradient_here(name, monkeypatch):
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    module, arguments, x = make_case(name, torch.float32)
    with pytest.raises(RuntimeError, match=CASES[name].in_training):
        combined(module(x.requires_grad_(), **arguments)).sum().backward()


@pytest.mark.parametrize("prefix", [0, 2, T])
def test_hidream_o1_sees_its_prompt_in_order_and_the_rest_whole(prefix):
    attend = comfy.ldm.hidream_o1.attention.make_two_pass_attention(prefix)
    q, k, v = (torch.randn(B, heads, T, D, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    expected = attend(q, k, v, 4, enable_gqa=True)
    with training_kernels(SDPA):
        actual = attend(q, k, v, 4, enable_gqa=True)
    torch.testing.assert_close(actual, expected)
    for gradient, reference in zip(
        *(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, reference)
