"""Spill into shared memory: what cannot be on the device."""

import pytest
import torch
from tessera.memory.host import sysmem_fallback
from tessera.memory.host.sysmem_fallback import SysmemMonitor

GB = 2**30


class Card:
    """A card of 8 GB as the driver and torch tell of it."""

    def __init__(self) -> None:
        self.reserved, self.other_programs = 0, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return max(0, 8 * GB - self.reserved - self.other_programs), 8 * GB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "mem_get_info", card.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", card.memory_reserved)
    monkeypatch.setattr(sysmem_fallback, "is_windows", lambda: True)
    return card


def test_memory_beyond_the_free_has_spilled_and_is_told_once(card: Card) -> None:
    card.reserved, card.other_programs = GB, GB
    watch = SysmemMonitor(torch.device("cuda"))
    card.reserved = 7 * GB
    assert watch.message() is None
    card.reserved = 9 * GB
    message = watch.message()
    assert message is not None and message.startswith("About 2.0 GB are in shared GPU memory")
    assert watch.message() is None


def test_a_little_more_may_be_what_other_programs_gave_back(card: Card) -> None:
    watch = SysmemMonitor(torch.device("cuda"))
    card.reserved = 8 * GB + GB // 8
    assert watch.message() is None


def test_memory_that_others_give_back_while_some_is_free_can_be_held_too(card: Card) -> None:
    card.other_programs = 5 * GB
    watch = SysmemMonitor(torch.device("cuda"))
    card.other_programs, card.reserved = 0, 6 * GB
    assert watch.message() is None
    card.reserved = 8 * GB
    assert watch.message() is None
    card.reserved = 10 * GB
    message = watch.message()
    assert message is not None and message.startswith("About 2.0 GB")


def test_the_host_has_nowhere_to_spill_to() -> None:
    assert SysmemMonitor(torch.device("cpu")).message() is None
