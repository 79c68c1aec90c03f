"""The routes by which Training Images and Training Clips show their folder, on a real server, for strangers too."""

import base64
import json
import os
import struct
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from urllib.parse import urlencode

import pytest
from PIL import Image
from tessera.data.layouts.archives import unpack
from tiny.data.films import write_film
from tiny.nodes.routes import ask

SECRET = "the secret of another folder"


def request(server, path, method="GET", **query):
    return ask(server, f"{path}?{urlencode(query)}", method)


def page_of(server, folder, **query):
    status, page = request(server, "/tessera/folder", kind="pictures", folder=folder, **query)
    assert status == 200, page
    return page


def entries(server, folder, **query):
    return {entry["name"]: entry for entry in page_of(server, folder, **query)["entries"]}


def thumbnail(server, folder, file, kind="pictures"):
    return request(server, "/tessera/folder/thumbnail", kind=kind, folder=folder, file=file)


def file_id(name):
    return base64.urlsafe_b64encode(os.fsencode(name)).decode()


def opened(data):
    return Image.open(BytesIO(data), formats=["WEBP"])


def put(folder, name="a.png", size=(64, 48), colour="red", caption="a red field"):
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(folder / name)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
    return folder / name


@pytest.fixture(scope="module")
def home(server):
    """Folders of a server: one under input, one allowed by the settings, and one that is not allowed."""
    base = server.base
    put(base / "input" / "shown")
    put(base / "allowed photos", "b.png", (400, 200), "blue", "a blue field")
    put(base / "secret", "c.png", caption=SECRET)
    settings = base / "user" / "tessera.json"
    settings.write_text(json.dumps({"allowed_folders": [str(base / "allowed photos")]}))
    yield base
    settings.unlink()


def test_a_folder_is_listed_with_captions_and_thumbnails_are_small_and_upright(server, home):
    (home / "input" / "shown" / "d.heic").write_bytes(b"")
    rotated = Image.new("RGB", (600, 300), "red")
    rotated.paste("blue", (0, 0, 300, 300))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right
    rotated.save(home / "input" / "shown" / "turned.jpg", exif=exif)
    page = page_of(server, "input/shown")
    assert (page["count"], page["missing"], page["unread"], page["pages"]) == (2, 1, "d.heic", 1)
    assert [(e["name"], e["caption"]) for e in page["entries"]] == [("a.png", "a red field"), ("turned.jpg", None)]
    assert ".jpg" in page["endings"] and ".mp4" not in page["endings"]
    assert {".txt", ".mask", ".zip", ".tar.gz"} <= set(page["beside"])
    status, nothing = request(server, "/tessera/folder", kind="pictures", folder="input/not there")
    assert (status, nothing["absent"], nothing["endings"]) == (400, True, page["endings"])
    assert request(server, "/tessera/folder", kind="pictures", folder="/etc")[1]["absent"] is False
    assert list(entries(server, "input/shown", missing="1")) == ["turned.jpg"]
    status, data = thumbnail(server, "input/shown", page["entries"][1]["file"])
    image = opened(data)
    assert status == 200 and image.size == (128, 256)
    assert image.getpixel((64, 40))[2] > 200 and image.getpixel((64, 220))[0] > 200  # what was left is on top
    outside = (home / "allowed photos").as_posix()
    image = opened(thumbnail(server, outside, entries(server, outside)["b.png"]["file"])[1])
    assert image.size == (256, 128)


def test_clips_show_their_first_frame(server, home):
    folder = home / "datasets" / "shown_clips"
    folder.mkdir(parents=True)
    write_film(folder / "a.mp4", 25, caption="a grey")
    (folder / "b.webm").write_bytes(b"no clip")
    status, listing = request(server, "/tessera/folder", kind="clips", folder="datasets/shown_clips")
    assert status == 200 and [entry["caption"] for entry in listing["entries"]] == ["a grey", None]
    image = opened(thumbnail(server, "datasets/shown_clips", listing["entries"][0]["file"], "clips")[1])
    assert image.size == (64, 48) and max(image.getpixel((9, 9))) < 24  # the darkest
    status, answer = thumbnail(server, "datasets/shown_clips", listing["entries"][1]["file"], "clips")
    assert status == 400 and "The clip 'b.webm' can't be read" in answer["error"]
    assert thumbnail(server, "input/shown", file_id("a.png"), "clips")[0] == 400  # no clip by its name


@pytest.mark.parametrize(
    "folder",
    ["..", "input/..", "input/../secret", "input/shown/../../secret", "/etc", "//etc", "{base}/secret", "output", "",
     "input", "{base}/allowed photos/../secret", "C:\\Windows", "\\\\server\\share", "input/\0", "temp/x",
     "input//etc"],
)  # fmt: skip
def test_other_folders_are_neither_listed_nor_shown(server, home, folder):
    folder = folder.format(base=home.as_posix())
    status, text = request(server, "/tessera/folder", kind="pictures", folder=folder)
    assert status == 400 and SECRET not in str(text)
    for file in ("c.png", "secret/c.png", "passwd"):
        assert thumbnail(server, folder, file_id(file))[0] == 400


@pytest.mark.parametrize(
    "file",
    ["../secret/c.png", "../../secret/c.png", "/etc/passwd", "./a.png", "sub/../a.png", "a.txt", ".hidden.png", "",
     "absent.png", "a.png/", "/a.png", "a.png\0.png", "x" * 5000 + ".png", ".hidden/a.png"],
)  # fmt: skip
def test_other_files_are_not_shown(server, home, file):
    put(home / "input" / "shown" / ".hidden")
    put(home / "input" / "shown", ".hidden.png")
    file = file.format(base=home.as_posix())
    assert thumbnail(server, "input/shown", file_id(file))[0] == 400
    assert thumbnail(server, "input/shown", file_id(f"{home.as_posix()}/secret/c.png"))[0] == 400
    assert thumbnail(server, "input/shown", file_id("a.png"))[0] == 200


def test_names_that_are_no_names_and_other_methods_are_refused(server, home):
    for file in ("a", "%%%", "é", "=" * 9, "A" * 20_000):
        assert thumbnail(server, "input/shown", file)[0] in (400, 414)
    assert thumbnail(server, "input/shown", file_id("a.png"), "models")[0] == 400
    for page in ("-1", "x", "1" * 40, "1.5", "²"):
        assert request(server, "/tessera/folder", kind="pictures", folder="input/shown", page=page)[0] == 400
    assert page_of(server, "input/shown", page="7")["page"] == 0  # the last one
    for extension in (".png", "/../../x", ".txt\0", "../x"):
        query = {"kind": "pictures", "folder": "input/shown", "caption_extension": extension}
        assert request(server, "/tessera/folder", **query)[0] == 400
    for path in ("/tessera/folder", "/tessera/folder/thumbnail"):
        for method in ("POST", "PUT", "DELETE"):
            assert request(server, path, method, kind="pictures", folder="input/shown")[0] in (404, 405)


@pytest.mark.skipif(os.name == "nt", reason="links take rights there")
def test_links_out_of_the_folders_are_named_but_not_read(server, home):
    folder = home / "input" / "links"
    put(folder)
    (folder / "file.png").symlink_to(home / "secret" / "c.png")
    (folder / "folder").symlink_to(home / "secret")
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(home / "secret" / "c.txt")
    (folder / "inner.png").symlink_to(home / "input" / "shown" / "a.png")
    os.mkfifo(folder / "pipe.png")  # to open it would wait for ever
    os.mkfifo(folder / "inner.txt")
    (home / "input" / "way_out").symlink_to(home / "secret")
    status, listing = request(server, "/tessera/folder", kind="pictures", folder="input/links")
    assert status == 200 and SECRET not in json.dumps(listing)
    listed = {entry["name"]: entry for entry in listing["entries"]}
    assert "is a link to a place outside the allowed folders" in listed["a.png"]["problem"]
    assert listed["inner.png"]["caption"] is None
    for name in ("file.png", "folder/c.png", "pipe.png"):
        assert thumbnail(server, "input/links", file_id(name))[0] == 400
    assert thumbnail(server, "input/links", file_id("inner.png"))[0] == 200
    assert request(server, "/tessera/folder", kind="pictures", folder="input/way_out")[0] == 400


def png_of(width, height):
    """A PNG whose head claims a size, with hardly any bytes of it."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


def test_broken_huge_and_foreign_files_are_told_in_a_sentence(server, home):
    folder = home / "input" / "hostile"
    whole = put(folder, "broken.png", (512, 512), "red").read_bytes()
    (folder / "broken.png").write_bytes(whole[: len(whole) // 2])
    for name, data in {
        "empty.jpg": b"",
        "text.png": b"<script>alert(1)</script>",
        "page.webp": b"<html></html>",
        "bomb.png": png_of(20_000, 20_000),
        "large.png": png_of(11_000, 10_000),
        "endless.png": png_of(2**31 - 1, 2**31 - 1),
        "program.bmp": b"BM" + b"\xff" * 200,
        "eps.tif": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }.items():
        (folder / name).write_bytes(data)
    Image.new("RGB", (9, 9)).save(folder / "gif.png", "GIF")  # of a kind that training does not read
    for entry in page_of(server, "input/hostile")["entries"]:
        begin = time.monotonic()
        status, answer = thumbnail(server, "input/hostile", entry["file"])
        assert status == 400 and str(home) not in str(answer) and "Traceback" not in str(answer), entry
        assert answer["error"].startswith("The picture"), answer
        assert time.monotonic() - begin < 20
    with (folder / "endless.webp").open("wb") as file:
        file.truncate(600_000_000)  # without a block on the disk
    said = thumbnail(server, "input/hostile", file_id("endless.webp"))[1]["error"]
    assert said == "The picture 'endless.webp' (600 MB) is too large to be shown here; it can be trained on."
    said = thumbnail(server, "input/hostile", file_id("large.png"))[1]["error"]
    assert said == "The picture 'large.png' (11000 x 10000 pixels) is too large to be shown here; it can be trained on."


def test_a_clip_of_huge_frames_is_not_decoded(server, home):
    folder = home / "datasets" / "huge_clips"
    folder.mkdir(parents=True)
    write_film(folder / "a.mkv", 1, size=(6000, 7000), codec=("mjpeg", "yuvj420p"), caption="a grey")
    status, answer = thumbnail(server, "datasets/huge_clips", file_id("a.mkv"), "clips")
    assert status == 400 and "(7000 x 6000 pixels) is too large to be shown here" in answer["error"]


def test_odd_names_and_captions_come_through_as_they_are(server, home):
    folder = home / "input" / "odd"
    caption = "<img src=x onerror=alert(1)> \u202e ' \" & \U0001f98a"
    names = ["a b.png", "100%.png", "a#?&=+.png", "é ü.png", "\U0001f98a.png", "a'.png", "a;b.png", "..a.png"]
    names += ["<b>.png", 'a".png', "a\\b.png", "a:b.png", "new\nline.png"] if os.name != "nt" else []
    for name in names:
        put(folder / "sub", name, caption=caption)
    if os.name != "nt":
        (folder / "sub" / os.fsdecode(b"caf\xe9.png")).write_bytes((folder / "sub" / "a b.png").read_bytes())
    page_entries = page_of(server, "input/odd")["entries"]
    expected = {f"sub/{name}" for name in names if not name.startswith(".")}
    assert {entry["name"] for entry in page_entries} == expected | ({"sub/caf?.png"} if os.name != "nt" else set())
    assert {entry["caption"] for entry in page_entries if "?.png" not in entry["name"]} == {caption}
    for entry in page_entries:
        assert thumbnail(server, "input/odd", entry["file"])[0] == 200, entry
    (folder / "latin.png").write_bytes((folder / "sub" / "a b.png").read_bytes())
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in entries(server, "input/odd")["latin.png"]["problem"]
    put(folder, "long.png", caption="x" * 100_000)
    assert len(entries(server, "input/odd")["long.png"]["caption"]) == 2001


def test_a_folder_of_5000_files_is_listed_in_pages_while_the_server_answers(server, home):
    folder = home / "input" / "many"
    data = put(folder, "00000.png").read_bytes()
    for number in range(1, 5000):
        (folder / f"{number:05}.png").write_bytes(data)
        (folder / f"{number:05}.txt").write_text(f"picture {number}")
    begin = time.monotonic()
    page = page_of(server, "input/many", page="208")
    took = time.monotonic() - begin
    assert (page["count"], page["pages"], len(page["entries"])) == (5000, 209, 8)
    assert page["entries"][-1]["caption"] == "picture 4999" and took < 10, took
    with ThreadPoolExecutor(12) as pool:
        files = [file_id(f"{number:05}.png") for number in range(48)]
        waits = [pool.submit(thumbnail, server, "input/many", file) for file in files]
        lists = [pool.submit(page_of, server, "input/many") for _ in range(6)]
        begin = time.monotonic()
        server.get("/prompt")
        assert time.monotonic() - begin < 5
        assert all(wait.result()[0] == 200 for wait in waits) and all(wait.result() for wait in lists)


def test_a_thumbnail_is_made_anew_of_a_changed_file(server, home):
    changed = home / "input" / "shown" / "changing.png"
    put(changed.parent, changed.name, colour="red")
    assert opened(thumbnail(server, "input/shown", file_id(changed.name))[1]).getpixel((9, 9))[0] > 200
    put(changed.parent, changed.name, size=(65, 48), colour="blue")
    assert opened(thumbnail(server, "input/shown", file_id(changed.name))[1]).getpixel((9, 9))[2] > 200


def test_a_folder_of_another_trainer_is_shown_as_it_will_be_read(server, home):
    folder = server.base / "input" / "kohya"
    put(folder / "10_fox", caption=None)
    with zipfile.ZipFile(folder / "more.zip", "w") as packed:
        packed.write(put(server.base / "input" / "source", "b.png"), "b.png")
        packed.writestr("b.txt", "packed")
    page = page_of(server, "input/kohya")
    assert [(e["name"], e["caption"]) for e in page["entries"]] == [("10_fox/a.png", "fox")]
    assert any("10_fox (10 x)" in note for note in page["notes"])
    assert page_of(server, "input/kohya", layout="plain")["missing"] == 1
    unpack(folder / "more.zip", server.base / "user" / "tessera" / "unpacked", lambda: None)
    listing = entries(server, "input/kohya")
    assert {name: entry["caption"] for name, entry in listing.items()} == {
        "10_fox/a.png": "fox",
        "more.zip/b.png": "packed",
    }
    for entry in listing.values():
        status, data = thumbnail(server, "input/kohya", entry["file"])
        assert status == 200 and opened(data).size == (64, 48)
    secret = put(server.base / "elsewhere", "secret.png")
    assert thumbnail(server, "input/kohya", file_id(str(secret)))[0] == 400


def test_a_byte_cache_holds_the_last_used_within_its_bound():
    from tessera.nodes.common.byte_cache import ByteCache

    cache = ByteCache(capacity=10)
    cache.put("a", b"1234")
    cache.put("b", b"1234")
    assert cache.find("a") == b"1234"
    cache.put("c", b"1234")  # for which the one that was used before all others goes
    assert [cache.find(key) for key in "abc"] == [b"1234", None, b"1234"]
    cache.put("c", b"123456")  # in place of the other
    assert [cache.find(key) for key in "ac"] == [b"1234", b"123456"]
    cache.put("d", b"more than ten bytes")
    assert [cache.find(key) for key in "acd"] == [None, None, None]
    cache.put("e", b"1234567890")
    assert cache.find("e") == b"1234567890"
