"""Two things with one fingerprint hold the same numbers; any change of a number changes it."""

import uuid
from collections import namedtuple
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from tessera.common.fingerprint import changed_fields, fingerprint, weights_fingerprint
from tessera.lora.source import LoraSource
from tessera.memory.low_bit.matmul import LOW_BIT_MATMULS
from tessera.train.config.settings import ValidationOptions
from tiny.train.runs import run_settings, training_data

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64]


def changed_at(tensor, index):
    other = tensor.clone()
    flat = other.view(torch.uint8).view(-1)
    flat[index] ^= 1
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (7, 11), (257, 1031)], ids=str)
def test_every_byte_of_a_tensor_counts(dtype, shape):
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    name = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == name
    raw = tensor.reshape(-1).view(torch.uint8)
    places = torch.randint(0, raw.numel(), (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for place in {0, raw.numel() - 1, *places}:
        assert fingerprint(changed_at(tensor.reshape(-1), place).reshape(shape)) != name, place


def test_shape_and_dtype_count_and_the_layout_in_memory_does_not():
    tensor = torch.arange(64 * 2048, dtype=torch.float32).reshape(64, 2048)
    assert fingerprint(tensor.t().contiguous().t()) == fingerprint(tensor)
    padded = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].reshape(64, 2048)  # an odd offset in its storage
    assert fingerprint(padded) == fingerprint(tensor)
    assert fingerprint(tensor.reshape(2048, 64)) != fingerprint(tensor)
    assert fingerprint(tensor.view(torch.int32)) != fingerprint(tensor)
    with torch.inference_mode():
        inference = tensor.clone()
    assert fingerprint(inference) == fingerprint(tensor)


def test_swapped_rows_are_seen():
    tensor = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(0))
    other = tensor.clone()
    other[[0, 1]] = tensor[[1, 0]]
    assert fingerprint(other) != fingerprint(tensor)


def test_values_are_told_apart_by_kind_and_nesting():
    values = [1, 1.0, "1", b"1", True, None, [1], [[1]], [1, 1], ["ab", "c"], ["a", "bc"], {"a": 1}, {"a": 2}, []]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


Saved = namedtuple("Saved", "weight inplace_update")


def patcher(model, patches=None, backup=None, injections=None):
    """Part of a ComfyUI model patcher that says which weights it stands for."""
    return SimpleNamespace(
        model=model, patches=patches or {}, patches_uuid=uuid.uuid4(), backup=backup or {}, injections=injections or {}
    )


def linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))


def test_weights_persistent_buffers_and_patches_count():
    name = weights_fingerprint(patcher(linear()))
    assert weights_fingerprint(patcher(linear())) == name

    model = linear()
    model[1].running_mean += 1
    assert weights_fingerprint(patcher(model)) != name

    model = linear()
    model.register_buffer("table", torch.ones(3), persistent=False)
    assert weights_fingerprint(patcher(model)) == name

    diff = torch.ones(8, 8)
    with_patch = [
        weights_fingerprint(patcher(linear(), {"0.weight": [(strength, ("diff", (tensor,)), 1.0, None, None)]}))
        for strength, tensor in ((1.0, diff), (0.5, diff), (1.0, diff * 2))
    ]
    assert len({name, *with_patch}) == 4


def test_a_patch_that_is_written_into_the_model_does_not_count_as_a_weight():
    model = linear()
    original = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1
    loaded = patcher(model, backup={"0.weight": Saved(original, False)})
    assert weights_fingerprint(loaded) == weights_fingerprint(patcher(linear()))


def test_a_bypass_lora_of_core_counts():
    import comfy.weight_adapter

    def with_bypass(strength, value):
        model = linear()
        weights = (torch.full((8, 2), value), torch.ones(2, 8), 2.0, None, None, None)
        manager = comfy.weight_adapter.BypassInjectionManager()
        manager.add_adapter("0.weight", comfy.weight_adapter.LoRAAdapter({"0.weight"}, weights), strength=strength)
        return weights_fingerprint(patcher(model, injections={"bypass_lora": manager.create_injections(model)}))

    names = [
        with_bypass(1.0, 1.0),
        with_bypass(0.5, 1.0),
        with_bypass(1.0, 2.0),
        weights_fingerprint(patcher(linear())),
    ]
    assert len(set(names)) == 4
    assert with_bypass(1.0, 1.0) == names[0]


def test_quantised_weights_count_with_their_scales():
    import comfy.quant_ops

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    quantised = comfy.quant_ops.QuantizedTensor.from_float(weight, "TensorCoreFP8E4M3Layout", scale=None)
    name = fingerprint(quantised)
    repeated = comfy.quant_ops.QuantizedTensor.from_float(weight, "TensorCoreFP8E4M3Layout", scale=None)
    assert fingerprint(repeated) == name
    repeated._params.scale.mul_(2)
    assert fingerprint(repeated) != name
    assert fingerprint(quantised.dequantize()) != name


def test_an_option_that_is_added_at_its_default_leaves_the_name_and_any_that_is_set_changes_it():
    @dataclass(frozen=True)
    class Inner:
        name: str
        size: int = 1

    @dataclass(frozen=True)
    class Before:
        rank: int = 16
        inner: Inner | None = None

    @dataclass(frozen=True)
    class After(Before):
        more: float = 0.5
        listed: tuple[Inner, ...] = field(default_factory=tuple)

    names = {fingerprint(changed_fields(After()))}
    assert names == {fingerprint(changed_fields(Before()))}
    for other in (
        After(rank=8),
        After(more=0.0),
        After(inner=Inner("a")),
        After(inner=Inner("b")),
        After(inner=Inner("a", 2)),
        After(listed=(Inner("a"),)),
        After(listed=(Inner("a", 2),)),
    ):
        names.add(fingerprint(changed_fields(other)))
    assert len(names) == 8
    assert changed_fields(After(inner=Inner("a"))) == {"inner": {"name": "a"}}


def test_a_run_is_named_by_what_is_set():
    """Each option set to another value makes another run; an option at its default is in no name."""
    base = run_settings()

    def key(settings):
        return settings.key(settings.lineage("data", "model"))

    names = {key(base), key(replace(base, validation=ValidationOptions()))}
    changes = {
        "network": {"rank": 8, "dropout": 0.1, "algorithm": "loha", "start_from": LoraSource("a", "b")},
        "optimizer": {"learning_rate": 1.0, "warmup_steps": 1, "optimizer": "lion"},
        "objective": {"shift": 3.0, "stratified": "batch"},
        "memory": {"blocks_to_swap": 3, "checkpointing": "selective", "low_bit_matmul": "int8"},
    }
    for part, values in changes.items():
        for name, value in values.items():
            names.add(key(replace(base, **{part: replace(getattr(base, part), **{name: value})})))
    for name, value in {"part": 0.2, "seed": 1, "data": training_data()}.items():
        names.add(key(replace(base, validation=replace(ValidationOptions(), **{name: value}))))
    assert len(names) == 2 + sum(map(len, changes.values())) + 3


def test_a_run_with_another_low_bit_matmul_learns_otherwise():
    """Other memory options change the key alone: a state of one serves the other."""
    settings = run_settings()

    def lineage(**memory):
        return replace(settings, memory=replace(settings.memory, **memory)).lineage("data", "model")

    assert len({lineage(low_bit_matmul=value) for value in LOW_BIT_MATMULS}) == len(LOW_BIT_MATMULS)
    assert lineage() == lineage(low_bit_matmul="off") == lineage(blocks_to_swap=3, checkpointing="selective")
