import threading

import pytest
import torch
from tessera.data.loader import SampleReader
from tessera.data.samples import FIRST_VARIANT, Sample, SampleTensors, SampleVariant


class Counting:
    """A sample whose reads are counted, with the thread that did them."""

    def __init__(self, index: int, fails: bool = False):
        self.threads: list[str] = []
        self.index = index
        self.fails = fails

    def load(self, choice: SampleVariant) -> SampleTensors:
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


def test_samples_that_were_wanted_are_read_once_and_by_the_thread(reader, counting):
    reader.prefetch([(0, FIRST_VARIANT), (1, FIRST_VARIANT), (0, FIRST_VARIANT)])
    reader.prefetch([(1, FIRST_VARIANT), (2, FIRST_VARIANT)])
    assert [int(reader.read((i, FIRST_VARIANT)).latent) for i in (1, 2, 1)] == [1, 2, 1]
    assert [len(c.threads) for c in counting[:3]] == [1, 1, 1]
    assert all(name.startswith("tessera-reader") for c in counting for name in c.threads)


def test_samples_that_were_not_wanted_are_read_at_once(reader, counting):
    assert int(reader.read((2, FIRST_VARIANT)).latent) == 2
    assert counting[2].threads == [threading.current_thread().name]


def test_an_error_is_raised_where_the_sample_is_used(reader):
    reader.prefetch([(0, FIRST_VARIANT), (3, FIRST_VARIANT)])
    assert int(reader.read((0, FIRST_VARIANT)).latent) == 0
    with pytest.raises(ValueError, match="sample 3 is gone"):
        reader.read((3, FIRST_VARIANT))


def test_tensors_read_by_the_thread_can_be_saved_for_backward(counting):
    with torch.inference_mode():
        reader = SampleReader([Sample("0", (1, 1, 1), 1, 1, counting[0].load)])
        reader.prefetch([(0, FIRST_VARIANT)])
        assert not reader.read((0, FIRST_VARIANT)).latent.is_inference()
        reader.close()


def test_forms_of_a_sample_are_read_apart():
    def load(choice: SampleVariant) -> SampleTensors:
        return SampleTensors(torch.full((1,), 10 * choice.image + choice.caption), torch.zeros(1), {})

    reader = SampleReader([Sample("0", (1, 1, 1), 1, 1, load, image_variants=2, caption_variants=3)])
    reader.prefetch([(0, SampleVariant(1, 2)), (0, SampleVariant(0, 1))])
    assert [
        int(reader.read((0, choice)).latent)
        for choice in (SampleVariant(0, 1), SampleVariant(1, 2), SampleVariant(1, 1))
    ] == [
        1,
        12,
        11,
    ]
    reader.close()
