"""Weights of GGUF files, and a MODEL of such weights as a loader of that format makes it.

The loader is a stand-in for ComfyUI-GGUF's with the same attributes in the same places: tensors whose `shape` is that
of the values, layers that dequantise them at each use, and a patcher that attaches LoRAs to the tensors. Its numbers
are those of the package `gguf`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn

# Formats that the pack reads: offsets of the fp16 scales in a block.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
OTHERS = {"IQ3_S": (0,)}  # read by the package alone


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Bytes (rows, bytes of a row) of random codes, whose values have about a deviation of 1 / √columns."""
    values, size = gguf.GGML_QUANT_SIZES[kind_of(name)]
    assert columns % values == 0, (name, columns)
    source = np.random.default_rng(seed)
    blocks = source.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)

    def scaled(scales: np.ndarray) -> np.ndarray:
        for place, values in zip((SCALES | OTHERS)[name], scales, strict=True):
            blocks[:, place : place + 2] = values.astype(np.float16)[:, None].view(np.uint8)
        return gguf.quants.dequantize(blocks, kind_of(name))

    scales = source.standard_normal((len((SCALES | OTHERS)[name]), len(blocks)))
    scaled(scales / (scaled(scales).std() * columns**0.5))
    return torch.from_numpy(blocks.reshape(rows, -1))


def dequantised(stored: Tensor, name: str) -> Tensor:
    """The package's fp32 values (rows, columns) of such bytes."""
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), kind_of(name)).copy())


class StoredTensor(Tensor):
    """A tensor of a GGUF file: bytes in rows, and the shape of their values."""

    tensor_type: Any
    tensor_shape: torch.Size
    patches: list[Any]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.tensor_shape if "tensor_shape" in vars(self) else self.size()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        memory = super().to(*args, **kwargs)
        kind, patches = (vars(self).get(name) for name in ("tensor_type", "patches"))
        return stored_tensor(memory, kind, self.shape, list(patches or ()))

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def detach(self) -> Any:
        return self


def stored_tensor(memory: Tensor, kind: Any, shape: Any, patches: list[Any] | None = None) -> StoredTensor:
    stored = memory.as_subclass(StoredTensor)
    stored.tensor_type = kind
    stored.tensor_shape = torch.Size(shape)
    stored.patches = patches or []
    return stored


def in_blocks(weight: Any) -> bool:
    return getattr(weight, "tensor_type", None) not in (None, *map(kind_of, ("F32", "F16")))


def stored_state(
    tensors: Mapping[str, Tensor], name: str, plain: str, is_matrix: Callable[[str], bool]
) -> dict[str, Tensor]:
    """A state dict as the loader reads it from a file: the matrices in the format `name` if their width allows it,
    other ones `plain`, the rest in fp32."""
    values, _ = gguf.GGML_QUANT_SIZES[kind_of(name)]
    state = {}
    for seed, (key, tensor) in enumerate(tensors.items()):
        kind, stored = "F32", tensor
        if is_matrix(key) and tensor.shape[1] % values == 0:
            kind, stored = name, random_blocks(name, *tensor.shape, seed)
        elif tensor.dim() == 2 and key.endswith(".weight"):
            kind, stored = plain, tensor.half() if plain == "F16" else tensor.bfloat16().view(torch.uint8)
        state[key] = stored_tensor(stored, kind_of(kind), tensor.shape)
    return state


def values_of(stored: Any) -> Tensor:
    """The fp32 values of a tensor of such a state dict, by the package."""
    memory = stored.as_subclass(Tensor)
    if stored.tensor_type == kind_of("BF16"):
        return memory.view(torch.bfloat16).float().reshape(stored.shape)
    return dequantised(memory, stored.tensor_type.name).reshape(stored.shape) if in_blocks(stored) else memory.float()


def _layers() -> Any:
    """Classes of layers for `custom_operations`, made once ComfyUI is imported."""
    import comfy.lora
    import comfy.ops

    class Linear(comfy.ops.manual_cast.Linear):
        """Takes the state dict's tensors as they are, and dequantises them at each use."""

        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = self.bias = None

        def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
            for name in ("weight", "bias"):
                if (tensor := state.get(f"{prefix}{name}")) is not None:
                    setattr(self, name, nn.Parameter(tensor, requires_grad=False))

        def forward_comfy_cast_weights(self, input, *args, **kwargs):
            weight, bias = (None if t is None else self._widened(t, input) for t in (self.weight, self.bias))
            return nn.functional.linear(input, weight, bias)

        def _widened(self, tensor, input):
            weight = values_of(tensor)
            for patches, key in tensor.patches:
                weight = comfy.lora.calculate_weight(patches, weight, key)
            return weight.to(input)

    return type("Layers", (comfy.ops.manual_cast,), {"Linear": Linear})


def _patcher() -> Any:
    import comfy.utils
    from comfy.model_patcher import ModelPatcher

    class LayingPatcher(ModelPatcher):
        """Attaches the patches of a weight in blocks to its tensor, and removes them when the model is unloaded."""

        def patch_weight_to_device(self, key, device_to=None, inplace_update=False):
            weight = comfy.utils.get_attr(self.model, key)
            if not in_blocks(weight):
                return super().patch_weight_to_device(key, device_to, inplace_update)
            if key in self.patches:
                patched = weight.to(device_to)
                patched.patches = [(self.patches[key], key)]
                comfy.utils.set_attr_param(self.model, key, patched)

        def load(self, *args, force_patch_weights=False, **kwargs):
            super().load(*args, force_patch_weights=True, **kwargs)

        def unpatch_model(self, device_to=None, unpatch_weights=True):
            for weight in self.model.parameters():
                if unpatch_weights and in_blocks(weight):
                    weight.patches = []
            super().unpatch_model(device_to, unpatch_weights)

        def clone(self, *args, **kwargs):
            kind, self.__class__ = self.__class__, LayingPatcher
            copy = super().clone(*args, **kwargs)
            self.__class__, copy.__class__ = kind, LayingPatcher
            return copy

    return LayingPatcher


def model_of(state: dict[str, Tensor]) -> Any:
    """The MODEL that the loader makes of a state dict, under inference mode as a node runs."""
    import comfy.sd

    with torch.inference_mode():
        loaded = comfy.sd.load_diffusion_model_state_dict(dict(state), {"custom_operations": _layers()})
        return _patcher().clone(loaded)


def flux_state(name: str, plain: str = "F16", hidden: int = 128, depth: int = 2) -> dict[str, Tensor]:
    """The state dict of a FLUX.1 of `depth` double and single blocks each."""
    from ..data.encoders import CLIP_WIDTH, T5_WIDTH
    from ..models.flux import flux_shapes
    from ..models.weights import fill

    return stored_state(fill(flux_shapes(hidden, depth, depth, T5_WIDTH, CLIP_WIDTH, True), 0), name, plain, _in_block)


def _in_block(key: str) -> bool:
    return "_blocks." in key and key.endswith(".weight")


def native_model(row: Any, name: str, layers: Any = None) -> Any:
    """The MODEL of a row of `tiny.native` with its matrices in the format `name`. layers: a loader's own."""
    import comfy.supported_models
    from comfy.model_patcher import ModelPatcher

    from ..native.row import build

    whole = build(row).model.diffusion_model
    linears = {f"{key}.weight" for key, module in whole.named_modules() if isinstance(module, nn.Linear)}
    state = stored_state(whole.state_dict(), name, "F16", linears.__contains__)
    config = getattr(comfy.supported_models, row.model)({**row.unet})
    config.unet_config.update(row.unet)
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = layers or _layers()
    with torch.inference_mode():
        model = config.get_model({}, "", device=torch.device("cpu"))
        model.diffusion_model.load_state_dict(state, strict=False)
        return _patcher().clone(ModelPatcher(model, torch.device("cpu"), torch.device("cpu")))


def write_gguf(path: Path, state: Mapping[str, Tensor], architecture: str = "flux") -> Path:
    """Write the tensors of a state dict as a GGUF file."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, tensor in state.items():
        writer.add_tensor(key, tensor.as_subclass(Tensor).numpy(), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
