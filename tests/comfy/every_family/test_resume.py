"""A run on any family that is cancelled and goes on ends as one that was not, also where layers get no gradient."""

import pytest
from family_cases import cases, marks_of
from thinned import one_in
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import training_data

OPTIMIZERS = {
    "adamw": {"learning_rate": 1e-2},
    "prodigy": {"optimizer": "prodigy", "learning_rate": 1.0},
    "adamw8bit": {"optimizer": "adamw8bit", "learning_rate": 1e-2},
}
RUNS = [
    pytest.param(case, name, id=f"{case.name}-{name}", marks=marks_of(case, "resume") if name == "adamw" else ())
    for case in cases("resume")
    for name in OPTIMIZERS
]


@pytest.mark.parametrize(("case", "optimizer"), one_in(4, RUNS))
def test_a_cancelled_run_goes_on_to_the_same_result(case_file, tmp_path, case, optimizer):
    options = {
        "steps": 4,
        "gradient_accumulation": 2,
        "network": {"rank": 4, "alpha": 2.0, "dropout": 0.2},
        "optimizer": OPTIMIZERS[optimizer],
    }
    model = case.load(case_file(case))
    whole = resumed_as_whole(model, training_data(*case.mixed()), tmp_path, **options)
    still = {name for name, t in whole.lora.items() if name.endswith("lora_up.weight") and not t.any()}
    # What no gradient reaches starts at zero and stays there.
    assert {name.partition("_blocks_1_")[2] for name in still} == {
        f"{name.replace('.', '_')}.lora_up.weight" for name in case.unused
    }
