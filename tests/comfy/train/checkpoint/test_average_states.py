"""The average of a run's saved LoRAs is the one that its formula says, of that run's files and no others."""

import json
from itertools import pairwise

import folder_paths
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.lora.files.formats import save_lora
from tessera.nodes.loras.average import TesseraAverageStates
from tessera.train.checkpoint.post_hoc_ema import (
    WIDEST,
    Profile,
    average,
    find_snapshots,
    gamma_of,
    list_runs,
    snapshots,
    weights_of,
)
from tessera.train.optim.averaging import LoraAverage
from tiny.train.runs import mixed_data, train

STEPS = (2, 4, 6, 7)


@pytest.fixture(scope="module")
def runs(tiny_files, tmp_path_factory):
    """Two runs of 7 steps, saved at steps 2, 4, 6 and at every step."""
    root = tmp_path_factory.mktemp("output") / "loras"
    for name, interval in (("few", 2), ("styles/every", 1)):
        train(tiny.load_flux(tiny_files["flux"]), mixed_data(), root, steps=7, output_name=name, save_every=interval)
    return root


def run_of(root, name):
    (run,) = [run for run in list_runs(root) if run.startswith(name)]
    return run


def files(root, run):
    return [(snapshot.step, load_file(snapshot.path)) for snapshot in snapshots(root / run)]


def test_the_loras_of_a_run_are_those_on_the_way_and_the_finished_one(runs):
    sparse, dense = (snapshots(runs / run_of(runs, name)) for name in ("few", "styles/every"))
    assert [snapshot.step for snapshot in sparse] == list(STEPS) and sparse[-1].path.name == "few.safetensors"
    assert [snapshot.step for snapshot in dense] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("name", "decay"), [("styles/every", 0.4), ("few", 0.4), ("few", 0.05)])
def test_the_exponential_average_is_the_live_one_of_what_was_saved(runs, name, decay):
    """Each LoRA stands for the steps since the one before it, and is taken in at each of them."""
    run = run_of(runs, name)
    saved = files(runs, run)
    (start, first), by_step = saved[0], {}
    for (last, _), (step, tensors) in pairwise(saved):
        by_step |= dict.fromkeys(range(last + 1, step + 1), tensors)
    live = LoraAverage(decay, first)
    live.updates = start
    for tensors in by_step.values():
        live.sources = tensors
        live.update()
    averaged, report = average(runs, run, Profile(decay=decay))
    torch.testing.assert_close(dict(averaged), live.master_weights, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(averaged[name], saved[-1][1][name]) for name in averaged)
    assert report.count("\n") == len(saved) and f"exponential, decay {decay:g} per step" in report
    assert json.loads(averaged.metadata["tessera_average"])["steps"] == [step for step, _ in saved]


def test_a_lora_saved_at_every_step_gives_the_average_that_the_training_would_have_kept(runs, tiny_flux, tmp_path):
    """But for the start, which is the first LoRA here and the zeros before it there."""
    reference = train(tiny_flux, mixed_data(), tmp_path, steps=7, optimizer={"ema_decay": 0.3}).lora
    run = run_of(runs, "styles/every")
    averaged, _ = average(runs, run, Profile(decay=0.3))
    share = float(np.prod([min(0.3, (1 + t) / (10 + t)) for t in range(1, 8)]))
    first = files(runs, run)[0][1]
    ups = [name for name in averaged if "lora_up" in name]
    assert ups
    for name in ups:
        torch.testing.assert_close(averaged[name] - share * first[name], reference[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25, WIDEST])
def test_the_power_average_counts_each_step_by_its_power(runs, width):
    gamma = gamma_of(width)
    t = (np.arange(200_000) + 0.5) / 200_000
    density = t**gamma / (t**gamma).sum()
    mean = (t * density).sum()
    assert np.sqrt(((t - mean) ** 2 * density).sum()) == pytest.approx(width, rel=1e-4)
    parts = [density[(t > a / 7) & (t <= b / 7)].sum() for a, b in pairwise((0, *STEPS))]
    weights = weights_of(STEPS, Profile("power", width=width))
    assert weights == pytest.approx(parts, rel=1e-3) and sum(weights) == pytest.approx(1.0)
    run = run_of(runs, "few")
    averaged, _ = average(runs, run, Profile("power", width=width))
    saved = [tensors for _, tensors in files(runs, run)]
    for name in averaged:
        expected = sum(w * tensors[name].double() for w, tensors in zip(weights, saved, strict=True))
        torch.testing.assert_close(averaged[name].double(), expected, rtol=1e-6, atol=1e-9)


def test_the_last_part_leaves_out_what_was_before(runs):
    profile = Profile("equal", last_part=0.5)
    counted, skipped = find_snapshots(runs, run_of(runs, "few"), profile)
    assert [snapshot.step for snapshot in counted] == [4, 6, 7] and skipped == 2
    assert weights_of([4, 6, 7], profile) == [1 / 3] * 3
    power = weights_of([4, 6, 7], Profile("power", width=WIDEST), previous_step=2)
    assert power == pytest.approx([2 / 5, 2 / 5, 1 / 5], abs=0.05), "nearly equal by steps, from step 2 on"


def test_states_that_cannot_be_averaged_end_in_one_sentence(runs, tmp_path):
    run = run_of(runs, "few")
    with pytest.raises(ValueError, match="the last_part 0.1 of the steps of .* holds 1 of its 4 saved LoRAs"):
        average(runs, run, Profile(last_part=0.1))
    for outside in ("../few", "/", "absent"):
        with pytest.raises(ValueError, match="run: there is no run"):
            average(runs, outside, Profile())
    lora, _ = average(runs, run, Profile())
    folder = tmp_path / "mixed (001)"
    save_lora(folder / "mixed_steps" / "mixed-step000001.safetensors", lora)
    partial = type(lora)({name: tensor for name, tensor in lora.items() if "double_blocks_0_img_attn" in name}, {})
    save_lora(folder / "mixed_steps" / "mixed-step000002.safetensors", partial)
    with pytest.raises(ValueError, match="mixed-step000002.safetensors has other layers or another rank"):
        average(tmp_path, "mixed (001)", Profile())
    (folder / "mixed_steps" / "mixed-step000001.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="mixed-step000001.safetensors can.t be read"):
        average(tmp_path, "mixed (001)", Profile())
    for changes in ({"kind": "sum"}, {"decay": 1.0}, {"width": 0.3}, {"last_part": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is|profile is"):
            Profile(**changes)


def test_the_node_lists_the_runs_and_gives_a_lora_with_a_report(runs, monkeypatch):
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(runs.parent))
    run = run_of(runs, "styles/every")
    schema = TesseraAverageStates.define_schema()
    assert schema.inputs[0].options == list_runs(runs) and len(list_runs(runs)) == 2
    assert TesseraAverageStates.validate_inputs(run) is True
    assert "there is no run 'styles'" in TesseraAverageStates.validate_inputs("styles")
    fingerprint = TesseraAverageStates.fingerprint_inputs(run=run, decay=0.5)
    assert TesseraAverageStates.fingerprint_inputs(run="../..") == "../.." and len(fingerprint) == 7
    with torch.inference_mode():
        output = TesseraAverageStates.execute(run, "equal", 0.5, 0.1, 0.5)
    lora, report = output.args
    assert not any(tensor.is_inference() for tensor in lora.values())
    assert report.startswith("The average of 4 saved LoRAs (equal):") and "25.00%" in report
