"""Samples of an optimizer step that each device takes."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# By its path: torch is not there in this tier, and train/ imports it elsewhere.
spec = importlib.util.spec_from_file_location("share", ROOT / "train" / "distributed" / "share.py")
assert spec is not None and spec.loader is not None
share = importlib.util.module_from_spec(spec)
sys.modules["share"] = share
spec.loader.exec_module(share)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_sample_of_a_step_is_taken_once_and_all_devices_take_as_many(size):
    dealt = 0
    for batch_size in range(1, 13):
        for accumulation in range(1, 13):
            try:
                shares = [share.shard_step(rank, size, batch_size, accumulation) for rank in range(size)]
            except ValueError:
                continue
            dealt += 1
            pairs = [
                (micro, place)
                for device_share in shares
                for micro in device_share.micro_batches
                for place in device_share.samples
            ]
            whole = [(micro, place) for micro in range(accumulation) for place in range(batch_size)]
            assert sorted(pairs) == whole
            assert len({device_share.micros * device_share.rows for device_share in shares}) == 1
            assert all(
                device_share.part * device_share.rows == device_share.samples[0]
                and device_share.parts * device_share.rows == batch_size
                for device_share in shares
            )
    # Whatever can be shared is: a step of as many samples as devices, at least.
    assert dealt >= sum(n % size == 0 for n in range(1, 13)) * 12


def test_alone_a_device_takes_the_whole_step():
    assert share.shard_step(0, 1, 3, 2) == share.Share(0, 1, 0, 2, 3)


def test_micro_batches_are_halved_before_whole_ones_are_dealt_out():
    assert [share.shard_step(rank, 2, 4, 2).samples for rank in range(2)] == [range(2), range(2, 4)]
    assert [share.shard_step(rank, 2, 1, 4).micro_batches for rank in range(2)] == [range(2), range(2, 4)]
    four = [share.shard_step(rank, 4, 2, 2) for rank in range(4)]
    assert [(device_share.part, device_share.first_micro) for device_share in four] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("size", "batch_size", "accumulation", "larger", "larger_accumulation"),
    [(2, 3, 1, 4, 2), (4, 1, 2, 2, 4), (3, 4, 2, 6, 3)],
)
def test_counts_that_can_not_be_shared_are_told_with_the_next_that_can(
    size, batch_size, accumulation, larger, larger_accumulation
):
    said = f"set batch_size to {larger}, or gradient_accumulation to {larger_accumulation}"
    with pytest.raises(ValueError, match=said):
        share.shard_step(0, size, batch_size, accumulation)
    for rank in range(size):
        share.shard_step(rank, size, larger, accumulation)
        share.shard_step(rank, size, batch_size, larger_accumulation)
