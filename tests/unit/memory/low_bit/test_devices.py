"""Matmuls that a card can do, and the fastest of them, asked of faked cards: a CPU takes anything."""

import json
from pathlib import Path

import pytest
import torch
from tessera.compile.settings import CompileSettings
from tessera.memory.activations.cost import H100_RATES
from tessera.memory.low_bit import devices
from tessera.memory.low_bit.devices import RATES, Card, card_of, fits, obstacle, preferred
from tessera.memory.low_bit.matmul import FP8, INT8
from tessera.train.blocks import low_bit_policy

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def nvidia(major: int, minor: int, kernel: bool = True) -> Card:
    return Card("cuda", (major, minor), kernel)


# (capability, what auto takes first to last, what can be asked for)
CARDS = [
    ((7, 0), (), ()),
    ((8, 0), (INT8,), (INT8,)),
    ((8, 6), (INT8,), (INT8,)),
    ((8, 9), (INT8, FP8), (INT8, FP8)),
    ((9, 0), (FP8, INT8), (INT8, FP8)),
    ((10, 0), (FP8,), (INT8, FP8)),
    ((10, 3), (FP8,), (FP8,)),
    ((11, 0), (), (INT8, FP8)),
    ((12, 0), (INT8, FP8), (INT8, FP8)),
]


@pytest.mark.parametrize(("capability", "expected", "possible"), CARDS)
def test_auto_and_what_can_be_asked_for_go_by_the_cards_generation(capability, expected, possible) -> None:
    card = nvidia(*capability)
    precisions, reason = preferred(card, BF16)
    assert precisions == expected and bool(reason) == (not expected)
    assert tuple(p for p in (INT8, FP8) if obstacle(p, card, BF16) is None) == possible
    for precision in {INT8, FP8} - set(possible):
        assert obstacle(precision, card, BF16)


def test_an_rtx_20_takes_int8_where_it_computes_in_fp16() -> None:
    assert preferred(nvidia(7, 5), FP16) == ((INT8,), "")
    assert preferred(nvidia(7, 5), FP32)[0] == preferred(nvidia(7, 5), BF16)[0] == ()
    assert obstacle(INT8, nvidia(7, 5), FP16) is None and obstacle(FP8, nvidia(7, 5), FP16)


def test_auto_without_an_int8_kernel_takes_fp8_or_nothing() -> None:
    assert preferred(nvidia(8, 6, kernel=False), BF16)[0] == ()
    assert "no int8 kernel" in preferred(nvidia(8, 6, kernel=False), BF16)[1]
    assert preferred(nvidia(8, 9, kernel=False), BF16) == ((FP8,), "")


@pytest.mark.parametrize(("capability", "expected", "_"), CARDS)
def test_auto_takes_fp8_only_where_its_rounding_is_compiled_into_other_kernels(capability, expected, _) -> None:
    """In eager an H100 took 1.4 times as long forward and 3.1 times as long back as in bf16."""
    precisions, reason = preferred(nvidia(*capability), BF16, fuses=False)
    assert precisions == tuple(product for product in expected if product != FP8) and bool(reason) == (not precisions)
    if FP8 in expected and not precisions:
        assert "compiling" in reason


@pytest.mark.parametrize(("backend", "expected"), [("inductor", (FP8,)), ("aot_eager", ()), (None, ())])
def test_auto_asks_how_the_run_compiles(backend, expected, monkeypatch) -> None:
    monkeypatch.setattr(low_bit_policy, "card_of", lambda device: nvidia(9, 0, kernel=False))
    compile_settings = None if backend is None else CompileSettings(backend=backend)
    auto = low_bit_policy.LowBitPolicy("auto", torch.device("cpu"), BF16, None, compile_settings)
    assert auto.precisions == expected
    explicit = low_bit_policy.LowBitPolicy("fp8", torch.device("cpu"), BF16, None, compile_settings)
    assert explicit.precisions == (FP8,)  # what is asked for is done
    notes = list(auto.notes())
    assert expected or notes == [
        "low_bit_matmul is auto, but all layers multiply in full: without compiling by inductor, fp8 matmuls take "
        "longer than 16-bit ones."
    ]


@pytest.mark.parametrize("kind", ["cpu", "mps", "rocm", "xpu"])
def test_elsewhere_auto_is_full_and_only_a_cpu_does_what_is_asked(kind: str) -> None:
    assert preferred(Card(kind), BF16)[0] == () and preferred(Card(kind), BF16)[1]
    for precision in (INT8, FP8):
        assert (obstacle(precision, Card(kind), BF16) is None) == (kind == "cpu")


def test_matmuls_take_the_dtypes_that_models_compute_in() -> None:
    for precision in (INT8, FP8):
        assert obstacle(precision, nvidia(9, 0), torch.float64) == "it computes in float64"
    assert preferred(nvidia(9, 0), torch.float64)[0] == ()


def test_int8_needs_a_kernel_on_a_card() -> None:
    assert obstacle(INT8, Card("cuda", (8, 6), False), BF16) == devices.NO_KERNEL
    assert obstacle(INT8, Card("cuda", (8, 6), True), BF16) is None
    assert obstacle(FP8, Card("cuda", (8, 9), False), BF16) is None and obstacle(INT8, Card("cpu"), BF16) is None


def test_a_card_is_known_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(devices, "core_has_kernel", lambda name: name == "int8_linear")
    monkeypatch.setattr(torch.version, "hip", None)
    assert card_of(device) == Card("cuda", (8, 9), True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert card_of(device) == Card("rocm")
    assert card_of(torch.device("cpu")) == Card("cpu") and card_of(torch.device("mps")) == Card("mps")


def test_both_sides_of_a_weight_are_multiples_of_16() -> None:
    assert fits((144, 192)) and not fits((150, 192)) and not fits((144, 200))


@pytest.mark.parametrize(("precision", "gain"), [(INT8, 1.41), (FP8, 1.20)])
def test_the_rates_give_the_gain_of_a_flux_block_that_the_roofline_has(precision: str, gain: float) -> None:
    counts = Path(__file__).resolve().parents[4] / "benchmarks" / "results" / "counted.json"
    products = rest = 0.0
    for block in json.loads(counts.read_text(encoding="utf-8"))["rows"]["flux 1024\N{SUPERSCRIPT TWO}"]:
        for side in ("forward", "backward"):
            for kind, _, _, moved_bytes, flop, *_ in block["graphs"]["none"][side]["kernels"]:
                if kind == "product":
                    products += block["count"] * flop / H100_RATES.products
                elif kind.startswith("attention"):
                    rest += block["count"] * flop / getattr(H100_RATES, kind)
                else:
                    rest += block["count"] * moved_bytes / H100_RATES.bandwidth
    assert (products + rest) / (products / RATES[precision] + rest) == pytest.approx(gain, abs=0.02)
