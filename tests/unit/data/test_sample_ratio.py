"""Of a folder with a sample_ratio each epoch shows that part, and all of it over the epochs."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from tessera.data.folders.dataset import Dataset, scan_images
from tessera.data.folders.options import FolderOptions
from tessera.data.loader import batch_order
from tessera.data.samples import Sample, shown_per_epoch


def make(*folders):
    """Samples of one shape; folders: (letter, number of samples, repeats, sample_ratio) of each."""
    return [
        Sample(f"{letter}{i}", (1, 4, 4), 16, 256, lambda *_: None, repeats, sample_ratio=ratio, folder=number)
        for number, (letter, count, repeats, ratio) in enumerate(folders)
        for i in range(count)
    ]


def epochs(samples, count, seed=0):
    """Names that each epoch shows."""
    length = shown_per_epoch(samples)
    order = islice(batch_order(samples, 1, seed), count * length)
    names = [samples[index].name for batch in order for index in batch]
    return [names[start : start + length] for start in range(0, len(names), length)]


def test_each_epoch_shows_the_part_of_each_folder_and_their_turns_show_all():
    samples = make(("a", 3, 2, 1.0), ("b", 20, 1, 0.3), ("c", 5, 1, 0.3), ("d", 4, 3, 0.5))
    assert shown_per_epoch(samples) == 6 + 6 + 2 + 6
    epoch_names = epochs(samples, 60)
    for epoch in epoch_names:
        assert Counter(name[0] for name in epoch) == {"a": 6, "b": 6, "c": 2, "d": 6}
    # 60 epochs are whole turns of b (3 1/3 epochs), c (2 1/2) and d (2).
    assert Counter(name for epoch in epoch_names for name in epoch) == (
        {f"a{i}": 120 for i in range(3)}
        | {f"b{i}": 18 for i in range(20)}
        | {f"c{i}": 24 for i in range(5)}
        | {f"d{i}": 90 for i in range(4)}
    )
    # Chosen anew: a fixed part would be one set, parts in a fixed order ten.
    assert len({frozenset(name for name in epoch if name[0] == "b") for epoch in epoch_names}) > 20


def test_a_turn_shows_each_once_before_any_comes_again():
    b_names = [
        name for epoch in epochs(make(("a", 2, 1, 1.0), ("b", 10, 1, 0.4)), 50) for name in epoch if name[0] == "b"
    ]
    # 5 epochs of 4 are 2 turns of 10; within an epoch the order is that of the epoch's own shuffle.
    assert all(set(Counter(b_names[start : start + 20]).values()) == {2} for start in range(0, len(b_names), 20))
    assert all(len(set(b_names[start : start + 8])) == 8 for start in range(0, len(b_names), 20))


def test_the_order_is_a_function_of_the_seed():
    samples = make(("a", 2, 1, 1.0), ("b", 10, 1, 0.4))
    assert epochs(samples, 9) == epochs(samples, 9) != epochs(samples, 9, seed=1)


def test_regularisation_takes_as_many_showings_as_the_part():
    samples = make(("a", 2, 1, 1.0), ("b", 10, 1, 0.4))
    samples += [replace(sample, name=f"kept {i}", regularisation=True) for i, sample in enumerate(samples[:2] * 2)]
    assert shown_per_epoch(samples) == 12
    for epoch in epochs(samples, 5):
        assert sum(name.startswith("kept") for name in epoch) == 6


def test_at_least_one_is_shown_and_what_leaves_for_validation_leaves_the_part_of_the_rest():
    assert shown_per_epoch(make(("a", 7, 1, 0.01))) == 1
    assert shown_per_epoch(make(("a", 20, 1, 0.5))[4:]) == 8


@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.01, float("nan")])
def test_other_values_are_told(ratio):
    with pytest.raises(ValueError, match=r"sample_ratio is .*; set it above 0 and to at most 1 \(all of the folder\)"):
        FolderOptions(sample_ratio=ratio)


def test_with_regularisation_it_is_told():
    with pytest.raises(ValueError, match=r"sample_ratio is 0\.5 and regularisation is on"):
        FolderOptions(sample_ratio=0.5, regularisation=True)


def test_chained_folders_keep_apart(tmp_path):
    parts = []
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "1.png").touch()
        (folder / "1.txt").write_text(name, encoding="utf-8")
        parts.append(scan_images(folder, options=FolderOptions(sample_ratio=0.5)))
    first, second, third = parts
    for chained in ((first + second) + third, first + (second + third)):
        assert [(entry.caption, entry.folder) for entry in chained.entries] == [("a", 0), ("b", 1), ("c", 2)]
    assert (Dataset(()) + first).entries == first.entries
