"""Lower one of FLUX.1's training blocks through inductor for an H100, on a machine without one.

    python benchmarks/card/lower.py {single,double} BUDGET RANK [--out FOLDER]

The graphs are traced with fake CUDA tensors and lowered with an H100's properties; the kernels are not built. Prints
kernels, extern calls and bytes of forward and backward, and writes the generated code. One block a process: what is
patched in torch and Triton stays patched. Needs the Triton package.
"""

import argparse
import re
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comfyui import set_up_comfyui  # noqa: E402

BF16, CPU, CUDA = torch.bfloat16, torch.device("cpu"), torch.device("cuda:0")
TOKENS, TEXT, HIDDEN = 4096, 512, 3072
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


class Nothing:
    """Debug handler and driver calls that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: 0


class Driver(Nothing):
    """Triton's driver, as inductor asks it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CUDA


def stand_in(target: Any, **values: Any) -> None:
    """Replace attributes for good, those that this torch has."""
    for name, value in values.items():
        if hasattr(target, name):
            patch.object(target, name, value).start()


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pretend_h100() -> None:
    """Let inductor find an H100, and build no kernel."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.codegen.triton
    import torch._inductor.compile_fx
    import torch._inductor.scheduler
    import torch.utils._triton as utils
    import triton
    from torch._inductor import async_compile

    properties = {"get_device_properties": always(H100), "current_device": always(0)}
    stand_in(torch.cuda, get_device_capability=always((9, 0)), device_count=always(1), **properties)
    stand_in(torch.cuda, get_device_name=always(H100.name), synchronize=always(None))
    fixed = {name: staticmethod(value) for name, value in properties.items()}
    capable = dict.fromkeys(("is_available", "is_bf16_supported", "is_triton_capable"), staticmethod(always(True)))
    stand_in(interface.CudaInterface, get_compute_capability=staticmethod(always(90)), **fixed, **capable)
    stand_in(interface.CudaInterface, raise_if_triton_unavailable=staticmethod(always(None)))
    stand_in(interface.CudaInterface.Worker, **fixed)
    found = {"has_triton": True, "has_triton_package": True, "triton_hash_with_backend": "x"}
    stand_in(utils, has_triton_tma_device=always(False), **{name: always(value) for name, value in found.items()})
    for module in list(sys.modules.values()):  # those that took the functions by name
        if getattr(module, "__name__", "").startswith("torch._inductor"):
            for name, value in found.items():
                if callable(vars(module).get(name)):
                    setattr(module, name, always(value))
    stand_in(async_compile.AsyncCompile, triton=always(None), wait=always(None))
    try:
        triton.runtime.driver.driver.set_active(Driver())
    except AttributeError:
        triton.runtime.driver._active = Driver()


def configure(budget: float) -> None:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    inductor.fx_graph_cache, inductor.force_disable_caches, inductor.compile_threads = False, True, 1
    functorch.activation_memory_budget = budget
    functorch.is_non_builtin_to_include = hasattr(functorch, "is_non_builtin_to_include")


class Lowering:
    """Lowers graphs in place of a compiler, and reports each. label: of the files and lines; out: their folder."""

    def __init__(self, label: str, out: Path):
        self.label, self.out = label, out

    def compiler(self, name: str) -> Callable[..., Any]:
        def lower(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            fake = torch._guards.detect_fake_mode(inputs)
            self._move(graph)
            with fake:
                inputs = [_like(value, CUDA) for value in inputs]
            code, size = _generated(graph, inputs, fake, name == "backward")
            self._report(name, code, size)
            if name == "backward":
                raise SystemExit
            outputs = graph.graph.output_node().args[0]
            made = [_like(n.meta.get("val"), CPU) if isinstance(n, torch.fx.Node) else n for n in outputs]
            return lambda *_: made

        return lower

    @staticmethod
    def _move(graph: torch.fx.GraphModule) -> None:
        """Move to the pretended GPU what the graph makes or moves by itself."""
        for node in graph.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": CUDA}
            if node.target is torch.ops.prims.device_put.default:
                node.args = (node.args[0], CUDA)
        graph.recompile()

    def _report(self, name: str, code: str, size: int) -> None:
        body = code[code.index("def call(") :] if "def call(" in code else code
        kernels = re.findall(r"(triton_\w+)\.run\(", body)
        calls = re.findall(r"extern_kernels\.(\w+)\(|(torch\.ops\.[\w\.]+)\(|(aten\.[\w\.]+)\(", body)
        extern = Counter(next(filter(None, call)) for call in calls)
        kinds = Counter(re.match(r"triton_([a-z]+)", kernel)[1] for kernel in kernels)  # type: ignore[index]
        print(
            f"{self.label} {name}: {len(kernels)} Triton kernels {dict(kinds)}, {sum(extern.values())} extern calls "
            f"{dict(extern)}, {size / 1e9:.3f} GB by the scheduler, {body.count('empty_strided_cuda')} allocations",
            flush=True,
        )
        (self.out / f"code_{self.label.replace(' ', '_')}_{name}.py").write_text(code)


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _generated(graph: torch.fx.GraphModule, inputs: list[Any], fake: Any, backward: bool) -> tuple[str, int]:
    """The code that inductor writes, and the bytes that its kernels move."""
    from torch._inductor import metrics
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"], node.meta["tensor_meta"] = value, None
    FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
    with V.set_fake_mode(fake), V.set_debug_handler(Nothing()):
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=None, is_backward=backward, is_inference=False
        )  # fmt: skip
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            metrics.reset()
            written = lowering.codegen()
            code = written[0] if isinstance(written, tuple) else written
            scheduler = lowering.scheduler
            counted = hasattr(scheduler, "get_total_num_bytes")
            size = scheduler.get_total_num_bytes() if counted else lowering.count_bytes()[0]
    return getattr(code, "value", code), size


def block_of(kind: str, rank: int) -> torch.nn.Module:
    """A training block of FLUX.1 with a LoRA on all of its Linears, on the meta device."""
    from families import MODELS
    from train_step_work import CountedStep

    model = MODELS["full"]["flux"]
    step = CountedStep(model, "", model.picture)
    step._add_lora(rank, ("*",))
    blocks = step.transformer.double_blocks if kind == "double" else step.transformer.single_blocks
    return blocks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("single", "double"))
    parser.add_argument("budget", type=float, help="the part of what could be saved for backward that is, 0 to 1")
    parser.add_argument("rank", type=int)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()

    torch.cuda.is_available = always(False)
    set_up_comfyui("meta")
    block = block_of(args.kind, args.rank)
    pretend_h100()
    configure(args.budget)

    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._subclasses.fake_tensor import FakeTensorMode

    def activation(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=CPU, requires_grad=True)

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        state = {
            name: torch.empty(
                value.shape, dtype=value.dtype, device=CPU, requires_grad=isinstance(value, torch.nn.Parameter)
            )
            for name, value in (*block.named_parameters(), *block.named_buffers())
            if value is not None
        }
        modulation, length = activation(1, 1, HIDDEN), TOKENS + TEXT
        rope = torch.empty(1, 1, length, 64, 2, dtype=torch.float32, device=CPU)
        streams = ((1, TOKENS, HIDDEN), (1, TEXT, HIDDEN)) if args.kind == "double" else ((1, length, HIDDEN),)
        inputs = (*(activation(*shape) for shape in streams), modulation, rope)

    def run(*flat: torch.Tensor) -> Any:
        weights = dict(zip(state, flat[: len(state)], strict=True))
        return torch.func.functional_call(block, weights, (*flat[len(state) :], {}))

    def partition(graph: Any, joint_inputs: Any, **more: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, joint_inputs, compiler="inductor", **more)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]

    lowering = Lowering(f"{args.kind} budget {args.budget:g} rank {args.rank}", args.out)
    started = time.monotonic()
    with fake:
        compiled = aot_function(
            run,
            fw_compiler=lowering.compiler("forward"),
            bw_compiler=lowering.compiler("backward"),
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        try:
            with patch.object(torch.nn.functional, "scaled_dot_product_attention", flash):
                out = compiled(*state.values(), *inputs)
                sum(o.float().sum() for o in (out if isinstance(out, tuple | list) else (out,))).backward()
        except SystemExit:  # the backward is lowered, and there is nothing to run it on
            pass
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
