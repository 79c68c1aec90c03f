"""Messages of ranks by the keys of their store, and the time that they wait for it."""

import threading
import time
from datetime import timedelta

import comfyui_version
import pytest
import torch
import torch.distributed as dist
from comfy.model_management import InterruptProcessingException
from tessera.train.config.environment import VERSION
from tessera.train.distributed.collectives import WorldOptions
from tessera.train.distributed.ranks import check_alike, rank_facts
from tessera.train.distributed.store import Topic
from tessera.train.distributed.world import World
from tessera.train.report.errors import CannotContinue

KEY = Topic.BROADCAST, "key"


def two_ranks(**options):
    """Two ranks of a run, in one process."""
    store = dist.HashStore()
    worlds = [World(rank, 2, store, 2, options=WorldOptions(**options)) for rank in range(2)]
    for world in worlds:
        world.begin_run(lambda: None)
    return worlds


@pytest.fixture
def worlds():
    return two_ranks()


def test_a_device_waits_longer_for_the_first_than_for_a_step():
    options = WorldOptions()
    assert timedelta(minutes=30) <= options.step_timeout and 2 * 3600 <= options.first_timeout


def test_a_wait_ends_with_the_value_the_limit_or_a_cancel_and_is_counted():
    first, second = two_ranks(first_timeout=0.2)
    with pytest.raises(CannotContinue, match="Another device has not answered for 0 s"):
        first.wait(*KEY)
    seconds = first.wait_time.seconds
    assert seconds >= 0.2
    second.store.set(KEY[0], 3, KEY[1])
    assert first.wait(*KEY) == 3
    with pytest.raises(CannotContinue):
        first.wait(*KEY, lambda value: value > 3)
    assert first.wait_time.seconds >= seconds + 0.2

    def cancelled():
        raise InterruptProcessingException

    first.interrupts.watch(cancelled)
    assert first.wait(*KEY) == 3
    with pytest.raises(InterruptProcessingException):
        first.wait(Topic.BROADCAST, "other key")
    assert first.facts() == {"world_size": 2, "seconds_waiting": round(first.wait_time.seconds, 3)}


def test_a_value_that_came_before_the_end_is_taken(worlds, monkeypatch):
    """Both ranks see that they differ, and the second says first that it ends: the first one still tells of what."""
    first, second = worlds
    get, reads = first.store.get, list[str]()

    def get_late(topic, name=""):
        value = get(topic, name)
        if name == "facts/1" and not reads:
            reads.append(name)
            second.store.set_once(topic, [{"model": "b"}], name)
            second.abort(InterruptProcessingException(), "")
        return value

    monkeypatch.setattr(first.store, "get", get_late)
    with pytest.raises(CannotContinue, match="Device 1 has another model than device 0; give all of them the same"):
        check_alike(first, "facts", {"model": "a"})
    with pytest.raises(InterruptProcessingException):
        first.wait(Topic.BROADCAST, "nothing else")


def test_first_of_two_reasons_is_told(worlds):
    first, second = worlds
    for sentence in ("It ran out of memory.", "The others are gone."):
        with pytest.raises(RuntimeError), second.aborting():
            raise RuntimeError(sentence)
    assert first.faults.first().rank == 1 and not first.faults.first().cancelled
    with pytest.raises(CannotContinue, match=r"^Device 1 on .* ended the run: It ran out of memory\.$"):
        first.wait(*KEY)
    with pytest.raises(InterruptProcessingException):  # which has nobody to tell it to
        second.wait(*KEY)


def test_a_run_reads_nothing_of_the_one_before(worlds):
    first, second = worlds
    second.store.set(KEY[0], 1, KEY[1])
    for world in worlds:
        world.wait_time.seconds = world.collectives.sums = 5
        world.begin_run(lambda: None)
        assert (world.wait_time.seconds, world.collectives.sums) == (0, 0)
    assert first.store.get(*KEY) is None
    second.store.set(KEY[0], 2, KEY[1])
    assert first.store.get(*KEY) == 2


def test_messages_of_two_topics_never_share_a_key(worlds):
    """A state's step and what ranks waited for were once posted under one key."""
    first, second = worlds
    for number, topic in enumerate(Topic):
        first.store.set(topic, number, "saved")
    assert [second.store.get(topic, "saved") for topic in Topic] == list(range(len(Topic)))


def test_a_message_to_wait_for_is_written_once(worlds):
    first, second = worlds
    assert first.broadcast("saved", [1]) == first.broadcast("saved", [1]) == second.broadcast("saved", None) == [1]
    with pytest.raises(AssertionError, match="saved is used for"):
        first.broadcast("saved", [2])


def test_the_first_decides_for_all(worlds):
    first, second = worlds
    assert first.broadcast("folder", "a") == second.broadcast("folder", "b") == "a"


FACTS = rank_facts("m", "d", "r", "state-000002.tessera", shard=True)


def test_versions_files_run_state_and_sharing_have_to_be_alike():
    assert FACTS == {
        "Tessera": VERSION,
        "ComfyUI": comfyui_version.__version__,
        "torch": torch.__version__,
        "model": "m",
        "data": "d",
        "run": "r",
        "state": "state-000002.tessera",
        "shard": "on",
    }
    assert rank_facts("m", "d", "r", "")["shard"] == "off"


@pytest.mark.parametrize("fact", [*FACTS, "kind of matmul"])
def test_each_difference_is_told_with_its_mend_by_the_first_alone(fact, worlds):
    facts = FACTS | {"kind of matmul": "fp8"}
    first, second = worlds
    second.store.set(Topic.GATHER, [facts | {fact: "x"}], "facts/1")
    with pytest.raises(CannotContinue) as error:
        check_alike(first, "facts", facts)
    comparison = "" if fact in ("model", "data", "run") else f" (x; device 0 has {facts[fact]})"
    assert str(error.value).startswith(f"Device 1 has another {fact} than device 0{comparison}; ")
    with pytest.raises(InterruptProcessingException):
        check_alike(second, "facts", facts | {fact: "x"})


def test_the_others_begin_when_the_first_is_done_and_end_where_it_fails(worlds):
    first, second = worlds
    order = []
    began = threading.Event()
    is_in = threading.Event()

    def follow(name):
        began.set()
        try:
            with second.after_first(name, lambda: None):
                order.append("second")
        except InterruptProcessingException:
            order.append("ended")

    def lead(name):
        thread = threading.Thread(target=follow, args=(name,))
        with first.after_first(name, lambda: None):
            thread.start()
            began.wait()
            is_in.wait(0.3)
            order.append("first")
            if name == "b":
                raise ValueError("no file")
        return thread

    lead("a").join()
    with pytest.raises(ValueError, match="no file"):
        lead("b")
    end = time.monotonic() + 20
    while len(order) < 4:
        assert time.monotonic() < end, order
        time.sleep(0.01)
    assert order == ["first", "second", "first", "ended"]
    assert "no file" in second.faults.first().sentence


def test_prepare_dataset_waits_for_the_first(worlds, monkeypatch):
    from tessera.nodes.data import prepare as module

    first, second = worlds
    first.abort(InterruptProcessingException(), "")
    monkeypatch.setattr(module, "current_world", lambda: second)
    monkeypatch.setattr(module, "prepare", lambda *_, **__: pytest.fail("the others must not encode"))
    with pytest.raises(InterruptProcessingException):
        module.TesseraPrepareDataset.execute.__func__(NodeStub, None, None, None)


class NodeStub:
    class hidden:
        unique_id = "1"


class Done:
    """Stand-in for a sum that is over."""

    def is_completed(self):
        return True

    def wait(self):
        pass


class OnCard(torch.Tensor):
    """A tensor that says that it lies on a card."""

    device = torch.device("cuda", 0)


def test_gradients_on_a_card_are_summed_in_host_memory_without_nccl(worlds, monkeypatch):
    first, _ = worlds
    devices = []

    def all_reduce(buffer, async_op):
        devices.append(buffer.device.type)
        buffer.mul_(2)
        return Done()

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for count in (3, 3, 5):
        buffer = torch.arange(float(count))
        on_card = buffer.as_subclass(OnCard)
        first.collectives.all_reduce(on_card, 1)
        assert buffer.tolist() == [2.0 * number for number in range(count)]
    assert devices == ["cpu"] * 3 and first.collectives.sums == 3


def test_seconds_of_a_sum_on_the_device_are_counted_once(worlds):
    class Event:
        def elapsed_time(self, other):
            return 1500.0  # ms

    first, _ = worlds
    first.collectives._sum_events = Event(), Event()
    first.collectives.end_sum()
    first.collectives.end_sum()
    assert first.wait_time.seconds == 1.5
