"""Low-precision matmul support: the int8 and fp8 matmuls that a device can run, and the fastest of them.

Checked before a layer is set to such a matmul: a CPU takes any sizes, and a card itself would fail in the middle of a
step, or never, if a library silently takes a slow fallback.
"""

from typing import NamedTuple

import torch

from .dequantize import core_has_kernel
from .matmul import DTYPES, FP8, FULL, INT8, MULTIPLE

NOT_COMPILED = "without compiling by inductor, fp8 matmuls take longer than 16-bit ones"
NO_KERNEL = "this ComfyUI has no int8 kernel for the card (it brings one where torch is built for CUDA 13)"


RATES = {FULL: 1.0, INT8: 2.5, FP8: 1.5}
"""FLOP per second of a matmul, rotation and rounding included, relative to a 16-bit matmul.

From a roofline of one FLUX block at 1024², forward and backward, without recompute: int8 1.41 times as fast on an RTX
4090, 1.58 on a 3090 and 1.49 on a 5090; fp8 1.20 on an H100. The smallest speed-up of each is used: at an H100's rates,
by which the planner prices blocks, these multiples yield it. Not measured on any card.
"""


class Card(NamedTuple):
    """Properties of a device that determine its matmuls.

    kind: cpu, cuda, rocm for an AMD card, or another of torch's device types.
    capability: compute capability of an NVIDIA card.
    has_int8_kernel: comfy-kitchen has an int8 matmul kernel for it, scales included.
    """

    kind: str
    capability: tuple[int, int] = (0, 0)
    has_int8_kernel: bool = False


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card(device.type)
    if torch.version.hip:
        return Card("rocm")
    return Card("cuda", torch.cuda.get_device_capability(device), core_has_kernel("int8_linear"))


def obstacle(precision: str, card: Card, dtype: torch.dtype) -> str | None:
    """Return why the card cannot run INT8 or FP8 matmuls in a run that computes in `dtype`; None if it can."""
    if dtype not in DTYPES:
        return f"it computes in {str(dtype)[6:]}"
    if card.kind == "cpu":
        return None  # torch's own matmuls, correct and slow
    if card.kind != "cuda":
        return f"{precision} matmuls need an NVIDIA card"
    if precision == INT8 and card.capability == (10, 3):
        return "this card multiplies int8 slower than anything else"
    if precision == INT8 and not card.has_int8_kernel:
        return NO_KERNEL
    least, name = ((7, 5), "RTX 20") if precision == INT8 else ((8, 9), "RTX 40")
    return None if card.capability >= least else f"{precision} matmuls need an {name} card or a newer one"


def preferred(card: Card, dtype: torch.dtype, fuses: bool = True) -> tuple[tuple[str, ...], str]:
    """Return the matmuls that `auto` uses, the fastest first, and the reason if there are none.

    int8 on RTX 20 to 40 and 50, fp8 on Hopper and Blackwell's large cards; if a card supports both, weights stored in
    the slower format are still faster multiplied in it than in 16 bits.

    fuses: whether blocks are compiled by a compiler that fuses operations. The fp8 rounding consists of plain ops,
        which unfused take more time than the matmul saves. An H100 took 1,155 us forward and 2,827 backward in eager
        mode, against 819 and 906 in bf16.
    """
    if card.kind != "cuda":
        kind = {"cpu": "a CPU", "rocm": "an AMD card"}.get(card.kind, card.kind.upper())
        return (), f"auto has nothing faster on {kind}"
    major, minor = card.capability
    supported: tuple[str, ...] = ()
    if (7, 5) <= card.capability < (8, 9):
        supported = (INT8,)
    elif card.capability == (8, 9) or major == 12:
        supported = (INT8, FP8)
    elif major == 9:
        supported = (FP8, INT8)
    elif major == 10:
        supported = (FP8,)
    if not supported:
        return (), f"auto has nothing faster on a card of compute capability {major}.{minor}"
    if dtype not in DTYPES or (card.capability == (7, 5) and dtype != torch.float16):
        return (), f"auto has nothing faster on this card in a run that computes in {str(dtype)[6:]}"
    available = tuple(precision for precision in supported if precision != INT8 or card.has_int8_kernel)
    if usable := tuple(precision for precision in available if precision != FP8 or fuses):
        return usable, ""
    return (), NOT_COMPILED if available else NO_KERNEL


def fits(shape: tuple[int, int]) -> bool:
    """Return True if cards support the dimensions of a weight (out, in)."""
    return all(side % MULTIPLE == 0 for side in shape)
