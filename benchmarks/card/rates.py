"""Rates of the machine: link, memory, matrix products, attention kernels, and the cost of a rank-16 LoRA and of fp8."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from comfyui import set_up_comfyui
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

GB = 1e9


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    set_up_comfyui(spec["device"])
    rates = Rates(torch.device(spec["device"]))
    return lambda settings, figures: rates.measure(settings)


class Rates:
    """Shapes of FLUX.1 at one megapixel; on a CPU, which only tests the command, a fraction of them."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.small = 1 if self.cuda else 48
        self.tokens = 4608 // self.small
        self.width = 3072 // self.small
        self.heads = 24 if self.cuda else 2

    def measure(self, settings: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, settings["what"])()

    def seconds(self, call: Callable[[], Any], repeat: int = 10) -> float:
        for _ in range(2):
            call()
        times = []
        for _ in range(repeat if self.cuda else 1):
            self._wait()
            began = time.perf_counter()
            # One launch is too short for the host's clock.
            calls = 5 if self.cuda else 1
            for _ in range(calls):
                call()
            self._wait()
            times.append((time.perf_counter() - began) / calls)
        return median(times)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def normal(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_(grad)

    def link(self) -> dict[str, Any]:
        """Bytes a second between host and device, one way and both ways at once."""
        from tessera.memory.host.page_locked import count_newly_locked, host_bytes, lock, unlock

        size = 2**30 // self.small**2
        began = time.perf_counter()
        host = host_bytes(size, self.cuda, later=True).fill_(1)
        filled = time.perf_counter()
        refused = lock(host) if self.cuda else 0
        locked_at = time.perf_counter()
        count_newly_locked([host])
        preparing = {"filling": size / GB / (filled - began), "locking": size / GB / max(locked_at - filled, 1e-9)}
        back = host_bytes(size, self.cuda).fill_(1)
        pageable = torch.ones(size, dtype=torch.uint8)
        target, other = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        streams = [torch.cuda.Stream() for _ in range(2)] if self.cuda else []

        def copy_both_ways() -> None:
            for stream, (destination, source) in zip(streams, ((target, host), (back, other)), strict=False):
                with torch.cuda.stream(stream):
                    destination.copy_(source, non_blocking=True)

        calls: dict[str, Callable[[], Any]] = {
            "to the device": lambda: target.copy_(host, non_blocking=True),
            "back": lambda: back.copy_(other, non_blocking=True),
            "to the device, pageable": lambda: target.copy_(pageable),
            "host to host": lambda: back.copy_(host),
        }
        if streams:
            calls["both ways, each"] = copy_both_ways
        speeds = {name: size / GB / self.seconds(call, 3) for name, call in calls.items()}
        locked = host.is_pinned()
        unlocked = [unlock(buffer) for buffer in (host, back)]
        if self.cuda and (refused or not (locked and all(unlocked))):
            raise RuntimeError("the host's memory could not be page-locked, or not given back")
        all_speeds = {**(preparing if self.cuda else {}), **speeds}
        return {"text": _listed(all_speeds, "GB/s"), "figures": {"link": speeds["to the device"] * GB}}

    def memory(self) -> dict[str, Any]:
        a, b = (torch.empty(2**32 // self.small**3, dtype=torch.uint8, device=self.device) for _ in range(2))
        rate = 2 * len(a) / self.seconds(lambda: a.copy_(b))
        return {"text": f"{rate / GB:.0f} GB/s read and written", "figures": {"bandwidth": rate}}

    def products(self) -> dict[str, Any]:
        """FLOP a second of FLUX's frozen Linears."""
        sizes, d = {}, self.width
        for name, rows, columns in (
            ("qkv", 3 * d, d),
            ("mlp in", 4 * d, d),
            ("linear1", 7 * d, d),
            ("linear2", d, 5 * d),
        ):
            x, w = self.normal(self.tokens, columns), self.normal(rows, columns)
            sizes[name] = 2 * self.tokens * rows * columns / self.seconds(lambda x=x, w=w: linear(x, w)) / 1e12
        return {"text": _listed(sizes, "TFLOP/s"), "figures": {"products": median(sizes.values()) * 1e12}}

    def thin(self) -> dict[str, Any]:
        """Time the matmuls of a rank-16 LoRA on FLUX's widest Linear, and the frozen matmul."""
        t, d = self.tokens, self.width
        x = self.normal(t, d)
        w = self.normal(7 * d, d)
        down = self.normal(16, d)
        up = self.normal(7 * d, 16)
        h = linear(x, down)
        y = linear(x, w)
        g = self.normal(t, 7 * d)
        gh = self.normal(t, 16)
        calls = {
            "frozen": lambda: linear(x, w),
            "down": lambda: linear(x, down),
            "up": lambda: linear(h, up),
            "add": lambda: y + g,
            "up and add as addmm": lambda: torch.addmm(y, h, up.T),
            "gradient of h": lambda: g @ up,
            "of up": lambda: g.T @ h,
            "of down": lambda: gh.T @ x,
            "of x": lambda: gh @ down,
            "frozen backward": lambda: g @ w,
        }
        return {"text": _listed({name: self.seconds(call) * 1e6 for name, call in calls.items()}, "us")}

    def attention(self) -> dict[str, Any]:
        """FLOP a second of each of torch's kernels, and which of them torch chooses."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        shape = (1, self.tokens, self.heads, 128)
        q, k, v = (self.normal(*shape).transpose(1, 2).detach().requires_grad_() for _ in range(3))
        flop = 4 * self.heads * self.tokens**2 * 128
        lines = []
        rates = {}
        kinds = SDPBackend
        for backend in (kinds.FLASH_ATTENTION, kinds.CUDNN_ATTENTION, kinds.EFFICIENT_ATTENTION):
            try:
                with sdpa_kernel([backend]):
                    forward = self.seconds(lambda: scaled_dot_product_attention(q, k, v))
                    out = scaled_dot_product_attention(q, k, v)
                    grad = torch.randn_like(out)
                    back = self.seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))  # noqa: B023
            except RuntimeError as error:
                lines.append(f"{backend.name}: {str(error).splitlines()[0][:60]}")
                continue
            rates[backend.value] = (flop / forward, 2.5 * flop / back)
            lines.append(f"{backend.name} {flop / forward / 1e12:.0f} forward, {2.5 * flop / back / 1e12:.0f} back")
        choice = int(torch._fused_sdp_choice(q, k, v))
        best = rates.get(choice) or max(rates.values(), default=None)
        names = [kind.name for kind in SDPBackend.__members__.values() if kind.value == choice]
        text = f"torch chooses {', '.join(names) or choice}; TFLOP/s: {'; '.join(lines)}"
        figures = {} if best is None else dict(zip(("attention", "attention_backward"), best, strict=True))
        return {"text": text, "figures": figures}

    def fp8(self) -> dict[str, Any]:
        """Time a frozen Linear stored in fp8, the same in bf16, and the low-precision matmuls that the card
        supports."""
        from tessera.memory.low_bit.devices import card_of, obstacle
        from tessera.memory.low_bit.matmul import FP8, INT8, LowBitMatmul, low_bit_input_grad, low_bit_linear
        from tessera.memory.weights.frozen_linear import stored_linear, stored_linear_input_grad

        t, d = self.tokens, self.width
        x = self.normal(t, d)
        g = self.normal(t, 7 * d)
        w = self.normal(7 * d, d).to(torch.float8_e4m3fn)
        scale, full = torch.tensor(0.02, device=self.device), self.normal(7 * d, d)
        calls = {
            "stored forward": lambda: stored_linear(x, w, scale, None),
            "bf16 forward": lambda: linear(x, full),
            "stored backward": lambda: stored_linear_input_grad(g, w, scale),
            "bf16 backward": lambda: g @ full,
        }
        codes = {FP8: w, INT8: (20 * full).round().clamp(-127, 127).to(torch.int8)}
        for name in (FP8, INT8):
            if obstacle(name, card_of(self.device), x.dtype) is None:
                # Rounding is included; in compiled code it is fused with the kernel before it.
                calls[f"{name} product forward"] = partial(
                    low_bit_linear, x, codes[name], scale, None, None, LowBitMatmul(name, name)
                )
                calls[f"{name} product backward"] = partial(low_bit_input_grad, g, codes[name], scale, name, 0)
        return {"text": _listed({name: self.seconds(call) * 1e6 for name, call in calls.items()}, "us")}


def _listed(values: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in values.items()) + f" {unit}"
