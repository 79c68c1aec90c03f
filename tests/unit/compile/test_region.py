"""torch.compile on a machine or a torch that is not as we would like it."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from tessera.compile import region
from tessera.compile.region import compiled_function, run_block
from tessera.compile.settings import CompileOptions, CompileSettings, parse_overrides
from torch import nn


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.fixture
def older_torch(monkeypatch):
    """A torch whose `compile` lacks the arguments that limit one region, as before 2.12."""
    compile_now = torch.compile
    parameters = [
        p
        for name, p in inspect.signature(compile_now).parameters.items()
        if name not in ("recompile_limit", "isolate_recompiles")
    ]

    def older(*args, **kwargs):
        assert "recompile_limit" not in kwargs
        return compile_now(*args, **kwargs)

    older.__signature__ = inspect.Signature(parameters)
    monkeypatch.setattr(region.torch, "compile", older)
    torch._dynamo.reset()


@pytest.mark.parametrize("graphs", [10, 12])
def test_an_older_torch_takes_as_many_graphs_as_are_planned(older_torch, graphs):
    limit = torch._dynamo.config.recompile_limit
    assert limit < graphs
    options = CompileOptions("eager", dynamic="false", fullgraph=True, limit=graphs)
    run, block = compiled_function(run_block, "run_block", options), Block()
    for rows in range(2, 2 + graphs):
        assert run(block, torch.ones(rows)).shape == (rows,)
    assert torch._dynamo.config.recompile_limit == limit


class Named(Block):
    shapes, shapes_known = 1, True

    def linears(self) -> dict[str, nn.Module]:
        return {}

    def structure(self) -> str:
        return "block:"


@pytest.mark.parametrize("torch_is", ["as it is", "older"])
def test_the_first_graph_that_was_not_planned_is_an_error_with_every_torch(torch_is, request):
    from tessera.train.blocks.block_runner import BlockRunner
    from tessera.train.config.settings import MemoryOptions

    if torch_is == "older":
        request.getfixturevalue("older_torch")
    block, settings = Named(), CompileSettings("eager")
    runner = BlockRunner([("0", block)], MemoryOptions(checkpointing="none"), settings, 2, torch.device("cpu"))
    for rows in (2, 3, 2):
        assert runner(block, torch.ones(rows)).shape == (rows,)
    with pytest.raises(Exception) as stopped:
        runner(block, torch.ones(4))
    assert region.over_the_limit(stopped.value) and region.cannot_compile(stopped.value) is None


def test_a_torch_that_refuses_to_compile_is_named_and_the_runner_is_eager(monkeypatch):
    from tessera.train.blocks.block_runner import BlockRunner
    from tessera.train.config.settings import MemoryOptions

    def refuses(*args, **kwargs):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(region.torch, "compile", refuses)
    block = Named()
    runner = BlockRunner([("0", block)], MemoryOptions(checkpointing="none"), CompileSettings(), 1, torch.device("cpu"))
    assert runner.not_compiled == "torch.compile is not supported on Python 3.99+"
    assert torch.equal(runner(block, torch.ones(3)), torch.full((3,), 2.0))


def test_a_weight_stored_narrower_costs_the_partitioner_as_much_as_a_plain_one():
    from tessera.memory.weights.frozen_linear import stored_linear
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(16, 8)

    def flops(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return counter.get_total_flops()

    plain = flops(lambda: nn.functional.linear(x, weight))
    stored = flops(lambda: stored_linear(x, weight.to(torch.bfloat16), None, None))
    assert stored == plain == 2 * (2 * 2 * 5 * 8 * 16)


def positions(picture: torch.Tensor) -> torch.Tensor:
    """Compute places as core does for a picture of any size: padded to patches, one for each."""
    _, _, height, width = picture.shape
    picture = nn.functional.pad(picture, (0, -width % 2, 0, -height % 2), mode="circular")
    rows, columns = (height + 1) // 2, (width + 1) // 2
    places = torch.zeros(rows, columns, 2)
    places[:, :, 0] = places[:, :, 0] + torch.linspace(0, rows - 1, steps=rows).unsqueeze(1)
    places[:, :, 1] = places[:, :, 1] + torch.linspace(0, columns - 1, steps=columns).unsqueeze(0)
    return places.sum(-1) * picture.mean()


def test_a_graph_that_a_cache_holds_for_one_size_is_not_taken_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    run = compiled_function(positions, "positions", CompileOptions("inductor", dynamic="auto", fullgraph=True))
    for height, width in ((8, 8), (8, 12), (16, 12), (16, 20)):
        picture = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(run(picture), positions(picture))


@pytest.fixture
def patches_of_inductor(monkeypatch):
    """The changes to its configuration that inductor is called with, once a graph; the graph itself runs eager."""
    import torch._inductor.compile_fx as inductor

    patches: list[dict[str, object]] = []

    def compile_fx(graph, inputs, config_patches=None, **options):
        patches.append(dict(config_patches or {}))
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    torch._dynamo.reset()
    return patches


@pytest.mark.parametrize(
    ("compile_options", "tunes"),
    [
        ({"mode": "reduce-overhead"}, False),
        ({"mode": "max-autotune"}, True),
        ({"backend": "cudagraphs"}, False),
        ({"overrides": parse_overrides("0 mode=max-autotune")}, True),
        ({"overrides": parse_overrides("0 backend=cudagraphs")}, False),
    ],
)
def test_blocks_in_training_are_compiled_without_cuda_graphs_whatever_is_asked(
    compile_options, tunes, patches_of_inductor
):
    """A CUDA graph is bound to the weights of one block, and blocks of one structure share the callable."""
    from tessera.train.blocks.block_runner import BlockRunner
    from tessera.train.config.settings import MemoryOptions

    block, settings = Named(), CompileSettings(**compile_options)
    runner = BlockRunner([("0", block)], MemoryOptions(checkpointing="none"), settings, 1, torch.device("cpu"))
    runner(block, torch.ones(3))
    (patches,) = patches_of_inductor
    assert not patches.get("triton.cudagraphs") and bool(patches.get("max_autotune")) == tunes


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("dynamic", "caches"), [("auto", False), ("true", False), ("false", True)])
def test_aotautograds_cache_is_off_while_a_graph_is_made_that_may_serve_other_sizes(dynamic, caches, fails):
    """Its key leaves out by what such a graph is guarded: it would serve a size whose numbers are not its own."""
    from torch._functorch import config

    values = []

    def backend(graph, inputs):
        values.append(config.enable_autograd_cache)
        if fails:
            raise RuntimeError("no compiler")
        return graph.forward

    torch._dynamo.reset()
    run = compiled_function(run_block, "run_block", CompileOptions(backend, dynamic=dynamic, fullgraph=True))
    with config.patch(enable_autograd_cache=True):
        for rows in (3, 5, 7):
            with pytest.raises(Exception, match="no compiler") if fails else nullcontext():
                run(Block(), torch.ones(rows))
            assert config.enable_autograd_cache  # other packs' graphs are cached as before
    assert values and set(values) == {caches}
