"""The slots' logic: which block is copied when, what is kept, what a failed copy leaves."""

from collections.abc import Callable

import pytest
import torch
from tessera.memory.swap.slot_ring import SlotRing
from torch import Tensor

CPU = torch.device("cpu")


def ring_of(blocks: int, prefetch: int, finish: Callable[[int], None] | None = None) -> tuple[SlotRing, list[int]]:
    """A ring of blocks filled with their number, of unlike sizes, and the list of what it copies."""
    masters = [torch.full((64 + j,), j, dtype=torch.uint8) for j in range(blocks)]
    copied: list[int] = []

    def note(j: int) -> None:
        copied.append(j)
        if finish is not None:
            finish(j)

    ring = SlotRing(masters, CPU, prefetch, note)
    ring.take()
    return ring, copied


def assert_holds(ring: SlotRing, j: int) -> None:
    ring.slots.check(j)
    assert torch.equal(ring.slots.tensor(j)[: ring.flat_weights[j].numel()], ring.flat_weights[j])


@pytest.mark.parametrize("prefetch", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
def test_a_pass_there_and_back_copies_two_times_what_has_no_slot(blocks: int, prefetch: int) -> None:
    ring, copied = ring_of(blocks, prefetch)
    slots = min(prefetch + 1, blocks)
    assert ring.slots.count == slots == len(ring.slots.tensors)
    for step in range(3):
        copies = ring.copies
        for j in range(blocks):
            ring.forward(j)
            assert_holds(ring, j)
        for j in reversed(range(blocks)):
            ring.backward(j)
            assert_holds(ring, j)
        # The first forward brings all of them; later ones find the first blocks there.
        assert ring.copies - copies == 2 * (blocks - slots) + (slots if step == 0 else 0)
        assert ring.slots.occupants == list(range(slots))
    assert len(copied) == ring.copies
    assert ring.bytes_copied == sum(ring.flat_weights[j].numel() for j in copied)


def test_blocks_are_copied_in_the_order_of_their_use_and_as_far_ahead_as_asked() -> None:
    ring, copied = ring_of(6, 2)
    ring.forward(0)
    assert copied == [0, 1, 2]
    ring.forward(1)
    assert copied == [0, 1, 2, 3]
    for j in range(2, 6):
        ring.forward(j)
    assert copied == [0, 1, 2, 3, 4, 5] and ring.slots.occupants == [3, 4, 5]
    ring.backward(5)
    ring.backward(4)
    assert copied[6:] == [2]  # the others are there at the turn
    ring.backward(3)
    assert copied[6:] == [2, 1]


def test_forwards_alone_bring_every_block_once_each_time() -> None:
    ring, copied = ring_of(5, 1)
    for _ in range(3):
        for j in range(5):
            ring.forward(j)
            assert_holds(ring, j)
    assert copied == [0, 1, 2, 3, 4] * 3


def test_a_block_that_is_there_is_neither_copied_nor_finished_again() -> None:
    ring, copied = ring_of(4, 1)
    for _ in range(3):
        ring.forward(2)
    assert copied == [2, 3]
    ring.invalidate()
    ring.forward(2)
    assert copied == [2, 3, 2, 3]


def test_a_jump_out_of_order_still_finds_the_right_block() -> None:
    ring, _ = ring_of(5, 2)
    for j in (0, 3, 1, 4, 4, 0, 2):
        ring.forward(j)
        assert_holds(ring, j)


def test_the_slots_are_as_large_as_the_largest_block_and_given_back() -> None:
    ring, _ = ring_of(3, 1)
    assert ring.slots.held_bytes() == 2 * 66
    ring.forward(0)
    ring.release()
    assert ring.slots.held_bytes() == 0
    ring.take()
    assert ring.slots.occupants == [None, None]
    ring.forward(2)
    assert_holds(ring, 2)


def test_a_copy_that_fails_leaves_no_slot_that_passes_for_a_block() -> None:
    fails = [True]

    def finish(j: int) -> None:
        if j == 1 and fails[0]:
            raise RuntimeError("out of memory")

    ring, copied = ring_of(4, 1, finish)
    with pytest.raises(RuntimeError, match="out of memory"):
        ring.forward(0)
    assert ring.slots.occupants == [None, None]
    fails[0] = False
    ring.forward(1)
    assert_holds(ring, 1)
    assert copied == [0, 1, 1, 2]


def test_a_slot_that_holds_another_block_does_not_pass() -> None:
    ring, _ = ring_of(4, 1)
    ring.forward(0)
    with pytest.raises(AssertionError, match="slot 0 holds block 0 in place of 2"):
        ring.slots.check(2)


def test_finish_may_change_the_slot_and_never_reaches_the_master() -> None:
    def finish(j: int) -> None:
        slots: list[Tensor] = ring.slots.tensors
        slots[j % ring.slots.count].fill_(100 + j)

    ring, _ = ring_of(3, 1, finish)
    for j in range(3):
        ring.forward(j)
        assert int(ring.slots.tensor(j)[0]) == 100 + j
    assert [int(master[0]) for master in ring.flat_weights] == [0, 1, 2]
