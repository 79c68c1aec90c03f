"""Training Images and Training Clips in ComfyUI's own frontend: what their folder holds, and files dropped on them."""

import base64
import io
import json
import zipfile

import pytest
from PIL import Image
from renderers import renderers
from tiny.data.films import write_film
from tiny.nodes.prompt import node
from with_pack import TESTS, load

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
photos = load("photos", TESTS / "photos.py")
PHOTOS = photos.PHOTOS

HOSTILE = "<img src=x onerror='window.hostile = 1'>"


@pytest.fixture(scope="module", autouse=True)
def folders(comfyui):
    """Nine photographs of which one has no caption, 30 plain pictures elsewhere, clips, and a broken file."""
    base = comfyui.base
    photos.write_photos(base / "input" / "gallery")
    (base / "input" / "gallery" / "flower.txt").unlink()
    (base / "input" / "gallery" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more than a head")
    (base / "input" / "gallery" / "broken.txt").write_text(HOSTILE)
    outside = base / "photos of mine"
    outside.mkdir()
    for number in range(30):
        Image.new("RGB", (64 + 8 * number, 96), (8 * number, 90, 160)).save(outside / f"{number:02}é #?&%.png")
        (outside / f"{number:02}é #?&%.txt").write_text(f"picture {number}")
    clips = base / "datasets" / "gallery_clips"
    clips.mkdir(parents=True)
    write_film(clips / "a.mp4", 25, caption="a grey that grows lighter")
    write_film(clips / "b.gif", 25, caption="")
    (base / "user" / "tessera.json").write_text(json.dumps({"allowed_folders": [str(outside)]}))
    yield
    (base / "user" / "tessera.json").unlink()


def graph(encoders, folder="input/gallery"):
    return {
        "1": node("TesseraImageFolder", folder=folder),
        "2": node("VAELoader", vae_name="ae.safetensors"),
        "3": node("TesseraTinyClipLoader", **encoders),
        "4": node("TesseraPrepareDataset", dataset=["1", 0], vae=["2", 0], clip=["3", 0], megapixels=0.06),
    }


def open_graph(frontend, prompt):
    frontend.page.evaluate("prompt => app.loadApiJson(prompt, 'gallery')", prompt)
    frontend.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(prompt))


def tiles(frontend):
    return frontend.page.locator(".tessera-tile")


def loaded(frontend, count):
    frontend.page.wait_for_function(
        "count => [...document.querySelectorAll('.tessera-tile img')].filter((i) => i.naturalWidth).length === count",
        arg=count,
    )


def center(page, kind="TesseraImageFolder"):
    page.evaluate("kind => app.canvas.centerOnNode(app.graph.nodes.find((n) => n.type === kind))", kind)


def drop(page, files, kind="TesseraImageFolder"):
    """Drops files, by name, on the middle of a node's gallery, or of the node where there is none."""
    contents = {name: base64.b64encode(data).decode() for name, data in files.items()}
    page.evaluate(DROP, [kind, contents])


DROP = """async ([kind, files]) => {
  const node = app.graph.nodes.find((n) => n.type === kind)
  const data = new DataTransfer()
  for (const [name, text] of Object.entries(files)) {
    data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name))
  }
  const [x, y] = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] + node.size[1] - 40])
  const canvas = document.querySelector('#graph-canvas').getBoundingClientRect()
  const at = { dataTransfer: data, bubbles: true, cancelable: true, clientX: x + canvas.left, clientY: y + canvas.top }
  for (const type of ['dragenter', 'dragover', 'drop']) {
    document.elementFromPoint(at.clientX, at.clientY).dispatchEvent(new DragEvent(type, at))
    await new Promise((done) => setTimeout(done, 50))
  }
}"""


def png(colour):
    Image.new("RGB", (64, 64), colour).save(data := io.BytesIO(), "PNG")
    return data.getvalue()


def wheel(page, selector):
    """Turns the wheel over an element that is on the screen; returns how far it scrolled and the zoom of the canvas."""
    page.locator(selector).hover()
    page.mouse.wheel(0, 60)
    page.wait_for_timeout(200)
    return page.locator(selector).evaluate("e => e.scrollTop"), page.evaluate("app.canvas.ds.scale")


@renderers("new renderer")
def test_pictures_captions_and_crops_are_on_the_node_and_hostile_text_is_text(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page, folder = frontend.page, comfyui.base / "input" / "gallery"
    for name in PHOTOS:  # written to since a plan was made of them
        (folder / f"{name}.png").touch()
    open_graph(frontend, graph(frontend.ENCODERS))
    expect(tiles(frontend)).to_have_count(len(PHOTOS) + 1)
    loaded(frontend, len(PHOTOS))
    texts = dict(zip(sorted([*PHOTOS, "broken"]), tiles(frontend).all_inner_texts(), strict=True))
    assert texts["cat"] == PHOTOS["cat"][3] and texts["flower"] == "no caption"
    assert HOSTILE in texts["broken"] and "can’t be shown" in texts["broken"]
    assert page.evaluate("window.hostile") is None and page.locator(".tessera-frame").count() == 0
    red = page.get_by_text("no caption", exact=True).evaluate(
        "e => getComputedStyle(e).color.match(/\\d+/g).map(Number)"
    )
    assert red[0] > 2 * red[1] and red[0] > 2 * red[2]
    page.get_by_role("button", name="1 without a caption").click()
    expect(tiles(frontend)).to_have_count(1)
    page.get_by_role("button", name="Show all 10").click()
    expect(tiles(frontend)).to_have_count(10)

    value_count = page.evaluate("app.graph.serialize().nodes[0].widgets_values.length")
    assert value_count == page.evaluate("app.graph.nodes[0].widgets.filter((w) => w.serialize !== false).length")
    assert "tessera_gallery" not in json.dumps(frontend.prompt())
    flower = folder / "flower.txt"
    flower.write_text("a pink flower")
    broken = (folder / "broken.png").rename(folder / "broken.away")
    try:
        frontend.run()
        expect(page.locator(".tessera-frame")).to_have_count(len(PHOTOS))  # the caption was seen after the run too
        expect(page.get_by_text("no caption", exact=True)).to_have_count(0)
        boxes = page.evaluate(FRAMES)
        assert all(0 <= left < right <= 100.01 and 0 <= top < bottom <= 100.01 for left, top, right, bottom in boxes)
        assert any(right - left < 99 or bottom - top < 99 for left, top, right, bottom in boxes)
        # A crop is as high or as wide as its picture.
        assert all((box[0], box[2]) == (0, 100) or (box[1], box[3]) == (0, 100) for box in boxes)
        listed = comfyui.get("/tessera/folder?kind=pictures&folder=input/gallery")["entries"]
        assert boxes == [
            pytest.approx([100 * side for side in box], abs=0.02) for entry in listed for box in entry["crops"]
        ]
        frontend.picture("training_images", "TesseraImageFolder", themes=("dark", "light"))
        page.reload()
        frontend.open()
        open_graph(frontend, graph(frontend.ENCODERS))
        expect(page.locator(".tessera-frame")).to_have_count(len(PHOTOS))  # the server knows them
        loose = graph(frontend.ENCODERS)
        del loose["4"]
        open_graph(frontend, loose)
        loaded(frontend, len(PHOTOS))
        assert page.locator(".tessera-frame").count() == 0  # nothing prepares these
    finally:
        flower.unlink()
        broken.rename(folder / "broken.png")
    assert frontend.crashes == []


FRAMES = """() => [...document.querySelectorAll('.tessera-frame')].map(({ style: s }) => {
  const [left, top, width, height] = [s.left, s.top, s.width, s.height].map(parseFloat)
  return [left, top, left + width, top + height]
})"""


@renderers("canvas renderer")
def test_pages_of_another_folder_and_first_frames_of_clips_are_shown(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    outside = (comfyui.base / "photos of mine").as_posix()
    prompt = {
        "1": node("TesseraImageFolder", folder=outside),
        "2": node("TesseraVideoFolder", folder="datasets/gallery_clips", dataset=["1", 0]),
    }
    open_graph(frontend, prompt)
    loaded(frontend, 26)
    page.evaluate("app.graph.nodes[1].pos = [app.graph.nodes[0].pos[0] + 600, app.graph.nodes[0].pos[1]]")
    gallery = page.locator(".tessera-gallery", has_text="of 30 pictures")
    expect(gallery).to_contain_text("1–24 of 30 pictures")
    expect(gallery.locator(".tessera-tile")).to_have_count(24)
    center(page)
    page.wait_for_timeout(500)
    zoom = page.evaluate("app.canvas.ds.scale")
    gallery.locator(".tessera-tile").first.click()
    scrolled, after = wheel(page, ".tessera-gallery:has-text('of 30 pictures') [data-capture-wheel]")
    assert scrolled > 0 and after == zoom
    gallery.get_by_role("button", name="›").click()
    expect(gallery).to_contain_text("25–30 of 30 pictures")
    expect(gallery.locator(".tessera-tile")).to_have_count(6)
    expect(gallery.locator(".tessera-tile").last).to_have_text("picture 29")
    clips = page.locator(".tessera-gallery", has_text="2 clips")
    frontend.picture("training_clips", "TesseraVideoFolder")
    assert clips.bounding_box()["height"] < gallery.bounding_box()["height"]  # no room for rows that are not there
    assert clips.locator(".tessera-tile").all_inner_texts() == ["a grey that grows lighter", "(empty)"]

    frontend.set_widgets({"TesseraImageFolder": {"folder": "input/gallery"}})
    expect(page.locator(".tessera-gallery", has_text="10 pictures")).to_have_count(1)
    frontend.set_widgets({"TesseraImageFolder": {"folder": "input/absent"}})
    expect(page.locator(".tessera-gallery", has_text="No pictures yet: drop them here.")).to_have_count(1)
    expect(page.locator(".tessera-error")).to_contain_text("No pictures in input/absent yet: drop them on this node")
    assert frontend.crashes == []


@renderers("new renderer")
def test_dropped_files_are_copied_under_new_names_and_shown(frontend, comfyui, new_renderer):
    frontend.use_new_renderer(new_renderer)
    page = frontend.page
    name = f"dropped_{new_renderer}"
    folder = comfyui.base / "input" / name
    open_graph(frontend, {"1": node("TesseraImageFolder", folder=f"input/{name}")})
    center(page)
    page.wait_for_function("app.graph.nodes[0].tessera?.page?.endings")
    drop(page, {"a.png": png("red"), "a.txt": b"a red square", "b.png": png("blue"), "x.heic": b"x"})
    expect(tiles(frontend)).to_have_count(2)  # of a folder that was not there
    expect(page.locator(".tessera-gallery")).to_contain_text("Not taken: x.heic.")
    loaded(frontend, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["a.png", "a.txt", "b.png"]
    page.wait_for_function("!app.graph.nodes[0].tessera?.error")  # it is in the list by now
    center(page)
    page.wait_for_timeout(300)
    drop(page, {"a.png": png("green"), "a.txt": b"a green square", "b.png": png("blue")})
    expect(tiles(frontend)).to_have_count(3)
    assert tiles(frontend).all_inner_texts() == ["a green square", "a red square", "no caption"]
    assert sorted(path.name for path in folder.iterdir()) == ["a (1).png", "a (1).txt", "a.png", "a.txt", "b.png"]
    assert (folder / "a.png").read_bytes() == png("red") and (folder / "a.txt").read_text() == "a red square"

    # What lies beside pictures is taken without them.
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("inside.txt", "a caption")
    drop(page, {"b.txt": b"a blue square", "b.mask": png("white"), "more.zip": packed.getvalue()})
    expect(tiles(frontend).last).to_have_text("a blue square")
    assert {"b.txt", "b.mask", "more.zip"} <= {path.name for path in folder.iterdir()}
    expect(page.locator(".tessera-gallery")).not_to_contain_text("Not taken")

    outside = (comfyui.base / "photos of mine").as_posix()
    frontend.set_widgets({"TesseraImageFolder": {"folder": outside}})
    expect(tiles(frontend)).to_have_count(24)
    drop(page, {"a.txt": b"a caption without its picture"})
    expect(page.locator(".tessera-gallery")).to_contain_text("Not taken: a.txt. Put them beside their pictures")
    drop(page, {"a.png": png("red")})
    expect(tiles(frontend)).to_have_count(1)
    new_folder = page.evaluate("app.graph.nodes[0].widgets.find((w) => w.name === 'folder').value")
    assert new_folder.startswith("input/dropped_pictures") and [
        p.name for p in (comfyui.base / new_folder).iterdir()
    ] == ["a.png"]
    message = f"Copied to {new_folder}, which this node reads now: files can be dropped into folders under input only."
    expect(page.locator(".tessera-gallery")).to_contain_text(message)
    assert len(list((comfyui.base / "photos of mine").iterdir())) == 60
    assert page.evaluate("app.graph.nodes.length") == 1  # no file was taken for a workflow or a picture to load
    assert page.get_by_text("Unable to find workflow").count() == 0
    assert frontend.crashes == []
