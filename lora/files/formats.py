"""LoRA files: the same update in the names and layouts that ComfyUI, kohya's scripts and diffusers read."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from ...common.files import write_atomically
from ...common.text import quoted
from ...common.untrusted.tensor_files import open_tensors
from ...models.name_table import NameTable
from .header import for_file
from .lora_model import CUT, PREFIX, LoraModel, low_rank, normalised
from .spellings import ALPHA, DORA, DOWN, UP, is_text_encoder

FORMATS = ("kohya", "comfyui", "diffusers")
Layout = Callable[[LoraModel, str, Mapping[str, Tensor]], dict[str, Tensor]]
"""(LoRA, flat name, the tensors of that module by suffix) → the tensors under a format's names."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def convert(lora: Mapping[str, Tensor], format: str = "kohya", dtype: str = "fp32") -> dict[str, Tensor]:
    """Convert a LoRA to the key names of a format, on the CPU, each tensor with its own storage.

    format: `kohya` (`lora_unet_*`, alpha kept), `comfyui` (`diffusion_model.<module>.lora_A/lora_B`) or `diffusers`
    (PEFT names, fused layers split by rows; for U-Nets the names of attention processors). The last two have
    alpha / rank multiplied into `lora_B` in float32, before the cast, and hold no alpha. dtype: `fp32`, `bf16` or
    `fp16`; alphas and DoRA's lengths are always float32.

    Raises ValueError if the format can't represent an update, or the dtype a value.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {quoted(format)}; choose one of {', '.join(FORMATS)}.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {quoted(dtype)}; choose one of {', '.join(DTYPES)}.")
    model = normalised(lora)
    table = model.table()
    layouts: dict[str, Layout] = {
        "kohya": partial(_kohya, table),
        "comfyui": _comfyui,
        "diffusers": partial(_diffusers, table),
    }
    layout = layouts[format]
    tensors: dict[str, Tensor] = {}
    for flat, parts in model.parts().items():
        halves = _cut(table, model, flat, parts, format)
        tensors.update(halves or layout(model, flat, parts))
    if format == "diffusers" and (part := next((key for key in model.verbatim if not is_text_encoder(key)), None)):
        raise ValueError(
            f"format diffusers carries plain LoRA pairs only, and {quoted(part)} is none; choose kohya or comfyui."
        )
    tensors |= {key: model[key] for key in model.verbatim}
    return {key: _cast(key, tensor, dtype) for key, tensor in tensors.items()}


@dataclass(frozen=True)
class LoraFile:
    """Contents of a LoRA file.

    tensors: by the key names of the format, in the dtype of the file.
    header: metadata, with the hash and the format-dependent names of this file.
    """

    tensors: dict[str, Tensor]
    header: dict[str, str]

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises OSError with one sentence if it can't be written."""
        write_atomically(path, lambda beside: save_file(self.tensors, beside, metadata=self.header))

    def size(self) -> int:
        """Return the bytes of the file."""
        return len(save(self.tensors, self.header))

    def equals(self, path: Path, ignored: Collection[str] = ()) -> bool:
        """Return whether a file has the same contents; False for one that can't be read.

        ignored: metadata keys whose values may differ.
        """
        try:
            with open_tensors(path) as file:
                header = file.metadata() or {}
                if header.keys() != self.header.keys() or set(file.keys()) != self.tensors.keys():
                    return False
                if any(header[key] != text for key, text in self.header.items() if key not in ignored):
                    return False
                return all(_is_same(file.get_tensor(key), tensor) for key, tensor in self.tensors.items())
        except (OSError, SafetensorError):
            return False


def lora_file(
    lora: Mapping[str, Tensor],
    format: str = "kohya",
    dtype: str = "fp32",
    metadata: Mapping[str, str] | None = None,
) -> LoraFile:
    """Make the contents of a LoRA's file.

    metadata: from `metadata_for`; None takes the LoRA's own. Raises ValueError as `convert` does.
    """
    tensors = convert(lora, format, dtype)
    facts = getattr(lora, "metadata", {}) if metadata is None else metadata
    return LoraFile(tensors, for_file(facts, tensors, format))


def save_lora(
    path: str | Path,
    lora: Mapping[str, Tensor],
    format: str = "kohya",
    dtype: str = "fp32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the LoRA as a safetensors file, see `lora_file` and `LoraFile.write`."""
    lora_file(lora, format, dtype, metadata).write(Path(path))


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _kohya(table: NameTable | None, model: LoraModel, flat: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    module = low_rank(parts)
    if table is not None and table.kohya_by_diffusers and (name := model.name(flat)):
        flat = table.flat(name)
    # diffusers' converter of kohya files drops the alphas of the last layer: with alpha = rank nothing is lost.
    if module and flat.startswith("final_layer_"):
        parts = {**parts, UP: module.scaled_up, ALPHA: torch.tensor(float(module.rank))}
    return {f"{PREFIX}{flat}.{suffix}": tensor for suffix, tensor in parts.items()}


def _comfyui(model: LoraModel, flat: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"diffusion_model.{_native(model, flat, 'comfyui')}"
    module = low_rank(parts)
    if module is None:
        return {f"{prefix}.{suffix}": tensor for suffix, tensor in parts.items()}
    extras = {f"{prefix}.{suffix}": tensor for suffix, tensor in parts.items() if suffix not in (DOWN, UP, ALPHA)}
    return {f"{prefix}.lora_A.weight": module.down, f"{prefix}.lora_B.weight": module.scaled_up, **extras}


def _diffusers(table: NameTable | None, model: LoraModel, flat: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    name = _native(model, flat, "diffusers")
    targets = table.diffusers(name) if table else ()
    module = low_rank(parts)
    if module is None or not set(parts) <= {DOWN, UP, ALPHA}:
        raise ValueError(
            f"format diffusers carries plain LoRA pairs only, and {name} has {', '.join(sorted(parts))}; "
            "choose kohya or comfyui."
        )
    if table is not None and table.by_rule and not table.to_diffusers:
        raise ValueError("format diffusers is not known for this model; choose kohya or comfyui.")
    if table is None or not targets:
        raise ValueError(f"format diffusers has no place for {name}; choose kohya or comfyui.")
    ups = module.scaled_up.split(table.diffusers_rows(name, module.up.shape[0], module.down.shape[1]))
    if name in table.halves_swapped:
        shift, scale = ups[0].chunk(2)
        ups = (torch.cat((scale, shift)),)
    return {
        key: tensor
        for target, up in zip(targets, ups, strict=True)
        for key, tensor in zip(table.diffusers_keys(target), (module.down, up), strict=True)
    }


def _cut(
    table: NameTable | None, model: LoraModel, flat: str, parts: Mapping[str, Tensor], format: str
) -> dict[str, Tensor]:
    """Split the rows of a fused module into the modules that other files of the model hold, which ComfyUI maps onto the
    fused one too. Empty for a module that all files hold whole, and for an update that can't be split by rows."""
    module, name = low_rank(parts), model.name(flat)
    targets = table.cut_modules(name) if table is not None and name else ()
    if not targets or module is None or format == "diffusers" or not set(parts) <= {DOWN, UP, ALPHA}:
        return {}
    assert table is not None and name is not None
    rows = table.diffusers_rows(name, module.up.shape[0], module.down.shape[1])
    tensors: dict[str, Tensor] = {}
    ups = (module.up if format == "kohya" else module.scaled_up).split(rows)
    for target, up in zip(targets, ups, strict=True):
        prefix = f"{CUT}{target}"
        if format == "kohya":
            by_suffix = {DOWN: module.down, UP: up, ALPHA: torch.tensor(module.alpha)}
            tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in by_suffix.items()}
        else:
            tensors |= {f"{prefix}.lora_A.weight": module.down, f"{prefix}.lora_B.weight": up}
    return tensors


def _native(model: LoraModel, flat: str, format: str) -> str:
    name = model.name(flat)
    if name is None:
        raise ValueError(
            f"format {format} needs the module's own name, which {quoted(flat)} does not tell; choose kohya."
        )
    return name


def _cast(key: str, tensor: Tensor, dtype: str) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.to("cpu", copy=True).contiguous()
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # torch compares no float8
    if not tensor.isfinite().all():
        raise ValueError(f"lora holds NaN or infinite values ({key}); go back to an earlier save of the training.")
    # 16 bits would round a length by more than training changes it.
    target = torch.float32 if key.endswith((f".{ALPHA}", f".{DORA}")) else DTYPES[dtype]
    cast = tensor.to("cpu", target, copy=True).contiguous()
    if not cast.isfinite().all():
        largest = float(tensor.abs().max())
        raise ValueError(
            f"dtype {dtype} can't hold {largest:.4g} ({key}), its largest value is "
            f"{torch.finfo(target).max:.5g}; choose bf16 or fp32."
        )
    return cast
