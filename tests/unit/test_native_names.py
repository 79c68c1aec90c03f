"""LoRA names by rule, of models that no family has a table of."""

import pytest
from tessera.models.name_table import flat_name
from tessera.models.native.names import names_of

UNET = [
    "time_embed.0",
    "label_emb.0.2",
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
    "input_blocks.4.1.transformer_blocks.1.ff.net.0.proj",
    "input_blocks.4.0.in_layers.2",
    "output_blocks.11.0.skip_connection",
]


def test_every_name_comes_back_from_its_flat_form():
    table = names_of(UNET)
    assert [table.native(flat_name(name)) for name in UNET] == UNET
    assert table.native("input_blocks_7_1_transformer_blocks_9_attn1_to_q") is not None  # a block that it lacks
    assert table.native("input_blocks_4_1_transformer_blocks_0_attn1_to_k") is None
    assert all(table.diffusers(name) == () for name in UNET)


@pytest.mark.parametrize("names", [["a.b_1", "a.b.2"], ["a.b.2", "a.b_1"], ["time.linear_1", "time.linear.2.3"]])
def test_a_number_behind_an_underscore_is_told_from_one_behind_a_dot(names):
    table = names_of(names)
    assert [table.native(flat_name(name)) for name in names] == names


def test_two_modules_of_one_flat_name_are_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.b_c and a_b\.c"):
        names_of(["a.b_c", "a_b.c"])
    names_of(["a.b", "a.b"])
