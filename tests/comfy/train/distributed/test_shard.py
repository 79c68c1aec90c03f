"""Devices of one machine share the swapped blocks: each keeps a part, and the numbers stay what they were."""

import pytest
from thinned import one_in
from tiny.train.ranks import STEP, assert_close, assert_equal, errors_of
from tiny.train.runs import Watcher, mixed_data, train

SWAP = {"checkpointing": "none", "blocks_to_swap": 3}
SHARD = SWAP | {"shard": True}
SHORT = STEP | {"steps": 2, "gradient_accumulation": 1}


def train_both(ranks, size, root, settings, memory=SHARD, **job):
    """Train with blocks from the host, then with shared ones: the first answers, the first LoRA, the second answers."""
    plain = ranks.train(size, root / "host", settings | {"memory": memory | {"shard": False}}, **job)
    assert not any(errors_of(plain)), plain
    expected = ranks.lora()
    answers = ranks.train(size, root / "shard", settings | {"memory": memory}, **job)
    return plain, expected, answers


CASES = {
    "checkpointed": (3, SHORT | {"batch_size": 3}, SHARD | {"checkpointing": "full", "prefetch_blocks": 2}, {}),
    "compiled": (2, SHORT | {"compile": "auto", "batch_size": 2}, SHARD, {"backend": "eager"}),
    "two machines": (4, SHORT | {"batch_size": 4}, SHARD, {"local": 2}),
    "8 bit": (2, SHORT | {"batch_size": 2}, SHARD | {"quantize": "int8", "blocks_to_swap": 4}, {}),
    "GGUF": (2, SHORT | {"batch_size": 2}, SHARD | {"checkpointing": "selective"}, {"gguf": "Q4_K"}),
}


@pytest.mark.parametrize("case", one_in(4, CASES))
def test_shared_blocks_train_the_same_lora_to_the_bit(case, ranks, tmp_path):
    size, settings, memory, job = CASES[case]
    plain, expected, answers = train_both(ranks, size, tmp_path, settings, memory, **job)
    assert not any(errors_of(answers)), answers
    assert [answer["loss"] for answer in answers] == [answer["loss"] for answer in plain]
    for rank in range(size):
        assert_equal(ranks.lora(rank), expected)
    sharing = job.get("local", size)
    assert {answer["summary"]["blocks_shared_by"] for answer in answers} == {
        sharing
    } and "blocks_shared_by" not in plain[0]["summary"]
    assert not plain[0]["gathers"]
    (folder,) = (tmp_path / "host").iterdir()  # the same run: it changes no number
    assert [path.name for path in (tmp_path / "shard").iterdir()] == [folder.name]


def whole(size, count):
    """Bytes of a block that is filled up to `count` equal pieces."""
    return -(-size // (256 * count)) * 256 * count


@pytest.mark.parametrize("size", one_in(2, [3, 2]))
def test_each_holds_its_part_and_gathers_what_a_step_needs(size, ranks, tmp_path):
    settings = STEP | {"batch_size": size, "gradient_accumulation": 2, "steps": 3}
    plain, expected, answers = train_both(ranks, size, tmp_path, settings, unchecked=True)
    assert not any(errors_of(answers)), answers
    for rank, answer in enumerate(answers):
        assert_equal(ranks.lora(rank), expected)
        blocks = [whole(nbytes, size) for nbytes in answer["sizes"]]
        assert len(blocks) == 3 and (size == 2 or blocks != answer["sizes"])
        assert answer["held"] == 2 * max(blocks) + sum(blocks) // size
        assert answer["outside"] == 0
        # Two slots: a pass finds the first two blocks there, and at its turn the last two.
        first, later = [0, 1, 2, 0], [2, 0]
        assert answer["gathers"] == [blocks[j] for j in first + (3 * 2 - 1) * later]
    assert [answer["sums"] for answer in answers] == [3] * size
    assert [answer["sent"] for answer in answers] == [answer["sent"] for answer in plain]


def test_a_device_that_runs_more_forwards_finds_the_others_there(ranks, tmp_path):
    validation = {"validation": {"part": 0.2, "every_n_steps": 2, "sigmas": "0.5"}}
    plain, expected, answers = train_both(
        ranks, 2, tmp_path, SHORT | validation | {"batch_size": 2}, act={"rank": 1, "do": "more"}
    )
    assert not any(errors_of(answers)), answers
    for rank in range(2):
        assert_equal(ranks.lora(rank), expected)
    # One batch is measured, by the first device alone.
    points, plain_points = (run[0]["summary"]["validation"]["points"] for run in (answers, plain))
    assert points == plain_points and [point["step"] for point in points] == [0, 2]


def test_a_device_that_was_needed_for_something_else_has_all_slots_filled_anew(ranks, tmp_path):
    _, expected, answers = train_both(ranks, 2, tmp_path, SHORT | {"batch_size": 2}, unloads=True, unchecked=True)
    assert not any(errors_of(answers)), answers
    for rank, answer in enumerate(answers):
        assert_equal(ranks.lora(rank), expected)
        blocks = [whole(nbytes, 2) for nbytes in answer["sizes"]]
        assert answer["gathers"] == [blocks[j] for j in 2 * [0, 1, 2, 0]]


@pytest.mark.parametrize("unchecked", [True, False], ids=["in a step", "in the check of the forward"])
def test_devices_out_of_memory_go_on_with_one_smaller_plan(ranks, tmp_path, unchecked):
    memory = {"checkpointing": "auto", "blocks_to_swap": 4, "shard": True}
    settings = SHORT | {"memory": memory, "batch_size": 2}
    job = {"free": [30_000_000, 20_000_000], "in_forward": {"rank": 1, "do": "oom", "at": 2}, "unchecked": unchecked}
    answers = ranks.train(2, tmp_path / "less", settings, **job)
    assert not any(errors_of(answers)), answers
    lora = ranks.lora()
    assert_equal(ranks.lora(1), lora)
    notes = answers[0]["notes"]
    first, retry = (note for note in notes if "blocks are shared by 2 devices" in note)
    assert "of 19.1 MB free" in first and "Out of memory at step 1" in retry, notes  # the device that has least
    assert retry.partition("less. ")[2] in answers[0]["summary"]["memory_plan"]
    answers = ranks.train(2, tmp_path / "host", settings | {"memory": SWAP})
    assert_close(lora, ranks.lora())


def test_a_cancel_in_the_middle_of_a_forward_ends_all(ranks, tmp_path):
    act = {"rank": 1, "do": "cancel", "at": 5}  # at the second of three blocks, in the second step
    answers = ranks.train(3, tmp_path, SHORT | {"batch_size": 3, "memory": SHARD}, in_forward=act, unchecked=True)
    assert all(answer["error"].startswith("InterruptProcessingException") for answer in answers), answers
    assert len({answer["sums"] for answer in answers}) == 1
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.glob("*.tessera")] == ["state-000001.tessera"]


def test_an_error_on_one_ends_all_and_saves(ranks, tmp_path):
    answers = ranks.train(
        2, tmp_path, SHORT | {"batch_size": 2, "memory": SHARD}, act={"rank": 1, "do": "error", "step": 1}
    )
    assert "the cable was pulled" in answers[0]["error"] and "up to step 1 is saved" in answers[0]["error"], answers
    assert answers[1]["error"].startswith("RuntimeError")


def test_a_killed_device_ends_the_others_in_a_sentence(ranks, tmp_path):
    act = {"rank": 1, "do": "kill", "at": 5}
    job = {"in_forward": act, "step_limit": 10, "unchecked": True}
    answers = ranks.train(3, tmp_path, SHORT | {"batch_size": 3, "memory": SHARD}, **job)
    assert answers[1] == {} and "Device 1 did not get to share its part of the model" in answers[0]["error"], answers
    assert "Everything up to step 1 is saved" in answers[0]["error"]


def test_shard_is_refused_without_nccl_and_changes_nothing_alone(ranks, tiny_flux, tmp_path):
    answers = ranks.train(2, tmp_path / "gloo", SHORT | {"batch_size": 2, "memory": SHARD}, nccl_only=True)
    assert all("shard is on and needs NCCL" in answer["error"] for answer in answers), answers
    assert not (tmp_path / "gloo").exists()
    watcher = Watcher()
    alone = train(tiny_flux, mixed_data(), tmp_path / "one", watcher, **SHORT, memory=SHARD)
    assert not [note for note in watcher.notes if note.startswith("shard")]
    assert_equal(dict(alone.lora), dict(train(tiny_flux, mixed_data(), tmp_path / "two", **SHORT, memory=SWAP).lora))


def test_shard_shares_nothing_if_everything_fits(ranks, tmp_path):
    memory = {"checkpointing": "auto", "blocks_to_swap": -1, "shard": True}
    answers = ranks.train(2, tmp_path, SHORT | {"batch_size": 2, "memory": memory})
    assert not any(errors_of(answers)), answers
    assert "shard is not used: everything fits on each device." in answers[0]["notes"]
    assert "blocks_shared_by" not in answers[0]["summary"]
