"""A compiled MODEL samples what it samples without: every family, scope, mode and way of taking sizes, through core's
KSampler."""

from pathlib import Path

import pytest
import tiny
import torch
from tessera.compile.settings import DYNAMIC, MODES, SCOPES
from thinned import one_in
from tiny.common.pairs import covering
from tiny.compile.compiling import Graphs, compiled, load_as
from tiny.models.sampling import sample

FAMILIES = ("flux", "flux2", "wan", "wan_vace", "qwen_image", "sdxl")
WIDE_AND_LONG = {"width": 96, "length": 21}
# SDXL takes many times as long as the others to compile: each scope of it, and each way of taking sizes, once.
PAIRS = covering(SCOPES, list(DYNAMIC), [name for name in FAMILIES if name != "sdxl"])
OF_SDXL = [("sdxl", "blocks", "false"), ("sdxl", "stack", "true"), ("sdxl", "model", "auto")]
CASES = one_in(5, [(name, *options) for *options, name in PAIRS])
CASES += [pytest.param(*case, marks=pytest.mark.wide) for case in OF_SDXL]

pytestmark = pytest.mark.usefixtures("fresh_graphs")


@pytest.fixture(scope="module")
def files(tiny_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One block in each of SDXL's transformers: a second is traced and compiled again, and shows nothing more."""
    return tiny_files | {"sdxl": tiny.write_sdxl(tmp_path_factory.mktemp("sdxl") / "sdxl.safetensors", depth=1)}


@pytest.mark.parametrize(("name", "scope", "dynamic"), CASES)
def test_two_sizes_are_bit_equal_for_every_family_scope_and_way_of_taking_sizes(name, scope, dynamic, files):
    model = tiny.load_model(name, files[name])
    clone, compiled_model = compiled(model, backend="aot_eager", scope=scope, dynamic=dynamic)
    graphs = Graphs()
    for size in ({}, WIDE_AND_LONG)[: 1 if dynamic == "false" else 2]:
        assert torch.equal(sample(clone, name, **size), sample(model, name, **size))
    assert graphs() == compiled_model.report().counts().graphs > 0
    calls = [(region.report.compiled_calls, region.report.eager_calls) for region in compiled_model.regions.values()]
    assert all(ran > 0 and eager == 0 for ran, eager in calls)
    assert [note for note in compiled_model.notes if "VACE" not in note] == []
    assert (len(compiled_model.notes) == 1) == (name == "wan_vace" and scope == "stack")


@pytest.mark.parametrize("backend", ["cudagraphs", "aot_ts", "ts"])
def test_other_backends_of_torch_run_on_the_cpu_and_are_equal(backend, tiny_files):
    model = tiny.load_model("wan", tiny_files["wan"])
    clone, compiled_model = compiled(model, backend=backend)
    actual, want = sample(clone, "wan"), sample(model, "wan")
    # aot_ts ends in torch.jit.optimize_for_inference, whose oneDNN layers may sum in another order than MKL.
    torch.testing.assert_close(actual, want, rtol=0, atol=1e-6 * float(want.abs().max()) if backend == "aot_ts" else 0)
    assert compiled_model.report().counts().graphs == 1
    assert [note for note in compiled_model.notes if "no CUDA graphs here" in note] == compiled_model.notes
    assert len(compiled_model.notes) == (backend == "cudagraphs")


@pytest.fixture(scope="module")
def smallest_flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block of each kind."""
    return tiny.write_flux(tmp_path_factory.mktemp("smallest") / "flux.safetensors", depth=1, depth_single=1)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("name", one_in(3, ("wan", "flux", "qwen_image")))  # half a minute each
def test_inductor_is_equal_within_the_rounding_of_the_dtype(name, files):
    model = tiny.load_model(name, files[name])
    clone, compiled_model = compiled(model, backend="inductor")
    first, eager = sample(clone, name), sample(model, name)
    assert 0 < error(first, eager) < 2e-5
    assert torch.equal(sample(clone, name), first)
    assert compiled_model.notes == []


@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
def test_inductor_comes_as_near_to_fp32_as_eager_does_in_half_precision(dtype, one_block_wan):
    stored = tiny.load_wan(one_block_wan, dtype)
    exact = sample(stored, "wan")  # on a CPU ComfyUI casts such weights and computes in fp32
    model = stored.clone()
    model.set_model_compute_dtype(dtype)
    eager = sample(model, "wan")
    assert error(eager, exact) > 1e-4
    clone, compiled_model = compiled(model, backend="inductor")
    assert error(sample(clone, "wan"), exact) < 1.2 * error(eager, exact)
    assert compiled_model.report().counts().graphs == 1 and compiled_model.notes == []


@pytest.fixture(scope="module")
def one_block_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles in a fraction of FLUX's time, whose blocks inductor compiles in the tests of gradients."""
    return tiny.write_wan(tmp_path_factory.mktemp("one_block") / "wan.safetensors", layers=1)


# Each takes half a minute: every mode once, with the scopes and the ways of taking sizes in turn.
IN_TURN = [(mode, SCOPES[n % 3], list(DYNAMIC)[n % 3]) for n, mode in enumerate(MODES)]


@pytest.mark.parametrize(("mode", "scope", "dynamic"), one_in(6, IN_TURN[::-1]))
def test_inductor_is_equal_in_every_scope_mode_and_way_of_taking_sizes(mode, scope, dynamic, one_block_wan):
    model = tiny.load_wan(one_block_wan)
    clone, compiled_model = compiled(model, backend="inductor", mode=mode, scope=scope, dynamic=dynamic)
    for size in ({}, WIDE_AND_LONG)[: 1 if dynamic == "false" else 2]:
        assert error(sample(clone, "wan", **size), sample(model, "wan", **size)) < 2e-5
    assert [note for note in compiled_model.notes if "no CUDA graphs here" not in note] == []
    assert len(compiled_model.notes) == (mode in ("reduce-overhead", "max-autotune"))


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_fp8_weights_that_are_cast_at_each_use_are_bit_equal(scope, smallest_flux):
    model = tiny.load_flux(smallest_flux, torch.float8_e4m3fn)
    clone, compiled_model = compiled(model, backend="aot_eager", scope=scope)
    assert torch.equal(sample(clone, "flux"), sample(model, "flux"))
    assert compiled_model.report().counts().graph_breaks == 0 and compiled_model.notes == []


@pytest.mark.parametrize("scope", one_in(3, SCOPES))
def test_quantised_weights_are_part_of_the_graph(scope, tmp_path):
    path = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=1, dtype=torch.bfloat16, fp8=True)
    model = load_as("core", "flux", path)
    clone, compiled_model = compiled(model, backend="aot_eager", scope=scope)
    assert error(sample(clone, "flux"), sample(model, "flux")) < 1e-5
    assert compiled_model.report().counts().graph_breaks == 0 and compiled_model.notes == []
