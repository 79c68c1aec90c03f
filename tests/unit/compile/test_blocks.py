"""Blocks: what is one, what they share, and which lists of them can be one region."""

import copy

import pytest
import tiny
import torch
from tessera.models.blocks import block_lists, find_blocks, kind_of
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype | None = None):
        super().__init__()
        self.first, self.second = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)


class Gated(Layer):
    pass


class Small(nn.Module):
    """One matrix only."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def test_entries_of_a_list_with_two_matrices_or_more_are_blocks():
    model = Model(embed=nn.Linear(4, 4), layers=nn.ModuleList(Layer() for _ in range(3)), head=Layer())
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_list_of_one_is_blocks_too():
    assert names(Model(layers=nn.ModuleList([Layer()]))) == ["layers.0"]


def test_modules_with_one_matrix_or_once_in_a_mixed_list_are_no_block():
    model = Model(small=nn.ModuleList([Small(), Small()]), mixed=nn.ModuleList([Layer(), Small(), nn.SiLU()]))
    assert names(model) == []


def test_a_sequential_of_plain_layers_is_no_list_of_blocks():
    assert names(Model(mlp=nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)))) == []


def test_layers_are_blocks_and_the_experts_inside_them_are_not():
    class WithExperts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Gated() for _ in range(2))

    assert names(Model(layers=nn.ModuleList(WithExperts() for _ in range(2)))) == ["layers.0", "layers.1"]


def test_blocks_inside_stages_that_are_unlike_count():
    stage = nn.Sequential(Gated(), nn.ModuleList([Layer(), Layer()]))
    model = Model(stages=nn.ModuleList([nn.Sequential(Gated(), nn.SiLU()), stage, Small()]))
    assert names(model) == ["stages.0.0", "stages.1.0", "stages.1.1.0", "stages.1.1.1"]


def test_blocks_of_one_class_widths_and_dtypes_are_of_one_kind():
    assert kind_of(Layer()) == kind_of(Layer())
    assert kind_of(Layer()).startswith("Layer:")
    other_blocks = [Gated(), Layer(5), Layer(dtype=torch.bfloat16)]
    changed = Layer()
    changed.second = nn.Linear(4, 4, bias=False)
    replaced = Layer()
    replaced.second = Gated()
    assert len({kind_of(block) for block in [Layer(), *other_blocks, changed, replaced]}) == 6


def test_a_list_is_one_region_where_all_of_it_are_blocks_and_more_than_one():
    mixed = nn.ModuleList([Gated(), Small(), Gated()])
    model = Model(layers=nn.ModuleList([Layer(), Layer(5)]), alone=nn.ModuleList([Layer()]), mixed=mixed)
    lists = block_lists(model, find_blocks(model))
    assert {name: [block.name for block in blocks] for name, blocks in lists.items()} == {
        "layers": ["layers.0", "layers.1"]
    }


def test_a_copy_of_a_model_has_the_same_kinds():
    model = Model(layers=nn.ModuleList(Layer() for _ in range(2)))
    kinds = [[block.kind for block in find_blocks(candidate)] for candidate in (model, copy.deepcopy(model))]
    assert kinds[0] == kinds[1]


# The lists of each tiny model, how many blocks there are and of how many kinds.
FAMILIES = {
    "flux": ({"double_blocks", "single_blocks"}, 4, 2),
    "flux2": ({"double_blocks", "single_blocks"}, 4, 2),
    "wan": ({"blocks"}, 2, 1),
    "wan_vace": ({"blocks", "vace_blocks"}, 4, 3),
    "qwen_image": ({"transformer_blocks"}, 2, 1),
    "sdxl": (
        {f"{stage}.1.transformer_blocks" for stage in ("input_blocks.3", "input_blocks.5", "middle_block")},
        25,
        12,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_blocks_lists_and_kinds_of_each_family(name, tiny_files):
    lists, blocks, kinds = FAMILIES[name]
    model = tiny.load_model(name, tiny_files[name]).model.diffusion_model
    block_list = find_blocks(model)
    assert len(block_list) == blocks and len({block.kind for block in block_list}) == kinds
    assert lists <= block_lists(model, block_list).keys()
    covered = {id(m) for block in block_list for m in block.module.modules()}
    linears = {id(m) for m in model.modules() if isinstance(m, nn.Linear)}
    assert len(linears & covered) > len(linears) / 2
