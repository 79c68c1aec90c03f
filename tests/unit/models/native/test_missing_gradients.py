"""An operation without a gradient is found before anything is trained, and named with its block."""

import comfy_kitchen
import pytest
import torch
from comfy.ldm.flux.math import rope
from tessera.models.native.forward.gradients import check_gradients, explain_missing_gradient
from torch import nn
from torch.utils.checkpoint import checkpoint

T, D = 5, 8
# An op of which autograd knows nothing: torch warns, and drops the gradient.
LIBRARY = torch.library.Library("without_gradient", "DEF")
LIBRARY.define("raw(Tensor x) -> Tensor")
LIBRARY.impl("raw", lambda x: 2 * x, "CPU")
TABLE = rope(torch.arange(T)[None], D, 10)[:, None]


class Block(nn.Module):
    """A Linear before and after an operation."""

    def __init__(self, operation):
        super().__init__()
        self.before = nn.Linear(D, D)
        self.after = nn.Linear(D, D)
        self.operation = operation

    def forward(self, x):
        return x + self.after(self.operation(self.before(x)))


def x(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 1, T, D, generator=torch.Generator().manual_seed(0))


OPERATIONS = {
    "comfy_kitchen.apply_rope1": lambda q: comfy_kitchen.apply_rope1(q, TABLE),
    "comfy_kitchen.rms_rope_split_half": lambda q: comfy_kitchen.rms_rope_split_half(q, q, TABLE, torch.ones(D))[0],
    "in-place RoPE": lambda q: comfy_kitchen.apply_rope1_(q, TABLE),
    "heaviside": lambda q: torch.heaviside(q, q),
    "geqrf": lambda q: torch.geqrf(q)[0],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_operation_and_its_block_are_named(name):
    with pytest.raises(ValueError) as error:
        check_gradients("DoubleBlock", Block(OPERATIONS[name]), x())
    text = f"its DoubleBlock runs {name}, which has no gradient"
    assert text in str(error.value) and "\n" not in str(error.value)


def test_an_operation_that_drops_the_gradient_is_named():
    with pytest.raises(ValueError, match=r"its Refiner runs without_gradient\.raw, which has no gradient"):
        check_gradients("Refiner", Block(torch.ops.without_gradient.raw), x())


def test_a_block_that_hands_no_gradient_on_is_named():
    for function in (torch.Tensor.detach, torch.round):
        nothing = check_gradients("Refiner", Block(torch.sin), function(x()))
        assert nothing.requires_grad
    with pytest.raises(ValueError, match="its Refiner runs something, which has no gradient"):
        check_gradients("Refiner", torch.Tensor.detach, x().requires_grad_())


def test_a_block_is_not_blamed_for_what_ran_before_it():
    rotated = comfy_kitchen.apply_rope1(x().requires_grad_(), TABLE)
    assert check_gradients("Refiner", Block(torch.sin), rotated).requires_grad


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("x"), KeyboardInterrupt()])
def test_other_errors_stay_as_they_are(error):
    def raising(q):
        raise error

    with pytest.raises(type(error)) as raised:
        check_gradients("Block", Block(raising), x())
    assert raised.value is error
    assert explain_missing_gradient(error, "Block") is None


def test_an_operation_that_takes_no_gradient_by_its_own_words_is_named():
    error = RuntimeError("adaln(): functions with out=... arguments don't support automatic differentiation, but")
    assert "its Block runs adaln," in str(explain_missing_gradient(error, "Block"))


def test_the_error_of_a_whole_step_is_explained():
    block = Block(OPERATIONS["comfy_kitchen.apply_rope1"])
    with pytest.raises(RuntimeError) as error:
        checkpoint(block, x(), use_reentrant=False).sum().backward()
    assert "its Flux runs comfy_kitchen.apply_rope1," in str(explain_missing_gradient(error.value, "Flux"))


def test_blocks_are_checked_one_after_the_other_and_nothing_is_left():
    class Pair(Block):
        def forward(self, image, text, table, number):
            return super().forward(image) * number, text, None

    first, second = Pair(torch.sin), Pair(torch.cos)
    image = x()
    text = x(1)
    table = TABLE
    outputs = check_gradients("Pair", first, image, text, table, 3)
    assert [None if part is None else part.requires_grad for part in outputs] == [True, False, None]
    assert all(part is None or part.is_leaf for part in outputs)
    last = check_gradients("Pair", second, *outputs[:2], table, 2)
    with torch.no_grad():
        expected = second(*first(image, text, table, 3)[:2], table, 2)
    torch.testing.assert_close(last[0].detach(), expected[0])
    assert outputs[0].grad is None and not any(p.grad is not None for b in (first, second) for p in b.parameters())
    with torch.no_grad():
        assert check_gradients("Pair", first, image, text, table, 3)[0].requires_grad
