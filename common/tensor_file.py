"""Tensors out of a safetensors file, fit to be trained on."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors on the host, in the dtype in which they were saved, and the file's metadata.

    ComfyUI runs nodes in inference mode, whose tensors autograd refuses, so they are made outside it. They are copies:
    what safetensors gives lies in the mapped file, which Windows then could neither replace nor delete. Raises OSError
    or SafetensorError where there is no whole file.
    """
    with torch.inference_mode(False), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})
