"""Frozen weights of a MODEL as plain tensors on the training device.

ComfyUI holds the host copy. A weight already on the right device is shared, otherwise it is copied once. Nothing is
ever written back.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher, get_key_weight
from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ...common.core import (
    held_models,
    intended_dtype,
    is_patched,
    loaded_models,
    patched_originals,
    quantised_data,
    quantised_layout,
    quantised_params,
)
from ...common.gguf_tensor import as_stored, block_type, is_gguf, plain_values
from ..host.flat_buffer import Layout
from ..host.flat_weights import (
    SMALL_PART,
    WeightRef,
    leave_flat,
    parts_of,
    plain_tensors,
    shared_flat,
    weight_refs,
    with_parts,
)
from ..low_bit.quantize import AS_STORED, WIDE, quantize_weight, quantized_zeros
from .formats.gguf_reader import (
    check_type,
    factors_of,
    format_beside,
    values_of,
    with_weight_patches,
)
from .formats.stored_format import format_of
from .frozen_linear import FrozenLinear


def share_outside_inference_mode(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd may save for backward.

    Weights loaded by a node were created under `torch.inference_mode`, and autograd refuses to save such tensors;
    detach, view and Parameter keep them inference tensors, a new tensor over the same storage is not one.
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def check_readable(weight: Tensor) -> None:
    """Raise ValueError for a weight of another node pack's tensor class, whose bytes can't be read; GGUF's can."""
    if is_gguf(weight):
        check_type(weight)
    elif not isinstance(weight, QuantizedTensor) and type(weight.data) is not Tensor:
        raise ValueError(
            f"model has weights of type {type(weight.data).__name__}, which training can't read; load it from a "
            "safetensors file with ComfyUI's own loader or with Load Diffusion Model (Block Swap)."
        )


class FrozenWeights:
    """Reads the weights of a diffusion model by name, with the MODEL's weight patches applied.

    The patcher has to be unloaded (its module weights are unpatched): on a loaded one a patch would be applied twice.
    Each read raises ValueError while ComfyUI still has it loaded.
    """

    def __init__(
        self,
        patcher: ModelPatcher,
        device: torch.device,
        compute_dtype: torch.dtype,
        on_host: frozenset[str] = frozenset(),
        quantize: str = AS_STORED,
        blocks: frozenset[str] = frozenset(),
        in_zeros: bool = False,
    ):
        """on_host: the blocks, such as double_blocks.3, whose weights stay on the host.

        quantize: format in which 16 and 32 bit weights of the Linears in `blocks` are read, one of QUANTIZE.
        in_zeros: read these as zeros, which take no host memory: for measuring without training.
        """
        self.patcher = patcher
        self._check_unpatched()
        self.device, self.compute_dtype = device, compute_dtype
        self.on_host = on_host
        self.blocks = blocks if quantize != AS_STORED else frozenset()
        self.quantize, self.in_zeros = quantize, in_zeros
        self.quantize_seconds = 0.0  # time spent reading weights in that format
        for name in on_host:
            # Training moves unpatched matrices out of the flat buffers of the MODEL's own block swap. Patched or cast
            # weights would stay there; patched and small ones are copied out first, as they would keep a buffer alive.
            prefix = f"diffusion_model.{name}"
            refs = weight_refs(prefix, patcher.model.get_submodule(prefix))
            _leave_shared_flat(refs, patcher.patches)
            _to_host(refs)

    def _check_unpatched(self, weight: Tensor | None = None) -> None:
        """Raise ValueError if the MODEL is loaded. weight: one of a GGUF file, which has `patches` while loaded."""
        if is_patched(self.patcher) or getattr(weight, "patches", None):
            raise ValueError("The MODEL is still in use elsewhere; free ComfyUI's memory and queue again.")

    def home(self, name: str) -> torch.device:
        """Return the device that holds the weight `name`: the host for swapped blocks."""
        return torch.device("cpu") if _is_inside(name, self.on_host) else self.device

    def bytes_as_stored(self, name: str) -> int | None:
        """Return the MODEL's bytes of the Linear `name` if it has 16 or 32 bits or is of a GGUF file.

        None for a weight that `quantize` leaves alone.
        """
        weight, _, _ = get_key_weight(self.patcher.model, f"diffusion_model.{name}.weight")
        if block_type(weight) is not None:
            return as_stored(weight).nbytes
        if is_gguf(weight):
            weight = plain_values(weight)
        if isinstance(weight, QuantizedTensor):
            return None
        owner = self.patcher.model.get_submodule(f"diffusion_model.{name}")
        dtype = intended_dtype(owner, "weight") or weight.dtype
        return weight.nbytes if weight.dtype in WIDE and dtype in WIDE else None

    def repoint(self, name: str, source: Tensor, target: Tensor) -> bool:
        """Point ComfyUI's module at its weight in `target`, so that the host holds it once.

        source: the tensor that the weight, or the stored part of a quantised one, was read as. Returns True if it is
        not the module's own memory but a patched or cast copy; the module's weight is then unchanged.
        """
        module, _, parameter = f"diffusion_model.{name}".rpartition(".")
        parameters = self.patcher.model.get_submodule(module)._parameters
        param = parameters.get(parameter)
        if param is None or not (isinstance(param, QuantizedTensor) or is_gguf(param) or type(param.data) is Tensor):
            return True
        parts = parts_of(param)
        if all(part.data_ptr() != source.data_ptr() for part in parts):
            return True
        new_parts = [target if part.data_ptr() == source.data_ptr() else part for part in parts]
        parameters[parameter] = with_parts(param, new_parts)
        return False

    def stored(self, name: str) -> Tensor | None:
        """Read the patched weight onto the device in the dtype that ComfyUI uses; a quantised one dequantised."""
        weight = self._stored(name, narrowed=False)
        if isinstance(weight, QuantizedTensor):
            with torch.inference_mode(False), torch.no_grad():
                weight = share_outside_inference_mode(weight.dequantize()).to(self.home(name))
        return weight

    def _stored(self, name: str, narrowed: bool = True) -> Tensor | None:
        """Read the patched weight onto the device in its stored dtype.

        narrowed: cast it to the compute dtype if it is stored in a wider one.
        """
        self._check_unpatched()
        key = f"diffusion_model.{name}"
        weight, _, _ = get_key_weight(self.patcher.model, key)
        if weight is None:
            return None
        module, _, parameter = key.rpartition(".")
        if is_gguf(weight):
            weight = self._values_of_gguf(key, weight)
        elif key in self.patcher.patches:
            # By core's method: another pack's patcher may only support writing the result into the model.
            weight = ModelPatcher.patch_weight_to_device(self.patcher, key, device_to=self.device, return_weight=True)
            weight = weight.to(self.home(name))
        if isinstance(weight, QuantizedTensor):
            return weight
        check_readable(weight)
        # Under dynamic VRAM a weight keeps the file's dtype and is cast at each use; otherwise the load cast it.
        owner = self.patcher.model.get_submodule(module)
        stored_dtype = intended_dtype(owner, parameter) or weight.dtype
        if narrowed:
            stored_dtype = _narrower(stored_dtype, self.compute_dtype)
        with torch.inference_mode(False):
            return share_outside_inference_mode(weight.data).to(device=self.home(name), dtype=stored_dtype)

    def tensor(self, name: str) -> Tensor | None:
        """Read a small weight (norm scale, bias) in the compute dtype, or None if the model has none."""
        weight = self._stored(name)
        return None if weight is None else weight.to(self.compute_dtype)

    def linear(self, name: str, without_quantize: bool = False) -> FrozenLinear:
        """Read the Linear `name` of the diffusion model, for example `double_blocks.0.img_attn.qkv`.

        without_quantize: read it as the MODEL stores it.

        May raise ComfyUI's interrupt, as reading a model takes a while.
        """
        comfy.model_management.throw_exception_if_processing_interrupted()
        module = self.patcher.model.get_submodule(f"diffusion_model.{name}")
        quantized = not without_quantize and _is_inside(name, self.blocks)
        frozen = (self._quantize_linear(name) if quantized else None) or self._linear(name, module)
        bias = self.tensor(f"{name}.bias") if getattr(module, "bias", None) is not None else None
        smoothed = getattr(module, "pre_quant_scale", None) is not None
        smoothing = self.tensor(f"{name}.pre_quant_scale") if smoothed else None
        return frozen._replace(bias=bias, pre_quant_scale=smoothing)

    def _quantize_linear(self, name: str) -> FrozenLinear | None:
        """Quantise the patched weight of a Linear; None if that is impossible, or it has 8 bits or fewer."""
        if self.bytes_as_stored(name) is None:
            return None
        home = self.home(name)
        if self.in_zeros:
            module: Any = self.patcher.model.get_submodule(f"diffusion_model.{name}")
            zeros = quantized_zeros((module.out_features, module.in_features), self.quantize, home)
            return self._quantised(zeros, home)
        started = time.perf_counter()
        weight = self._stored(f"{name}.weight", narrowed=False)
        assert weight is not None, name
        with torch.inference_mode(False), torch.no_grad():
            quantized = quantize_weight(weight, self.quantize, self.device, home)
        self.quantize_seconds += time.perf_counter() - started
        return None if quantized is None else self._quantised(quantized, home)

    def _linear(self, name: str, module: torch.nn.Module) -> FrozenLinear:
        """Read only the weight of a Linear."""
        parameter = module._parameters.get("weight")
        if parameter is not None and block_type(parameter) is not None:
            self._check_unpatched(parameter)
            patches = self.patcher.patches.get(f"diffusion_model.{name}.weight", ())
            if (stored := format_beside(parameter, patches, self.compute_dtype)) is not None:
                home = self.home(name)
                with torch.inference_mode(False), torch.no_grad():
                    factors = (f.to(home) for f in factors_of(patches, stored, self.device, self.compute_dtype))
                    data = share_outside_inference_mode(as_stored(parameter)).to(home)
                    return FrozenLinear(data, None, None, tuple(factors), stored.text())
        weight = self._stored(f"{name}.weight")
        assert weight is not None, name
        if isinstance(weight, QuantizedTensor):
            return self._quantised(weight, self.home(name))
        return FrozenLinear(weight, None, None)

    def _values_of_gguf(self, key: str, weight: Tensor) -> Tensor:
        """Read a weight of a GGUF file dequantised: blocks in the compute dtype, plain tensors in their own."""
        self._check_unpatched(weight)
        with torch.inference_mode(False), torch.no_grad():
            patches = self.patcher.patches.get(key)
            if patches is None:
                return values_of(weight, self.compute_dtype)
            values = values_of(weight, torch.float32)
            dtype = values.dtype if block_type(weight) is None else self.compute_dtype
            return with_weight_patches(values, patches, key, self.device).to(dtype)

    def _quantised(self, weight: QuantizedTensor, home: torch.device) -> FrozenLinear:
        """Read a quantised weight as stored, or dequantise it once if it cannot be used so."""
        with torch.inference_mode(False), torch.no_grad():
            weight = weight.to(home)
            if _is_fp8_with_one_scale(weight):
                scale = share_outside_inference_mode(quantised_params(weight).scale).to(home, torch.float32).reshape(())
                return FrozenLinear(share_outside_inference_mode(quantised_data(weight)), scale, None)
            stored = format_of(weight)
            if stored is None:
                full = share_outside_inference_mode(weight.dequantize()).to(self.compute_dtype)
                return FrozenLinear(full, None, None)
            params = quantised_params(weight)
            tensors = (quantised_data(weight), *(getattr(params, name) for name in stored.tensors))
            data, *parts = (share_outside_inference_mode(tensor) for tensor in tensors)
            return FrozenLinear(data, None, None, tuple(parts), stored.text())


def _is_inside(name: str, blocks: frozenset[str]) -> bool:
    """Return True if the name is inside one of the blocks."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in blocks for end in range(1, len(parts)))


def _narrower(stored: torch.dtype, compute: torch.dtype) -> torch.dtype:
    return compute if stored.itemsize > compute.itemsize else stored


def _is_fp8_with_one_scale(weight: QuantizedTensor) -> bool:
    return quantised_layout(weight).startswith("TensorCoreFP8") and quantised_params(weight).scale.numel() == 1


def dequantised_notes(model: torch.nn.Module, compute_dtype: torch.dtype) -> list[str]:
    """Return a sentence on the quantised weights held in the compute dtype while the model trains, if any."""
    formats, total_bytes = set(), 0
    for module in model.modules():
        for weight in module._parameters.values():
            if not isinstance(weight, QuantizedTensor) or _is_fp8_with_one_scale(weight) or format_of(weight):
                continue
            formats.add(quantised_layout(weight).removeprefix("TensorCore").removesuffix("Layout"))
            total_bytes += weight.numel() * compute_dtype.itemsize
    if not total_bytes:
        return []
    return [
        f"Weights stored as {', '.join(sorted(formats))} are converted to {str(compute_dtype)[6:]} while it trains "
        f"({total_bytes / 2**30:.2f} GiB); all others stay as they are."
    ]


def _leave_shared_flat(refs: Sequence[WeightRef], patched: Collection[str]) -> None:
    """Copy patched and small tensors out of the flat buffer that contains all of these, if there is one.

    Matrices stay in it. Small tensors leave, as each would keep the whole buffer alive.
    """
    layout = Layout.from_tensors(plain_tensors(refs))
    if not refs or shared_flat(refs, layout) is None:
        return
    weights = ((ref, tensor) for ref in refs if (tensor := ref.tensor()) is not None)
    small = layout.size // SMALL_PART
    leave_flat(weights, lambda ref, part: ref.key in patched or part.nbytes < small)


def _to_host(refs: Sequence[WeightRef]) -> None:
    """Move swapped blocks off a GPU on which ComfyUI keeps the MODEL permanently (--highvram, --gpu-only).

    The next load moves them back.
    """
    for ref in refs:
        tensor = ref.tensor()
        if tensor is not None and tensor.device.type != "cpu":
            ref.table[ref.attribute] = with_parts(tensor, [part.to("cpu") for part in parts_of(tensor)])


def unload(models: Sequence[ModelPatcher] | None = None) -> None:
    """Unload models and their clones, with their own weights in place of patched ones; all by default.

    Each is unloaded under the inference mode that its weights require, whichever the caller is in. Quantised weights
    that a loader created under inference mode can only be restored under it: outside, ComfyUI's unpatching fails at the
    first, leaving a LoRA in the others. Ordinary ones can't be restored under it.
    """
    loaded = [pair for pair in held_models() if models is None or any(pair[1].is_clone(model) for model in models)]
    for mode in (True, False):
        targets = [entry for entry, patcher in loaded if puts_back_under_inference(patcher) == mode]
        keep_loaded = [entry for entry in loaded_models() if all(entry is not target for target in targets)]
        with torch.inference_mode(mode):
            for device in {entry.device for entry in targets}:
                comfy.model_management.free_memory(1e30, device, keep_loaded)
    del loaded  # free models that only this list referenced
    if models is None:
        comfy.model_management.unload_all_models()  # also drops the entries of collected models
    comfy.model_management.soft_empty_cache()


def puts_back_under_inference(patcher: ModelPatcher) -> bool:
    """Return True if the model has to be unloaded under inference mode.

    Decided by the quantised weights that patched ones replace, or by all quantised weights if there are none.
    """
    for weights in (patched_originals(patcher), patcher.model.parameters()):
        if kinds := {weight.is_inference() for weight in weights if isinstance(weight, QuantizedTensor)}:
            return kinds == {True}
    return False
