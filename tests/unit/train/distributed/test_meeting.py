"""Barriers of ranks: all go on, or none, whoever waits no longer; and what a device has queued is not waited for."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from comfy.model_management import InterruptProcessingException
from tessera.train.distributed import barrier, collectives, node
from tessera.train.distributed.barrier import Barrier, BrokenBarrier
from tessera.train.distributed.collectives import WorldOptions
from tessera.train.distributed.node import NodeRanks
from tessera.train.distributed.store import Topic
from tessera.train.distributed.world import World
from tessera.train.loop.gradient_sync import GradientSync
from tessera.train.report.errors import CannotContinue


@pytest.fixture
def store(monkeypatch):
    for module in (barrier, collectives):
        monkeypatch.setattr(module, "GRACE", 0.2)
    monkeypatch.setattr(node, "GRACE", 1.0)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def world_of(store, rank, size=2, interrupted=None, seconds=None):
    timeout = timedelta(seconds=seconds or (0.6 if interrupted is None else 60))
    world = World(rank, size, store, size, options=WorldOptions(timeout, barrier_before_sum=True))

    def check():
        if interrupted is not None and interrupted.is_set():
            raise InterruptProcessingException

    world.begin_run(check)
    return world


def meet(world, value=None):
    """Pass the barrier before the first sum."""
    return world.collectives.barrier("sum", 1, value, world.collectives.ranks)


def later(seconds, act):
    thread = threading.Timer(seconds, act)
    thread.start()
    return thread


def test_all_go_on_or_none_whenever_one_leaves(store):
    """Each of three ranks with a thread of its own, and one of them leaves at another moment each time."""
    stores = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(3)]
    ended = set()
    for number in range(60):
        outcomes = [None] * 3

        def arrive(rank, number=number, outcomes=outcomes):
            barrier = Barrier(stores[rank], f"barrier {number}", range(3), rank)
            waits = time.monotonic() + (number % 12 * 0.0004 if rank == 1 else 60)
            if rank == 2:
                time.sleep(number % 5 * 0.001)
            try:
                outcomes[rank] = barrier.wait(rank * 10, max(0.0, waits - time.monotonic()), lambda: False, None)
            except BrokenBarrier as broken:
                outcomes[rank] = broken.aborting_rank

        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(3)]
        [thread.start() for thread in threads]
        [thread.join(20) for thread in threads]
        assert outcomes in ([[0, 10, 20]] * 3, [1] * 3), outcomes
        ended.add(str(outcomes))
    assert len(ended) == 2  # both came about


def test_an_interrupt_is_raised_as_such_where_another_does_not_come_soon(store):
    interrupted = threading.Event()
    first, second = world_of(store, 0, interrupted=interrupted), world_of(store, 1)
    timer = later(0.3, interrupted.set)
    with pytest.raises(InterruptProcessingException):
        meet(first)
    timer.join()
    with pytest.raises(BrokenBarrier) as broken:  # who comes then does not wait
        meet(second)
    assert (broken.value.aborting_rank, broken.value.joins_sum) == (0, False)


def test_an_interrupt_waits_where_the_other_comes_soon(store):
    interrupted = threading.Event()
    interrupted.set()
    first, second = world_of(store, 0, interrupted=interrupted), world_of(store, 1)
    timer = later(0.1, lambda: meet(second, "b"))
    assert meet(first, "a") == ["a", "b"]
    timer.join()
    with pytest.raises(InterruptProcessingException):
        first.interrupts.raise_pending()


class Event:
    def __init__(self, is_done):
        self.is_done = is_done

    def query(self):
        return self.is_done


class Stream:
    def __init__(self, is_done):
        self.is_done = is_done

    def record_event(self):
        return Event(self.is_done)


class Gradients:
    """Stand-in for gradients on a card."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_sums_queued_behind_a_dead_device_are_aborted_and_the_device_named(cancelled, store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(is_done=True))
    interrupted = threading.Event()
    first, second = world_of(store, 0, interrupted=interrupted if cancelled else None), world_of(store, 1)
    peers, aborted = NodeRanks(first, range(2), None), []
    first.collectives.attach(peers)
    peers.gathered = Event(is_done=False)  # a gather to which the other has not come
    monkeypatch.setattr(peers, "abort_gathers", lambda: aborted.append(True))
    second.store.set(Topic.SUMMED_STEP, 2, "1")
    if cancelled:
        interrupted.set()
    with pytest.raises(InterruptProcessingException if cancelled else CannotContinue) as error:
        first.collectives.all_reduce(Gradients(), 3)
    assert cancelled or str(error.value).startswith("Device 1 did not get to the end of step 3")
    assert aborted == [True]
    with pytest.raises(BrokenBarrier):  # so nobody waits in the sum for this one
        meet(second)


class Failed:
    """Stand-in for what is asked of a card that has failed, and for a buffer on it."""

    def query(self):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    zero_ = record_event = query


@pytest.mark.parametrize("source", ["event", "queue", "buffer"])
def test_nobody_waits_for_a_device_that_has_failed_and_its_error_is_told(source, store, monkeypatch):
    stream = Stream(is_done=True)
    stream.record_event = (
        Failed().query if source == "queue" else lambda: Failed() if source == "event" else Event(True)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    first, second = (world_of(store, rank, interrupted=threading.Event(), seconds=15) for rank in range(2))
    errors = []

    def train():
        first.store.set(Topic.SUMMED_STEP, 3, "0")
        try:
            meet(first)
        except BrokenBarrier as broken:
            errors.append(first.collectives._missing_from_sum(3, broken.missing))

    thread = later(0.0, train)
    sync = GradientSync.__new__(GradientSync)
    sync.world = second
    sync.remaining_sums = 5
    sync.buffer = Failed()
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    if source != "buffer":
        with pytest.raises(torch.AcceleratorError):
            second.collectives.all_reduce(Gradients(), 3)
        sync.remaining_sums = 0  # as a sum that fails leaves it
    sync.abort(error, 3, lambda: None)
    thread.join(5)
    assert "Device 1 on " in str(errors[0]) and "illegal memory access" in str(errors[0])


def test_the_cause_is_told_where_a_signal_came_with_it(store):
    """The launcher ends all processes when one has ended; that is no Cancel."""
    interrupted = threading.Event()
    first, second = world_of(store, 0, interrupted=interrupted), world_of(store, 1)
    second.abort(RuntimeError("out of memory"), "It ran out of memory.")
    interrupted.set()
    with pytest.raises(CannotContinue, match="It ran out of memory"):
        meet(first)


def test_another_rank_of_those_that_did_not_come_is_named(store):
    first = world_of(store, 0, 3)
    first.store.set(Topic.SUMMED_STEP, 3, "0")
    assert str(first.collectives._missing_from_sum(3, [0, 2])).startswith("Device 2 did not get to the end of step 3")


@pytest.mark.parametrize("late", ["gradients", "gather"])
def test_a_device_comes_to_the_sum_when_its_work_is_done(late, store, monkeypatch):
    gradients, gather = Event(late != "gradients"), Event(late != "gather")
    stream = Stream(is_done=True)
    monkeypatch.setattr(stream, "record_event", lambda: gradients)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    first, second = world_of(store, 0), world_of(store, 1)
    peers = NodeRanks(first, range(2), None)
    peers.gathered = gather
    first.collectives.attach(peers)
    came = []
    other = threading.Thread(target=lambda: came.append(meet(second)))
    other.start()

    def end_work():
        came.append("work")
        gradients.is_done = gather.is_done = True

    timer = later(0.2, end_work)
    first.collectives._barrier_before_sum(torch.device("cuda", 0))
    other.join()
    timer.join()
    assert came == ["work", [None, None]]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_meeting_of_shared_blocks_ends_alike(cancelled, store):
    interrupted = threading.Event()
    first = world_of(store, 0, 3, interrupted if cancelled else None)
    third = world_of(store, 2, 3)
    first_ranks, third_ranks = NodeRanks(first, range(3), None), NodeRanks(third, range(3), None)
    errors = []

    def arrive():
        try:
            third_ranks.barrier("forward", False)
        except BaseException as error:
            errors.append(error)

    thread = later(0.0, arrive)
    if cancelled:
        interrupted.set()
    with pytest.raises(InterruptProcessingException if cancelled else CannotContinue) as error:
        first_ranks.barrier("forward", False)
    first.abort(error.value, str(error.value))
    thread.join()
    if cancelled:
        assert isinstance(errors[0], InterruptProcessingException)
    else:
        assert all("Device 1 did not get to share its part" in str(fault) for fault in (error.value, errors[0]))
    with pytest.raises(CannotContinue, match="gone"):
        first_ranks.abort(complete=True)


def test_gathers_that_a_failed_device_does_not_take_part_in_are_ended_and_its_error_is_told(store, monkeypatch):
    def failing(*args, **options):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(node, "gather_pieces", failing)
    first, second = (world_of(store, rank, 3, threading.Event()) for rank in range(2))
    first_ranks, second_ranks = (NodeRanks(world, range(2), None) for world in (first, second))
    aborted, messages = [], []
    monkeypatch.setattr(first_ranks, "abort_gathers", lambda: aborted.append(True))

    def arrive():
        try:
            first_ranks.barrier("forward", False)
        except CannotContinue as error:
            messages.append(str(error))

    thread = later(0.0, arrive)
    with pytest.raises(torch.AcceleratorError) as error:
        second_ranks.gather(torch.zeros(2), torch.zeros(1))
    sync = GradientSync.__new__(GradientSync)
    sync.world, sync.remaining_sums = second, 5

    def abort_gathers():
        second_ranks.abort(complete=False)
        raise error.value

    sync.abort(error.value, 3, abort_gathers)
    thread.join()
    assert aborted == [True] and "Device 1 on " in messages[0] and "illegal memory access" in messages[0]
    with pytest.raises(BrokenBarrier) as broken:  # on another machine
        meet(world_of(store, 2, 3))
    assert broken.value.aborting_rank == 1
