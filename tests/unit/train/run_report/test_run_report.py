"""The report of a run: what a folder that Train LoRA wrote says, and that one that anybody wrote does no harm."""

import json
import os
import re
from html import unescape

import pytest
from PIL import Image
from safetensors.torch import save_file
from tessera.common.untrusted.budgets import PREVIEW
from tessera.train.run_report.contents import read_report
from tessera.train.run_report.files import has_report, page_of, write_lora_picture, write_report
from tessera.train.runs.run_folder import RunFolder
from tessera.train.runs.run_trash import own_files
from torch import zeros

HOSTILE = "<script src='https://elsewhere/x.js'>alert(1)</script> & /home/ann/secret/fox.png"
RECORDED = {
    "base_model": "flux.safetensors",
    "batch_size": 2,
    "seed": 7,
    "network": {"algorithm": "lora", "rank": 8, "alpha": 8.0, "dropout": 0.1, "rank_dropout": 0.0},
    "optimizer": {"optimizer": "adamw", "learning_rate": 3e-4, "lr_scheduler": "constant", "weight_decay": 0.01},
    "memory": {"checkpointing": "full", "prefetch_blocks": 1},
    "data": {
        "samples": 12,
        "buckets": [{"grid": [1, 64, 48], "samples": 9}, {"grid": [1, 48, 64], "samples": 3}],
        "made_with": {"megapixels": 1.0, "folders": [{"files": 12, "trigger_words": "ohwx fox,"}]},
    },
    "tessera_version": "0.1.0",
}
VALIDATION = {"best": {"file": "fox-best.safetensors", "step": 20, "loss": 0.31}}
SUMMARY = {
    **dict.fromkeys(("key", "output_name", "folder", "started", "ended"), "x"),
    **dict.fromkeys(("steps", "steps_done", "targets"), 30),
    **{"status": "finished", "parameters": 47104, "notes": [], "files": [], "compile": True, "loss": []},
    **{"peak_memory_mib": 2048, "peak_memory_of": "GPU", "seconds_per_step": 0.25, "validation": VALIDATION},
}


def save_lora(path, step, recorded):
    metadata = {"ss_steps": str(step), "tessera": json.dumps(recorded)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": zeros(1)}, path, metadata=metadata)


def write_run(root, number=1, note=HOSTILE, preview_steps=(10, 20, 30), **changes):
    folder = RunFolder(root / f"fox ({number:03d})", "fox")
    recorded = RECORDED | changes
    for step in (10, 20):
        save_lora(folder.step_lora_path(step), step, recorded)
    save_lora(folder.lora_path, 30, recorded)
    save_lora(folder.best_path, 20, recorded)
    facts = {"output_name": "fox", "model": "flux.safetensors", "steps": 30, "started": "2026-11-27T18:04:00+00:00"}
    (folder.path / "run.json").write_text(json.dumps(facts))
    lines = [{"kind": "start"}, {"kind": "begin", "step": 0, "loss": [], "validation": []}]
    lines += [{"kind": "step", "step": step, "loss": 1 / step, "rate": 3e-4} for step in range(1, 31)]
    lines += [{"kind": "validation", "step": step, "loss": round(0.3 + step / 1000, 3)} for step in (10, 20, 30)]
    lines += [
        {"kind": "note", "text": note},
        {"kind": "end", "status": "finished", "step": 30, "text": "", "seconds": 75},
    ]
    (folder.path / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder.path / "summary.json").write_text(json.dumps(SUMMARY))
    previews = folder.path / "previews"
    previews.mkdir()
    shots = [
        {"step": step, "row": row, "title": f"a fox {note}", "settings": {}, "frames": 1}
        for step in preview_steps
        for row in (0, 1)
    ]
    for shot in shots:
        Image.new("RGB", (64, 48), (8 * shot["step"], 99, 0)).save(
            previews / f"step{shot['step']:06d}_{shot['row']}.png"
        )
    (previews / "previews.json").write_text(json.dumps(shots))
    return folder


def rows(page):
    """Maps the first cell of each row of the page's tables to the texts of its other cells."""
    cells = (
        re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    )
    return {unescape(first): [unescape(text) for text in rest] for first, *rest in cells}


def test_a_report_says_what_mattered_and_folds_away_what_stayed_at_its_default(tmp_path):
    folder = write_run(tmp_path)
    report = read_report(folder)
    assert report.outcome == "Finished after 30 steps."
    main_settings = {
        "model": "flux.safetensors",
        "steps": "30",
        "rank": "8",
        "learning_rate": "0.0003",
        "dropout": "0.1",
    }
    assert main_settings.items() <= report.settings.items() and report.settings["checkpointing"] == "full"
    assert {"rank_dropout", "weight_decay", "prefetch_blocks"} <= set(report.other_settings)
    assert not set(report.settings) & set(report.other_settings)
    assert (
        report.measures["time, loading included"] == "0:01:15"
        and report.measures["peak memory"] == "2.0 GiB of the GPU"
    )
    assert report.measures["loss, first and last steps"] == "1, 0.03333"
    assert report.measures["started"] == "2026-11-27 18:04 UTC"
    sizes = {"samples": "12", "samples of 64 x 48 tokens": "9", "samples of 48 x 64 tokens": "3"}
    assert report.data == {**sizes, "trigger words": "ohwx fox", "megapixels": "1"}
    saves = [(save.file, save.step, save.validation, list(save.remarks)) for save in report.saves]
    assert saves == [
        ("fox-step000010.safetensors", 10, 0.31, []),
        ("fox-step000020.safetensors", 20, 0.32, ["lowest validation loss"]),
        ("fox.safetensors", 30, 0.33, ["newest"]),
        ("fox-best.safetensors", 20, 0.31, ["lowest validation loss"]),
    ]
    page = page_of(folder)
    assert rows(page)["fox.safetensors"] == ["30", "0.33", "newest"]
    folded = page[page.index("<details>") :]
    assert "weight_decay" in rows(folded) and "dropout" not in rows(folded)


def test_the_page_has_no_script_no_part_from_elsewhere_and_no_path(tmp_path):
    page = page_of(write_run(tmp_path))
    assert "<script" not in page and "/home/ann" not in page and str(tmp_path) not in page
    assert "fox.png" in page  # what is left of the path
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]*)""", re.sub(r"&lt;.*?&gt;", "", page))
    assert len(sources) == 2 and all(source.startswith("data:image/") for source in sources)


def test_two_runs_stand_side_by_side_with_the_settings_that_differ_and_pictures_of_equal_steps(tmp_path, monkeypatch):
    first = write_run(tmp_path, note="first")
    network = RECORDED["network"] | {"rank": 16}
    second = write_run(tmp_path, 2, note="second", preview_steps=(20, 30, 40), network=network, batch_size=4)
    sheets = []
    monkeypatch.setattr("tessera.train.run_report.pictures.render_sheet", lambda *sheet: sheets.append(sheet))
    page = page_of(first, second)
    differing = rows(page[: page.index("Time and memory")])
    assert differing["rank"] == ["8", "16"] and differing["batch_size"] == ["2", "4"] and "seed" not in differing
    assert rows(page[page.index("<details>") :])["seed"] == ["7", "7"]
    ((titles, columns, cells),) = sheets
    assert columns == ["step 20", "step 30"] and len(cells) == 8
    expected = [f"fox ({number:03d}): a fox {note}" for number, note in ((1, "first"), (2, "second"))]
    assert titles == 2 * expected  # a row of one beside the same row of the other


def test_the_files_carry_the_workflow_and_belong_to_the_run(tmp_path):
    folder = write_run(tmp_path)
    assert not has_report(folder)
    write_report(folder, {"workflow": '{"nodes": []}'})
    write_lora_picture(folder)
    assert has_report(folder)
    with Image.open(folder.path / "report.png", formats=["PNG"]) as picture:
        assert picture.text["workflow"] == '{"nodes": []}' and picture.width == 1200
    with Image.open(folder.path / "fox.preview.png", formats=["PNG"]) as picture:
        assert picture.getpixel((0, 0)) == (240, 99, 0)  # of the last step
    Image.new("RGB", (64, 48)).save(folder.path / "fox.preview.png")  # chosen by its user
    write_lora_picture(folder)
    with Image.open(folder.path / "fox.preview.png", formats=["PNG"]) as picture:
        assert picture.getpixel((0, 0)) == (0, 0, 0)
    run_files = {path.name for path in own_files(folder)}
    assert {"report.html", "report.png", "fox.preview.png"} <= run_files
    later = (folder.path / "report.png").stat().st_mtime_ns + 10**9
    os.utime(folder.path / "summary.json", ns=(later, later))
    assert not has_report(folder)  # the run went on


@pytest.mark.parametrize(
    "recorded",
    [
        {"network": [], "optimizer": 3, "memory": {"checkpointing": {"a": {}}}, "data": "x", "saving": []},
        {"data": {"buckets": [3, {"grid": []}, {"grid": "x"}, {"grid": [[], []], "samples": [[]]}], "made_with": [1]}},
        {"seed": "9" * 1000, "network": {"rank": ["a"] * 5000}, "tessera_version": HOSTILE},
    ],
)
def test_a_folder_of_a_stranger_gives_a_page_all_the_same(tmp_path, recorded):
    folder = RunFolder(tmp_path / "fox (001)", "fox")
    save_lora(folder.lora_path, 3, recorded)
    assert "<script" not in page_of(folder)  # with no record at all
    (folder.path / "run.json").write_text(json.dumps({"model": [HOSTILE], "steps": "many", "started": 5}))
    summary = SUMMARY | {"validation": {"best": []}, "peak_memory_mib": "x", "seconds_per_step": True}
    (folder.path / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"kind": "step", "step": 1, "loss": 1e30, "rate": 0},
        {"kind": "step", "step": 9, "loss": -1e30, "rate": 0},
    ]
    (folder.path / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "outside").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "outside" / "step000001_0.png")
    (folder.path / "previews").symlink_to(tmp_path / "outside")
    write_report(folder, {})
    write_lora_picture(folder)
    page = (folder.path / "report.html").read_text()
    assert "<script" not in page and "9" * 400 not in page and not (folder.path / "fox.preview.png").exists()
    assert "Previews" not in page


def test_titles_of_previews_are_cut(tmp_path, monkeypatch):
    folder = write_run(tmp_path, note="x" * 100_000, preview_steps=(10,))
    sheets = []
    monkeypatch.setattr("tessera.train.run_report.pictures.render_sheet", lambda *sheet: sheets.append(sheet))
    page_of(folder)
    assert [len(title) for title in sheets[0][0]] == [300, 300]  # a sheet measures each letter of a line again


def test_a_preview_of_too_many_pixels_is_not_decoded(tmp_path):
    folder = write_run(tmp_path, preview_steps=(10,))
    side = int(PREVIEW.pixels**0.5) + 1
    for row in (0, 1):
        Image.new("1", (side, side)).save(folder.path / "previews" / f"step000010_{row}.png")
    assert "Previews" not in page_of(folder)
