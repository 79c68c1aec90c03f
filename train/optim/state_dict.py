"""Lossless conversion of a nested state, such as an optimizer's `state_dict`, to named tensors and plain JSON.

safetensors holds named tensors only, and a state file is untrusted input, so nothing is pickled. The tree goes to JSON:
a tensor is replaced by its name, and types unknown to JSON (tuples, numeric keys, infinity) are tagged.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def pack_state(state: Any, prefix: str = "") -> tuple[dict[str, Tensor], Json]:
    """Pack a state of dicts, lists, tuples, tensors, numbers, strings, booleans and None into (tensors, tree).

    The tensors are contiguous copies on the CPU, named by their path below `prefix`. A tensor that occurs several times
    (the code table of 8-bit moments) is stored once. `json.dumps(tree, allow_nan=False)` is exact.

    Raises TypeError for any other type.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def pack(value: Any, path: str) -> Json:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            assert not hasattr(value, "__tensor_flatten__"), type(value)
            if id(value) not in names:
                assert path not in tensors, path
                names[id(value)] = path
                tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": names[id(value)]}
        if isinstance(value, Mapping):
            return {"dict": [[pack(k, path), pack(v, f"{path}.{k}")] for k, v in value.items()]}
        if type(value) in (list, tuple):
            packed = [pack(item, f"{path}.{place}") for place, item in enumerate(value)]
            return packed if type(value) is list else {"tuple": packed}
        raise TypeError(f"{path} is a {type(value).__name__}, which a saved state cannot hold.")

    return tensors, pack(state, prefix)


def unpack_state(tensors: Mapping[str, Any], tree: Json) -> Any:
    """Restore the state that `pack_state` packed. Mappings become dicts; tensors are returned without a copy.

    tensors: the tensors by name, or objects to return in their place.

    Raises ValueError if a tensor is missing or the tree was not made by `pack_state`.
    """
    if isinstance(tree, list):
        return [unpack_state(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"dict": list(items)} if all(isinstance(item, list) and len(item) == 2 for item in items):
            pairs = [(unpack_state(tensors, key), unpack_state(tensors, value)) for key, value in items]
            try:
                return dict(pairs)
            except TypeError:
                raise ValueError("The saved state has a list or a dict as a key; start from another file.") from None
        case {"tuple": list(items)}:
            return tuple(unpack_state(tensors, item) for item in items)
        case {"float": str(text)}:
            return float(text)
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"tensor": str(name)}:
            raise ValueError(
                f"The saved state lacks the tensor {name!r}; the file is damaged, so choose another state."
            )
    raise ValueError(f"The saved state holds {str(tree)[:60]!r}, which is no part of a state; start from another file.")
