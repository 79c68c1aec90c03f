"""Count the launches of a step outside of its blocks: the layers before and after them, gradient clipping, the
optimizer, and separate casts of the LoRA."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from counted.lower import Kernel, Launches

# How torch built for CUDA 13 cuts the lists of tensors of one op into launches (ATen/native/cuda/MultiTensorApply.cuh);
# builds for an older CUDA take a seventh at once.
CHUNK, MOST_CHUNKS = 65536, 2240
MOST_TENSORS = (770, 448, 336, 252, 210)  # by the number of lists


def count_step(shapes: Sequence[tuple[str, tuple[int, int]]], rank: int, dtype: torch.dtype) -> list[Kernel]:
    """Count the launches of clip, AdamW and the rest of the learner, for a LoRA on Linears (name, (out, in)).

    The weights are fake CUDA tensors, so that torch takes its CUDA code paths.
    """
    network, learner = import_module("tessera.lora.network"), import_module("tessera.train.loop.learner")
    options, optimizer = import_module("tessera.lora.options"), import_module("tessera.train.optim.options")
    adapter = import_module("tessera.models.adapters.lora").LoraAdapter
    kernels: list[Kernel] = []
    # Made on CUDA, fake weights are neither drawn nor moved.
    unmoved = patch.multiple(adapter, start=lambda *_: None, to=lambda self, *_: self)
    with FakeTensorMode(), torch.device("cuda"), unmoved:
        weight = torch.empty(0, device="cuda")
        linears = {
            name: SimpleNamespace(shape=shape, weight=weight, kernel=None, read_on_device=None, attach=lambda _: None)
            for name, shape in shapes
        }
        lora = network.LoraNetwork(options.NetworkOptions(rank=rank), list(linears), linears, 0)
        lora_learner = learner.Learner(lora, optimizer.OptimizerOptions(), 2, dtype, "cuda")
        # A tree to compare with may do this in the network itself.
        flat = lora.flat if hasattr(lora.flat, "write_casts") else lora
        for _ in range(2):  # the first step makes the optimizer's state
            with ManyTensors() as step:
                flat.write_casts()
            for parameter in given_gradients(lora):
                parameter.grad = torch.empty_like(parameter)
            with step:
                flat.gather()
                lora_learner.clip()
                lora_learner.step()
                lora_learner.zero_grad()
            kernels = step.kernels
    return kernels


def given_gradients(lora: Any) -> list[torch.nn.Parameter]:
    """Return the tensors that get gradients in backward: the casts if the forward reads them, else the weights."""
    casts = [cast for adapter in lora.adapters.values() for cast in getattr(adapter, "casts", {}).values()]
    return casts or lora.parameters()


class ManyTensors(Launches):
    """Launches, with an op over lists of tensors counted as often as torch splits it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count_before = len(self.kernels)
        out = super().__torch_dispatch__(op, types, args, kwargs)
        if len(self.kernels) > count_before and not _on_gpu(args, out):
            self.kernels.pop()  # step counters, which are on the host
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
        if len(self.kernels) > count_before and ("_foreach" in str(op) or "_fused" in str(op)):
            launch = self.kernels.pop()
            launch_count = launches_of([t.numel() for t in lists[0]], len(lists))
            self.kernels += [replace(launch, bytes=launch.bytes // launch_count)] * launch_count
        return out


def _on_gpu(*values: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.device.type == "cuda" for t in tree_leaves(values))


def launches_of(sizes: Sequence[int], lists: int) -> int:
    """Launches of one op over lists of tensors of these sizes."""
    launches = tensors = chunks = 0
    for size in sizes:
        tensors += 1
        chunk_count = -(-size // CHUNK)
        for chunk in range(chunk_count):
            chunks += 1
            last = chunk == chunk_count - 1
            if chunks == MOST_CHUNKS or (last and tensors == MOST_TENSORS[lists - 1]):
                launches = launches + 1
                chunks = 0
                tensors = 0 if last else 1
    return launches + (chunks > 0)


def count_outside(step: Any, rank: int) -> list[Kernel]:
    """Count the eager launches before and after the blocks of a `CountedStep`, in forward and backward."""
    calls = step.calls(rank, ("*",), 1)
    outputs = {structure: block_calls[-1][0](*block_calls[-1][1], {}) for structure, block_calls in calls.items()}
    inputs: list[torch.Tensor] = []

    def run(block: Any, *args: Any) -> Any:
        if not inputs:
            inputs.extend(a for a in args if isinstance(a, torch.Tensor) and a.grad_fn is not None)
        return tree_map(lambda t: t.detach().requires_grad_(), outputs[block.structure()])

    with Launches() as launches:
        velocity = step.transformer.forward(run, step.inputs(1))
        torch.autograd.backward([velocity, *inputs], [torch.empty_like(t) for t in (velocity, *inputs)])
    return launches.kernels
