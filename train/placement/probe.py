"""Probe of a memory plan: run one block of each structure forward and backward, and measure its cost."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ...compile.region import run_block
from ...lora.network import LoraNetwork
from ...memory.activations.cost import COMPILED_SAVES, EagerBlockWork, block_work
from ...memory.activations.results import ResultBytes
from ...memory.low_bit.devices import RATES
from ...memory.low_bit.matmul import FP8, INT8
from ...memory.swap.block_cost import BlockCost, add_costs
from ...memory.swap.training import BlockSwap, frozen_modules
from ...models.adapters.base import make_casts
from ...models.family import Block, ModelInputs
from ..config.settings import TrainSettings


class Probe:
    """Block runner for measuring: runs the first block of each structure and input shapes and returns its outputs for
    the others. The cost of a structure is that of its largest inputs; for several kinds of calls of a block, their sum.

    costs: costs of the eager block, by structure.
    compiled: costs of the compiled block, estimated from the operations counted in the eager one.
    shapes: of the first input at which each structure was measured.
    outside: tensors saved outside the blocks, by address.
    """

    def __init__(self, network: LoraNetwork, inputs: ModelInputs, settings: TrainSettings, device: torch.device):
        self.network = network
        self.inputs = inputs
        self.settings = settings
        self.device = device
        self.costs: dict[str, BlockCost] = {}
        self.compiled: dict[str, BlockCost] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._largest: dict[str, dict[str, tuple[BlockCost, BlockCost]]] = {}  # by structure and kind of call
        self._outputs: dict[tuple[Any, ...], Any] = {}
        self.outside: dict[int, Tensor] = {}

    def run(self, block: Block, *args: Any) -> Any:
        structure, kind = block.structure(), getattr(args[-1], "method", "")  # some have several, see models/native
        # Blocks of one structure may see different tokens: those of the text, of the picture, or both.
        place = structure, kind, tuple(a.shape for a in args if isinstance(a, Tensor))
        if place not in self._outputs:
            self.outside |= {storage_of(a): a for a in args if isinstance(a, Tensor) and not a.requires_grad}
            cost, compiled, self._outputs[place] = self._measure(block, args)
            largest = self._largest.setdefault(structure, {})
            if kind not in largest or largest[kind][0].saved < cost.saved:
                largest[kind] = cost, compiled
                eager, together = zip(*largest.values(), strict=True)
                self.costs[structure], self.compiled[structure] = add_costs(eager), add_costs(together)
                self.shapes[structure] = tuple(args[0].shape)
        return self._outputs[place]

    def _measure(self, block: Block, args: tuple[Any, ...]) -> tuple[BlockCost, BlockCost, Any]:
        """Return the block's eager cost, its compiled cost and its outputs."""
        self._train_copies(block, args[0].dtype)
        swap = BlockSwap([block], self.device, 1, False, in_place=True)
        trained = any(linear.adapter is not None for linear in block.linears().values())
        # Even if nothing up to here is trained, another block of this structure may follow a trained one.
        alone = not trained and not any(isinstance(a, Tensor) and a.requires_grad for a in args)
        inputs = _leaf_inputs(args, alone)
        tensors = [a for a in inputs if isinstance(a, Tensor)]
        masks = self.network.sample_masks(block, self.inputs, self.settings.seed, ("measure",), args[0].dtype)

        exclude = _existing_storages(block, swap.ring.slots.tensors, [a for a in tensors if not a.requires_grad])
        saved: dict[int, Tensor] = {}

        def forward(run: Callable[..., Any] = run_block) -> Any:
            with count_saved(saved, exclude):
                return swap.run(run, block, *inputs, masks)

        flop = _flop_counter()
        back = _flop_counter()
        results = ResultBytes()

        def counted(*args: Any) -> Any:
            with flop, results:
                return run_block(*args)

        used_before = _used(self.device)
        outputs = forward(counted)
        saved_bytes = total_bytes(saved)
        saved.clear()
        with back:
            _backward(outputs)
        peak = _peak(self.device)
        # The second run is timed: the first one includes one-time costs such as kernel selection.
        timed_outputs, forward_seconds = _timed(self.device, forward)
        _, backward_seconds = _timed(self.device, lambda: _backward(timed_outputs))
        cost = BlockCost(
            "",
            weights=0,
            inputs=sum(a.numel() * a.element_size() for a in tensors if a.requires_grad),
            saved=saved_bytes,
            # Without a peak counter: gradients of all saved tensors, an upper bound.
            working=saved_bytes if peak is None else max(0, peak - used_before - saved_bytes),
            forward=forward_seconds,
            backward=backward_seconds,
            attention=results.attention,
        )
        work = block_work(_flop(flop), _flop(back), saved_bytes)
        eager = EagerBlockWork(replace(work.forward, bytes=results.other_bytes), work.backward)
        eager_cost = replace(cost, budgeted=results.products, work=eager)
        compiled_cost = replace(cost, saved=int(COMPILED_SAVES * saved_bytes), work=work)
        swap.release()
        for module in frozen_modules(block).values():
            module.take()
        return eager_cost, compiled_cost, _as_leaves(outputs)

    def _train_copies(self, block: Block, dtype: torch.dtype) -> None:
        """Put copies of the block's adapters on the device, with their casts."""
        for linear in block.linears().values():
            if linear.adapter is not None:
                adapter = copy.deepcopy(linear.adapter).to(self.device)
                linear.attach(adapter)
                if self.network.casts_in(dtype) is not None:
                    make_casts(adapter, dtype)


def _leaf_inputs(args: Sequence[Any], alone: bool) -> list[Any]:
    """Detach the tensors of a block's arguments. alone: all of them require a gradient, not only those that did."""
    return [
        a.detach().requires_grad_(a.requires_grad or (alone and a.is_floating_point())) if isinstance(a, Tensor) else a
        for a in args
    ]


def _as_leaves(outputs: Any) -> Any:
    """Detach a block's outputs; those of the next block require a gradient as in a run."""
    if isinstance(outputs, Tensor):
        return outputs.detach().requires_grad_()
    return tuple(output.detach().requires_grad_() if output.is_floating_point() else output for output in outputs)


def _existing_storages(block: Block, slots: Sequence[Tensor], shared_inputs: Sequence[Tensor]) -> set[int]:
    """Return the storages that exist in any case: weights in their slot, the LoRA, and inputs shared by all blocks."""
    adapters = [linear.adapter for linear in block.linears().values() if linear.adapter is not None]
    casts = [cast for adapter in adapters for cast in adapter.casts.values()]
    return {storage_of(tensor) for tensor in (*slots, *block.parameters(), *casts, *shared_inputs)}


def _flop_counter() -> FlopCounterMode:
    """Return torch's counter, with CPU attention, which it leaves out: two matmuls of B·H·T·S·D forward, and five
    backward. FLOP of int8 and fp8 matmuls count as the full-precision ones that take as long."""

    def forward(q: Any, k: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 4 * math.prod(q) * k[-2]

    def backward(grad: Any, q: Any, k: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 10 * math.prod(q) * k[-2]

    def low(x: Any, codes: Any, steps: Any, weight: Any, *rest: Any, **_: Any) -> float:
        return 2 * math.prod(x[:-1]) * math.prod(weight) / RATES[rest[3]]

    def low_back(rate: float) -> Callable[..., float]:
        return lambda grad, weight, *_, **__: 2 * math.prod(grad[:-1]) * math.prod(weight) / rate

    name = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {getattr(torch.ops.aten, name): forward, getattr(torch.ops.aten, f"{name}_backward"): backward}
    tessera_ops = torch.ops.tessera
    formulas |= {tessera_ops.low_bit_linear: low, tessera_ops.int8_matmul_back: low_back(RATES[INT8])}
    formulas |= {tessera_ops.fp8_matmul_back: low_back(RATES[FP8])}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _flop(counter: FlopCounterMode) -> dict[str, float]:
    """Return FLOP by name of the op."""
    return {str(op): float(flop) for op, flop in counter.get_flop_counts().get("Global", {}).items()}


def storage_of(tensor: Tensor) -> int:
    """Return the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def total_bytes(tensors: dict[int, Tensor]) -> int:
    """Add up the storages that `count_saved` recorded."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def count_saved(storages: dict[int, Tensor], exclude: set[int]) -> saved_tensors_hooks:
    """Record the storages that autograd saves for backward, without those in `exclude` and scalars.

    storages: receives the tensors by address. It holds them, as a freed address would be reused and not counted again.
    """

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() and storage_of(tensor) not in exclude:
            storages[storage_of(tensor)] = tensor
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def _backward(outputs: Any) -> None:
    tensors = [t for t in ([outputs] if isinstance(outputs, Tensor) else outputs) if t.requires_grad]
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float]:
    """Run `call` and return (its result, seconds), with the device synchronised before and after."""
    _synchronize(device)
    started = time.perf_counter()
    result = call()
    _synchronize(device)
    return result, time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _used(device: torch.device) -> int:
    """Return the bytes in use and reset the counter of `_peak`."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
