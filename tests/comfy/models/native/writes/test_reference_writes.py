"""The reference of gradients is right where code writes into what autograd has saved, at whatever place."""

import pytest
import torch
from tiny.native.reference import writing_allowed


@pytest.mark.parametrize("starts", [(2, 0), (0, 2), (1, 3)], ids=str)
def test_a_first_write_to_a_later_slice_gives_the_gradient_of_code_without_a_write(starts):
    torch.manual_seed(0)
    start, other, gate = (torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(3))

    def gradient(in_place: bool) -> torch.Tensor:
        leaf = start.clone().requires_grad_()
        x = leaf * 2
        squares = x.square().sum()  # saves x
        for begin in starts:
            if in_place:
                x[:, begin : begin + 2].addcmul_(other[:, begin : begin + 2], gate[:, begin : begin + 2])
            else:
                mask = torch.zeros(1, 5, 1, dtype=x.dtype)
                mask[:, begin : begin + 2] = 1
                x = x + mask * other * gate
        (squares + (x**3).sum()).backward()
        assert leaf.grad is not None
        return leaf.grad

    with writing_allowed():
        slice_gradient = gradient(True)
    assert torch.allclose(slice_gradient, gradient(False), rtol=1e-12)
