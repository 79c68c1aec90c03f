"""Each schedule of the learning rate against its formula, written out here once more, and against transformers'."""

import math

import pytest
import torch
import transformers.optimization as theirs
from tessera.train.config.settings import TrainSettings
from tessera.train.optim.lr_curve import parse_curve
from tessera.train.optim.optimizers import build_scheduler
from tessera.train.optim.options import LR_SCHEDULERS, OptimizerOptions
from tessera.train.optim.schedule import lr_factor
from tiny.train.runs import run_settings
from torch import nn

CYCLES = 3
POWER = 1.5
PART = 0.25
CURVE = "0:0.5, 50%:1, 75:0.25"


def settings(kind: str, warmup: int = 0, low: float = 0.0) -> OptimizerOptions:
    return OptimizerOptions(
        learning_rate=0.02,
        lr_scheduler=kind,
        warmup_steps=warmup,
        min_lr_ratio=low,
        lr_cycles=CYCLES,
        lr_power=POWER,
        lr_decay_part=PART,
        lr_curve=CURVE,
    )


def expected_rate(kind: str, step: int, total: int, warmup: int, low: float) -> float:
    if step < warmup:
        return (step + 1) / warmup * (0.5 if kind == "curve" else 1)
    p = min(1, (step - warmup) / (total - warmup))
    fall = {
        "linear": 1 - p,
        "cosine": (1 + math.cos(math.pi * p)) / 2,
        "cosine_with_restarts": (1 + math.cos(math.pi * math.fmod(3 * p, 1))) / 2 if p < 1 else 0,
        "polynomial": (1 - p) ** 1.5,
        "warmup_stable_decay": 1 if p < 0.75 else 1 - math.sqrt((p - 0.75) / 0.25),
        "rex": (1 - p) / (0.5 + 0.5 * (1 - p)),
    }
    if kind in fall:
        return low + (1 - low) * fall[kind]
    if kind == "inverse_sqrt":
        scale = warmup or 10_000
        return max(low, (scale / (scale + step - warmup)) ** 0.5)
    if kind == "curve":
        return 0.5 + p if p <= 0.5 else 1 - 3 * (p - 0.5) if p <= 0.75 else 0.25
    return 1.0


@pytest.mark.parametrize("kind", LR_SCHEDULERS)
@pytest.mark.parametrize(("total", "warmup", "low"), [(10, 0, 0.0), (10, 4, 0.1), (1, 0, 0.0), (7, 6, 0.5), (40, 0, 0)])
def test_the_rate_is_the_written_out_formula_at_every_step(kind, total, warmup, low):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.02)
    scheduler = build_scheduler(settings(kind, warmup, low), optimizer, total)
    for k in range(total):
        rate = optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(0.02 * expected_rate(kind, k, total, warmup, low), rel=1e-9)
        assert rate > 0
        optimizer.step()
        scheduler.step()
    last = expected_rate(kind, total, total, warmup, low)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.02 * last, abs=1e-15)
    if kind != "inverse_sqrt":
        assert lr_factor(settings(kind, warmup, low), total)(total + 5) == pytest.approx(last, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 4])
def test_the_schedules_that_transformers_has_are_its_own_after_the_warm_up(warmup):
    total = 36 + warmup
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    decay = 9  # a quarter of the steps after the warm-up
    schedules = {
        "linear": theirs.get_linear_schedule_with_warmup(optimizer, warmup, total),
        "cosine": theirs.get_cosine_schedule_with_warmup(optimizer, warmup, total),
        "cosine_with_restarts": theirs.get_cosine_with_hard_restarts_schedule_with_warmup(
            optimizer, warmup, total, CYCLES
        ),
        "polynomial": theirs.get_polynomial_decay_schedule_with_warmup(optimizer, warmup, total, 0.0, POWER),
        "warmup_stable_decay": theirs.get_wsd_schedule(
            optimizer, warmup, decay, num_stable_steps=36 - decay, decay_type="1-sqrt"
        ),
        "inverse_sqrt": theirs.get_inverse_sqrt_schedule(optimizer, warmup),
    }
    for kind, schedule in schedules.items():
        factor = lr_factor(settings(kind, warmup), total)
        for step in range(warmup, total):
            assert factor(step) == pytest.approx(schedule.lr_lambdas[0](step), abs=1e-7), (kind, step)


def test_the_inverse_square_root_stays_above_the_last_rate():
    factor = lr_factor(settings("inverse_sqrt", warmup=4, low=0.5), 40)
    assert factor(12) == pytest.approx((4 / 12) ** 0.5) and factor(15) > 0.5
    assert [factor(step) for step in (16, 17, 39)] == [0.5] * 3


def test_restarts_go_back_up_and_one_cycle_is_cosine():
    factor = lr_factor(settings("cosine_with_restarts"), 30)
    assert [factor(k) for k in (0, 10, 20)] == [1.0, 1.0, 1.0]
    assert factor(9) < 0.05 and factor(19) < 0.05 and factor(29) < 0.05
    single = OptimizerOptions(lr_scheduler="cosine_with_restarts", lr_cycles=1)
    plain = OptimizerOptions(lr_scheduler="cosine")
    assert [lr_factor(single, 9)(k) for k in range(10)] == pytest.approx([lr_factor(plain, 9)(k) for k in range(10)])


@pytest.mark.parametrize("warmup", [10, 11])
@pytest.mark.parametrize("kind", ["constant", "curve"])
def test_a_warm_up_as_long_as_the_run_is_refused(kind, warmup):
    with pytest.raises(ValueError) as raised:
        lr_factor(settings(kind, warmup), 10)
    assert str(raised.value) == (f"warmup_steps is {warmup} and the run has 10 steps; set warmup_steps below 10.")


def test_a_warm_up_to_a_curve_s_0_is_refused():
    options = OptimizerOptions(lr_scheduler="curve", warmup_steps=2, lr_curve="0:0, 50:1")
    with pytest.raises(ValueError) as raised:
        lr_factor(options, 10)
    assert str(raised.value) == (
        "warmup_steps is 2 and lr_curve begins at 0, to which there is nothing to warm up; set warmup_steps to 0 and "
        "draw the warm-up, such as '0:0, 5:1, 100:0.1'."
    )


def test_a_curve_is_read_with_or_without_percent_signs_and_on_lines():
    assert parse_curve("0:1, 50%:1, 100:0.1") == ((0, 1), (0.5, 1), (1, 0.1))
    assert parse_curve("10 : 2\n20: 0,") == ((0.1, 2), (0.2, 0))
    level = lr_factor(OptimizerOptions(lr_scheduler="curve", lr_curve="20:2, 40:1"), 10)
    assert [level(k) for k in range(6)] == pytest.approx([2, 2, 2, 1.5, 1, 1])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0-1", "lr_curve has the point '0-1'; write percent of the steps, a colon and a factor of 0 or more, such as"),
        ("0:1, 120:1", "lr_curve has the point '120:1'; write percent"),
        ("0:1, x:1", "lr_curve has the point 'x:1'; write percent"),
        ("0:1, 50:-1", "lr_curve has the point '50:-1'; write percent"),
        ("0:nan", "lr_curve has the point '0:nan'; write percent"),
        ("0:inf", "lr_curve has the point '0:inf'; write percent"),
        ("0:1, 100:1e308", "lr_curve has the factor 1e308; write one of at most 1e+06, or raise learning_rate."),
        ("50:1, 50:0.5", "lr_curve has '50:0.5' after a point at or past it; write the points in order."),
        ("", "lr_curve has no point above 0, so nothing would be learnt; write '0:1, 50:1, 100:0.1'."),
        ("0:0, 100:0", "lr_curve has no point above 0, so nothing would be learnt"),
    ],
)
def test_a_curve_that_is_none_is_named(text, sentence):
    with pytest.raises(ValueError) as raised:
        OptimizerOptions(lr_scheduler="curve", lr_curve=text)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize("kind", LR_SCHEDULERS)
def test_a_run_is_of_the_lineage_of_its_longer_one_where_the_rates_are_the_same(kind):
    def lineage(steps: int) -> str:
        settings: TrainSettings = run_settings(steps=steps, optimizer={"lr_scheduler": kind})
        return settings.lineage("data", "model")

    options = OptimizerOptions(lr_scheduler=kind, lr_curve=CURVE)
    short, long = lr_factor(options, 6), lr_factor(options, 12)
    assert (lineage(6) == lineage(12)) is (kind in ("constant", "inverse_sqrt"))
    assert (lineage(6) == lineage(12)) is all(short(k) == long(k) for k in range(6))
