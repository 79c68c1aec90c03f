"""The photographs of the demo come from installed packages alone and differ in shape."""

import importlib.util
import math
from pathlib import Path

from PIL import Image

PHOTOS = Path(__file__).resolve().parent.parent / "photos.py"


def test_the_demo_has_photographs_of_at_least_six_aspect_ratios_each_with_a_caption(tmp_path):
    spec = importlib.util.spec_from_file_location("photos", PHOTOS)
    photos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(photos)
    pictures = photos.write_photos(tmp_path)
    shapes = set()
    for picture, caption in pictures.values():
        with Image.open(picture) as image:
            shapes.add(round(math.log(image.width / image.height) / math.log(1.05)))
            assert image.convert("L").getextrema()[1] > 100
        assert picture.with_suffix(".txt").read_text(encoding="utf-8").strip() == caption != ""
    assert len(shapes) >= 6
