"""One layer with each adapter: its weight is the formula's and what ComfyUI's reader makes of the file, it starts as
the model, it keeps stored bytes only, and the rules that cut it are LyCORIS's."""

from dataclasses import replace
from types import SimpleNamespace

import comfy.lora
import pytest
import torch
from comfy.weight_adapter.base import factorization
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import base_spec
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.models.adapters.base import Adapter, DropMask, factorize
from tessera.models.adapters.registry import adapter_kind
from tessera.models.layers.lora_linear import LoraLinear, run_together
from tiny.compile.compiling import Graphs
from tiny.lora.adapters import ALGORITHMS, adapted_weight, fill, numbers
from tiny.memory.quantised import stored_layer
from tiny.models.flux import QUANTISED
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

OUT = 96
IN = 64
NAME = "double_blocks.0.img_attn.proj"
algorithms = pytest.mark.parametrize("options", [NetworkOptions(**o) for o in ALGORITHMS.values()], ids=ALGORITHMS)


def random(*shape, seed=0, std=1.0):
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_adapter(options, frozen):
    spec = base_spec(options)
    adapter = adapter_kind(spec)(spec, *frozen.shape)
    adapter.start(torch.Generator().manual_seed(1), lambda: frozen)
    return adapter


def frozen_layer(dtype=torch.float32, scale=None):
    return FrozenLinear(random(OUT, IN, std=0.2).to(dtype), scale, random(OUT, seed=1))


def weight_of(adapter, frozen):
    """W' (out, in), from what the layer makes of unit vectors."""
    bare = frozen._replace(bias=None)
    return adapter(torch.eye(IN)[None], bare, None)[0].T


def formula(options, frozen, adapter):
    with torch.no_grad():
        return adapted_weight(options, frozen.weight.double(), numbers(adapter))


@algorithms
def test_a_new_adapter_is_the_model_and_a_moved_one_its_formula(options):
    frozen = frozen_layer()
    adapter = make_adapter(options, frozen)
    torch.testing.assert_close(weight_of(adapter, frozen), frozen.weight, rtol=1e-6, atol=1e-7)
    fill(adapter, 3, 0.2)
    actual, expected = weight_of(adapter, frozen).double(), formula(options, frozen, adapter)
    change = (expected - frozen.weight).norm()
    assert change > 0.01 * frozen.weight.norm()
    assert (actual - expected).norm() < 1e-5 * change
    x = random(2, 5, IN)
    y = adapter(x, frozen, None).double()
    torch.testing.assert_close(y, x.double() @ expected.T + frozen.bias.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
@algorithms
def test_comfyui_reads_every_key_and_makes_the_same_weight(options, layout, caplog):
    frozen = frozen_layer()
    adapter = make_adapter(options, frozen)
    fill(adapter, 4, 0.2)
    file = convert(LoraModel.from_tensors({NAME: adapter.tensors()}), layout)
    prefix = {"kohya": "lora_unet_" + NAME.replace(".", "_"), "comfyui": f"diffusion_model.{NAME}"}[layout]
    patches = comfy.lora.load_lora(file, {prefix: "weight"})
    assert caplog.records == [] and list(patches) == ["weight"]
    patched = comfy.lora.calculate_weight([(1.0, patches["weight"], 1.0, None, None)], frozen.weight.clone(), "weight")
    expected = formula(options, frozen, adapter)
    assert (patched - expected).norm() < 1e-5 * (expected - frozen.weight).norm()


@algorithms
def test_gradients_of_an_adapter_are_those_of_the_formula(options):
    frozen = frozen_layer()
    adapter = make_adapter(options, frozen)
    fill(adapter, 5)
    x, g = random(2, 5, IN).requires_grad_(), random(2, 5, OUT, seed=7)
    adapter(x, frozen, None).backward(g)
    masters = numbers(adapter)
    x64 = x.detach().double().requires_grad_()
    (x64 @ adapted_weight(options, frozen.weight.double(), masters).T).backward(g.double())
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)
    for name, p in adapter.named_parameters():
        assert (p.grad - masters[name].grad).norm() < 1e-5 * masters[name].grad.norm(), name


@algorithms
@pytest.mark.parametrize("storage", QUANTISED)
def test_a_stored_weight_waits_for_backward_as_it_is_stored(storage, options):
    """No dequantised copy among what autograd keeps, and the same result as on the weight that it stands for."""
    frozen, core = stored_layer(storage, random(OUT, IN, std=0.2), random(OUT, seed=1))
    smoothing = 1.0 if frozen.pre_quant_scale is None else frozen.pre_quant_scale
    whole = FrozenLinear(core * smoothing, None, frozen.bias)
    adapter, other = make_adapter(options, frozen), make_adapter(options, whole)
    fill(adapter, 6)
    fill(other, 6)
    x = random(1, 2, IN).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = adapter(x, frozen, None)
    torch.testing.assert_close(y, other(x, whole, None), rtol=1e-5, atol=1e-5)
    stored = {part.data_ptr() for part in (frozen.weight, *frozen.parts)}
    assert frozen.weight.data_ptr() in {t.data_ptr() for t in saved}
    assert all(t.numel() < OUT * IN for t in saved if t.data_ptr() not in stored)


@algorithms
def test_an_adapter_is_traced_whole_and_two_of_one_structure_share_a_graph(options):
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(lambda adapter, *args: adapter(*args), backend="aot_eager", fullgraph=True, dynamic=False)
    frozen = frozen_layer()
    x = random(2, 5, IN)
    g = random(2, 5, OUT, seed=7)
    structures = set()
    for seed in (9, 10):
        eager, compiled = make_adapter(options, frozen), make_adapter(options, frozen)
        mask = DropMask(torch.tensor([1.0, 0.0]).reshape(2, 1, 1), None)
        for adapter, call in ((eager, Adapter.__call__), (compiled, run)):
            fill(adapter, seed)
            call(adapter, x, frozen, mask).backward(g)
        for (name, p), q in zip(eager.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
        structures.add(compiled.structure())
    assert len(structures) == 1 and graphs() == 1
    larger = make_adapter(replace(options, rank=2 * options.rank, constraint=2 * options.constraint), frozen)
    assert larger.structure() not in structures or options.rank == 64  # whole LoKr, whatever the rank


@pytest.mark.parametrize("features", [1, 7, 64, 127, 250, 360, 3072, 5120, 9216, 13824, 15360])
def test_a_layer_is_cut_as_lycoris_cuts_it(features):
    for factor in (-1, 2, 3, 4, 8, 12, 16, 1000):
        assert factorize(features, factor) == factorization(features, factor)


def test_dropped_parts_add_nothing():
    """A mask of zeros leaves the model as it is, whatever the algorithm; of ones, the adapter."""
    frozen, x = frozen_layer(), random(2, 5, IN)
    for options in ALGORITHMS.values():
        adapter = make_adapter(NetworkOptions(**options), frozen)
        fill(adapter, 8, 0.2)
        width = adapter.drop_width()
        for keep in (0.0, 1.0):
            module = torch.full((2, 1, 1), keep) if adapter.replaces_output else None
            y = adapter(x, frozen, DropMask(torch.full((2, 1, width), keep), module))
            expected = adapter(x, frozen, None) if keep else frozen.apply(x)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


class Reads(TorchDispatchMode):
    """Ops with the addresses of the tensors that they take."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        operands = {arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        self.ops.append((op.overloadpacket.__name__, operands))
        return op(*args, **(kwargs or {}))


class Writes(TorchDispatchMode):
    """Ops that give a new tensor of `size` numbers, in their order."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.ops = size, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() == self.size and not op.is_view and "view" not in str(op):
            self.ops.append(op.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", ["lora", "pissa", "dora", "loha", "lokr"])
def test_the_frozen_product_is_where_the_update_starts(name, masked):
    """Two products write the layer's output, and no sum of two does; masks of whole outputs cannot be in a product."""
    frozen = frozen_layer()
    adapter = make_adapter(NetworkOptions(**ALGORITHMS[name]), frozen)
    mask = DropMask(torch.ones(2, 1, adapter.drop_width()), torch.ones(2, 1, 1) if name == "dora" else None)
    with Writes(2 * 5 * OUT) as recorded:
        adapter(random(2, 5, IN), frozen, mask if masked else None)
    by_rows = masked and name in ("loha", "lokr")
    assert recorded.ops == (["addmm", "mm", "mul", "add"] if by_rows else ["addmm", "addmm"])


def test_a_lora_keeps_its_input_its_weights_and_the_rank_activations():
    frozen, saved = frozen_layer(), {}
    adapter = make_adapter(NetworkOptions(**ALGORITHMS["lora"]), frozen)
    x = random(2, 5, IN).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        adapter(x, frozen, None)
    rank = adapter.spec.rank
    hidden_bytes = 4 * 2 * 5 * rank
    assert (
        sum(saved.values()) == x.nbytes + frozen.weight.nbytes + adapter.up.nbytes + adapter.down.nbytes + hidden_bytes
    )


def test_a_compiled_backward_adds_gradients_of_the_input_as_matrices():
    """A view between a product and the sum keeps inductor from making them one."""
    torch._dynamo.reset()
    frozen, targets = frozen_layer(), []
    adapter = make_adapter(NetworkOptions(**ALGORITHMS["lora"]), frozen)

    def record(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.add.Tensor and node.meta["val"].numel() == 2 * 5 * IN:
                targets.append([arg.target for arg in node.args])
        return make_boxed_func(graph.forward)

    plain = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=record)
    run = torch.compile(adapter, backend=plain, fullgraph=True)
    run(random(2, 5, IN).requires_grad_(), frozen, None).sum().backward()
    assert targets == [[torch.ops.aten.mm.default] * 2]


def layers(kinds, dtype=torch.float32):
    """Linears with an adapter of each kind, or none."""
    linears = []
    for seed, kind in enumerate(kinds):
        frozen = FrozenLinear(random(OUT, IN, seed=seed, std=0.2).to(dtype), None, random(OUT, seed=9).to(dtype))
        layer = LoraLinear(SimpleNamespace(linear=lambda _, frozen=frozen: frozen), "")
        if kind is not None:
            layer.adapter = make_adapter(NetworkOptions(**ALGORITHMS[kind] | {"rank": 3 + seed}), frozen)
            fill(layer.adapter, seed)
        linears.append(layer.to(dtype))
    return linears


def gradients_of(run, x, linears):
    """Outputs of Linears over one input, and the gradients of all that is trained and of the input."""
    x = x.detach().requires_grad_()
    outs = run(x)
    masters = [p for layer in linears for p in layer.parameters()]
    scale = torch.arange(1, len(outs) + 1, dtype=x.dtype)
    return [
        *outs,
        *torch.autograd.grad(sum(s * out.square().sum() for s, out in zip(scale, outs, strict=True)), [x, *masters]),
    ]


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("masked", [(), (0, 2), (0, 1, 2)], ids=["", "two masked", "masked"])
@pytest.mark.parametrize(
    "kinds", [("lora", "lora", "pissa"), ("lora", None, "lora"), ("lora", "dora", "lora")], ids=str
)
def test_linears_of_one_input_are_each_what_they_are_alone(kinds, masked, backend):
    torch._dynamo.reset()
    x = random(2, 5, IN)
    linears = layers(kinds)
    exact = layers(kinds, torch.float64)
    masks = [None] * 3
    for index in masked:
        if linears[index].adapter is not None:
            width = linears[index].adapter.drop_width()
            keep_mask = (random(2, 5, width, seed=index) > 0).float()
            module = torch.tensor([1.0, 0.0]).reshape(2, 1, 1) if kinds[index] == "dora" else None
            masks[index] = DropMask(keep_mask, module)
    run = run_together if backend is None else torch.compile(run_together, backend=backend, fullgraph=True)
    actual = gradients_of(lambda x: run(linears, x, masks), x, linears)
    wide = [None if m is None else DropMask(*(None if t is None else t.double() for t in m)) for m in masks]
    alone = [lambda x, layer=layer, mask=mask: layer(x, mask) for layer, mask in zip(exact, wide, strict=True)]
    expected = gradients_of(lambda x: [call(x) for call in alone], x.double(), exact)
    for gradient, other in zip(actual, expected, strict=True):
        assert gradient.shape == other.shape and (gradient - other).norm() < 2e-6 * other.norm()


@pytest.mark.parametrize("kinds, reads", [(("lora",) * 3, (4, 1)), (("lora", "pissa", "lora"), (4, 1))], ids=str)
def test_loras_of_one_input_read_it_in_one_product(kinds, reads):
    """Beside the frozen products, which have one each. In backward for all downs too."""
    linears = layers(kinds)
    x = random(2, 5, IN).requires_grad_()

    def products():
        return sum(name in ("mm", "addmm") for name, operands in read.ops if x.data_ptr() in operands)

    with Reads() as read:
        outs = run_together(linears, x, [None] * 3)
    forward = products()
    with Reads() as read:
        sum(out.sum() for out in outs).backward()
    assert (forward, products()) == reads
