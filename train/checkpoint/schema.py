"""Schema of a saved state: every field is checked here, once, before any of them is used.

A state may come from another version, a failing disk or a stranger, and a safetensors header that parses guarantees
nothing about its contents. The rest of `train/` reads a checked state without further checks of types and ranges.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ...common.untrusted.json_text import is_plain
from ...models.adapters.base import AdapterSpec
from ...models.adapters.registry import ADAPTERS, INITS
from ..optim.state_dict import unpack_state

FORMAT = 1
MASTER_WEIGHTS_PREFIX = "masters."
OPTIONAL = ("validation", "low_bit_matmul", "pictures")
_FIELDS = {"format", "step", "batches", "loss", "lineage", "machine", "tree", "adapters", "parts"}.union(OPTIONAL)
_MOVING = ("optimizer", "scheduler", "scaler", "average")
_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_SPEC = tuple(f.name for f in fields(AdapterSpec))
_MOST_BATCHES_OF_A_STEP = 1024  # the limit of gradient_accumulation on Train LoRA
_MOST_RANK = 2**20
_LONGEST_NAME = 300


class StoredTensor(NamedTuple):
    """Tensor of a state, known from the header.

    shape: its shape.
    dtype: name of its dtype in safetensors, such as F32.
    value: its value, if it has only one element.
    """

    shape: tuple[int, ...]
    dtype: str
    value: float | None = None


@dataclass(frozen=True)
class StateHeader:
    """Fields of a state without its tensors, all checked.

    step: optimizer steps done.
    batches: micro-batches done.
    loss: loss of each step.
    lineage: fingerprint of everything but the run's length.
    environment: hardware and software that it was saved with.
    master_weights: tensors of the LoRA by name.
    moving: state of optimizer, schedule, scaler and average, with a StoredTensor for each tensor.
    adapters: specs of the adapters with the layers that have them.
    parts: segments of the run.
    validation: points and the validation key, empty without validation.
    low_bit_matmul: layers that run full-precision matmuls; empty in most states.
    pictures: losses by picture and their key, empty without them.
    """

    step: int
    batches: int
    loss: list[float]
    lineage: str
    environment: dict[str, str]
    master_weights: dict[str, StoredTensor]
    moving: dict[str, Any]
    adapters: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    validation: dict[str, Any] = field(default_factory=dict)
    low_bit_matmul: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)


class UnreadableField(Exception):
    """Field of a state that cannot be used.

    name: its name.
    unknown: True if this version does not know it, False if its value is invalid.
    """

    def __init__(self, name: str, unknown: bool = False):
        super().__init__(name)
        self.name, self.unknown = name, unknown


def parse_header(plain: Any, tensors: Mapping[str, StoredTensor]) -> StateHeader:
    """Check a state's plain fields and the names and shapes of its tensors.

    plain: the parsed JSON.
    tensors: all tensors of the file by name.

    Raises UnreadableField for the first field that cannot be used.
    """
    _need(isinstance(plain, dict), "format")
    if (version := plain.get("format")) != FORMAT or isinstance(version, bool):
        raise UnreadableField("format", unknown=type(version) is int)
    _check_names(plain, _FIELDS)
    for name, value in plain.items():
        _need(is_plain(value), name)
    step = plain.get("step")
    batches = plain.get("batches")
    loss = plain.get("loss")
    _need(_is_count(step), "step")
    _need(isinstance(loss, list) and len(loss) == step and all(map(_is_number, loss)), "loss")
    _need(_is_count(batches, step, _MOST_BATCHES_OF_A_STEP * step), "batches")
    _need(_is_name(plain.get("lineage")), "lineage")
    environment = plain.get("machine")
    _need(isinstance(environment, dict) and all(map(_is_name, environment.values())), "machine")
    master_weights = {
        name.removeprefix(MASTER_WEIGHTS_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MASTER_WEIGHTS_PREFIX)
    }
    _need(bool(master_weights) and all(tensor.dtype == "F32" for tensor in master_weights.values()), "masters")
    adapters, parts = plain.get("adapters"), plain.get("parts")
    optional = {name: plain[name] for name in OPTIONAL if name in plain}
    _check_validation(optional.get("validation", {}), step)
    _check_adapters(adapters, {name.rpartition(".")[0] for name in master_weights})
    _check_parts(parts, step)
    _check_low_bit_matmul(optional.get("low_bit_matmul", {}))
    _check_pictures(optional.get("pictures", {}), step)
    moving = _moving(plain.get("tree"), tensors, step)
    _check_average(moving["average"], master_weights, step)
    return StateHeader(
        step=step,
        batches=batches,
        loss=loss,
        lineage=plain["lineage"],
        environment=environment,
        master_weights=master_weights,
        moving=moving,
        adapters=adapters,
        parts=parts,
        **optional,
    )


def _moving(tree: Any, tensors: Mapping[str, StoredTensor], step: int) -> dict[str, Any]:
    """Unpack the tree and check everything but the optimizer's own entries, which only its class knows."""
    try:
        moving = unpack_state(tensors, tree)
    except ValueError:
        raise UnreadableField("tree") from None
    _need(isinstance(moving, dict), "tree")
    _check_names(moving, set(_MOVING))
    moving = {"average": {}, **moving}
    for name in _MOVING:
        _need(isinstance(moving.get(name), dict), name)
    optimizer, scheduler, scaler = (moving[name] for name in ("optimizer", "scheduler", "scaler"))
    groups = optimizer.get("param_groups")
    _need(isinstance(groups, list) and all(_is_group(group) for group in groups), "param_groups")
    numbers = [number for group in groups for number in group["params"]]
    _need(bool(numbers) and numbers == list(range(len(numbers))), "param_groups")
    _need(isinstance(optimizer.get("state"), dict), "optimizer")
    _need(_is_name(optimizer.get("class")), "class")
    _need(_is_count(scheduler.get("last_epoch"), step, step), "scheduler")
    if scaler:
        _need(all(_is_number(scaler.get(name)) and scaler[name] > 0 for name in _SCALER[:4]), "scaler")
        _need(_is_count(scaler["growth_interval"]) and _is_count(scaler.get(_SCALER[4])), "scaler")
    return moving


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list) and all(map(_is_count, group["params"]))


def _check_average(average: dict[Any, Any], master_weights: Mapping[str, StoredTensor], step: int) -> None:
    if not average:
        return
    _need(_is_count(average.get("updates"), 0, step), "average")
    tensors = average.get("masters")
    _need(isinstance(tensors, dict) and bool(tensors), "average")
    for name, tensor in average["masters"].items():
        matches = isinstance(tensor, StoredTensor) and name in master_weights and tensor[:2] == master_weights[name][:2]
        _need(matches, "average")


def _check_validation(validation: Any, step: int) -> None:
    _need(isinstance(validation, dict), "validation")
    if not validation:
        return
    _need(_is_name(validation.get("of")) and isinstance(validation.get("points"), list), "validation")
    for point in validation["points"]:
        _need(isinstance(point, dict) and _is_count(point.get("step"), 0, step), "validation")
        _need(_is_number(point.get("loss")), "validation")
        for name in ("sigmas", "losses"):
            _need(_are_numbers(point.get(name)), "validation")


def _check_pictures(pictures: Any, step: int) -> None:
    _need(isinstance(pictures, dict), "pictures")
    if not pictures:
        return
    _check_names(pictures, {"of", "levels", "spent", "entries"})
    _need(_is_name(pictures.get("of")) and _is_count(pictures.get("spent")), "pictures")
    levels, entries = pictures.get("levels"), pictures.get("entries")
    _need(_are_numbers(levels) and bool(levels), "pictures")
    _need(isinstance(entries, list), "pictures")
    for entry in entries:
        _check_picture(entry, len(levels), step)


def _check_picture(entry: Any, levels: int, step: int) -> None:
    """Check a picture's [number, losses of the base model, [[step, losses], …]], with a loss for each level."""
    _need(isinstance(entry, list) and len(entry) == 3, "pictures")
    number, base, points = entry
    _need(_is_count(number) and _are_numbers(base) and len(base) == levels, "pictures")
    _need(isinstance(points, list) and bool(points), "pictures")
    for point in points:
        _need(isinstance(point, list) and len(point) == 2, "pictures")
        point_step, losses = point
        _need(_is_count(point_step, 1, step) and _are_numbers(losses) and len(losses) == levels, "pictures")


def _check_adapters(adapters: Any, trained: set[str]) -> None:
    """Check the specs. trained: names of the layers that the state has weights for."""
    _need(isinstance(adapters, list) and all(isinstance(group, dict) for group in adapters), "adapters")
    for group in adapters:
        _check_names(group, {*_SPEC, "layers"})
        _need(all(name in group for name in _SPEC), "adapters")
        _check_choice(group, "algorithm", ADAPTERS)
        _check_choice(group, "init", INITS)
        _need(_is_count(group["rank"], 1, _MOST_RANK), "rank")
        _need(_is_number(group["alpha"]) and group["alpha"] > 0, "alpha")
        _need(group["factor"] == -1 or _is_count(group["factor"], 1, _MOST_RANK), "factor")
        _need(_is_number(group["constraint"]) and group["constraint"] >= 0, "constraint")
        _need(isinstance(group.get("layers"), list) and all(map(_is_name, group["layers"])), "layers")
    _need(trained == {name for group in adapters for name in group["layers"]}, "layers")


def _check_choice(spec: Mapping[str, Any], name: str, choices: Container[str]) -> None:
    _need(isinstance(spec[name], str), name)
    if spec[name] not in choices:
        raise UnreadableField(f"{name} {spec[name]}", unknown=True)


def _check_parts(parts: Any, step: int) -> None:
    _need(isinstance(parts, list) and bool(parts) and all(isinstance(part, dict) for part in parts), "parts")
    begin = 0
    for number, part in enumerate(parts, start=1):
        settings = part.get("made_with")
        _need(isinstance(settings, dict) and isinstance(settings.get("data_fingerprint"), str), "parts")
        _need(_is_name(part.get("asked")), "parts")
        if number < len(parts):
            _need(_is_count(part.get("to_step"), begin, step), "parts")
            begin = part["to_step"]


def _check_low_bit_matmul(low_bit_matmul: Any) -> None:
    _need(isinstance(low_bit_matmul, dict), "low_bit_matmul")
    if not low_bit_matmul:
        return
    _check_names(low_bit_matmul, {"asked", "full"})
    _need(_is_name(low_bit_matmul.get("asked")) and isinstance(low_bit_matmul.get("full"), list), "low_bit_matmul")
    for place in low_bit_matmul["full"]:
        _need(isinstance(place, list) and all(map(_is_name, place)), "low_bit_matmul")
        _need(len(place) > 2 and set(place[2:]) <= {"forward", "backward"}, "low_bit_matmul")


def _need(holds: bool, name: str) -> None:
    if not holds:
        raise UnreadableField(name)


def _check_names(entries: Mapping[Any, Any], allowed: set[str]) -> None:
    """Raise for a field that this version does not know: ignoring it could change the meaning of the state."""
    if unknown := [name for name in entries if name not in allowed]:
        raise UnreadableField(str(unknown[0]), unknown=True)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_number, values))


def _is_count(value: Any, minimum: int = 0, maximum: int = 2**63) -> bool:
    return type(value) is int and minimum <= value <= maximum


def _is_name(value: Any) -> bool:
    """Test for a short text that can be shown in a message."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()
