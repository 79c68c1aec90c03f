"""The machine's ceilings in 30 s: link, page-locking, matrix products, LoRA's thin ones, attention kernels, fp8."""

import argparse
import time
from statistics import median

from kit import Checks, set_up

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--limit", type=float, default=60)
args = parser.parse_args()

import torch  # noqa: E402
from torch.nn.functional import linear, scaled_dot_product_attention  # noqa: E402

CUDA = args.device == "cuda"
SMALL = 1 if CUDA else 16  # how much smaller all is on a CPU, where this only tests the script
set_up(args.device)
from tessera.memory.host.page_locked import host_bytes, unlock  # noqa: E402
from tessera.memory.weights.frozen_linear import stored_linear, stored_linear_input_grad  # noqa: E402

checks = Checks(args.limit)
device, T, D = torch.device(args.device), 4608 // SMALL, 3072 // SMALL


def seconds(call, repeat=10):
    for _ in range(2):
        call()
    times = []
    for _ in range(repeat):
        if CUDA:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return median(times)


def normal(*shape, grad=False):
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)


def link():
    size = 2**30 // SMALL**2
    began = time.perf_counter()
    host = host_bytes(size, CUDA)
    host.fill_(1)
    locked = time.perf_counter() - began
    plain, there = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=device)
    torches = torch.empty(size, dtype=torch.uint8, pin_memory=CUDA).fill_(1)
    rates = {n: size / 1e9 / seconds(f, 4) for n, f in {
        "registered → device": lambda: there.copy_(host, non_blocking=True),
        "torch's pinned → device": lambda: there.copy_(torches, non_blocking=True),
        "device → registered": lambda: host.copy_(there, non_blocking=True),
        "pageable → device": lambda: there.copy_(plain),
        "host → host": lambda: host.copy_(plain)}.items()}  # fmt: skip
    began = time.perf_counter()
    assert unlock(host) or not CUDA
    return True, f"pinned {host.is_pinned()}, locking {size / 1e9 / locked:.1f} GB/s, unlocking " \
        f"{time.perf_counter() - began:.2f} s, " + ", ".join(f"{n} {r:.1f} GB/s" for n, r in rates.items())  # fmt: skip


def products():
    text = []
    for name, rows, columns in (("qkv", 3 * D, D), ("mlp in", 4 * D, D), ("linear1", 7 * D, D), ("linear2", D, 5 * D)):
        x, w = normal(T, columns), normal(rows, columns)
        s = seconds(lambda x=x, w=w: linear(x, w))
        text.append(f"{name} {s * 1e6:.0f} us {2 * T * rows * columns / s / 1e12:.0f} TFLOP/s")
    return True, ", ".join(text)


def thin():
    """Time the parts of a rank-16 LoRA on linear1, and the frozen product."""
    x, w, down, up, g = normal(T, D), normal(7 * D, D), normal(16, D), normal(7 * D, 16), normal(T, 7 * D)
    h, y, gh = linear(x, down), linear(x, w), normal(T, 16)
    calls = {
        "frozen": lambda: linear(x, w), "down": lambda: linear(x, down), "up": lambda: linear(h, up),
        "add": lambda: y + g, "up and add in one addmm": lambda: torch.addmm(y, h, up.T),
        "gradient of h": lambda: g @ up, "of up": lambda: g.T @ h, "of down": lambda: gh.T @ x,
        "of x": lambda: gh @ down,
        "frozen backward": lambda: g @ w, "both in one product": lambda: torch.cat((w, down)) @ x.T,
    }  # fmt: skip
    return True, ", ".join(f"{n} {seconds(c) * 1e6:.0f} us" for n, c in calls.items())


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, text = 24, []
    qkv = [normal(1, T, heads, 128, grad=True).transpose(1, 2) for _ in range(3)]
    q, k, v = (t.detach().requires_grad_() for t in qkv)
    choice = torch._fused_sdp_choice(q, k, v)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                forward = seconds(lambda: scaled_dot_product_attention(q, k, v))
                out = scaled_dot_product_attention(q, k, v)
                g = torch.randn_like(out)
                back = seconds(lambda out=out, g=g: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))
            text.append(f"{backend.name} forward {forward * 1e3:.2f} ms, backward {back * 1e3:.2f} ms")
        except RuntimeError as error:
            text.append(f"{backend.name}: {str(error).splitlines()[0][:60]}")
    return True, f"torch chooses {choice}; " + "; ".join(text)


def fp8():
    x, g, w = normal(T, D), normal(T, 7 * D), normal(7 * D, D).to(torch.float8_e4m3fn)
    scale, full = torch.tensor(0.02, device=device), normal(7 * D, D)
    calls = {"stored forward": lambda: stored_linear(x, w, scale, None), "bf16 forward": lambda: linear(x, full),
             "stored backward": lambda: stored_linear_input_grad(g, w, scale), "bf16 backward": lambda: g @ full,
             "unscaled forward": lambda: stored_linear(x, w, None, None)}  # fmt: skip
    if CUDA:
        one = torch.tensor(1.0, device=device)
        calls["_scaled_mm forward"] = lambda: torch._scaled_mm(
            x.to(torch.float8_e4m3fn), w.T, scale_a=one, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return True, ", ".join(f"{n} {seconds(c) * 1e6:.0f} us" for n, c in calls.items())


def memory():
    import psutil

    ram = psutil.virtual_memory()
    a, b = (torch.empty(2**32 // SMALL**3, dtype=torch.uint8, device=device).random_() for _ in range(2))
    rate = 2 * len(a) / 1e9 / seconds(lambda: a.copy_(b))
    ram = f"RAM {ram.total / 2**30:.0f} GiB, {ram.available / 2**30:.0f} free"
    return True, f"{ram}; device to device {rate:.0f} GB/s read and written"


checks.show(f"torch {torch.__version__} {torch.cuda.get_device_name() if CUDA else ''}")
for check in (link, memory, products, thin, attention, fp8):
    checks.run(check.__name__, check, need=3)
checks.end("probe")
