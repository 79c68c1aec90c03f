"""Cards and their products: what a device can multiply in low precision, and what is the fastest there.

It is asked here before a layer is given such a product: a CPU takes any sizes, and a card's own refusal comes in the
middle of a step, or never, where a library goes a slow way around without a word.
"""

from typing import NamedTuple

import torch

from .products import DTYPES, FP8, FULL, INT8, MULTIPLE
from .widening import core_has_kernel

NOT_COMPILED = "without compiling by inductor, fp8 products take longer than full ones"
NO_KERNEL = "this ComfyUI has no int8 kernel for the card (it brings one where torch is built for CUDA 13)"


RATES = {FULL: 1.0, INT8: 2.5, FP8: 1.5}
"""FLOP per second of a product, turning and rounding included, as multiples of a full one's in 16 bits.

From a roofline of one FLUX block at 1024², both ways, without recompute: by int8 1.41 times as fast on an RTX 4090,
1.58 on a 3090 and 1.49 on a 5090; by fp8 1.20 on an H100. The least of each product is taken: at an H100's rates, by
which the planner prices blocks, these multiples give it. No card has measured it.
"""


class Card(NamedTuple):
    """A device as far as products go.

    kind: cpu, cuda, rocm for an AMD card, or another of torch's types of device.
    capability: compute capability of an NVIDIA card.
    has_int8_kernel: comfy-kitchen multiplies int8 there by a kernel of its own, scales included.
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


def obstacle(product: str, card: Card, dtype: torch.dtype) -> str | None:
    """Return why the card cannot multiply by INT8 or FP8 in a run that computes in `dtype`; None where it can."""
    if dtype not in DTYPES:
        return f"it computes in {str(dtype)[6:]}"
    if card.kind == "cpu":
        return None  # torch's own products, right and slow
    if card.kind != "cuda":
        return f"{product} products need an NVIDIA card"
    if product == INT8 and card.capability == (10, 3):
        return "this card multiplies int8 slower than anything else"
    if product == INT8 and not card.has_int8_kernel:
        return NO_KERNEL
    least, name = ((7, 5), "RTX 20") if product == INT8 else ((8, 9), "RTX 40")
    return None if card.capability >= least else f"{product} products need an {name} card or a newer one"


def preferred(card: Card, dtype: torch.dtype, fuses: bool = True) -> tuple[tuple[str, ...], str]:
    """Return what `auto` multiplies by, the fastest first, and why there is nothing where it is empty.

    int8 on RTX 20 to 40 and 50, fp8 on Hopper and Blackwell's large cards; where a card does both, what is stored in
    the other is still faster multiplied so than in full.

    fuses: whether blocks are compiled by what makes one kernel of several operations. fp8 is rounded by plain ones:
        one by one they take more time than the product saves. An H100 took 1,155 us forward and 2,827 back in eager,
        and 819 and 906 for the same in bf16.
    """
    if card.kind != "cuda":
        kind = {"cpu": "a CPU", "rocm": "an AMD card"}.get(card.kind, card.kind.upper())
        return (), f"auto has nothing faster on {kind}"
    major, minor = card.capability
    known: tuple[str, ...] = ()
    if (7, 5) <= card.capability < (8, 9):
        known = (INT8,)
    elif card.capability == (8, 9) or major == 12:
        known = (INT8, FP8)
    elif major == 9:
        known = (FP8, INT8)
    elif major == 10:
        known = (FP8,)
    if not known:
        return (), f"auto has nothing faster on a card of compute capability {major}.{minor}"
    if dtype not in DTYPES or (card.capability == (7, 5) and dtype != torch.float16):
        return (), f"auto has nothing faster on this card in a run that computes in {str(dtype)[6:]}"
    left = tuple(product for product in known if product != INT8 or card.has_int8_kernel)
    if taken := tuple(product for product in left if product != FP8 or fuses):
        return taken, ""
    return (), NOT_COMPILED if left else NO_KERNEL


def fits(shape: tuple[int, int]) -> bool:
    """Return True for a weight (out, in) whose sides cards take."""
    return all(side % MULTIPLE == 0 for side in shape)
