"""A function that is run again in its backward gives the gradients of one that saves, and keeps its inputs alone."""

import weakref
from typing import Any

import pytest
import torch
from tessera.memory.activations.recompute import run_twice
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Ops(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def torchs(run: Any, *args: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def at_once(run: Any, *args: Any) -> Any:
    return run(*args)


WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


def block(x: Tensor, other: Tensor, masks: dict[str, Tensor], power: int) -> tuple[Tensor, Tensor]:
    """Two streams, a trained weight, a tensor inside a dict and a number."""
    y = (x @ WEIGHT).sin() * masks["drop"]
    return (y @ WEIGHT).exp() + x, (other * y) ** power @ WEIGHT.detach()


def gradients(run: Any, last_too: bool = True, trained_inputs: bool = True) -> tuple[list[Tensor], int]:
    """The gradients of three such blocks, and the products that they took."""
    source = torch.Generator().manual_seed(2)
    x, other = ((torch.randn(4, 8, generator=source) / 8).requires_grad_(trained_inputs) for _ in range(2))
    masks = {"drop": torch.tensor([0.0, 2.0] * 4)}
    WEIGHT.grad = None
    first, two = x, other
    with Ops() as ops:
        for power in (1, 2, 3):
            first, two = run(block, first, two, masks, power)
        (first.sum() + two.sum() if last_too else first.sum()).backward()
    leaves = [WEIGHT, x, other] if trained_inputs else [WEIGHT]
    return [leaf.grad for leaf in leaves if leaf.grad is not None], ops.products


@pytest.mark.parametrize("last_too", [True, False], ids=["all outputs", "one output"])
@pytest.mark.parametrize("trained_inputs", [True, False], ids=["inputs", "weights alone"])
def test_gradients_are_bit_equal_and_no_product_more_is_made_than_by_torchs_own(last_too, trained_inputs):
    expected, least = gradients(at_once, last_too, trained_inputs)
    torch_gradients, products = gradients(torchs, last_too, trained_inputs)
    actual, our_products = gradients(run_twice, last_too, trained_inputs)
    assert len(actual) == len(expected) == len(torch_gradients) and all(map(torch.equal, actual, expected))
    assert our_products == products > least


def test_inputs_alone_are_kept_and_what_is_made_anew_goes_with_its_use():
    refs: list[Any] = []

    def run(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.sin()
            refs.append(weakref.ref(x))
        return x

    x = torch.randn(3, requires_grad=True)
    out = run_twice(run, x)
    alive, refs[:] = [ref() is not None for ref in refs], []
    out.sum().backward()
    assert alive == [False, False, False, True]  # the last is the output
    # The fourth is not needed, so the second run ends before it is made.
    assert len(refs) == 3 and not any(ref() is not None for ref in refs)
    torch.testing.assert_close(x.grad, gradient_of_four_sines(x))


def gradient_of_four_sines(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    leaf.sin().sin().sin().sin().sum().backward()
    return leaf.grad


def test_inputs_are_saved_by_the_hooks_around_it_and_with_their_version():
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run_twice(lambda a, b: (a * b).exp(), x, y)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), y.data_ptr()]
    out.sum().backward()
    out = run_twice(lambda a, b: (a * b).exp(), x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("change", ["shape", "less"])
def test_a_second_run_that_saves_other_tensors_is_an_error(change):
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(None)
        if len(runs) == 1:
            return x.sin().exp()
        return x[:2].sin().exp() if change == "shape" else x * 2

    with pytest.raises(AssertionError, match="the second run of a checkpointed block save"):
        run_twice(run, torch.randn(3, requires_grad=True)).sum().backward()


def test_block_without_autograd_runs_once():
    runs = []
    with torch.no_grad():
        run_twice(lambda x: runs.append(x), torch.randn(3, requires_grad=True))
    assert len(runs) == 1
