"""The kernels of one profiled step, compared with the counts of `counted.py` for the same blocks without a GPU."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from counted.page import graphs_of, seconds_at, size, step_launches

TOLERANCE = 0.03  # a greater difference is a fault of the counter
# By the first that has one of the words in a kernel's name.
KINDS = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "cudnn_generated", "sdpa", "attention"),
    "Triton": ("triton",),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "optimizer": ("multi_tensor", "adam"),
}
REGIONS = ("Torch-Compiled Region", "CompiledFunction")  # the names of what runs a compiled graph
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
LOW_PRODUCTS = ("aten::_scaled_mm", "comfy_kitchen::int8_linear")  # a layer that fell back to 16 bits calls neither
LARGEST = 25  # kernels that are named


# A step under the profiler


def summarise(profile: Any) -> dict[str, Any]:
    """Summarise a profiled step: `found` holds figures, `table` is text."""
    events = profile.events()
    on_device = [
        (e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in events
        if "CUDA" in str(e.device_type)
        and e.time_range.elapsed_us() > 0
        and not e.name.startswith(("ProfilerStep", "#"))
    ]
    calls = [(e.name, _in_a_graph(e)) for e in events if "CPU" in str(e.device_type)]
    busy = busy_seconds((start, start + length) for name, start, length in on_device if kind_of(name) != "copies")
    figures = {"device": busy, **launches(calls, [name for name, _, _ in on_device])}
    return {"found": figures, "table": table(on_device)}


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "other")


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans of microseconds runs."""
    busy = last_end = 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return busy / 1e6


def table(kernels: Sequence[tuple[str, float, float]]) -> str:
    """Time and launches by kind and by kernel. kernels: (name, start, microseconds)"""
    if not kernels:
        return ""
    kinds: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    for name, _, length in kernels:
        for sums, key in ((kinds, kind_of(name)), (names, name)):
            entry = sums.setdefault(key, [0, 0.0])
            entry[0] += 1
            entry[1] += length / 1e3
    lines = [f"{len(kernels)} launches in one step", "launches        ms"]
    for sums, count_shown in ((kinds, len(kinds)), (names, LARGEST)):
        ordered = sorted(sums.items(), key=lambda item: -item[1][1])[:count_shown]
        lines += [f"{count:8.0f} {ms:9.2f}  {name[:110]}" for name, (count, ms) in ordered] + [""]
    return "\n".join(lines).strip()


def launches(calls: Iterable[tuple[str, bool]], kernels: Iterable[str]) -> dict[str, int]:
    """Count what runs inside compiled graphs. calls: (op, inside of a graph); kernels: the device's."""
    inside = [name for name, in_a_graph in calls if in_a_graph]
    attention = [n for n in inside if n.startswith("aten::_scaled_dot_product_") and "for_cpu" not in n]
    return {
        "products": sum(name in PRODUCTS for name in inside),
        "8-bit products": sum(name in LOW_PRODUCTS for name in inside),
        "attention": len(attention),
        "triton": sum(name.startswith("triton_") for name in kernels),
    }


def _in_a_graph(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if any(name in parent.name for name in REGIONS):
            return True
        parent = parent.cpu_parent
    return False


# Bytes, as inductor counts them for the graphs that it makes here


def count_bytes() -> None:
    """Turn on the byte counts of inductor, which it makes only if its metrics are logged. The log is discarded."""
    import logging

    from torch._inductor import compile_fx

    log = getattr(compile_fx, "inductor_metrics_log", None)
    if log is None:  # of another torch: bytes stay 0 and are not compared
        return
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [logging.NullHandler()]


def bytes_of_graphs() -> int:
    """Bytes of all graphs made so far, each once."""
    from torch._inductor import metrics

    return metrics.num_bytes_accessed


# Comparison with the counted step


def start(spec: dict[str, Any]) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    from comfyui import set_up_comfyui

    set_up_comfyui("meta")  # the pack's prices; what counts has a process of its own

    def count(settings: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        from counted import counted

        row = next(r for r in counted.ROWS if (r.model, r.side, r.batch) == (settings["row"], settings["side"], 1))
        one_way = type(row)(**{f.name: getattr(row, f.name) for f in fields(row)} | {"selective": False})
        return beside(counted.in_process(one_way), figures, _rates(figures))

    return count


def beside(blocks: Sequence[dict[str, Any]], figures: dict[str, Any], rates: Any) -> dict[str, Any]:
    """Compare the counted blocks with the profiled cases before, and price them by the rates of this card."""
    lines, faults = [], []
    for case, way in (("flux, compiled, none", "none"), ("flux, compiled, full", "full")):
        profiled = figures.get(case) or figures.get(f"{case}, swapped to fit")
        if profiled is None or "products" not in profiled:
            continue
        expected = counted_launches(blocks, way)
        expected["bytes of the graphs"] = sum(size(g) for b in blocks for g in graphs_of(b, "none"))
        measured = {name: profiled[name] for name in ("triton", "products", "attention")}
        measured["bytes of the graphs"] = profiled["bytes_of_graphs"]
        for name, count in expected.items():
            if name == "bytes of the graphs" and (way == "full" or not measured[name]):
                continue  # the graphs are made once, in the first case that needs them
            deviation = measured[name] / count - 1 if count else 0.0
            lines.append(f"{case}: {name} {count} counted, {measured[name]} here ({deviation:+.1%})")
            faults += [lines[-1]] if abs(deviation) > TOLERANCE else []
        if rates is not None:
            priced = seconds_at(list(blocks), way, rates)[-1]
            lines.append(f"{case}: {priced:.3f} s by this card's rates, {profiled['all']:.3f} measured")
    if not lines:
        raise ValueError("No compiled step was profiled before, so there is nothing to compare.")
    text = f"differs from the count: {'; '.join(faults)}" if faults else "as counted"
    return {"state": "failed" if faults else "ok", "text": text, "details": "\n".join(lines)}


def counted_launches(blocks: Sequence[dict[str, Any]], way: str) -> dict[str, int]:
    """Return the launches of a step's blocks by kind. way: 'none', or 'full', which runs the forward twice."""
    kinds = {"triton": ("triton",), "products": ("product", "thin"), "attention": ("attention", "attention_backward")}
    return {name: step_launches(list(blocks), way, *kinds_of_name) for name, kinds_of_name in kinds.items()}


def _rates(figures_by_case: dict[str, Any]) -> Any:
    """Return the rates that were measured before, None if one is missing."""
    rates_class = import_module("tessera.memory.activations.cost").KernelRates
    # A profiled step's figures have its launches under the same names.
    cases = (figures for case, figures in figures_by_case.items() if case.startswith("rates: "))
    measured = {name: value for figures in cases for name, value in figures.items()}
    names = [f.name for f in fields(rates_class)]
    return rates_class(**{name: measured[name] for name in names}) if all(name in measured for name in names) else None
