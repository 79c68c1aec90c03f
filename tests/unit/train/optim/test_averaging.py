"""The weights that a LoRA is saved with: a moving average, or those of a schedule-free optimizer."""

import pytest
import torch
from tessera.common.rng import generator
from tessera.train.optim.averaging import LoraAverage, is_schedule_free, saved_weights
from tessera.train.optim.optimizers import build_optimizer
from tessera.train.optim.options import OptimizerOptions
from torch import nn


def masters() -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(torch.randn(4, 3, generator=generator(5, n))) for n in ("a.down", "a.up")}


def detached(params):
    return {name: p.detach() for name, p in params.items()}


def step(params, optimizer, k: int) -> None:
    for name, p in params.items():
        p.grad = torch.randn(p.shape, generator=generator(6, k, name))
    optimizer.step()


def test_the_average_is_the_written_out_one():
    params = masters()
    optimizer = build_optimizer(OptimizerOptions(learning_rate=0.1), params.values())
    average = LoraAverage(0.3, detached(params))
    expected = {n: p.detach().double() for n, p in params.items()}
    for k in range(6):
        step(params, optimizer, k)
        average.update()
        decay = min(0.3, (2 + k) / (11 + k))
        expected = {n: decay * e + (1 - decay) * params[n].detach().double() for n, e in expected.items()}
    # 2/11, 3/12 and then 0.3.
    for name, mean in average.master_weights.items():
        torch.testing.assert_close(mean.double(), expected[name], rtol=1e-6, atol=1e-6)
        assert not torch.equal(mean, params[name])


def test_a_saved_average_goes_on_bit_for_bit_and_none_starts_at_the_weights():
    params = masters()
    optimizer = build_optimizer(OptimizerOptions(learning_rate=0.1), params.values())
    first = LoraAverage(0.9, detached(params))
    for k in range(3):
        step(params, optimizer, k)
        first.update()
    state = {"updates": 3, "masters": {n: t.clone() for n, t in first.state()["masters"].items()}}
    assert first.state()["updates"] == 3
    second, third = LoraAverage(0.9, detached(params)), LoraAverage(0.9, detached(params))
    second.load(state)
    third.load({})
    assert all(torch.equal(third.master_weights[n], p) for n, p in params.items())
    step(params, optimizer, 3)
    first.update()
    second.update()
    assert all(torch.equal(first.master_weights[n], second.master_weights[n]) for n in params)


@pytest.mark.parametrize("name", ["adamw", "adamw_schedulefree"])
def test_saving_leaves_the_weights_bit_for_bit_as_they_were(name):
    often, never = masters(), masters()
    options = OptimizerOptions(name, learning_rate=0.1)
    optimizers = [build_optimizer(options, params.values()) for params in (often, never)]
    average = LoraAverage(0.5, detached(often)) if name == "adamw" else None
    snapshots = []
    for k in range(6):
        step(often, optimizers[0], k)
        step(never, optimizers[1], k)
        if average:
            average.update()
        with saved_weights(detached(often), optimizers[0], average):
            snapshots.append(often["a.up"].detach().clone())
        assert all(torch.equal(often[n], never[n]) for n in often)
    assert not torch.equal(snapshots[-1], often["a.up"])
    if average:
        assert torch.equal(snapshots[-1], average.master_weights["a.up"])
    else:
        optimizers[1].eval()
        assert torch.equal(snapshots[-1], never["a.up"])


def test_weights_come_back_when_saving_fails():
    params = masters()
    optimizer = build_optimizer(OptimizerOptions("adamw_schedulefree", learning_rate=0.1), params.values())
    step(params, optimizer, 0)
    step(params, optimizer, 1)
    initial = {n: p.detach().clone() for n, p in params.items()}
    with pytest.raises(OSError, match="full"), saved_weights(detached(params), optimizer, None):
        raise OSError("full")
    assert all(torch.equal(initial[n], p) for n, p in params.items())
    step(params, optimizer, 2)


def test_an_optimizer_without_an_average_is_left_alone():
    params = masters()
    optimizer = build_optimizer(OptimizerOptions(), params.values())
    assert not is_schedule_free(optimizer)
    versions = [p._version for p in params.values()]
    with saved_weights(detached(params), optimizer, None):
        pass
    assert versions == [p._version for p in params.values()]
