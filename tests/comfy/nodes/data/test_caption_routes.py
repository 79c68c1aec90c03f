"""The editor's routes on a real server: captions are read, saved, replaced and taken back, and no other file."""

import json
import os
import zipfile
from urllib.parse import urlencode

import pytest
from PIL import Image
from tessera.data.captioning.ledger import Ledger, LedgerEntry
from tessera.data.layouts.archives import unpack
from tiny.nodes.routes import ask


def picture(folder, name, caption=None):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), "red").save(folder / name)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")


@pytest.fixture
def home(server):
    """A new folder under input with three pictures, the last without a caption."""
    folder = server.base / "input" / "edited"
    picture(folder, "a.png", "a red field\n")
    picture(folder, "b.png", "A Red fox, red")
    picture(folder, "sub/c.png")
    yield folder
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()


PLACE = {"kind": "pictures", "folder": "input/edited"}


def shown(server, file="", step=0, only="all", **place):
    query = urlencode({**PLACE, **place, "file": file, "step": step, "only": only})
    status, found = ask(server, f"/tessera/captions?{query}")
    assert status == 200, found
    return found["entry"]


def post(server, name, body, **headers):
    usual = {"Content-Type": "application/json", "Origin": server.url}
    given = {key: value for key, value in (usual | headers).items() if value is not None}
    return ask(server, f"/tessera/captions/{name}", "POST", body, **given)


def save(server, entry, text, place=PLACE, **headers):
    body = {"place": place, "file": entry["file"], "before": entry["text"], "text": text}
    return post(server, "save", body, **headers)


def texts(folder):
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.txt"))}


def test_captions_are_walked_through_saved_beside_their_picture_and_taken_back(server, home):
    first = shown(server, step=1)
    assert (first["name"], first["text"], first["at"], first["count"], first["missing"]) == (
        *("a.png", "a red field", 1, 3, 1),
    )
    last = shown(server, first["file"], 1, "missing")
    assert (last["name"], last["text"], last["caption_file"]) == ("sub/c.png", None, "c.txt")
    assert shown(server, last["file"], 1) is None and shown(server, last["file"], -1)["name"] == "b.png"
    status, saved = save(server, last, " a blue\r\nsea é ")
    assert (status, saved["text"]) == (200, "a blue\nsea é")
    assert (home / "sub" / "c.txt").read_bytes() == "a blue\nsea é".encode()
    assert shown(server, step=1, only="missing") is None
    status, found = save(server, last, "another")  # which the page last saw without a caption
    assert status == 409 and "changed elsewhere" in found["error"]
    assert post(server, "undo", {"undo": saved["undo"]}) == (200, {"restored": 1, "changed": []})
    assert not (home / "sub" / "c.txt").exists() and [p.name for p in (home / "sub").iterdir()] == ["c.png"]
    assert post(server, "undo", {"undo": saved["undo"]})[0] == 400


def test_a_caption_that_is_saved_brings_the_next_one(server, home):
    picture(home, "d.png")
    body = {"place": PLACE, "step": 1, "only": "missing"}
    first = shown(server, step=1, only="missing")
    assert (first["name"], first["missing"]) == ("d.png", 2)
    status, saved = post(server, "save", body | {"file": first["file"], "before": None, "text": "a sea"})
    assert (status, saved["text"]) == (200, "a sea")
    assert (saved["entry"]["name"], saved["entry"]["text"], saved["entry"]["missing"]) == ("sub/c.png", None, 1)
    back = {"step": -1, "only": "all", "file": saved["entry"]["file"], "before": None, "text": "a lake"}
    entry = post(server, "save", body | back)[1]["entry"]
    assert (entry["name"], entry["text"], entry["missing"]) == ("d.png", "a sea", 0)
    last = {"file": saved["entry"]["file"], "before": "a lake", "text": "a lake", "only": "all"}
    assert post(server, "save", body | last)[1] == {"undo": None, "text": "a lake", "entry": None}
    assert post(server, "save", body | last | {"step": 7})[0] == 400
    assert post(server, "save", body | last | {"only": ["all"]})[0] == 400


def test_captions_of_a_model_are_reviewed_once(server, home):
    ledger = Ledger(server.base / "user" / "tessera" / "captions")
    for name in ("a.png", "b.png"):
        ledger.put(home / name, LedgerEntry("key", True))
    ledger.save()

    def waiting():
        return ask(server, f"/tessera/folder?{urlencode(PLACE)}")[1]["waiting"]

    assert waiting() == 2
    first = shown(server, step=1, only="review")
    assert (first["name"], first["review"]) == ("a.png", 2)
    assert save(server, first, first["text"]) == (200, {"undo": None, "text": "a red field"})
    last = shown(server, first["file"], 1, "review")
    assert (last["name"], last["review"], waiting()) == ("b.png", 1, 1)
    assert save(server, last, "a fox")[0] == 200
    assert waiting() == 0 and shown(server, step=1, only="review") is None


def test_search_and_replace_counts_first_and_leaves_alone_what_changed_since(server, home):
    body = {"place": PLACE, "search": "red", "replacement": r"\g<0>", "match_case": True}
    before = texts(home)
    assert post(server, "replace", body) == (200, {"matches": 2, "captions": 2, "locked": 0})
    assert texts(home) == before
    status, found = post(server, "replace", body | {"match_case": False, "apply": True})
    assert (status, found["matches"], found["captions"]) == (200, 3, 2)
    assert texts(home) == {"a.txt": r"a \g<0> field", "b.txt": r"A \g<0> fox, \g<0>"}
    (home / "b.txt").write_text("mine")
    assert post(server, "undo", {"undo": found["undo"]}) == (200, {"restored": 1, "changed": ["b.txt"]})
    assert texts(home) == {"a.txt": "a red field", "b.txt": "mine"}
    assert post(server, "replace", body | {"search": ""})[0] == 400
    assert post(server, "replace", body | {"replacement": "x" * 20_001, "apply": True})[0] == 400


def test_captions_that_can_not_be_written_say_why(server, home):
    base = server.base
    outside = base / "photos that may be read"
    picture(outside, "a.png", "a red photo")
    (base / "user" / "tessera.json").write_text(json.dumps({"allowed_folders": [str(outside)]}))
    picture(home, "listed.png")
    (home / "metadata.jsonl").write_text('{"file_name": "listed.png", "text": "red of a list"}')
    (home / "b.txt").write_bytes(b"\xff\xfe\x00")
    picture(home, "tagged.png")
    (home / "tagged.json").write_text('{"tags": ["red", "sky"]}')
    with zipfile.ZipFile(home / "packed.zip", "w") as archive:
        archive.write(home / "a.png", "z.png")
        archive.writestr("z.txt", "red of an archive")
    unpack(home / "packed.zip", base / "user" / "tessera" / "unpacked", lambda: None)
    if os.name != "nt":
        (home / "sub" / "c.txt").symlink_to(outside / "a.txt")
    try:
        reasons, file = {}, ""
        while (entry := shown(server, file, 1)) is not None:
            reasons[entry["name"]], file = entry["locked"], entry["file"]
            if entry["locked"]:
                assert save(server, entry, "written")[0] == 400
        assert reasons["a.png"] == "" and "metadata.jsonl" in reasons["listed.png"]
        assert "UTF-8" in reasons["b.png"] and "tagged.json" in reasons["tagged.png"]
        assert "not into archives" in reasons["packed.zip/z.png"]
        assert os.name == "nt" or "is a link" in reasons["sub/c.png"]
        place = {"kind": "pictures", "folder": outside.as_posix()}
        entry = shown(server, step=1, **place)
        assert "only in folders inside ComfyUI's input" in entry["locked"]
        assert save(server, entry, "written", place)[0] == 400
        body = {"place": PLACE, "search": "red", "replacement": "blue", "apply": True}
        status, found = post(server, "replace", body)
        assert (status, found["captions"], found["locked"]) == (200, 1, 3)
        assert (outside / "a.txt").read_text() == "a red photo"
    finally:
        (base / "user" / "tessera.json").unlink()


def test_strangers_write_nothing(server, home):
    entry = shown(server, step=1)
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        assert save(server, entry, "x", **headers)[0] == 403
    assert save(server, entry, "x", **{"Content-Type": "text/plain"})[0] == 415
    for place in ({**PLACE, "folder": "output"}, {**PLACE, "folder": "input/../user"}, {**PLACE, "kind": "models"}, {}):
        assert save(server, entry, "x", place)[0] == 400
    for text in ("x" * 20_001, "\ud800", None, 7, ["x"]):
        assert save(server, entry, text)[0] == 400
    assert save(server, entry, "x" * 1_000_001)[0] == 413
    for file in ("", "../a.png", "Li4vLi4vYS5wbmc=", 3, None):
        assert post(server, "save", {"place": PLACE, "file": file, "before": None, "text": "x"})[0] in (400, 409)
    for body in ([], "x", None, {"place": [1]}):
        assert post(server, "save", body)[0] in (400, 415)
    assert texts(home) == {"a.txt": "a red field\n", "b.txt": "A Red fox, red"}
