"""The cache on disk: what is written comes back, and anything less than whole counts as absent."""

import errno
import os

import pytest
import torch
from tessera.data.cache import Cache

SHAPES = {"latent": (16, 4, 6), "extra": (1, None)}


@pytest.fixture
def tensors():
    return {"latent": torch.randn(16, 4, 6).to(torch.bfloat16), "extra": torch.randn(1, 7, dtype=torch.float64)}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def test_tensors_come_back_in_their_own_dtype_and_may_be_saved_for_backward(cache, tensors):
    with torch.inference_mode():
        cache.write("abcd", {name: tensor.clone() for name, tensor in tensors.items()})
        found = cache.read("abcd")
    assert cache.holds("abcd", SHAPES)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        assert not found[name].is_inference()


def test_a_part_of_a_larger_tensor_is_written_as_it_is_seen(cache):
    whole = torch.arange(24.0).reshape(4, 6)
    cache.write("abcd", {"latent": whole[:, 1:4]})
    assert torch.equal(cache.read("abcd")["latent"], whole[:, 1:4])


@pytest.mark.parametrize(
    "shapes",
    [
        {"latent": (16, 4, 5), "extra": (1, 7)},
        {"latent": (16, 4, 6)},
        {"latent": (16, 4, 6), "extra": (1, 7), "more": (1,)},
        {"latent": (16, 4, 6, 1), "extra": (1, 7)},
    ],
)
def test_other_names_or_shapes_do_not_count(cache, tensors, shapes):
    cache.write("abcd", tensors)
    assert not cache.holds("abcd", shapes)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_file_counts_as_absent(cache, tensors, damage):
    cache.write("abcd", tensors)
    path = cache.path("abcd")
    path.write_bytes(damage(path.read_bytes()))
    assert not cache.holds("abcd", SHAPES)
    with pytest.raises(FileNotFoundError):
        cache.read("abcd")
    cache.write("abcd", tensors)
    assert cache.holds("abcd", SHAPES)


def test_what_is_not_there_is_not_held(cache):
    assert not cache.holds("abcd", SHAPES)
    with pytest.raises(FileNotFoundError):
        cache.read("abcd")


def test_a_full_disk_leaves_the_old_file_and_no_litter(cache, tensors, monkeypatch):
    cache.write("abcd", tensors)
    before = cache.path("abcd").read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="the disk is full; free some space"):
        cache.write("abcd", {"latent": torch.zeros(1)})
    assert cache.path("abcd").read_bytes() == before
    assert [path.name for path in cache.path("abcd").parent.iterdir()] == ["abcd.safetensors"]
