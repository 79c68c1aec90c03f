"""What ComfyUI's sampler sets in `transformer_options` for every model is set in training too."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy
import torch
from tessera.models.native.forward.inputs import NativeGroup

COMFY = Path(next(iter(comfy.__path__)))
# Set by hooks, for several devices, and by nodes: not by the sampler for every model.
ELSEWHERE = {"patches", "multigpu_thread_device"}


def keys(path: Path, context: type) -> Iterator[str]:
    """Names of the options that a file reads or writes by subscription."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, context):
            continue
        holder = ast.unparse(node.value)
        if holder.endswith(("transformer_options", "('transformer_options', {})")) and isinstance(
            node.slice, ast.Constant
        ):
            yield node.slice.value


def options(*sigmas: float) -> dict[str, Any]:
    sigma = torch.tensor(sigmas)
    return NativeGroup(tuple(range(len(sigmas))), sigma[:, None], sigma, {}, ()).sampler_options()


def test_all_that_the_sampler_sets_is_set() -> None:
    by_sampler = set(keys(COMFY / "samplers.py", ast.Store)) - ELSEWHERE
    assert by_sampler >= {"sigmas", "sample_sigmas", "cond_or_uncond", "uuids"}, "the sampler was read wrong"
    assert by_sampler <= options(0.5).keys()


def test_all_that_a_forward_has_to_find_is_set() -> None:
    """By subscription, which raises without it: by the sampler, by the forward itself, or by a patch that brings it."""
    files = [*(COMFY / "ldm").rglob("*.py"), COMFY / "model_base.py"]
    stored_keys = {key for path in files for key in keys(path, ast.Store)}
    extra_keys = {"patches", "optimized_attention_override"}
    read = {key for path in files for key in keys(path, ast.Load)}
    assert "sample_sigmas" in read, "the models were read wrong"
    assert read <= options(0.5).keys() | stored_keys | extra_keys


def test_a_mean_flow_is_told_a_step_of_no_length() -> None:
    """Its velocity is the mean from this sigma to the next of the schedule; the loss asks for that at this sigma."""
    step_options = options(0.25, 0.75)
    sigmas, schedule = step_options["sigmas"], step_options["sample_sigmas"]
    for sigma in sigmas:
        place = torch.where(sigma == schedule)[0][0]
        assert schedule[place + 1] == sigma
    assert schedule.tolist() == sorted(schedule.tolist(), reverse=True)
    assert step_options["cond_or_uncond"] == [0, 0] and len(set(step_options["uuids"])) == 2
