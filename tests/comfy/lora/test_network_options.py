"""Settings of LoRA Network beside size and targets, in whole runs: each has its effect, goes on bit for bit, and is
part of what a run is known by."""

import json

import pytest
import torch
from tiny.lora.adapters import ALGORITHMS
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import mixed_data, train

PLUS = {"lora_plus_ratio": 8.0}
NORMS = {"scale_weight_norms": 0.05}


def test_lora_plus_and_max_norm_go_on_bit_for_bit_and_hold_the_norm(tiny_flux, tmp_path):
    plain = train(tiny_flux, mixed_data(), tmp_path / "plain")
    plus = resumed_as_whole(tiny_flux, mixed_data(), tmp_path / "plus", network=PLUS)
    norms = resumed_as_whole(tiny_flux, mixed_data(), tmp_path / "norms", network=PLUS | NORMS)
    assert len({result.summary["key"] for result in (plain, plus, norms)}) == 3
    assert plus.loss[0] == plain.loss[0] and plus.loss[2] != plain.loss[2]
    lengths = {name: float((m.scaled_up @ m.down).norm()) for name, m in norms.lora.modules().items()}
    free = {name: float((m.scaled_up @ m.down).norm()) for name, m in plus.lora.modules().items()}
    assert max(free.values()) > 0.1 and max(lengths.values()) < 0.05 * (1 + 1e-5)
    at_limit = sum(norm > 0.05 * (1 - 1e-5) for norm in lengths.values())
    assert norms.summary["modules_scaled"] == at_limit > len(lengths) // 2
    assert norms.lora.metadata["ss_scale_weight_norms"] == "0.05"
    assert json.loads(norms.lora.metadata["tessera"])["network"]["lora_plus_ratio"] == 8.0


def delta(t: dict[str, torch.Tensor]) -> torch.Tensor:
    """alpha/rank times the product that LoHa (arXiv 2108.06098) and LoKr (2212.10650) are."""
    if "hada_w1_a" in t:
        return t["alpha"] / len(t["hada_w1_b"]) * (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    if "lokr_w2" in t:  # whole, so of no rank
        return torch.kron(t["lokr_w1"], t["lokr_w2"])
    return t["alpha"] / len(t["lokr_w2_b"]) * torch.kron(t["lokr_w1"], t["lokr_w2_a"] @ t["lokr_w2_b"])


@pytest.mark.parametrize("name", ["loha", "lokr", "lokr whole"])
def test_the_norm_of_a_product_of_more_is_held_and_goes_on_bit_for_bit(tiny_flux, tmp_path, name):
    network = ALGORITHMS[name]
    free = train(tiny_flux, mixed_data(), tmp_path / "free", network=network)
    bounded = resumed_as_whole(tiny_flux, mixed_data(), tmp_path / "held", network=network | NORMS)
    sizes, limited = (
        [float(delta({k: t.double() for k, t in parts.items()}).norm()) for parts in result.lora.parts().values()]
        for result in (free, bounded)
    )
    assert max(sizes) > 0.1 and max(limited) < 0.05 * (1 + 1e-5)
    at_limit = sum(size > 0.05 * (1 - 1e-5) for size in limited)
    assert bounded.summary["modules_scaled"] == at_limit > 0
