"""For the time of a training step, ComfyUI's modules run attention of ours and differentiable ropes, and then not."""

import importlib
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import comfy.ldm.flux.math
import comfy.ldm.modules.attention as core
import comfy.model_management
import comfy_kitchen
import pytest
import torch
from comfy.ldm.flux.math import rope
from tessera.models.layers.attention import attention_function, attention_notes
from tessera.models.native.forward.kernels import core_attention, training_kernels, watched_calls
from tessera.models.native.forward.ropes import ROPES
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

SDPA = attention_function("auto", torch.device("cpu"), torch.float32)
B = 2
H = 4
T = 5
S = 6
D = 8


def tensors(heads: int = H, kv_heads: int = H, flat: bool = False, kv: int = S) -> list[torch.Tensor]:
    """q, k, v with gradients."""
    torch.manual_seed(0)
    q = torch.randn(B, heads, T, D)
    k = torch.randn(B, kv_heads, kv, D)
    v = torch.randn(B, kv_heads, kv, D)
    inputs = [x.transpose(1, 2).flatten(2) if flat else x for x in (q, k, v)]
    return [x.contiguous().requires_grad_() for x in inputs]


def compared(inputs: list[torch.Tensor], *args, **kwargs) -> torch.Tensor:
    """Compare values and gradients with core's torch form."""
    actual, expected = core_attention(SDPA)(*inputs, *args, **kwargs), core.attention_pytorch(*inputs, *args, **kwargs)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected)
    towards = torch.randn_like(expected)
    for gradient, reference in zip(*(torch.autograd.grad(x, inputs, towards) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(gradient, reference)
    return actual


MASKS = {
    "none": None,
    "rows": (T, S),
    "samples": (B, T, S),
    "one sample": (1, T, S),
    "keys of samples": (B, 1, S),
    "heads": (B, H, T, S),
    "all heads": (B, 1, T, S),
    "keys": (B, 1, 1, S),
}


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("flat_out", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_results_are_those_of_core_s_torch_attention(flat, flat_out, mask, kind):
    shape = MASKS[mask]
    values = None if shape is None else torch.randn(shape) if kind.is_floating_point else torch.rand(shape) > 0.3
    if values is not None and kind == torch.bool:
        values[..., 0] = True
    compared(tensors(flat=flat), H, values, skip_reshape=not flat, skip_output_reshape=not flat_out)


@pytest.mark.parametrize("mask", [None, (B, 1, T, S)])
@pytest.mark.parametrize("kv_heads", [1, 2, H])
@pytest.mark.parametrize("flat", [True, False])
def test_keys_and_values_may_have_fewer_heads(flat, kv_heads, mask):
    mask = None if mask is None else torch.randn(mask)
    compared(tensors(kv_heads=kv_heads, flat=flat), H, mask, skip_reshape=not flat, enable_gqa=True)


def test_every_other_argument_that_core_s_modules_hand_over_is_taken():
    options = {"optimized_attention_override": None, "block": ("double", 1)}
    rest = {"attn_precision": torch.float32, "low_precision_attention": False, "transformer_options": options}
    inputs = tensors(flat=True)
    assert torch.equal(core_attention(SDPA)(*inputs, heads=H, **rest), core_attention(SDPA)(*inputs, heads=H))
    for mask in (None, torch.randn(T, S)):
        compared(tensors(), H, mask, skip_reshape=True, scale=0.3)
        compared(tensors(), H, mask, skip_reshape=True, scale=None)


def test_values_may_be_cut_into_heads_already():  # Stable Diffusion 3's are
    q, k, v = tensors(flat=True)
    compared([q, k, v.detach().unflatten(-1, (H, D)).requires_grad_()], H)


def test_a_batch_above_core_s_limit_runs_in_parts(monkeypatch):
    monkeypatch.setattr(core, "SDP_BATCH_LIMIT", 1)
    sizes = []

    def attention(q, k, v):
        sizes.append(len(q))
        return SDPA(q, k, v)

    inputs = tensors(flat=True)
    actual = core_attention(attention)(*inputs, H)
    assert sizes == [1] * B
    torch.testing.assert_close(actual, core_attention(SDPA)(*inputs, H))


def test_the_chosen_attention_runs():
    shapes = []

    def attention(q, k, v):
        shapes.append([tuple(x.shape) for x in (q, k, v)])
        return SDPA(q, k, v)

    with training_kernels(attention):
        comfy.ldm.flux.math.optimized_attention(*tensors(flat=True), H)
        core.optimized_attention(*tensors(kv_heads=2), H, skip_reshape=True, skip_output_reshape=True, enable_gqa=True)
        core.get_attention_function("pytorch")(*tensors(flat=True), H, transformer_options={})
        core.optimized_attention_for_device(torch.device("cpu"), small_input=True)(*tensors(flat=True), H)
    assert shapes == [[(B, T, H, D), (B, S, H, D), (B, S, H, D)]] * 4


def modules_with_kernels() -> list[ModuleType]:
    """Every module of ComfyUI's models that names attention or a rope, imported."""
    folder = Path(core.__file__).parents[1]
    pairs = []
    for file in sorted(folder.rglob("*.py")):
        if any(
            word in file.read_text(encoding="utf-8") for word in ("optimized_attention", "comfy_kitchen", "quant_ops")
        ):
            pairs.append(
                importlib.import_module("comfy.ldm." + ".".join(file.relative_to(folder).with_suffix("").parts))
            )
    return pairs


def kernels_of_core() -> dict[int, object]:
    """All attentions and ropes of ComfyUI, by id."""
    ropes = [getattr(comfy_kitchen, name) for name in ROPES]
    return {id(kernel): kernel for kernel in (*core_attentions().values(), *ropes)}


def core_attentions() -> dict[str, object]:
    return {name: value for name, value in vars(core).items() if name.startswith("attention")}


def functions(module: ModuleType) -> list[FunctionType]:
    """All functions that a module and its classes define."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    values = [value for holder in (module, *classes) for value in vars(holder).values()]
    return [value for value in values if isinstance(value, FunctionType)]


def test_modules_of_comfyui_hold_kernels_by_names_alone():
    """Not as default arguments or in closures, where none could take their place."""
    kernels = kernels_of_core()
    for module in modules_with_kernels():
        for function in functions(module):
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            assert not [value for value in (*cells, *defaults) if id(value) in kernels], function
        for owner in (value for value in vars(module).values() if isinstance(value, type)):
            assert not [name for name, value in vars(owner).items() if id(value) in kernels], owner


def test_comfyui_reaches_no_kernel_of_its_own_and_then_all_of_them_again():
    modules = [*modules_with_kernels(), comfy_kitchen]
    assert len(modules) > 40
    kernels = kernels_of_core()
    initial = [dict(vars(module)) for module in modules]
    registered = dict(core.REGISTERED_ATTENTION_FUNCTIONS)
    with training_kernels(SDPA):
        for module in modules:
            assert not [name for name, value in vars(module).items() if id(value) in kernels], module.__name__
        assert not {id(kernel) for kernel in core.REGISTERED_ATTENTION_FUNCTIONS.values()} & set(kernels)
        assert comfy.model_management.in_training
    assert [dict(vars(module)) for module in modules] == initial
    assert registered == core.REGISTERED_ATTENTION_FUNCTIONS
    assert comfy.model_management.in_training is False


class Stop(BaseException):
    """Like ComfyUI's interruption, no Exception."""


@pytest.mark.parametrize("stop", [Stop, ValueError])
def test_all_is_put_back_when_a_step_breaks_off(stop):
    initial = dict(vars(comfy.ldm.flux.math)), dict(vars(comfy_kitchen))
    with pytest.raises(stop), training_kernels(SDPA):
        raise stop
    assert (dict(vars(comfy.ldm.flux.math)), dict(vars(comfy_kitchen))) == initial
    assert comfy.model_management.in_training is False


def test_inside_itself_it_does_nothing():
    outer = comfy.ldm.flux.math.optimized_attention
    with training_kernels(SDPA):
        patched = comfy.ldm.flux.math.optimized_attention
        with training_kernels(SDPA):
            assert comfy.ldm.flux.math.optimized_attention is patched
        assert comfy.ldm.flux.math.optimized_attention is patched and comfy.model_management.in_training
    assert comfy.ldm.flux.math.optimized_attention is outer


def test_a_module_imported_meanwhile_gets_the_kernels_of_core(monkeypatch):
    name = "comfy.ldm.pixart.blocks"
    importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    with training_kernels(SDPA):
        late = importlib.import_module(name)
        assert late.optimized_attention is comfy.ldm.flux.math.optimized_attention
    assert late.optimized_attention is comfy.ldm.flux.math.optimized_attention is core.optimized_attention
    with training_kernels(SDPA):
        assert late.optimized_attention is core.optimized_attention
    assert late.optimized_attention is core.optimized_attention


@pytest.mark.parametrize("name", ["flash", "sage"])
def test_kernels_without_a_backward_are_never_reached(name, monkeypatch):
    """As where ComfyUI was started with --use-flash-attention or --use-sage-attention."""

    def fake(q, k, v, heads, *args, **kwargs):
        if torch.is_grad_enabled():
            raise AssertionError(f"{name} has no backward")
        return core.attention_pytorch(q, k, v, heads, *args, **kwargs)

    modules = modules_with_kernels()
    for module in modules:
        for attribute in ("optimized_attention", "optimized_attention_masked"):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, fake)
    monkeypatch.setitem(core.REGISTERED_ATTENTION_FUNCTIONS, name, fake)
    inputs = tensors()
    with pytest.raises(AssertionError, match="has no backward"):
        comfy.ldm.flux.math.attention(*inputs, None)
    with training_kernels(SDPA):
        actual = comfy.ldm.flux.math.attention(*inputs, None)
        assert not [module for module in modules if fake in vars(module).values()]
    assert core.optimized_attention is core.REGISTERED_ATTENTION_FUNCTIONS[name] is fake
    torch.testing.assert_close(actual, core.attention_pytorch(*inputs, H, skip_reshape=True))


def block(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A rope by both ways in which modules reach it, then attention, as in blocks of core."""
    q, k = comfy_kitchen.apply_rope(x, x, table)
    q = comfy.ldm.flux.math.comfy.quant_ops.ck.rms_rope1(q, table, q.new_ones(D))
    return comfy.ldm.flux.math.attention(q, k, x, table)


def test_a_graph_compiled_in_one_step_serves_the_next():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=False)
    (x, _, _), table = tensors(kv=T), rope(torch.arange(T)[None], D, 10)[:, None]
    gradients = []
    for _ in range(3):
        with training_kernels(SDPA):
            out = checkpoint(compiled, x, table, use_reentrant=False)
            gradients += torch.autograd.grad(out.square().sum(), x)
    assert counter.frame_count == 1
    with training_kernels(SDPA):
        (expected,) = torch.autograd.grad(block(x, table).square().sum(), x)
    for actual in gradients:
        torch.testing.assert_close(actual, expected)


def test_a_checkpoint_computes_again_with_the_same_kernels():
    calls = []

    def attention(q, k, v):
        calls.append(torch.is_grad_enabled())
        return SDPA(q, k, v)

    (x, _, _), table = tensors(kv=T), rope(torch.arange(T)[None], D, 10)[:, None]
    with training_kernels(attention):
        out = checkpoint(block, x, table, use_reentrant=False)
        assert len(calls) == 1
        out.square().sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("call", [lambda q, rope: rope(q, q, turned=True), lambda q, rope: rope([q], q)])
def test_a_rope_that_is_called_in_another_way_is_named_with_the_version_of_comfyui(call):
    with training_kernels(SDPA), pytest.raises(ValueError, match=r"apply_rope1 of ComfyUI [\d.]+ in a way that"):
        call(torch.randn(1, 2, 3, 4), comfy_kitchen.apply_rope1)


def test_more_arguments_of_attention_than_are_known_are_named_with_the_version_of_comfyui():
    with pytest.raises(ValueError, match=r"optimized_attention of ComfyUI [\d.]+ in a way that .* \(9 arguments\)"):
        core_attention(SDPA)(*tensors(), H, None, None, True, False, 0.5)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda attend, q: attend(query=q, key=q, value=q, heads=H), "its q is a NoneType"),
        (lambda attend, q: attend(q, q, q, num_heads=H), "without heads"),
        (lambda attend, q: attend(q, q, q, H, mask=(q, q)), "its mask is a tuple"),
    ],
)
def test_attention_called_by_other_names_or_types_is_named_with_the_version_of_comfyui(call, cause):
    with pytest.raises(ValueError, match=rf"^model calls optimized_attention of ComfyUI [\d.]+ in a way .*\({cause}\)"):
        call(core_attention(SDPA), tensors()[0])


def test_unknown_names_of_arguments_are_collected_and_known_ones_not():
    with watched_calls() as calls:
        core_attention(SDPA)(*tensors(), H, skip_reshape=True, transformer_options={}, preferred_attention=None)
        assert not calls.unread and not calls.preferred
        core_attention(SDPA)(*tensors(), H, skip_reshape=True, sinks=None)
    assert calls.unread == {"sinks"}


def test_calls_that_the_chosen_attention_does_not_take_are_recorded():
    with watched_calls() as calls:
        core_attention(SDPA)(*tensors(), H, skip_reshape=True, scale=0.3)  # torch's SDPA is the chosen one
        core_attention(lambda *qkv: SDPA(*qkv))(*tensors(flat=True), H)
        assert not calls.torch_only
        core_attention(lambda *qkv: SDPA(*qkv))(*tensors(), H, torch.ones(T, S), skip_reshape=True)
    assert calls.torch_only


def test_comfyui_s_own_attention_is_named_if_it_has_no_gradient(monkeypatch):
    def attention_sage(*_):
        pass

    assert not list(attention_notes("auto", torch.device("cpu"), torch.float32))
    monkeypatch.setattr(core, "optimized_attention", attention_sage)
    (note,) = attention_notes("auto", torch.device("cpu"), torch.float32)
    assert note.startswith("ComfyUI samples with attention_sage, which can't be used for training")
