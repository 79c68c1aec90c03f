import json
import math
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tessera.common.rng import generator
from tessera.train.optim.checks import check_optimizer, optimizer_notes
from tessera.train.optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from tessera.train.optim.options import LR_SCHEDULERS, OptimizerOptions
from tessera.train.optim.registry import OPTIMIZERS
from tessera.train.optim.schedule import lr_factor
from tessera.train.optim.state_dict import pack_state, unpack_state
from torch import nn

# The first is large enough for 8-bit moments and no multiple of their block of 256.
SHAPES = [(16, 273), (8, 4), (3,)]
LOW_RANK = {"down": (8, 64), "wanted": (32, 64)}
RATES = {"prodigy": 1.0}
NAMES = ("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon", "custom")


def parameters(name: str = "") -> list[nn.Parameter]:
    shapes = [*SHAPES[:2], (3, 2)] if name == "muon" else SHAPES
    return [nn.Parameter(0.1 * torch.randn(s, generator=generator(1, i))) for i, s in enumerate(shapes)]


def options_of(name: str, **changes) -> OptimizerOptions:
    extra = {"optimizer_class": "pytorch_optimizer.AdaBelief"} if name == "custom" else {}
    return OptimizerOptions(name, **({"learning_rate": RATES.get(name, 1e-2)} | extra | changes))


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


def test_each_choice_is_built_or_named():
    assert set(NAMES) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_run_resumed_through_a_file_equals_the_uninterrupted_one_bit_for_bit(name, stop, tmp_path):
    options = options_of(name, lr_scheduler="cosine", warmup_steps=3, min_lr_ratio=0.1)
    whole = parameters(name)
    optimizer, scheduler = build(options, whole)
    for k in range(10):
        if k == stop:
            state = {"optimizer": state_of(optimizer), "scheduler": scheduler.state_dict(), "params": list(whole)}
            loaded = through_a_file(state, tmp_path / "state.safetensors")
        step(whole, optimizer, scheduler, k)

    resumed = [nn.Parameter(p) for p in loaded["params"]]
    optimizer2, scheduler2 = build(options, resumed)
    restore_optimizer(optimizer2, scheduler2, loaded["optimizer"], loaded["scheduler"])
    for k in range(stop, 10):
        step(resumed, optimizer2, scheduler2, k)

    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert not torch.equal(whole[0], parameters(name)[0])
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
    x = 2.0
    m = 0.0
    v = 0.0
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


@pytest.mark.parametrize(
    ("name", "package", "pip"),
    [
        ("adamw8bit", "bitsandbytes", "bitsandbytes"),
        ("prodigy", "prodigyopt", "prodigyopt"),
        ("adamw_schedulefree", "schedulefree", "schedulefree"),
        ("came", "pytorch_optimizer", "pytorch-optimizer"),
        ("lion", "pytorch_optimizer", "pytorch-optimizer"),
        ("adafactor", "transformers", "transformers"),
    ],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(name, package, pip, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError) as raised:
        build_optimizer(OptimizerOptions(name), parameters())
    sentence = str(raised.value)
    assert sentence.startswith(f"The optimizer {name} needs the package {package}, which cannot be imported here")
    assert sentence.endswith(f"install it with 'pip install {pip}' in ComfyUI's Python, or choose adamw.")


def test_adamw_needs_no_library_beside_torch(monkeypatch):
    for package in ("bitsandbytes", "prodigyopt", "schedulefree", "pytorch_optimizer"):
        monkeypatch.setitem(sys.modules, package, None)
    assert type(build_optimizer(OptimizerOptions(), parameters())) is torch.optim.AdamW


def test_a_build_of_bitsandbytes_without_a_kernel_for_the_device_is_named_at_once(monkeypatch):
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def no_kernel(self, closure=None):
        raise NotImplementedError("no kernel for CPU")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", no_kernel)
    with pytest.raises(ValueError, match="adamw8bit does not run on cpu .*no kernel for CPU.*or choose adamw"):
        build_optimizer(OptimizerOptions("adamw8bit"), parameters())


def test_prodigy_of_the_other_library_makes_the_same_steps_with_the_arguments_that_the_help_page_names():
    """The help page offers it, as it waits for the device less often (tests/comfy/train/step/test_waits.py)."""
    other = OptimizerOptions(
        "custom",
        learning_rate=1.0,
        optimizer_class="pytorch_optimizer.Prodigy",
        optimizer_args="weight_decay=0.01\nbias_correction=True\nsafeguard_warmup=True",
    )
    assert check_optimizer(other, torch.device("cpu")) == ()
    tensors = {name: torch.randn(shape, generator=generator(0, name)) for name, shape in LOW_RANK.items()}
    losses, estimates = [], []
    for options in (OptimizerOptions("prodigy", learning_rate=1.0), other):
        down, up = nn.Parameter(0.1 * tensors["down"]), nn.Parameter(torch.zeros(32, 8))
        optimizer = build_optimizer(options, [down, up])
        for _ in range(120):
            optimizer.zero_grad()
            loss = (up @ down - 0.05 * tensors["wanted"]).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        estimates.append(float(optimizer.param_groups[0]["d"]))
    assert losses[0] < 0.7 * float((0.05 * tensors["wanted"]).square().mean()) and estimates[0] > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and estimates[1] == pytest.approx(estimates[0], rel=1e-5)


def test_notes_speak_only_of_what_surprises():
    assert optimizer_notes(OptimizerOptions()) == ()
    assert optimizer_notes(OptimizerOptions("prodigy", learning_rate=1.0)) == ()
    assert "learning_rate 1 is usual" in optimizer_notes(OptimizerOptions("prodigy"))[0]
    assert "1e-4 is usual" in optimizer_notes(OptimizerOptions(learning_rate=1.0))[0]
    assert optimizer_notes(OptimizerOptions("lion", learning_rate=2e-5)) == ()
    assert "a third to a tenth of AdamW's rate" in optimizer_notes(OptimizerOptions("lion"))[0]
    assert (
        optimizer_notes(OptimizerOptions("custom", learning_rate=1.0, optimizer_class="dadaptation.DAdaptAdam")) == ()
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"optimizer": "adamw_schedulefree", "lr_scheduler": "linear"},
            "adamw_schedulefree needs no schedule; constant is usual, and linear slows it.",
        ),
        (
            {"lr_scheduler": "inverse_sqrt"},
            "inverse_sqrt without warmup_steps falls slowly: to 0.71 after 10000 steps.",
        ),
    ],
)
def test_a_schedule_that_may_surprise_is_named(values, sentence):
    assert optimizer_notes(OptimizerOptions(**values)) == (sentence,)


@pytest.mark.parametrize("name", NAMES)
def test_usual_settings_are_not_noted(name):
    quiet = {"prodigy": 1.0, "lion": 2e-5}.get(name, 1e-4)
    assert optimizer_notes(options_of(name, learning_rate=quiet)) == ()


def by_hand(name: str, params):
    """The library's own, with all that the options' page says of it written out."""
    import bitsandbytes
    import prodigyopt
    import pytorch_optimizer
    import schedulefree
    from transformers.optimization import Adafactor

    adam = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    match name:
        case "adamw":
            return torch.optim.AdamW(params, lr=1e-2, **adam)
        case "adamw8bit":
            return bitsandbytes.optim.AdamW8bit(params, lr=1e-2, **adam)
        case "prodigy":
            return prodigyopt.Prodigy(params, lr=1.0, use_bias_correction=True, safeguard_warmup=True, **adam)
        case "adafactor":
            fixed = {"scale_parameter": False, "relative_step": False}
            return Adafactor(params, lr=1e-2, weight_decay=0.2, beta1=None, eps=(1e-30, 1e-3), **fixed)
        case "came":
            return pytorch_optimizer.CAME(params, lr=1e-2, betas=(0.9, 0.999, 0.9999), weight_decay=0.2)
        case "adamw_schedulefree":
            optimizer = schedulefree.AdamWScheduleFree(params, lr=1e-2, **adam)
            optimizer.train()
            return optimizer
        case "lion":
            return pytorch_optimizer.Lion(params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.2)
        case "muon":
            return torch.optim.Muon(params, lr=1e-2, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return pytorch_optimizer.AdaBelief(params, lr=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_each_takes_the_steps_of_its_library(name):
    inputs = {"weight_decay": 0.2} | ({} if name == "custom" else {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6})
    weights, reference = parameters(name), parameters(name)
    optimizer, scheduler = build(options_of(name, **inputs), weights)
    library = by_hand(name, reference)
    constant = torch.optim.lr_scheduler.LambdaLR(library, lambda _: 1.0)
    for k in range(5):
        step(weights, optimizer, scheduler, k)
        step(reference, library, constant, k)
    assert type(optimizer) is type(library)
    assert all(torch.equal(a, b) for a, b in zip(weights, reference, strict=True))
    assert not torch.equal(weights[0], parameters(name)[0])


def test_arguments_reach_the_optimizer_before_the_inputs():
    text = "betas=(0.7, 0.8)\n\n amsgrad = True "
    optimizer = build_optimizer(OptimizerOptions(optimizer_args=text, eps=1e-5), parameters())
    (group,) = optimizer.param_groups
    assert (group["betas"], group["amsgrad"], group["eps"]) == ((0.7, 0.8), True, 1e-5)


def test_muon_says_that_it_steps_matrices_only():
    with pytest.raises(ValueError, match=r"^The optimizer muon does not take .* this network: Muon only supports 2D"):
        build_optimizer(OptimizerOptions("muon"), parameters())


def test_a_state_of_another_optimizer_is_named():
    params = parameters()
    optimizer, scheduler = build(OptimizerOptions(), params)
    step(params, optimizer, scheduler, 0)
    saved = state_of(optimizer), scheduler.state_dict()
    with pytest.raises(ValueError) as raised:
        restore_optimizer(*build(OptimizerOptions("lion"), params), *saved)
    assert str(raised.value) == (
        "resume: that state is of the optimizer torch.AdamW and this run has pytorch_optimizer.Lion; set the optimizer "
        "as it was, or set resume to 'off'."
    )


@pytest.mark.parametrize("scheduler", LR_SCHEDULERS)
def test_a_run_resumed_under_each_schedule_has_the_same_rates(scheduler):
    options = OptimizerOptions(learning_rate=0.2, lr_scheduler=scheduler, warmup_steps=2)
    params = parameters()
    first = build(options, params)
    rates = []
    for k in range(9):
        if k == 4:
            saved = state_of(first[0]), first[1].state_dict()
            second = build(options, params)
            restore_optimizer(*second, *saved)
            first = second
        rates.append(first[0].param_groups[0]["lr"])
        step(params, *first, k)
    factor = lr_factor(options, 12)
    assert rates == [0.2 * factor(k) for k in range(9)]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "prodigy"])
def test_a_restored_state_keeps_what_was_learnt_and_takes_the_settings_of_now(name):
    params = parameters()
    original = build(OptimizerOptions(optimizer=name, learning_rate=0.2, weight_decay=0.01, beta1=0.8), params)
    for k in range(3):
        step(params, *original, k)
    saved = state_of(original[0]), original[1].state_dict()
    settings = OptimizerOptions(
        optimizer=name, learning_rate=0.05, weight_decay=0.3, beta1=0.7, eps=1e-6, lr_scheduler="linear", warmup_steps=4
    )
    optimizer, scheduler = build(settings, params)
    restore_optimizer(optimizer, scheduler, *saved)
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.3, (0.7, 0.999), 1e-6)
    # Three steps are done, so the fourth of four steps of warm-up is next: 0.05 · 4 / 4.
    assert group["lr"] == scheduler.get_last_lr()[0] == 0.05
    step(params, optimizer, scheduler, 3)
    # Then p = (4 − 4) / (12 − 4) of the way down, and after the next step 1/8.
    step(params, optimizer, scheduler, 4)
    assert group["lr"] == pytest.approx(0.05 * (1 - 1 / 8))
    for saved_entry, restored in zip(saved[0]["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert saved_entry.keys() == restored.keys()


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
    restore_optimizer(*third, state_of(second[0]), second[1].state_dict())
    for k in range(4, 7):
        step(broken, *third, k)
    assert all(torch.equal(a, b) for a, b in zip(whole, broken, strict=True))
