"""Compare gradients with central differences, in fp32 over the stored weights, on a few tokens.

Two targets in one block of each kind are moved along a random direction W', by t. The output is a function v(t):

    J ≈ (v(h) − v(−h)) / 2h            by two forwards
    ⟨r, J⟩ = d⟨r, v⟩ / dt              by the backward that training uses, for any r

Both at h and at h/2: the distance between the two is the noise, which sets the bound. Each block is recomputed in the
backward, so that a model of any depth takes the memory of one block besides its weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.text import quantity
from ...memory.activations import checkpointing
from ...models.catalogue.registry import as_fp32, in_fp32, run_in_fp32
from ...models.family import Block, ModelInputs
from ..placement.placed_model import PlacedModel
from .adapters import without_adapters
from .probe import DirectionProbe

STEP = 0.02
LEAST = 0.01
NOISES = 4.0
UNMEASURABLE = 0.1


@dataclass(frozen=True)
class GradientCheck:
    """Comparison of gradients with central differences.

    errors: relative error of each layer's gradient, by name.
    noise: relative noise of each layer's central difference, by name; above UNMEASURABLE the error says nothing.
    """

    errors: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def measured(self) -> Mapping[str, float]:
        """Errors of the layers whose differences stand out from the noise."""
        return {name: error for name, error in self.errors.items() if self.noise[name] <= UNMEASURABLE}

    @property
    def worst(self) -> float:
        return max(self.measured.values(), default=0.0)

    @property
    def text(self) -> str:
        count, total = len(self.measured), len(self.errors)
        share = "" if count == total else f" ({count} of {quantity(total, 'layer')} could be measured)"
        return f"gradients within {max(self.worst, 1e-4):.2%}{share}"

    @property
    def fault(self) -> str | None:
        """Return a sentence on the first layer whose gradient is wrong."""
        for name, error in self.measured.items():
            if not error <= max(LEAST, NOISES * self.noise[name]):
                return f"the gradient of {name} is {error:.1%} off"
        return None


def check_gradients(placed: PlacedModel, inputs: ModelInputs, targets: Sequence[str]) -> GradientCheck:
    """Compare the gradients of two targets in a block of each kind with central differences; the LoRA is off."""
    layers = chosen_layers(placed, targets)
    linears = placed.weights.transformer.linears()
    probes = {
        name: DirectionProbe(linears[name].shape, number, placed.weights.device)
        for number, name in enumerate(sorted(layers))
    }
    forward = precise_forward(placed, inputs)
    with without_adapters(placed), in_fp32(placed.weights.transformer):
        for name, probe in probes.items():
            linears[name].attach(probe)
        with torch.no_grad():
            forward()
        columns, noise = {}, {}
        for name, probe in probes.items():
            coarse, fine = (_difference(forward, probe, step) for step in (STEP, STEP / 2))
            columns[name] = (4 * fine - coarse) / 3
            noise[name] = float((fine - coarse).norm() / columns[name].norm().clamp(min=1e-30))
        r = sum((column / column.norm().clamp(min=1e-30) for column in columns.values()), torch.zeros(()))
        with placed.training():
            out = forward()
            scalars = [probe.t for probe in probes.values()]
            gradients = torch.autograd.grad((out.double() * r).sum(), scalars, allow_unused=True)
    errors = {}
    for (name, column), gradient in zip(columns.items(), gradients, strict=True):
        expected = float((column * r).sum())
        actual = 0.0 if gradient is None else float(gradient)
        size = max(abs(expected), 0.1 * float(column.norm()), 1e-30)
        errors[name] = 0.0 if expected == actual else abs(actual - expected) / size
    return GradientCheck(errors, noise)


def _difference(forward: Callable[[], Tensor], probe: DirectionProbe, step: float) -> Tensor:
    sides = []
    with torch.no_grad():
        for t in (step, -step):
            probe.t.fill_(t)
            sides.append(forward().double())
        probe.t.zero_()
    return (sides[0] - sides[1]) / (2 * step)


def chosen_layers(placed: PlacedModel, targets: Sequence[str]) -> list[str]:
    """Choose the first and the last target in the first block of each kind that has any."""
    target_names, kinds = set(targets), set()
    selection: list[str] = []
    for name, block in placed.weights.transformer.blocks():
        kind = type(block).__name__ + block.kind
        core_name = getattr(block, "name", name)
        layers = [f"{core_name}.{block.native_name(inner_name)}" for inner_name in block.linears()]
        block_targets = [layer for layer in layers if layer in target_names]
        if block_targets and kind not in kinds:
            kinds.add(kind)
            selection += dict.fromkeys((block_targets[0], block_targets[-1]))
    return selection


def precise_forward(placed: PlacedModel, inputs: ModelInputs) -> Callable[[], Tensor]:
    """Return a function that runs the model in fp32, each block recomputed in the backward."""
    wide = as_fp32(inputs)
    recomputed = checkpointing.full(partial(run_in_fp32, _run))

    def run(block: Block, *args: Any) -> Any:
        return placed.weights.on_device(recomputed, block, *args, {})

    return lambda: placed.weights.transformer.forward(run, wide)


def _run(block: Block, *args: Any) -> Any:
    return block(*args)
