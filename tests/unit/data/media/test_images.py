"""Real files of each kind, made here, against the pixels they were made of."""

import io
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageCms, features
from tessera.common.text import joined
from tessera.data.media import strips
from tessera.data.media.images import EXTENSIONS, FORMATS, check_pillow, inspect_image, load_image, load_mask
from tessera.data.media.integrity import is_intact
from tessera.data.media.masks import find_mask

RED = (255, 0, 0)
GREEN = (0, 255, 0)
BLUE = (0, 0, 255)
WHITE = (255, 255, 255)


def whole(path):
    """The picture at its own size, (H, W, 3)."""
    height, width = inspect_image(path).size
    pixels = load_image(path, (0, 0, width, height), height, width)
    assert pixels.shape == (1, height, width, 3) and pixels.dtype == torch.float32
    return pixels[0]


def quarters(width=48, height=32):
    """Red, green / blue, white: any turn or flip shows."""
    image = Image.new("RGB", (width, height))
    for column, row, colour in ((0, 0, RED), (1, 0, GREEN), (0, 1, BLUE), (1, 1, WHITE)):
        box = (column * width // 2, row * height // 2, (column + 1) * width // 2, (row + 1) * height // 2)
        image.paste(colour, box)
    return image


def corners(pixels):
    """The colours near the four corners, rounded: top left, top right, bottom left, bottom right."""
    near = ((4, 4), (4, -5), (-5, 4), (-5, -5))
    return [tuple((pixels[y, x] * 255).round().int().tolist()) for y, x in near]


def png16(array, colour_type):
    """A 16-bit PNG from (H, W, channels), written by hand since Pillow writes grey ones only."""
    height, width = array.shape[:2]
    rows = b"".join(b"\0" + array[y].astype(">u2").tobytes() for y in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("ending", ["jpg", "jpeg", "png", "webp", "avif", "bmp", "tiff"])
def test_each_format_gives_its_colours_in_their_places(tmp_path, ending):
    if ending == "avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    path = tmp_path / f"a.{ending}"
    options = {"jpg": {"quality": 95}, "jpeg": {"quality": 95}, "webp": {"lossless": True}, "avif": {"quality": 95}}
    quarters().save(path, **options.get(ending, {}))
    assert inspect_image(path).size == (32, 48)
    tolerance = 8 if ending in ("jpg", "jpeg", "avif") else 0
    colours = np.array(corners(whole(path)))
    assert np.abs(colours - np.array([RED, GREEN, BLUE, WHITE])).max() <= tolerance


# Where the stored corners (1: red, 2: green, 3: blue, 4: white) are seen: top left, top right, bottom left and right.
UPRIGHT = {1: "1234", 2: "2143", 3: "4321", 4: "3412", 5: "1324", 6: "3142", 7: "4231", 8: "2413"}


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_pixels_and_size(tmp_path, ending, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    options = {"jpg": {"quality": 95}, "webp": {"lossless": True}}.get(ending, {})
    quarters().save(path, exif=exif, **options)
    assert inspect_image(path).size == ((48, 32) if orientation >= 5 else (32, 48))
    colours = [RED, GREEN, BLUE, WHITE]
    expected = [colours[int(corner) - 1] for corner in UPRIGHT[orientation]]
    assert np.abs(np.array(corners(whole(path))) - np.array(expected)).max() <= 8


def test_an_orientation_behind_the_pixels_of_a_png_counts_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = io.BytesIO()
    quarters().save(data, "PNG")
    data = data.getvalue()
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    path = tmp_path / "a.png"
    path.write_bytes(data[:-12] + chunk + data[-12:])
    assert inspect_image(path).size == (48, 32)
    assert whole(path).shape == (48, 32, 3)


def test_transparent_parts_show_white(tmp_path):
    levels = np.full((2, 4, 4), 255, dtype=np.uint8)
    levels[..., 0] = 200
    levels[..., 1] = 100
    levels[..., 2] = 0
    levels[0, :, 3] = [255, 128, 0, 1]
    Image.fromarray(levels).save(tmp_path / "rgba.png")
    alpha = levels[..., 3:].astype(np.float64) / 255
    expected = levels[..., :3] / 255 * alpha + (1 - alpha)
    assert np.abs(whole(tmp_path / "rgba.png").numpy() - expected).max() < 1e-6

    Image.merge("LA", [Image.new("L", (8, 8), 0), Image.new("L", (8, 8), 51)]).save(tmp_path / "la.png")
    assert torch.allclose(whole(tmp_path / "la.png"), torch.tensor(0.8), atol=1e-6)

    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.save(tmp_path / "p.png", transparency=1)
    assert torch.equal(whole(tmp_path / "p.png"), torch.ones(8, 8, 3))
    palette.save(tmp_path / "opaque.png")
    assert torch.equal(whole(tmp_path / "opaque.png"), torch.tensor([0.0, 0.0, 1.0]).expand(8, 8, 3))

    keyed = Image.new("RGB", (8, 8), (10, 20, 30))
    keyed.save(tmp_path / "keyed.png", transparency=(10, 20, 30))
    assert torch.equal(whole(tmp_path / "keyed.png"), torch.ones(8, 8, 3))


def test_sixteen_bit_grey_keeps_its_sixteen_bits(tmp_path):
    levels = np.array([[0, 1, 257, 32768], [1000, 40000, 65534, 65535]], dtype=np.uint16)
    (tmp_path / "a.png").write_bytes(png16(levels[..., None], 0))
    Image.fromarray(levels).save(tmp_path / "a.tiff")
    for name in ("a.png", "a.tiff"):
        pixels = whole(tmp_path / name).numpy()
        assert np.abs(pixels - levels[..., None].astype(np.float64) / 65535).max() < 1e-7, name


@pytest.mark.parametrize("colour_type", [2, 6])
def test_sixteen_bit_colour_is_read_to_eight_bits(tmp_path, colour_type):
    levels = np.random.default_rng(0).integers(0, 65536, (4, 5, 3 if colour_type == 2 else 4), dtype=np.uint16)
    if colour_type == 6:
        levels[..., 3] = 65535
    (tmp_path / "a.png").write_bytes(png16(levels, colour_type))
    pixels = whole(tmp_path / "a.png").numpy()
    assert np.abs(pixels - levels[..., :3].astype(np.float64) / 65535).max() <= 1 / 255


def test_grey_and_bitmap_become_three_equal_channels(tmp_path):
    Image.new("L", (8, 8), 51).save(tmp_path / "grey.png")
    Image.new("1", (8, 8), 1).save(tmp_path / "bitmap.png")
    assert torch.allclose(whole(tmp_path / "grey.png"), torch.tensor(0.2), atol=1e-6)
    assert torch.equal(whole(tmp_path / "bitmap.png"), torch.ones(8, 8, 3))


def test_cmyk_without_a_profile_is_converted_by_the_plain_formula(tmp_path):
    Image.new("CMYK", (16, 16), (255, 0, 102, 51)).save(tmp_path / "a.jpg", quality=100, subsampling=0)
    expected = torch.tensor([0.0, 0.8, 0.6 * 0.8])  # (1 - ink) · (1 - black)
    assert (whole(tmp_path / "a.jpg") - expected).abs().max() < 0.02


# Primaries of Adobe RGB (1998), adapted to the profile's white point D50, and its gamma (ICC specification, Annex E).
ADOBE_TO_XYZ = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
XYZ_TO_SRGB = np.array([[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540],
                        [0.0719453, -0.2289914, 1.4052427]])  # fmt: skip
GAMMA = 2.19921875


def rgb_profile(name, to_xyz, gamma):
    """An ICC profile of version 2 with a pure gamma curve."""

    def fixed(value):
        return struct.pack(">i", round(value * 65536))

    def xyz(values):
        return b"XYZ \0\0\0\0" + b"".join(fixed(value) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    name = name.encode() + b"\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", len(name)) + name + b"\0" * 78
    tags = [(b"desc", text + b"\0" * (-len(text) % 4)), (b"wtpt", xyz((0.9642, 1.0, 0.8249)))]
    tags += [(key, xyz(to_xyz[:, i])) for i, key in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))]
    tags += [(key, curve) for key in (b"rTRC", b"gTRC", b"bTRC")]
    table = struct.pack(">I", len(tags))
    body = b""
    offset = 128 + 4 + 12 * len(tags)
    for key, data in tags:
        table += key + struct.pack(">II", offset + len(body), len(data))
        body += data
    size = 128 + len(table) + len(body)
    header = struct.pack(">I4sI4s4s4s", size, b"\0\0\0\0", 0x02100000, b"mntr", b"RGB ", b"XYZ ") + b"\0" * 12
    header += b"acsp" + b"\0" * 28 + xyz((0.9642, 1.0, 0.8249))[8:]
    return header + b"\0" * (128 - len(header)) + table + body


def test_a_wide_gamut_profile_is_converted_to_srgb(tmp_path):
    colours = np.array([[[200, 120, 60], [110, 140, 120], [128, 128, 128]]], dtype=np.uint8)
    linear = XYZ_TO_SRGB @ (ADOBE_TO_XYZ @ (colours.reshape(-1, 3).T / 255) ** GAMMA)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055).T
    Image.fromarray(colours).save(
        tmp_path / "a.png", icc_profile=rgb_profile("Wide gamut for tests", ADOBE_TO_XYZ, GAMMA)
    )
    assert np.abs(whole(tmp_path / "a.png").numpy().reshape(-1, 3) - srgb).max() < 0.01
    assert np.abs(srgb - colours.reshape(-1, 3) / 255).max() > 0.05  # a profile left out would show

    Image.fromarray(colours).save(tmp_path / "broken.png", icc_profile=b"no profile at all")
    assert np.array_equal((whole(tmp_path / "broken.png").numpy() * 255).round().astype(np.uint8), colours)


@pytest.mark.parametrize("name", ["Rec. 709 Linear sRGB", "sRGB (linear)"])
def test_a_linear_profile_is_converted_though_srgb_is_in_its_name(tmp_path, name):
    colours = np.array([[[200, 120, 60], [10, 60, 120], [128, 128, 128]]], dtype=np.uint8)
    linear = colours.reshape(-1, 3) / 255
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    profile = rgb_profile(name, np.linalg.inv(XYZ_TO_SRGB), 1.0)
    Image.fromarray(colours).save(tmp_path / "a.png", icc_profile=profile)
    assert np.abs(whole(tmp_path / "a.png").numpy().reshape(-1, 3) - srgb).max() < 0.01
    assert np.abs(srgb - linear).max() > 0.2  # a profile left out would show


def test_a_picture_that_is_marked_as_srgb_keeps_its_values(tmp_path):
    quarters().save(tmp_path / "a.png", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    assert corners(whole(tmp_path / "a.png")) == [RED, GREEN, BLUE, WHITE]


def test_a_profile_by_the_name_of_srgb_s_standard_changes_no_level(tmp_path):
    """Files of sRGB have slightly different curves, whose conversion would only round."""
    levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    profile = rgb_profile("sRGB IEC61966-2.1", np.linalg.inv(XYZ_TO_SRGB), 2.2)
    Image.fromarray(levels).save(tmp_path / "a.png", icc_profile=profile)
    assert np.array_equal((whole(tmp_path / "a.png").numpy() * 255).round().astype(np.uint8), levels)


@pytest.mark.parametrize("ending", ["webp", "png"])
def test_an_animation_gives_its_first_frame(tmp_path, ending):
    frames = [Image.new("RGB", (16, 16), colour) for colour in (GREEN, RED)]
    frames[0].save(tmp_path / f"a.{ending}", save_all=True, append_images=frames[1:], lossless=True)
    assert corners(whole(tmp_path / f"a.{ending}"))[0] == GREEN


def test_the_crop_is_cut_at_fractions_of_a_pixel_and_nothing_is_stretched(tmp_path):
    # A ramp along x: a crop from left to right holds the ramp's values at the centres of its pixels.
    width, height = 300, 100
    ramp = np.linspace(0, 65535, width).round().astype(np.uint16)
    (tmp_path / "a.png").write_bytes(png16(np.broadcast_to(ramp, (height, width))[..., None], 0))
    left, right = 20.5, 270.5
    pixels = load_image(tmp_path / "a.png", (left, 0, right, height), 32, 80)[0]
    centres = left + (np.arange(80) + 0.5) * (right - left) / 80 - 0.5
    expected = centres / (width - 1)
    assert np.abs(pixels[16, 3:-3, 0].numpy() - expected[3:-3]).max() < 1e-3
    assert np.abs(pixels.numpy() - pixels[16].numpy()).max() < 1e-5


def test_stripes_finer_than_a_pixel_become_their_mean(tmp_path):
    stripes = np.zeros((128, 128), dtype=np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    pixels = load_image(tmp_path / "a.png", (0, 0, 128, 128), 16, 16)
    assert (pixels - 0.5).abs()[..., 2:-2, :].max() < 0.02


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float32, 1), (np.float32, 255), (np.float32, 65535), (np.int32, 255), (np.int32, 65535)],
)
def test_a_tiff_of_wide_numbers_is_scaled_by_their_range(tmp_path, dtype, scale):
    values = np.linspace(0, 1, 256, dtype=np.float64).reshape(16, 16)
    Image.fromarray((values * scale).astype(dtype)).save(tmp_path / "a.tiff")
    pixels = load_image(tmp_path / "a.tiff", (0, 0, 16, 16), 16, 16)[0, :, :, 0].numpy()
    step = 0 if dtype is np.float32 else 1 / scale  # integers are cut off
    assert abs(pixels - values).max() < 1e-6 + step
    assert abs(load_mask(tmp_path / "a.tiff", alpha=False) - values).max() < 1e-6 + step
    assert inspect_image(tmp_path / "a.tiff").wide
    Image.fromarray((values * 65535).astype(np.uint16)).save(tmp_path / "b.png")
    assert not inspect_image(tmp_path / "b.png").wide


@pytest.mark.parametrize(
    ("array", "value_range"),
    [
        (np.float32([[0, 12]]), "0 to 12"),
        (np.int32([[-3, 90]]), "-3 to 90"),
        (np.int32([[0, 70000]]), "0 to 70000"),
    ],
)
def test_wide_numbers_without_a_white_are_refused(tmp_path, array, value_range):
    Image.fromarray(array).save(tmp_path / "a.tiff")
    with pytest.raises(
        ValueError, match=rf"'a.tiff' can't be read \(its values go from {value_range}, .* white\); save it"
    ):
        load_image(tmp_path / "a.tiff", (0, 0, 2, 1), 1, 2)


def test_a_link_to_nothing_is_told_without_the_path_of_the_machine(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"'sub/a.png' can't be read \(it's a link to a missing file\)"):
        inspect_image(tmp_path / "a.png", "sub/a.png")
    with pytest.raises(ValueError, match=r"'b.png' can't be read \(it is gone\)") as error:
        inspect_image(tmp_path / "b.png")
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("cut", [0, 20, 400])
def test_a_damaged_picture_is_named_with_the_fix(tmp_path, cut):
    path = tmp_path / "holiday.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"picture 'holiday.jpg' can't be read \(.*save it again as PNG or JPEG"):
        whole(path)
        load_image(path, (0, 0, 64, 64), 64, 64)


def test_postscript_under_the_name_of_a_picture_is_told_and_starts_no_program(tmp_path, monkeypatch):
    path, started = tmp_path / "holiday.png", tmp_path / "started"
    box = "%%BoundingBox: 0 0 48 32"
    path.write_text(f"%!PS-Adobe-3.0 EPSF-3.0\n{box}\n%%EndComments\nshowpage\n%%EOF\n", encoding="ascii")
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\necho 10 > {started}\n", encoding="ascii")
    ghostscript.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    assert not is_intact(path)
    for read in (
        inspect_image,
        lambda file: load_image(file, (0, 0, 48, 32), 32, 48),
        lambda file: load_mask(file, alpha=False),
    ):
        with pytest.raises(ValueError, match=r"'holiday.png' can't be read \(it's damaged or not a picture\); save"):
            read(path)
    assert not started.exists()


def test_the_pages_and_the_node_name_the_formats_that_are_read():
    names = [extensions[0].lstrip(".") for name, extensions in FORMATS.items() if name != "HEIF"]
    root = Path(__file__).resolve().parents[4]
    for page in ("README.md", "nodes/web/docs/TesseraImageFolder.md"):
        assert joined(names) in (root / page).read_text(encoding="utf-8"), page
    assert f"({', '.join(names)})" in (root / "nodes/data/folders.py").read_text(encoding="utf-8")
    registered = Image.registered_extensions()
    assert {registered[extension] for extension in EXTENSIONS if extension in registered} <= FORMATS.keys() | {
        "MPO"
    }  # an MPO is a JPEG with more pictures behind it


def shaded(width=512, height=384):
    """A smooth picture with transparent parts."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    channels = [np.sin(x / 40) + 1, np.cos(y / 30) + 1, np.sin((x + y) / 50) + 1, (x > width / 3) * 2]
    return Image.fromarray((np.stack(channels, axis=-1) * 127.5).astype(np.uint8), "RGBA")


def write_shaded(folder, name):
    """Write a shaded picture of one of the kinds that are read in ways of their own."""
    path, picture = folder / name, shaded()
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.asarray(picture.convert("L"))
    if name.startswith("palette"):
        picture.convert("RGB").quantize(200).save(path, transparency=7)
    elif name.startswith("wide"):
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    elif name.endswith("tiff"):
        Image.fromarray(grey.astype(np.float32) / 255).save(path)
    elif name.endswith("jpg"):
        picture.convert("RGB").save(path, exif=exif, quality=95)
    else:
        picture.save(path, exif=exif)
    return path


SHADED = ["turned.png", "palette.png", "wide.png", "turned.jpg", "floats.tiff"]


@pytest.mark.parametrize("name", SHADED)
def test_a_picture_in_strips_is_the_picture_bit_for_bit(name, tmp_path, monkeypatch):
    path, box = write_shaded(tmp_path, name), (3.25, 40.5, 371.75, 360.125)
    read = [lambda: load_image(path, box, 80, 92)[0].numpy(), lambda: load_mask(path, alpha=False)]
    whole_at_once = [reader() for reader in read]
    monkeypatch.setattr(strips, "_STRIP", 2000)
    for reader, expected in zip(read, whole_at_once, strict=True):
        assert np.array_equal(reader(), expected)


@pytest.mark.parametrize("name", SHADED)
def test_a_large_picture_is_reduced_before_it_is_scaled_and_looks_the_same(name, tmp_path, monkeypatch):
    path = write_shaded(tmp_path, name)
    facts = inspect_image(path)
    (height, width), box = facts.size, (10.5, 20.25, 350.0, 370.0)
    expected = load_image(path, box, 24, 24)
    mask = find_mask(path, path, name, facts.size)
    weights = mask._encode(box, 8, 8, False)["mask"]
    monkeypatch.setattr(strips, "LARGE", 20_000)
    monkeypatch.setattr(strips, "_STRIP", 2000)
    assert strips.scaling_factor(facts.size, box, 24, 24) == strips.mask_factor(facts.size) == 4
    assert (load_image(path, box, 24, 24) - expected).abs().max() < 0.02
    assert load_mask(path, alpha=False).shape == (-(-height // 4), -(-width // 4))
    assert (mask._encode(box, 8, 8, False)["mask"] - weights).abs().max() < 0.02


def test_little_is_held_beside_the_pixels_of_a_large_picture(tmp_path):
    path = tmp_path / "large.png"
    Image.new("L", (8000, 6000), 100).save(path)
    tracemalloc.start()
    pixels = load_image(path, (0, 0, 8000, 6000), 30, 40)
    assert load_mask(path, alpha=False).size == 12_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (pixels * 255).round().unique().tolist() == [100]
    assert peak < 2.5 * 48_000_000  # the mask and its strips; whole, the picture's numbers take 8 bytes a pixel


def test_a_pillow_without_avif_is_the_reason_whatever_the_picture_is_called(tmp_path, monkeypatch):
    path = tmp_path / "holiday.avif"
    path.write_bytes(b"\0\0\0\x1cftypavif")
    monkeypatch.setattr(features, "check", lambda feature: False)
    for name in (None, "holiday.avif (control)"):
        with pytest.raises(ValueError, match=r"this Pillow reads no AVIF: update Pillow to 11.3 or later"):
            inspect_image(path, name)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_a_damaged_avif_is_named_with_the_fix(tmp_path):
    path = tmp_path / "holiday.avif"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat") + 4
    data[start:] = bytes(255 - value for value in data[start:])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"picture 'holiday.avif' can't be read \(.*save it again as PNG or JPEG"):
        load_image(path, (0, 0, 64, 64), 64, 64)


def test_a_file_that_changed_after_it_was_inspected_is_refused(tmp_path):
    path = tmp_path / "a.png"
    quarters().save(path)
    digest = inspect_image(path).digest
    assert load_image(path, (0, 0, 48, 32), 32, 48, digest=digest).shape == (1, 32, 48, 3)
    stat = path.stat()
    Image.new("RGB", (48, 32), RED).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path.write_bytes(path.read_bytes().ljust(stat.st_size, b"\0"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = inspect_image(path).digest
    assert new != digest  # read again, though size and time are the same
    with pytest.raises(ValueError, match=r"'sub/a.png' was changed while the data set was prepared; queue again"):
        load_image(path, (0, 0, 48, 32), 32, 48, digest=digest, name="sub/a.png")
    assert load_image(path, (0, 0, 48, 32), 32, 48, digest=new).shape == (1, 32, 48, 3)


def test_a_moved_file_is_read_again_if_only_its_inode_differs(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    quarters().save(path)
    monkeypatch.setattr(Path, "stat", without_change_time)
    original = inspect_image(path)
    other = tmp_path / "b.png"
    stat = path.stat()
    other.write_bytes(path.read_bytes().replace(b"IEND", b"IENE"))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)
    assert inspect_image(path).digest != original.digest
    copy = tmp_path / "c.png"
    copy.write_bytes(path.read_bytes())
    assert inspect_image(copy).digest == inspect_image(path).digest  # another state, the same bytes


def without_change_time(path):
    """Return the status that Path.stat gives on Windows, where the change time is that of creation."""
    status = os.stat(path)
    return SimpleNamespace(
        st_size=status.st_size,
        st_mtime_ns=status.st_mtime_ns,
        st_atime_ns=status.st_atime_ns,
        st_ctime_ns=0,
        st_ino=status.st_ino,
    )


def test_an_old_pillow_is_told_with_the_command_that_updates_it():
    with pytest.raises(ValueError, match=r"Pillow 10.3.0 is installed and 10.4 or newer .* `pip install -U pillow`"):
        check_pillow("10.3.0")
    for version in ("10.4.0", "11.3.0", "12.0", "13.0.0.dev0"):
        check_pillow(version)


def test_a_file_is_known_by_its_bytes(tmp_path):
    quarters().save(tmp_path / "a.png")
    quarters().save(tmp_path / "b.png")
    quarters(40, 40).save(tmp_path / "c.png")
    first, copy, other = (inspect_image(tmp_path / f"{name}.png").digest for name in "abc")
    assert first == copy != other
