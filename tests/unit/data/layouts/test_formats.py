"""Formats of pictures and films by their named decoder."""

import av
import numpy as np
import pytest
from PIL import Image
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.items import find_items
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.images import FORMATS, inspect_image, load_image
from tessera.data.media.videos import inspect_video, load_frames

WHOLE = (0, 0, 64, 48)
# Encoder, pixel format and muxer of each ending.
FILMS = {
    "avi": ("mpeg4", "yuv420p", "avi"),
    "m4v": ("libx264", "yuv420p", "mp4"),
    "f4v": ("libx264", "yuv420p", "f4v"),
    "3gp": ("mpeg4", "yuv420p", "3gp"),
    "flv": ("flv1", "yuv420p", "flv"),
    "wmv": ("wmv2", "yuv420p", "asf"),
    "ts": ("libx264", "yuv420p", "mpegts"),
    "m2ts": ("libx264", "yuv420p", "mpegts"),
    "mpg": ("mpeg1video", "yuv420p", "mpeg"),
    "vob": ("mpeg2video", "yuv420p", "vob"),
    "mxf": ("mpeg2video", "yuv420p", "mxf"),
    "apng": ("apng", "rgb24", "apng"),
}


@pytest.mark.parametrize("ending", FILMS)
def test_films_of_other_containers_give_their_frames(tmp_path, ending):
    codec, pixels, muxer = FILMS[ending]
    path = tmp_path / f"a.{ending}"
    with av.open(str(path), "w", format=muxer) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = pixels
        for index in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * index, np.uint8), format="rgb24")
            frame = frame.reformat(format=pixels)
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (tmp_path / "a.txt").write_text("grey")
    items, _ = find_items(scan_videos(tmp_path, Extraction((9,), 0)), lambda *_: None, lambda: None)
    facts = inspect_video(path)
    assert len(items) == 1 and facts.size == (48, 64) and len(facts.stamps) == 12
    greys = load_frames(path, facts, facts.stamps[4:9], WHOLE, 6, 8).mean((1, 2, 3)) * 255
    assert np.allclose(greys, [80, 100, 120, 140, 160], atol=4), greys


@pytest.mark.parametrize("ending", ["jp2", "tga", "mpo", "apng"])
def test_pictures_of_other_formats_are_read(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    formats = {"jp2": "JPEG2000", "tga": "TGA", "mpo": "MPO", "apng": "PNG"}
    second = [Image.new("RGB", (64, 48), (0, 0, 255))]
    options = {"save_all": True, "append_images": second} if ending in ("mpo", "apng") else {}
    Image.new("RGB", (64, 48), (200, 100, 50)).save(path, formats[ending], **options)
    (tmp_path / "a.txt").write_text("orange")
    assert [entry.path for entry in scan_images(tmp_path).entries] == [path]
    assert inspect_image(path).size == (48, 64)
    colour = load_image(path, WHOLE, 6, 8).mean((0, 1, 2)) * 255
    assert np.allclose(colour, [200, 100, 50], atol=4), colour


def test_a_format_without_a_mark_is_read_by_its_ending_only(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 48)).save(path, "TGA")
    with pytest.raises(ValueError, match="it's damaged or not a picture"):
        inspect_image(path)


def test_heic_is_read_where_its_package_is_installed(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.hif").write_bytes(b"1")
    if "HEIF" in FORMATS:
        with pytest.raises(ValueError, match="1 of 2 pictures .* has no .txt caption file: b.hif"):
            scan_images(tmp_path)
    else:
        notes = scan_images(tmp_path).notes
        assert any("b.hif; save them as PNG or JPEG, or install pillow-heif" in note for note in notes), notes


def test_every_other_file_is_listed_by_name(tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    names = (
        "a.txt",
        "film.mkv",
        "film.txt",
        "raw.cr3",
        "scene.exr",
        "alone.txt",
        "alone too.caption",
        "latents.npz",
        "README.md",
        "notes.md",
        "LICENSE",
        "license.txt",
        "Thumbs.db",
        "desktop.ini",
    )
    for name in names:
        (tmp_path / name).write_text("x")
    for folder in ("@eaDir", "__MACOSX", "#recycle", "lost+found", "$RECYCLE.BIN"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.png").write_text("x")
    dataset = scan_images(tmp_path)
    assert [entry.name for entry in dataset.entries] == ["a.png"]
    assert dataset.notes == (
        "Not read here: film.mkv; Training Clips reads them.",
        "These captions belong to no picture: alone too.caption, alone.txt.",
        "Not used, as nothing here reads them: latents.npz.",
        "Left out, because these file types can't be read: raw.cr3, scene.exr; save them as PNG or JPEG.",
    )
    for n in range(30):
        (tmp_path / f"x{n:02}.npz").write_text("x")
    assert any("x18.npz and 11 more" in note for note in scan_images(tmp_path).notes)


def test_the_picture_of_a_clip_is_not_offered_to_the_other_node(tmp_path):
    for name in ("film.mp4", "film.txt", "film.png", "other.png"):
        (tmp_path / name).write_text("x")
    notes = scan_videos(tmp_path, Extraction((9,), 0)).notes
    assert notes == (
        "Not read here: other.png; Training Images reads them.",
        "Not used, as nothing here reads them: film.png.",
    )


def test_files_that_no_node_reads_are_not_promised(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name in ("a.txt", "film.ogv", "raw.y4m", "clip.mp4"):
        (tmp_path / name).write_text("x")
    assert scan_images(tmp_path).notes == (
        "Not read here: clip.mp4; Training Clips reads them.",
        "Not used, as nothing here reads them: film.ogv, raw.y4m.",
    )
    (tmp_path / "clip.txt").write_text("x")
    (tmp_path / "b.cr3").write_text("x")
    assert scan_videos(tmp_path, Extraction((9,), 0)).notes == (
        "Not read here: a.png; Training Images reads them.",
        "Not used, as nothing here reads them: b.cr3.",
        "Left out, because these file types can't be read: film.ogv, raw.y4m; save them as MP4 (H.264).",
    )
