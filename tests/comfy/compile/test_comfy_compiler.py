"""ComfyUI's own compiler, which newer releases have: it records no call that is compiled, swapped or tuned."""

import sys
import threading
from argparse import Namespace
from types import ModuleType

import comfy.cli_args
import pytest
import tiny
import torch
from comfy.ldm.flux.model import Flux
from comfy.patcher_extension import WrappersMP
from tessera.compile.attach import compile_model
from tessera.compile.settings import CompileSettings
from tessera.compile.tune.inputs import StepSize, step_inputs
from tessera.compile.tune.search import tune
from tessera.memory.comfy_compiler import without_comfy_compiler
from tessera.models.catalogue import registry
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.train.config.settings import MemoryOptions
from tiny.train.training import make_data, make_trainer, micro_batch

OPTION = "disable_comfy_compiler"
STEPS = 2


class Graph:
    """What a thread has recorded, as newer ComfyUI keeps it."""

    _comfy_active = False


class ModelPrefetch(ModuleType):
    """As `comfy.model_prefetch` of a release that has the compiler, with its calls counted."""

    def __init__(self, args):
        super().__init__("comfy.model_prefetch")
        self.args = args
        self.starts = 0
        self.ended = 0
        self.aborted = 0
        self.options = []
        self.MALLOC_GRAPHS = {}

    def malloc_graph_enabled(self, device):
        return not self.args.disable_comfy_compiler

    def malloc_graph_begin(self, device):
        if not self.malloc_graph_enabled(device):
            return
        self.starts += 1
        self.MALLOC_GRAPHS.setdefault(threading.get_ident(), Graph())._comfy_active = True

    def malloc_graph_end(self):
        graph = self.MALLOC_GRAPHS.get(threading.get_ident())
        if graph is not None and graph._comfy_active:
            self.ended += 1
            graph._comfy_active = False

    def cleanup_malloc_graph(self):
        self.aborted += self.MALLOC_GRAPHS.pop(threading.get_ident())._comfy_active

    @property
    def active(self):
        return [thread for thread, graph in self.MALLOC_GRAPHS.items() if graph._comfy_active]


@pytest.fixture
def recording(monkeypatch):
    """A FLUX that records as such a release does: decided at the top of its forward."""
    monkeypatch.setattr(comfy.cli_args.args, OPTION, False, raising=False)
    prefetch, forward = ModelPrefetch(comfy.cli_args.args), Flux.forward

    def recorded(self, x, timestep, context, *args, transformer_options=None, **kwargs):
        options = transformer_options if transformer_options is not None else {}
        prefetch.options.append(options.get(OPTION))
        records = prefetch.malloc_graph_enabled(x.device)
        if records:
            prefetch.malloc_graph_begin(x.device)
        out = forward(self, x, timestep, context, *args, transformer_options=options, **kwargs)
        if records:
            prefetch.malloc_graph_end()
        return out

    monkeypatch.setattr(Flux, "forward", recorded)
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", prefetch)
    return prefetch


def sampled(model):
    with torch.inference_mode():
        return tiny.sample(model, "flux", steps=STEPS)


def as_it_was(model):
    return comfy.cli_args.args.disable_comfy_compiler is False and OPTION not in model.model_options.get(
        "transformer_options", {}
    )


@pytest.mark.parametrize("scope", ["blocks", "stack", "model"])
def test_a_compiled_model_is_not_recorded_and_others_are_again(tiny_flux, recording, scope):
    clone, compiled_model = compile_model(tiny_flux, CompileSettings("eager", scope=scope))
    picture = sampled(clone)
    assert compiled_model.report().counts().graphs > 0
    assert recording.starts == 0 and set(recording.options) == {True} and as_it_was(clone)
    assert torch.equal(sampled(tiny_flux), picture)
    assert recording.starts == recording.ended == STEPS and recording.options[-STEPS:] == [None] * STEPS


@pytest.mark.parametrize("with_compile", [False, True])
def test_a_model_whose_blocks_stream_is_not_recorded(tiny_flux, recording, with_compile):
    swapped, _ = swap(tiny_flux, SwapSettings(2))
    if with_compile:
        swapped, _ = compile_model(swapped, CompileSettings("eager"))
    sampled(swapped)
    assert recording.starts == 0 and len(recording.options) == STEPS and as_it_was(swapped)


def test_eager_is_measured_as_it_is_and_no_step_beside_compiled_ones_is_recorded(tiny_flux, recording):
    inputs = step_inputs(tiny_flux, StepSize(64, 64, text_length=16, cfg=1.0))
    eager: list[int] = []
    tune(tiny_flux, inputs, 600, [CompileSettings("eager")], lambda count, _: eager.append(recording.starts))
    assert eager[0] == 0 and eager[1] > 0 and recording.starts == eager[1] < len(recording.options)
    assert as_it_was(tiny_flux)


def test_after_an_error_it_is_as_before(tiny_flux, recording):
    def fail(executor, *args, **kwargs):
        raise InterruptedError

    clone, _ = compile_model(tiny_flux, CompileSettings("eager"))
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", fail)
    with pytest.raises(InterruptedError):
        sampled(clone)
    assert as_it_was(clone)


def test_compiler_is_off_afterwards_if_comfyui_was_started_without_it(tiny_flux, recording, monkeypatch):
    monkeypatch.setattr(comfy.cli_args.args, OPTION, True)
    sampled(compile_model(tiny_flux, CompileSettings("eager"))[0])
    assert comfy.cli_args.args.disable_comfy_compiler is True and recording.starts == 0


def test_other_threads_keep_it_meanwhile(monkeypatch):
    args = Namespace(disable_comfy_compiler=False)
    monkeypatch.setattr(comfy.cli_args, "args", args)
    inside = threading.Event()
    leave = threading.Event()
    values = []

    def other():
        with without_comfy_compiler((), {"transformer_options": {}}):
            inside.set()
            leave.wait(10)
            values.append(args.disable_comfy_compiler)

    thread = threading.Thread(target=other)
    with without_comfy_compiler((), {}):
        thread.start()
        assert inside.wait(10) and args.disable_comfy_compiler is True
    assert args.disable_comfy_compiler is False
    leave.set()
    thread.join()
    assert values == [True] and args.disable_comfy_compiler is False
    args.disable_comfy_compiler = True  # as other packs set it
    assert vars(args) == {OPTION: True} and args.disable_comfy_compiler is True


def test_a_comfyui_that_has_no_such_compiler_is_given_nothing(tiny_flux, monkeypatch):
    monkeypatch.delattr(comfy.cli_args.args, OPTION, raising=False)
    options = {}
    with without_comfy_compiler((), {"transformer_options": options}):
        assert options == {} and not hasattr(comfy.cli_args.args, OPTION)


def native_step(model, folder, monkeypatch, **changes):
    """A training step through ComfyUI's own forward."""
    monkeypatch.setattr(registry, "FAMILIES", ())
    trainer = make_trainer(model, make_data([(8, 8)], [5]), folder, **changes)
    trainer.train_step.forward_backward([micro_batch(0)])
    return trainer


MODES = {"plain": {}, "swapped": {"memory": MemoryOptions(blocks_to_swap=2)}, "compiled": {"backend": "aot_eager"}}


@pytest.mark.parametrize("mode", MODES)
def test_training_through_comfyui_s_own_forward_is_not_recorded(mode, tiny_flux, recording, tmp_path, monkeypatch):
    native_step(tiny_flux, tmp_path, monkeypatch, **MODES[mode]).close()
    assert recording.starts == 0 and recording.options and set(recording.options) == {True} and as_it_was(tiny_flux)


def test_recording_that_an_error_of_sampling_left_on_the_thread_is_ended(tiny_flux, recording, tmp_path, monkeypatch):
    recording.malloc_graph_begin(None)  # and no end, as a forward that ran out of memory leaves it
    other = threading.Thread(target=recording.malloc_graph_begin, args=(None,))
    other.start()
    other.join()
    native_step(tiny_flux, tmp_path, monkeypatch).close()
    assert recording.aborted == 1 and recording.active == [other.ident]


def test_an_error_in_a_forward_that_records_all_the_same_leaves_nothing_active(
    tiny_flux, recording, tmp_path, monkeypatch
):
    trainer = native_step(tiny_flux, tmp_path, monkeypatch)
    forward = Flux.forward

    def failing(self, *args, **kwargs):
        recording.starts += 1
        recording.MALLOC_GRAPHS.setdefault(threading.get_ident(), Graph())._comfy_active = True
        raise InterruptedError

    monkeypatch.setattr(Flux, "forward", failing)
    with pytest.raises(InterruptedError):
        trainer.train_step.forward_backward([micro_batch(0)])
    assert recording.starts == 1 and not recording.active
    monkeypatch.setattr(Flux, "forward", forward)
    trainer.close()
    finished = Graph()
    recording.MALLOC_GRAPHS[threading.get_ident()] = finished
    sampled(tiny_flux)  # records again, and what it has recorded stays for the next step
    assert recording.starts == recording.ended + 1 == STEPS + 1
    assert recording.MALLOC_GRAPHS[threading.get_ident()] is finished
