"""The certificate of a run: it passes on models of ten classes, and each check finds a fault that is planted for it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from tessera.train.certificate import certificate, gradients
from tessera.train.certificate.adapters import perturbed
from tessera.train.certificate.certificate import make_certificate
from tessera.train.certificate.execution import check_execution
from tessera.train.verify.sample import check_sample, inputs_of, smallest
from tiny.native import ROWS, build, data_of
from tiny.train.training import make_trainer

BY_NAME = {row.name: row for row in ROWS}
# Of transformers and U-Nets, for pictures and video, with sound, a text adapter, experts and tokens of their own.
CLASSES = (
    "z-image",
    "krea-2",
    "sd3.5",
    "lumina-2",
    "hidream",
    "chroma-radiance",
    "sd1.5",
    "ltx-2.3",
    "wan-vace",
    "lens",
)
# Known by rule: those that get a certificate unless it is switched off.
BY_RULE = ("auraflow", "pixart-alpha", "hunyuan-dit", "hidream-o1", "cogvideox", "cosmos", "wan-scail")


def certified(name: str, folder: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from tessera.train.config.settings import MemoryOptions

    row = BY_NAME[name]
    memory = MemoryOptions(checkpointing="full", **changes.pop("memory", {}))
    trainer = make_trainer(build(row, dtype), data_of(row), folder, memory=memory, **changes)
    placed = trainer.placed
    initial = {name: weight.clone() for name, weight in trainer.network.master_weights().items()}
    try:
        certificate = make_certificate(
            placed, list(trainer.network.adapters), trainer.context.data.samples, 1.0, trainer.observer
        )
        after = trainer.network.master_weights()
        assert all(torch.equal(initial[name], after[name]) for name in initial)
        assert placed.weights.copies() == 0
        trainer.run()  # it trains as without it
    finally:
        trainer.close()
    return certificate


@pytest.mark.parametrize("name", CLASSES)
def test_models_of_ten_classes_pass(name, tmp_path):
    certificate = certified(name, tmp_path, memory={"blocks_to_swap": 1})
    assert certificate.gradients.errors and certificate.gradients.worst < 2e-3
    assert certificate.blocks < 1e-4
    assert not certificate.file.missing and not certificate.file.other
    assert "forward equal, gradients within 0.0" in certificate.text and "layers load in ComfyUI" in certificate.text


@pytest.mark.parametrize("name", BY_RULE)
def test_models_that_are_known_by_rule_pass(name, tmp_path):
    certificate = certified(name, tmp_path, memory={"blocks_to_swap": 1}, steps=1)
    assert 0 < certificate.gradients.worst < 2e-3 and certificate.blocks < 1e-4 and not certificate.unchecked
    assert certificate.gradients.measured.keys() == certificate.gradients.errors.keys()


@pytest.mark.parametrize("name", ["auraflow", "hidream-o1"])
def test_models_in_bf16_pass(name, tmp_path):
    certificate = certified(name, tmp_path, torch.bfloat16, memory={"blocks_to_swap": 1}, steps=1)
    assert 0 < certificate.gradients.worst < 1e-2 and certificate.effect < 1e-2 and not certificate.unchecked


def test_a_model_whose_own_code_rounds_to_bf16_passes_without_what_that_hides(tmp_path):
    certificate = certified("z-image-pixel", tmp_path, torch.bfloat16, steps=1)
    assert certificate.gradients is None and certificate.effect is None and not certificate.unreached
    assert certificate.text == (
        "ZImagePixelSpace: forward equal, blocks equal to plain ones, 19 of 19 layers load in ComfyUI. Not checked: "
        "gradients and effect of the file (the model's own rounding hides the differences)."
    )


def test_a_model_whose_own_code_fails_in_fp32_passes_without_those_checks(tmp_path, monkeypatch):
    from comfy.ldm.cogvideo.model import CogVideoXBlock

    forward = CogVideoXBlock.forward

    def hard(self: Any, **kwargs: Any) -> Any:
        x, context = forward(self, **kwargs)
        return torch.eye(x.shape[1], dtype=torch.bfloat16) @ x, context

    monkeypatch.setattr(CogVideoXBlock, "forward", hard)
    certificate = certified("cogvideox", tmp_path, torch.bfloat16, steps=1)
    assert certificate.text.startswith(
        "CogVideoX: forward equal, 12 of 12 layers load in ComfyUI. Not checked: gradients, "
    )
    assert certificate.unchecked.keys() == {"gradients", "targets", "blocks", "effect of the file"}
    assert all("BFloat16" in reason for reason in certificate.unchecked.values())
    assert certificate.summary()["not_checked"] == certificate.unchecked


def test_a_model_in_bf16_passes_compiled(tmp_path):
    certificate = certified("cogvideox", tmp_path, torch.bfloat16, backend="aot_eager", memory={"blocks_to_swap": 1})
    assert certificate.gradients.worst < 1e-2 and certificate.effect < 1e-2 and not certificate.unchecked


@pytest.mark.parametrize("moments", [0, 2, 6])
def test_after_ten_minutes_what_is_left_is_left_out(moments, tmp_path, monkeypatch):
    """Before the first check, and within it: the clock is past the limit after as many looks."""
    looks = itertools.count()
    late = property(lambda _: 0.0 if next(looks) < moments else certificate.LIMIT + 1)
    monkeypatch.setattr(certificate._Checks, "seconds", late)
    result = certified("cogvideox", tmp_path, steps=1, memory={"blocks_to_swap": 1})
    checks = {"gradients", "targets", "blocks", "LoRA file", "effect of the file"}
    assert dict.fromkeys(checks, "10 minutes were over") == result.unchecked
    assert result.text.startswith("CogVideoX: forward equal. Not checked:") and not result.is_transient
    assert result.summary()["seconds"] > 600 and result.summary()["peak_memory_mib"] > 100


def test_a_cancel_ends_it_between_two_blocks(tmp_path, monkeypatch):
    row = BY_NAME["cogvideox"]
    trainer = make_trainer(build(row), data_of(row), tmp_path)
    looks = itertools.count()

    def interrupted() -> None:
        if next(looks) == 5:
            raise InterruptProcessingException

    monkeypatch.setattr(trainer.observer, "check_interrupted", interrupted, raising=False)
    with pytest.raises(InterruptProcessingException):
        make_certificate(
            trainer.placed, list(trainer.network.adapters), trainer.context.data.samples, 1.0, trainer.observer
        )
    assert next(looks) == 6
    trainer.close()


def test_gradients_below_the_noise_are_not_certified(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "STEP", 1e-7)
    certificate = certified("cogvideox", tmp_path, steps=1)
    assert (
        certificate.gradients is None
        and "gradients within" not in certificate.text
        and "Not checked: gradients" in certificate.text
    )
    check = gradients.GradientCheck({"a": 0.001, "b": 0.9, "c": 0.002}, {"a": 0.01, "b": 0.3, "c": 0.01})
    assert check.fault is None and check.text == "gradients within 0.20% (2 of 3 layers could be measured)"


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 0.9 * grad


def _forward(patch: pytest.MonkeyPatch) -> None:
    from tessera.models.native.forward.blocks import NativeBlock

    forward = NativeBlock.forward
    patch.setattr(
        NativeBlock, "forward", lambda self, *args: _map_output(forward(self, *args), lambda value: 1.02 * value)
    )


def _gradients(patch: pytest.MonkeyPatch) -> None:
    from tessera.models.native.forward.blocks import NativeBlock

    forward = NativeBlock.forward
    patch.setattr(NativeBlock, "forward", lambda self, *args: _map_output(forward(self, *args), _WrongBackward.apply))


def _targets(patch: pytest.MonkeyPatch) -> None:
    from tessera.models.native.forward.shadow import NativeLinear

    forward = NativeLinear.forward

    def cut_off(self: Any, x: Any, mask: Any = None) -> Any:
        out = forward(self, x, mask)
        if self._source[1] != "layers.1.attention.out":
            return out
        plain = self.frozen().apply(x)
        return plain + (out - plain).detach()

    patch.setattr(NativeLinear, "forward", cut_off)


def _blocks_as_run(patch: pytest.MonkeyPatch) -> None:
    from tessera.train.blocks.block_runner import BlockRunner

    run = BlockRunner.__call__
    patch.setattr(
        BlockRunner, "__call__", lambda self, *args: _map_output(run(self, *args), lambda value: 1.001 * value)
    )


def _blocks_in_slots(patch: pytest.MonkeyPatch) -> None:
    from tessera.memory.swap.slot_ring import CopyStream

    fill = CopyStream.fill

    def half(self: Any, slot: Any, host: Any) -> None:
        fill(self, slot, host)
        slot[: slot.numel() // 2] = 0

    patch.setattr(CopyStream, "fill", half)


def _layer_missing(patch: pytest.MonkeyPatch) -> None:
    from tessera.train.certificate import certificate

    save = certificate.save_lora

    def save_nothing(path: Any, lora: Any) -> None:
        left_out = "lora_unet_layers_1_attention_out."
        save(path, type(lora)({k: v for k, v in lora.items() if not k.startswith(left_out)}, lora.metadata, lora.names))

    patch.setattr(certificate, "save_lora", save_nothing)


def _other_update(patch: pytest.MonkeyPatch) -> None:
    from tessera.train.certificate import certificate

    save = certificate.save_lora

    def scaled(path: Any, lora: Any) -> None:
        larger = {k: v * 1.01 if "layers_1_attention_out.lora_up" in k else v for k, v in lora.items()}
        save(path, type(lora)(larger, lora.metadata, lora.names))

    patch.setattr(certificate, "save_lora", scaled)


def _map_output(out: Any, change: Callable[[Any], Any]) -> Any:
    return change(out) if isinstance(out, torch.Tensor) else tuple(map(change, out))


FAULTS = {
    "output is .* different": _forward,
    "the check of gradients failed: the gradient of .* is .* off": _gradients,
    r"the check of targets failed: layers\.1\.attention\.out gets no gradient": _targets,
    "the check of blocks failed: .* from the plain block, checkpointing full": _blocks_as_run,
    "the check of blocks failed: .* from the plain block, swapped": _blocks_in_slots,
    r"the check of LoRA file failed: .* of .* layers of the LoRA file: not layers\.1\.attention\.out": _layer_missing,
    r"the check of LoRA file failed: .* another update .* layers\.1\.attention\.out": _other_update,
}


@pytest.mark.parametrize("wrong", FAULTS)
def test_each_check_finds_its_fault_and_names_the_block(wrong, tmp_path, monkeypatch):
    FAULTS[wrong](monkeypatch)
    with pytest.raises(ValueError, match=wrong):
        certified("z-image", tmp_path, memory={"blocks_to_swap": 1})


def test_a_wrong_gradient_is_found_in_bf16(tmp_path, monkeypatch):
    _gradients(monkeypatch)
    with pytest.raises(ValueError, match="the check of gradients failed: the gradient of .* is .* off"):
        certified("auraflow", tmp_path, torch.bfloat16)


def faults_as_run(trainer: Any) -> str | None:
    """Compare the blocks of a run with plain ones. Returns the sentence on the first that differs."""
    placed = trainer.placed
    whole, sigma = check_sample(placed.family, placed.patcher, smallest(trainer.context.data.samples))
    inputs = inputs_of(placed.family, placed.patcher, whole, sigma, 1.0)
    placed.weights.ensure()
    placed.check_forward(inputs)
    with perturbed(placed):
        return check_execution(placed, inputs)[0]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_gradient_of_rounding_alone_hides_no_wrong_one(backend, tmp_path, monkeypatch):
    from comfy.ldm.cogvideo.model import CogVideoXBlock
    from tessera.train.blocks.block_runner import BlockRunner
    from tessera.train.config.settings import MemoryOptions

    def cancelling(self: Any, hidden_states: Any, encoder_hidden_states: Any, **_: Any) -> Any:
        x = hidden_states + self.ff_out(self.ff_proj(hidden_states).relu())
        return x * self.q(x).softmax(-1).sum(-1, keepdim=True), encoder_hidden_states  # times 1

    monkeypatch.setattr(CogVideoXBlock, "forward", cancelling)
    row, memory = BY_NAME["cogvideox"], MemoryOptions(checkpointing="full", blocks_to_swap=1)
    trainer = make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path, backend=backend, memory=memory)
    try:
        assert faults_as_run(trainer) is None
        run = BlockRunner.__call__
        monkeypatch.setattr(
            BlockRunner, "__call__", lambda self, *args: _map_output(run(self, *args), _WrongBackward.apply)
        )
        fault = faults_as_run(trainer)
        assert fault is not None and "10.0% different from the plain block" in fault
        assert ("compiled" in fault) == (backend is not None)
    finally:
        trainer.close()
