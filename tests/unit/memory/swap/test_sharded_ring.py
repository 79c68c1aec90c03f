"""The ring that several devices fill together: what lies in a slot when it is read, whatever the others need."""

import random
from contextlib import nullcontext

import pytest
import torch
from tessera.memory.swap.sharded import BACKWARD, DONE, FORWARD, ShardedBuffer, ShardedRing, ShardedSwap
from tessera.memory.weights.residency import FrozenModule, ResidentWeights

BLOCKS = 5


class Others:
    """Another rank, which needs something else now and then; pieces are known by their number."""

    def __init__(self, seed):
        self.count = 2
        self.index = 0
        self.random = random.Random(seed)
        self.requests = []
        self.aborted = []
        self.late = False
        self.pending = []

    def gather(self, output, piece):
        def copy():
            output[: len(piece)], output[len(piece) :] = piece, piece + 100

        self.pending.append(copy) if self.late else copy()

    def barrier(self, request, fresh):
        other = self.random.choice((FORWARD, BACKWARD, DONE)) if len(self.requests) % 5 else DONE
        self.requests.append((request, other))
        return [(request, fresh), (other, False)]

    def abort(self, complete):
        self.aborted.append(complete)


def ring_of(ranks, prefetch):
    pieces = [ShardedBuffer(torch.full((256,), j, dtype=torch.uint8), 2) for j in range(BLOCKS)]
    ring = ShardedRing(pieces, torch.device("cpu"), prefetch, ranks)
    ring.take()
    return ring


def test_a_block_lies_whole_in_its_slot_at_its_turn():
    for prefetch in (1, 2, 3):
        ranks = Others(prefetch)
        ring = ring_of(ranks, prefetch)
        choose = random.Random(prefetch)
        for turn in range(60):  # forwards that leave blocks out, backwards that stop early
            visited = sorted(choose.sample(range(BLOCKS), choose.randint(1, BLOCKS)))
            for j in visited if turn % 3 else visited[::-1]:
                (ring.forward if turn % 3 else ring.backward)(j)
                slot = ring.slots.tensor(j)
                assert slot[:256].eq(j).all() and slot[256:].eq(100 + j).all(), (turn, j)
            if turn % 7 == 0:
                ring.end_work()
        assert {request for request, _ in ranks.requests} == {FORWARD, BACKWARD, DONE}


def test_a_block_is_waited_for(monkeypatch):
    ranks = Others(0)
    ring = ring_of(ranks, 1)
    ranks.late = True

    def wait(copied):
        while ranks.pending:
            ranks.pending.pop(0)()

    monkeypatch.setattr(ring.stream, "wait", wait)
    for j in range(BLOCKS):
        ring.forward(j)
        assert ring.slots.tensor(j)[:256].eq(j).all()


@pytest.mark.parametrize("prefetch", [1, 2])
def test_the_blocks_ahead_are_asked_for_before_one_is_waited_for(prefetch, monkeypatch):
    ranks = Others(0)
    ring = ring_of(ranks, prefetch)
    gathered = []
    arrivals = []
    original = ranks.gather

    def gather(output, piece):
        gathered.append(int(piece[0]))
        original(output, piece)

    monkeypatch.setattr(ranks, "gather", gather)
    monkeypatch.setattr(ranks, "barrier", lambda request, fresh: [(request, fresh)])
    monkeypatch.setattr(ring.stream, "wait", lambda copied: arrivals.append(len(gathered)))
    for j in range(BLOCKS):
        ring.forward(j)
    assert gathered == list(range(BLOCKS)) and arrivals == [min(BLOCKS, j + 1 + prefetch) for j in range(BLOCKS)]
    gathered.clear()
    arrivals.clear()
    for j in reversed(range(BLOCKS)):
        ring.backward(j)
    absent = BLOCKS - 1 - prefetch  # the others are there at the turn
    assert gathered == list(reversed(range(absent))) and arrivals == [min(absent, n) for n in range(BLOCKS)]


@pytest.mark.parametrize("fails", [False, True])
def test_rank_that_leaves_says_whether_the_others_get_the_sweep_under_way(fails, monkeypatch):
    ranks = Others(0)
    ring = ring_of(ranks, 1)
    ring.forward(0)

    def gather(output, piece):
        raise torch.AcceleratorError("planted")

    if fails:
        monkeypatch.setattr(ranks, "gather", gather)
    with pytest.raises(torch.AcceleratorError) if fails else nullcontext():
        ring.abort()
    ring.abort()
    assert ranks.aborted == [not fails]


class Held(FrozenModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(300, dtype=torch.uint8))


def test_pieces_that_are_not_needed_any_more_are_not_copied_to_the_host():
    def swap():
        return ShardedSwap([Held(), Held()], torch.device("meta"), 1, Others(0))  # out of which nothing can be copied

    with pytest.raises(NotImplementedError):
        swap().release()
    swapped_weights = swap()
    ResidentWeights([swapped_weights], torch.device("cpu"), torch.device("cpu")).release()
    assert swapped_weights.ring.flat_weights == [] and not swapped_weights.ring.slots.tensors
