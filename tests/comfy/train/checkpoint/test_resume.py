"""An interrupted run that goes on ends as one that was never interrupted: bit for bit on the CPU."""

import json
import os
import platform
import re
import shutil
import threading
from dataclasses import replace
from itertools import count

import pytest
import safetensors.torch
import torch
from comfy.model_management import InterruptProcessingException
from tessera.train.checkpoint.state import load_state
from tessera.train.loop.learner import Learner
from tessera.train.preflight import claim
from tessera.train.report.errors import TrainingStopped
from tessera.train.runs.run_folder import RunFolder
from thinned import one_in
from tiny.train.runs import Watcher, cancel_at, mixed_data, train
from torch.optim.optimizer import register_optimizer_step_post_hook

HARD = {"batch_size": 2, "gradient_accumulation": 2, "network": {"rank": 8, "alpha": 4.0, "dropout": 0.2}}
OPTIMIZERS = {
    "adamw": {"learning_rate": 1e-2, "lr_scheduler": "cosine", "warmup_steps": 2},
    "adamw8bit": {"optimizer": "adamw8bit", "learning_rate": 1e-2},
    "prodigy": {"optimizer": "prodigy", "learning_rate": 1.0},
    "adafactor": {"optimizer": "adafactor", "learning_rate": 1e-2, "lr_scheduler": "rex"},
    "came": {"optimizer": "came", "learning_rate": 1e-2, "lr_scheduler": "warmup_stable_decay"},
    "adamw_schedulefree": {"optimizer": "adamw_schedulefree", "learning_rate": 1e-2, "warmup_steps": 2},
    "lion": {"optimizer": "lion", "learning_rate": 1e-3, "lr_scheduler": "cosine_with_restarts"},
    "muon": {"optimizer": "muon", "learning_rate": 1e-2, "lr_scheduler": "curve", "optimizer_args": "momentum=0.9"},
    "custom": {"optimizer": "custom", "optimizer_class": "torch.optim.NAdam", "lr_scheduler": "inverse_sqrt"},
    "average": {"learning_rate": 1e-2, "lr_scheduler": "polynomial", "ema_decay": 0.3},
}


def equal(first, second):
    assert first.loss == second.loss and len(first.loss) > 0
    assert first.lora.keys() == second.lora.keys()
    different = [name for name in first.lora if not torch.equal(first.lora[name], second.lora[name])]
    assert not different, different
    ups = [t for name, t in first.lora.items() if "lora_up" in name]
    assert ups and all(t.abs().max() > 0 for t in ups)


def run_folder(root):
    (folder,) = root.iterdir()
    return folder


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cancelled(model, data, root, step, **changes):
    with pytest.raises(InterruptProcessingException):
        train(model, data, root, cancel_at(step), **changes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_cancelled_after_any_step_goes_on_to_the_same_result(optimizer, tiny_flux, tmp_path):
    options = HARD | {"optimizer": OPTIMIZERS[optimizer], "save_every": 3}
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **options)
    for step in (1, 3, 4) if optimizer == "adamw" else (4,):
        root = tmp_path / f"cancelled at {step}"
        cancelled(tiny_flux, data, root, step, **options)
        watcher = Watcher()
        equal(train(tiny_flux, data, root, watcher, **options), whole)
        assert f"Resumed at step {step}." in watcher.notes
        assert watcher.losses == whole.loss[step:]


def test_a_run_that_shows_a_part_of_a_folder_in_each_epoch_goes_on_to_the_same_result(tiny_flux, tmp_path):
    data = mixed_data()
    data = replace(data, samples=tuple(replace(item, sample_ratio=0.5) for item in data.samples))
    whole = train(tiny_flux, data, tmp_path / "whole", steps=8)
    cancelled(tiny_flux, data, tmp_path / "cancelled", 4, steps=8)
    equal(train(tiny_flux, data, tmp_path / "cancelled", steps=8), whole)


def test_cancel_within_a_step_waits_for_its_micro_batch_only(tiny_flux, tmp_path, monkeypatch):
    options = HARD | {"gradient_accumulation": 3}
    watcher = Watcher()
    backwards = []
    backward = Learner.backward

    def counted(learner, loss):
        backwards.append(watcher.steps_done)
        backward(learner, loss)

    def check(step):
        if backwards.count(2) == 2:  # Cancel is pressed amid the second micro-batch of the third step
            raise InterruptProcessingException

    watcher.before_step = check
    with monkeypatch.context() as counting:
        counting.setattr(Learner, "backward", counted)
        with pytest.raises(InterruptProcessingException):
            train(tiny_flux, mixed_data(), tmp_path / "cancelled", watcher, **options)
    assert backwards == [0, 0, 0, 1, 1, 1, 2, 2]
    resumed_watcher = Watcher()
    resumed = train(tiny_flux, mixed_data(), tmp_path / "cancelled", resumed_watcher, **options)
    assert "Resumed at step 2." in resumed_watcher.notes
    equal(resumed, train(tiny_flux, mixed_data(), tmp_path / "whole", **options))


def trained_matrices(lora):
    return [tensor for name, tensor in lora.items() if not name.endswith(".alpha")]


def in_its_order(lora, masters):
    """Masters by their names in a state, as `trained_matrices` has them."""
    parts = {name: name.rpartition(".") for name in masters}
    keys = {f"lora_unet_{m.replace('.', '_')}.lora_{side}.weight": masters[n] for n, (m, _, side) in parts.items()}
    return [keys[name] for name in lora if not name.endswith(".alpha")]


def last_state(root):
    return load_state(max(run_folder(root).glob("*.tessera")))


def is_of_the_run(optimizer):
    """Not of the trial before it, which is on the two matrices of one layer; those of a run are one tensor."""
    return len(optimizer.param_groups[0]["params"]) != 2


def test_the_saved_lora_is_the_average_and_the_state_keeps_both(tiny_flux, tmp_path, monkeypatch):
    data = mixed_data()
    snapshots = []
    step = Learner.step

    def look(learner):
        snapshots.append([p.detach().clone() for p in learner.network.parameters()])

    def watched(learner):
        if not snapshots:
            look(learner)
        step(learner)
        look(learner)

    plain = train(tiny_flux, data, tmp_path / "plain")
    monkeypatch.setattr(Learner, "step", watched)
    averaged = train(tiny_flux, data, tmp_path / "averaged", optimizer={"ema_decay": 0.25})
    # It is trained alike, and saved otherwise.
    assert averaged.loss == plain.loss and len(snapshots) == 7
    expected, *steps = snapshots
    for number, weights in enumerate(steps, start=1):
        decay = min(0.25, (1 + number) / (10 + number))
        expected = [decay * mean + (1 - decay) * weight for mean, weight in zip(expected, weights, strict=True)]
    torch.testing.assert_close(trained_matrices(averaged.lora), expected)
    state = last_state(tmp_path / "averaged")
    masters = in_its_order(averaged.lora, state.master_weights)
    assert all(torch.equal(a, b) for a, b in zip(masters, steps[-1], strict=True))
    averages = in_its_order(averaged.lora, state.average["masters"])
    assert all(torch.equal(a, b) for a, b in zip(averages, trained_matrices(averaged.lora), strict=True))
    assert not torch.equal(steps[-1][1], expected[1])


def test_a_schedule_free_lora_is_saved_with_the_weights_to_evaluate_with(tiny_flux, tmp_path):
    """y = (1 − β1)·z + β1·x is trained, x is saved (Defazio et al. 2024, arXiv 2405.15682)."""
    options = {"optimizer": {"optimizer": "adamw_schedulefree"}}
    result = train(tiny_flux, mixed_data(), tmp_path, **options)
    state = last_state(tmp_path)
    ys = in_its_order(result.lora, state.master_weights)
    zs = [state.optimizer["state"][i]["z"] for i in range(len(ys))]
    expected = [(y - 0.1 * z) / 0.9 for y, z in zip(ys, zs, strict=True)]
    torch.testing.assert_close(trained_matrices(result.lora), expected)
    assert any(not torch.allclose(a, y) for a, y in zip(expected, ys, strict=True))


def test_saving_more_often_changes_nothing(tiny_flux, tmp_path):
    data = mixed_data()
    for name, options in {"free": {"optimizer": "adamw_schedulefree"}, "average": {"ema_decay": 0.9}}.items():
        often = train(tiny_flux, data, tmp_path / name, optimizer=options, save_every=1)
        equal(often, train(tiny_flux, data, tmp_path / f"{name} once", optimizer=options, save_every=0))


def test_an_average_that_begins_at_a_resume_says_so(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 4)
    resume = f"{run_folder(tmp_path).name}/state-000004.tessera"
    watcher = Watcher()
    train(tiny_flux, data, tmp_path, watcher, optimizer={"ema_decay": 0.9}, resume=resume)
    assert "The state has no average of the LoRA, so averaging starts at step 4." in watcher.notes


def test_a_state_of_another_optimizer_is_named_and_nothing_is_lost(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 4)
    resume = f"{run_folder(tmp_path).name}/state-000004.tessera"
    with pytest.raises(ValueError, match=r"resume: that state is of the optimizer torch.AdamW and this run has "):
        train(tiny_flux, data, tmp_path, optimizer={"optimizer": "lion"}, resume=resume)


def test_a_run_cancelled_many_times_goes_on_to_the_same_result(tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **HARD)
    for step in range(6):
        cancelled(tiny_flux, data, tmp_path / "cancelled", step, **HARD)
    equal(train(tiny_flux, data, tmp_path / "cancelled", **HARD), whole)


class DiskError(RuntimeError):
    pass


class BreakingConditioning(dict):
    """A conditioning that cannot be read at one of the times that a batch is made from it."""

    def __init__(self, values, reads, failing, error):
        super().__init__(values)
        self.reads = reads
        self.failing = failing
        self.error = error

    def items(self):
        if next(self.reads) == self.failing:
            raise self.error
        return super().items()


def breaking(data, failing, error):
    """The data, of which the read number `failing` raises `error`; only batches ask for a variant of a sample."""
    reads = count()

    def broken(sample):
        tensors = sample.load()
        conditioning = BreakingConditioning(tensors.conditioning, reads, failing, error)
        breaks = replace(tensors, conditioning=conditioning)
        return replace(sample, load=lambda *variant: breaks if variant else tensors)

    return replace(data, samples=tuple(broken(s) for s in data.samples))


@pytest.mark.parametrize("failing", one_in(2, [1, 6, 11, 22]))
def test_a_run_that_breaks_in_the_middle_of_a_step_goes_on_to_the_same_result(failing, tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **HARD)
    broken = breaking(data, failing, DiskError("the disk is gone"))
    with pytest.raises(DiskError, match="the disk is gone"):
        train(tiny_flux, broken, tmp_path / "broken", **HARD)
    # Each step reads four: two in its first batch, two in its second.
    steps_done = failing // 4
    if steps_done:
        assert json.loads((run_folder(tmp_path / "broken") / "summary.json").read_text())["steps_done"] == steps_done
    watcher = Watcher()
    equal(train(tiny_flux, data, tmp_path / "broken", watcher, **HARD), whole)
    assert watcher.losses == whole.loss[steps_done:]


def test_out_of_memory_is_told_in_one_sentence_and_the_run_goes_on_to_the_same_result(tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **HARD)
    broken = breaking(data, 10, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(TrainingStopped, match="Out of memory at step 3; set checkpointing to 'full', or lower"):
        train(tiny_flux, broken, tmp_path / "part", **HARD)
    watcher = Watcher()
    equal(train(tiny_flux, data, tmp_path / "part", watcher, **HARD), whole)
    assert "Resumed at step 2." in watcher.notes


def test_weights_that_are_half_moved_are_never_saved(tiny_flux, tmp_path):
    data, steps = mixed_data(), count(1)
    whole = train(tiny_flux, data, tmp_path / "whole", **HARD)

    def fail(optimizer, *_):
        if is_of_the_run(optimizer) and next(steps) == 6:
            raise DiskError("broken off")

    # The weights have moved by then, the schedule has not.
    hook = register_optimizer_step_post_hook(fail)
    try:
        with pytest.raises(DiskError, match="broken off"):
            train(tiny_flux, data, tmp_path / "part", **HARD)
    finally:
        hook.remove()
    folder = run_folder(tmp_path / "part")
    assert sorted(p.name for p in folder.glob("*.tessera")) == ["state-000002.tessera", "state-000004.tessera"]
    assert not list(folder.rglob("tiny-step000005.safetensors"))
    equal(train(tiny_flux, data, tmp_path / "part", **HARD), whole)


def test_a_named_state_goes_on_from_just_that_one_as_often_as_it_is_queued(tiny_flux, tmp_path):
    data, part = mixed_data(), tmp_path / "part"
    whole = train(tiny_flux, data, tmp_path / "whole")
    cancelled(tiny_flux, data, part, 3, save_every=1)
    folder = run_folder(part)
    queued = {"resume": f"{folder.name}/state-000002.tessera", "save_every": 1}
    cancelled(tiny_flux, data, part, 5, **queued)
    watcher = Watcher()
    equal(train(tiny_flux, data, part, watcher, **queued), whole)
    assert "Resumed at step 2." in watcher.notes and len(watcher.losses) == 4
    assert any(f"choose {folder.name}/state-000005.tessera under resume" in note for note in watcher.notes)
    assert sorted(path.name[6:12] for path in folder.glob("*.tessera")) == ["000002", "000005", "000006"]
    equal(train(tiny_flux, data, part, watcher, **queued), whole)
    assert len(watcher.losses) == 4


def test_a_named_state_that_is_gone_is_told_and_no_finished_run_is_taken_for_its(tiny_flux, tmp_path):
    train(tiny_flux, mixed_data(), tmp_path, steps=1)
    state = f"{run_folder(tmp_path).name}/state-000002.tessera"
    with pytest.raises(
        ValueError, match=f"^resume: there is no state '{re.escape(state)}'; choose one of the list, 'latest'"
    ):
        train(tiny_flux, mixed_data(), tmp_path, steps=1, resume=state)


def test_a_cancelled_run_leaves_whole_states_and_a_lora_of_that_step(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path / "five", 5)
    folder = run_folder(tmp_path / "five")
    names = sorted(path.name for path in folder.iterdir())
    loras = sorted((folder / "tiny_steps").iterdir())
    assert [path.name for path in loras] == [f"tiny-step00000{step}.safetensors" for step in (2, 4, 5)]
    states = ["state-000004.tessera", "state-000005.tessera"]
    assert names == ["progress.jsonl", "run.json", *states, "summary.json", "tiny_steps"]
    five = train(tiny_flux, data, tmp_path / "run of five", steps=5)
    saved = safetensors.torch.load_file(loras[-1])
    assert saved.keys() == five.lora.keys() and all(torch.equal(saved[name], five.lora[name]) for name in saved)
    states = [load_state(folder / f"state-00000{step}.tessera") for step in (4, 5)]
    assert [(s.step, s.batches, len(s.loss)) for s in states] == [(4, 4, 4), (5, 5, 5)]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps_done"], summary["loss"]) == ("cancelled", 5, five.loss)


def test_runs_are_numbered_and_found_finished_by_their_key_wherever_they_were_copied(tiny_flux, tmp_path):
    data = mixed_data()
    root = tmp_path / "here"
    other = tmp_path / "there"
    first = train(tiny_flux, data, root, steps=2, output_name="styles/tiny")
    second = train(tiny_flux, data, root, steps=2, output_name="styles/tiny", seed=9)
    names = [result.path.relative_to(root).as_posix() for result in (first, second)]
    assert names == ["styles/tiny (001)/tiny.safetensors", "styles/tiny (002)/tiny.safetensors"]
    assert json.loads((first.path.parent / "run.json").read_text())["key"] == first.summary["key"]
    # To another machine, where runs of that name have these numbers already.
    folders = {"styles/tiny (005)": first, "styles/tiny (004)": second}
    for folder, result in folders.items():
        shutil.copytree(result.path.parent, other / folder)
    for folder, result in folders.items():
        seed = {} if result is first else {"seed": 9}
        repeat = train(tiny_flux, data, other, steps=2, output_name="styles/tiny", **seed)
        assert repeat.path == other / folder / "tiny.safetensors" and repeat.loss == result.loss
        state = f"{folder}/state-000002.tessera"
        longer = train(tiny_flux, data, other, steps=3, output_name="styles/tiny", resume=state, **seed)
        assert longer.loss[:2] == result.loss and longer.path.parent.name == f"tiny ({6 if result is first else 7:03})"


def test_two_processes_do_not_train_into_one_folder(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 3)
    folder = run_folder(tmp_path)
    files = files_in(folder)
    other = RunFolder(folder, "tiny")
    said = f"another ComfyUI on this machine is training into {re.escape(folder.name)} right now; wait for it"
    with claim.lock_folder(other.path), pytest.raises(ValueError, match=said):
        train(tiny_flux, data, tmp_path)
    assert files_in(folder) == files
    assert len(train(tiny_flux, data, tmp_path).loss) == 6
    with claim.lock_folder(other.path):  # it has let go of it
        pass


def test_a_run_that_trains_on_another_machine_is_left_alone_and_one_that_was_killed_there_goes_on(
    tiny_flux, tmp_path, monkeypatch
):
    monkeypatch.setattr(claim, "WATCHED", 1.0)
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 3)
    folder = run_folder(tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["process"] == os.getpid() and facts["host"] == platform.node()
    (folder / "run.json").write_text(json.dumps(facts | {"machine": "0" * 8, "host": "node-7"}))
    lines = (folder / "progress.jsonl").read_text().splitlines()
    (folder / "progress.jsonl").write_text("\n".join(line for line in lines if '"end"' not in line) + "\n")
    watcher, stopped = Watcher(), threading.Event()

    def beat():
        while not stopped.wait(0.05):
            os.utime(folder / "progress.jsonl")

    thread = threading.Thread(target=beat)
    thread.start()
    files = files_in(folder).keys()
    try:
        with pytest.raises(ValueError, match=r"another ComfyUI on node-7 is training into tiny \(001\) right now"):
            train(tiny_flux, data, tmp_path)
    finally:
        stopped.set()
        thread.join()
    assert files_in(folder).keys() == files and "node-7" in (folder / "run.json").read_text()
    assert len(train(tiny_flux, data, tmp_path, watcher=watcher).loss) == 6 and run_folder(tmp_path) == folder
    assert any("node-7 does not train into" in phase for phase in watcher.phases)


def test_states_are_kept_up_to_two(tiny_flux, tmp_path):
    counts = []

    def look(step):
        counts.append(len(list(tmp_path.rglob("*.tessera"))))

    train(tiny_flux, mixed_data(), tmp_path, Watcher(at_step=look), save_every=1)
    assert max(counts) == 2
    assert sorted(p.name for p in tmp_path.rglob("*.tessera")) == ["state-000005.tessera", "state-000006.tessera"]


@pytest.mark.parametrize("change", [{"seed": 4}, {"network": {"rank": 2}}, {"optimizer": {"learning_rate": 2e-2}}])
def test_a_changed_setting_starts_anew_beside_the_other_run(change, tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 4)
    files = files_in(run_folder(tmp_path))
    watcher = Watcher()
    result = train(tiny_flux, data, tmp_path, watcher, **change)
    assert len(watcher.losses) == 6 and not [n for n in watcher.notes if "Resumed" in n]
    assert {path: path.read_bytes() for path in files} == files and result.path not in files


def test_raised_steps_go_on_where_the_finished_run_ended(tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", steps=9)
    train(tiny_flux, data, tmp_path / "raised")
    watcher = Watcher()
    equal(train(tiny_flux, data, tmp_path / "raised", watcher, steps=9), whole)
    assert len(watcher.losses) == 3


def test_a_run_that_finds_only_states_of_other_settings_says_how_to_go_on_from_one(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 4)
    folder = run_folder(tmp_path)
    for state in folder.glob("*.tessera"):
        os.utime(state, (1, 1))  # steps are quicker than the clock of some disks
    (folder / "state-000005.tessera").write_bytes(b"not whole")

    def notes_of(**changes):
        watcher = cancel_at(0)
        with pytest.raises(InterruptProcessingException):
            train(tiny_flux, data, tmp_path, watcher, **changes)
        return [note for note in watcher.notes if "step 0" in note]

    for steps, state in ((6, "state-000004"), (3, "state-000002")):
        (note,) = notes_of(optimizer={"learning_rate": 1e-3}, steps=steps)
        assert (
            "settings changed since the last run of" in note and f"choose {folder.name}/{state}.tessera under" in note
        )
    assert not notes_of(optimizer={"learning_rate": 1e-3}, steps=1)
    (note,) = notes_of(steps=1)
    assert "of this run are beyond steps = 1" in note and "raise steps to 2 or more" in note


def test_raised_steps_start_anew_where_the_schedule_depends_on_them(tiny_flux, tmp_path):
    options = {"optimizer": {"learning_rate": 1e-2, "lr_scheduler": "cosine"}}
    train(tiny_flux, mixed_data(), tmp_path, **options)
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, steps=9, **options)
    assert len(watcher.losses) == 9


def test_a_run_that_goes_on_from_a_state_of_other_settings_is_a_run_of_its_own(tiny_flux, tmp_path):
    data, slower = mixed_data(), {"optimizer": {"learning_rate": 1e-3}}
    cancelled(tiny_flux, data, tmp_path, 4)
    name = f"{run_folder(tmp_path).name}/state-000004.tessera"
    whole = train(tiny_flux, data, tmp_path, **slower)
    watcher = Watcher()
    mixed = train(tiny_flux, data, tmp_path, watcher, resume=name, **slower)
    assert (
        "The state comes from a run with other data, model or settings; this run continues with the ones here."
    ) in watcher.notes
    assert len(watcher.losses) == 2 and mixed.path != whole.path and mixed.loss != whole.loss
    assert watcher.learning_rates == [1e-3, 1e-3]
    watcher = Watcher()
    equal(train(tiny_flux, data, tmp_path, watcher, resume=name, **slower), mixed)
    equal(train(tiny_flux, data, tmp_path, watcher, **slower), whole)
    assert not watcher.losses


def test_a_run_that_went_on_under_other_settings_goes_on_by_name_as_itself(tiny_flux, tmp_path):
    data, slower = mixed_data(), {"optimizer": {"learning_rate": 1e-3}}
    root, copy = tmp_path / "runs", tmp_path / "again"
    cancelled(tiny_flux, data, root, 2)
    founding = f"{run_folder(root).name}/state-000002.tessera"
    shutil.copytree(root, tmp_path / "whole")
    whole = train(tiny_flux, data, tmp_path / "whole", resume=founding, **slower)
    cancelled(tiny_flux, data, root, 4, resume=founding, **slower)
    (state_file,) = root.glob("*/state-000004.tessera")
    name = state_file.relative_to(root).as_posix()

    # As it was queued it begins again where it was told to, and says where it was left.
    shutil.copytree(root, copy)
    watcher = Watcher()
    equal(train(tiny_flux, data, copy, watcher, resume=founding, **slower), whole)
    assert len(watcher.losses) == 4 and any(f"choose {name} under resume" in note for note in watcher.notes)

    watcher = Watcher()
    result = train(tiny_flux, data, root, watcher, resume=name, **slower)
    equal(result, whole)
    assert len(watcher.losses) == 2 and result.path.parent == state_file.parent
    assert not [note for note in watcher.notes if "other data" in note or "hoose" in note]
    assert result.summary["continued_from"] == whole.summary["continued_from"]

    watcher = Watcher()
    for state in (founding, name, f"{state_file.parent.name}/state-000006.tessera"):
        equal(train(tiny_flux, data, root, watcher, resume=state, **slower), result)
    assert not watcher.losses
    longer = train(tiny_flux, data, root, watcher, resume=state, steps=7, **slower)
    assert len(watcher.losses) == 1 and longer.summary["continued_from"] == whole.summary["continued_from"]
    continued = train(tiny_flux, data, root, watcher, resume=name, steps=7, **slower)
    assert len(watcher.losses) == 1 and continued.path == longer.path


def test_a_run_started_anew_goes_on_in_its_own_folder_and_what_a_killed_process_wrote_is_removed(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 2)
    first = run_folder(tmp_path)
    cancelled(tiny_flux, data, tmp_path, 5, resume="off")
    (second,) = set(tmp_path.iterdir()) - {first}
    (second / ".0123.part").write_bytes(b"half a state")
    os.utime(second / ".0123.part", (0, 0))
    assert train(tiny_flux, data, tmp_path).path == second / "tiny.safetensors"
    assert set(tmp_path.iterdir()) == {first, second} and not list(second.glob(".*"))


@pytest.mark.parametrize("resume", ["latest", "off"])
def test_a_run_that_was_killed_before_its_first_save_uses_its_folder_again(resume, tiny_flux, tmp_path):
    folder = train(tiny_flux, mixed_data(), tmp_path, steps=2).path.parent
    for path in set(folder.iterdir()) - {folder / "run.json", folder / "progress.jsonl"}:
        path.unlink()
    (folder / "previews").mkdir()
    for name in ("previews/step000000_0.png", "previews/.0123.part", "tiny.nodes.workflow.json"):
        (folder / name).write_text("left")
        os.utime(folder / name, (0, 0))
    assert train(tiny_flux, mixed_data(), tmp_path, steps=2, resume=resume).path.parent == folder
    assert not (folder / "previews" / ".0123.part").exists() and (folder / "previews" / "step000000_0.png").is_file()
    # What was saved, or finished, is left as it is.
    lora, summary = folder / "tiny.safetensors", folder / "summary.json"
    for survivor in (lora, folder / "state-000002.tessera", summary):
        for path in folder.iterdir():
            if path not in (survivor, folder / "previews", folder / "run.json"):
                path.rename(tmp_path / path.name)
        other = train(tiny_flux, mixed_data(), tmp_path, steps=2, resume="off").path.parent
        assert other != folder
        shutil.rmtree(other)
        for name in (lora.name, "state-000002.tessera", summary.name):
            if (tmp_path / name).exists():
                (tmp_path / name).rename(folder / name)


def test_resume_off_trains_from_the_start(tiny_flux, tmp_path):
    data = mixed_data()
    cancelled(tiny_flux, data, tmp_path, 4)
    watcher = Watcher()
    train(tiny_flux, data, tmp_path, watcher, resume="off")
    assert len(watcher.losses) == 6


def test_a_truncated_state_is_passed_over_by_latest_and_refused_by_name(tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole")
    cancelled(tiny_flux, data, tmp_path / "part", 5)
    folder = run_folder(tmp_path / "part")
    newest = folder / "state-000005.tessera"
    newest.write_bytes(newest.read_bytes()[:-100])
    watcher = Watcher()
    with pytest.raises(ValueError, match=r"state-000005.tessera is incomplete or from another version; choose another"):
        train(tiny_flux, data, tmp_path / "part", watcher, resume=f"{folder.name}/{newest.name}")
    assert not watcher.losses
    equal(train(tiny_flux, data, tmp_path / "part", watcher), whole)
    assert "Resumed at step 4." in watcher.notes


def test_a_finished_run_is_returned_from_disk_and_trained_again_when_its_file_is_gone(tiny_flux, tmp_path):
    data = mixed_data()
    first = train(tiny_flux, data, tmp_path)
    stamp = first.path.stat().st_mtime_ns
    watcher = Watcher()
    repeat = train(tiny_flux, data, tmp_path, watcher)
    equal(repeat, first)
    assert not watcher.losses and repeat.path == first.path and first.path.stat().st_mtime_ns == stamp
    assert repeat.lora.metadata == first.lora.metadata and repeat.summary["status"] == "finished"

    first.path.unlink()
    restored = train(tiny_flux, data, tmp_path)
    equal(restored, first)
    assert restored.path.is_file()
    for state in first.path.parent.glob("*.tessera"):
        state.unlink()
    restored.path.unlink()
    watcher = Watcher()
    equal(train(tiny_flux, data, tmp_path, watcher), first)
    assert len(watcher.losses) == 6


def drop_field(field):
    """Takes a field out of a summary."""

    def change(text):
        summary = json.loads(text)
        del summary[field]
        return json.dumps(summary).encode()

    return change


DAMAGED = {
    "a truncated LoRA": ("tiny.safetensors", lambda content: content[:-100]),
    "an empty LoRA": ("tiny.safetensors", lambda content: b""),
    "a truncated summary": ("summary.json", lambda content: content[:-100]),
    "a deep summary": ("summary.json", lambda content: b"[" * 100_000 + b"]" * 100_000),
    "losses that are none": ("summary.json", lambda content: content.replace(b'"loss": [', b'"loss": [null,')),
    "previews that are none": ("summary.json", lambda content: content.replace(b'"loss"', b'"previews": [], "loss"')),
    "points that are none": ("summary.json", lambda content: content.replace(b'"points": [', b'"points": [{},')),
    **{f"a summary without {name}": ("summary.json", drop_field(name)) for name in ("loss", "key", "status", "folder")},
}


def test_a_finished_run_whose_files_cannot_be_read_is_restored_as_one_whose_files_are_gone(tiny_flux, tmp_path):
    options = {"steps": 2, "validation": {"every_n_steps": 1, "keep_best": False}}
    first = train(tiny_flux, mixed_data(), tmp_path, **options)
    for name, (file, damage) in DAMAGED.items():
        path = first.path.with_name(file)
        content = path.read_bytes()
        assert damage(content) != content, name
        path.write_bytes(damage(content))
        watcher = Watcher()
        restored = train(tiny_flux, mixed_data(), tmp_path, watcher, **options)
        assert restored.path == first.path and "Resumed at step 2." in watcher.notes and not watcher.losses, name
        equal(restored, first)
        repeat = train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), **options)
        assert repeat.validation == first.validation and not any("Resumed" in note for note in watcher.notes), name
        equal(repeat, first)


def test_training_neither_reads_nor_moves_the_global_generators(tiny_flux, tmp_path):
    data = mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **HARD)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    equal(train(tiny_flux, data, tmp_path / "again", **HARD), whole)
    assert torch.equal(torch.get_rng_state(), state)
    disturbed = Watcher(at_step=lambda step: torch.manual_seed(step) and torch.rand(5))
    equal(train(tiny_flux, data, tmp_path / "disturbed", disturbed, **HARD), whole)


def test_latest_takes_no_run_of_a_longer_name(tiny_flux, tmp_path):
    train(tiny_flux, mixed_data(), tmp_path, output_name="face-v2")
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, output_name="face")
    assert len(watcher.losses) == 6 and not watcher.notes
