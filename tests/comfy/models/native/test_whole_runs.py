"""Train LoRA as a whole, with all that it checks before the first step, on a tiny model of every class that has no
forward of our own."""

import pytest
from safetensors.torch import load_file
from tessera.models.catalogue.registry import known_family
from tessera.train.train_lora import RunRequest, train_lora
from thinned import one_in
from tiny.native import ROWS, build, data_of
from tiny.train.runs import Watcher, run_settings

OWN = {"flux", "qwen-image", "wan", "wan-i2v"}  # whose rows are for comparison with our forwards of these classes


@pytest.mark.parametrize("row", one_in(3, [row for row in ROWS if row.name not in OWN]), ids=str)
def test_a_run_ends_with_a_lora_that_has_learnt(row, tmp_path):
    model = build(row)
    assert known_family(model.model) is None
    settings = run_settings(steps=2, save_every=0, optimizer={"learning_rate": 0.01})
    result = train_lora(RunRequest(model, data_of(row, 1), settings, tmp_path, Watcher()))
    ups = [tensor for name, tensor in load_file(result.path).items() if name.endswith("lora_up.weight")]
    assert ups and all(tensor.isfinite().all() for tensor in ups)
    # Some of a last block are not read by anything, such as what it makes of the text.
    assert sum(bool(tensor.any()) for tensor in ups) > len(ups) / 2
