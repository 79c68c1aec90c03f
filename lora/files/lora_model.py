"""LORA_MODEL: the type of a LoRA in the graph, from the trainer or from other nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...common.text import quoted
from ...common.untrusted.budgets import METADATA
from ...common.untrusted.json_text import parse_json
from ...models.catalogue.registry import native_name, table_of
from ...models.name_table import NameTable, flat_name, read_recorded, uncompiled
from .spellings import ALPHA, DORA, DOWN, UP, is_text_encoder, split_key, without_containers

PREFIX = "lora_unet_"
CUT = "transformer."
"""Prefix of the modules that files hold in place of a fused one."""
MODULES = "tessera_modules"
"""Metadata key for the module names of a model that no family has a table for."""
_AGAIN = "train or load it again"


@dataclass(frozen=True)
class LowRank:
    """One module's update: delta W = alpha / rank · up @ down.

    down: (rank, in).
    up: (out, rank).
    alpha: numerator of the scale alpha / rank.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scaled_up(self) -> Tensor:
        """`up` in float32 with alpha / rank multiplied in, so that delta W = scaled_up @ down."""
        return self.up.float() * (self.alpha / self.rank)


class LoraModel(dict[str, Tensor]):
    """A LoRA as ComfyUI's LORA_MODEL: contiguous tensors in kohya's keys, with the metadata for its file.

    Keys are `lora_unet_<module, dots as underscores>` with `.lora_down.weight` (rank, in), `.lora_up.weight`
    (out, rank) and `.alpha` (scalar). `names` maps flat names to module names, as far as known. `verbatim` are keys of
    other kinds, of text encoders and of parts of layers, that every format has as they are.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (),
        metadata: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
        verbatim: Iterable[str] = (),
    ):
        super().__init__(tensors)
        self.metadata: dict[str, str] = dict(metadata or {})
        self.names: dict[str, str] = dict(names or {})
        self.verbatim = frozenset(verbatim)

    @classmethod
    def from_modules(cls, modules: Mapping[str, LowRank], metadata: Mapping[str, str] | None = None) -> "LoraModel":
        """Build from updates by native name (`double_blocks.0.img_attn.qkv`); contiguous tensors are not copied."""
        parts = {n: {DOWN: m.down, UP: m.up, ALPHA: torch.tensor(float(m.alpha))} for n, m in modules.items()}
        return cls.from_tensors(parts, metadata)

    @classmethod
    def from_file(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> "LoraModel":
        """Build from a file of ours in kohya's keys; the parts of a fused module are joined."""
        model = cls(tensors, metadata)
        table = model._recorded()
        if table is None or not table.cut:
            return model
        for fused, by_module in model._take_cut(table).items():
            parts = [by_module[module] for module in table.cut_modules(fused)]
            whole = parts[0] | {UP: torch.cat([part[UP] for part in parts])}
            model.update((f"{PREFIX}{flat_name(fused)}.{suffix}", tensor) for suffix, tensor in whole.items())
        return model

    def _take_cut(self, table: NameTable) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Take out the tensors of the parts of fused modules: by fused module, part and key suffix."""
        tensors: dict[str, dict[str, dict[str, Tensor]]] = {}
        for key in [key for key in self if key.startswith(CUT)]:
            module, _, suffix = split_key(key.removeprefix(CUT))
            if (fused := table.cut_from(module)) is not None:
                tensors.setdefault(fused, {}).setdefault(module, {})[suffix] = self.pop(key)
        return tensors

    @classmethod
    def from_tensors(
        cls, modules: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str] | None = None
    ) -> "LoraModel":
        """Build from each module's tensors by key suffix, such as `lora_up.weight` or `hada_w1_a`."""
        tensors = {
            f"{PREFIX}{flat_name(name)}.{suffix}": tensor.detach().contiguous()
            for name, parts in modules.items()
            for suffix, tensor in parts.items()
        }
        return cls(tensors, metadata, {flat_name(name): name for name in modules})

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors by flat module name and then by suffix."""
        by_module: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.items():
            if key in self.verbatim:
                continue
            flat, _, suffix = key.removeprefix(PREFIX).partition(".")
            by_module.setdefault(flat, {})[suffix] = tensor
        return by_module

    def name(self, flat: str) -> str | None:
        """Return the native module name of a flat one, or None if it can't be determined."""
        if flat in self.names:
            return self.names[flat]
        recorded_table = self._recorded()
        return recorded_table.native(flat) if recorded_table else native_name(flat)

    def table(self) -> NameTable | None:
        """Return the name table of the LoRA's model; None if it can't be determined."""
        if recorded_table := self._recorded():
            return recorded_table
        modules = {flat: low_rank(parts) for flat, parts in self.parts().items()}
        shapes = {flat: (len(m.up), m.down.shape[1]) if m else None for flat, m in modules.items()}
        return table_of(shapes, _family(self.metadata))

    def _recorded(self) -> NameTable | None:
        text = self.metadata.get(MODULES)
        return _read_once(text) if text else None

    def modules(self) -> dict[str, LowRank]:
        """Return the low-rank updates by native module name; other updates and unknown names are left out."""
        updates = ((self.name(flat), low_rank(parts)) for flat, parts in self.parts().items())
        return {name: module for name, module in updates if name and module}


# Cached, since the table is looked up for each of hundreds of modules.
_read_once = lru_cache(maxsize=4)(read_recorded)


def _family(metadata: Mapping[str, str]) -> str:
    """Return the family that a LoRA of ours was trained on, by its metadata; empty if that names none."""
    try:
        settings = parse_json(metadata.get("tessera", ""), METADATA, "tessera")
    except ValueError:
        return ""
    return str(settings.get("family", "")) if isinstance(settings, dict) else ""


def low_rank(parts: Mapping[str, Tensor]) -> LowRank | None:
    """Return the low-rank update of one module's tensors (by suffix), or None for another kind of update."""
    if DOWN not in parts or UP not in parts or "lora_mid.weight" in parts or DORA in parts:
        return None
    down, up = parts[DOWN], parts[UP]
    return LowRank(down, up, float(parts[ALPHA]) if ALPHA in parts else float(down.shape[0]))


def normalised(lora: Mapping[str, Tensor]) -> LoraModel:
    """Convert any LORA_MODEL to a LoraModel: ours, a plain dict in kohya's keys, or `diffusion_model.<module>.…`
    (core's Train LoRA, lora_A / lora_B pairs). A missing alpha becomes the rank, as loaders assume.

    Raises ValueError for keys of another model part or layout, for half a pair, and for tensors that are not matrices.
    """
    if not isinstance(lora, Mapping) or not lora:
        raise ValueError("lora is empty; connect the LORA_MODEL of a training node.")
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = dict(lora.names) if isinstance(lora, LoraModel) else {}
    verbatim: set[str] = set(lora.verbatim) if isinstance(lora, LoraModel) else set()
    for key, tensor in lora.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"lora holds a {type(tensor).__name__} as {quoted(key)}; {_AGAIN}.")
        if key in verbatim or is_text_encoder(key):
            verbatim.add(key)
            tensors[key] = tensor.detach().contiguous()
            continue
        module, _, suffix = split_key(without_containers(uncompiled(key)))
        if module.startswith("diffusion_model."):
            native = without_containers(module.removeprefix("diffusion_model."))
            module = PREFIX + flat_name(native)
            names[flat_name(native)] = native
        elif not module.startswith(PREFIX):
            raise ValueError(
                f"lora holds {quoted(key)}, which isn't a diffusion model key in kohya's or ComfyUI's naming; connect "
                "the LORA_MODEL of a training node."
            )
        tensors[f"{module}.{suffix}"] = tensor.detach().contiguous()
    if len(verbatim) == len(tensors):
        raise ValueError(f"lora holds {quoted(next(iter(tensors)))} and no key of a diffusion model; {_AGAIN}.")
    result = LoraModel(tensors, getattr(lora, "metadata", None), names, verbatim)
    for flat, parts in result.parts().items():
        if (DOWN in parts) != (UP in parts):
            raise ValueError(f"lora holds only half of the pair for {flat}; {_AGAIN}.")
        if ALPHA in parts and parts[ALPHA].numel() != 1:
            raise ValueError(
                f"lora holds {parts[ALPHA].numel()} numbers as the alpha of {flat} instead of one; {_AGAIN}."
            )
        for suffix in (DOWN, UP):
            if suffix in parts and (parts[suffix].dim() < 2 or not parts[suffix].numel()):
                shape = tuple(parts[suffix].shape)
                raise ValueError(f"lora holds {suffix} of {flat} in the shape {shape}, which isn't a matrix; {_AGAIN}.")
        if DOWN in parts and ALPHA not in parts:
            result[f"{PREFIX}{flat}.{ALPHA}"] = torch.tensor(float(parts[DOWN].shape[0]))
    return result
