"""scale_weight_norms: what is over the limit comes back to it, by equal parts of both matrices."""

import pytest
import torch
from tessera.train.draws import generator
from tessera.train.max_norm import MaxNorm, norm_of_product
from tessera.train.optimizer_check import check_optimizer
from tessera.train.options import NetworkOptions, OptimizerOptions
from torch import nn


def test_written_out_by_hand():
    """Norms 3·4·2 = 24 and 1·1·2 = 2 under a limit of 6: quotient 1/4, and none."""
    large = nn.Parameter(torch.tensor([[3.0, 0.0]])), nn.Parameter(torch.tensor([[0.0], [4.0]])), 2.0
    small = nn.Parameter(torch.tensor([[1.0, 0.0]])), nn.Parameter(torch.tensor([[1.0], [0.0]])), 2.0
    still = nn.Parameter(torch.tensor([[1.0, 0.0]])), nn.Parameter(torch.zeros(2, 1)), 2.0
    norms = MaxNorm(6.0, [large, small, still])
    assert norms.facts() == {"modules_scaled": 0}
    norms.apply()
    assert large[0].tolist() == [[1.5, 0.0]] and large[1].tolist() == [[0.0], [2.0]]
    assert small[0].tolist() == [[1.0, 0.0]] and small[1].tolist() == [[1.0], [0.0]]
    assert still[0].tolist() == [[1.0, 0.0]] and still[1].tolist() == [[0.0], [0.0]]
    assert norms.facts() == {"modules_scaled": 1}


def test_the_norm_is_that_of_the_product():
    up, down = (torch.randn(s, generator=generator(0, str(s))) for s in ((70, 5), (5, 90)))
    assert float(norm_of_product(up, down)) == pytest.approx(float((up.double() @ down.double()).norm()), rel=1e-6)


@pytest.mark.parametrize("name", ["adamw_schedulefree", "schedulefree.SGDScheduleFree"])
def test_an_optimizer_with_weights_of_its_own_is_named(name):
    options = OptimizerOptions(name) if "." not in name else OptimizerOptions("custom", optimizer_class=name)
    with pytest.raises(ValueError, match=f"scale_weight_norms is 1 and {name} keeps a second copy of the weights"):
        check_optimizer(options, torch.device("cpu"), NetworkOptions(scale_weight_norms=1.0))
