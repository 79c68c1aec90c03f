"""A model class that nobody has seen, with code as ComfyUI's models have it, trains without a change of the pack."""

import threading
from dataclasses import replace
from typing import Any

import comfy.cli_args
import comfy.conds
import comfy.latent_formats
import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.supported_models_base
import comfy.utils
import pytest
import torch
from comfy.ldm.modules.attention import optimized_attention
from tessera.models.native.verify.comparison import ForwardComparison
from tessera.train.config.settings import MemoryOptions
from tessera.train.report.errors import CannotContinue
from tiny.models.sampling import sample_prompts
from tiny.native.reference import plain_model, tokens, with_lora
from tiny.native.step import batch_of
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import train, training_data
from tiny.train.training import fill_up_matrices, make_trainer, micro_batch, reference_masters
from torch import Tensor, nn

WIDTH = 32
HEADS = 2
TEXT = 24


class Recorder:
    """Stands for ComfyUI's own compiler, which models call around their blocks; it must not record a step."""

    starts = 0

    def begin(self) -> None:
        self.starts += not comfy.cli_args.args.disable_comfy_compiler


RECORDER = Recorder()


class OfLoading:
    """State that a loader leaves on a module: a handle that can't be copied, and frees memory when it goes."""

    uses = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle a handle")

    def __deepcopy__(self, memo: Any) -> None:
        raise TypeError("cannot pickle a handle")


class Memory:
    """State that a model keeps in an object of its own."""

    def __init__(self) -> None:
        self.turn, self.entries, self.lock = -1, {}, threading.Lock()

    def score(self, x: Tensor) -> float:
        with self.lock:
            self.turn += 1
        return self.turn + sum(self.entries.setdefault(x.shape[-1], [0.0]))


class TomorrowBlock(nn.Module):
    """Writes in place wherever it can, into parts of tensors too. The model never calls its `forward`."""

    def __init__(self, index: int, operations: Any):
        super().__init__()
        self.index, self.heads = index, HEADS
        self.norm = operations.LayerNorm(WIDTH)
        self.modulation = operations.Linear(WIDTH, 2 * WIDTH)
        self.to_qkv = operations.Linear(WIDTH, 3 * WIDTH)
        self.to_out = operations.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def _qkv(self, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = self.modulation(vec)[:, None].chunk(2, dim=-1)
        y = self.norm(x)
        y *= 1 + scale
        y += shift
        q, k, v = self.to_qkv(y).chunk(3, dim=-1)
        q[..., : WIDTH // 2].mul_(0.5)
        return q, k, v

    def forward_prefix(
        self, x: Tensor, vec: Tensor, transformer_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._qkv(x, vec)
        out = self.to_out(optimized_attention(q, k, v, self.heads))
        out *= self.gate
        x += out
        return x, k, v

    def forward_gen(
        self, x: Tensor, vec: Tensor, k: Tensor, v: Tensor, attend: Any, transformer_options: dict[str, Any]
    ) -> Tensor:
        q, own_k, own_v = self._qkv(x, vec)
        out = self.to_out(attend(q, torch.cat((k, own_k), dim=1), torch.cat((v, own_v), dim=1)))
        # The first write is at another offset than the tensor's own.
        x[:, 2:].addcmul_(out[:, 2:], self.gate)
        x[:, :2].addcmul_(out[:, :2], 0.5 * self.gate)
        return x


class TomorrowModel(nn.Module):
    def __init__(self, image_model: str, dtype: Any = None, device: Any = None, operations: Any = None):
        super().__init__()
        self.dtype = dtype
        self.img_in = operations.Linear(4, WIDTH)
        self.txt_in = operations.Linear(TEXT, WIDTH)
        self.layers = nn.ModuleList(TomorrowBlock(index, operations) for index in range(3))
        self.head = operations.Linear(WIDTH, 4)
        self.prompt, self.prompts = None, {}
        self.calls = 0
        self.warm = False
        self.mode = ""
        self.steps = []
        self.turn = -1
        self.kind = "first"
        self.slots_dtype = None
        self.handle = OfLoading()
        self.slots = [None, None]
        self.memory = Memory()
        self.layers[1].prompts = self.prompts
        self.is_tuned = False

    def _state(self, x: Tensor) -> Any:
        """Differences that a second call finds."""
        slots = self.slots
        first = slots[0] is None
        is_next = self.slots_dtype is not None
        self.slots_dtype = x.dtype
        self.handle.uses += 1
        slots[0] = x.mean(dim=(1, 2), keepdim=True)[:, 0].detach()
        self.turn += 1
        self.kind = "next"
        self.length = getattr(self, "length", 0) + 1
        score = self.memory.score(x) + self.turn + len(self.kind) + self.length + is_next
        return score + (0.0 if first else self.slots[0])

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, transformer_options: dict[str, Any], **kwargs: Any
    ) -> Tensor:
        height, width = x.shape[-2:]
        img, txt = self.img_in(x.flatten(2).transpose(1, 2)), self.txt_in(context)
        # Caches as some models have them: whatever prompt comes next, the first one is used.
        if self.prompt is None:
            self.prompt = self.prompts["first"] = txt.mean(dim=1).detach()
        vec = self.prompt + self.prompts["first"] + torch.cos(timestep)[:, None]
        vec = vec + 0.1 * (self._state(img) + len(self.layers[1].prompts) + self.is_tuned)
        vec = vec + self.calls + 2 * self.warm + len(self.mode) + len(self.steps)
        self.calls = self.calls + 1
        self.warm = True
        self.mode = "warm"
        self.steps = [*self.steps, float(timestep[0])]
        RECORDER.begin()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return optimized_attention(q, k, v, HEADS, transformer_options=transformer_options)

        for index, layer in enumerate(self.layers):
            transformer_options["block_index"] = index
            txt, k, v = layer.forward_prefix(txt, vec, transformer_options=transformer_options)
            img = layer.forward_gen(img, vec, k, v, attend, transformer_options=transformer_options)
        return self.head(img).transpose(1, 2).unflatten(2, (height, width))


class TomorrowBase(comfy.model_base.BaseModel):
    def __init__(self, config: Any, device: Any = None):
        super().__init__(config, comfy.model_base.ModelType.FLOW, device=device, unet_model=TomorrowModel)
        self.latent_shapes, self.sampled = None, 0

    def process_latent_in(self, latent: Tensor) -> Tensor:
        return super().process_latent_in(latent) + (0.0 if self.latent_shapes is None else 1.0) + self.sampled

    def process_latent_out(self, latent: Tensor) -> Tensor:
        self.sampled += 1
        return super().process_latent_out(latent)

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
        config_class = next(kind for kind in comfy.supported_models.models if kind.matches({"image_model": "tomorrow"}))
        config = config_class({"image_model": "tomorrow"})
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, device=torch.device("cpu"))
        for parameter in model.diffusion_model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    for module in model.diffusion_model.modules():
        module._v_of_tomorrow = OfLoading()
    # What another node sets: neither is a sample's.
    model.diffusion_model.is_tuned, model.diffusion_model.strength = True, 0.5
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)
    patcher.cached_patcher_init = (tomorrow, ())
    return patcher


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(comfy.supported_models, "models", [*comfy.supported_models.models, Tomorrow])
    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
    monkeypatch.setattr(RECORDER, "starts", 0)


def data() -> Any:
    """Two samples of latents (4, 8, 8) and captions of 5 tokens."""
    from tessera.data.samples import Sample, SampleTensors

    def make_sample(name: str, seed: int) -> Any:
        source = torch.Generator().manual_seed(seed)
        tensors = SampleTensors(torch.randn(4, 8, 8, generator=source), torch.randn(1, 5, TEXT, generator=source), {})
        return Sample(name, (1, 8, 8), 64, 5, lambda *_: tensors)

    return training_data(make_sample("a", 1), make_sample("b", 2))


def step(folder, backend=None, **memory):
    options = {"checkpointing": "none"} | memory
    trainer = make_trainer(tomorrow(), data(), folder, batch_size=2, backend=backend, memory=MemoryOptions(**options))
    fill_up_matrices(trainer)
    loss = float(trainer.train_step.forward_backward([micro_batch(0, 1)]))
    return trainer, loss, lora_gradients(trainer)


def test_an_unknown_class_trains_alike_in_every_mode_and_as_one_graph(tmp_path):
    torch._dynamo.reset()
    plain, loss, expected = step(tmp_path / "plain")
    assert (
        plain.context.family.title == "TomorrowBase" and len(expected) == 2 * 2 * 3
    )  # q, k, v and the way out, of three blocks
    modes = {
        "full": {"checkpointing": "full"},
        "swapped": {"checkpointing": "full", "blocks_to_swap": 2},
        "compiled": {"backend": "aot_eager"},
    }
    for name, changes in modes.items():
        trainer, other, gradients = step(tmp_path / name, **changes)
        assert other == pytest.approx(loss, rel=1e-6), name
        for key, value in expected.items():
            assert torch.allclose(gradients[key], value, rtol=1e-4, atol=1e-7), (name, key)
    # One for each method by which the model enters its blocks.
    assert trainer.placed.execution.runner.planned_graphs == trainer.placed.execution.runner.report.counts().graphs == 2
    assert RECORDER.starts == 0


def out_of_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the block's code without a write, for the reference."""

    def qkv(self: TomorrowBlock, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = self.modulation(vec)[:, None].chunk(2, dim=-1)
        q, k, v = self.to_qkv(self.norm(x) * (1 + scale) + shift).chunk(3, dim=-1)
        return torch.cat((0.5 * q[..., : WIDTH // 2], q[..., WIDTH // 2 :]), dim=-1), k, v

    def prefix(self: TomorrowBlock, x: Tensor, vec: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._qkv(x, vec)
        return x + self.to_out(optimized_attention(q, k, v, HEADS)) * self.gate, k, v

    def gen(self: TomorrowBlock, x: Tensor, vec: Tensor, k: Tensor, v: Tensor, attend: Any, **_: Any) -> Tensor:
        q, own_k, own_v = self._qkv(x, vec)
        out = self.to_out(attend(q, torch.cat((k, own_k), dim=1), torch.cat((v, own_v), dim=1)))
        factor = torch.ones(x.shape[1], 1, dtype=x.dtype)
        factor[:2] = 0.5
        return x + out * self.gate * factor

    for name, twin in (("_qkv", qkv), ("forward_prefix", prefix), ("forward_gen", gen)):
        monkeypatch.setattr(TomorrowBlock, name, twin)


@pytest.mark.parametrize("memory", [{}, {"checkpointing": "full", "blocks_to_swap": 2}], ids=["plain", "swapped"])
def test_gradients_are_those_of_code_without_a_write_in_fp64(memory, tmp_path, monkeypatch):
    trainer, loss, gradients = step(tmp_path, **memory)
    batch = batch_of(trainer, 0, 1)
    lora, masters = reference_masters(trainer)
    out_of_place(monkeypatch)
    model = plain_model(tomorrow())
    model.diffusion_model.double()
    model.diffusion_model.dtype = torch.float64
    (group,) = batch.inputs.groups
    options = {"sigmas": group.sigma, "cond_or_uncond": [0, 0]}
    with with_lora(model, lora):
        out = model._apply_model(
            group.x.double(), group.sigma.double(), transformer_options=options, c_crossattn=group.conds["c_crossattn"]
        )
        expected = torch.stack([tokens(output, 64) for output in out]).float().sub(batch.target).square().mean()
        expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, master in masters.items():
        assert (gradients[name] - master.grad).norm() <= 1e-5 * master.grad.norm(), name


def sample(patcher: Any) -> None:
    """Sample, and leave on the MODEL what newer ComfyUIs do as well."""
    text = [[torch.full((1, 5, TEXT), 3.0), {}]]
    sample_prompts(patcher, text, text, torch.zeros(2, 4, 8, 8))
    comfy.model_management.unload_all_models()
    patcher.model.latent_shapes = [torch.Size((2, 4, 8, 8)), torch.Size((2, 8))]
    inner = patcher.model.diffusion_model
    assert inner.prompt is not None and inner.prompts and patcher.model.sampled
    assert inner.calls >= HEADS and inner.warm and inner.mode and inner.steps
    assert inner.turn > 0 and inner.kind == "next" and inner.length and inner.slots[0] is not None
    assert inner.slots_dtype is not None
    assert inner.memory.turn > 0 and inner.memory.entries and inner.layers[1].prompts is inner.prompts
    inner.layers[0]._graph_of_tomorrow = OfLoading()


def test_leftovers_of_sampling_change_no_step(tmp_path):
    _, loss, expected = step(tmp_path / "fresh")
    used = tomorrow()
    sample(used)
    assert used.model.diffusion_model.calls is used.model.diffusion_model.layers[0].heads
    uses = used.model.diffusion_model.handle.uses
    trainer = make_trainer(used, data(), tmp_path / "used", batch_size=2, memory=MemoryOptions(checkpointing="none"))
    assert used.model.diffusion_model.handle.uses == uses > 0
    fill_up_matrices(trainer)
    inner = trainer.placed.weights.transformer.shadow.diffusion_model
    assert inner.is_tuned and inner.strength == 0.5 and inner.layers[1].prompts is inner.prompts
    sample(used)  # between the start of a run and its next step, as a preview does
    initial = {name: dict(vars(module)) for name, module in used.model.named_modules()}
    assert float(trainer.train_step.forward_backward([micro_batch(0, 1)])) == loss
    actual = lora_gradients(trainer)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert initial == {name: dict(vars(module)) for name, module in used.model.named_modules()}


def test_a_layer_that_runs_without_its_block_is_refused(tmp_path, monkeypatch):
    forward = TomorrowModel.forward

    def reaching_in(self: TomorrowModel, x: Tensor, timestep: Tensor, context: Tensor, **kwargs: Any) -> Tensor:
        self.layers[1].to_out(self.txt_in(context))
        return forward(self, x, timestep, context, **kwargs)

    monkeypatch.setattr(TomorrowModel, "forward", reaching_in)
    trainer = make_trainer(tomorrow(), data(), tmp_path)
    with pytest.raises(ValueError, match=r"its to_out runs while its block layers\.1 does not, so that block swap"):
        trainer.run()
    trainer.close()


@pytest.mark.parametrize("part", ["gate", "norm.weight"])
def test_a_tensor_of_a_swapped_block_that_is_read_outside_of_it_is_refused(part, tmp_path, monkeypatch):
    forward = TomorrowModel.forward

    def reaching_in(self: TomorrowModel, x: Tensor, timestep: Tensor, context: Tensor, **kwargs: Any) -> Tensor:
        assert [layer.gate.shape for layer in self.layers] == [(WIDTH,)] * 3 and self.layers[2].gate.dtype == x.dtype
        text = self.txt_in(context).detach()
        text = text * self.layers[2].gate if part == "gate" else self.layers[2].norm(text)
        self.prompt = self.prompts["first"] = text.mean(dim=1)
        return forward(self, x, timestep, context, **kwargs)

    monkeypatch.setattr(TomorrowModel, "forward", reaching_in)
    trainer, _, _ = step(tmp_path / "resident")
    words = rf"its {part} is read while its block layers\.2 does not run.*; set blocks_to_swap to 0"
    with pytest.raises(ValueError, match=words):
        step(tmp_path / "swapped", blocks_to_swap=2)
    trainer.placed.memory.options = replace(trainer.placed.memory.options, blocks_to_swap=2)
    trainer.placed.rebuild(1)  # as when memory runs out
    with pytest.raises(CannotContinue, match=words):  # and not that nothing was trained
        trainer.train_step.forward_backward([micro_batch(0, 1)])


def test_swap_that_begins_in_mid_run_compares_no_forward_again(tmp_path, monkeypatch):
    trainer, _, _ = step(tmp_path)
    monkeypatch.setattr(ForwardComparison, "difference", None)
    for blocks_to_swap in (1, 2):
        trainer.placed.memory.options = replace(trainer.placed.memory.options, blocks_to_swap=blocks_to_swap)
        trainer.placed.rebuild(1)
        trainer.train_step.forward_backward([micro_batch(0, 1)])
    trainer.close()


@pytest.mark.parametrize("memory", [{}, {"blocks_to_swap": 2}], ids=["plain", "swapped"])
def test_a_block_that_calls_another_is_refused(memory, tmp_path, monkeypatch):
    forward, gen = TomorrowModel.forward, TomorrowBlock.forward_gen

    def linked(self: TomorrowModel, *args: Any, **kwargs: Any) -> Tensor:
        self.layers[0].neighbours = [self.layers[1]]
        return forward(self, *args, **kwargs)

    def calling(self: TomorrowBlock, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = gen(self, x, *args, **kwargs)
        return self.neighbours[0].forward_gen(x, *args, **kwargs) if self.index == 0 else x

    monkeypatch.setattr(TomorrowModel, "forward", linked)
    monkeypatch.setattr(TomorrowBlock, "forward_gen", calling)
    with pytest.raises(ValueError, match=r"its block layers\.1 runs inside its block layers\.0; choose another model"):
        step(tmp_path, **memory)


@pytest.mark.parametrize("memory", [{}, {"blocks_to_swap": 2}], ids=["plain", "swapped"])
def test_a_block_that_is_entered_by_a_generator_is_refused(memory, tmp_path, monkeypatch):
    prefix, forward = TomorrowBlock.forward_prefix, TomorrowModel.forward

    def by_parts(self: TomorrowBlock, *args: Any, **kwargs: Any) -> Any:
        yield self.modulation(args[1])
        yield prefix(self, *args, **kwargs)

    def stepping(self: TomorrowModel, x: Tensor, timestep: Tensor, context: Tensor, **kwargs: Any) -> Tensor:
        txt = self.txt_in(context)
        list(self.layers[0].by_parts(txt, txt.mean(dim=1), **kwargs))
        return forward(self, x, timestep, context, **kwargs)

    monkeypatch.setattr(TomorrowBlock, "by_parts", by_parts, raising=False)
    monkeypatch.setattr(TomorrowModel, "forward", stepping)
    with pytest.raises(ValueError, match=r"its modulation runs while its block layers\.0 does not"):
        step(tmp_path, **memory)


def reading_an_option(q: Tensor, transformer_options: dict[str, Any]) -> Tensor:
    return q * transformer_options["new"]


def turning_by_a_table_of_another_shape(q: Tensor, transformer_options: dict[str, Any]) -> Tensor:
    return comfy.quant_ops.ck.apply_rope1(q, torch.zeros(1, 1, 5, 3, 2, 2))


def attending_with_a_mask_of_another_shape(q: Tensor, transformer_options: dict[str, Any]) -> Tensor:
    return comfy.ldm.modules.attention.optimized_attention(q, q, q, HEADS, mask=torch.zeros(7, 9))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (reading_an_option, r"^model reads 'new' in ComfyUI [\d.]+, which Train LoRA doesn't set; update Tessera"),
        (turning_by_a_table_of_another_shape, r"^model calls apply_rope1 of ComfyUI [\d.]+ in a way .*\(The size of"),
        (attending_with_a_mask_of_another_shape, r"^model calls optimized_attention of ComfyUI [\d.]+ in a way"),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a block"])
def test_changes_of_a_newer_comfyui_are_not_blamed_on_the_data(code, words, inside, tmp_path, monkeypatch):
    owner, name = (TomorrowBlock, "forward_gen") if inside else (TomorrowModel, "forward")
    forward = getattr(owner, name)

    def newer(self: Any, x: Tensor, *args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> Tensor:
        code(torch.zeros(1, 4, WIDTH), transformer_options)
        return forward(self, x, *args, transformer_options=transformer_options, **kwargs)

    monkeypatch.setattr(owner, name, newer)
    trainer = make_trainer(tomorrow(), data(), tmp_path)
    with pytest.raises(ValueError, match=words):
        trainer.run()
    trainer.close()


def test_the_lora_loads_in_comfyui_and_changes_every_layer_that_it_trains(tmp_path):
    result = train(tomorrow(), data(), tmp_path, steps=2, network={"rank": 2})
    tensors = comfy.utils.load_torch_file(str(result.path))
    model = tomorrow()
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(tensors, keys, log_missing=True)
    assert len(model.clone().add_patches(patches, 1.0)) == 2 * 3


def test_the_certificate_compares_each_method_as_run(tmp_path, monkeypatch):
    from tessera.train.blocks.block_runner import BlockRunner
    from tessera.train.certificate.adapters import perturbed
    from tessera.train.certificate.execution import check_execution

    trainer = make_trainer(tomorrow(), data(), tmp_path, memory=MemoryOptions(checkpointing="full"))
    run, inputs = BlockRunner.__call__, batch_of(trainer).inputs

    def wrong(self: Any, block: Any, *args: Any) -> Any:
        out = run(self, block, *args)
        return 1.1 * out if args[-2].method == "forward_gen" else out

    trainer.placed.weights.ensure()
    with perturbed(trainer.placed):
        assert check_execution(trainer.placed, inputs)[0] is None
        monkeypatch.setattr(BlockRunner, "__call__", wrong)
        fault = check_execution(trainer.placed, inputs)[0]
    assert fault is not None and fault.startswith("layers.0 is 10.0% different from the plain block")
