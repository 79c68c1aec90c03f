"""The order of queue items, and which nodes of a prompt train."""

import heapq

import pytest
from tessera.nodes.queue.order import behind_others, reordered
from tessera.nodes.queue.prompts import needed_nodes, outputs_behind, signature, training_nodes


def trains(item):
    return item[1].startswith("T")


def order_of(items):
    heap = list(items)
    heapq.heapify(heap)
    return [heapq.heappop(heap)[1] for _ in items]


@pytest.mark.parametrize(
    ("queue", "order"),
    [
        ([], "T0"),
        ([(5, "P1"), (6, "P2")], "P1 P2 T0"),
        ([(5, "T2"), (6, "P1"), (7, "P2")], "P1 P2 T0 T2"),
        ([(5, "P1"), (6, "T2"), (7, "T1")], "P1 T0 T2 T1"),
        ([(5, "T2"), (6, "P1"), (7, "T1")], "P1 T0 T2 T1"),
        ([(-3, "P1"), (5, "T1"), (9, "P2")], "P1 P2 T0 T1"),
        ([(2, "T1"), (3, "T2")], "T0 T1 T2"),
    ],
)
def test_a_paused_training_stands_behind_the_others_and_before_later_trainings(queue, order):
    paused = (4, "T0", {}, {"client_id": "a"}, [], {"secret": 1}, "a field of tomorrow")
    items = behind_others(queue, paused, trains)
    assert order_of(items) == order.split()
    assert next(item for item in items if item[1] == "T0")[2:] == paused[2:]
    assert {item[1]: item[0] for item in items if not trains(item)} == {n: i for i, n in queue if n.startswith("P")}
    # What comes next gets the next whole number, and stands behind all of these.
    assert max(item[0] for item in items) < max([4, *(number for number, _ in queue)]) + 1


def test_reordered_trainings_share_the_places_that_they_hold():
    queue = [(1, "T1"), (2, "P1"), (3, "T2"), (4, "T3")]
    assert order_of(reordered(queue, ["T3", "T1", "T2", "unknown"])) == ["T3", "P1", "T1", "T2"]
    assert order_of(reordered(queue, ["T2", "T1", "T1"])) == ["T2", "P1", "T1", "T3"]


PROMPT = {
    "model": {"class_type": "UNETLoader", "inputs": {"unet_name": "a"}},
    "train": {"class_type": "TesseraTrainLora", "inputs": {"model": ["model", 0], "steps": 10, "size": [64, 64]}},
    "save": {"class_type": "TesseraSaveLora", "inputs": {"lora": ["train", 0]}},
    "picture": {"class_type": "SaveImage", "inputs": {"images": ["model", 0], "loop": ["picture", 0]}},
    "later": {"class_type": "TesseraTrainLora", "inputs": {"model": ["model", 0], "start_from": ["train", 0]}},
}


def test_only_outputs_that_need_a_training_are_behind_it():
    assert needed_nodes(PROMPT, ["save"]) == {"save", "train", "model"}
    assert training_nodes(PROMPT, ["picture"]) == set()
    assert training_nodes(PROMPT, ["later", "gone"]) == {"train", "later"}
    assert outputs_behind(PROMPT, ["picture", "save", "train", "later"], {"train"}) == ["save", "train", "later"]
    assert outputs_behind(PROMPT, ["picture", "save", "later"], {"later"}) == ["later"]


def test_a_signature_changes_with_what_is_upstream_only():
    changed = {**PROMPT, "save": {"class_type": "TesseraSaveLora", "inputs": {"lora": ["train", 0], "dtype": "fp16"}}}
    assert signature(PROMPT, "train") == signature(changed, "train")
    changed = {**PROMPT, "model": {"class_type": "UNETLoader", "inputs": {"unet_name": "b"}}}
    assert signature(PROMPT, "train") != signature(changed, "train")
