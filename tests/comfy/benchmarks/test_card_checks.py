"""The checks of `dev.py card`: the kernel of attention that they choose, and how they judge a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tessera_dev import find_comfyui

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from card.checks.smoke import judge

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
# A process of its own: what ComfyUI does when it is imported happens once. ComfyUI has its contexts around attention
# where there is a GPU, so it is told that there is one while it is imported.
SCRIPT = """
import json, sys, tempfile
from pathlib import Path
from unittest.mock import patch
sys.path.insert(0, sys.argv[1])
from comfyui import set_up_comfyui
set_up_comfyui("cpu")
import torch
from torch.nn.attention import SDPBackend
from card.checks import attention

call = torch.nn.functional.scaled_dot_product_attention

def noted(q, k, v, *args, **kwargs):
    found.append(SDPBackend(int(torch._fused_sdp_choice(q, k, v))).name)
    return call(q, k, v, *args, **kwargs)

torch.nn.functional.scaled_dot_product_attention = noted
with patch.object(torch.cuda, "is_available", lambda: True):
    import tessera.models.layers.attention

    tessera.models.layers.attention.settle_kernel_order = lambda: None
    attention.choose_attention(plain=True)
import comfy.ops, tiny
assert comfy.ops.SDPA_BACKEND_PRIORITY
model = tiny.load_flux(tiny.write_flux(Path(tempfile.mkdtemp()) / "flux.safetensors", depth=1, depth_single=1))
runs = []
for plain in (True, True, False, True):
    attention.choose_attention(plain)
    found = []
    tiny.sample(model, "flux", steps=1)
    flags = [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()]
    runs.append([plain, found, flags])
print(json.dumps(runs))
"""


def test_the_choice_of_attention_holds_when_comfyui_is_imported_and_while_it_samples():
    command = [sys.executable, "-c", SCRIPT, str(BENCHMARKS)]
    environment = os.environ | {"COMFYUI_PATH": str(find_comfyui())}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    runs = json.loads(process.stdout.splitlines()[-1])
    plain, flash = [True, ["MATH"] * 2, [False, True]], [False, ["FLASH_ATTENTION"] * 2, [True, True]]
    assert runs == [plain, plain, flash, plain]


def near(tensor: torch.Tensor, size: float, seed: int) -> list[torch.Tensor]:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return [tensor + size * noise]


@pytest.fixture
def fp32() -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(0))


def test_runs_equal_to_the_resident_one_are_right_however_they_are_judged(fp32):
    resident = near(fp32, 0.02, 1)
    for exact in (True, False):
        assert judge(resident, resident, [fp32], exact).wrong == []


def test_runs_that_round_otherwise_are_right_up_to_the_noise_floor(fp32):
    resident = near(fp32, 0.02, 1)
    judged = judge(near(fp32, 0.02, 2), resident, [fp32], exact=False)
    assert judged.wrong == [] and judged.figures["noise_floor"] == pytest.approx(0.02, rel=0.1)
    assert judge(near(fp32, 0.04, 2), resident, [fp32], exact=False).wrong == ["above the noise floor"]


def test_runs_that_add_in_the_same_order_have_to_be_equal(fp32):
    resident = near(fp32, 0.02, 1)
    (wrong,) = judge(near(resident[0], 0.003, 2), resident, [fp32], exact=True).wrong
    assert wrong == "not bit for bit, though the order of additions is the same"


def test_runs_that_are_not_finite_are_wrong(fp32):
    broken = [fp32.clone()]
    broken[0][3] = float("nan")
    assert judge(broken, near(fp32, 0.02, 1), [fp32], exact=False).wrong == ["above the noise floor"]
