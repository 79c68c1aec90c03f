"""Pictures and films that are easily read otherwise than they look: read right, or named in a note."""

import struct
import zlib
from fractions import Fraction
from hashlib import blake2b
from io import BytesIO

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image, ImageCms, features
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.items import find_items
from tessera.data.media import decoding
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.images import inspect_image, load_image
from tessera.data.media.remarks import remark_notes
from tessera.data.media.thumbnails import image_thumbnail, video_thumbnail
from tessera.data.media.videos import inspect_video, load_frames
from tiny.data.films import grey, plain, write_film

COLOUR = (200, 60, 90)


def notes_of(dataset):
    return find_items(dataset, lambda *_: None, lambda: None)[1]


def picture_notes(path):
    path.with_suffix(".txt").write_text("a")
    return notes_of(scan_images(path.parent))


def colour_of(path):
    """The colour of a plain picture as training sees it, and as its thumbnail shows it, 0 to 255."""
    height, width = inspect_image(path).size
    pixels = load_image(path, (0, 0, width, height), height, width)[0, height // 2, width // 2].numpy() * 255
    picture = np.asarray(Image.open(BytesIO(image_thumbnail(path))).convert("RGB"))[height // 2, width // 2]
    assert np.abs(pixels - picture).max() <= 4
    return pixels


def png_with(path, kind, data, colour=COLOUR):
    """Write a plain PNG with one more chunk before its pixels."""
    buffer = BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    png = buffer.getvalue()
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(png[:33] + chunk + png[33:])
    return path


def plain_digest(path):
    return blake2b(path.read_bytes(), digest_size=20).hexdigest()


@pytest.mark.parametrize("ending", ["png", "webp", "tiff", "avif"])
def test_a_file_of_several_pictures_is_named(tmp_path, ending):
    if ending == "avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    pictures = [Image.new("RGB", (32, 32), colour) for colour in (COLOUR, (0, 0, 255))]
    path = tmp_path / f"a.{ending}"
    pictures[0].save(path, save_all=True, append_images=pictures[1:])
    (note,) = picture_notes(path)
    assert note.startswith(f"These files hold several pictures, of which the first is used: a.{ending}; ")
    assert np.abs(colour_of(path) - COLOUR).max() <= 10


def test_a_file_of_one_picture_and_a_sound_profile_gives_no_note(tmp_path):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name in ("a.png", "a.jpg"):
        Image.new("RGB", (32, 32), COLOUR).save(tmp_path / name, icc_profile=profile)
        assert not picture_notes(tmp_path / name)
        (tmp_path / name).unlink()


def test_a_profile_that_16_bit_grey_does_not_use_gives_no_note(tmp_path):
    image = Image.fromarray(np.full((32, 32), 40_000, np.uint16))
    image.save(tmp_path / "a.png", icc_profile=b"no profile at all")
    assert not picture_notes(tmp_path / "a.png")


def test_previews_beside_the_picture_of_a_jpeg_give_no_note(tmp_path):
    pictures = [Image.new("RGB", (32, 32), colour) for colour in (COLOUR, (0, 0, 255))]
    pictures[0].save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=pictures[1:])
    assert not picture_notes(tmp_path / "a.jpg")


@pytest.mark.parametrize("profile", [b"no profile at all", "LAB"])
def test_a_colour_profile_that_cannot_be_used_is_named_with_its_file(tmp_path, profile):
    if isinstance(profile, str):
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile(profile)).tobytes()
    Image.new("RGB", (32, 32), COLOUR).save(tmp_path / "a.png", icc_profile=profile)
    (note,) = picture_notes(tmp_path / "a.png")
    assert "is damaged or for other colours, so they are read as sRGB: a.png;" in note
    assert np.abs(colour_of(tmp_path / "a.png") - COLOUR).max() < 1


def linear_to_srgb(light):
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255


@pytest.mark.parametrize(("stored", "exponent"), [(100000, 1.0), (55556, 1.8), (45455, None)])
def test_the_gamma_of_a_png_is_read(tmp_path, stored, exponent):
    path = png_with(tmp_path / "a.png", b"gAMA", struct.pack(">I", stored))
    numbers = np.array(COLOUR)
    expected = numbers if exponent is None else linear_to_srgb((numbers / 255) ** exponent)
    assert np.abs(colour_of(path) - expected).max() < 0.6
    # Latents that were cached before gamma was read belong to other pixels.
    assert (inspect_image(path).digest == plain_digest(path)) is (exponent is None)
    assert not picture_notes(path)


def test_an_srgb_chunk_outranks_gamma(tmp_path):
    png = png_with(tmp_path / "a.png", b"gAMA", struct.pack(">I", 100000)).read_bytes()
    chunk = struct.pack(">I", 1) + b"sRGB\0" + struct.pack(">I", zlib.crc32(b"sRGB\0"))
    (tmp_path / "a.png").write_bytes(png[:33] + chunk + png[33:])
    assert np.abs(colour_of(tmp_path / "a.png") - COLOUR).max() < 0.6


def srgb_profile():
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_a_profile_outranks_the_gamma_of_a_png(tmp_path):
    buffer = BytesIO()
    Image.new("RGB", (32, 32), COLOUR).save(buffer, "PNG", icc_profile=srgb_profile())
    png = buffer.getvalue()
    chunk = struct.pack(">I", 4) + (data := b"gAMA" + struct.pack(">I", 100000)) + struct.pack(">I", zlib.crc32(data))
    (tmp_path / "a.png").write_bytes(png[:33] + chunk + png[33:])
    assert np.abs(colour_of(tmp_path / "a.png") - COLOUR).max() <= 1


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_a_profile_goes_before_the_numbers_of_avif(tmp_path):
    path = tmp_path / "a.avif"
    Image.new("RGB", (32, 32), COLOUR).save(path, quality=100, icc_profile=srgb_profile())
    with_numbers(path, 9, 16)
    assert np.abs(colour_of(path) - COLOUR).max() < 5
    assert not picture_notes(path)


def with_numbers(path, primaries, curve):
    """Write other colours by number into an AVIF file."""
    data = path.read_bytes()
    place = data.index(b"colrnclx") + 8
    path.write_bytes(data[:place] + struct.pack(">HH", primaries, curve) + data[place + 4 :])


def to_xyz(*corners):
    """The matrix from linear RGB with these chromaticities and D65 to XYZ."""
    columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in corners]).T
    white = np.array([0.3127 / 0.3290, 1, (1 - 0.3127 - 0.3290) / 0.3290])
    return columns * np.linalg.solve(columns, white)


def as_srgb(*corners):
    """COLOUR in sRGB, if it is meant in these primaries."""
    srgb = to_xyz((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
    light = np.array([((c / 255 + 0.055) / 1.055) ** 2.4 for c in COLOUR])
    return linear_to_srgb(np.linalg.inv(srgb) @ to_xyz(*corners) @ light)


@pytest.mark.parametrize(
    ("numbers", "expected", "note"),
    [
        ((1, 13), COLOUR, None),
        ((1, 1), COLOUR, None),
        ((2, 2), COLOUR, None),
        ((1, 4), linear_to_srgb((np.array(COLOUR) / 255) ** 2.2), None),
        ((1, 5), linear_to_srgb((np.array(COLOUR) / 255) ** 2.8), None),
        ((1, 8), linear_to_srgb(np.array(COLOUR) / 255), None),
        ((12, 13), as_srgb((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)), None),
        ((9, 13), as_srgb((0.708, 0.292), (0.170, 0.797), (0.131, 0.046)), None),
        ((9, 16), COLOUR, "HDR pictures are read as SDR, so they look pale: a."),
        ((9, 18), COLOUR, "HDR pictures are read as SDR, so they look pale: a."),
        ((22, 13), COLOUR, "of a kind that isn't known here, so they are read as sRGB: a."),
    ],
)
@pytest.mark.parametrize("ending", ["png", "avif"])
def test_colours_by_number_are_read_or_named(tmp_path, numbers, expected, note, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "png":
        png_with(path, b"cICP", bytes([*numbers, 0, 1]))
    elif not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    else:
        Image.new("RGB", (32, 32), COLOUR).save(path, quality=100)
        with_numbers(path, *numbers)
    assert np.abs(colour_of(path) - np.clip(expected, 0, 255)).max() < (1 if ending == "png" else 5)
    notes = picture_notes(path)
    assert not notes if note is None else note in notes[0]


def load(path, count=None):
    facts = inspect_video(path)
    height, width = facts.size
    stamps = facts.stamps[:count]
    return load_frames(path, facts, stamps, (0, 0, width, height), height, width).numpy() * 255


def film_notes(path, frames=1):
    path.with_suffix(".txt").write_text("a")
    return notes_of(scan_videos(path.parent, Extraction((frames,), 0)))


def fields(index, height, width):
    """Two moments in one frame: grey 2·index on the even lines, 2·index + 1 on the odd ones."""
    pixels = plain(2 * index, height, width)
    pixels[1::2] = grey(2 * index + 1)
    return pixels


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", {"x264-params": "interlaced=1:tff=1", "crf": "4"}),
        ("a.avi", "libx264", {"x264-params": "interlaced=1:tff=1", "crf": "4"}),
        ("b.avi", "mpeg4", {"flags": "+ildct+ilme", "qmin": "1"}),
        ("a.mkv", "mpeg2video", {"flags": "+ildct+ilme", "qmin": "1"}),
        ("a.mkv", "rawvideo", {"field_order": "bb"}),
        # FFV1 marks no frame: the file alone has the order, of the fields as they are stored and shown.
        *(("a.mkv", "ffv1", {"field_order": order}) for order in ("tt", "bb", "tb", "bt")),
    ],
)
def test_interlaced_films_are_deinterlaced_in_the_order_of_time(tmp_path, name, codec, options):
    path = tmp_path / name
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        stream.codec_context.options, stream.codec_context.gop_size = options, 10
        stream.set_display_rotation(180) if name == "a.mp4" else None
        for index in range(12):
            frame = av.VideoFrame.from_ndarray(fields(index, 48, 64), format="rgb24")
            frame = frame.reformat(format="yuv420p")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    clip, second = load(path), options.get("field_order") in ("bb", "tb")
    assert len(clip) == 12
    for index, frame in enumerate(clip):
        middle = frame[16:32, 32, 0]
        tolerance = 3 if "field_order" in options else 10
        assert np.ptp(middle) <= 3 and abs(middle.mean() - grey(2 * index + second)) <= tolerance, (index, middle)
    facts = inspect_video(path)
    height, width = facts.size
    late = load_frames(path, facts, facts.stamps[9:], (0, 0, width, height), height, width).numpy() * 255
    assert np.abs(late[:, 24, 32, 0] - clip[9:, 24, 32, 0]).max() <= 10
    column = np.asarray(Image.open(BytesIO(video_thumbnail(path))).convert("L"))[16:32, 32]
    assert np.ptp(column.astype(int)) <= 6
    (note,) = remark_notes([(name, facts.remarks), (name, facts.remarks)])
    assert note.startswith(f"Interlaced clips are deinterlaced: {name};")
    assert facts.digest != plain_digest(path), "latents that were cached before belong to other pixels"
    marked = blake2b(b"deinterlaced" + path.read_bytes(), digest_size=20).hexdigest()
    assert (facts.digest == marked) is (codec != "ffv1"), "as those of frames that no codec marks"


def test_frames_that_their_codec_marks_as_whole_stay_so_whatever_the_file_says(tmp_path):
    def set_up(stream):
        stream.codec_context.options = {"crf": "1", "field_order": "bb"}

    path = write_film(tmp_path / "a.mkv", 5, draw=fields, set_up=set_up)
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.field_order == 3  # AV_FIELD_BB
    middle = load(path)[2, 16:32, 32, 0]
    assert np.abs(middle[::2] - grey(4)).max() <= 3 and np.abs(middle[1::2] - grey(5)).max() <= 3


def test_frames_of_avi_that_a_codec_reordered_are_in_the_order_of_time(tmp_path):
    path = write_film(tmp_path / "a.avi", 20, fps=10)
    facts = inspect_video(path)
    for stamps, first in ((facts.stamps, 0), (facts.stamps[13:17], 13)):
        clip = load_frames(path, facts, stamps, (0, 0, 64, 48), 48, 64)[:, 24, 32, 0] * 255
        assert np.abs(clip.numpy() - [grey(first + index) for index in range(len(stamps))]).max() <= 3
    assert facts.fps == pytest.approx(10)


def test_frames_that_avi_shows_longer_stay_so(tmp_path):
    stamps = [0, 1, 4, 5]
    path = write_film(tmp_path / "a.avi", 4, fps=10, codec=("mpeg4", "yuv420p"), stamps=stamps)
    assert list(inspect_video(path).stamps) == stamps


def test_hidden_frames_of_vp8_have_no_stamp(tmp_path):
    """An encoder predicts others from them; a bit of the first byte says whether to show one (RFC 6386, 9.1)."""
    film = write_film(tmp_path / "film.webm", [plain(3, 48, 64)] * 5, fps=10, codec=("libvpx", "yuv420p"))
    path = tmp_path / "a.webm"
    with av.open(str(film)) as source, av.open(str(path), "w") as container:
        track = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            data, pts = bytes(packet), packet.pts
            for content, stamp in ((data, pts), (bytes([data[0] & ~0x10, *data[1:]]), pts + 50)) if data else ():
                copy = av.Packet(content)
                copy.pts = copy.dts = stamp
                copy.time_base, copy.stream = packet.time_base, track
                container.mux(copy)
    with av.open(str(path)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) == 10
    assert inspect_video(path).stamps == inspect_video(film).stamps


def transparent_film(path, codec):
    """Blue on the left, and nothing on the right, whose hidden colour is red."""
    rgba = np.zeros((48, 64, 4), np.uint8)
    rgba[:, :32], rgba[:, 32:] = (0, 0, 255, 255), (255, 0, 0, 0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width = 64
        stream.height = 48
        stream.pix_fmt = "yuva420p"
        stream.metadata["alpha_mode"], stream.codec_context.options = "1", {"auto-alt-ref": "0"}
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_transparent_parts_of_vp8_and_vp9_are_white(tmp_path, codec):
    path = transparent_film(tmp_path / "a.webm", codec)
    clip = load(path)
    assert len(clip) == 5 and not film_notes(path)
    assert inspect_video(path).digest != plain_digest(path), "latents that were cached before belong to other pixels"
    assert np.abs(clip[3, 24, [10, 50]] - [[0, 0, 255], [255, 255, 255]]).max() <= 4
    colours = np.asarray(Image.open(BytesIO(video_thumbnail(path))).convert("RGB"))[24, [10, 50]]
    assert np.abs(colours.astype(int) - [[0, 0, 255], [255, 255, 255]]).max() <= 8


def joined_films(path, sizes):
    """A film in WebM whose picture size changes, as a call that is recorded from a phone gives."""
    with av.open(str(path), "w") as container:
        track = None
        for number, (height, width) in enumerate(sizes):
            encoder = av.CodecContext.create("libvpx-vp9", "w")
            encoder.width = width
            encoder.height = height
            encoder.pix_fmt = "yuv420p"
            encoder.time_base = Fraction(1, 10)
            if track is None:
                track = container.add_stream("libvpx-vp9", rate=10)
                track.width = width
                track.height = height
                track.pix_fmt = "yuv420p"
            packets = []
            for index in range(5):
                frame = av.VideoFrame.from_ndarray(plain(index, height, width), format="rgb24")
                frame.pts = 5 * number + index
                packets += encoder.encode(frame)
            for packet in [*packets, *encoder.encode()]:
                packet.stream = track
                container.mux(packet)
    return path


def test_a_film_whose_shape_changes_is_refused_by_name_where_it_does(tmp_path):
    path = joined_films(tmp_path / "a.webm", [(48, 64), (64, 48)])
    assert len(load(path, 5)) == 5
    with pytest.raises(ValueError, match=r"'a.webm' can't be read \(its size changes from 64 x 48 to 48 x 64 within"):
        load(path)


def test_a_film_whose_size_changes_but_not_its_shape_is_scaled(tmp_path):
    path = joined_films(tmp_path / "a.webm", [(48, 64), (96, 128)])
    clip = load(path)
    assert clip.shape == (10, 48, 64, 3)
    assert np.abs(clip[:, 24, 32, 0] - [grey(index % 5) for index in range(10)]).max() <= 3


def test_a_film_that_ends_before_its_stated_length_is_named(tmp_path):
    noise = [np.random.default_rng(i).integers(0, 256, (48, 64, 3), dtype=np.uint8) for i in range(60)]
    path = write_film(tmp_path / "a.mkv", noise, fps=10)
    assert not film_notes(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (note,) = film_notes(path)
    assert note.startswith("These clips end more than a second before the length that they state, so the copy may")
    assert "a.mkv" in note and len(load(path)) >= 20


@pytest.mark.parametrize("ending", ["mkv", "webm", "mp4", "mov"])
def test_a_whole_film_that_begins_late_is_not_named(tmp_path, ending):
    path = write_film(tmp_path / f"a.{ending}", 20, fps=10, stamps=range(50, 70))
    assert not film_notes(path)


def test_a_film_whose_sound_goes_on_is_not_named(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        film, sound = container.add_stream("libx264", rate=10), container.add_stream("pcm_s16le", rate=8000)
        film.width = 64
        film.height = 48
        film.pix_fmt = "yuv420p"
        for index in range(10):
            container.mux(film.encode(av.VideoFrame.from_ndarray(plain(index, 48, 64), format="rgb24")))
        container.mux(film.encode())
        for second in range(5):
            tone = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
            tone.sample_rate = 8000
            tone.pts = 8000 * second
            container.mux(sound.encode(tone))
        container.mux(sound.encode())
    assert not film_notes(path)


def test_transparent_parts_that_no_decoder_reads_are_named(tmp_path, monkeypatch):
    path = transparent_film(tmp_path / "a.webm", "libvpx")
    monkeypatch.setattr(decoding, "_ALPHA_DECODERS", {"vp8": "absent"})  # as in a PyAV of a distribution
    (note,) = film_notes(path)
    assert note.startswith("The transparency of these clips can't be read by this PyAV: a.webm; save them again as")


def test_a_file_with_a_cover_alone_is_no_film(tmp_path):
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        cover, sound = container.add_stream("mjpeg", rate=1), container.add_stream("aac", rate=8000)
        cover.width = 40
        cover.height = 40
        cover.pix_fmt = "yuvj420p"
        cover.disposition = Disposition.attached_pic
        picture = av.VideoFrame.from_ndarray(np.zeros((40, 40, 3), np.uint8), format="rgb24")
        container.mux([*cover.encode(picture), *cover.encode()])
        tone = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        tone.sample_rate = 8000
        container.mux([*sound.encode(tone), *sound.encode()])
    with pytest.raises(
        ValueError, match=r"'a.mp4' can't be read \(it has a cover picture and no film\); save it again"
    ):
        inspect_video(path)
