import threading

import pytest
import torch
from tessera.data.loader import SampleReader
from tessera.data.samples import PLAIN, Choice, Sample, SampleTensors


class Counting:
    """A sample whose reads are counted, with the thread that did them."""

    def __init__(self, index: int, fails: bool = False):
        self.threads: list[str] = []
        self.index = index
        self.fails = fails

    def load(self, choice: Choice) -> SampleTensors:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise ValueError(f"sample {self.index} is gone")
        return SampleTensors(torch.full((1,), self.index), torch.zeros(1), {})


@pytest.fixture
def counting() -> list[Counting]:
    return [Counting(i, fails=i == 3) for i in range(4)]


@pytest.fixture
def reader(counting):
    reader = SampleReader([Sample(f"{c.index}", (1, 1, 1), 1, 1, c.load) for c in counting])
    yield reader
    reader.close()


def test_what_was_wanted_is_read_once_and_by_the_thread(reader, counting):
    reader.want([(0, PLAIN), (1, PLAIN), (0, PLAIN)])
    reader.want([(1, PLAIN), (2, PLAIN)])
    assert [int(reader.read((i, PLAIN)).latent) for i in (1, 2, 1)] == [1, 2, 1]
    assert [len(c.threads) for c in counting[:3]] == [1, 1, 1]
    assert all(name.startswith("tessera-reader") for c in counting for name in c.threads)


def test_what_was_not_wanted_is_read_at_once(reader, counting):
    assert int(reader.read((2, PLAIN)).latent) == 2
    assert counting[2].threads == [threading.current_thread().name]


def test_an_error_is_raised_where_the_sample_is_used(reader):
    reader.want([(0, PLAIN), (3, PLAIN)])
    assert int(reader.read((0, PLAIN)).latent) == 0
    with pytest.raises(ValueError, match="sample 3 is gone"):
        reader.read((3, PLAIN))


def test_tensors_read_by_the_thread_can_be_saved_for_backward(counting):
    with torch.inference_mode():
        reader = SampleReader([Sample("0", (1, 1, 1), 1, 1, counting[0].load)])
        reader.want([(0, PLAIN)])
        assert not reader.read((0, PLAIN)).latent.is_inference()
        reader.close()


def test_forms_of_a_sample_are_read_apart():
    def load(choice: Choice) -> SampleTensors:
        return SampleTensors(torch.full((1,), 10 * choice.picture + choice.caption), torch.zeros(1), {})

    reader = SampleReader([Sample("0", (1, 1, 1), 1, 1, load, pictures=2, captions=3)])
    reader.want([(0, Choice(1, 2)), (0, Choice(0, 1))])
    assert [int(reader.read((0, choice)).latent) for choice in (Choice(0, 1), Choice(1, 2), Choice(1, 1))] == [
        1,
        12,
        11,
    ]
    reader.close()
