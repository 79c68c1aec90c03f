"""Table of optimizers, and custom optimizers by dotted class name with arguments as text.

Security: a class is imported only from the packages listed here, and arguments are literals, never evaluated code.
"""

import ast
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...common.text import quoted
from ...common.untrusted.budgets import SETTINGS, check_size

# Packages that a class may be imported from, with their names on PyPI. A workflow is untrusted input.
PACKAGES = {
    "torch.optim": "torch",
    "transformers.optimization": "transformers",
    "bitsandbytes.optim": "bitsandbytes",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch-optimizer",
    "lion_pytorch": "lion-pytorch",
    "came_pytorch": "came-pytorch",
    "dadaptation": "dadaptation",
    "prodigyplus": "prodigy-plus-schedule-free",
}


@dataclass(frozen=True)
class OptimizerSpec:
    """Row of the table of optimizers: class, inputs and memory.

    class_path: dotted name of the class.
    takes: inputs of the node Optimizer that it uses in addition to learning_rate.
    state_bytes: largest state per trained parameter, in bytes (fp32 parameter and gradient), over all its arguments.
    least_state_bytes: smallest state per trained parameter, in bytes; factored moments count as 0.
    step_bytes: temporary memory of a step per trained parameter, in bytes.
    fixed: constructor arguments that are always set.
    """

    class_path: str
    takes: tuple[str, ...]
    state_bytes: int
    least_state_bytes: int
    step_bytes: int
    fixed: Mapping[str, Any] = field(default_factory=dict)


_ADAM, _DECAY = ("betas", "eps", "weight_decay"), ("weight_decay",)
CUSTOM = "custom"
OPTIMIZERS = {
    "adamw": OptimizerSpec("torch.optim.AdamW", _ADAM, 8, 8, 4),
    # Moments in 8 bits by blocks of 256; tensors under 4096 elements stay fp32.
    "adamw8bit": OptimizerSpec("bitsandbytes.optim.AdamW8bit", _ADAM, 2, 2, 4),
    # Its authors recommend bias correction and safeguard_warmup for diffusion models.
    "prodigy": OptimizerSpec(
        "prodigyopt.Prodigy", _ADAM, 16, 8, 4, {"use_bias_correction": True, "safeguard_warmup": True}
    ),
    # Not torch's Adafactor: that always scales a step by the weight's RMS, which is 0 for the up matrix at the start.
    # The factored moments are as large as the matrix at rank 1 and smaller above it; the same holds for CAME.
    "adafactor": OptimizerSpec(
        *("transformers.optimization.Adafactor", _DECAY, 4, 0, 4), {"scale_parameter": False, "relative_step": False}
    ),
    # Its step holds the updates of all tensors at once, like that of every row with step_bytes above 4.
    "came": OptimizerSpec("pytorch_optimizer.CAME", _DECAY, 12, 4, 12),
    "adamw_schedulefree": OptimizerSpec("schedulefree.AdamWScheduleFree", _ADAM, 8, 8, 8),
    "lion": OptimizerSpec("pytorch_optimizer.Lion", _DECAY, 4, 4, 8),
    # Updates with AdamW's RMS, so that the same learning rates apply (Liu et al. 2025, arXiv 2502.16982, eq. 4).
    "muon": OptimizerSpec("torch.optim.Muon", _DECAY, 4, 4, 4, {"adjust_lr_fn": "match_rms_adamw"}),
    # A class named by the user: the largest memory of this table as upper bound, 0 as lower bound.
    CUSTOM: OptimizerSpec("", (), 16, 0, 12),
}
# Classes whose step updates each element independently, so that weights joined in one tensor get the same steps.
_ELEMENTWISE = ("torch.optim.AdamW", "torch.optim.SGD", "pytorch_optimizer.Lion", "schedulefree.AdamWScheduleFree")
# Arguments of an older Lion that make a step depend on the whole matrix.
_OF_A_MATRIX = {"use_gc", "adanorm", "cautious"}
_OWN_INPUTS = {"params": "the LoRA's weights", "lr": "learning_rate"}


def package_of(dotted: str) -> str:
    """Return the listed package that a dotted class name begins with. Raises ValueError if there is none."""
    for package in PACKAGES:
        rest = dotted.removeprefix(package + ".")
        if rest != dotted and all(part.isidentifier() and not part.startswith("_") for part in rest.split(".")):
            return package
    raise ValueError(
        f"optimizer_class is {quoted(dotted)}; write a class with its package, such as torch.optim.NAdam, of one of "
        f"{', '.join(PACKAGES)}."
    )


def optimizer_class(name: str, dotted: str) -> type[torch.optim.Optimizer]:
    """Import an optimizer class from a listed package.

    name: the user's choice, for the error texts.
    dotted: dotted name of the class.

    Raises ValueError if the package cannot be imported or has no such optimizer.
    """
    package = package_of(dotted)
    module, _, class_name = dotted.rpartition(".")
    top, pip = package.partition(".")[0], PACKAGES[package]
    try:
        importlib.import_module(top)
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            f"The optimizer {name} needs the package {top}, which cannot be imported here ({error}); install it with "
            f"'pip install {pip}' in ComfyUI's Python, or choose adamw."
        ) from error
    try:
        loaded_class = getattr(importlib.import_module(module), class_name, None)
    except ImportError:
        loaded_class = None
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, torch.optim.Optimizer)):
        raise ValueError(
            f"The optimizer {name} needs {dotted}, and the {top} installed here has no such optimizer; update it with "
            f"'pip install -U {pip}', look the name up in its documentation, or choose adamw."
        )
    return loaded_class


def is_elementwise(class_path: str, args: Mapping[str, Any]) -> bool:
    """Return whether a class updates each element independently with these arguments."""
    return class_path in _ELEMENTWISE and not _OF_A_MATRIX & args.keys()


def fused_by_default(class_path: str, args: Mapping[str, Any], device: torch.device) -> dict[str, bool]:
    """Return the argument that selects AdamW's fused step on CUDA, unless `args` decide about it.

    SGD is excluded: its fused step fails if a weight's first gradient comes later than the others'.
    """
    overrides = {"fused", "foreach", "differentiable"} & args.keys()
    return {"fused": True} if device.type == "cuda" and class_path == "torch.optim.AdamW" and not overrides else {}


def parse_args(text: str) -> dict[str, Any]:
    """Parse `key=value` lines. Values are Python literals: numbers, True, False, None, strings, tuples, lists.

    Raises ValueError if a line is malformed, a key occurs twice, a float is not finite, a key has its own input, or the
    text is too long.
    """
    check_size(SETTINGS, "optimizer_args", characters=len(text))
    args: dict[str, Any] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, equals, value = (part.strip() for part in line.partition("="))
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            equals = ""
            parsed = None
        if not equals or not key.isidentifier():
            raise ValueError(
                f"optimizer_args has the line {quoted(line)}; write one key=value per line, with a plain "
                "value such as 0.1, True, None, 'text' or (0.9, 0.99)."
            )
        if key in _OWN_INPUTS:
            raise ValueError(f"optimizer_args sets {key}, which is {_OWN_INPUTS[key]}; leave that line out.")
        if key in args:
            raise ValueError(f"optimizer_args sets {key} twice; leave one of the lines out.")
        if isinstance(parsed, float) and not math.isfinite(parsed):
            raise ValueError(f"optimizer_args sets {key} to {value}; give a finite number.")
        if not _is_plain(parsed):
            raise ValueError(
                f"optimizer_args sets {key} to {value[:100]}; give a number, True, False, None, a text in quotes, or a "
                "tuple or list of these."
            )
        args[key] = parsed
    return args


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | str) or (type(value) in (int, float) and abs(value) < 1e300)


def arguments(kind: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the constructor parameters of a class that can be given by name."""
    parameters = inspect.signature(kind).parameters
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in keyword_kinds}


def check_args(name: str, kind: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown argument, a missing required one, or a class that sets its own learning rate.

    A class with **kwargs usually ignores unknown names, so only named parameters are accepted.
    """
    accepted = arguments(kind)
    unknown = [key for key in args if key not in accepted]
    if unknown:
        accepted_names = ", ".join(key for key in accepted if key not in _OWN_INPUTS)
        raise ValueError(f"optimizer_args sets {unknown[0]}, which {name} does not take; it takes {accepted_names}.")
    if "lr" not in accepted:
        raise ValueError(f"The optimizer {name} takes no learning rate; choose another class.")
    missing = [
        key for key, p in accepted.items() if p.default is p.empty and key not in args and key not in ("params", "lr")
    ]
    if missing:
        raise ValueError(f"The optimizer {name} needs {missing[0]}; add a line {missing[0]}=… to optimizer_args.")
    if "relative_step" in accepted and args.get("relative_step", accepted["relative_step"].default) is True:
        raise ValueError(
            f"The optimizer {name} with relative_step=True sets its own rate in place of learning_rate; add a line "
            f"relative_step=False to optimizer_args, with scale_parameter=False for a LoRA, or choose adafactor."
        )
