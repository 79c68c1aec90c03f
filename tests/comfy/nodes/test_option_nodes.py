"""What the options nodes show is what the trainer's options are."""

from dataclasses import asdict

import pytest
import torch
from tessera.lora.options import NetworkOptions
from tessera.nodes.options.memory import TesseraMemory
from tessera.nodes.options.network import TesseraLoraNetwork
from tessera.nodes.options.objective import TesseraObjective
from tessera.nodes.options.optimizer import TesseraOptimizer
from tessera.nodes.options.validation import TesseraValidation
from tessera.train.config.settings import MemoryOptions, ValidationOptions
from tessera.train.objective import plot
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from tiny.nodes.prompt import executed

NODES = {
    TesseraLoraNetwork: NetworkOptions,
    TesseraOptimizer: OptimizerOptions,
    TesseraObjective: ObjectiveOptions,
    TesseraMemory: MemoryOptions,
    TesseraValidation: ValidationOptions,
}
# Texts that are read, and what a choice cannot do without.
TEXTS = {"lr_curve": "0:1, 100:0.5", "sigma_curve": "0:1, 1:2"}
TEXTS |= {"sigmas": "0.2, 0.5"}
TEXTS |= {"rank_patterns": "single_blocks.*: rank=8"}
TEXTS |= {"optimizer_class": "torch.optim.NAdam", "optimizer_args": "amsgrad=True"}
TOGETHER = {(TesseraOptimizer, "custom"): {"optimizer_class": "torch.optim.NAdam"}}
FILES = tuple(f"{name}{end}" for name in ("start_from", "base_lora", "training_adapter") for end in ("", "_low_noise"))
pairs = pytest.mark.parametrize(("node", "options"), NODES.items(), ids=lambda x: x.__name__)


def every_input(node) -> dict[str, tuple[str, dict]]:
    """name: (type or choices, settings), as the server gives them to the frontend."""
    input_types = node.INPUT_TYPES()
    return {name: entry for kind in ("required", "optional") for name, entry in input_types.get(kind, {}).items()}


def inputs(node) -> dict[str, tuple[str, dict]]:
    """Those that have a widget; what files there are on this machine is shown elsewhere."""
    return {n: entry for n, entry in every_input(node).items() if "default" in entry[1] and n not in FILES}


def run(node, **values):
    with torch.inference_mode():
        return executed(node, **values).result[0]


@pairs
def test_the_values_shown_first_are_the_defaults_of_an_unconnected_input(node, options):
    defaults = {name: settings["default"] for name, (_, settings) in inputs(node).items()}
    assert run(node, **defaults) == options()


@pairs
def test_a_client_that_sends_only_the_required_inputs_gets_the_defaults(node, options):
    required = {name: settings["default"] for name, (_, settings) in node.INPUT_TYPES()["required"].items()}
    assert run(node, **required) == options()


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training Objective draws its picture at each of the many values."""
    monkeypatch.setattr(plot, "SAMPLES", 100)


@pytest.mark.usefixtures("few_draws")
@pairs
def test_each_input_reaches_the_option_of_its_name(node, options):
    defaults = asdict(options())
    for name, (kind, settings) in inputs(node).items():
        if name == "targets":
            continue
        if kind == "COMBO":
            value = settings["options"][-1]
        elif kind == "STRING":
            value = TEXTS[name]
        elif kind == "BOOLEAN":
            value = not settings["default"]
        else:
            value = settings["max"] - 1 if kind == "INT" else (settings["min"] + 3 * settings["max"]) / 4
        assert kind == "COMBO" or value != settings["default"], name
        start = {n: s["default"] for n, (_, s) in inputs(node).items()}
        changed = {name: value} | TOGETHER.get((node, value), {})
        assert asdict(run(node, **(start | changed))) == defaults | changed


@pairs
def test_every_input_has_a_tooltip_and_no_number_is_rounded_away(node, options):
    for name, (kind, settings) in inputs(node).items():
        assert len(settings["tooltip"]) > 30, name
        if kind == "FLOAT":
            assert settings["round"] is False, name
            assert settings["min"] <= settings["default"] <= settings["max"], name


@pytest.mark.usefixtures("few_draws")
@pairs
def test_every_value_at_the_end_of_a_range_is_accepted(node, options):
    start = {name: settings["default"] for name, (_, settings) in inputs(node).items()}
    for name, (kind, settings) in inputs(node).items():
        if kind == "COMBO":
            for choice in settings["options"]:
                run(node, **(start | {name: choice} | TOGETHER.get((node, choice), {})))
        elif kind in ("INT", "FLOAT"):
            run(node, **(start | {name: settings["min"]}))
            run(node, **(start | {name: settings["max"]}))


def test_targets_are_parsed():
    options = run(
        TesseraLoraNetwork, algorithm="lora", rank=8, alpha=4.0, targets="single_blocks.*\n-*.linear2\n", dropout=0.0
    )
    assert options == NetworkOptions(rank=8, alpha=4.0, include=("single_blocks.*",), exclude=("*.linear2",))


def test_the_objective_shows_its_distribution_as_a_picture():
    defaults = {name: settings["default"] for name, (_, settings) in inputs(TesseraObjective).items()}
    pictures = []
    for values in ({}, {"timestep_sampling": "logsnr"}, {"timestep_sampling": "logsnr", "weighting": "cosmap"}):
        with torch.inference_mode():
            _, picture = executed(TesseraObjective, **(defaults | values)).result
        assert picture.shape == (1, 512, 1024, 3) and picture.dtype == torch.float32
        assert 0 <= picture.min() and picture.max() <= 1 and picture.std() > 0.05
        pictures.append(picture)
    assert not torch.equal(pictures[0], pictures[1]) and not torch.equal(pictures[1], pictures[2])
