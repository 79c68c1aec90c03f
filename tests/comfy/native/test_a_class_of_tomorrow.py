"""A model class that nobody has seen, with code as ComfyUI's models have it, trains without a change of the pack."""

from typing import Any

import comfy.conds
import comfy.latent_formats
import comfy.lora
import comfy.model_base
import comfy.model_patcher
import comfy.supported_models
import comfy.supported_models_base
import comfy.utils
import pytest
import torch
from comfy.ldm.modules.attention import optimized_attention
from tessera.train.settings import MemoryOptions
from tiny.reference_gradients import lora_gradients
from tiny.runs import train, training_data
from tiny.training import fill_up_matrices, make_trainer, shown
from torch import Tensor, nn

WIDTH, HEADS, TEXT = 32, 2, 24


class TomorrowBlock(nn.Module):
    """Writes in place wherever it can, into parts of tensors too."""

    def __init__(self, index: int, operations: Any):
        super().__init__()
        self.index = index
        self.norm = operations.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = operations.Linear(WIDTH, 2 * WIDTH)
        self.to_qkv = operations.Linear(WIDTH, 3 * WIDTH)
        self.to_out = operations.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, vec: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        scale, shift = self.modulation(vec)[:, None].chunk(2, dim=-1)
        y = self.norm(x)
        y *= 1 + scale
        y += shift
        q, k, v = self.to_qkv(y).chunk(3, dim=-1)
        q[..., : WIDTH // 2].mul_(0.5)
        out = self.to_out(optimized_attention(q, k, v, HEADS))
        out *= self.gate
        x += out
        return x


class TomorrowModel(nn.Module):
    def __init__(self, image_model: str, dtype: Any = None, device: Any = None, operations: Any = None):
        super().__init__()
        self.dtype = dtype
        self.img_in = operations.Linear(4, WIDTH)
        self.txt_in = operations.Linear(TEXT, WIDTH)
        self.layers = nn.ModuleList(TomorrowBlock(index, operations) for index in range(3))
        self.head = operations.Linear(WIDTH, 4)

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: dict[str, Any], **kwargs: Any
    ) -> Tensor:
        height, width = x.shape[-2:]
        img, txt = self.img_in(x.flatten(2).transpose(1, 2)), self.txt_in(context)
        tokens = torch.cat((txt, img), dim=1)
        vec = txt.mean(dim=1) + torch.cos(timestep)[:, None]
        for index, layer in enumerate(self.layers):
            transformer_options["block_index"] = index
            tokens = layer(tokens, vec, transformer_options=transformer_options)
        return self.head(tokens[:, txt.shape[1] :]).transpose(1, 2).unflatten(2, (height, width))


class TomorrowBase(comfy.model_base.BaseModel):
    def __init__(self, config: Any, device: Any = None):
        super().__init__(config, comfy.model_base.ModelType.FLOW, device=device, unet_model=TomorrowModel)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return super().extra_conds(**kwargs) | {"c_crossattn": comfy.conds.CONDRegular(kwargs["cross_attn"])}


class Tomorrow(comfy.supported_models_base.BASE):
    unet_config = {"image_model": "tomorrow"}
    unet_extra_config = {}
    sampling_settings = {"shift": 2.0}
    latent_format = comfy.latent_formats.SDXL

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> TomorrowBase:
        return TomorrowBase(self, device=device)


def tomorrow() -> Any:
    """A MODEL as a loader makes it: of the config that matches, under inference mode."""
    torch.manual_seed(0)
    with torch.inference_mode():
        found = next(kind for kind in comfy.supported_models.models if kind.matches({"image_model": "tomorrow"}))
        config = found({"image_model": "tomorrow"})
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, device=torch.device("cpu"))
        for parameter in model.diffusion_model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
    patcher.cached_patcher_init = (tomorrow, ())
    return patcher


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(comfy.supported_models, "models", [*comfy.supported_models.models, Tomorrow])


def data() -> Any:
    """Two samples of latents (4, 8, 8) and captions of 5 tokens."""
    from tessera.data.samples import Sample, SampleTensors

    def one(name: str, seed: int) -> Any:
        source = torch.Generator().manual_seed(seed)
        tensors = SampleTensors(torch.randn(4, 8, 8, generator=source), torch.randn(1, 5, TEXT, generator=source), {})
        return Sample(name, (1, 8, 8), 64, 5, lambda *_: tensors)

    return training_data(one("a", 1), one("b", 2))


def step(folder, backend=None, **memory):
    options = {"checkpointing": "none"} | memory
    trainer = make_trainer(tomorrow(), data(), folder, batch_size=2, backend=backend, memory=MemoryOptions(**options))
    fill_up_matrices(trainer)
    loss = float(trainer.forward_backward([shown(0, 1)]))
    return trainer, loss, lora_gradients(trainer)


def test_it_trains_alike_in_every_mode_and_as_one_graph(tmp_path):
    torch._dynamo.reset()
    plain, loss, wanted = step(tmp_path / "plain")
    assert plain.family.title == "TomorrowBase" and len(wanted) == 2 * 2 * 3  # q, k, v and the way out, of three blocks
    modes = {
        "full": {"checkpointing": "full"},
        "swapped": {"checkpointing": "full", "blocks_to_swap": 2},
        "compiled": {"backend": "aot_eager"},
    }
    for name, changes in modes.items():
        trainer, other, found = step(tmp_path / name, **changes)
        assert other == pytest.approx(loss, rel=1e-6), name
        for key, value in wanted.items():
            assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-7), (name, key)
    assert trainer.placed.runner.planned_graphs == trainer.placed.runner.report.counts().graphs == 1


def test_its_lora_loads_in_comfyui_and_changes_every_layer_that_it_trains(tmp_path):
    result = train(tomorrow(), data(), tmp_path, steps=2, network={"rank": 2})
    tensors = comfy.utils.load_torch_file(str(result.path))
    model = tomorrow()
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(tensors, keys, log_missing=True)
    assert len(model.clone().add_patches(patches, 1.0)) == 2 * 3
