"""Optimizers by dotted name, and arguments as text: what is taken, and the sentence for what is not."""

import sys

import pytest
import torch
from tessera.train.optim.checks import check_optimizer
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.registry import fused_by_default, optimizer_class, parse_args

CPU = torch.device("cpu")


def custom(path: str, args: str = "", **values) -> OptimizerOptions:
    return OptimizerOptions("custom", optimizer_class=path, optimizer_args=args, **values)


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim.NAdam",
        "torch.optim.adamw.AdamW",
        "torch.optim.SGD",
        "transformers.optimization.Adafactor",
        "bitsandbytes.optim.Lion8bit",
        "prodigyopt.Prodigy",
        "schedulefree.SGDScheduleFree",
        "schedulefree.RAdamScheduleFree",
        "pytorch_optimizer.SOAP",
        "pytorch_optimizer.StableAdamW",
        "pytorch_optimizer.ScheduleFreeAdamW",
    ],
)
def test_classes_of_the_listed_packages_are_tried_and_taken(path):
    args = "relative_step=False" if path.endswith("Adafactor") else ""
    assert check_optimizer(custom(path, args), CPU) == ()


@pytest.mark.parametrize(
    "name", ["adamw", "adamw8bit", "adafactor", "came", "adamw_schedulefree", "lion", "muon", "prodigy"]
)
def test_each_named_optimizer_is_tried_and_goes_on_alike(name):
    rate = 1.0 if name == "prodigy" else 2e-5
    assert check_optimizer(OptimizerOptions(name, learning_rate=rate, warmup_steps=5), CPU) == ()


@pytest.mark.parametrize(
    "path",
    [
        "",
        "AdamW",
        "os.system",
        "torch.optimizers.X",
        "torch.optim",
        "torch.optim.",
        "torch.optim.__init__",
        "builtins.eval",
    ]
    + ["torch.optim._functional.adam", "torch.optim.a b", "pytorch_optimizer.x();import os", "torch.load"],
)
def test_a_class_that_is_not_of_a_listed_package_is_refused_unimported(path):
    with pytest.raises(ValueError) as raised:
        custom(path)
    assert str(raised.value).startswith(
        f"optimizer_class is {path!r}; write a class with its package, such as torch.optim.NAdam, of one of torch."
    )


@pytest.mark.parametrize(
    "path", ["torch.optim.NoSuchOptimizer", "torch.optim.lr_scheduler.LambdaLR", "torch.optim.x.Y"]
)
def test_a_class_that_the_package_does_not_have_is_named(path):
    with pytest.raises(ValueError) as raised:
        check_optimizer(custom(path), CPU)
    assert str(raised.value) == (
        f"The optimizer {path} needs {path}, and the torch installed here has no such optimizer; update it with 'pip "
        "install -U torch', look the name up in its documentation, or choose adamw."
    )


def test_a_package_that_is_not_installed_is_named_with_pips_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "prodigyplus", None)
    with pytest.raises(ValueError) as raised:
        check_optimizer(custom("prodigyplus.ProdigyPlusScheduleFree"), CPU)
    sentence = str(raised.value)
    assert sentence.startswith(
        "The optimizer prodigyplus.ProdigyPlusScheduleFree needs the package prodigyplus, which "
    )
    assert sentence.endswith(
        "install it with 'pip install prodigy-plus-schedule-free' in ComfyUI's Python, or choose adamw."
    )


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match="The optimizer muon needs torch.optim.Muon, and the torch installed here has"):
        check_optimizer(OptimizerOptions("muon"), CPU)


def test_arguments_are_literals():
    text = "a=1\n b = -0.5 \n\nc=(0.9, 0.99)\nd=None\ne='x=y'\nf=True\ng=[1, 2]"
    assert parse_args(text) == {"a": 1, "b": -0.5, "c": (0.9, 0.99), "d": None, "e": "x=y", "f": True, "g": [1, 2]}
    assert parse_args(" \n") == {}


@pytest.mark.parametrize(
    "line", ["amsgrad", "=1", "a=", "a b=1", "a=open('x')", "a=__import__('os')", "a=b", "a=1+", "1=1"]
)
def test_a_line_that_is_no_literal_is_named_and_not_run(line):
    with pytest.raises(ValueError) as raised:
        OptimizerOptions(optimizer_args=f"eps=1e-6\n{line}")
    assert str(raised.value).startswith(f"optimizer_args has the line {line!r}; write one key=value per line")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("lr=0.1", "optimizer_args sets lr, which is learning_rate; leave that line out."),
        ("params=1", "optimizer_args sets params, which is the LoRA's weights; leave that line out."),
        ("eps=1e-6\neps=1e-7", "optimizer_args sets eps twice; leave one of the lines out."),
        ("eps=1e999", "optimizer_args sets eps to 1e999; give a finite number."),
        *(
            (
                f"eps={value}",
                f"optimizer_args sets eps to {value[:100]}; give a number, True, False, None, a text in quotes, or a "
                "tuple or list of these.",
            )
            for value in ("1j", "(0.9, 1e999)", "{1}", "{'a': 1}", "b'a'", "[1, [...]]", "9" * 400)
        ),
    ],
)
def test_arguments_that_contradict_an_input_or_themselves_are_named(args, sentence):
    with pytest.raises(ValueError) as raised:
        OptimizerOptions(optimizer_args=args)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            custom("torch.optim.SGD", "momentun=0.9"),
            "optimizer_args sets momentun, which torch.optim.SGD does not take; it takes momentum, dampening, ",
        ),
        # It takes **kwargs and would drop it.
        (
            OptimizerOptions("came", optimizer_args="beta3=0.9"),
            "optimizer_args sets beta3, which came does not take; it",
        ),
        (
            OptimizerOptions(optimizer_args="d_coef=2"),
            "optimizer_args sets d_coef, which adamw does not take; it takes ",
        ),
        (
            custom("torch.optim.SGD", "momentum=-1.0"),
            "The optimizer torch.optim.SGD does not take these optimizer_args or this network: Invalid momentum value",
        ),
        (OptimizerOptions(optimizer_args="capturable=True"), "The optimizer adamw cannot train a LoRA here ("),
        (OptimizerOptions(optimizer_args="eps='small'"), "The optimizer adamw does not take these optimizer_args or"),
        (
            OptimizerOptions("adamw8bit", optimizer_args="min_8bit_size='all'"),
            "The optimizer adamw8bit cannot train a LoRA here (TypeError: ",
        ),
        (
            OptimizerOptions("prodigy", learning_rate=1.0, optimizer_args="d_coef='2'"),
            "The optimizer prodigy cannot train a LoRA here (TypeError: ",
        ),
        (custom("torch.optim.LBFGS"), "The optimizer torch.optim.LBFGS cannot train a LoRA here (TypeError: "),
        (
            custom("torch.optim.SparseAdam"),
            "The optimizer torch.optim.SparseAdam cannot train a LoRA here (RuntimeError: ",
        ),
        (
            custom("transformers.optimization.Adafactor"),
            "The optimizer transformers.optimization.Adafactor with relative_step=True sets its own rate in place of "
            "learning_rate; add a line relative_step=False to optimizer_args",
        ),
        (
            OptimizerOptions("adafactor", optimizer_args="relative_step=True"),
            "The optimizer adafactor with relative_step=True sets its own rate",
        ),
        (
            custom("pytorch_optimizer.SAM"),
            "The optimizer pytorch_optimizer.SAM takes no learning rate; choose another class.",
        ),
        (
            custom("schedulefree.SGDScheduleFree", ema_decay=0.9),
            "ema_decay is 0.9 and schedulefree.SGDScheduleFree averages the weights by itself; set ema_decay to 0, or "
            "choose another optimizer.",
        ),
    ],
)
def test_options_that_an_optimizer_cannot_take_end_before_anything_is_loaded(options, sentence):
    with pytest.raises(ValueError) as raised:
        check_optimizer(options, CPU)
    assert str(raised.value).startswith(sentence), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_schedule_on_a_class_that_needs_none_is_named():
    message = "schedulefree.SGDScheduleFree needs no schedule; constant is usual, and cosine slows it."
    assert message in check_optimizer(custom("schedulefree.SGDScheduleFree", lr_scheduler="cosine"), CPU)
    assert message not in check_optimizer(custom("schedulefree.SGDScheduleFree"), CPU)
    assert not any(
        "schedule;" in note for note in check_optimizer(custom("torch.optim.SGD", lr_scheduler="cosine"), CPU)
    )


def test_an_argument_that_has_to_be_given_is_named(monkeypatch):
    class Needy(torch.optim.SGD):
        def __init__(self, params, lr, horizon):
            super().__init__(params, lr, momentum=1 / horizon)

    monkeypatch.setattr(torch.optim, "Needy", Needy, raising=False)
    with pytest.raises(ValueError) as raised:
        check_optimizer(custom("torch.optim.Needy"), CPU)
    assert str(raised.value) == (
        "The optimizer torch.optim.Needy needs horizon; add a line horizon=… to optimizer_args."
    )
    assert check_optimizer(custom("torch.optim.Needy", "horizon=10"), CPU) == ()


def test_an_optimizer_that_forgets_at_a_resume_is_noted(monkeypatch):
    class Forgetful(torch.optim.SGD):
        """Counts its steps beside its state."""

        count = 0

        def step(self, closure=None):
            self.count += 1
            for group in self.param_groups:
                group["momentum"] = 0.1 * self.count
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "Forgetful", Forgetful, raising=False)
    assert check_optimizer(custom("torch.optim.Forgetful"), CPU) == (
        "torch.optim.Forgetful can't save its complete state, so a resumed run continues a little differently.",
    )


def test_the_class_of_a_submodule_is_found():
    assert optimizer_class("custom", "torch.optim.adamw.AdamW") is torch.optim.AdamW


def test_fused_is_the_default_on_cuda_where_nothing_else_is_asked_for():
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    name = "torch.optim.AdamW"
    assert fused_by_default(name, {"weight_decay": 0.1}, cuda) == {"fused": True}
    assert fused_by_default(name, {}, cpu) == {}
    for arguments in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}):
        assert fused_by_default(name, arguments, cuda) == {}
    for other in ("torch.optim.NAdam", "torch.optim.Muon", "torch.optim.SGD"):
        assert fused_by_default(other, {}, cuda) == {}
