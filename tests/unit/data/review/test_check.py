"""Check of a folder of pictures: planted faults are found, and sound pictures are not."""

import math
import re
import time
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops, ImageCms, ImageFilter, ImageOps
from tessera.common.canvas import Canvas
from tessera.data.cache import Cache
from tessera.data.layouts.kinds import IMAGES
from tessera.data.layouts.layout import LayoutRequest, read_layout
from tessera.data.review import findings as faults
from tessera.data.review import measures
from tessera.data.review.borders import find_borders
from tessera.data.review.check import CheckOptions, Encoder, check_folder
from tessera.data.review.perceptual_hash import near_doubles, near_embeddings, signature_of
from tessera.data.review.sharpness import measure_sharpness
from tessera.data.review.sheet import draw_sheet
from tiny.data.photographs import HEIGHT, WIDTH, make_photograph, write_photographs

COUNT = 200
MEGAPIXELS = WIDTH * HEIGHT / 1024**2
OPTIONS = CheckOptions(MEGAPIXELS, trigger_words="sks", caption_length=lambda text: (len(text.split()), 20))


def ignore(*_):
    pass


def check(folder, cache, options=OPTIONS, progress=ignore, interrupted=ignore):
    layout = read_layout(LayoutRequest(folder, IMAGES))
    return check_folder(layout, Cache(cache), options, progress, interrupted)


def plant(folder):
    """Plant twelve faults; returns the fault of each by the name of its picture."""

    def save(number, image, **options):
        image.save(folder / f"{number:03}.jpg", quality=88, **options)

    def write(number, text):
        (folder / f"{number:03}.txt").write_text(text)

    size = (round(WIDTH * 0.8), round(HEIGHT * 0.8))
    save(21, make_photograph(121).resize(size, Image.Resampling.LANCZOS))
    save(122, ImageOps.mirror(make_photograph(22)).point(lambda level: min(255, level * 1.15)))
    save(23, make_photograph(23).filter(ImageFilter.GaussianBlur(2)))
    tiny = make_photograph(24).resize((WIDTH // 3, HEIGHT // 3), Image.Resampling.LANCZOS)
    save(24, tiny.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))
    save(25, make_photograph(25, WIDTH // 2, HEIGHT // 2))
    save(26, ImageOps.expand(make_photograph(26).crop((0, 16, WIDTH, HEIGHT - 16)), (0, 16), "black"))
    whole = (folder / "027.jpg").read_bytes()
    (folder / "027.jpg").write_bytes(whole[: len(whole) // 2])
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    save(28, make_photograph(28), icc_profile=lab)
    write(29, "")
    write(31, "photo of sks thing number 131")
    write(32, "photo of sks thing, " + "very " * 30 + "large")
    write(33, "photo of a thing number 33")
    return {
        "021.jpg": faults.DOUBLE,
        "122.jpg": faults.DOUBLE,
        "023.jpg": faults.BLURRED,
        "024.jpg": faults.ENLARGED,
        "025.jpg": faults.SMALL,
        "026.jpg": faults.BORDER,
        "027.jpg": faults.BROKEN,
        "028.jpg": faults.COLOURS,
        "029.jpg": faults.EMPTY,
        "131.jpg": faults.EQUAL,
        "032.jpg": faults.LONG,
        "033.jpg": faults.NO_TRIGGER,
    }


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A folder of photographs with twelve faults, its cache, the faults, and the first check."""
    root = tmp_path_factory.mktemp("check")
    write_photographs(root / "photos", COUNT)
    planted = plant(root / "photos")
    return root / "photos", root / "cache", planted, check(root / "photos", root / "cache")


def test_twelve_planted_faults_are_all_found_with_two_false_alarms_at_most(checked):
    _, _, planted, result = checked
    faults = {(finding.name, finding.fault) for finding in result.findings}
    assert planted.items() - faults == set()
    assert len(faults - planted.items()) <= 2, faults - planted.items()


def test_the_list_to_leave_out_names_pictures_only_whose_pixels_are_at_fault(checked):
    _, _, planted, result = checked
    worse = {name for name, fault in planted.items() if fault in faults.PICTURE_FAULTS}
    assert worse <= set(result.left_out.splitlines())
    assert not {"026.jpg", "028.jpg", "029.jpg", "131.jpg", "032.jpg"} & set(result.left_out.splitlines())
    assert "121.jpg" not in result.left_out  # the larger of two doubles stays


def test_the_report_and_the_sheet_show_the_findings(checked):
    _, _, planted, result = checked
    assert f"{COUNT} pictures, " in result.report
    assert re.search(r"024.jpg \((2.9|3.0|3.1) times, from about 8\d x 6\d\)", result.report)
    assert "025.jpg (128 x 96 pixels, enlarged 2.0 times)" in result.report
    assert re.search(r"026.jpg \(top 1[56], bottom 1[56] pixels\)", result.report)
    assert "027.jpg (image file is truncated" in result.report
    assert result.sheet.width > 4 * 256 and result.sheet.height > 2 * 256


def test_a_second_check_decodes_only_what_changed(checked, monkeypatch):
    folder, cache, _, first = checked
    decoded = []
    decode = measures.upright_image
    monkeypatch.setattr(measures, "upright_image", lambda *args: decoded.append(args[1]) or decode(*args))
    second = check(folder, cache)
    assert second.findings == first.findings
    assert decoded == ["027.jpg"]  # which can't be measured


def test_cancel_ends_a_check_at_once(checked, tmp_path):
    folder, _, _, _ = checked
    seen = []

    def interrupted():
        if len(seen) >= 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        check(folder, tmp_path, progress=lambda done, total, text: seen.append(done), interrupted=interrupted)
    assert seen == [1, 2, 3]
    time.sleep(0.05)
    written = len(list(tmp_path.rglob("*.safetensors")))
    time.sleep(0.2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == written < COUNT / 4  # no thread goes on


def test_an_encoder_finds_what_the_hash_does_not(tmp_path):
    write_photographs(tmp_path / "photos", 4)
    vectors = {0: (1.0, 0.0), 1: (0.0, 1.0), 2: (0.99, 0.05), 3: (0.7, -0.7)}
    calls = []

    def encode(image):
        assert image.shape == (1, HEIGHT, WIDTH, 3) and image.max() <= 1
        calls.append(image)
        return torch.tensor([vectors[len(calls) - 1]])

    options = CheckOptions(MEGAPIXELS, encoder=Encoder(encode, "tiny"))
    for _ in range(2):
        result = check(tmp_path / "photos", tmp_path / "cache", options)
        assert [(f.name, f.fault, f.detail) for f in result.findings] == [("002.jpg", faults.DOUBLE, "of 000.jpg")]
    assert len(calls) == 4


def test_pictures_of_one_colour_and_of_widths_pixels_are_measured(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, image in {
        "a.png": Image.new("RGB", (300, 300), "red"),
        "b.png": Image.new("L", (1, 1)),
        "c.png": Image.new("RGBA", (40, 900), (0, 0, 0, 0)),
        "d.png": Image.fromarray(np.arange(90000, dtype=np.uint16).reshape(300, 300)),
    }.items():
        image.save(folder / name)
        (folder / name).with_suffix(".txt").write_text(name)
    result = check(folder, tmp_path / "cache", CheckOptions(0.08))
    assert [f.name for f in result.findings if f.fault == faults.SMALL] == ["b.png", "c.png"]
    assert not [f for f in result.findings if f.fault in (faults.BROKEN, faults.BORDER, faults.DOUBLE)]


def test_borders_are_measured_at_each_side():
    pixels = np.zeros((200, 400, 3), np.uint8)
    pixels[20:170, 8:360] = np.random.default_rng(0).integers(60, 256, (150, 352, 3))
    assert find_borders(pixels) == pytest.approx((8 / 400, 20 / 200, 40 / 400, 30 / 200))
    assert find_borders(pixels[20:170, 8:360]) == (0, 0, 0, 0)


def test_doubles_of_doubles_are_one_group_and_copies_are_called_the_same(tmp_path):
    folder = tmp_path / "photos"
    write_photographs(folder, 3)
    (folder / "003.jpg").write_bytes((folder / "001.jpg").read_bytes())
    (folder / "003.txt").write_text("a copy")
    angles = {0: 0, 1: 30, 2: 15, 3: 30}  # degrees: 0 and 1 are unlike, and 2 is like both
    numbers = iter(angles.values())

    def encode(image):
        angle = math.radians(next(numbers))
        return torch.tensor([[math.cos(angle), math.sin(angle)]])

    result = check(folder, tmp_path / "cache", CheckOptions(MEGAPIXELS, encoder=Encoder(encode, "tiny")))
    doubles = {finding.name: finding.detail for finding in result.findings if finding.fault == faults.DOUBLE}
    assert len(doubles) == 3 and len({detail.split()[-1] for detail in doubles.values()}) == 1
    copies = {
        finding.name: finding.detail for finding in check(folder, tmp_path / "cache", CheckOptions(MEGAPIXELS)).findings
    }
    assert copies == {"003.jpg": "the same as 001.jpg"}


def test_doubles_are_found_among_many_pictures():
    generator = np.random.default_rng(0)
    reduced = [generator.integers(0, 256, (32, 32), dtype=np.uint8) for _ in range(700)]
    for double, first in ((600, 20), (650, 610)):
        reduced[double] = np.clip(reduced[first].astype(int) + 3, 0, 255).astype(np.uint8)
    assert list(near_doubles([signature_of(levels) for levels in reduced])) == [(20, 600), (610, 650)]
    embeddings = generator.standard_normal((700, 64)).astype(np.float32)
    embeddings[650] = embeddings[610]
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    assert list(near_embeddings(embeddings, 0.96)) == [(610, 650)]


def test_measures_and_embeddings_are_kept_for_one_size_and_one_encoder(tmp_path):
    folder = tmp_path / "photos"
    write_photographs(folder, 2)
    small = make_photograph(5).resize((WIDTH // 3, HEIGHT // 3), Image.Resampling.LANCZOS)
    small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(folder / "enlarged.png")
    (folder / "enlarged.txt").write_text("enlarged")

    def enlarged(megapixels, cache):
        findings = check(folder, cache, CheckOptions(megapixels)).findings
        return [finding.name for finding in findings if finding.fault == faults.ENLARGED]

    assert enlarged(MEGAPIXELS, tmp_path / "cache") == ["enlarged.png"]
    assert enlarged(MEGAPIXELS / 9, tmp_path / "cache") == enlarged(MEGAPIXELS / 9, tmp_path / "fresh") == []
    calls = []
    for key in ("first", "second", "first"):
        encoder = Encoder(lambda image: calls.append(image) or torch.eye(3)[len(calls) % 3][None], key)
        check(folder, tmp_path / "cache", CheckOptions(MEGAPIXELS, encoder=encoder))
    assert len(calls) == 6


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_pictures_that_were_enlarged_by_half_are_told_from_sharp_ones(tmp_path, ending):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(1, 5):
        make_photograph(number, 600, 450).save(folder / f"{number}.{ending}", quality=60)
        enlarged = make_photograph(number, 400, 300).resize((600, 450), Image.Resampling.BICUBIC)
        enlarged.save(folder / f"{number} enlarged.{ending}", quality=95)
    findings = check(folder, tmp_path / "cache", CheckOptions(600 * 450 / 1024**2)).findings
    names = {finding.name for finding in findings if finding.fault == faults.ENLARGED}
    enlarged_names = {f"{number} enlarged.{ending}" for number in range(1, 5)}
    assert names == enlarged_names if ending == "png" else names and names <= enlarged_names


def test_the_blocks_of_a_jpeg_are_no_interpolation():
    buffer = BytesIO()
    make_photograph(3, 640, 480).save(buffer, "JPEG", quality=20)
    with Image.open(buffer, formats=["JPEG"]) as image:
        assert not measure_sharpness(np.asarray(image.convert("L"), np.float32)).enlarged


@pytest.mark.parametrize(("factor", "is_listed"), [(1.25, True), (1.4, False)])
def test_an_enlargement_below_the_factor_is_not_listed(factor, is_listed, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(1, 4):
        small = make_photograph(number, 480, 360).resize((624, 468), Image.Resampling.BILINEAR)  # 1.3 times
        small.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a photo {number}")
    findings = check(folder, tmp_path / "cache", CheckOptions(624 * 468 / 1024**2, factor)).findings
    listed = {(finding.name, finding.fault, finding.detail[:9]) for finding in findings}
    assert listed == (
        {(f"{number}.png", faults.ENLARGED, "1.3 times") for number in range(1, 4)} if is_listed else set()
    )


@pytest.mark.parametrize(
    ("shown", "head"),
    [(60, "100 pictures, 60 with a finding"), (75, "100 pictures, 75 with a finding, 15 of them not shown")],
)
def test_the_head_of_the_sheet_counts_the_pictures_that_it_does_not_show(shown, head, tmp_path):
    write_photographs(tmp_path, 1)
    pictures = [(tmp_path / "000.jpg", f"{number}.jpg", [faults.Finding("", faults.SMALL)]) for number in range(shown)]
    sheet = draw_sheet(pictures, 100, ignore)
    expected = Canvas(sheet.width, sheet.height, oversampling=1)
    expected.text(12, 8, head, 15)
    area = (0, 0, sheet.width, 30)
    assert ImageChops.difference(sheet.crop(area), expected.finish().crop(area)).getbbox() is None


def test_the_sheet_shows_sixty_pictures_at_most(tmp_path):
    write_photographs(tmp_path, 1)
    pictures = [(tmp_path / "000.jpg", f"{number}.jpg", [faults.Finding("", faults.SMALL)]) for number in range(75)]
    assert draw_sheet(pictures, 100, ignore).size == draw_sheet(pictures[:60], 100, ignore).size
    assert draw_sheet(pictures[:30], 100, ignore).height < draw_sheet(pictures[:60], 100, ignore).height
    widths = [draw_sheet(pictures[:count], 100, ignore).width for count in (0, 2, 4, 7, 30)]
    assert widths[0] == widths[1] == widths[2] < widths[3] < widths[4]  # which are large on the node
