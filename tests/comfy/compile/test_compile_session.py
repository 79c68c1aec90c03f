"""A session of a user: sizes, prompts, LoRAs, batches and guidance by turns. Dynamo's own count of graphs is asked
after every picture, and the report has to say the same."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import comfy.model_management
import pytest
import torch
from thinned import one_in
from tiny.compile.compiling import Graphs, compiled, load_as, make_lora, memory_for_weights, with_lora
from tiny.models.sampling import sample
from torch import Tensor

KINDS = {"flux": 2, "flux2": 2, "wan": 1, "qwen_image": 1, "sdxl": 12}
SIZES = ((64, 64), (96, 64), (64, 128))
LENGTHS = (9, 16, 40)
# What a user sets in LoRA loaders, one after the other: (which, strength), before or behind Compile Model.
LORAS = ((None, 0.0, "before"), (1, 1.0, "before"), (2, 0.4, "behind"), (2, 0.7, "before"), (None, 0.0, "before"))


pytestmark = pytest.mark.usefixtures("fresh_graphs")


class Session:
    """Samples each picture compiled and eager, which have to be equal, and counts graphs since it began."""

    def __init__(self, model: Any, name: str, **settings: Any):
        self.model = model
        self.name = name
        self.settings = settings
        self.loras = {number: make_lora(model, number) for number in (1, 2)}
        self.graphs = Graphs()
        _, self.compiled_model = compiled(model, **settings)

    def picture(
        self, lora: int | None = None, strength: float = 0.0, position: str = "before", **inputs: Any
    ) -> Tensor:
        eager = self.model if lora is None else with_lora(self.model, self.loras[lora], strength)
        clone, compiled_model = compiled(self.model if position == "behind" else eager, **self.settings)
        assert compiled_model is self.compiled_model
        if position == "behind":
            clone = with_lora(clone, self.loras[lora], strength)
        picture = sample(clone, self.name, **inputs)
        counted = self.graphs()
        assert torch.equal(picture, sample(eager, self.name, **inputs))
        assert self.graphs() == counted == self.compiled_model.report().counts().graphs
        return picture

    def graphs_of_kinds(self) -> list[int]:
        return [region["graphs"] for region in self.compiled_model.report().facts()["regions"]]


def shapes(sizes: Any = SIZES, lengths: Any = LENGTHS, batches: Any = (1, 2)) -> Iterator[dict[str, int]]:
    for batch, (width, height), length in product(batches, sizes, lengths):
        yield {"batch": batch, "width": width, "height": height, "length": length}


@pytest.mark.parametrize(
    ("name", "loader", "sizes", "lengths"),
    one_in(
        3,
        [
            ("wan", "core", SIZES[:2], LENGTHS[:2]),
            ("flux", "core", SIZES[:2], LENGTHS[:2]),
            ("qwen_image", "ours", SIZES[:2], LENGTHS[:2]),
        ],
    ),
)
def test_with_dynamic_false_each_shape_is_compiled_once_and_no_lora_compiles_anything(
    name, loader, sizes, lengths, tiny_files
):
    session = Session(load_as(loader, name, tiny_files[name]), name, dynamic="false")
    distinct: set[tuple[int, ...]] = set()
    for lora in LORAS[:3]:
        for shape in shapes(sizes, lengths):
            session.picture(*lora, **shape)
            distinct.add(tuple(shape.values()))
            assert session.graphs() == KINDS[name] * len(distinct)
    # Prompts of one length go through the model together, as batch 2.
    together = {"width": sizes[0][0], "height": sizes[0][1], "length": lengths[0], "cfg": 3.0}
    session.picture(**together, negative_length=lengths[0])
    assert session.graphs() == KINDS[name] * len(distinct)
    # Another length is a call of its own.
    session.picture(**together, negative_length=5)
    assert session.graphs() == KINDS[name] * (len(distinct) + 1)
    session.picture(**together, negative_length=5, steps=3, seed=9)
    assert session.graphs() == KINDS[name] * (len(distinct) + 1)
    assert session.compiled_model.notes == [] and session.compiled_model.report().counts().graph_breaks == 0


@pytest.mark.parametrize(
    ("name", "loader"),
    one_in(4, [("flux", "ours"), ("wan", "ours"), ("qwen_image", "core"), ("sdxl", "core")]),
)
def test_with_dynamic_true_a_kind_of_block_has_two_graphs_one_for_batch_1_and_one_for_more(name, loader, tiny_files):
    session = Session(load_as(loader, name, tiny_files[name]), name, dynamic="true")
    for number, lora in enumerate(LORAS[:3]):
        pairs = list(zip(SIZES, LENGTHS, strict=True)) if number else list(product(SIZES, LENGTHS))
        for batch, ((width, height), length) in product((1, 2), pairs):
            session.picture(*lora, batch=batch, width=width, height=height, length=length, steps=1)
            assert session.graphs() == KINDS[name] * (1 if number == 0 and batch == 1 else 2)
    session.picture(batch=3, length=13)
    session.picture(cfg=3.0, length=21, negative_length=21)
    session.picture(cfg=3.0, length=21, negative_length=12)
    assert set(session.graphs_of_kinds()) == {2} and len(session.graphs_of_kinds()) == KINDS[name]
    assert session.compiled_model.notes == [] and session.compiled_model.report().counts().graph_breaks == 0


@pytest.mark.parametrize("name", one_in(3, ["wan", "flux", "qwen_image"]))
def test_with_dynamic_auto_a_kind_has_a_graph_more_when_text_size_or_batch_first_vary(name, tiny_files):
    session = Session(load_as("core", name, tiny_files[name]), name, dynamic="auto")
    first, second, third = shapes(SIZES[:1], LENGTHS, (1,))
    session.picture(**first)
    assert set(session.graphs_of_kinds()) == {1}
    for change in ({}, {"width": 96}, {"width": 96, "batch": 2}):
        session.picture(**(second | change))
    most_graphs = max(session.graphs_of_kinds())
    assert most_graphs <= 4
    graphs = session.graphs()
    for shape in [third, *shapes(SIZES[1:], LENGTHS[::2], (1, 2, 3))]:
        session.picture(*LORAS[1], **shape)
    assert session.graphs() == graphs


# Sizes that happen to be equal: tokens and the hidden width (128), tokens and text, batch and RoPE's 2 x 2.
COINCIDENCES = (
    {"width": 256, "height": 128, "length": 128, "batch": 2},
    {"width": 64, "height": 64, "length": 16, "batch": 2},
    {"width": 256, "height": 128, "length": 9, "batch": 1},
    {"width": 64, "height": 64, "length": 16, "batch": 1},
)


@pytest.mark.parametrize(("name", "first"), one_in(6, product(["flux", "wan", "qwen_image"], range(2))))
def test_sizes_that_happen_to_be_equal_are_not_tied_together(first, name, tiny_files):
    session = Session(load_as("core", name, tiny_files[name]), name, dynamic="true")
    for coincidence in (*COINCIDENCES[first:], *COINCIDENCES[:first]):
        session.picture(**coincidence, steps=1)
    for shape in shapes(SIZES[:2], LENGTHS[::2], (1, 2)):
        session.picture(**shape, steps=1)
    assert session.graphs_of_kinds() == [2] * KINDS[name]


def test_a_lora_and_its_strength_change_the_picture(tiny_files):
    session = Session(load_as("core", "flux", tiny_files["flux"]), "flux", dynamic="false")
    pictures = [session.picture(*lora) for lora in LORAS]
    assert torch.equal(pictures[0], pictures[-1])
    for i, first in enumerate(pictures[:-1]):
        assert all((first - other).abs().max() > 0.1 for other in pictures[i + 1 : -1])


@pytest.mark.parametrize("scope", one_in(2, ["stack", "model"]))
def test_loras_seeds_steps_and_guidance_compile_nothing_in_the_larger_scopes_either(scope, tiny_files):
    session = Session(load_as("core", "wan", tiny_files["wan"]), "wan", dynamic="false", scope=scope)
    session.picture(length=9)
    assert session.graphs() == 1
    for lora in LORAS:
        session.picture(*lora, length=9, steps=3, seed=4)
    session.picture(length=9, steps=4, seed=5)
    assert session.graphs() == 1
    session.picture(length=9, cfg=3.0)
    assert session.graphs() == 2
    session.picture(length=9, batch=2)
    assert session.graphs() == 2 and session.compiled_model.notes == []


def test_two_branches_over_one_model_do_not_disturb_each_other(tiny_files):
    model = load_as("core", "flux", tiny_files["flux"])
    narrow = Session(model, "flux", dynamic="false", cache_size_limit=2)
    wide = Session(model, "flux", dynamic="false", cache_size_limit=3)
    eager, counted = [], []
    for length in LENGTHS:
        clones = [compiled(model, **session.settings)[0] for session in (narrow, wide)]
        eager.append(sample(model, "flux", length=length))
        assert all(torch.equal(sample(clone, "flux", length=length), eager[-1]) for clone in clones)
        counted.append([session.compiled_model.report().counts().graphs for session in (narrow, wide)])
    assert counted == [[2, 2], [4, 4], [4, 6]]
    assert narrow.graphs() == 10
    assert len(narrow.compiled_model.notes) == 2 and all(
        "limit 2 is reached" in note for note in narrow.compiled_model.notes
    )
    assert wide.compiled_model.notes == []
    for length, expected in zip(LENGTHS, eager, strict=True):
        clone, compiled_model = compiled(model, **wide.settings)
        assert compiled_model is wide.compiled_model and torch.equal(sample(clone, "flux", length=length), expected)
    assert wide.graphs() == 10


def test_a_branch_does_not_know_which_sizes_varied_in_another(tiny_files):
    model = load_as("core", "wan", tiny_files["wan"])
    counted = []
    for limit in (8, 9):
        session = Session(model, "wan", dynamic="auto", cache_size_limit=limit)
        counted.append([session.picture(length=length) is not None and session.graphs() for length in LENGTHS])
    assert counted == [[1, 2, 2]] * 2


def test_another_model_of_the_same_file_has_graphs_of_its_own(tiny_files):
    first, second = (load_as("core", "wan", tiny_files["wan"]) for _ in range(2))
    sessions = [Session(model, "wan", dynamic="false") for model in (first, second)]
    assert sessions[0].compiled_model is not sessions[1].compiled_model
    for session in sessions:
        clone, _ = compiled(session.model, **session.settings)
        sample(clone, "wan")
        assert session.compiled_model.report().counts().graphs == 1


def test_unloading_in_mid_session_compiles_nothing(tiny_files):
    session = Session(load_as("core", "flux", tiny_files["flux"]), "flux", dynamic="false")
    pictures = [session.picture(*lora) for lora in LORAS[:3]]
    comfy.model_management.unload_all_models()
    after = [session.picture(*lora) for lora in LORAS[:3]]
    assert all(torch.equal(*pair) for pair in zip(pictures, after, strict=True))
    assert session.graphs() == 2


def streamed(session: Session) -> set[Any]:
    """For each block which of its layers are streamed, and which of these have a LoRA applied at each use."""
    layers = [
        (b.kind, [m for m in b.module.modules() if hasattr(m, "comfy_cast_weights")])
        for b in session.compiled_model.layout.blocks
    ]
    return {
        (kind, *((m.comfy_cast_weights, len(m.weight_function), len(m.bias_function)) for m in modules))
        for kind, modules in layers
    }


@pytest.mark.parametrize(("name", "loader"), one_in(3, [("flux", "core"), ("wan", "ours"), ("wan", "core")]))
def test_partly_loaded_each_pattern_of_streamed_layers_is_compiled_once_whatever_the_lora(name, loader, tiny_files):
    session = Session(load_as(loader, name, tiny_files[name]), name, dynamic="false")
    patterns: set[Any] = set()
    whole: list[Tensor] = []
    for part in (None, 0.5, 0.5, None, 0.5):
        with nullcontext() if part is None else memory_for_weights(part * session.model.model_size()):
            comfy.model_management.unload_all_models()
            pictures = []
            for lora in LORAS:
                pictures.append(session.picture(*lora))
                assert session.model.model.model_lowvram == (part is not None)
                assert (session.model.model.lowvram_patch_counter > 0) == (part is not None and lora[0] is not None)
                patterns |= streamed(session)
                assert session.graphs() == len(patterns)
            whole = whole or pictures
            assert all(torch.equal(*pair) for pair in zip(pictures, whole, strict=True))
    assert KINDS[name] < session.graphs() <= 3 * len(session.compiled_model.layout.blocks)
    assert session.compiled_model.notes == []
