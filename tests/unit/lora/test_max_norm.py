"""scale_weight_norms: what is over the limit comes back to it, by equal parts of each matrix."""

from dataclasses import replace

import pytest
import torch
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import base_spec
from tessera.models.adapters import loha
from tessera.models.adapters.registry import adapter_kind
from tessera.train.optim.checks import check_optimizer
from tessera.train.optim.max_norm import MaxNorm
from tessera.train.optim.options import OptimizerOptions
from tiny.lora.adapters import ALGORITHMS, adapted_weight, fill, numbers

KINDS = {
    "lora": ALGORITHMS["lora"],
    "loha": ALGORITHMS["loha"],
    "loha of a high rank": ALGORITHMS["loha"] | {"rank": 6},
    "lokr": ALGORITHMS["lokr"],
    "lokr whole": ALGORITHMS["lokr whole"],
}
MATRICES = {"lora": 2, "loha": 4, "loha of a high rank": 4, "lokr": 3, "lokr whole": 2}
OUT, IN = 72, 96


def adapter_of(options, out=OUT, width=IN):
    spec = base_spec(options)
    return adapter_kind(spec)(spec, out, width)


def written_out(options, adapter):
    """delta W (out, in) in fp64."""
    with torch.no_grad():
        size = adapter.out_features, adapter.in_features
        return adapted_weight(options, torch.zeros(size, dtype=torch.float64), numbers(adapter))


def lora_of(down, up):
    adapter = adapter_of(NetworkOptions(rank=1, alpha=2.0), len(up), len(down))
    with torch.no_grad():
        adapter.down.copy_(torch.tensor([down]))
        adapter.up.copy_(torch.tensor(up)[:, None])
    return adapter


def test_written_out_by_hand():
    """Norms 3·4·2 = 24 and 1·1·2 = 2 under a limit of 6: quotient 1/4, and none."""
    large = lora_of([3.0, 0.0], [0.0, 4.0])
    small = lora_of([1.0, 0.0], [1.0, 0.0])
    still = lora_of([1.0, 0.0], [0.0])
    norms = MaxNorm(6.0, [large, small, still])
    assert norms.facts() == {"modules_scaled": 0}
    norms.apply()
    assert large.down.tolist() == [[1.5, 0.0]] and large.up.tolist() == [[0.0], [2.0]]
    assert small.down.tolist() == [[1.0, 0.0]] and small.up.tolist() == [[1.0], [0.0]]
    assert still.down.tolist() == [[1.0, 0.0]] and still.up.tolist() == [[0.0]]
    assert norms.facts() == {"modules_scaled": 1}


@pytest.mark.parametrize("name", KINDS)
def test_the_norm_is_that_of_delta_w_and_comes_to_the_limit(name, monkeypatch):
    monkeypatch.setattr(loha, "_SLICE", 7 * IN)  # slices of seven rows, and a last one of two
    options = NetworkOptions(**KINDS[name])
    adapter = adapter_of(options)
    fill(adapter, 5, 0.5)
    initial = {key: p.detach().clone() for key, p in adapter.named_parameters()}
    change = written_out(options, adapter)
    size = float(change.norm())
    assert float(adapter.norm().detach()) == pytest.approx(size, rel=1e-5)
    norms = MaxNorm(size / 3, [adapter])
    norms.apply()
    torch.testing.assert_close(written_out(options, adapter), change / 3, rtol=1e-5, atol=1e-6 * size)
    part = 3 ** (-1 / MATRICES[name])
    assert len(initial) == MATRICES[name]
    for key, p in adapter.named_parameters():
        torch.testing.assert_close(p.detach(), part * initial[key])
    assert norms.facts() == {"modules_scaled": 1}
    looser = MaxNorm(1.01 * size / 3, [adapter])
    looser.apply()
    assert looser.facts() == {"modules_scaled": 0}


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_that_does_nothing_yet_is_left_as_it_is(name):
    adapter = adapter_of(NetworkOptions(**KINDS[name]))
    adapter.start(generator(0), lambda: pytest.fail("no weights are needed"))
    initial = [p.detach().clone() for p in adapter.parameters()]
    norms = MaxNorm(1e-6, [adapter])
    norms.apply()
    assert norms.facts() == {"modules_scaled": 0} and float(adapter.norm().detach()) == 0
    assert all(torch.equal(p, old) for p, old in zip(adapter.parameters(), initial, strict=True))


def test_a_low_rank_loha_makes_no_matrix_of_the_weights_size(monkeypatch):
    options = NetworkOptions(**KINDS["loha"])
    monkeypatch.setattr(loha, "_SLICE", 0)
    small, large = adapter_of(options), adapter_of(replace(options, rank=6))
    sizes = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    for adapter in (small, large):
        sizes.clear()
        with torch.no_grad(), Sizes():
            adapter.norm()
        assert max(sizes) < OUT * IN / 4


@pytest.mark.parametrize("name", ["adamw_schedulefree", "schedulefree.SGDScheduleFree"])
def test_an_optimizer_with_weights_of_its_own_is_named(name):
    options = OptimizerOptions(name) if "." not in name else OptimizerOptions("custom", optimizer_class=name)
    with pytest.raises(ValueError, match=f"scale_weight_norms is 1 and {name} keeps a second copy of the weights"):
        check_optimizer(options, torch.device("cpu"), NetworkOptions(scale_weight_norms=1.0))
