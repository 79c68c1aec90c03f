"""Compiling leaves the MODEL as it is: its weights, their names, its modules, what is saved and what is freed."""

import gc
import weakref
from typing import Any

import comfy.model_management
import comfy.sd
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import load_file
from tessera.compile.attach import compiled_model_of
from tessera.compile.region import CompileFailed
from tessera.compile.settings import SCOPES
from thinned import one_in
from tiny.common.pairs import covering
from tiny.compile.compiling import Graphs, compiled, load_as, make_lora, with_lora
from tiny.models.sampling import sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_graphs")


class Kept:
    """All that compiling must not change: each weight's name, bytes and place, each module and where it stands."""

    def __init__(self, patcher: Any):
        self.model = patcher.model
        self.weights = {name: (t.data_ptr(), t.detach().clone()) for name, t in self.model.state_dict().items()}
        self.modules = {name: id(module) for name, module in self.model.named_modules()}
        self.attributes = {name: set(vars(module)) for name, module in self.model.named_modules()}

    def check(self) -> None:
        weights = self.model.state_dict()
        assert list(weights) == list(self.weights)
        for name, (place, original) in self.weights.items():
            assert weights[name].data_ptr() == place and torch.equal(weights[name], original), name
        assert {name: id(module) for name, module in self.model.named_modules()} == self.modules
        for name, module in self.model.named_modules():
            # What ComfyUI itself puts on layers when it loads a model.
            core_attributes = {a for a in vars(module) if a.startswith("comfy_") or a.endswith("_function")}
            assert set(vars(module)) - core_attributes == self.attributes[name] - core_attributes, name


def stopped_by(error: BaseException) -> Any:
    """A patch of attention's inputs that raises."""

    def patch(q: Tensor, k: Tensor, v: Tensor, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
        raise error

    return patch


def breaks(q: Tensor, k: Tensor, v: Tensor, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
    print(end="")
    return {}


ENDINGS: dict[str, tuple[Any, type[BaseException]] | None] = {
    "finished": None,
    "an error": (stopped_by(RuntimeError("the patch failed")), RuntimeError),
    "an interrupt": (stopped_by(InterruptProcessingException()), InterruptProcessingException),
    "fullgraph that fails": (breaks, CompileFailed),
}


@pytest.mark.parametrize(("ending", "scope", "loader"), covering(list(ENDINGS), SCOPES, ["core", "ours"]))
def test_weights_and_modules_are_the_same_however_a_run_ends(loader, scope, ending, tiny_files):
    if scope != "blocks" and loader == "ours":
        pytest.skip("one loader is enough here")
    model = load_as(loader, "flux", tiny_files["flux"])
    eager = sample(model, "flux")
    snapshot = Kept(model)
    clone, compiled_model = compiled(model, scope=scope, fullgraph=ending == "fullgraph that fails")
    if ENDINGS[ending] is not None:
        patch, error = ENDINGS[ending]
        patched = clone.clone()
        patched.set_model_attn1_patch(patch)
        with pytest.raises(error):
            sample(patched, "flux")
        snapshot.check()
    assert torch.equal(sample(clone, "flux"), eager)
    snapshot.check()
    assert torch.equal(sample(model, "flux"), eager)
    # An error of a patch's own, or an interrupt, says nothing about compiling.
    if ending != "fullgraph that fails":
        assert compiled_model.report().counts().graphs == (1 if scope == "model" else 2)
        assert [note for note in compiled_model.notes if "another node patches" not in note] == []


@pytest.mark.parametrize("scope", one_in(2, ["stack", "blocks"]))
def test_after_an_interrupt_in_the_middle_of_the_first_pass_a_run_compiles_as_ever(scope, tiny_files):
    model = load_as("core", "flux", tiny_files["flux"])
    eager = sample(model, "flux")
    clone, compiled_model = compiled(model, scope=scope)

    def stop(*_: Any) -> None:
        raise InterruptProcessingException()

    hook = model.model.diffusion_model.single_blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(InterruptProcessingException):
        sample(clone, "flux")
    hook.remove()
    assert torch.equal(sample(clone, "flux"), eager)
    titles = {"blocks": {"DoubleStreamBlock", "SingleStreamBlock"}, "stack": {"double_blocks", "single_blocks"}}[scope]
    assert {region.report.label for region in compiled_model.regions.values()} == titles and compiled_model.notes == []


def saved(patcher: Any, path: Any) -> dict[str, Tensor]:
    """State dict that core's nodes that save a model write."""
    with torch.inference_mode():
        comfy.sd.save_checkpoint(str(path), patcher)
    return load_file(path)


@pytest.mark.parametrize("position", one_in(3, ["LoRA behind", "LoRA before", "no LoRA"]))
def test_a_compiled_model_saves_what_it_saves_without(position, tiny_files, tmp_path):
    model = load_as("core", "flux", tiny_files["flux"])
    lora = make_lora(model, 1)
    eager = model if position == "no LoRA" else with_lora(model, lora, 0.5)
    expected = saved(eager, tmp_path / "eager.safetensors")
    clone, _ = compiled(model if position == "LoRA behind" else eager)
    if position == "LoRA behind":
        clone = with_lora(clone, lora, 0.5)
    picture = sample(clone, "flux")
    tensors = saved(clone, tmp_path / "compiled.safetensors")
    assert tensors.keys() == expected.keys() and not [name for name in tensors if "_orig_mod" in name]
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert torch.equal(sample(eager, "flux"), picture)


def test_clones_share_the_graphs_and_a_lora_finds_all_its_keys(tiny_files, caplog):
    model = load_as("core", "flux", tiny_files["flux"])
    clone, compiled_model = compiled(model)
    first = sample(clone, "flux")
    graphs = Graphs()
    second_clone = clone.clone()
    assert (
        compiled_model_of(second_clone) is compiled_model
        and second_clone.is_clone(model)
        and second_clone.clone_has_same_weights(clone)
    )
    assert torch.equal(sample(second_clone, "flux"), first)
    lora = make_lora(model, 1)
    with_lora(clone, lora, 1.0)
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    assert len(with_lora(clone, lora, 1.0).patches) == len(lora) // 2
    assert graphs() == 0 and compiled_model_of(model) is None


def test_a_second_compile_model_behind_the_first_takes_its_place(tiny_files):
    model = load_as("core", "wan", tiny_files["wan"])
    first, compiled_model = compiled(model, cache_size_limit=8)
    second, other = compiled(first, cache_size_limit=9)
    graphs = Graphs()
    sample(second, "wan")
    assert compiled_model_of(second) is other and compiled_model_of(first) is compiled_model
    assert graphs() == other.report().counts().graphs == 1 and compiled_model.report().counts().graphs == 0
    sample(first, "wan")
    assert compiled_model.report().counts().graphs == 1


def test_bypass_loras_work_and_are_taken_out_again(tiny_files):
    model = load_as("core", "flux", tiny_files["flux"])
    plain = sample(model, "flux")
    with torch.inference_mode():
        lora = make_lora(model, 1)
        bypassed = [comfy.sd.load_bypass_lora_for_models(model, None, lora, s, 0.0)[0] for s in (1.0, 0.5)]
    eager = [sample(patcher, "flux") for patcher in bypassed]
    comfy.model_management.unload_all_models()
    snapshot = Kept(model)  # with the forwards that core leaves on the layers
    graphs = Graphs()
    for patcher, expected in zip(bypassed, eager, strict=True):
        clone, compiled_model = compiled(patcher, dynamic="false")
        assert torch.equal(sample(clone, "flux"), expected) and (expected - plain).abs().max() > 0.1
        assert graphs() == compiled_model.report().counts().graphs
    comfy.model_management.unload_all_models()
    clone, _ = compiled(model, dynamic="false")
    assert torch.equal(sample(clone, "flux"), plain)
    comfy.model_management.unload_all_models()
    snapshot.check()


@pytest.mark.parametrize("backend", one_in(2, ["aot_eager", "eager"]))
@pytest.mark.parametrize("scope", one_in(2, SCOPES))
def test_a_compiled_model_that_nobody_holds_is_freed(scope, backend, tiny_files):
    if backend == "aot_eager" and scope != "blocks":
        pytest.skip("one scope is enough here")
    model = tiny.load_model("wan", tiny_files["wan"])
    clone, compiled_model = compiled(model, backend=backend, scope=scope)
    sample(clone, "wan")
    refs = [weakref.ref(part) for part in (model.model, model.model.diffusion_model, compiled_model)]
    comfy.model_management.unload_all_models()
    del model, clone, compiled_model
    comfy.model_management.cleanup_models()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
