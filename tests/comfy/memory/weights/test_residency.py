"""While a run trains, ComfyUI may take its weights off the device: they really go, and the run takes them again."""

import comfy.model_management
import pytest
import tiny
import torch
from tessera.train.report.errors import TrainingStopped
from tessera.train.report.observer import SilentObserver
from tiny.compile.compiling import Graphs


def loaded_bytes(trainer) -> int:
    return sum(module.held_bytes() for module in trainer.placed.weights.transformer.frozen_modules())


def registered(trainer) -> bool:
    return any(entry.model is trainer.placed.weights.resident for entry in comfy.model_management.current_loaded_models)


class UnloadsAfter(SilentObserver):
    """Does what a preview's VAE makes ComfyUI do: asks for all memory after some steps."""

    def __init__(self, steps: set[int]):
        self.steps = steps
        self.held_after: list[int] = []

    def step(self, report) -> None:
        if report.step in self.steps:
            comfy.model_management.unload_all_models()
            self.held_after.append(loaded_bytes(self.trainer))


def run(model, folder, observer, **settings):
    trainer = tiny.make_trainer(model, tiny.make_data([(4, 6), (6, 4)], [16, 16]), folder, steps=5, **settings)
    observer.trainer = trainer
    tiny.observe(trainer, observer)
    trainer.run()
    return trainer


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_weights_that_comfyui_unloads_are_freed_and_taken_again(tiny_flux, tmp_path, backend):
    quiet = run(tiny_flux, tmp_path, UnloadsAfter(set()), backend=backend)
    torch._dynamo.reset()
    graphs = Graphs()
    disturbed = run(tiny_flux, tmp_path, observer := UnloadsAfter({2, 4}), backend=backend)
    assert observer.held_after == [0, 0]
    assert disturbed.progress.loss == quiet.progress.loss
    for name, master in disturbed.network.master_weights().items():
        assert torch.equal(master, quiet.network.master_weights()[name])
    assert graphs() == (2 if backend else 0)


def test_a_patched_model_is_patched_again_when_its_weights_return(tiny_flux, tmp_path):
    patched = tiny_flux.clone()
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    patched.add_patches({key: ("diff", (0.1 * torch.ones_like(patched.model.state_dict()[key]),))})
    plain = run(tiny_flux, tmp_path, UnloadsAfter(set()))
    quiet = run(patched, tmp_path, UnloadsAfter(set()))
    disturbed = run(patched, tmp_path, UnloadsAfter({1, 2, 3}))
    assert disturbed.progress.loss == quiet.progress.loss != plain.progress.loss


def test_weights_are_read_from_the_masters_after_the_patched_model_was_loaded_in_between(tiny_flux, tmp_path):
    """As a preview does, load the MODEL, which writes the patches into the modules that we read from."""
    patched = tiny_flux.clone()
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    patched.add_patches({key: ("diff", (0.1 * torch.ones_like(patched.model.state_dict()[key]),))})

    class Previews(UnloadsAfter):
        def step(self, report) -> None:
            super().step(report)
            comfy.model_management.load_models_gpu([patched])

    quiet = run(patched, tmp_path, UnloadsAfter(set()))
    disturbed = run(patched, tmp_path, Previews({1, 3}))
    assert disturbed.progress.loss == quiet.progress.loss


def test_a_read_that_fails_half_way_leaves_nothing_behind(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 6)], [16]), tmp_path)
    trainer.placed.weights.resident.detach()
    assert loaded_bytes(trainer) == 0
    broken = trainer.placed.weights.resident.modules[7]
    broken.take = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(TrainingStopped, match="Out of memory at step 1"):
        trainer.run()
    assert loaded_bytes(trainer) == 0


def test_comfyui_knows_the_size_of_a_run_and_forgets_it_at_the_end(tiny_flux, tmp_path):
    trainer = run(tiny_flux, tmp_path, UnloadsAfter(set()))
    assert registered(trainer)
    # On the CPU the weights are ComfyUI's own, shared: as many bytes as the model has, and no copy of them.
    weights = sum(p.numel() * p.element_size() for p in tiny_flux.model.diffusion_model.parameters())
    assert trainer.placed.weights.resident.loaded_size() == loaded_bytes(trainer) == weights
    modules = trainer.placed.weights.transformer.frozen_modules()
    resident = trainer.placed.weights.resident
    trainer.close()
    assert sum(module.held_bytes() for module in modules) == 0
    assert not any(entry.model is resident for entry in comfy.model_management.current_loaded_models)
