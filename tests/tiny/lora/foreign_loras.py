"""One layer's update in each form that ComfyUI's reader knows, with random numbers: the tensors by their suffix."""

from collections.abc import Callable

import torch
from torch import Tensor

R = 3  # the rank
Tensors = dict[str, Tensor]


def _draw(*shape: int) -> Tensor:
    """The next numbers of the generator that `foreign` seeds."""
    return 0.3 * torch.randn(*shape, generator=_SOURCE)


_SOURCE = torch.Generator()
ALPHA = {"alpha": torch.tensor(2.0)}


def _lora(rows: int, columns: int) -> Tensors:
    return {"lora_up.weight": _draw(rows, R), "lora_down.weight": _draw(R, columns), **ALPHA}


def _as_convolutions(parts: Tensors) -> Tensors:
    return {name: t[:, :, None, None] if t.dim() == 2 else t for name, t in parts.items()}


def _loha(rows: int, columns: int) -> Tensors:
    return {f"hada_w{i}_{s}": _draw(*((rows, R) if s == "a" else (R, columns))) for i in (1, 2) for s in "ab"} | ALPHA


def _loha_tucker(rows: int, columns: int) -> Tensors:
    parts = {f"hada_w{i}_{s}": _draw(R, rows if s == "a" else columns) for i in (1, 2) for s in "ab"}
    return parts | {f"hada_t{i}": _draw(R, R, 1, 1) for i in (1, 2)} | ALPHA


def _lokr(rows: int, columns: int) -> Tensors:
    return {"lokr_w1": _draw(4, 4), "lokr_w2_a": _draw(rows // 4, R), "lokr_w2_b": _draw(R, columns // 4), **ALPHA}


def _lokr_tucker(rows: int, columns: int) -> Tensors:
    pair = {"lokr_w2_a": _draw(R, rows // 4), "lokr_w2_b": _draw(R, columns // 4), "lokr_t2": _draw(R, R, 1, 1)}
    return {"lokr_w1_a": _draw(4, R), "lokr_w1_b": _draw(R, 4), **pair, **ALPHA}


def _glora(rows: int, columns: int) -> Tensors:
    a = {"a1.weight": _draw(columns, R), "a2.weight": _draw(R, columns)}
    return a | {"b1.weight": _draw(rows, R), "b2.weight": _draw(R, columns), **ALPHA}


def _old_glora(rows: int, columns: int) -> Tensors:
    a = {"a1.weight": _draw(R, columns), "a2.weight": _draw(columns, R)}
    return a | {"b1.weight": _draw(R, columns), "b2.weight": _draw(rows, R), **ALPHA}


def _oft(rows: int, _: int) -> Tensors:
    return {"oft_blocks": _draw(rows // 8, 8, 8), "alpha": torch.tensor(0.0)}


def _boft(rows: int, _: int) -> Tensors:
    return {"oft_blocks": _draw(2, rows // 8, 8, 8), "rescale": 1 + _draw(rows, 1), "alpha": torch.tensor(0.5)}


FOREIGN: dict[str, Callable[[int, int], Tensors]] = {
    "lora": _lora,
    "lora with a middle": lambda o, i: _as_convolutions(_lora(o, i)) | {"lora_mid.weight": _draw(R, R, 1, 1)},
    "dora by columns": lambda o, i: _lora(o, i) | {"dora_scale": 1 + _draw(1, i)},
    "dora by rows": lambda o, i: _lora(o, i) | {"dora_scale": 1 + _draw(o, 1)},
    "loha": _loha,
    "loha with cores": _loha_tucker,
    "loha with dora_scale": lambda o, i: _loha(o, i) | {"dora_scale": 1 + _draw(1, i)},
    "lokr": _lokr,
    "lokr with a core": _lokr_tucker,
    "lokr with dora_scale": lambda o, i: _lokr(o, i) | {"dora_scale": 1 + _draw(1, i)},
    "glora": _glora,
    "old glora": _old_glora,
    "glora with dora_scale": lambda o, i: _glora(o, i) | {"dora_scale": 1 + _draw(1, i)},
    "oft": _oft,
    "oft constrained": lambda o, i: _oft(o, i) | {"alpha": torch.tensor(0.5)},
    "oft with dora_scale": lambda o, i: _oft(o, i) | {"alpha": torch.tensor(0.5), "dora_scale": 1 + _draw(1, i)},
    "boft": _boft,
    "boft with dora_scale": lambda o, i: _boft(o, i) | {"dora_scale": 1 + _draw(1, i)},
    "diff": lambda o, i: {"diff": _draw(o, i)},
    "w_norm": lambda o, i: {"w_norm": _draw(o, i)},
    "set_weight": lambda o, i: {"set_weight": _draw(o, i)},
}


def foreign(form: str, layers: dict[str, tuple[int, int]]) -> Tensors:
    """A file of this form for these layers: their names in the file with (out, in) of each."""
    _SOURCE.manual_seed(len(form))
    return {
        f"{name}.{suffix}": tensor.clone()
        for name, shape in layers.items()
        for suffix, tensor in FOREIGN[form](*shape).items()
    }
