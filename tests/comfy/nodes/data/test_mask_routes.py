"""The routes by which a page draws masks, on a real server, for strangers too."""

import base64
import os
import shutil
from io import BytesIO
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from tessera.data.layouts.kinds import IMAGES
from tessera.data.layouts.layout import LayoutRequest, read_layout
from tiny.nodes.routes import ask

JSON = {"Content-Type": "application/json"}


def id_of(name):
    return base64.urlsafe_b64encode(os.fsencode(name)).decode()


def drawn(size=(100, 50), learnt=(0, 0, 50, 50)):
    mask = Image.new("L", size)
    mask.paste(255, learnt)
    data = BytesIO()
    mask.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def post(server, folder="input/drawn", file="a.jpg", mask=None, headers=JSON, **query):
    body = {"folder": folder, "file": id_of(file), "mask": drawn() if mask is None else mask} | query
    return ask(server, "/tessera/mask", "POST", body, **headers)


def get(server, path, folder="input/drawn", file="a.jpg", **query):
    return ask(server, f"{path}?{urlencode({'folder': folder, 'file': id_of(file)} | query)}")


@pytest.fixture
def home(server):
    """A folder with a picture under input, and the same one outside of it, in ComfyUI's datasets folder."""
    for folder in (server.base / "input" / "drawn", server.base / "datasets" / "drawn"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2000, 1000), "red").save(folder / "a.jpg")
        (folder / "a.txt").write_text("a red field")
    return server.base


def mask_read(folder):
    """The mask that Training Images reads for the picture."""
    (subset,) = read_layout(LayoutRequest(folder, IMAGES)).subsets
    return {example.name: example.mask for example in subset.examples}


def test_a_mask_is_drawn_saved_beside_its_picture_read_and_drawn_on_again(server, home):
    status, picture = get(server, "/tessera/folder/picture")
    with Image.open(BytesIO(picture)) as image:
        assert (status, image.format, image.size) == (200, "WEBP", (1024, 512))
    assert get(server, "/tessera/mask") == (200, b"")
    assert post(server) == (200, {"saved": "drawn/masks/a.png"})
    folder = home / "input" / "drawn"
    assert mask_read(folder) == {"a.jpg": folder / "masks" / "a.png"}
    with Image.open(folder / "masks" / "a.png") as mask:
        levels = np.asarray(mask)
    assert levels.shape == (1000, 2000) and levels[:, :990].min() == 255 and levels[:, 1010:].max() == 0
    status, again = get(server, "/tessera/mask")
    with Image.open(BytesIO(again)) as mask:
        assert (status, mask.size) == (200, (1024, 512))
    assert post(server, mask=drawn(learnt=(0, 0, 100, 50)))[0] == 200
    assert sorted(path.name for path in folder.iterdir()) == ["a.jpg", "a.txt", "masks"]
    with Image.open(folder / "masks" / "a.png") as mask:
        assert np.asarray(mask).min() == 255


def test_a_mask_goes_where_the_picture_has_one_or_into_the_mask_folder(server, home):
    folder = home / "input" / "drawn"
    Image.new("L", (200, 100)).save(folder / "a-masklabel.png")
    assert post(server) == (200, {"saved": "drawn/a-masklabel.png"})
    (folder / "a-masklabel.png").unlink()
    (home / "input" / "weights").mkdir(exist_ok=True)
    assert post(server, mask_folder="input/weights") == (200, {"saved": "weights/a.png"})
    status, told = post(server, layout="plain")
    assert (status, told["error"]) == (400, "With this layout no masks beside pictures are read; choose a mask_folder.")
    assert not (folder / "masks").exists() or not list((folder / "masks").iterdir())


def test_strangers_and_other_places_get_nothing(server, home):
    for headers in (JSON | {"Origin": "http://elsewhere.example"}, JSON | {"Sec-Fetch-Site": "cross-site"}):
        assert post(server, headers=headers)[0] == 403
    assert post(server, headers={"Content-Type": "text/plain"})[0] == 415
    assert post(server, headers=JSON | {"Host": "evil.example"})[0] == 403
    for file in ("../drawn/a.jpg", "b.jpg", "a.txt"):
        assert post(server, file=file)[0] == 400 and get(server, "/tessera/mask", file=file)[0] == 400
    status, told = post(server, "datasets/drawn")
    assert status == 400 and "only inside ComfyUI's input folder" in told["error"]
    masks = home / "input" / "drawn" / "masks"
    masks.mkdir(exist_ok=True)
    (masks / "a.png").unlink(missing_ok=True)
    (masks / "a.png").symlink_to(home / "user" / "stolen.png")
    assert post(server)[0] == 400 and not (home / "user" / "stolen.png").exists()
    (masks / "a.png").unlink()
    for mask in ("", "no base64!", base64.b64encode(b"no picture").decode()):
        assert post(server, mask=mask)[0] == 400
    assert not list(masks.iterdir())
