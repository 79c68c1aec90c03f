"""The policy of page-locking: where host memory is locked, and what the user is told."""

import pytest
from tessera.memory.host.pinning import RESERVED_RAM, choose_pinning

GB = 2**30


@pytest.mark.parametrize(
    ("mode", "available", "windows", "masters_locked", "said"),
    [
        ("on", 0, True, True, "as pin_memory asks"),
        ("off", 99 * GB, False, False, "as pin_memory asks"),
        ("auto", 99 * GB, False, True, "are page-locked."),
        ("auto", 99 * GB, True, False, "Windows limits"),
        ("auto", 20 * GB + RESERVED_RAM, False, True, "are page-locked."),
        ("auto", 20 * GB + RESERVED_RAM - 1, False, False, "locking them all would leave less than 4 GB of RAM"),
    ],
)
def test_masters_are_locked_where_that_is_safe(mode, available, windows, masters_locked, said) -> None:
    choice = choose_pinning(mode, "cuda", 20 * GB, available, windows)
    assert choice.pinned is masters_locked and said in choice.reason


def test_masters_that_lie_in_ram_already_take_no_more_of_it_when_they_are_locked() -> None:
    assert choose_pinning("auto", "cuda", 0, RESERVED_RAM, False).pinned
    assert not choose_pinning("auto", "cuda", 0, RESERVED_RAM - 1, False).pinned
