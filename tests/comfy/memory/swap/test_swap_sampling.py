"""Sampling with blocks that stream from the host: the same pictures, with LoRAs and compiled, and no graph more."""

from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import pytest
import tiny
import torch
from tessera.compile import region as region_module
from tessera.compile.attach import compile_model
from tessera.compile.settings import CompileSettings
from tessera.memory.swap.patcher import swap_model
from tessera.models.blocks import find_blocks
from tiny.compile.compiling import Graphs
from tiny.models.sampling import sample

FAMILIES = ["flux", "flux2", "wan", "qwen_image", "sdxl"]


def random_lora(model: Any) -> dict[str, torch.Tensor]:
    """A LoRA on every Linear inside the blocks."""
    generator = torch.Generator().manual_seed(1)
    lora = {}
    for name, module in model.model.diffusion_model.named_modules():
        if "blocks" in name and hasattr(module, "in_features") and module.weight.ndim == 2:
            rows, columns = module.weight.shape
            lora[f"diffusion_model.{name}.lora_down.weight"] = 0.1 * torch.randn(4, columns, generator=generator)
            lora[f"diffusion_model.{name}.lora_up.weight"] = 0.1 * torch.randn(rows, 4, generator=generator)
    return lora


def all_blocks(model: Any) -> dict[str, Any]:
    return {f"diffusion_model.{block.name}": block.module for block in find_blocks(model.model.diffusion_model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_the_same_with_all_blocks_swapped(family: str, tiny_files: dict[str, Path]) -> None:
    graphs = Graphs()
    model = tiny.load_model(family, tiny_files[family])
    lora = random_lora(model)
    plain = sample(model, family)
    with_lora = sample(comfy.sd.load_lora_for_models(model, None, lora, 0.7, 0.0)[0], family)
    comfy.model_management.unload_all_models()
    masters = {key: tensor.clone() for key, tensor in model.model.state_dict().items()}

    swapped = swap_model(model, all_blocks(model), prefetch=1, pinned=False)
    assert torch.equal(sample(swapped, family), plain)
    lora_on_top, _ = comfy.sd.load_lora_for_models(swapped, None, lora, 0.7, 0.0)
    assert torch.equal(sample(lora_on_top, family), with_lora)
    assert not torch.equal(with_lora, plain)

    settings = CompileSettings(backend="eager")
    compiled, compiled_model = compile_model(swapped, settings)
    assert torch.equal(sample(compiled, family), plain)
    graph_count = graphs()
    assert compiled_model.report().counts().graphs == graph_count > 0
    compiled_lora, _ = comfy.sd.load_lora_for_models(compiled, None, lora, 0.7, 0.0)
    assert torch.equal(sample(compiled_lora, family), with_lora)
    resident, _ = compile_model(model, settings)
    assert torch.equal(sample(resident, family), plain)
    assert graphs() == graph_count

    comfy.model_management.unload_all_models()
    state = model.model.state_dict()
    assert state.keys() == masters.keys()
    assert all(torch.equal(masters[key], state[key]) for key in masters)
    assert not any("forward" in vars(module) for module in model.model.modules())


CUDA_GRAPHS = {
    "mode reduce-overhead": ({"mode": "reduce-overhead"}, ("inductor", "default")),
    "mode max-autotune": ({"mode": "max-autotune"}, ("inductor", "max-autotune-no-cudagraphs")),
    "backend cudagraphs": ({"backend": "cudagraphs"}, ("inductor", "default")),
}


@pytest.mark.parametrize("input_", CUDA_GRAPHS)
def test_blocks_take_no_cuda_graphs_while_some_stream(input_: str, tiny_flux: Any, monkeypatch: Any) -> None:
    """Only how each region is to be compiled is looked at: in inductor's place the block itself runs."""
    monkeypatch.setattr(region_module, "compiled_function", lambda body, name, compile_options: body)
    values, (backend, mode) = CUDA_GRAPHS[input_]
    settings = CompileSettings(**values)
    picture = sample(tiny_flux, "flux")
    swapped = swap_model(tiny_flux, dict(list(all_blocks(tiny_flux).items())[1:3]), prefetch=1, pinned=False)
    compiled, compiled_model = compile_model(swapped, settings)
    assert torch.equal(sample(compiled, "flux"), picture)
    # Those that stay too: one region for each kind, as without swap.
    assert sorted(region.report.label for region in compiled_model.regions.values()) == [
        "DoubleStreamBlock",
        "SingleStreamBlock",
    ]
    options = [region.options for region in compiled_model.regions.values()]
    assert {(option.backend, option.mode) for option in options} == {(backend, mode)}
    said = [note for note in compiled_model.notes if "block swap" in note]
    assert said == [
        f"{input_}: blocks are compiled without CUDA graphs (backend {backend}, mode {mode}), because some stream from "
        "RAM (block swap)."
    ]
    # On the same model without swap the settings hold as they are.
    resident, second = compile_model(tiny_flux, settings)
    assert second is compiled_model and torch.equal(sample(resident, "flux"), picture)
    assert [region.options for region in compiled_model.regions.values()][2:] == [settings.options()] * 2


@pytest.mark.parametrize("prefetch", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_step_copies_each_swapped_block_once_at_most(count: int, prefetch: int, tiny_flux: Any) -> None:
    picture = sample(tiny_flux, "flux", steps=3)
    swapped = swap_model(tiny_flux, dict(list(all_blocks(tiny_flux).items())[:count]), prefetch=prefetch, pinned=False)
    assert torch.equal(sample(swapped, "flux", steps=3), picture)
    ring, slots = swapped.swap.ring, min(prefetch + 1, count)
    # The first step brings all; after that those whose slot no other block has taken since are there.
    alone = sum(1 for slot in range(slots) if len(range(slot, count, slots)) == 1)
    assert ring.copies == count + 2 * (count - alone)
    assert ring.bytes_copied <= 3 * sum(layout.size for layout in swapped.swap.weights.layouts)
