"""Storage format of a quantised weight: its layout, shape and constants, without its tensors."""

import dataclasses
import functools
import json
from typing import NamedTuple

from comfy.quant_ops import QuantizedTensor
from torch import Tensor

from ....common.core import quantised_layout, quantised_params

# Parameters common to all layouts; the others are a layout's own tensors and constants.
_OF_ALL = ("orig_dtype", "orig_shape")


class Format(NamedTuple):
    """Storage format of a quantised weight, without its tensors.

    layout: name of ComfyUI's class, or of a GGUF format.
    shape: (out, in) of the dequantised weight.
    tensors: names of the layout's tensors.
    constants: the layout's other parameters.
    """

    layout: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    constants: dict[str, bool | int | float | str | None]

    def text(self) -> str:
        """Encode for the ops as a graph constant, equal for weights of equal format."""
        return json.dumps([self.layout, self.shape, self.tensors, self.constants], sort_keys=True)


@functools.cache
def read_format(text: str) -> Format:
    """Decode `Format.text`."""
    layout, shape, tensors, constants = json.loads(text)
    return Format(layout, tuple(shape), tuple(tensors), constants)


def format_of(weight: QuantizedTensor) -> Format | None:
    """Describe the weight's storage format.

    None if the weight cannot be rebuilt from its parts and constants, or if its parts store its transpose.
    """
    params = quantised_params(weight)
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in _OF_ALL}
    tensors = tuple(name for name, value in fields.items() if isinstance(value, Tensor))
    constants = {name: value for name, value in fields.items() if name not in tensors}
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in constants.values())
    if not plain or constants.get("transposed") or len(params.orig_shape) != 2:
        return None
    rows, columns = params.orig_shape
    return Format(quantised_layout(weight), (int(rows), int(columns)), tensors, constants)
