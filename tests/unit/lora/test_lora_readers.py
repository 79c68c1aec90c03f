"""Save LoRA's sentences on which programs read a file. That they are true is tested with the programs' own loaders, in
tests/comfy/every_family/test_lora_files.py."""

from pathlib import Path

import pytest
import torch
from tessera.lora.files.formats import FORMATS
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.lora.files.readers import PROGRAMS, reader_notes
from tessera.models.catalogue.registry import FAMILIES
from tessera.models.family import Family

PAGE = Path(__file__).resolve().parents[3] / "nodes" / "web" / "docs" / "TesseraSaveLora.md"
BOTH = "ComfyUI and diffusers read this file."
WAN = "blocks.0.self_attn.q"
HEAD = "head.head"
FLUX2 = "double_stream_modulation_img.lin"
QWEN, FLUX1 = "transformer_blocks.0.img_mlp.net.2", "single_blocks.0.modulation.lin"


def lora(*names: str) -> LoraModel:
    return LoraModel.from_modules({name: LowRank(torch.ones(2, 8), torch.ones(8, 2), 2.0) for name in names})


@pytest.mark.parametrize(
    ("names", "layout", "expected"),
    [
        ([QWEN], "diffusers", [BOTH]),
        ([FLUX1], "diffusers", [BOTH]),
        (
            [FLUX1],
            "comfyui",
            [
                "ComfyUI reads this file.",
                "diffusers reads nothing of it; for diffusers set format to 'kohya' or 'diffusers'.",
            ],
        ),
        ([WAN], "kohya", [BOTH]),
        (
            [WAN, HEAD],
            "kohya",
            [
                "ComfyUI reads this file.",
                "diffusers reads nothing of it; for diffusers set format to 'comfyui' or 'diffusers'.",
            ],
        ),
        (
            [WAN, HEAD],
            "diffusers",
            [
                "diffusers reads this file.",
                "ComfyUI reads nothing of it; for ComfyUI set format to 'kohya' or 'comfyui'.",
            ],
        ),
        (
            [FLUX2, "double_blocks.0.img_mlp.0"],
            "diffusers",
            [
                "diffusers reads this file.",
                f"ComfyUI reads it without {FLUX2}; for ComfyUI set format to 'kohya' or 'comfyui'.",
            ],
        ),
    ],
)
def test_the_notes_say_which_programs_read_the_file_and_which_format_is_for_the_other(names, layout, expected):
    assert reader_notes(lora(*names), layout) == expected


def test_other_adapters_are_said_to_be_for_comfyui_alone():
    tensors = {f"lora_unet_blocks_0_ffn_0.hada_w{i}_{part}": torch.ones(2, 2) for i in (1, 2) for part in "ab"}
    assert reader_notes(tensors, "kohya") == [
        "ComfyUI reads this file.",
        "diffusers reads plain LoRA only, and this one has hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b; use it in "
        "ComfyUI.",
    ]


def test_model_that_is_not_known_is_not_claimed_to_be_anything():
    (note,) = reader_notes(lora("input_blocks.1.0.proj"), "kohya")
    assert note.startswith("It's not known which programs read this file")


def readers(family: Family, layout: str) -> str:
    """The programs that read a format of a family; "blocks" behind one that takes its blocks and not every layer."""
    names = [name.format(0) for name in family.names.to_diffusers]
    blocks = [name for name in names if "blocks." in name]
    programs = []
    for program in PROGRAMS:
        if not family.names.left_out(program, layout, names):
            programs.append(program)
        elif not family.names.left_out(program, layout, blocks):
            programs.append(f"{program} (blocks)")
    return ", ".join(programs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_help_page_lists_the_same(family):
    item = "<br>".join((f"- **{family.title}**", *(f"`{layout}`: {readers(family, layout)}" for layout in FORMATS)))
    assert f"{item}\n" in PAGE.read_text(encoding="utf-8")
