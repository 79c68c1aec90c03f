"""Captions, run folders, LoRAs and patterns that strangers wrote to take time and memory: each ends at its budget."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file
from tessera.common.untrusted.budgets import CURVE, PROGRESS_LINE, RUN_NOTES, Budget, OverBudget
from tessera.common.untrusted.tensor_files import metadata_field
from tessera.data.captions.notes import variant_notes
from tessera.data.captions.options import CaptionOptions
from tessera.data.captions.tags import TagRules, split_tags
from tessera.data.captions.variants import make_caption_variants
from tessera.data.folders.dataset import scan_images
from tessera.lora import source
from tessera.lora.files.header import for_file
from tessera.lora.options import NetworkOptions
from tessera.lora.patterns import parse_targets
from tessera.train.checkpoint.resume import find_state
from tessera.train.checkpoint.state import DamagedState, read_header
from tessera.train.preflight.claim import lock_folder
from tessera.train.runs.run_folder import RunFolder
from tessera.train.runs.run_record import GREATEST, RunReader

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes in folders")


# Captions


def test_a_dozen_words_or_a_full_stop_inside_read_as_a_sentence():
    options = CaptionOptions(shuffle_tags=True)
    texts = {"a": "fox, " + "word " * 12, "b": "red. fox, x", "c": "fox, " + "word " * 11, "d": "a. , b", "e": "e" * 9}
    variants = {name: make_caption_variants(text, options, "", name) for name, text in texts.items()}
    (note,) = [note for note in variant_notes(options, "f", list(texts.values()), variants) if "sentences" in note]
    assert ": a, b; switch it off" in note


def test_variants_of_many_tags_are_counted_without_large_numbers():
    tags = split_tags(", ".join(map(str, range(900))), TagRules())
    for rules in (TagRules(shuffle=True), TagRules(dropout=0.5), TagRules(shuffle=True, dropout=0.5)):
        count = split_tags(", ".join(map(str, range(900))), rules).count(rules)
        assert 1000 < count < 1 << 64
    assert tags.count(TagRules()) == 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            ", ".join(map(str, range(3000))),
            {"shuffle_tags": True, "tag_dropout": 0.1},
            "A caption of 'a.txt' has 2,999 entries .at most 1,000., more than a caption of tags may have; shorten",
        ),
        ("{a|b}" * 1000, {"wildcards": True}, r"in line 1, column 1001 a '\{' after 200 others; use fewer"),
        ("x" * 20_001, {}, "A caption of 'a.txt' has 20,001 characters .at most 20,000."),
        ("{" + "x" * 20_001 + "|b}", {"wildcards": True}, "A caption of 'a.txt' has 20,001 characters"),
        (
            "\n".join(f"{n:03d} {{a|b}}{{c|d}}{{e|f}}{{g|h}}{{i|j}}{{k|l}}{{m|n}}{{o|p}}{{q|r}}" for n in range(300)),
            {"wildcards": True, "caption_per_line": True, "caption_variants": 1000},
            "The caption file 'a.txt' has .* more than the forms of all captions of a folder may have; lower",
        ),
    ],
)
def test_a_caption_past_its_budget_is_refused_before_variants_are_made(text, options, message):
    with pytest.raises(ValueError, match=message):
        make_caption_variants(text, CaptionOptions(**options), "", "a.txt")


def test_cancel_is_asked_for_at_each_caption(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.txt").write_text(name)
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan_images(tmp_path, interrupted=interrupted)


# Run folders


def reader(folder, *lines, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    (folder / "progress.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunReader(folder)


def step(number, loss=0.5):
    return json.dumps({"kind": "step", "step": number, "loss": loss, "rate": 1e-4})


BEGIN = '{"kind":"begin","step":0,"validation":[],"loss":['


def test_a_line_of_millions_of_losses_is_passed_over_and_the_next_ones_are_read(tmp_path):
    long_line = BEGIN + "0," * (CURVE.items + 1) + "0]}"
    deep = BEGIN + "[" * 5000 + "]" * 5000 + "]}"
    containers = BEGIN + "[]," * PROGRESS_LINE.items + "0]}"
    longer = BEGIN + "0," * (PROGRESS_LINE.bytes // 2) + "0]}"
    curve = reader(tmp_path / "run", step(1), long_line, deep, containers, longer, step(2)).read()
    assert list(curve.loss) == [1, 2]


def test_a_line_longer_than_its_budget_may_be_written_in_two_goes(tmp_path):
    curve_reader = reader(tmp_path / "run", step(1))
    with open(tmp_path / "run" / "progress.jsonl", "a") as file:
        file.write(BEGIN + "0," * (PROGRESS_LINE.bytes // 2 + 10))
    assert list(curve_reader.read().loss) == [1]
    with open(tmp_path / "run" / "progress.jsonl", "a") as file:
        file.write("0]}\n" + step(2) + "\n")
    assert list(curve_reader.read().loss) == [1, 2]


def test_run_json_of_millions_of_lists_is_not_parsed(tmp_path):
    run_reader = reader(tmp_path / "run", run='{"output_name": "fox", "x": [' + "[]," * 400_000 + "0]}")
    assert run_reader.facts() == {}


def test_notes_are_kept_once_each_and_in_bounded_number(tmp_path):
    lines = [json.dumps({"kind": "note", "text": f"note {n % 3000}"}) for n in range(6000)]
    lines.append(json.dumps({"kind": "note", "text": "x" * 100_000}))
    notes = list(reader(tmp_path / "run", *lines).read().notes)
    assert notes[:2] == ["note 0", "note 1"] and len(notes) == len(set(notes)) == RUN_NOTES.items
    short = list(reader(tmp_path / "other", lines[0], lines[0], lines[-1]).read().notes)
    assert short == ["note 0", "x" * RUN_NOTES.characters]


def test_losses_that_no_sum_can_hold_stay_finite(tmp_path):
    curve = reader(tmp_path / "run", step(1, 1.7e308), step(2, 1.7e308), step(3).replace("0.5", "1e999")).read()
    assert [loss for _, loss, _ in curve.loss.values()] == [GREATEST, GREATEST]
    assert math.isfinite(sum(loss for _, loss, _ in curve.loss.values()))


# Files


@POSIX
def test_a_pipe_named_like_a_state_or_a_lora_is_passed_over(tmp_path):
    folder = tmp_path / "fox (001)"
    folder.mkdir()
    for name in ("state-000010.tessera", "fox.safetensors", "summary.json"):
        os.mkfifo(folder / name)
    run = RunFolder(folder, "fox")
    assert run.states() == [] and run.read_summary() is None
    assert find_state(tmp_path, "fox (001)/state-000010.tessera") is None
    with pytest.raises(DamagedState):
        read_header(folder / "state-000010.tessera")


@POSIX
def test_a_run_folder_whose_name_is_no_utf8_can_be_claimed(tmp_path):
    folder = tmp_path / os.fsdecode(b"fox\xff (001)")
    folder.mkdir()
    with lock_folder(folder):
        pass


@pytest.mark.parametrize("text", ["[" * 1000, "[" * 1000 + "]" * 1000, '{"a":' * 500])
def test_metadata_of_deep_brackets_is_saved_as_it_is(text):
    assert for_file({"note": text}, {}, "kohya")["note"] == text


def test_metadata_past_its_depth_is_no_error_for_readers():
    with pytest.raises(OverBudget):
        metadata_field({"tessera": "[" * 200 + "]" * 200}, "tessera")


# LoRA files and patterns of layers


def test_a_lora_of_too_many_tensors_is_refused_before_they_are_read(tmp_path, monkeypatch):
    save_file({f"{number}.alpha": torch.zeros(1) for number in range(3)}, tmp_path / "fox.safetensors")
    assert len(source.read_lora_file(tmp_path / "fox.safetensors", "base_lora")[0]) == 3
    monkeypatch.setattr(source, "LORA_FILE", Budget("a LoRA", "", "choose another file", items=2))
    monkeypatch.setattr(source, "read_tensors", lambda path: pytest.fail("they were read"))
    with pytest.raises(ValueError, match="base_lora: fox.safetensors has 3 entries .* may have; choose another file"):
        source.read_lora_file(tmp_path / "fox.safetensors", "base_lora")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n*" + "Ý*" * 9_000, "Line 2 of targets has 9,001 entries .* more than a name with"),
        ("a\n" * 1001, "targets has 1,001 entries .* more than a list of patterns of layers"),
        ("a" * 20_001, "targets has 20,001 characters .* more than a list of patterns of layers"),
    ],
)
def test_patterns_of_layers_are_bounded(text, message):
    with pytest.raises(ValueError, match=message):
        parse_targets(text)
    with pytest.raises(ValueError, match=message.replace("targets", "rank_patterns")):
        NetworkOptions(rank_patterns=text)
