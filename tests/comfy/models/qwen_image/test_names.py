"""The names in a LoRA file tell Qwen-Image from FLUX where a single one does not."""

from family_cases import CASES
from tessera.models.blocks import linear_shapes
from tessera.models.catalogue.registry import table_of
from tessera.models.flux.names import FLUX1_NAMES
from tessera.models.qwen_image.names import QWEN_IMAGE_NAMES


def test_the_names_of_a_file_tell_the_family_where_a_single_one_does_not(case_file):
    case = CASES["qwen-image"]
    modules = linear_shapes(case.load(case_file(case)).model)
    flat = [name.replace(".", "_") for name in modules]
    assert table_of(dict.fromkeys(flat)) is QWEN_IMAGE_NAMES
    assert table_of(dict.fromkeys(["img_in", "double_blocks_0_img_attn_qkv"])) is FLUX1_NAMES
    for name, text in zip(modules, flat, strict=True):
        assert QWEN_IMAGE_NAMES.native(text) == name and QWEN_IMAGE_NAMES.diffusers(name) == (name,)
