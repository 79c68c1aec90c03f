import json
import math
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tessera.train.draws import generator
from tessera.train.optimizer import (
    build_optimizer,
    build_scheduler,
    lr_factor,
    optimizer_notes,
    restore_optimizer,
)
from tessera.train.optimizer_state import pack_state, unpack_state
from tessera.train.options import OptimizerOptions
from torch import nn

# The first is large enough for 8-bit moments and no multiple of their block of 256.
SHAPES = [(16, 273), (8, 4), (3,)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(0.1 * torch.randn(s, generator=generator(1, i))) for i, s in enumerate(SHAPES)]


def step(params, optimizer, scheduler, k: int) -> None:
    """A quadratic with noisy gradients; the last parameter sits out some steps."""
    for i, p in enumerate(params):
        p.grad = None if i == 2 and k % 3 == 0 else p.detach() - 1 + torch.randn(p.shape, generator=generator(2, k, i))
    optimizer.step()
    scheduler.step()


def build(options: OptimizerOptions, params, total: int = 12):
    optimizer = build_optimizer(options, params)
    return optimizer, build_scheduler(options, optimizer, total)


def through_a_file(state, path):
    tensors, tree = pack_state(state, "state")
    save_file(tensors, path, metadata={"tree": json.dumps(tree, allow_nan=False)})
    with safe_open(path, "pt") as f:
        return unpack_state({name: f.get_tensor(name) for name in f.keys()}, json.loads(f.metadata()["tree"]))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "prodigy"])
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_run_resumed_through_a_file_equals_the_uninterrupted_one_bit_for_bit(name, stop, tmp_path):
    rate = 1.0 if name == "prodigy" else 1e-2
    options = OptimizerOptions(name, learning_rate=rate, lr_scheduler="cosine", warmup_steps=3, min_lr_ratio=0.1)
    whole = parameters()
    optimizer, scheduler = build(options, whole)
    for k in range(10):
        if k == stop:
            state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "params": list(whole)}
            loaded = through_a_file(state, tmp_path / "state.safetensors")
        step(whole, optimizer, scheduler, k)

    resumed = [nn.Parameter(p) for p in loaded["params"]]
    optimizer2, scheduler2 = build(options, resumed)
    optimizer2.load_state_dict(loaded["optimizer"])
    scheduler2.load_state_dict(loaded["scheduler"])
    for k in range(stop, 10):
        step(resumed, optimizer2, scheduler2, k)

    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert not torch.equal(whole[0], parameters()[0])
    assert scheduler.get_last_lr() == scheduler2.get_last_lr()
    a, a_tree = pack_state(optimizer.state_dict())
    b, b_tree = pack_state(optimizer2.state_dict())
    assert a_tree == b_tree and a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_adamw_takes_the_step_that_its_paper_writes():
    """Loshchilov & Hutter 2019, algorithm 2: decay first, then lr · m̂ / (√v̂ + eps)."""
    options = OptimizerOptions(learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-3)
    p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer(options, [p])
    x, m, v = 2.0, 0.0, 0.0
    for t, g in enumerate([3.0, -1.0, 0.5], start=1):
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x = x * (1 - 0.1 * 0.5) - 0.1 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
        assert p.item() == pytest.approx(x, rel=1e-12)


def test_the_8_bit_optimizer_follows_adamw_closely_and_keeps_bytes():
    eight, full = parameters(), parameters()
    optimizers = [
        build_optimizer(OptimizerOptions(name, learning_rate=1e-2), params)
        for name, params in [("adamw8bit", eight), ("adamw", full)]
    ]
    for k in range(20):
        for params, optimizer in zip([eight, full], optimizers, strict=True):
            for i, p in enumerate(params):
                p.grad = p.detach() - 1 + 0.1 * torch.randn(p.shape, generator=generator(2, k, i))
            optimizer.step()
    for a, b, start in zip(eight, full, parameters(), strict=True):
        assert (a - b).norm() < 0.05 * (b - start).norm()
    moments = [t for t in pack_state(optimizers[0].state_dict())[0].values() if t.shape == SHAPES[0]]
    assert [t.dtype for t in moments] == [torch.uint8, torch.uint8]


def test_prodigy_finds_a_rate_by_itself():
    params = parameters()
    optimizer = build_optimizer(OptimizerOptions("prodigy", learning_rate=1.0), params)
    for k in range(150):
        for i, p in enumerate(params):
            p.grad = p.detach() - 1 + 0.1 * torch.randn(p.shape, generator=generator(3, k, i))
        optimizer.step()
    assert max(float((p.detach() - 1).abs().mean()) for p in params) < 0.3


def expected_rate(kind: str, step: int, total: int, warmup: int, low: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    p = (step - warmup) / (total - warmup)
    return {
        "constant": 1.0,
        "linear": low * p + (1 - p),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * p)) / 2,
    }[kind]


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("total", "warmup", "low"), [(10, 0, 0.0), (10, 4, 0.1), (1, 0, 0.0), (7, 6, 0.5)])
def test_the_rate_is_the_written_out_formula_at_every_step(kind, total, warmup, low):
    options = OptimizerOptions(learning_rate=0.02, lr_scheduler=kind, warmup_steps=warmup, min_lr_ratio=low)
    params = parameters()
    optimizer, scheduler = build(options, params, total)
    for k in range(total):
        rate = optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(0.02 * expected_rate(kind, k, total, warmup, low), rel=1e-12)
        assert rate > 0
        step(params, optimizer, scheduler, k)
    last = low if kind != "constant" else 1.0
    assert scheduler.get_last_lr()[0] == pytest.approx(0.02 * last, abs=1e-15)
    assert lr_factor(options, total)(total + 5) == pytest.approx(last, abs=1e-15)


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warm_up_as_long_as_the_run_is_refused(warmup):
    options = OptimizerOptions(warmup_steps=warmup)
    with pytest.raises(ValueError) as raised:
        build(options, parameters(), 10)
    assert str(raised.value) == (f"warmup_steps is {warmup} and the run has 10 steps; set warmup_steps below 10.")


@pytest.mark.parametrize(("name", "package"), [("adamw8bit", "bitsandbytes"), ("prodigy", "prodigyopt")])
def test_a_missing_library_is_named_with_the_way_to_get_it(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError) as raised:
        build_optimizer(OptimizerOptions(name), parameters())
    sentence = str(raised.value)
    assert sentence.startswith(f"The optimizer {name} needs the package {package}, which cannot be imported here")
    assert sentence.endswith(f"install it with 'pip install {package}' in ComfyUI's Python, or choose adamw.")


def test_adamw_needs_no_library_beside_torch(monkeypatch):
    for package in ("bitsandbytes", "prodigyopt"):
        monkeypatch.setitem(sys.modules, package, None)
    assert type(build_optimizer(OptimizerOptions(), parameters())) is torch.optim.AdamW


def test_a_build_of_bitsandbytes_without_a_kernel_for_the_device_is_named_at_once(monkeypatch):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def no_kernel(self, closure=None):
        raise NotImplementedError("no kernel for CPU")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", no_kernel)
    with pytest.raises(ValueError, match="adamw8bit does not run on cpu .*no kernel for CPU.*or choose adamw"):
        build_optimizer(OptimizerOptions("adamw8bit"), parameters())


def test_notes_speak_only_of_what_surprises():
    assert optimizer_notes(OptimizerOptions()) == ()
    assert optimizer_notes(OptimizerOptions("prodigy", learning_rate=1.0)) == ()
    assert "learning_rate 1 is usual" in optimizer_notes(OptimizerOptions("prodigy"))[0]
    assert "1e-4 is usual" in optimizer_notes(OptimizerOptions(learning_rate=1.0))[0]
    assert "min_lr_ratio" in optimizer_notes(OptimizerOptions(min_lr_ratio=0.1))[0]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "prodigy"])
def test_a_restored_state_keeps_what_was_learnt_and_takes_the_settings_of_now(name):
    params = parameters()
    before = build(OptimizerOptions(optimizer=name, learning_rate=0.2, weight_decay=0.01, beta1=0.8), params)
    for k in range(3):
        step(params, *before, k)
    saved = before[0].state_dict(), before[1].state_dict()
    now = OptimizerOptions(
        optimizer=name, learning_rate=0.05, weight_decay=0.3, beta1=0.7, eps=1e-6, lr_scheduler="linear", warmup_steps=4
    )
    optimizer, scheduler = build(now, params)
    restore_optimizer(optimizer, scheduler, *saved)
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.3, (0.7, 0.999), 1e-6)
    # Three steps are done, so the fourth of four steps of warm-up is next: 0.05 · 4 / 4.
    assert group["lr"] == scheduler.get_last_lr()[0] == 0.05
    step(params, optimizer, scheduler, 3)
    # Then p = (4 − 4) / (12 − 4) of the way down, and after the next step 1/8.
    step(params, optimizer, scheduler, 4)
    assert group["lr"] == pytest.approx(0.05 * (1 - 1 / 8))
    for kept, restored in zip(saved[0]["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert kept.keys() == restored.keys()


def test_a_restored_state_of_the_same_settings_goes_on_bit_for_bit():
    options = OptimizerOptions(learning_rate=0.2, lr_scheduler="cosine", warmup_steps=2)
    whole, broken = parameters(), parameters()
    first = build(options, whole)
    for k in range(7):
        step(whole, *first, k)
    second = build(options, broken)
    for k in range(4):
        step(broken, *second, k)
    third = build(options, broken)
    restore_optimizer(*third, second[0].state_dict(), second[1].state_dict())
    for k in range(4, 7):
        step(broken, *third, k)
    assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))
