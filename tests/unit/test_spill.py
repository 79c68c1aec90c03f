"""Spill into shared memory: what cannot be on the device."""

import torch
from tessera.memory.spill import SpillWatch, spilled_bytes

GB = 2**30


def test_what_goes_beyond_what_was_free_has_spilled() -> None:
    assert spilled_bytes(reserved=7 * GB, reserved_before=GB, free_before=6 * GB) == 0
    assert spilled_bytes(reserved=9 * GB, reserved_before=GB, free_before=6 * GB) == 2 * GB


def test_a_little_more_may_be_what_other_programs_gave_back() -> None:
    assert spilled_bytes(reserved=6 * GB + GB // 8, reserved_before=0, free_before=6 * GB) == 0


def test_the_host_has_nowhere_to_spill_to() -> None:
    assert SpillWatch(torch.device("cpu")).told() is None
