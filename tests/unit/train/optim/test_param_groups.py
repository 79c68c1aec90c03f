"""LoRA+: B steps at a rate of its own, under every optimizer that has groups."""

import math

import pytest
import torch
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.train.optim.checks import check_optimizer
from tessera.train.optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.param_groups import flat, parameter_groups
from tessera.train.optim.state_dict import pack_state, unpack_state
from torch import nn

CPU = torch.device("cpu")
WITH_GROUPS = ("adamw", "adamw8bit", "adafactor", "came", "adamw_schedulefree", "lion", "muon")


def pair(dtype=torch.float32) -> dict[str, nn.Parameter]:
    return {
        f"m.{side}": nn.Parameter(0.1 * torch.randn(shape, generator=generator(0, side), dtype=dtype))
        for side, shape in {"down": (16, 320), "up": (320, 16)}.items()
    }


def gradient(name: str, p: nn.Parameter, k: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=generator(1, name, k), dtype=p.dtype)


def run(params, options, ratio, steps, start=0, state=None):
    optimizer = build_optimizer(options, parameter_groups(params, options.learning_rate, ratio))
    scheduler = build_scheduler(options, optimizer, 8)
    if state:
        restore_optimizer(optimizer, scheduler, *state)
    for k in range(start, steps):
        for name, p in params.items():
            p.grad = gradient(name, p, k)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_adamw_steps_are_those_of_the_formula_with_a_rate_for_each_matrix():
    """Decoupled Adam (arXiv 1711.05101) written out in fp64, a cosine over 8 steps on both rates."""
    options = OptimizerOptions(learning_rate=1e-2, lr_scheduler="cosine", weight_decay=0.1)
    trained, expected = pair(), {n: p.detach().double() for n, p in pair().items()}
    run(trained, options, 16.0, 4)
    for name, w in expected.items():
        rate = 1e-2 * (16 if name.endswith("up") else 1)
        m = v = torch.zeros_like(w)
        for k in range(4):
            g = gradient(name, trained[name], k).double()
            current_rate = rate * (1 + math.cos(math.pi * k / 8)) / 2
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            direction = (m / (1 - 0.9 ** (k + 1))) / ((v / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8)
            w = w * (1 - current_rate * 0.1) - current_rate * direction
        assert (trained[name].detach() - w).norm() < 1e-6 * w.norm(), name
        assert (trained[name].detach() - pair()[name].detach()).norm() > 0.03 * w.norm()


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_a_first_step_of_b_is_longer_by_the_ratio_and_a_is_stepped_as_without(name):
    options = OptimizerOptions(name, learning_rate=1e-4, weight_decay=0.0)
    assert not any("lora_plus" in note for note in check_optimizer(options, CPU, NetworkOptions(lora_plus_ratio=8.0)))
    plain = pair()
    plus = pair()
    start = pair()
    run(plain, options, 1.0, 1)
    run(plus, options, 8.0, 1)
    assert torch.equal(plus["m.down"], plain["m.down"])
    lengths = {n: (p["m.up"] - start["m.up"]).detach().norm() for n, p in {"plain": plain, "plus": plus}.items()}
    assert lengths["plus"] == pytest.approx(8 * float(lengths["plain"]), rel=2e-2)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_a_resumed_run_keeps_both_rates_and_takes_a_changed_ratio(name):
    options = OptimizerOptions(name, learning_rate=1e-2, lr_scheduler="cosine")
    whole = pair()
    run(whole, options, 4.0, 6)
    half = pair()
    optimizer, scheduler = run(half, options, 4.0, 3)
    state = unpack_state(*pack_state((state_of(optimizer), scheduler.state_dict())))
    resumed = {n: nn.Parameter(p.detach().clone()) for n, p in half.items()}
    run(resumed, options, 4.0, 6, 3, state)
    assert all(torch.equal(resumed[n], whole[n]) for n in whole)
    other, other_schedule = run(half, options, 2.0, 3, 3, state)
    rates = [group["lr"] for group in other.param_groups]
    assert rates == other_schedule.get_last_lr() and rates[1] == pytest.approx(2 * rates[0])


def test_a_state_with_other_groups_is_named():
    options = OptimizerOptions()
    optimizer, scheduler = run(pair(), options, 1.0, 1)
    state = state_of(optimizer), scheduler.state_dict()
    with pytest.raises(ValueError, match="trained without LoRA\\+; set lora_plus_ratio to 1, or set resume to 'off'"):
        run(pair(), options, 4.0, 1, 1, state)


def test_an_optimizer_with_one_rate_is_named():
    with pytest.raises(
        ValueError, match="lora_plus_ratio is 4 and prodigy has one rate for all weights; set lora_plus"
    ):
        check_optimizer(OptimizerOptions("prodigy"), CPU, NetworkOptions(lora_plus_ratio=4.0))
    custom = OptimizerOptions("custom", optimizer_class="prodigyopt.Prodigy")
    with pytest.raises(ValueError, match=r"prodigyopt.Prodigy cannot train a LoRA here with lora_plus_ratio 4 "):
        check_optimizer(custom, CPU, NetworkOptions(lora_plus_ratio=4.0))


def test_groups_without_a_ratio_are_one_in_the_order_of_the_network():
    params = pair()
    groups = parameter_groups(params, 1e-4, 1.0)
    assert groups == list(params.values()) and flat(parameter_groups(params, 1e-4, 2.0)) == list(params.values())
