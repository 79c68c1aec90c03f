"""diffusers' own converter of kohya's format for FLUX.1 and Chroma, which knows matrices of the real size only."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin
from family_cases.flux import rows_by_table
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel
from tessera.models.catalogue.registry import FAMILIES
from tiny.lora.lora_files import (
    RANK,
    random_update,
)


@pytest.mark.parametrize(("title", "parts"), [("FLUX.1", 14 + 6 + 10), ("Chroma", 12 + 5 + 3)])
def test_diffusers_own_converter_reads_the_kohya_format(title, parts, tmp_path: Path):
    """It has FLUX.1's hidden size written into it, so the update has full-size matrices for one block of each kind, and
    for every other layer that a LoRA trains."""
    (family,) = [family for family in FAMILIES if family.title == title]
    width = 3072
    shapes = {"linear1": (7 * width, width), "linear2": (width, 5 * width), "qkv": (3 * width, width)}
    names = [name.format(0) for name in family.names.to_diffusers]
    names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in family.never_trained)]
    modules = {
        name: random_update(*shapes.get(name.rpartition(".")[2], (2 * width, width)), index)
        for index, name in enumerate(names)
    }
    assert family.names.left_out("diffusers", "kohya", names) == []
    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), "kohya", "fp32")
    state = FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    config = {"depth": 1, "depth_single_blocks": 1, "hidden_size": width}
    native = {}
    for name, part in modules.items():
        probe = torch.randn(part.down.shape[1], 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        native[name] = part.alpha / RANK * (part.up.double() @ (part.down.double() @ probe))
    rows = rows_by_table(config, {f"{name}.weight": tensor for name, tensor in native.items()})
    count = 0
    for key in [key for key in state if key.endswith("lora_A.weight")]:
        name = key.removesuffix(".lora_A.weight")
        down, up = state[key].double(), state[f"{name}.lora_B.weight"].double()
        probe = torch.randn(down.shape[1], 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        expected = rows[f"{name.removeprefix('transformer.')}.weight"]
        assert (up @ (down @ probe) - expected).norm() <= 1e-5 * expected.norm(), name
        count += 1
    assert count == parts and len(state) == 2 * count
