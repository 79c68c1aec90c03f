"""Parts of `dev.py card`, tried on the CPU with small models; one case through the whole command."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from with_pack import ROOT, dev

sys.path.append(str(ROOT / "benchmarks"))

from card import kernels, rates, steps
from card.case import Case
from card.cases import TRAINED, groups
from card.checks import smoke

MACHINE: dict[str, Any] = {"memory_gib": 0.0, "ram_free_gib": 8.0}
SPEC = {"device": "cpu", "size": "tiny", "backend": "aot_eager", "allocator": ""}
COMFYUI = str(dev.find_comfyui())
SWAPPED = "train: eager, none, all swapped, file, delay compute"


@pytest.fixture(scope="module", autouse=True)
def attention_as_before() -> Any:
    """The kit chooses attention's kernel for its process, which here goes on with other tests."""
    from card.checks.attention import choose_attention

    yield
    choose_attention(plain=False)


@pytest.fixture(scope="module")
def small() -> smoke.Smoke:
    return smoke.Smoke(SPEC)


def cases(part: str) -> dict[str, Case]:
    return {case.name: case for group in groups(part, "cpu", "tiny", MACHINE) for case in group.cases}


def run(small: smoke.Smoke, name: str) -> dict[str, Any]:
    options = dict(cases("smoke")[name].settings)
    checks = {"train": small.check_training, "sample": small.check_sample, "after a run": small.check_after_a_run}
    check = checks[options.pop("do")]
    options.pop("common", None)
    return check(**options)


@pytest.mark.parametrize(
    "name",
    [
        SWAPPED,
        "train: eager, full with offload, some swapped, file, fp8, delay both, 2 ahead",
        "train: compiled, full, some swapped, staged, delay copy, batch 2, evicted between the steps",
        "train: eager, selective, all swapped, staged, int8, delay copy, dropout",
        "sample: all swapped, file",
        "sample: all swapped, 2 ahead, delay copy",
        "a MODEL after a run",
    ],
)
def test_a_path_equals_the_resident_eager_run(small: smoke.Smoke, name: str):
    result = run(small, name)
    assert result["state"] == "ok", result["text"]


def test_another_gradient_fails_its_case(small: smoke.Smoke):
    key = "train [('batch', 1)]"
    want = small.reference(key, lambda: small.train(batch=1))
    small.references[key] = want | {"gradients": [1.001 * gradient for gradient in want["gradients"]]}
    try:
        result = run(small, SWAPPED)
    finally:
        small.references[key] = want
    assert (
        result["state"] == "failed" and "not bit for bit, though the order of additions is the same" in result["text"]
    )


def test_weights_that_lie_elsewhere_and_delays_that_are_not_put_in_fail_their_case(
    small: smoke.Smoke, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(smoke, "no_free_ram", lambda short: nullcontext())
    result = run(small, SWAPPED)
    assert result["state"] == "failed" and "streaming from the file is False" in result["text"]
    monkeypatch.setattr(smoke, "delays", lambda *_: nullcontext([0, 0]))
    result = run(small, SWAPPED)
    assert result["state"] == "failed" and "no delay was put in" in result["text"]


def test_a_latent_of_another_size_or_not_a_number_is_far():
    assert smoke.distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert smoke.distance(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_copies_are_delayed_and_nothing_stays_changed():
    copy = torch.Tensor.copy_
    with smoke.delays(None, "copy", False) as counted:
        torch.zeros(2).copy_(torch.ones(2))
    assert counted == [1] and torch.Tensor.copy_ is copy and "copy_" not in vars(torch.Tensor)


def test_steps_are_timed_in_parts_and_profiled():
    measured = steps.Steps(SPEC | {"model": "flux"})
    settings = TRAINED | {"compiled": True, "swap": 50, "side": 0, "profiled": True}
    result = measured.measure(settings, {"rates: link": {"link": 1e9}})
    figures = result["figures"]
    assert result["state"] == "ok" and result["row"]["blocks swapped"] == "3" and figures["copied"] > 0
    assert figures["all"] == pytest.approx(figures["host"] + figures["wait"] + figures["rest"])
    assert result["row"]["s at the link's rate"] == f"{figures['copied'] / 1e9:.3f}"
    assert result["row"]["graphs"] == "2"
    # Six blocks, each with an attention forward twice and back once; on a CPU the ops have other names.
    assert {"products", "attention", "triton"} <= set(figures)


def test_counted_steps_are_priced_by_this_cards_rates(monkeypatch: pytest.MonkeyPatch):
    from counted import counted

    line = ["product", "mm", 4, 100, 10**12]
    graph = {"kernels": [line], "kept": 0}
    block = {"kind": "double", "count": 5, "graphs": {"none": {"forward": graph, "backward": graph}}}
    monkeypatch.setattr(counted, "in_process", lambda row: [block])
    monkeypatch.setattr("comfyui.set_up_comfyui", lambda device: None)  # it is set up here
    rates = {"products": 1e13, "attention": 1e13, "attention_backward": 1e13}
    counts = {"triton": 0, "products": 40, "attention": 0, "bytes_of_graphs": 0, "all": 2.0}
    earlier = {"rates: products": rates, "rates: memory": {"bandwidth": 1e12}, "flux, compiled, none": counts}
    result = kernels.start({"device": "cpu"})({"row": "flux", "side": 1024}, earlier)
    assert result["state"] == "ok" and "s by this card's rates, 2.000 measured" in result["details"]
    price = float(result["details"].rpartition("none: ")[2].split(" s by")[0])
    assert price == pytest.approx(5 * 2 * 1e12 / 1e13)


def test_every_rate_is_measured():
    measured = rates.Rates(torch.device("cpu"))
    figures: dict[str, float] = {}
    for name in ("link", "memory", "products", "attention", "thin", "fp8"):
        result = getattr(measured, name)()
        assert result["text"]
        figures |= result.get("figures", {})
    assert set(figures) == {"link", "bandwidth", "products", "attention", "attention_backward"}
    assert all(value > 0 for value in figures.values())


def test_the_command_writes_page_figures_and_log(tmp_path: Path):
    selection = ["--only", "train: eager, full, fp8"]
    command = [sys.executable, str(ROOT / "dev.py"), "card", "--part", "smoke", "--device", "cpu", "--comfyui", COMFYUI]
    assert dev.call([*command, *selection, "--out", str(tmp_path)]) == 0
    (figures,) = tmp_path.glob("cpu_*_smoke.json")
    record = json.loads(figures.read_text())
    assert record["finished"] and [r["state"] for r in record["results"]] == ["ok"]
    assert figures.with_suffix(".log").exists() and "1 of 1 cases: 1 ok." in figures.with_suffix(".md").read_text()


def test_command_without_a_gpu_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(ROOT / "dev.py"), "card", "--comfyui", COMFYUI, "--out", str(tmp_path)]
    assert dev.call(command) == 1
    assert "finds no CUDA device here; with --device cpu the command is tried at tiny sizes" in capfd.readouterr().err


def test_a_product_in_8_bits_that_fell_back_is_seen() -> None:
    calls = [("aten::_scaled_mm", True), ("comfy_kitchen::int8_linear", True), ("aten::mm", True), ("aten::mm", False)]
    assert kernels.launches(calls, ())["8-bit products"] == 2
    assert kernels.launches(calls[2:], ())["8-bit products"] == 0 and kernels.launches(calls, ())["products"] == 1
