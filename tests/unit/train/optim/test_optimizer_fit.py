"""A saved optimizer state beside what its class makes: what fits goes on, what does not is seen before it is loaded."""

import copy

import pytest
import torch
from tessera.common.rng import generator
from tessera.train.checkpoint.optimizer_fit import fits_optimizer
from tessera.train.checkpoint.schema import StoredTensor
from tessera.train.optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.state_dict import pack_state, unpack_state
from torch import nn

NAMES = ("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon")
CPU = torch.device("cpu")
STEPS = 3
WRONG = (None, "text", [], {}, -1, 1e30, float("nan"), True, torch.zeros(3, 5), torch.tensor(-5.0))


def weights():
    """Two of one shape, the second of which begins at zero, and a third that never has a gradient."""
    shapes = [(16, 273), (16, 273), (8, 4)]
    start = [0.1 * torch.randn(s, generator=generator(1, i)) for i, s in enumerate(shapes)]
    return [nn.Parameter(start[0]), nn.Parameter(torch.zeros_like(start[1])), nn.Parameter(start[2])]


def options_of(name):
    return OptimizerOptions(name, learning_rate=1.0 if name == "prodigy" else 1e-2)


def step(trained, optimizer, scheduler):
    for i, weight in enumerate(trained[:2]):
        weight.grad = torch.randn(weight.shape, generator=generator(2, i))
    optimizer.step()
    scheduler.step()


def build(name, trained):
    optimizer = build_optimizer(options_of(name), trained)
    return optimizer, build_scheduler(options_of(name), optimizer, 10)


@pytest.fixture(params=NAMES)
def saved(request):
    """(name, state of the optimizer, state of the schedule) after some steps."""
    trained = weights()
    optimizer, scheduler = build(request.param, trained)
    for _ in range(STEPS):
        step(trained, optimizer, scheduler)
    tensors, tree = pack_state((state_of(optimizer), scheduler.state_dict()))
    return request.param, *unpack_state(tensors, tree)


def stored(value):
    """Return what a header tells of a state's value."""
    if isinstance(value, torch.Tensor):
        number = float(value) if tuple(value.shape) in ((), (1,)) else None
        return StoredTensor(tuple(value.shape), "F32", number)
    if isinstance(value, dict):
        return {key: stored(item) for key, item in value.items()}
    return [stored(item) for item in value] if isinstance(value, list) else value


def fits(name, state):
    return fits_optimizer(options_of(name), weights(), stored(state), STEPS, CPU)


def test_saved_state_fits(saved):
    name, state, _ = saved
    assert fits(name, state)


def test_a_state_of_before_the_first_gradient_fits(saved):
    name, state, _ = saved
    assert fits(name, state | {"state": {}}) and not fits(name, state | {"state": {3: {}}})


def test_state_that_fits_takes_a_step_and_one_that_would_not_is_seen(saved):
    """Each entry of a weight and each that the optimizer has learnt of a group, missing and with other values."""
    name, state, schedule = saved
    refused = 0
    for part, entry in [("state", key) for key in state["state"][0]] + [
        ("param_groups", k) for k in state["param_groups"][0]
    ]:
        for value in (*WRONG, "missing") if entry != "params" else ():
            other = copy.deepcopy(state)
            if value == "missing" if isinstance(value, str) else False:
                del other[part][0][entry]
            else:
                other[part][0][entry] = value
            if not fits(name, other):
                refused += 1
                continue
            resumed = weights()
            optimizer, scheduler = build(name, resumed)
            restore_optimizer(optimizer, scheduler, other, schedule)
            step(resumed, optimizer, scheduler)
    assert refused >= 7
