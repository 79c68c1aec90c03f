"""The gradients of every adapter in whole models equal an fp64 reference, in modes that a fixed seed draws."""

import random
import runpy
from itertools import product
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.lora.options import NetworkOptions
from tessera.train.settings import MemoryOptions
from tiny.adapters import ALGORITHMS, fill, fp64_model, gradients

HERE = Path(__file__).parent
FLUX = runpy.run_path(str(HERE / "test_gradients.py"))
FLUX2 = runpy.run_path(str(HERE / "test_flux2_gradients.py"))
WAN = runpy.run_path(str(HERE / "test_wan_gradients.py"))
QWEN = runpy.run_path(str(HERE / "test_qwen_gradients.py"))
BACKENDS, MODES, SWAPS, BATCHES = (None, "aot_eager"), ("none", "selective", "full"), (0, 2), (1, 3)
FP32 = 1e-4


def drawn(count, seed, backends=BACKENDS):
    """`count` modes for each algorithm: backend, checkpointing, swapped blocks, batch."""
    every = list(product(backends, MODES, SWAPS, BATCHES))
    source = random.Random(seed)
    return [(name, *mode) for name in ALGORITHMS for mode in source.sample(every, count)]


def moved(trainer):
    for index, adapter in enumerate(trainer.network.adapters.values()):
        fill(adapter, index)
    return trainer


def compare(trainer, reference, merged, leaves, loss, bound=FP32):
    found = gradients(trainer)
    expected_loss, _ = reference(merged)
    assert abs(loss - expected_loss) < bound * expected_loss
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items()}
    assert found.keys() == expected.keys()
    errors = {n: float((found[n] - e).norm()) / max(float(e.norm()), 1e-12) for n, e in expected.items()}
    assert max(errors.values()) < bound, max(errors.items(), key=lambda item: item[1])
    trainer.close()


def check_flux(model, file, folder, name, backend, mode, swap, batch, bound=FP32):
    data = tiny.make_data(FLUX["GRIDS"], [16, 16, 16])
    memory = MemoryOptions(checkpointing=mode, blocks_to_swap=swap)
    network = NetworkOptions(**ALGORITHMS[name])
    trainer = moved(
        tiny.make_trainer(model, data, folder, backend=backend, batch_size=batch, memory=memory, network=network)
    )
    shown = FLUX["BATCHES"][batch]
    loss = trainer.forward_backward([tiny.shown(*shown)])
    bare, merged, leaves = fp64_model(trainer, load_file(file))
    compare(trainer, lambda tensors: FLUX["reference_gradients"](bare, tensors, shown), merged, leaves, loss, bound)


# One compiled whole here, as that takes seconds; each layer compiles alone in test_adapters.
QUICK = [*drawn(1, 6, [None]), ("dora", "aot_eager", "selective", 2, 3)]


@pytest.mark.parametrize(("name", "backend", "mode", "swap", "batch"), QUICK)
def test_gradients_on_flux_equal_the_fp64_reference(tiny_files, tiny_flux, tmp_path, name, backend, mode, swap, batch):
    check_flux(tiny_flux, tiny_files["flux"], tmp_path, name, backend, mode, swap, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "mode", "swap", "batch"), drawn(4, 7))
def test_gradients_on_flux_in_more_modes(tiny_files, tiny_flux, tmp_path, name, backend, mode, swap, batch):
    check_flux(tiny_flux, tiny_files["flux"], tmp_path, name, backend, mode, swap, batch)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "lora"])
def test_gradients_in_bf16_stay_within_its_rounding(tmp_path, name):
    file = tiny.write_flux(tmp_path / "bf16.safetensors", dtype=torch.bfloat16)
    model = tiny.load_flux(file)
    model.set_model_compute_dtype(torch.bfloat16)
    model.model.manual_cast_dtype = torch.bfloat16
    check_flux(model, file, tmp_path, name, None, "none", 0, 3, FLUX["BF16"])


# Wan and Qwen-Image have the other two kinds of adapter below.
ON_FLUX2 = [("loha", None, "selective", 2, 1), ("oft", None, "full", 0, 3)]
REST_ON_FLUX2 = [case for case in drawn(2, 8) if case not in ON_FLUX2]


@pytest.mark.parametrize(
    ("name", "backend", "mode", "swap", "batch"),
    [*ON_FLUX2, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST_ON_FLUX2)],
)
def test_gradients_on_flux2_equal_the_fp64_reference(tiny_files, tmp_path, name, backend, mode, swap, batch):
    """Alone without references, as three with two each."""
    network, memory = NetworkOptions(**ALGORITHMS[name]), MemoryOptions(checkpointing=mode, blocks_to_swap=swap)
    file, data = tiny_files["flux2"], FLUX2["flux2_data"](None if batch == 1 else "index")
    settings = {"backend": backend, "batch_size": batch, "memory": memory, "network": network}
    trainer = moved(tiny.make_trainer(tiny.load_flux2(file), data, tmp_path, **settings))
    loss = trainer.forward_backward([tiny.shown(*range(batch))])
    bare, merged, leaves = fp64_model(trainer, load_file(file))
    compare(trainer, lambda tensors: FLUX2["reference_gradients"](bare, tensors, batch), merged, leaves, loss)


def test_gradients_on_wan_equal_the_fp64_reference(tmp_path):
    file = tiny.write_wan(tmp_path / "wan.safetensors", layers=2)
    network, memory = NetworkOptions(**ALGORITHMS["dora"]), MemoryOptions(checkpointing="full", blocks_to_swap=1)
    data, model = WAN["data_of"]("2.1-t2v"), tiny.load_wan(file)
    trainer = moved(tiny.make_trainer(model, data, tmp_path, memory=memory, network=network))
    shown = WAN["BATCHES"][1]
    loss = trainer.forward_backward([tiny.shown(*shown)])
    bare, merged, leaves = fp64_model(trainer, load_file(file))
    compare(trainer, lambda t: WAN["reference_gradients"](bare, t, "2.1-t2v", shown), merged, leaves, loss)


def test_gradients_on_qwen_image_equal_the_fp64_reference(tiny_files, tmp_path):
    network, memory = NetworkOptions(**ALGORITHMS["lokr"]), MemoryOptions(checkpointing="none", blocks_to_swap=1)
    file, data = tiny_files["qwen_image"], QWEN["three"]()
    trainer = moved(
        tiny.make_trainer(tiny.load_qwen_image(file), data, tmp_path, batch_size=3, memory=memory, network=network)
    )
    loss = trainer.forward_backward([tiny.shown(0, 1, 2)])
    bare, merged, leaves = fp64_model(trainer, load_file(file))
    compare(trainer, lambda t: QWEN["reference_gradients"](bare, t, (0, 1, 2), "index"), merged, leaves, loss)
