"""Films written here, against the frames that they were made of."""

import os
import tracemalloc
from fractions import Fraction
from hashlib import blake2b
from io import BytesIO

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from PIL import Image
from tessera.data.folders.dataset import scan_videos
from tessera.data.folders.items import find_items
from tessera.data.media import videos
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.videos import inspect_video, load_frames
from tiny.data.films import grey, plain, write_film

WHOLE = (0, 0, 64, 48)


def greys(clip):
    """The grey of each frame, as the number of the frame that was drawn in it."""
    return [round((value * 255 - 8).item() / 8) for value in clip[:, 20:28, 28:36].mean(dim=(1, 2, 3))]


def load(path, stamps, box=WHOLE, height=48, width=64):
    clip = load_frames(path, inspect_video(path), stamps, box, height, width)
    assert clip.shape == (len(stamps), height, width, 3) and clip.dtype == torch.float32
    return clip


FORMATS = [
    ("a.mp4", None),
    ("a.mov", None),
    ("a.mkv", None),
    ("a.webm", None),
    ("b.webm", ("libvpx", "yuv420p")),
    ("a.gif", None),
    ("b.mkv", ("ffv1", "yuv420p")),
    ("b.mp4", ("mpeg4", "yuv420p")),
]


@pytest.mark.parametrize(("name", "codec"), FORMATS)
def test_each_format_gives_its_frames_from_wherever_a_clip_starts(tmp_path, name, codec):
    path = write_film(tmp_path / name, 25, fps=10, codec=codec)
    facts = inspect_video(path)
    assert facts.size == (48, 64) and len(facts.stamps) == 25
    assert facts.fps == pytest.approx(10, rel=0.01)
    for first, count in ((0, 25), (0, 1), (24, 1), (9, 4), (13, 9)):
        assert greys(load(path, facts.stamps[first : first + count])) == list(range(first, first + count))


@pytest.mark.parametrize(
    ("film", "rate", "expected"),
    [
        (16, 16, list(range(25))),
        (16, 0, list(range(25))),
        (32, 16, list(range(0, 25, 2))[:12]),
        (24, 16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]),
        (8, 16, [index // 2 for index in range(50)]),
        (30, 16, [int(index * 30 / 16 + 1e-9) for index in range(13)]),
    ],
)
def test_frames_are_dropped_or_repeated_to_the_wanted_rate(tmp_path, film, rate, expected):
    path = write_film(tmp_path / "a.mp4", 25, fps=film)
    stamps = inspect_video(path).frames_at(rate, path.name)
    assert greys(load(path, stamps)) == expected


def test_frames_of_uneven_length_are_shown_at_their_times(tmp_path):
    path = write_film(tmp_path / "a.mkv", 5, fps=10, stamps=[0, 1, 5, 6, 9])
    facts = inspect_video(path)
    assert greys(load(path, facts.frames_at(10, "a.mkv"))) == [0, 1, 1, 1, 1, 2, 3, 3, 3, 4]
    assert greys(load(path, facts.frames_at(0, "a.mkv"))) == [0, 1, 2, 3, 4]


def test_a_film_that_does_not_start_at_zero_starts_at_its_first_frame(tmp_path):
    path = write_film(tmp_path / "a.mkv", 6, fps=10, stamps=[7, 8, 9, 10, 11, 12])
    assert greys(load(path, inspect_video(path).frames_at(10, "a.mkv"))) == [0, 1, 2, 3, 4, 5]


def test_a_clip_whose_stamps_are_absurd_is_told_at_once_and_takes_no_memory(tmp_path):
    path = write_film(tmp_path / "a.mkv", 6, fps=16, stamps=[0, 1, 2, 3, 4, 16 * 10**8])
    facts = inspect_video(path)
    tracemalloc.start()
    with pytest.raises(
        ValueError,
        match=r"'x/a.mkv' can't be taken at 16 frames per second, as its 6 frames are spread over 100000000 s; save it",
    ):
        facts.frames_at(16, "x/a.mkv")
    assert greys(load(path, facts.frames_at(0, "x/a.mkv")[:5])) == [0, 1, 2, 3, 4]
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_the_frames_of_a_still_that_stands_for_minutes_are_found_as_they_are_asked_for(tmp_path):
    path = write_film(tmp_path / "a.mkv", 3, fps=10, stamps=[0, 10, 5900])
    facts = inspect_video(path)
    tracemalloc.start()
    stamps = facts.frames_at(1000, "a.mkv")
    assert len(stamps) == pytest.approx(590_100, abs=100)
    assert [facts.stamps.index(stamp) for stamp in (stamps[999], stamps[1000], stamps[-1])] == [0, 1, 2]
    assert stamps[998:1002] == [facts.stamps[0]] * 2 + [facts.stamps[1]] * 2
    assert tracemalloc.get_traced_memory()[1] < 10**5
    tracemalloc.stop()


def test_cancel_is_asked_for_before_each_clip_that_a_film_gives(tmp_path):
    write_film(tmp_path / "a.mp4", 25, caption="a")
    calls = []

    def interrupted():
        calls.append(None)
        if len(calls) == 10:
            raise InterruptedError

    dataset = scan_videos(tmp_path, Extraction((1,), 1000.0, "chunk"))
    with pytest.raises(InterruptedError):
        find_items(dataset, lambda *_: None, interrupted)


def quarters(index, height, width):
    """Red, green / blue, white: any turn shows."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2, 0] = pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, : width // 2, 2] = 255
    pixels[height // 2 :, width // 2 :] = 255
    return pixels


def corners(frame):
    """The corners' colours by name: top left, top right, bottom left, bottom right."""
    names = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 1): "w"}
    return "".join(names[tuple(frame[y, x].round().int().tolist())] for y in (8, -8) for x in (8, -8))


@pytest.mark.parametrize("size", [(48, 64), (64, 48)])
@pytest.mark.parametrize(
    ("degrees", "mirrored", "expected"),
    [
        (0, False, "rgbw"),
        (90, False, "gwrb"),
        (180, False, "wbgr"),
        (-90, False, "brwg"),
        (0, True, "grwb"),
        (90, True, "wgbr"),
        (180, True, "bwrg"),
        (-90, True, "rbgw"),
    ],
)
def test_films_are_turned_and_mirrored_as_each_display_matrix_says(tmp_path, degrees, mirrored, expected, size):
    def set_up(stream):
        stream.set_display_rotation(degrees, hflip=mirrored)

    path = write_film(tmp_path / "a.mp4", 2, size=size, draw=quarters, set_up=set_up)
    facts = inspect_video(path)
    height, width = facts.size
    assert (height, width) == (size[::-1] if degrees in (90, -90) else size)
    assert corners(load(path, facts.stamps, (0, 0, width, height), height, width)[1]) == expected


def test_latents_of_a_mirrored_film_are_not_those_cached_before_mirrors_were_read(tmp_path):
    plain = write_film(tmp_path / "a.mp4", 2, draw=quarters)
    assert inspect_video(plain).digest == blake2b(plain.read_bytes(), digest_size=20).hexdigest()
    mirrored = write_film(tmp_path / "b.mp4", 2, set_up=lambda stream: stream.set_display_rotation(0, hflip=True))
    assert inspect_video(mirrored).digest != blake2b(mirrored.read_bytes(), digest_size=20).hexdigest()


def boxes(data, start, end):
    """List (type, start, end) of the boxes of an MP4 file between two offsets."""
    positions = []
    while start < end:
        size = int.from_bytes(data[start : start + 4], "big")
        positions.append((data[start + 4 : start + 8], start, start + size))
        start += size
    return positions


def with_cover_first(data):
    """Put an MP4 file's user data, where its cover is, before its tracks."""
    _, start, end = next(box for box in boxes(data, 0, len(data)) if box[0] == b"moov")
    inner = boxes(data, start + 8, end)
    ordered = sorted(inner, key=lambda box: box[0] != b"udta")
    return data[: start + 8] + b"".join(data[first:last] for _, first, last in ordered) + data[end:]


def test_a_cover_picture_before_the_film_is_no_film(tmp_path):
    film = write_film(tmp_path / "film.mp4", 3, draw=quarters)
    path = tmp_path / "with_cover.mp4"
    with av.open(str(film)) as source, av.open(str(path), "w") as target:
        copied = target.add_stream_from_template(source.streams.video[0])
        cover = target.add_stream("mjpeg", rate=1)
        cover.width = 40
        cover.height = 40
        cover.pix_fmt = "yuvj420p"
        cover.disposition = Disposition.attached_pic
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copied
                target.mux(packet)
        picture = av.VideoFrame.from_ndarray(np.zeros((40, 40, 3), np.uint8), format="rgb24")
        target.mux([*cover.encode(picture), *cover.encode()])
    path.write_bytes(with_cover_first(path.read_bytes()))
    with av.open(str(path)) as container:
        assert [(track.width, track.height) for track in container.streams.video] == [(40, 40), (64, 48)]
    facts = inspect_video(path)
    assert facts.size == (48, 64) and len(facts.stamps) == 3
    assert corners(load(path, facts.stamps, (0, 0, 64, 48), 48, 64)[1]) == "rgbw"


@pytest.mark.parametrize("cover", ["attached", "first track", "default track"])
def test_a_cover_picture_in_matroska_is_no_film(tmp_path, cover):
    path = tmp_path / "with_cover.mkv"
    picture = av.VideoFrame.from_ndarray(np.zeros((40, 40, 3), np.uint8), format="rgb24")
    with av.open(str(path), "w") as container:
        still = container.add_stream("mjpeg", rate=1) if cover != "attached" else None
        if still is not None:
            still.width = 40
            still.height = 40
            still.pix_fmt = "yuvj420p"
            still.disposition = Disposition.default if cover == "default track" else Disposition(0)
        film = container.add_stream("libx264", rate=10)
        film.width = 64
        film.height = 48
        film.pix_fmt = "yuv420p"
        if still is None:
            data = BytesIO()
            Image.new("RGB", (40, 40)).save(data, "PNG")
            container.add_attachment("cover.png", "image/png", data.getvalue())
        else:
            container.mux([*still.encode(picture), *still.encode()])
        for index in range(3):
            frame = av.VideoFrame.from_ndarray(quarters(index, 48, 64), format="rgb24")
            container.mux(film.encode(frame))
        container.mux(film.encode())
    facts = inspect_video(path)
    assert facts.size == (48, 64) and len(facts.stamps) == 3
    assert corners(load(path, facts.stamps, (0, 0, 64, 48), 48, 64)[1]) == "rgbw"


def test_a_second_film_track_is_read_if_it_is_the_default(tmp_path):
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as container:
        films = [container.add_stream("libx264", rate=10) for _ in range(2)]
        for film, (width, height) in zip(films, ((80, 64), (64, 48)), strict=True):
            film.width = width
            film.height = height
            film.pix_fmt = "yuv420p"
        films[1].disposition = Disposition.default
        for film in films:
            for index in range(3):
                pixels = quarters(index, film.height, film.width)
                container.mux(film.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(film.encode())
    assert inspect_video(path).size == (48, 64)


def test_pixels_that_are_not_square_are_stretched_to_be(tmp_path):
    def set_up(stream):
        stream.codec_context.sample_aspect_ratio = Fraction(2, 1)

    path = write_film(tmp_path / "a.mp4", 2, draw=quarters, set_up=set_up)
    facts = inspect_video(path)
    assert facts.size == (48, 128)
    assert corners(load(path, facts.stamps, (0, 0, 128, 48), 48, 128)[0]) == "rgbw"
    right = load(path, facts.stamps, (72, 0, 128, 48), 48, 56)[0]
    assert corners(right) == "ggww"


def test_a_box_is_cut_and_scaled_as_that_of_a_picture(tmp_path):
    from PIL import Image
    from tessera.data.media.images import load_image

    noise = [np.random.default_rng(i).integers(0, 256, (48, 64, 3), dtype=np.uint8) for i in range(3)]
    path = write_film(tmp_path / "a.mkv", noise, codec=("ffv1", "bgr0"))
    box = (3.25, 4.5, 51.75, 40.125)
    clip = load(path, inspect_video(path).stamps, box, 24, 40)
    for index, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / "frame.png")
        assert torch.equal(clip[index], load_image(tmp_path / "frame.png", box, 24, 40)[0])


def test_transparent_parts_show_white(tmp_path):
    from PIL import Image

    frames = [Image.new("RGBA", (64, 48), (255, 0, 0, 0)) for _ in range(2)]
    for frame in frames:
        frame.paste((0, 0, 255, 255), (0, 0, 32, 48))
    frames[1].paste((0, 255, 0, 255), (0, 0, 8, 8))
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    clip = load(tmp_path / "a.gif", inspect_video(tmp_path / "a.gif").stamps)
    assert clip[0, 24, 16].tolist() == [0, 0, 1] and clip[0, 24, 48].tolist() == [1, 1, 1]


def test_high_definition_without_a_named_matrix_is_read_as_bt709(tmp_path):
    colour = np.array([200, 60, 90])
    for height, matrix in ((48, 5), (720, 1)):
        frame = av.VideoFrame.from_ndarray(np.full((height, 64, 3), colour, np.uint8), format="rgb24")
        planes = frame.reformat(format="yuv420p", dst_colorspace=matrix)
        planes.colorspace = 2
        path = tmp_path / f"{height}.mkv"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width = 64
            stream.height = height
            stream.pix_fmt = "yuv420p"
            container.mux(stream.encode(planes))
            container.mux(stream.encode())
        clip = load(path, inspect_video(path).stamps, (0, 0, 64, height), height, 64)
        assert np.abs(clip[0, height // 2, 32].numpy() * 255 - colour).max() < 2


class Held:
    """A decoded frame that counts how many of its kind are alive."""

    alive = opened = peak = 0

    def __init__(self, frame):
        self.frame = frame
        Held.alive, Held.opened = Held.alive + 1, Held.opened + 1
        Held.peak = max(Held.peak, Held.alive)

    def __getattr__(self, name):
        return getattr(self.frame, name)

    def __del__(self):
        Held.alive -= 1


class Counted:
    """An open container whose decoded frames are counted."""

    def __init__(self, container):
        self.container = container

    def __enter__(self):
        self.container.__enter__()
        return self

    def __exit__(self, *error):
        return self.container.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.container, name)

    def decode(self, stream):
        for frame in self.container.decode(stream):
            yield Held(frame)
            del frame


def test_few_decoded_frames_are_held_however_long_the_film_is(tmp_path, monkeypatch):
    path = write_film(tmp_path / "a.mp4", 600, fps=16, size=(16, 16), draw=lambda i, h, w: plain(i % 30, h, w))
    original = av.open
    monkeypatch.setattr(av, "open", lambda *args, **kwargs: Counted(original(*args, **kwargs)))
    Held.alive = Held.opened = Held.peak = 0
    facts = inspect_video(path)
    assert len(facts.stamps) == 600 and Held.opened == 1  # the first frame, for its size
    box = (0, 0, 16, 16)
    clip = load_frames(path, facts, facts.stamps[501:526], box, 16, 16)
    assert (clip[:, 8, 8, 0] * 255).round().sub(8).div(8).round().int().tolist() == [i % 30 for i in range(501, 526)]
    assert Held.opened <= 1 + 10 + 25 + 2  # from the key frame before the clip to the frame after it
    load_frames(path, facts, facts.frames_at(16, "a.mp4"), box, 16, 16)
    assert Held.opened >= 600 and Held.peak <= 3 and Held.alive == 0


def test_the_bytes_name_the_file_and_a_changed_one_is_refused(tmp_path):
    path = write_film(tmp_path / "a.mp4", 9)
    facts = inspect_video(path)
    copy = tmp_path / "b.mp4"
    copy.write_bytes(path.read_bytes())
    assert inspect_video(copy) == facts
    write_film(path, 9, draw=lambda i, h, w: plain(i + 3, h, w))
    assert inspect_video(path).digest != facts.digest
    with pytest.raises(ValueError, match=r"The clip 'a.mp4' was changed while the data set was prepared; queue again"):
        load_frames(path, facts, facts.stamps, WHOLE, 48, 64)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no film", "it's damaged or not a video"), (b"", "it's damaged or not a video")],
)
def test_files_that_are_no_video_are_told(tmp_path, content, reason):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"The clip 'x/a.mp4' can't be read \({reason}\); save it again as MP4"):
        inspect_video(path, "x/a.mp4")
    with pytest.raises(ValueError, match=r"'gone.mp4' can't be read \(it's gone"):
        inspect_video(tmp_path / "gone.mp4")


def test_a_list_of_other_files_is_not_followed(tmp_path):
    write_film(tmp_path / "other.mp4", 2)
    (tmp_path / "a.mp4").write_text("ffconcat version 1.0\nfile other.mp4\n")
    with pytest.raises(ValueError, match=r"The clip 'a.mp4' can't be read \(it's damaged or not a video\); save it"):
        inspect_video(tmp_path / "a.mp4")


def test_a_file_without_pictures_is_told(tmp_path):
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match=r"can't be read \(it has no video track\)"):
        inspect_video(tmp_path / "a.mkv")


def test_a_codec_that_the_build_lacks_is_told(tmp_path):
    path = write_film(tmp_path / "a.mp4", 2)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"evc1"))
    with pytest.raises(
        ValueError, match=r"'x/a.mp4' can't be read \(the installed PyAV has no decoder for its codec\);"
    ):
        inspect_video(path, "x/a.mp4")


def test_a_film_of_the_same_size_and_time_is_read_again(tmp_path):
    path = write_film(tmp_path / "a.mkv", 2, codec=("ffv1", "yuv420p"))
    original, stat = inspect_video(path), path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert inspect_video(path).digest != original.digest


def test_a_film_that_breaks_off_is_told_when_its_end_is_wanted(tmp_path, monkeypatch):
    path = write_film(tmp_path / "a.mkv", 25, codec=("ffv1", "yuv420p"))
    facts = inspect_video(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    monkeypatch.setattr(videos, "inspect_video", lambda path, name: facts)  # broken off after it was inspected
    assert greys(load_frames(path, facts, facts.stamps[:3], WHOLE, 48, 64)) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"The clip 'a.mkv' can't be read"):
        load_frames(path, facts, facts.stamps[20:], WHOLE, 48, 64)


def test_grey_names_each_frame():
    assert len({grey(index) for index in range(30)}) == 30 and max(map(grey, range(30))) < 256


def test_a_link_to_nothing_is_told_without_the_path_of_the_machine(tmp_path):
    (tmp_path / "a.mp4").symlink_to(tmp_path / "nowhere.mp4")
    with pytest.raises(ValueError, match=r"The clip 'sub/a.mp4' can't be read \(it's gone, or a link to") as error:
        inspect_video(tmp_path / "a.mp4", "sub/a.mp4")
    assert str(tmp_path) not in str(error.value)
