"""Lower a training block through inductor for a GPU, on a machine without one, and count the work of its kernels.

The graphs are traced with fake CUDA tensors and lowered with an H100's properties; no kernel is built. All use of
private API of torch and Triton is in this file. Patches are permanent, so a process that lowers does nothing else.
Needs the Triton package.
"""

import copy
import math
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counted.gpu_norm import norm_of
from counted.triton_work import SMS, work_by_kernel
from step.work import flash

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
NO_LAUNCH = ("empty", "_unsafe_view", "detach", "prim.")
ADDED = "tessera.add_product_"
OWN = "tessera."  # ops of the pack whose kernels are in Triton
THIN = 64  # a product with a side up to this is bound by bytes
L2_CACHE = 25 << 20  # each half of an H100's
# cuBLAS splits a long sum along rows of memory if the result has fewer tiles of this size than the card has SMs, and
# zeroes the result first. The page of one H100 has 738 memsets in a step; this rule gives 840.
TILE, LONG = 128, 1024
COPIES_ADDEND: bool = import_module("tessera.common.torch_version").copies_addend(torch.__version__)
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block=49152,
    L2_cache_size=50 << 20,
    gcnArchName="",
    max_threads_per_block=1024,
    clock_rate=1980000,
    memory_clock_rate=2619000,
    memory_bus_width=5120,
    is_integrated=0,
    is_multi_gpu_board=0,
    uuid="x",
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
)


@dataclass(frozen=True)
class Kernel:
    """One launch.

    kind: 'product', 'thin' (a product with a side of at most THIN), 'attention', 'attention_backward', 'triton',
        'copy' (of memory by the driver, and its zeroing) or 'other'.
    name: of the kernel, or of the op with its sizes.
    bytes: read and written, as inductor or the op says.
    flop: of products and attention.
    bytes_moved: bytes between the kernel and the card's memory; None if equal to `bytes`.
    cycles: of one SM, of a kernel that inductor writes (`triton_work.py`).
    """

    kind: str
    name: str
    bytes: int
    flop: int = 0
    bytes_moved: int | None = None
    cycles: int = 0


@dataclass(frozen=True)
class Lowered:
    """One graph. saved_bytes: saved by a forward for its backward, without weights; code: what inductor wrote."""

    kernels: tuple[Kernel, ...]
    saved_bytes: int
    code: str

    def launches(self, *kinds: str) -> int:
        return sum(kernel.kind in kinds for kernel in self.kernels)

    def bytes(self, *kinds: str) -> int:
        return sum(kernel.bytes for kernel in self.kernels if not kinds or kernel.kind in kinds)


class _Nothing:
    """Debug handler and driver calls that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: 0


class _Driver(_Nothing):
    """Triton's driver, as inductor asks it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def _stand_in(target: Any, **values: Any) -> None:
    """Replace attributes for good, those that this torch has."""
    for name, value in values.items():
        if hasattr(target, name):
            patch.object(target, name, value).start()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pretend_h100() -> None:
    """Let inductor find an H100, and build no kernel. Call it after ComfyUI is set up, which looks for a GPU too."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.codegen.triton
    import torch._inductor.compile_fx
    import torch._inductor.scheduler
    import torch.utils._triton as utils
    import triton
    from torch._inductor import async_compile
    from torch._inductor import config as inductor

    properties = {"get_device_properties": _always(H100), "current_device": _always(0)}
    _stand_in(torch.cuda, get_device_capability=_always((9, 0)), device_count=_always(1), **properties)
    _stand_in(torch.cuda, get_device_name=_always(H100.name), synchronize=_always(None), is_available=_always(False))
    fixed = {name: staticmethod(value) for name, value in properties.items()}
    capable = dict.fromkeys(("is_available", "is_bf16_supported", "is_triton_capable"), staticmethod(_always(True)))
    _stand_in(interface.CudaInterface, get_compute_capability=staticmethod(_always(90)), **fixed, **capable)
    _stand_in(interface.CudaInterface, raise_if_triton_unavailable=staticmethod(_always(None)))
    _stand_in(interface.CudaInterface.Worker, **fixed)
    answers = {"has_triton": True, "has_triton_package": True, "triton_hash_with_backend": "x"}
    _stand_in(utils, has_triton_tma_device=_always(False), **{name: _always(value) for name, value in answers.items()})
    for module in list(sys.modules.values()):  # those that took the functions by name
        if getattr(module, "__name__", "").startswith("torch._inductor"):
            for name, value in answers.items():
                if callable(vars(module).get(name)):
                    setattr(module, name, _always(value))
    _stand_in(async_compile.AsyncCompile, triton=_always(None), wait=_always(None))
    try:
        triton.runtime.driver.driver.set_active(_Driver())
    except AttributeError:
        triton.runtime.driver._active = _Driver()
    inductor.fx_graph_cache = False
    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    for name, value in import_module("tessera.compile.region").inductor_options("default", False).items():
        setattr(inductor, name, value)
    for module in (
        sys.modules["torch.optim.optimizer"],
        torch.utils._foreach_utils,
    ):  # fake tensors take the way of real ones
        module._foreach_supported_types.append(torch._subclasses.FakeTensor)


class _AllIsLowered(Exception):
    """There is nothing to run the graphs on."""


def _lowered(graph: torch.fx.GraphModule, name: str, frozen: int, measured: bool) -> Lowered:
    """Lower one graph in place of a compiler. frozen: how many of a forward's inputs are weights; measured: whether the
    work of Triton's kernels is."""
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    fake = torch._guards.detect_fake_mode(inputs)
    saved_bytes = _saved_bytes(graph, frozen) if name == "forward" else 0
    _move(graph)
    with fake:
        inputs = [_like(value, CUDA) for value in inputs]
    kernels, code = _generated(graph, inputs, fake, name)
    if measured:
        kernels = _measured(kernels, code)
    return Lowered(tuple(kernels), saved_bytes, code)


def _saved_bytes(graph: torch.fx.GraphModule, frozen: int) -> int:
    """Bytes that the outputs hold, weights apart. Views of one storage count once."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    weights = {_storage(node) for node in placeholders[:frozen]}
    sizes = {}
    for node in graph.graph.output_node().args[0]:
        if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            sizes[_storage(node)] = node.meta["val"].untyped_storage().nbytes()
    return sum(size for storage, size in sizes.items() if storage not in weights)


def _storage(node: torch.fx.Node) -> Any:
    return node.meta["val"].untyped_storage()._cdata


def _move(graph: torch.fx.GraphModule) -> None:
    """Move the tensors that the graph itself makes or moves to the pretended GPU."""
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": CUDA}
        if node.target is torch.ops.prims.device_put.default:
            node.args = (node.args[0], CUDA)
    graph.recompile()


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _generated(graph: torch.fx.GraphModule, inputs: list[Any], fake: Any, name: str) -> tuple[list[Kernel], str]:
    """The kernels of the graph, and the code that inductor writes."""
    from torch._inductor import metrics
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"], node.meta["tensor_meta"] = value, None
    FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
    inference = name == "inference"
    with V.set_fake_mode(fake), V.set_debug_handler(_Nothing()):
        _recursive_post_grad_passes(graph, is_inference=inference)
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=None, is_backward=name == "backward", is_inference=inference
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            metrics.reset()
            generated = lowering.codegen()
            code = generated[0] if isinstance(generated, tuple) else generated
            kernels = [kernel for node in lowering.scheduler.nodes for kernel in _kernels(node)]
    text = getattr(code, "value", code)
    assert "MixOrderReductionGrid" not in text, (
        "a kernel that loses gradients; see inductor_options in compile/region.py"
    )
    launched = len(LAUNCHED.findall(text))
    counted = sum(kernel.kind == "triton" and not kernel.name.startswith(OWN) for kernel in kernels)
    assert launched == counted, f"{launched} kernels are launched and {counted} were found"
    return kernels, text


LAUNCHED = re.compile(r"(triton_\w+)\.run\(")


def _measured(kernels: Sequence[Kernel], code: str) -> list[Kernel]:
    """The same kernels with the work of those that inductor wrote, which are in the order of their launches."""
    work, names = work_by_kernel(code), iter(LAUNCHED.findall(code))
    measured = []
    for kernel in kernels:
        if kernel.kind == "triton" and not kernel.name.startswith(OWN):
            name = next(names)
            kernel = replace(kernel, bytes_moved=work[name].bytes_moved, cycles=work[name].cycles)
        measured.append(kernel)
    return measured


def _kernels(node: Any) -> list[Kernel]:
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    size = int(node.get_read_write_buffers_sizes())
    if isinstance(node, NopKernelSchedulerNode):
        return []
    if not isinstance(node, ExternKernelSchedulerNode):
        return [Kernel("triton", _ops_of(node), size)]
    if isinstance(node.node, ir.MultiOutput):
        return []
    origin = _origin(node.node)
    if origin is None:
        return [Kernel("other", str(node.node.get_name()), size)]
    options = {name: _value(value) for name, value in origin.kwargs.items()}
    args = [_value(a) for a in origin.args]
    if _short(origin.target) == ADDED:
        return _added_product(*args, **options, size=size)
    return _op_kernels(origin.target, args, options, origin.meta["val"], size)


def _op_kernels(op: Any, args: Sequence[Any], options: dict[str, Any], out: Any, size: int) -> list[Kernel]:
    """The kernels that an op of torch launches. size: bytes read and written."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(op.overloadpacket) or flop_registry.get(op)
    flop = int(formula(*args, **options, out_val=out)) if formula else 0
    if "attention" in str(op):
        kind = "attention_backward" if "backward" in str(op) else "attention"
        beside = _beside_attention(args[1]) if kind == "attention_backward" else []
        return [Kernel(kind, f"{_short(op)} {tuple(args[0].shape)}", size, flop), *beside]
    if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
        a, b = args[-2:]
        sides = a.shape[-2], a.shape[-1], b.shape[-1]
        product = Kernel("thin" if min(sides) <= THIN else "product", f"{_short(op)} {sides}", size, flop)
        return [*_before_product(args, sides), product]
    if str(op).startswith(OWN) and not flop:
        return _pack_kernels(op, args, out)
    return [Kernel("other", _short(op), size, flop)]


def _added_product(y: Any, left: Any, right: Any, size: int) -> list[Kernel]:
    """Return the launch of a product that is added to y in place."""
    sides = (*left.shape, right.shape[-1])
    return [Kernel("thin" if min(sides) <= THIN else "product", f"{ADDED} {sides}", size, 2 * math.prod(sides))]


def _pack_kernels(op: Any, args: Sequence[Any], out: Any) -> list[Kernel]:
    """Return the launches of an op of the pack: one for each part, which reads and writes every tensor once."""
    byte_count = sum(t.numel() * t.element_size() for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor))
    parts = next(len(value) for value in args if isinstance(value, list | tuple))
    return [Kernel("triton", _short(op), byte_count // parts)] * parts


def _before_product(args: Sequence[Any], sides: tuple[int, int, int]) -> list[Kernel]:
    """List the driver's work before a product: cuBLAS adds in place, so a torch before 2.14 copies the addend
    (`addmm_out_cuda_impl` in ATen/native/cuda/Blas.cpp) unless it is a bias; and a split product's result is zeroed."""
    copies = []
    if COPIES_ADDEND and len(args) == 3 and args[0].dim() == 2 and 0 not in args[0].stride():
        size = args[0].numel() * args[0].element_size()
        # The tensor written last is still in the cache if it fits.
        copies.append(
            Kernel("copy", "of what is added to a product", 0, bytes_moved=size * (1 if size <= L2_CACHE else 2))
        )
    tiles = -(-sides[0] // TILE) * -(-sides[2] // TILE)
    if tiles < SMS and sides[1] >= LONG and args[-2].stride(-1) == 1:
        copies.append(Kernel("copy", "memset", 0, bytes_moved=0))
    return copies


def _beside_attention(q: Any) -> list[Kernel]:
    """Return the other launches of cuDNN's backward: the sums of the gradient times the output with the zeroed gradient
    of q in fp32, and that gradient in 16 bits."""
    count = q.numel()
    return [Kernel("other", "sums before attention's backward", 0, bytes_moved=8 * count),
            Kernel("other", "attention's gradient in 16 bits", 0, bytes_moved=6 * count)]  # fmt: skip


class Launches(TorchDispatchMode):
    """Count the launches of eager torch: every op that is no view. kernels: the launches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view and not any(part in str(op) for part in NO_LAUNCH):
            marks = zip(op._schema.arguments, args, strict=False)
            changed = [a for mark, a in marks if mark.alias_info is not None and mark.alias_info.is_write]
            results = [] if changed else out
            leaves = tree_leaves((args, kwargs, changed, results))
            size = sum(_bytes_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.kernels += _op_kernels(op, args, kwargs or {}, out, size)
        return out


def _bytes_of(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _origin(extern: Any) -> torch.fx.Node | None:
    """The call of the graph that an extern kernel makes."""
    origin = extern.get_origin_node()
    if origin is None and (op := getattr(extern, "op_overload", None)) is not None:
        origin = next((node for node in extern.origins if node.target is op), None)
    return origin if origin is not None and isinstance(origin.target, torch._ops.OpOverload) else None


def _short(op: Any) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def _value(value: Any) -> Any:
    return torch.fx.map_arg(value, lambda node: node.meta["val"])


def _ops_of(node: Any) -> str:
    """The aten ops that a Triton kernel runs, in the order of their names."""
    origins = {origin for inner in node.get_nodes() for origin in inner.node.origins}
    return " ".join(sorted({_short(origin.target) for origin in origins}))


def lower(
    block: torch.nn.Module,
    args: Sequence[Any],
    budgets: Mapping[str, float | None],
    names: Sequence[str] = ("forward", "backward"),
    measured: bool = False,
) -> dict[str, dict[str, Lowered]]:
    """Lower the block's forward and backward in several ways of keeping: way → forward and backward.

    args: the block's arguments on the meta device; those that require a gradient get one.
    budgets: of each way the part of what could be kept for backward that is, as selective checkpointing sets it; None
        for torch's own choice.
    names: of the graphs that are wanted.
    measured: whether to measure the work of Triton's kernels, about a second for each.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._subclasses.fake_tensor import FakeTensorMode

    checkpointing = import_module("tessera.memory.activations.checkpointing")
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
        return like.requires_grad_(value.requires_grad)

    weights = {name: value for name, value in (*block.named_parameters(), *block.named_buffers()) if value is not None}
    # Tensors of an adapter in addition to its parameters.
    casts = {
        f"{name}.casts.{cast_name}": (module, cast_name, value)
        for name, module in block.named_modules()
        for cast_name, value in getattr(module, "casts", {}).items()
    }
    weights |= {name: value for name, (_, _, value) in casts.items()}
    with fake:
        state = {name: faked(value) for name, value in weights.items()}
        inputs = [faked(value) for value in args]
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    lowered: dict[str, dict[str, Lowered]] = {}

    def run(*flat: torch.Tensor) -> Any:
        tensors_by_name = dict(zip(state, flat[: len(state)], strict=True))
        rest = iter(flat[len(state) :])
        args = [next(rest) if isinstance(value, torch.Tensor) else value for value in inputs]
        for name, (module, cast_name, _) in casts.items():
            module.casts = {**module.casts, cast_name: tensors_by_name.pop(name)}
        return torch.func.functional_call(block, tensors_by_name, (*args, {}))

    def partition(graph: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        """Traced once, the joint graph is parted and lowered in each way."""
        options["static_lifetime_input_indices"] = list(range(len(state)))  # as dynamo passes it for a module's tensors
        for way, budget in budgets.items():
            joint = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
            settings = {} if budget is None else checkpointing.partitioner_settings(budget)
            if mark := settings.pop("joint_custom_pass", None):
                joint = mark(joint, joint_inputs)
            with config.patch(settings):
                joint_graph_passes(joint)
                parts = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **options)
            lowered[way] = {
                name: _lowered(part, name, len(state), measured)
                for name, part in zip(("forward", "backward"), parts, strict=True)
                if name in names
            }
        raise _AllIsLowered

    def never(*_: Any) -> Any:
        raise AssertionError("the partition lowers")

    compiled = aot_function(
        run,
        never,
        never,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    functional, decomposed = torch.nn.functional, torch._decomp.decompositions
    # As dynamo traces them on a GPU, whose own op of the norm inductor takes apart.
    norm = norm_of(decomposed._fused_rms_norm, decomposed._fused_rms_norm_backward)
    compiling = patch.object(torch.compiler, "is_compiling", _always(True))
    attending = patch.object(functional, "scaled_dot_product_attention", _flash)
    devices = patch.object(
        import_module("tessera.models.layers.norm_rope"), "DEVICES", ("cpu",)
    )  # moved to a GPU later
    with fake, compiling, attending, devices, patch.object(functional, "rms_norm", norm), suppress(_AllIsLowered):
        compiled(*state.values(), *tensors)
    for module, cast_name, value in casts.values():
        module.casts = {**module.casts, cast_name: value}
    return lowered


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return flash(q, k, v)
