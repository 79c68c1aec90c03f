"""Captions, run folders, LoRAs and patterns that strangers wrote to take time and memory: each ends at its budget."""

import json
import math
import os

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tessera.common.file_names import plain_name
from tessera.common.untrusted import mp4_tables
from tessera.common.untrusted.budgets import CURVE, PROGRESS_LINE, RUN_NOTES, Budget, OverBudget
from tessera.common.untrusted.in_flight import PixelGate
from tessera.common.untrusted.mp4_tables import claimed_samples
from tessera.common.untrusted.tensor_files import metadata_field
from tessera.compile.settings import parse_overrides
from tessera.data.captioning.instruction import CaptionStyle
from tessera.data.captions.notes import variant_notes
from tessera.data.captions.options import CaptionOptions
from tessera.data.captions.tags import TagRules, split_tags
from tessera.data.captions.variants import make_caption_variants
from tessera.data.folders.class_words import read_class_word
from tessera.data.folders.dataset import scan_images
from tessera.data.folders.options import FolderOptions
from tessera.data.media import images, thumbnails
from tessera.data.media.images import inspect_image, load_mask
from tessera.data.media.thumbnails import image_thumbnail, video_thumbnail
from tessera.data.media.videos import inspect_video
from tessera.data.review import drawn_masks
from tessera.data.review.captions import caption_faults
from tessera.data.review.drawn_masks import save_mask, shown_mask
from tessera.lora import source
from tessera.lora.files.header import for_file
from tessera.lora.options import NetworkOptions
from tessera.lora.patterns import parse_targets
from tessera.train.checkpoint.resume import find_state
from tessera.train.checkpoint.state import DamagedState, read_header
from tessera.train.config.settings import parse_sigmas
from tessera.train.optim.lr_curve import parse_curve
from tessera.train.optim.registry import parse_args
from tessera.train.preflight.claim import claimed_by_one, lock_folder
from tessera.train.runs.run_folder import RunFolder
from tessera.train.runs.run_record import GREATEST, PROGRESS, RUN, RunReader, RunRecord
from tiny.data.films import write_film

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


# Words


def test_words_of_a_workflow_are_bounded_wherever_captions_are_searched_for_them():
    word_list, long = ",".join(f"w{n}" for n in range(202)), "." * 4999 + "xy"
    for words, size in ((word_list, "201 entries"), (long, "5,001 characters")):
        with pytest.raises(OverBudget, match=f"trigger_words has {size} .* more than a list of words"):
            read_class_word("dog", words)
        with pytest.raises(OverBudget, match=f"never_use has {size}"):
            CaptionStyle(never_use=words)
    for read in (
        lambda: make_caption_variants("a", CaptionOptions(), long, "a.txt"),
        lambda: list(caption_faults({"a": "." * 9}, long, None)),
        lambda: CaptionStyle(trigger_words=long),
    ):
        with pytest.raises(OverBudget, match="trigger_words has 5,001 characters"):
            read()
    with pytest.raises(OverBudget, match="class_word has 5,001 characters"):
        read_class_word(long, "a")
    with pytest.raises(OverBudget, match="instruction has 20,001 characters"):
        CaptionStyle(instruction="x" * 20_001)


@pytest.mark.parametrize("value", ["-" * 9000 + "1", "1" + "+1" * 4000, "[" * 9000], ids=["signs", "sums", "lists"])
def test_values_too_deep_for_python_are_lines_to_correct(value):
    """Python answers these with MemoryError, RecursionError and SyntaxError."""
    with pytest.raises(ValueError, match="optimizer_args has the line 'a=.*write one key=value per line"):
        parse_args(f"a={value}")


def test_settings_in_words_are_bounded():
    """A literal of megabytes holds the interpreter for seconds, and takes a gigabyte."""
    readers = {
        "optimizer_args": parse_args,
        "lr_curve": parse_curve,
        "overrides": parse_overrides,
        "sigmas": parse_sigmas,
    }
    for name, read in readers.items():
        with pytest.raises(OverBudget, match=f"{name} has 10,001 characters .* more than a list of settings"):
            read("x" * 10_001)
    with pytest.raises(ValueError, match="output_name has 2,001 characters; use at most 2,000"):
        plain_name("a" + "\u0301\u0327" * 1000)  # of 80,000 accents the system's library took 7 s
    assert not parse_overrides(f"double_blocks.1-{'9' * 5000} eager")[0].matches("double_blocks.1")


def test_a_class_caption_is_no_longer_than_a_caption(tmp_path):
    with pytest.raises(OverBudget, match="A caption with the class_word has 49,999 characters"):
        read_class_word("dog" * 1333, "a").caption("a " * 10 + "." * 9999)
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").write_text("a fox")
    calls = []
    scan_images(tmp_path, interrupted=lambda: calls.append(1))
    plain = len(calls)
    scan_images(
        tmp_path, trigger_words="x", options=FolderOptions(class_word="dog"), interrupted=lambda: calls.append(1)
    )
    assert len(calls) == 2 * plain + 1


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
def test_run_waits_for_no_pipe_and_writes_through_no_link_in_its_folder(tmp_path):
    (folder := tmp_path / "fox (001)").mkdir()
    (folder / RUN).write_text('{"machine": "00000000", "host": "node-7", "process": 1}')
    os.mkfifo(folder / PROGRESS)
    run = RunFolder(folder, "fox")
    with claimed_by_one(run, None):  # another machine may be training here
        RunRecord(folder, {}).end("finished", 1, "")
    (folder / PROGRESS).unlink()
    (other := tmp_path / "other").mkdir()
    (other / "secret").touch()
    (folder / PROGRESS).symlink_to(other / "secret")
    RunRecord(folder, {}).end("finished", 1, "")
    assert (other / "secret").read_text() == ""
    for part in ("previews", "fox_steps"):
        (folder / part).symlink_to(other)
        with pytest.raises(ValueError, match=rf"output_name: '{part}' in the folder 'fox .001.' of this run is a link"):
            run.create()
        (folder / part).unlink()
    assert os.listdir(other) == ["secret"] and run.create() is run


@POSIX
def test_a_picture_of_gigabytes_is_not_read(tmp_path):
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(2_000_000_001)  # it takes no room on the disk
    for read in (inspect_image, lambda path: load_mask(path, alpha=False)):
        with pytest.raises(ValueError, match="The picture 'a.png' can't be read: a.png has 2,000,000,001 bytes"):
            read(tmp_path / "a.png")


def test_a_clip_of_a_kilobyte_that_claims_millions_of_frames_is_not_opened(tmp_path):
    """FFmpeg would make an index of 3.6 GB of it."""
    film = bytearray(write_film(tmp_path / "a.mp4", 3).read_bytes())
    place = film.index(b"stsz") + 8
    film[place : place + 8] = (1).to_bytes(4, "big") + (50_000_000).to_bytes(4, "big")
    (tmp_path / "b.mp4").write_bytes(film)
    run_of_samples = (16).to_bytes(4, "big") + b"trun" + bytes(4) + (40_000_000).to_bytes(4, "big")
    (tmp_path / "c.mp4").write_bytes(film[: film.index(b"moov") - 4] + run_of_samples)
    sound = bytearray(film)
    place = sound.index(b"vide", sound.index(b"hdlr"))
    sound[place : place + 4] = b"soun"
    place = sound.index(b"stts") + 8
    sound[place : place + 12] = b"".join(number.to_bytes(4, "big") for number in (1, 50_000_000, 1))
    (tmp_path / "d.mov").write_bytes(sound)  # FFmpeg makes no index of such sound
    assert [claimed_samples(tmp_path / name) for name in ("a.mp4", "c.mp4", "d.mov")] == [3, 40_000_000, 0]
    for read in (inspect_video, video_thumbnail):
        with pytest.raises(ValueError, match="'b.mp4' can't be read: it has 50,000,000 entries .at most 2,000,000."):
            read(tmp_path / "b.mp4")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0\0\x10moov\0\0\0\x08cmov", "compressed"),
        (b"\0\0\0\0moov" * 30, "inside one another"),
        (b"\0\0\0\x08free" * 9, "too many boxes"),
    ],
)
def test_a_header_of_endless_boxes_is_refused(tmp_path, monkeypatch, data, message):
    monkeypatch.setattr(mp4_tables, "MOST_BOXES", 8 if b"free" in data else 100)
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        claimed_samples(tmp_path / "a.mp4")
    for data in (b"\0\0\0\x04moov", b"\0\0\0\x01moov" + bytes(8), b"\0\0\0\x09stsz", b"moov"):
        (tmp_path / "a.mp4").write_bytes(data)
        assert claimed_samples(tmp_path / "a.mp4") == 0


def test_pictures_clips_masks_and_tiffs_of_pages_wait_for_their_turn(tmp_path, monkeypatch):
    class Gate(PixelGate):
        def decoding(self, pixels):
            pixel_counts.append(pixels)
            return super().decoding(pixels)

    pixel_counts: list[int] = []
    for module in (images, drawn_masks, thumbnails):
        monkeypatch.setattr(module, "page_pixels", Gate(10))
    Image.new("L", (5, 4)).save(tmp_path / "a.png")
    mask_bytes = (tmp_path / "a.png").read_bytes()
    Image.new("RGB", (3, 3)).save(tmp_path / "a.tif")
    save_mask(tmp_path / "b.png", shown_mask(tmp_path / "a.png"), (4, 5))
    inspect_image(tmp_path / "a.tif")
    image_thumbnail(tmp_path / "a.png")
    video_thumbnail(write_film(tmp_path / "a.mp4", 1, size=(16, 32)))
    assert pixel_counts == [20, 20, 9, 20, 512]
    monkeypatch.setattr(drawn_masks, "MASK_FILE", Budget("a mask", "", "make it smaller", bytes=1000, pixels=19))
    for show in (lambda: shown_mask(tmp_path / "a.png"), lambda: save_mask(tmp_path / "b.png", mask_bytes, (4, 5))):
        with pytest.raises(OverBudget, match="20 pixels"):
            show()


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
