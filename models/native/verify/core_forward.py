"""ComfyUI's own forward over a placed transformer, with ComfyUI's blocks, kernels and attention, without gradients."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ....memory.comfy_compiler import without_comfy_compiler
from ....memory.weights.check_format import FormatMismatch
from ...family import Block, Family, NoisySample, RunBlock, Transformer
from ..comfyui.refusals import OF_CORE, cause_of, is_of_core, refusal, unusable
from ..forward.inputs import NativeGroup, native_inputs
from ..forward.precision import cast_buffers, cast_floating, computing_in, dtype_told, run_in
from ..forward.shadow import SharedTensors, restore
from .placed_shadow import shadow_over


class CoreForward:
    """ComfyUI's model over the weights of a transformer with our own forward.

    on_device: calls a function on a block and its arguments with the block's weights on the device.
    """

    def __init__(self, family: Family, patcher: ModelPatcher, transformer: Transformer, on_device: RunBlock):
        self.family = family
        self.patcher = patcher
        self._on_device = on_device
        self.device, self.dtype = patcher.load_device, patcher.model.get_dtype_inference()
        self.shadow = shadow_over(patcher, transformer.linears(), self.device, self.dtype)
        for name, block in transformer.blocks():
            core = self.shadow.diffusion_model.get_submodule(name)
            core.__dict__["forward"] = _hook(core, block, on_device)
        self._clean = self.shadow.state()

    def mismatch(self) -> FormatMismatch | None:
        """Find a module whose weights are read differently than by ComfyUI."""
        return self.shadow.mismatch()

    @torch.no_grad()
    def own_velocity(
        self, transformer: Transformer, sample: NoisySample, sigma: Tensor, guidance: float, dtype: torch.dtype
    ) -> Tensor:
        """Run the same sample by our own forward: sigma (1,) → (1, N, C·patch). The adapters have to be disabled."""
        inputs = self.family.forward.inputs(self.patcher, [sample], sigma, guidance).to(self.device)
        if dtype == self.dtype:
            return transformer.forward(lambda block, *args: self._on_device(_run, block, *args, {}), inputs)
        with computing_in(dtype, transformer):
            inputs = cast_floating(inputs, dtype)
            return transformer.forward(
                lambda block, *args: self._on_device(partial(run_in, dtype, _run), block, *args, {}), inputs
            )

    @torch.no_grad()
    def velocity(self, sample: NoisySample, sigma: Tensor, guidance: float, dtype: torch.dtype) -> Tensor:
        """Run one sample, a whole grid, in `dtype`. Returns the model's output as tokens, (1, N, C·patch).

        sample, sigma: on the host, sigma (1,), the model's own.
        """
        distilled = guidance if self.family.conditioning.takes_guidance(self.patcher.model) else None
        inputs = native_inputs(self.patcher, [self.family.forward.as_core_takes(sample)], sigma, distilled)
        (group,) = inputs.to(self.device).groups
        restore(self._clean)
        modules: list[Any] = [m for m in self.shadow.tensors.values() if isinstance(m, SharedTensors)]
        with ExitStack() as stack:
            if dtype != self.dtype:
                stack.enter_context(cast_buffers(dtype, modules))
                stack.enter_context(dtype_told(dtype, self.shadow.base))
            out = self._call(group.copied(), dtype)
        restore(self._clean)
        return self.family.forward.patchify(out[0].float(), sample.tokens).tokens[None]

    def _call(self, group: NativeGroup, dtype: torch.dtype) -> Tensor:
        # Both forwards start from x rounded to the dtype of the run.
        x = group.x.to(self.dtype).to(dtype)
        options: dict[str, Any] = {"sigmas": group.sigma, "cond_or_uncond": [0]}
        arguments = {"transformer_options": options, **group.conds}
        try:
            with without_comfy_compiler((x, group.sigma), arguments):
                out: Tensor = self.shadow.base.apply_model(x, group.sigma, **arguments)
        except OF_CORE as error:
            if not is_of_core(error):
                raise
            raise refusal(error, None) or unusable("Tessera's layers", cause_of(error)) from error
        return out


def _run(block: Block, *args: Any) -> Any:
    return block(*args)


def _hook(core: Any, block: Block, on_device: RunBlock) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return on_device(lambda _: type(core).forward(core, *args, **kwargs), block)

    return forward
