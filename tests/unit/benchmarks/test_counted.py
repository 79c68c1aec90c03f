"""The counts of a step: what inductor makes of a block now against what the committed page says."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import torch
from tessera.common.torch_version import copies_addend
from tessera.memory.activations.cost import KernelRates

from counted import page as counted_page
from counted.cost import seconds_of
from counted.counted import BEFORE, COUNTS, MEASURED, PAGE, ROWS, read
from counted.gpu_norm import eager_norm, norm_of
from counted.step import launches_of

COUNTED = read(COUNTS)
ROWS_COUNTED = COUNTED["rows"]
# A block of each family, with all that they share back and forth in the cheapest of them.
CASES = (
    ("flux 512²", "single", ("forward", "backward")),
    ("flux 512²", "double", ("forward",)),
    ("qwen_image 1024²", "block", ("forward",)),
    ("wan_1.3b", "wan", ("forward", "backward")),
)


def other_versions() -> str:
    """Return why the counts do not hold here; empty where they do."""
    for package in ("torch", "triton"):
        try:
            installed = version(package).partition("+")[0]
        except PackageNotFoundError:
            installed = "none"
        if installed != COUNTED[package]:
            return f"benchmarks/results/counted.json is of {package} {COUNTED[package]}, and here is {installed}."
    return ""


def test_the_page_is_of_these_rows_and_versions():
    assert list(ROWS_COUNTED) == [row.name for row in ROWS]
    for row in ROWS:
        for block in ROWS_COUNTED[row.name]:
            assert block["graphs"].keys() == row.ways.keys()
    text = PAGE.read_text(encoding="utf-8")
    assert f"torch {COUNTED['torch']}, Triton {COUNTED['triton']}" in text
    assert text == counted_page.page(COUNTED, read(BEFORE))


def kind_on_card(line: list[Any]) -> str:
    """The kind under which a card's page adds up a kernel: by its name, so that copies for attention are attention."""
    if line[0].startswith("attention") or "_scaled_dot_product" in line[1]:
        return "attention"
    return {"product": "products", "thin": "products", "triton": "Triton", "copy": "copies"}.get(line[0], "rest")


def counted_on_card(way: str) -> dict[str, float]:
    """Seconds of a step by kind, from the counts of the code and torch that ran on the card, at its rates."""
    counted = read(MEASURED)
    (blocks,) = counted["rows"].values()
    lines = [(1, line) for line in counted["rest"]["kernels"]]
    for block in blocks:
        lines += [(block["count"], line) for g in counted_page.graphs_of(block, way) for line in g["kernels"]]
    sums: dict[str, float] = {}
    for times, line in lines:
        seconds = times * seconds_of(line, KernelRates(*counted["measured"]["rates"]))
        sums[kind_on_card(line)] = sums.get(kind_on_card(line), 0.0) + seconds
    return sums


@pytest.mark.parametrize("way", ["none", "full"])
def test_a_counted_step_takes_what_a_card_measured_by_kind(way: str):
    counted, measured = counted_on_card(way), read(MEASURED)["measured"][way]
    assert counted == {kind: pytest.approx(seconds, rel=0.05) for kind, seconds in measured.items()}
    assert sum(counted.values()) == pytest.approx(sum(measured.values()), rel=0.03)


@pytest.mark.parametrize("copies_addend", [True, False])
def test_a_torch_that_copies_the_addend_of_a_product_copies_no_bias(copies_addend: bool, monkeypatch: Any):
    from counted import lower

    monkeypatch.setattr(lower, "COPIES_ADDEND", copies_addend)
    with lower.Launches() as launches, torch.device("meta"):
        rows = torch.empty(4096, 3072)
        weight = torch.empty(3072, 3072)
        bias = torch.empty(3072)
        torch.addmm(bias, rows, weight)
        torch.addmm(bias.expand(4096, -1), rows, weight)
        assert [kernel.kind for kernel in launches.kernels] == ["product", "product"]
        torch.addmm(rows, rows, weight)
    size = 4096 * 3072 * 4
    copies = [("copy", 2 * size)] * copies_addend
    assert [(k.kind, k.bytes_moved) for k in launches.kernels[2:]] == [*copies, ("product", None)]


def test_this_torch_copies_an_addend_before_its_product_takes_it_from_elsewhere():
    header = (Path(torch.__file__).parent / "include" / "ATen" / "cuda" / "CUDABlas.h").read_text()
    assert copies_addend(torch.__version__) == ("c_ptr" not in header)


# A kernel as inductor writes them, over (4096, 512) numbers in tiles of 64 × 64 that lie one way or the other.
TURNED = """
triton_turned = async_compile.triton('triton_turned', '''
def triton_turned(in_ptr0, out_ptr0, ynumel, xnumel, YBLOCK : tl.constexpr, XBLOCK : tl.constexpr):
    ynumel = 4096
    xnumel = 512
    yindex = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[:, None]
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    tmp0 = tl.load(in_ptr0 + (ORDER), None, eviction_policy='evict_last')
    tl.store(out_ptr0 + (xindex + 512*yindex), tmp0, None)
''', device_str='cuda')
"""


def test_a_read_out_of_order_takes_a_pass_for_each_line(monkeypatch: pytest.MonkeyPatch):
    from counted import triton_work

    def config(kernel: Any) -> Any:
        kernel.kwargs, kernel.num_warps = {"YBLOCK": 64, "XBLOCK": 64}, 4
        return kernel

    meta = {"signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "ynumel": "i32", "xnumel": "i32"}}
    meta["signature"] |= dict.fromkeys(("YBLOCK", "XBLOCK"), "constexpr")
    kernel_class = type("Kernel", (), {"triton_meta": meta, "configs": [config(type("Config", (), {}))]})
    monkeypatch.setattr(triton_work, "_loaded", lambda name, source: kernel_class)
    monkeypatch.setattr(triton_work, "_assembled", lambda *_: [" /*0000*/ EXIT ;"])
    monkeypatch.setattr(triton_work, "_work_cache", {})
    size, work_by_order = 4096 * 512 * 4, {}
    for order in ("xindex + 512*yindex", "xindex + 1024*yindex", "2*xindex + 1024*yindex", "4096*xindex + yindex"):
        work_by_order[order] = triton_work.work_by_kernel(TURNED.replace("ORDER", order))["triton_turned"]
    plain, apart, every_second, transposed = work_by_order.values()
    assert (
        plain.bytes_moved == apart.bytes_moved == transposed.bytes_moved == 2 * size
        and every_second.bytes_moved == 3 * size
    )
    lines = size // 128 // triton_work.SMS
    assert plain.cycles == apart.cycles == pytest.approx(2 * lines, rel=0.02)
    assert transposed.cycles == pytest.approx(2 * lines, rel=0.02)  # lanes run along the other axis
    assert every_second.cycles == pytest.approx(33 * lines, rel=0.02)  # no two are neighbours: each lane has a line


def by_kind(graph: dict[str, Any]) -> dict[str, tuple[int, int]]:
    kinds = sorted({line[0] for line in graph["kernels"]} - {"copy"})  # these follow from the products
    return {kind: (counted_page.launches(graph, kind), counted_page.size(graph, kind)) for kind in kinds}


def test_blocks_have_the_kernels_and_bytes_of_the_page():
    if reason := other_versions():
        pytest.skip(f"{reason} `python benchmarks counted --write` counts anew.")
    code = f"import json; from counted import counted; print(json.dumps(counted.count_some({CASES!r})))"
    process = subprocess.run([sys.executable, "-c", code], cwd=PAGE.parents[1], capture_output=True, text=True)
    assert not process.returncode, process.stderr[-3000:]
    for (name, kind, graphs), kernels in zip(CASES, json.loads(process.stdout.splitlines()[-1]), strict=True):
        (block,) = (block for block in ROWS_COUNTED[name] if block["kind"] == kind)
        for graph in graphs:
            counted, page = by_kind(kernels[graph]), by_kind(block["graphs"]["none"][graph])
            message = f"{name}, {kind}, {graph}: run `python benchmarks counted --write` where this is meant"
            assert {kind: n for kind, (n, _) in counted.items()} == {kind: n for kind, (n, _) in page.items()}, message
            assert {kind: size for kind, (_, size) in counted.items()} == {
                kind: pytest.approx(size, rel=0.02) for kind, (_, size) in page.items()
            }, message


@pytest.mark.parametrize("name", ["flux 1024²", "qwen_image 1024²", "wan"])
def test_selective_keeps_half_in_at_most_a_third_more_time(name: str):
    blocks = ROWS_COUNTED[name]
    whole = counted_page.seconds(blocks, "none")[-1], counted_page.kept_bytes(blocks, "none")
    ways = {
        way: (counted_page.seconds(blocks, way)[-1] / whole[0], counted_page.kept_bytes(blocks, way) / whole[1])
        for way in blocks[0]["graphs"]
    }
    assert any(kept_share <= 0.5 and time <= 1 / 0.75 for time, kept_share in ways.values()), ways


def test_attention_is_not_computed_again_by_any_budget():
    for blocks in ROWS_COUNTED.values():
        for block in blocks:
            for graphs in block["graphs"].values():
                assert counted_page.launches(graphs["backward"], "attention") == 0
                assert counted_page.launches(graphs["backward"], "attention_backward")


def test_a_change_is_shown_beside_what_was_before():
    blocks = ROWS_COUNTED["flux 512²"]
    fewer = json.loads(json.dumps(blocks))
    fewer[0]["graphs"]["none"]["forward"]["kernels"].pop()
    previous, current = (counted_page.launches(b[0]["graphs"]["none"]["forward"]) for b in (blocks, fewer))
    assert previous > current
    assert f"{previous} → {current}" in counted_page.compared({"flux": blocks}, {"flux": fewer})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_that_blocks_are_lowered_with_is_torchs(dtype: torch.dtype):
    """Values and gradients of a part of a wider tensor."""
    ops, generator = torch._decomp.decompositions, torch.Generator().manual_seed(0)
    lowered = norm_of(ops._fused_rms_norm, ops._fused_rms_norm_backward)
    wide, weight, grad = (torch.randn(s, generator=generator).to(dtype) for s in ((2, 5, 3, 16), (16,), (2, 5, 16)))
    results = []
    for norm in (lowered, torch.nn.functional.rms_norm):
        x = wide.clone().requires_grad_()
        out = norm(x[:, :, 1], (16,), weight, 1e-6)
        results.append((out.detach(), *torch.autograd.grad(out, x, grad)))
    for result, other in zip(*results, strict=True):
        torch.testing.assert_close(result, other)


def test_an_eager_norm_keeps_its_input_as_it_is_and_a_number_for_each_row():
    wide = torch.empty(2, 5, 3, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = eager_norm(wide[:, :, 1], (16,), torch.empty(16, dtype=torch.bfloat16, device="meta"), 1e-6)
    assert [(tuple(x.shape), x.dtype) for x in saved if x.dim() > 1] == [
        ((2, 5, 16), torch.bfloat16),
        ((2, 5, 1), torch.float32),
    ]
    assert saved[0].untyped_storage()._cdata == wide.untyped_storage()._cdata
    out.backward(torch.empty_like(out))
    assert wide.grad is not None and wide.grad.shape == wide.shape


def test_lists_of_tensors_are_cut_into_launches_as_torch_cuts_them():
    assert launches_of([10] * 770, 1) == 1 and launches_of([10] * 771, 1) == 2
    assert launches_of([10] * 211, 5) == 2
    assert launches_of([65536 * 2240], 1) == 1 and launches_of([65536 * 2240 + 1], 1) == 2
    assert launches_of([65536 * 2000, 65536 * 2000], 1) == 2
