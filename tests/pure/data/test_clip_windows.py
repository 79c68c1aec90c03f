"""Frames of a film that become clips, drawn as musubi-tuner's guide draws them."""

import pytest
from tessera.data.media.clip_windows import EXTRACTIONS, Extraction, parse_target_frames, round_down_frames


def timeline(extraction, frames):
    return ["o" * start + "x" * count + "o" * (frames - start - count) for start, count in extraction.windows(frames)]


def test_head_takes_the_first_frames():
    assert timeline(Extraction((1, 13, 25)), 40) == ["x" + "o" * 39, "x" * 13 + "o" * 27, "x" * 25 + "o" * 15]


def test_chunk_takes_one_clip_after_the_other():
    assert timeline(Extraction((13, 25), method="chunk"), 40) == [
        "x" * 13 + "o" * 27,
        "o" * 13 + "x" * 13 + "o" * 14,
        "o" * 26 + "x" * 13 + "o",
        "x" * 25 + "o" * 15,
    ]
    assert Extraction((13,), method="chunk").windows(26) == [(0, 13), (13, 13)]


def test_slide_takes_a_clip_at_every_stride():
    windows = Extraction((1, 13, 25), method="slide", frame_stride=10).windows(40)
    assert windows == [(0, 1), (10, 1), (20, 1), (30, 1), (0, 13), (10, 13), (20, 13), (0, 25), (10, 25)]


def test_uniform_spreads_the_clips_evenly():
    windows = Extraction((1, 13, 25), method="uniform", frame_sample=4).windows(40)
    assert windows[:4] == [(0, 1), (13, 1), (26, 1), (39, 1)]
    assert windows[4:8] == [(0, 13), (9, 13), (18, 13), (27, 13)]
    assert windows[8:] == [(0, 25), (5, 25), (10, 25), (15, 25)]
    # A film that holds fewer places than that gives each of them once.
    assert Extraction((13,), method="uniform", frame_sample=4).windows(14) == [(0, 13), (1, 13)]


def test_full_takes_all_that_the_vae_can():
    full = Extraction(method="full", max_frames=31)
    assert [full.windows(frames) for frames in (20, 25, 35, 1, 4)] == [[(0, c)] for c in (17, 25, 29, 1, 1)]
    assert full.too_long(1) == []


@pytest.mark.parametrize("method", EXTRACTIONS)
def test_clips_reach_to_the_end_of_the_film_at_most_and_are_as_long_as_a_vae_takes(method):
    extraction = Extraction((1, 5, 25, 49), method=method, frame_stride=3, frame_sample=5)
    for frames in range(1, 120):
        windows = extraction.windows(frames)
        assert windows and len(set(windows)) == len(windows)
        assert all(0 <= start and start + count <= frames for start, count in windows)
        assert all(count % 4 == 1 or count % 17 == 5 for _, count in windows)
        if method != "full":
            assert {count for _, count in windows} == {1, 5, 25, 49} - set(extraction.too_long(frames))


def test_a_film_that_is_too_short_gives_none():
    for method in ("head", "chunk", "slide", "uniform"):
        extraction = Extraction((25, 49), method=method)
        assert extraction.windows(24) == [] and extraction.too_long(24) == [25, 49]
        assert extraction.too_long(30) == [49]


def test_a_list_of_frames_is_read_and_lowered_to_what_the_vae_takes():
    assert parse_target_frames("1, 25, 49") == ((1, 25, 49), ())
    assert parse_target_frames("[25; 1 25]") == ((1, 25), ())
    counts, notes = parse_target_frames("81, 24, 30")
    assert counts == (22, 29, 81)
    assert notes == (
        "target_frames has to be 4n + 1 (for MiniMax H3 17n + 5), as the VAE takes: lowered 24 to 22, 30 to 29.",
    )
    assert [round_down_frames(count) for count in (1, 2, 4, 5, 8, 9)] == [1, 1, 1, 5, 5, 9]
    assert [round_down_frames(count) for count in (21, 22, 24, 39, 40, 41)] == [21, 22, 22, 39, 39, 41]


@pytest.mark.parametrize("text", ["", " , ", "a", "25.5", "-5", "0", "25, x", "9" * 4300, "25, " + "9" * 10**5])
def test_texts_that_list_no_frames_are_told(text):
    with pytest.raises(ValueError, match=r"target_frames is .*; write the numbers of frames with commas") as error:
        parse_target_frames(text)
    assert len(str(error.value)) < 220


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "tail"}, "extraction is 'tail'; choose one of head, chunk"),
        ({"fps": -1}, "fps is -1; set it"),
        ({"fps": float("nan")}, "fps is nan; set it"),
        ({"frame_stride": 0}, "frame_stride is 0; set it between 1 and 100000"),
        ({"frame_sample": 0}, "frame_sample is 0; set it between 1 and 10000"),
        ({"max_frames": 0}, "max_frames is 0; set it between 1 and 100000"),
    ],
)
def test_bad_values_are_told(change, message):
    with pytest.raises(ValueError, match=message):
        Extraction(**change)
