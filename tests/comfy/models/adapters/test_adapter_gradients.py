"""The gradients of every adapter in whole models equal an fp64 reference, in modes that a fixed seed draws."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from safetensors.torch import load_file
from tessera.lora.options import NetworkOptions
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.lora.adapters import ALGORITHMS, fill, fp64_model, gradients
from tiny.models.family_case import computing_in
from tiny.train.gradient_check import BF16, FP32
from tiny.train.reference_gradients import reference_gradients
from tiny.train.runs import training_data

BACKENDS = (None, "aot_eager")
MODES = ("none", "selective", "full")
SWAPS = (0, 2)
BATCHES = (1, 3)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def draw_modes(count, seed, backends=BACKENDS):
    """`count` modes for each algorithm: backend, checkpointing, swapped blocks, batch."""
    modes = list(product(backends, MODES, SWAPS, BATCHES))
    source = random.Random(seed)
    return [(name, *mode) for name in ALGORITHMS for mode in source.sample(modes, count)]


def check(
    files: Any, folder: Path, case_name: str, batch: str, mode: tuple[Any, ...], dtype: torch.dtype = torch.float32
) -> None:
    """mode: algorithm, backend, checkpointing, swapped blocks, number of samples."""
    name, backend, checkpointing, swap, count = mode
    case, bound = CASES[case_name], FP32 if dtype == torch.float32 else BF16
    file = files(case, dtype=dtype)
    memory = MemoryOptions(checkpointing=checkpointing, blocks_to_swap=swap)
    settings = {
        "backend": backend,
        "batch_size": count,
        "memory": memory,
        "network": NetworkOptions(**ALGORITHMS[name]),
    }
    data = training_data(*case.batches()[batch]())
    trainer = tiny.make_trainer(computing_in(case.load(file), dtype), data, folder, **settings)
    for index, adapter in enumerate(trainer.network.adapters.values()):
        fill(adapter, index)
    loss = trainer.train_step.forward_backward([tiny.micro_batch(*range(count))])
    bare, merged, leaves = fp64_model(trainer, load_file(file))
    expected_loss, _ = reference_gradients(case, bare, merged, range(count))
    actual = gradients(trainer)
    assert abs(loss - expected_loss) < bound * expected_loss
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items()}
    assert actual.keys() == expected.keys()
    errors = {n: float((actual[n] - e).norm()) / max(float(e.norm()), 1e-12) for n, e in expected.items()}
    assert max(errors.values()) < bound, max(errors.items(), key=lambda item: item[1])
    trainer.close()


def mode_id(mode: Any) -> str:
    return "-".join(str(part) for part in mode)


ON_FLUX = [*draw_modes(1, 6, [None]), ("dora", "aot_eager", "selective", 2, 3), *draw_modes(2, 7)]


@pytest.mark.parametrize(
    "mode",
    one_in(8, [(mode,) for mode in dict.fromkeys(ON_FLUX)]),
    ids=lambda mode: "-".join(str(part) for part in mode),
)
def test_gradients_on_flux_equal_the_fp64_reference(case_file, tmp_path, mode):
    check(case_file, tmp_path, "flux-dev", "shapes", mode)


@pytest.mark.parametrize("name", one_in(2, [name for name in ALGORITHMS if name != "lora"]))
def test_gradients_in_bf16_stay_within_its_rounding(case_file, tmp_path, name):
    check(case_file, tmp_path, "flux-dev", "shapes", (name, None, "none", 0, 3), torch.bfloat16)


ON_FLUX2 = [("loha", None, "selective", 2, 1), ("oft", None, "full", 0, 3), *draw_modes(1, 8)]


@pytest.mark.parametrize(
    "mode",
    one_in(6, [(mode,) for mode in dict.fromkeys(ON_FLUX2)]),
    ids=lambda mode: "-".join(str(part) for part in mode),
)
def test_gradients_on_flux2_equal_the_fp64_reference(case_file, tmp_path, mode):
    """Alone without references, as three with two each."""
    check(case_file, tmp_path, "flux2-dev", "shapes" if mode[-1] == 1 else "index", mode)


# Wan and Qwen-Image have the other two kinds of adapter.
ELSEWHERE = {
    "wan-2.1-t2v": ("shapes", ("dora", None, "full", 1, 1)),
    "qwen-image": ("shapes", ("lokr", None, "none", 1, 3)),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_gradients_on_other_families_equal_the_fp64_reference(case_file, tmp_path, case):
    check(case_file, tmp_path, case, *ELSEWHERE[case])
