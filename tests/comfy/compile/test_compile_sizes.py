"""Sizes that share a graph, and that numbers which never change, such as a norm's epsilon, are no inputs of it."""

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from tiny.compile.compiling import compiled
from tiny.models.sampling import sample

handed: list[tuple[torch.dtype, int]] = []


@torch._dynamo.register_backend(name="keeps_inputs", tags=("debug",))  # not among the names that are offered
def keep_inputs(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    handed.extend((value.dtype, value.ndim) for value in inputs if isinstance(value, torch.Tensor))
    return graph.forward


@pytest.fixture(autouse=True)
def nothing_handed(fresh_graphs: None) -> None:
    handed.clear()


def sizes() -> Iterator[dict[str, int]]:
    for (width, height), length, batch in product(((64, 64), (96, 32), (80, 96)), (16, 21), (1, 2, 3)):
        yield {"width": width, "height": height, "length": length, "batch": batch}


@pytest.mark.parametrize(("dynamic", "graphs"), [("auto", 3), ("true", 2)])
def test_all_sizes_share_a_graph_for_batch_1_and_one_for_more_and_auto_has_one_for_the_first(
    dynamic: str, graphs: int, tiny_flux: Any
) -> None:
    clone, compiled_model = compiled(tiny_flux, dynamic=dynamic)
    for size in sizes():
        sample(clone, "flux", steps=1, **size)
    assert len(compiled_model.regions) == 2
    for region in compiled_model.regions.values():
        assert [event.graphs for event in region.report.events] == graphs * [1]
        assert [event.dynamic for event in region.report.events] == [dynamic == "true", True, True][:graphs]


def test_graphs_added_at_the_first_sizes_keep_them_exact(tiny_flux: Any) -> None:
    clone, compiled_model = compiled(tiny_flux, dynamic="auto")
    for steps in (1, 3):
        sample(clone, "flux", steps=steps)
    options = clone.model_options["transformer_options"]
    options |= {"optimized_attention_override": weaker_attention, "strength": 0.5}
    sample(clone, "flux", steps=1)
    for region in compiled_model.regions.values():
        assert [event.dynamic for event in region.report.events] == [False, False]


def test_an_epsilon_is_part_of_the_graph(tiny_flux: Any) -> None:
    clone, compiled_model = compiled(tiny_flux, backend="keeps_inputs", dynamic="true")
    for batch in (1, 2):
        sample(clone, "flux", batch=batch, steps=1)
    assert compiled_model.report().counts().graphs == 4
    assert handed and not [value for value in handed if value == (torch.float64, 0)]


def weaker_attention(attention: Any, *args: Any, transformer_options: dict[str, Any], **kwargs: Any) -> Any:
    return attention(*args, transformer_options=transformer_options, **kwargs) * transformer_options["strength"]


def test_a_number_that_changes_each_time_makes_no_graph_each_time(tiny_flux: Any) -> None:
    clone, compiled_model = compiled(tiny_flux, backend="keeps_inputs", dynamic="true")
    options = clone.model_options["transformer_options"]
    options["optimized_attention_override"] = weaker_attention
    graphs, out = [], []
    for number in range(8):
        options["strength"] = 1 - number / 10
        out.append(sample(clone, "flux", steps=1))
        graphs.append(compiled_model.report().counts().graphs)
    assert (torch.float64, 0) in handed
    assert graphs[-1] == graphs[5] <= 10
    assert not any(torch.equal(a, b) for a, b in pairwise(out))
