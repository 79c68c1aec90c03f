"""Several devices make one certificate: the same checks on each, and one result."""

import pytest
from tiny.train.ranks import STEP, assert_equal, errors_of

SETTINGS = STEP | {"steps": 2, "batch_size": 2, "gradient_accumulation": 1}
MEMORY = {"verify": "on", "checkpointing": "full"}
SHARD = MEMORY | {"blocks_to_swap": 3, "shard": True}


@pytest.mark.parametrize("memory", [MEMORY, SHARD], ids=["each its own", "sharded"])
def test_two_devices_make_one_and_train_the_same_lora(memory, ranks, tmp_path):
    answers = ranks.train(2, tmp_path, SETTINGS | {"memory": memory})
    assert not any(errors_of(answers)), answers
    assert_equal(ranks.lora(1), ranks.lora())
    certificate = answers[0]["summary"]["certificate"]
    assert (
        certificate["text"].startswith("FLUX.1: forward equal, gradients within") and "not_checked" not in certificate
    )


def test_a_check_that_fails_on_one_device_ends_the_run_on_both(ranks, tmp_path):
    answers = ranks.train(2, tmp_path, SETTINGS | {"memory": MEMORY}, certificate={"1": "fails"})
    assert all("the check of blocks failed: layers.1 is 9.0% different" in error for error in errors_of(answers))


def test_a_check_without_memory_on_one_device_is_left_out_on_both(ranks, tmp_path):
    answers = ranks.train(2, tmp_path, SETTINGS | {"memory": MEMORY}, certificate={"1": "oom"})
    assert not any(errors_of(answers)), answers
    assert answers[0]["summary"]["certificate"]["not_checked"] == {"blocks": "it is out of memory"}
