"""Speed at which swapped blocks come out of the mapped file that they lie in, and what a plan makes of it."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import tiny
import torch
from tessera.memory.host import file_speed
from tessera.memory.host.file_speed import in_cache, measure_file_bandwidth, pieces_of, read_speeds
from tessera.memory.host.mapped_file import KeepMapped
from tessera.memory.swap.training import frozen_modules
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.train.config.settings import MemoryOptions
from tessera.train.placement import auto
from tessera.train.placement.auto import AutomaticMemory, StepCost

GB = 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")


def in_file(path: Path):
    with KeepMapped():
        return tiny.load_flux(path)


def set_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=available))


@pytest.mark.parametrize(("sizes", "count", "size"), [((100, 7, 5000), 32, 16), ((10, 10), 3, 100), ((64,), 4, 16)])
def test_pieces_are_spread_over_all_of_the_bytes(sizes, count, size) -> None:
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    pieces = pieces_of(list(whole.split(list(sizes))), count, size)
    starts = [piece.data_ptr() - whole.data_ptr() for piece in pieces]
    assert len(pieces) == count and all(0 < piece.numel() <= size for piece in pieces)
    assert all(start + piece.numel() <= after for piece, (start, after) in zip(pieces, pairwise(starts), strict=False))
    assert all(after - start <= -(-sum(sizes) // count) for start, after in pairwise([*starts, sum(sizes)]))


def test_the_speed_of_the_disk_is_that_of_what_the_cache_does_not_hold(monkeypatch) -> None:
    """Two pieces of 1000 bytes: 1 s off the disk, 0.1 s out of the cache."""
    pieces = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
    read: list[int] = []

    def seconds(buffer: torch.Tensor, piece: torch.Tensor) -> float:
        read.append(0 if piece is pieces[0] else 1)
        return 1.0 if read == [0, 1] else 0.1

    monkeypatch.setattr(file_speed, "_seconds", seconds)
    monkeypatch.setattr(file_speed, "in_cache", lambda piece: piece is pieces[0])
    assert read_speeds(pieces) == (pytest.approx(1000.0), pytest.approx(10_000.0))
    assert read == [0, 1, 0, 1]
    # The cache holds them all: the disk stays unknown.
    read.clear()
    monkeypatch.setattr(file_speed, "in_cache", lambda piece: True)
    assert read_speeds(pieces) == (pytest.approx(2000 / 1.1), pytest.approx(10_000.0))


def test_only_what_lies_in_a_file_and_may_stay_there_is_measured(tiny_files) -> None:
    weights = list(in_file(tiny_files["flux"]).model.parameters())
    bandwidth = measure_file_bandwidth(weights, "auto", 5 * GB)
    assert bandwidth is not None and 0 < bandwidth.disk <= bandwidth.cache
    assert (bandwidth.memory, bandwidth.room) == (5 * GB, GB)
    bandwidth_of_two = measure_file_bandwidth(weights, "auto", 10 * GB, processes=2)
    assert bandwidth_of_two is not None and (bandwidth_of_two.memory, bandwidth_of_two.room) == (
        10 * GB,
        GB,
    )  # the page cache is there once
    assert all(in_cache(piece) for piece in pieces_of(weights))  # they have been read
    assert measure_file_bandwidth(weights, "on", 5 * GB) is None
    assert measure_file_bandwidth([torch.zeros(8)], "auto", 5 * GB) is None


def test_a_runs_plan_reckons_with_the_file(tiny_files, tmp_path, monkeypatch) -> None:
    """Four blocks that weigh as much as they keep for backward, on a device with room for all but half a block. To
    stream them is faster than to compute again, unless they lie in a slow file."""
    monkeypatch.setattr(auto, "link_bandwidth", lambda device: 25e9)
    monkeypatch.setattr(auto, "free_memory", lambda device: 10**12)
    memory = MemoryOptions(checkpointing="auto", blocks_to_swap=-1)
    plans = {}
    for name, available, disk in (("memory", 64 * GB, 1e3), ("file", 0, 1.9e9), ("slow file", 0, 1e3)):
        set_memory(monkeypatch, available)
        monkeypatch.setattr(file_speed, "read_speeds", lambda pieces, disk=disk: (disk, 8e9))
        trainer = tiny.make_trainer(
            in_file(tiny_files["flux"]), tiny.make_data([(4, 4)], [16]), tmp_path, memory=memory
        )
        measured = trainer.placed.memory.automatic.measured
        assert all(0.97 * cost.weights < cost.in_file <= cost.weights for cost in measured.blocks)
        blocks = [replace(b, saved=b.weights, working=0, forward=1e-3, backward=2e-3) for b in measured.blocks]
        whole = measured.other_bytes + sum(block.weights + block.saved for block in blocks)
        machine = replace(measured.machine, free=whole - max(block.weights for block in blocks) // 2)
        step_cost = StepCost(tuple(blocks), measured.other_bytes, machine)
        plans[name] = AutomaticMemory(memory, step_cost, trainer.context.family.forward.swap_order).plan
        trainer.close()
    for name in ("memory", "file"):
        assert plans[name].checkpointing == "none"
    assert "4 of 4 blocks stream from RAM, 1 ahead at 25 GB/s" in plans["memory"].text
    assert "4 of 4 blocks stream from the model file at 1.9 GB/s, 1 ahead" in plans["file"].text
    assert plans["slow file"].checkpointing == "selective" and not plans["slow file"].swapped


def test_sampling_says_how_fast_the_file_is(tiny_files, monkeypatch) -> None:
    model = in_file(tiny_files["flux"])
    whole = model.model_size()
    set_memory(monkeypatch, 0)
    monkeypatch.setattr(file_speed, "read_speeds", lambda pieces: (1.9e9, 8e9))
    monkeypatch.setattr("comfy.model_management.extra_reserved_memory", lambda: 0)
    monkeypatch.setattr(model.model, "memory_required", lambda input_shape: 0)
    monkeypatch.setattr("comfy.model_management.get_free_memory", lambda device: whole * 3 // 4)
    monkeypatch.setattr("comfy.model_management.current_loaded_models", [])
    monkeypatch.setattr("tessera.models.catalogue.swapped_model.link_bandwidth", lambda device: 25e9)
    _, notes = swap(model, SwapSettings(-1))
    assert "blocks stream from the model file at 1.9 GB/s, 1 ahead." in notes[0]


def test_the_weights_outside_of_the_blocks_are_a_part_of_the_plan(tiny_files, tmp_path) -> None:
    memory = MemoryOptions(checkpointing="auto", blocks_to_swap=-1)
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(tiny.load_flux(tiny_files["flux"]), data, tmp_path, memory=memory)
    inside = {id(m) for _, block in trainer.placed.weights.transformer.blocks() for m in frozen_modules(block).values()}
    outer = [m for m in trainer.placed.weights.transformer.frozen_modules() if id(m) not in inside]
    # AdamW: each with two moments, the joined gradient and the one that autograd makes before it is part of that.
    lora = 20 * sum(p.numel() for p in trainer.network.parameters())
    least = sum(module.held_bytes() for module in outer) + lora
    assert least > 2**20 and least <= trainer.placed.memory.automatic.measured.other_bytes < 1.1 * least
