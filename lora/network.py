"""The LoRA network: the adapters of the trained Linears, their master weights, and their file form."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..common.rng import generator
from ..models.adapters.base import Adapter, AdapterSpec, DropMask
from ..models.adapters.registry import make_adapter
from ..models.family import Block, ModelInputs, Transformer
from ..models.layers.lora_linear import LoraLayer
from .dropout import sample_masks
from .files.lora_model import LoraModel
from .flat_group import FlatGroup, FlatGroups
from .options import NetworkOptions
from .plan import adapter_specs

RESUME_OFF = "or set resume to 'off'."
OTHER_NETWORK = (
    f"resume: that state was trained with another algorithm, init, rank or targets; set them as they were, {RESUME_OFF}"
)


class LoraNetwork:
    """One adapter per target layer, by the layer's name, attached to a transformer.

    Initial weights are sampled from (seed, module name); the first step starts from the model as it is.
    """

    def __init__(
        self,
        options: NetworkOptions,
        targets: Sequence[str],
        linears: Mapping[str, LoraLayer],
        seed: int,
        blocks_run_once: bool = True,
    ):
        """blocks_run_once: false if a forward may run a block several times."""
        self.options, self.blocks_run_once = options, blocks_run_once
        self.adapters: dict[str, Adapter] = {}
        self.flat = FlatGroups()
        for name, spec in adapter_specs(options, targets).items():
            linear = linears[name]
            adapter = make_adapter(spec, linear.shape, linear.kernel)
            adapter.start(generator(seed, "lora", name), linear.read_on_device)
            self.adapters[name] = adapter.to(linear.weight.device)
        self.attach(linears)

    def casts_in(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return `dtype` if a forward in it can read stored casts of the master weights, else None.

        It can't if a block runs several times: autograd would sum the gradients of a cast in `dtype`, but sums those of
        the master weights in fp32.
        """
        read = self.blocks_run_once and all(adapter.reads_casts for adapter in self.adapters.values())
        return dtype if read and dtype != torch.float32 else None

    def flatten(self, groups: Sequence[Sequence[nn.Parameter]], dtype: torch.dtype) -> FlatGroups:
        """Move the master weights into one tensor for each group; the parameters become views of it.

        dtype: of the forward, for which casts are stored if it can read them.
        """
        self.flat = FlatGroups(FlatGroup(group, self.casts_in(dtype)) for group in groups)
        casts = self.flat.casts()
        for adapter in self.adapters.values():
            named_weights = adapter.named_parameters()
            adapter.casts.clear()
            adapter.casts.update({name: casts[id(weight)] for name, weight in named_weights if id(weight) in casts})
        return self.flat

    def attach(self, linears: Mapping[str, LoraLayer]) -> None:
        """Attach the adapters to these Linears."""
        for name, adapter in self.adapters.items():
            linears[name].attach(adapter)

    @property
    def pairs(self) -> dict[str, tuple[nn.Parameter, ...]]:
        """Return the master weights of each target in order; (down, up) for a plain LoRA."""
        return {name: tuple(adapter.parameters()) for name, adapter in self.adapters.items()}

    def parameters(self) -> list[nn.Parameter]:
        return [p for adapter in self.adapters.values() for p in adapter.parameters()]

    def buffer_bytes(self) -> int:
        """Return the bytes of the adapters' buffers, which are not trained."""
        return sum(b.numel() * b.element_size() for adapter in self.adapters.values() for b in adapter.buffers())

    def master_weights(self) -> dict[str, Tensor]:
        """Return the fp32 master weights by `<module>.<name in its adapter>`, such as `<module>.down`."""
        adapters = self.adapters.items()
        return {f"{n}.{key}": p.detach() for n, adapter in adapters for key, p in adapter.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of a state file: master weights, and buffers that could not be recomputed bit for bit."""
        return {f"{n}.{key}": t for n, adapter in self.adapters.items() for key, t in adapter.state_dict().items()}

    def specs(self) -> list[dict[str, Any]]:
        """Return the specs of the adapters as plain JSON, each with the layers that have it, for a state file."""
        layers: dict[AdapterSpec, list[str]] = {}
        for name, adapter in self.adapters.items():
            layers.setdefault(adapter.spec, []).append(name)
        return [{**asdict(spec), "layers": names} for spec, names in layers.items()]

    def load_master_weights(self, weights: dict[str, Tensor]) -> None:
        """Load the tensors of a `state_dict`. Raises ValueError if it is of another network."""
        state = self.state_dict()
        if state.keys() != weights.keys() or any(state[k].shape != weights[k].shape for k in state):
            raise ValueError(OTHER_NETWORK)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(weights[name])

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Disable the adapters within the context.

        The master weights are zeroed in place, so that compiled graphs see no difference; no backward may run through
        anything computed before or within.
        """
        weights = [p.detach() for p in self.parameters()]
        saved = [p.clone() for p in weights]
        try:
            torch._foreach_zero_(weights)
            self.flat.write_casts()
            yield
        finally:
            torch._foreach_copy_(weights, saved)
            self.flat.write_casts()

    def snapshot(self) -> LoraModel:
        """Copy the LoRA to the CPU, in kohya's names."""
        return LoraModel.from_tensors(
            {
                name: {suffix: t.detach().to("cpu", copy=True) for suffix, t in adapter.tensors().items()}
                for name, adapter in self.adapters.items()
            }
        )

    def sample_masks(
        self,
        block: Block,
        inputs: ModelInputs,
        seed: int,
        key: tuple[int | str, ...],
        dtype: torch.dtype,
        part: tuple[int, int] = (0, 1),
    ) -> dict[str, DropMask]:
        """Sample the dropout masks of one block, from the random key `key`; empty without dropout.

        part: as in `dropout.sample_masks`.
        """
        return sample_masks(self.options, block, inputs, seed, key, dtype, part)


def build_network(
    transformer: Transformer, targets: Sequence[str], options: NetworkOptions, seed: int, blocks_run_once: bool
) -> LoraNetwork:
    return LoraNetwork(options, targets, transformer.linears(), seed, blocks_run_once)
