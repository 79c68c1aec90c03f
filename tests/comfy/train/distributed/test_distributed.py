"""Several processes train the LoRA that one trains: on any number of them, and whatever goes wrong on one."""

import json
import os
import random
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.common.processes import SWITCH
from tessera.train.distributed.world import SINGLE_PROCESS, current_world
from tessera.train.step.losses import StepLosses
from tessera.train.train_lora import RunRequest, train_lora
from thinned import one_in
from tiny.train.ranks import STEP, assert_close, assert_equal, errors_of
from tiny.train.runs import (
    Watcher,
    masked_data,
    mixed_data,
    partly_without_gradient,
    planned_experts,
    run_settings,
    train,
    varied_data,
)

STEPS = STEP["steps"]
KILLS = int(os.environ.get("TESSERA_KILLS", "2"))  # random moments at which a process is killed
DROPS = {"dropout": 0.3, "rank_dropout": 0.2, "module_dropout": 0.2}
CASES = {
    "plain": STEP,
    "single": STEP | {"batch_size": 1, "gradient_accumulation": 12},
    "dropout": STEP | {"network": DROPS},
    "came": STEP | {"optimizer": {"optimizer": "came", "learning_rate": 1e-2}},
    "average": STEP | {"optimizer": {"eps": 1e-4, "ema_decay": 0.3}, "objective": {"stratified": "batch"}},
    "epoch": STEP | {"objective": {"stratified": "epoch"}, "network": {"algorithm": "dora"}},
}


@pytest.mark.parametrize("case", one_in(3, CASES))
def test_any_number_of_processes_trains_the_same_lora(case, ranks, tiny_flux, tmp_path):
    alone = train(tiny_flux, mixed_data(), tmp_path / "1", **CASES[case])
    for size in (2, 3, 4) if case in ("plain", "dropout") else (4,):
        answers = ranks.train(size, tmp_path / str(size), CASES[case])
        assert not any(errors_of(answers)), answers
        assert all(answer["loss"] == answers[0]["loss"] for answer in answers)
        assert answers[0]["loss"] == pytest.approx(alone.loss, rel=1e-5)
        assert_close(ranks.lora(), dict(alone.lora))
        for rank in range(1, size):
            assert_equal(ranks.lora(rank), ranks.lora())


@pytest.mark.parametrize("size", one_in(2, [3, 2]))
def test_noise_goes_by_the_place_in_the_whole_step_and_the_sum_is_clipped(size, ranks, tiny_flux, tmp_path):
    """Two processes share each micro-batch, and three take a whole one each."""
    objective = {"ip_noise_gamma": 0.3, "noise_offset": 0.3, "preservation_weight": 0.5}
    settings = STEP | {"network": DROPS, "objective": objective}
    settings["optimizer"] = {"eps": 1e-4, "max_grad_norm": 1e-3}
    answers = ranks.train(size, tmp_path / "many", settings, data="varied_data")
    assert not any(errors_of(answers)), answers
    alone = train(tiny_flux, varied_data(), tmp_path / "1", **settings)
    assert answers[0]["loss"] == pytest.approx(alone.loss, rel=1e-5)
    assert_close(ranks.lora(), dict(alone.lora))


def test_a_weight_that_has_a_gradient_on_some_processes_only_is_stepped_as_on_one(
    ranks, tiny_flux, tmp_path, monkeypatch
):
    """One has it on the second of two, and one on none, which no weight decay may change."""
    settings = STEP | {"batch_size": 1, "gradient_accumulation": 12}
    settings |= {"optimizer": {"eps": 1e-4, "weight_decay": 0.1}}
    answers = ranks.train(2, tmp_path / "2", settings, without_gradient=True)
    assert not any(errors_of(answers)), answers
    assert_equal(ranks.lora(1), ranks.lora())
    monkeypatch.setattr(StepLosses, "batch_loss", partly_without_gradient(StepLosses.batch_loss))
    alone = dict(train(tiny_flux, mixed_data(), tmp_path / "1", **settings).lora)
    assert_close(ranks.lora(), alone)
    monkeypatch.undo()
    whole = dict(train(tiny_flux, mixed_data(), tmp_path / "whole", **settings).lora)
    assert sum(not torch.allclose(whole[name], alone[name], rtol=1e-3) for name in whole) >= 2


def test_two_experts_are_trained_by_two_processes_as_by_one(ranks, tmp_path):
    """One after the other, and the second of them alone where the first is there already."""
    files = [str(tiny.write_wan(tmp_path / f"{seed}.safetensors", layers=1, seed=seed)) for seed in (1, 2)]
    settings = STEP | {"batch_size": 2, "gradient_accumulation": 1, "output_name": "film"}
    expected = []
    experts, data = planned_experts(files, run_settings(**settings))
    for expert in experts:
        expected.append(
            dict(train_lora(RunRequest(expert.model, data, expert.settings, tmp_path / "1", Watcher())).lora)
        )
    answers = ranks.train(2, tmp_path / "2", settings, experts=files)
    assert not any(errors_of(answers)), answers
    assert_close(ranks.lora(), expected[1], 1e-4)
    (first,) = (tmp_path / "2").rglob("film_high_noise.safetensors")
    (alone,) = (tmp_path / "1").rglob("film_high_noise.safetensors")
    assert_close(load_file(first), load_file(alone), 1e-4)
    assert not torch.equal(*(next(iter(lora.values())) for lora in expected))
    shutil.rmtree(next((tmp_path / "2").glob("film_low_noise (*)")))
    repeated = ranks.train(2, tmp_path / "2", settings, experts=files)
    assert not any(errors_of(repeated)), repeated
    assert any("already finished" in note for note in repeated[0]["notes"])
    assert_close(ranks.lora(), expected[1], 1e-4)


def test_a_step_takes_one_sum_of_the_gradients_and_sends_no_weight(ranks, tiny_flux, tmp_path):
    from tiny.train.training import make_trainer

    trainer = make_trainer(tiny_flux, mixed_data(), tmp_path / "alone")
    weights = trainer.network.parameters()
    # Each begins at a multiple of 128 numbers; behind them the loss, who leaves, what is asked, and whose gradient is.
    size = 4 * (sum(-(-w.numel() // 128) * 128 for w in weights) + 3 + len(weights))
    trainer.close()
    answers = ranks.train(2, tmp_path / "2", STEP | {"network": {"rank": 4}, "save_every": 2})
    assert [answer["sent"] for answer in answers] == [[size] * STEPS] * 2
    assert [answer["others"] for answer in answers] == [[], []]


def test_only_the_first_writes_and_reports(ranks, tiny_flux, tmp_path):
    settings = STEP | {"save_every": 2, "validation": {"part": 0.4, "every_n_steps": 2, "sigmas": "0.5"}}
    first, second = ranks.train(2, tmp_path / "2", settings, slow_watcher=3.0, step_limit=1.5)
    assert not any(errors_of((first, second))), (first, second)
    assert first["files"] and first["notes"] and not second["files"] and not second["notes"]
    (folder,) = (tmp_path / "2").iterdir()
    alone = train(tiny_flux, mixed_data(), tmp_path / "1", **settings)
    (folder_alone,) = (tmp_path / "1").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in folder_alone.iterdir())
    points, expected = (run["validation"]["points"] for run in (first["summary"], alone.summary))
    assert [p["step"] for p in points] == [0, 2, 4]
    assert [p["loss"] for p in points] == pytest.approx([p["loss"] for p in expected], rel=1e-5)
    assert first["summary"]["slow_calls"] == 1 and second["waited"] > 2.5
    # One batch at each of three times, which the first takes, where two could be dealt out.
    assert [answer["measured"] for answer in (first, second)] == [3, 0]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["world_size"] == 2 and "world_size" not in alone.summary
    assert summary["seconds_waiting"] == round(first["waited"], 3)
    assert second["summary"]["seconds_waiting"] == round(second["waited"], 3)


def test_states_of_the_other_ranks_are_there_and_they_write_nothing_themselves(ranks, tmp_path):
    """The second has a folder of its own here, as another machine may."""
    settings = STEP | {"steps": 2, "save_every": 1, "validation": {"part": 0.4, "every_n_steps": 1, "keep_best": True}}
    roots = {"1": str(tmp_path / "second")}
    ranks.train(2, tmp_path / "first", settings | {"seed": 4})  # another run, whose folder has the first number
    late = ranks.train(2, tmp_path / "first", settings, slow_save=1.0)
    assert not any(errors_of(late)) and all(answer["is_there"] for answer in late), late
    shutil.rmtree(tmp_path / "first" / late[0]["folder"])
    answers = ranks.train(2, tmp_path / "first", settings, roots=roots)
    assert not any(errors_of(answers)), answers
    assert len(list((tmp_path / "first").iterdir())) == 2
    assert answers[0]["folder"] == answers[1]["folder"]
    assert list((tmp_path / "second").rglob("*")) == []


def test_validation_is_dealt_out(ranks, tiny_flux, tmp_path):
    validation = {"part": 0.6, "every_n_steps": 2, "sigmas": "0.2,0.4,0.6,0.8"}
    settings = STEP | {"steps": 2, "batch_size": 2, "gradient_accumulation": 3, "validation": validation}
    alone, answers = (ranks.train(size, tmp_path / str(size), settings) for size in (1, 3))
    assert not any(errors_of([*alone, *answers])), answers
    measured = [answer["measured"] for answer in answers]
    assert sum(measured) == alone[0]["measured"] > 6 and max(measured) - min(measured) <= 2
    points, expected = (run[0]["summary"]["validation"]["points"] for run in (answers, alone))
    assert [p["losses"] for p in points] == [pytest.approx(p["losses"], rel=1e-5) for p in expected]
    assert [p["losses"] for p in points[:1]] == [p["losses"] for p in expected[:1]]  # before the first step


def test_requests_to_the_first_rank_are_done_by_all_after_the_same_step(ranks, tiny_flux, tmp_path):
    asks = {"1": ["save"], "3": ["stop"]}
    first, second = ranks.train(2, tmp_path / "2", STEP, asks=asks)
    assert not any(errors_of((first, second))), (first, second)
    assert (first["summary"]["status"], second["summary"]["status"]) == ("stopped", "stopped")
    assert first["sums"] == second["sums"] == 3 == len(first["loss"])
    assert "Stopped at step 3 and saved; Run goes on from there." in first["notes"]
    (folder,) = (tmp_path / "2").iterdir()
    assert [path.name for path in folder.rglob("*-step*.safetensors")] == ["tiny-step000001.safetensors"]
    resumed = train(tiny_flux, mixed_data(), tmp_path / "2", **STEP)
    assert_close(dict(resumed.lora), dict(train(tiny_flux, mixed_data(), tmp_path / "1", **STEP).lora))


def test_a_slow_process_changes_no_bit(ranks, tmp_path):
    ranks.train(2, tmp_path / "even", STEP)
    even = ranks.lora()
    answers = ranks.train(2, tmp_path / "slow", STEP, act={"rank": 1, "do": "slow", "seconds": 0.1})
    assert_equal(ranks.lora(), even)
    assert answers[0]["waited"] > max(0.5, answers[1]["waited"])  # in the sums, of 1.2 s
    assert answers[0]["summary"]["seconds_waiting"] == round(answers[0]["waited"], 3)


def test_a_state_saved_on_4_goes_on_on_2_and_on_1(ranks, tiny_flux, tmp_path):
    settings = STEP | {"save_every": 2, "network": DROPS}
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole", **settings)
    for size in (2, 1):
        root = tmp_path / f"to {size}"
        cancelled = ranks.train(4, root, settings, act={"rank": 3, "do": "cancel", "step": 2})
        assert all(error.startswith("InterruptProcessingException") for error in errors_of(cancelled)), cancelled
        if size == 1:
            lora = dict(train(tiny_flux, mixed_data(), root, **settings).lora)
        else:
            answers = ranks.train(2, root, settings)
            assert "Resumed at step 2." in answers[0]["notes"] and not any(errors_of(answers)), answers
            assert any("devices = 4 and continues with 2" in note for note in answers[0]["notes"])
            lora = ranks.lora()
        assert_close(lora, dict(whole.lora))


@pytest.mark.parametrize("rank", one_in(2, [2, 0]))
def test_a_nan_on_one_process_ends_all_at_the_same_step(rank, ranks, tmp_path):
    answers = ranks.train(3, tmp_path, STEP, act={"rank": rank, "do": "nan", "step": 2})
    for answer in answers:
        assert "became NaN or infinite at step 3" in answer["error"]
    assert len({answer["sums"] for answer in answers}) == 1


@pytest.mark.parametrize("rank", one_in(2, [1, 0]))
def test_an_error_on_one_process_ends_all_and_saves_what_was_trained(rank, ranks, tiny_flux, tmp_path):
    answers = ranks.train(3, tmp_path, STEP, act={"rank": rank, "do": "error", "step": 2})
    first, *_ = errors_of(answers)
    assert "the cable was pulled" in first
    if rank:
        assert first.startswith("TrainingStopped: Device 1 on ") and "Everything up to step 2 is saved" in first
        assert errors_of(answers)[2].startswith("InterruptProcessingException")
    (folder,) = tmp_path.iterdir()
    assert (folder / "state-000002.tessera").is_file()
    assert len(train(tiny_flux, mixed_data(), tmp_path, **STEP).loss) == STEPS


def test_devices_that_meet_before_a_sum_train_the_same_and_leave_together(ranks, tiny_flux, tmp_path):
    """As NCCL needs it, whose sums are queued only."""
    answers = ranks.train(3, tmp_path / "all", STEP, meets=True)
    assert errors_of(answers) == [""] * 3
    assert answers[0]["loss"] == pytest.approx(train(tiny_flux, mixed_data(), tmp_path / "one", **STEP).loss, rel=1e-5)
    answers = ranks.train(3, tmp_path / "left", STEP, meets=True, act={"rank": 1, "do": "error", "step": 2})
    assert "the cable was pulled" in errors_of(answers)[0] and len({answer["sums"] for answer in answers}) == 1


@pytest.mark.parametrize(("grace", "meets"), one_in(3, [(5.0, True), (0.1, True), (5.0, False), (0.1, False)]))
def test_a_cancel_while_others_are_waited_for_is_told_as_such_whether_they_come_soon(meets, grace, ranks, tmp_path):
    act = {"rank": 0, "do": "cancel waiting", "step": 2}  # the others are a second behind
    gives_up = not meets and grace < 5.0  # then its process ends, as it does where it trains for a user
    answers = ranks.train(3, tmp_path, STEP, meets=meets, grace=grace, act=act, ends=gives_up)
    assert all(answer["error"].startswith("InterruptProcessingException") for answer in answers), answers
    assert answers[0]["sums"] == (4 if grace == 5.0 else 2)
    assert len({answer["sums"] for answer in answers}) == 1
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.glob("*.tessera")] == ["state-000002.tessera"]


@pytest.mark.parametrize(("meets", "action"), one_in(3, [(False, "kill"), (True, "hang"), (False, "hang")]))
def test_a_process_that_is_gone_or_hangs_ends_the_run_and_its_last_state_goes_on(
    meets, action, ranks, tiny_flux, tmp_path
):
    act = {"rank": 1, "do": action, "step": 2}
    limit = 4 if action == "hang" else 10  # seconds, in place of half an hour
    answers = ranks.train(3, tmp_path / "ended", STEP, meets=meets, step_limit=limit, act=act)
    assert answers[1] == {} and "did not get to the end of step 3" in answers[0]["error"], answers
    assert "Device 1" in answers[0]["error"] or action == "kill"
    assert "Everything up to step 2 is saved" in answers[0]["error"]
    (folder,) = (tmp_path / "ended").iterdir()
    assert [path.name for path in folder.glob("*.tessera")] == ["state-000002.tessera"]
    resumed = train(tiny_flux, mixed_data(), tmp_path / "ended", **STEP)
    assert_close(dict(resumed.lora), dict(train(tiny_flux, mixed_data(), tmp_path / "whole", **STEP).lora))


@pytest.mark.parametrize("save_every", [0, 1])
def test_only_a_state_that_is_on_the_disk_is_named_where_the_process_that_writes_is_killed(save_every, ranks, tmp_path):
    act = {"rank": 0, "do": "kill", "step": 2}
    answers = ranks.train(2, tmp_path, STEP | {"save_every": save_every}, step_limit=10, act=act)
    (folder,) = tmp_path.iterdir()
    states = sorted(path.name for path in folder.glob("*.tessera"))
    if save_every:
        assert f"choose {folder.name}/{states[-1]} under resume" in answers[1]["error"], answers
    else:
        assert states == [] and "Nothing was saved before that" in answers[1]["error"], answers


@pytest.fixture(scope="module")
def whole_runs():
    return {}


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_process_killed_at_any_moment_leaves_a_state_that_goes_on(seed, ranks, tiny_flux, tmp_path, whole_runs):
    """Any of them, the first too, and in a save too."""
    chance, settings = random.Random(seed), STEP | {"save_every": 1}
    size = chance.choice([2, 3])
    act = {"rank": chance.randrange(size), "do": "kill", "step": chance.randrange(STEPS)}
    act["seconds"] = chance.random() * 0.3
    limits = {"step_limit": 10, "wait_limit": 15}
    answers = ranks.train(size, tmp_path, settings, meets=chance.random() < 0.5, act=act, **limits)
    survivors = [rank for rank, answer in enumerate(answers) if answer.get("done") == STEPS or "loss" in answer]
    assert answers[act["rank"]] == {} or survivors, answers
    resumed = train(tiny_flux, mixed_data(), tmp_path, **settings)
    if not whole_runs:
        whole_runs |= train(tiny_flux, mixed_data(), tmp_path / "whole", **settings).lora
    assert_close(dict(resumed.lora), whole_runs)


def test_devices_of_a_machine_plan_with_equal_parts_of_the_memory_that_is_free_before_any_takes_some(ranks, tmp_path):
    """Who looks later finds less, and would plan as if that were free for all."""
    gib = 2**30
    job = {"local": 2, "host": [64 * gib, 7 * gib, 40 * gib, 32 * gib]}
    memory = {"checkpointing": "none", "blocks_to_swap": 3}
    answers = ranks.train(4, tmp_path / "given", STEP | {"steps": 1, "memory": memory}, **job)
    assert not any(errors_of(answers)), answers
    assert any(note.startswith("RAM is short: 3.5 GB are free") for note in answers[0]["notes"]), answers[0]["notes"]
    memory = {"checkpointing": "auto", "blocks_to_swap": -1}
    answers = ranks.train(4, tmp_path / "chosen", STEP | {"steps": 1, "memory": memory}, **job)
    assert not any(errors_of(answers)), answers
    assert [answer["planned"] for answer in answers] == 2 * [[7 * gib // 2]] + 2 * [[16 * gib]]


def test_masks_weigh_in_a_batch_over_processes_as_in_one(ranks, tiny_flux, tmp_path):
    answers = ranks.train(2, tmp_path / "2", STEP, data="masked_data")
    assert not any(errors_of(answers)), answers
    assert_close(ranks.lora(), dict(train(tiny_flux, masked_data(), tmp_path / "1", **STEP).lora))


@pytest.mark.parametrize(
    ("own_settings", "said"),
    [
        ({"seed": 4}, "Device 1 has another run than device 0; give all of them the same workflow"),
        (
            {"memory": {"shard": True}},
            "Device 1 has another shard than device 0 (on; device 0 has off); switch it on or off for all of them.",
        ),
        ({"batch_size": 3, "gradient_accumulation": 1}, "batch_size is 3 and gradient_accumulation 1, which 2 devices"),
    ],
)
def test_a_process_that_differs_is_told_before_the_first_step(own_settings, said, ranks, tmp_path):
    first, second = ranks.train(2, tmp_path, STEP, own={"1": own_settings})
    assert said in (first["error"] + second["error"]) and first["sums"] == second["sums"] == 0, (first, second)
    assert not list(tmp_path.iterdir())


def test_devices_that_multiply_otherwise_are_told_before_the_first_step(ranks, tmp_path):
    answers = ranks.train(2, tmp_path, STEP, precisions={"1": "fp8"})
    assert "Device 1 has another kind of matmul than device 0" in answers[0]["error"]
    assert "set low_bit_matmul on Training Memory to off" in answers[0]["error"] and not list(
        tmp_path.rglob("*.tessera")
    )


def test_a_device_that_sees_no_state_is_told_before_the_first_step(ranks, tmp_path):
    act = {"rank": 0, "do": "cancel", "step": 2}
    ranks.train(2, tmp_path / "first", STEP, act=act)
    answers = ranks.train(2, tmp_path / "first", STEP, roots={"1": str(tmp_path / "second")})
    assert (
        "Device 1 has another state than device 0 (none; device 0 has state-000002.tessera); put ComfyUI's output "
        "folder where all hosts see the same files."
    ) in answers[0]["error"]
    assert [answer["sums"] for answer in answers] == [0, 0] and not (tmp_path / "second").exists()


@pytest.mark.parametrize(("step", "expected"), [(STEPS - 1, STEPS), (0, 2)])
def test_devices_that_went_apart_end_the_run_with_what_was_trained(step, expected, ranks, tmp_path):
    """At the next save, and at the last one."""
    settings = STEP | {"save_every": 2 if expected == 2 else 0}
    answers = ranks.train(2, tmp_path, settings, act={"rank": 1, "do": "drift", "step": step})
    assert "Device 1 and device 0 computed different LoRAs" in answers[0]["error"]
    assert answers[0]["done"] == expected
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.glob("*.tessera")] == [f"state-{expected:06d}.tessera"]


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", 2), ("came", STEPS)])
def test_devices_whose_optimizers_alone_went_apart_end_the_run_at_the_next_save(optimizer, expected, ranks, tmp_path):
    """One moment of one weight, in the optimizer that steps all weights as one and in one that does not."""
    settings = STEP | {"save_every": 2 if expected == 2 else 0, "optimizer": {"optimizer": optimizer}}
    answers = ranks.train(2, tmp_path, settings, other_moments=1, moments_after=expected)
    assert "Device 1 and device 0 computed different LoRAs" in answers[0]["error"]
    assert [answer["stepped"] for answer in answers] == [expected, expected]


def test_devices_that_begin_apart_do_not_begin(ranks, tmp_path):
    answers = ranks.train(2, tmp_path, STEP, other_start=1)
    assert "Device 1 and device 0 computed different LoRAs" in answers[0]["error"]
    assert [answer["sums"] for answer in answers] == [0, 0] and not list(tmp_path.rglob("*.tessera"))


def test_a_server_that_torchrun_has_started_waits_for_nobody(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert current_world.__wrapped__() is SINGLE_PROCESS
    monkeypatch.setenv(SWITCH, "1")  # of run.py's own process, which starts others
    assert current_world.__wrapped__() is SINGLE_PROCESS
