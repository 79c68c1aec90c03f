"""A call of a model that may have to be made again."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


def kept_for_another(value: Any) -> Any:
    """The same tensors in lists and dicts of their own: a UNet takes what a ControlNet gave out of its lists, so that
    the same arguments would not be the same for a second call. What else they hold is handed on as it is."""
    return tree_map_only(Tensor, lambda tensor: tensor, value)
