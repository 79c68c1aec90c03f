"""ComfyUI's own blocks cannot be trained with: the comparisons of gradients would notice."""

from typing import Any

import pytest
import tiny
import torch
from tessera.train.config.settings import MemoryOptions
from torch import Tensor

# It notices them too, before the first step.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_comparison_fails_on_comfyuis_own_block_forward(tiny_flux, tmp_path, mode):
    """Core's blocks add to their inputs in place. Run in our loop they must not pass: here autograd notices."""
    data = tiny.make_data([(4, 12)], [16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, memory=MemoryOptions(checkpointing=mode))
    tiny.fill_up_matrices(trainer)
    block = trainer.placed.weights.transformer.double_blocks[1]
    block.forward = core_forward(tiny_flux.model.diffusion_model.double_blocks[1], block)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trainer.train_step.forward_backward([tiny.micro_batch(0)])


def core_forward(core: Any, block: Any) -> Any:
    """ComfyUI's DoubleStreamBlock.forward over our Linears, called as ours is."""
    import comfy.model_management
    from comfy.ldm.flux.layers import ModulationOut

    for name, linear in block.linears().items():
        native = block.native_name(name)
        if native.endswith("mod.lin"):
            owner = core.get_submodule(native.removesuffix(".lin"))

            def modulation(vec: Tensor, linear: Any = linear) -> tuple[ModulationOut, ModulationOut]:
                parts = linear(vec).chunk(6, dim=-1)
                return ModulationOut(*parts[:3]), ModulationOut(*parts[3:])

            owner.forward = modulation
        else:
            core.get_submodule(native).forward = linear.forward

    def forward(
        img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor, key_mask: Tensor | None, masks: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        assert key_mask is None and not masks
        cos, sin = pe.transpose(1, 2).unbind(-1)
        matrices = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
        comfy.model_management.in_training = True
        try:
            # Core is called on tensors that it may change, as its own loop does between blocks.
            return core.forward(img=img.view_as(img), txt=txt.view_as(txt), vec=vec, pe=matrices)
        finally:
            comfy.model_management.in_training = False

    return forward
