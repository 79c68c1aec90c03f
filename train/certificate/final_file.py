"""Check of a run's final file, loaded as its user will load it."""

from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...common.core import quantised_layout
from ...models.catalogue.registry import in_fp32
from ..loop.watcher import RunView
from ..preflight.context import RunContext
from ..report.errors import log_error
from ..verify.forward import relative, small_inputs
from .adapters import patched_by_core
from .certificate import off_the_record
from .gradients import precise_forward
from .lora_file import FileCheck, check_file, loaded_by_core

SIDE = 8


class FinalFileWatcher:
    """Watcher that loads the finished LoRA with ComfyUI's loader once the run is over."""

    def __init__(self, context: RunContext):
        self.context = context

    def between_steps(self, run: RunView) -> None:
        return None

    def is_due(self, step: int, steps: int) -> bool:
        return False

    def summary(self, run: RunView) -> dict[str, Any]:
        """Check the file, if there is one, and note any fault. Never raises: the file is saved already."""
        path = self.context.folder.lora_path
        if not path.is_file():
            return {}
        try:
            return {"final_file": self._check(run)}
        except Exception as error:
            log_error("The final file could not be checked", error)
            run.observer.note(
                "The LoRA is saved, but its file could not be checked with ComfyUI's loader; try it in a workflow "
                "before you rely on it."
            )
            return {}

    def _check(self, run: RunView) -> dict[str, Any]:
        placed, path = run.placed, self.context.folder.lora_path
        linears = placed.weights.transformer.linears()

        def check(device: torch.device) -> FileCheck:
            return check_file(path, run.loras.snapshot(), placed.patcher, placed.network, linears, device)

        try:
            checked = check(placed.weights.device)
        except Exception as error:
            if not comfy.model_management.is_oom(error):
                raise
            checked = check(torch.device("cpu"))
        if checked.fault is not None:
            run.observer.note(f"{checked.fault} Please report this model; the LoRA is saved all the same.")
        entries = checked.summary()
        layouts = quantised_targets(placed.patcher, placed.network.adapters)
        if layouts and run.world.world_size == 1 and (rounding := self._rounding(run)) is not None:
            entries["rounding"] = float(f"{rounding:.3g}")
            run.observer.note(
                f"ComfyUI rounds this LoRA into the model's {' and '.join(layouts)} weights when it samples, which "
                f"changes {rounding:.0%} of its effect; with a 16-bit file of the model it would be all there."
            )
        return entries

    def _rounding(self, run: RunView) -> float | None:
        """Return the relative error of the LoRA's effect on the output when ComfyUI bakes it into the MODEL's own
        weights; None, with a note, if it can't be measured."""
        try:
            return self._measured_rounding(run)
        except Exception as error:
            log_error("The rounding of the final LoRA could not be measured", error)
            run.observer.note("How much ComfyUI's rounding changes this LoRA could not be measured.")
            return None

    def _measured_rounding(self, run: RunView) -> float:
        placed, context = run.placed, self.context
        placed.weights.ensure()
        guidance = run.settings.objective.guidance
        inputs = small_inputs(placed.family, placed.patcher, context.data.samples, guidance, SIDE)
        if inputs is None:
            raise ValueError("the model takes no small grid")
        patches = loaded_by_core(context.folder.lora_path, placed.patcher)
        sampled = placed.patcher.clone()
        for key, entries in patches.items():
            sampled.patches[key] = [*sampled.patches.get(key, []), *entries]
        forward = precise_forward(placed, inputs)
        with torch.no_grad(), in_fp32(placed.weights.transformer), off_the_record(placed):
            with patched_by_core(placed, {}):
                plain = forward()
            with patched_by_core(placed, patches):
                exact = forward()
            with patched_by_core(placed, patches, sampled):
                rounded = forward()
        return relative(rounded - plain, exact - plain)


def quantised_targets(patcher: ModelPatcher, targets: Any) -> list[str]:
    """List the names of the formats below 16 bits that the MODEL stores these Linears in."""
    formats: set[str] = set()
    for name in targets:
        weight = comfy.utils.get_attr(patcher.model, f"diffusion_model.{name}.weight")
        if isinstance(weight, QuantizedTensor):
            formats.add(quantised_layout(weight).removeprefix("TensorCore").removesuffix("Layout"))
        elif weight.dtype.itemsize == 1 and weight.dtype.is_floating_point:
            formats.add("fp8")
    return sorted(formats)
