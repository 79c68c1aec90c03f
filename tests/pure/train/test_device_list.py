"""Numbers of devices as a user lists them."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "train" / "distributed" / "device_list.py"
spec = importlib.util.spec_from_file_location("device_list", PATH)
assert spec is not None and spec.loader is not None
device_list = importlib.util.module_from_spec(spec)
spec.loader.exec_module(device_list)
listed = device_list.listed_devices


def test_devices_are_named_by_a_word_or_by_their_numbers():
    assert listed("this one", 4, 2) == [2]
    assert listed(" This  ONE", 4, 2) == [2]
    assert listed("all", 3, 1) == [0, 1, 2]
    assert listed("2,0", 3, 1) == [2, 0]
    assert listed(" 1 , 2 ", 3, 1) == [1, 2]
    assert listed("all", 1, 0, on_cpu=True) == [0]
    assert listed("4,7,1", 1, 0, on_cpu=True) == [4, 7, 1]


@pytest.mark.parametrize("text", ["", "two", "0;1", "0,,1", "-1", "0,1,", "cuda:0", "٣", "1" * 5, "$(id)", "0 1"])
def test_lists_that_name_no_devices_are_told(text):
    with pytest.raises(ValueError, match=r"devices is .*; write 'this one', 'all', or numbers such as 0,1\."):
        listed(text, 2, 0)


@pytest.mark.parametrize(
    ("text", "gpus", "on_cpu", "said"),
    [
        ("1,0,1", 2, False, "names device 1 twice"),
        ("1,1", 1, True, "names device 1 twice"),
        ("0,2", 2, False, "sees 2 devices, numbered 0 to 1; name only those, or write 'all'"),
        ("1", 1, False, "sees one device, which is number 0"),
    ],
)
def test_devices_that_are_not_there_or_named_twice_are_told(text, gpus, on_cpu, said):
    with pytest.raises(ValueError, match=said):
        listed(text, gpus, 0, on_cpu)
