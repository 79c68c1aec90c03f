"""Pass over inductor's graphs that adds products in place, for a torch whose addmm copies what it adds to.

Forward, a LoRA's product is added to the frozen Linear's, and back the products that make up an input's gradient are
added to each other:

    y  = addmm(b, x, Wᵀ)        dx = mm(dy, W)
    y' = addmm(y, h, upᵀ)       dx' = addmm(dx, dh, down)

Each second line becomes an op that writes to y or dx, if nothing else reads that. Inductor itself then shows that this
is safe, or makes the copy. Importing this module imports inductor, which takes seconds.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_ADDMM = torch.ops.aten.addmm.default
_LINEARS = ("stored_linear", "quantised_linear", "low_bit_linear")
_LIBRARY = torch.library.Library("tessera", "FRAGMENT")  # `custom_op` takes twice the host's time at each call


def add_product_(y: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right, (rows, k) · (k, columns), to y in place."""
    y.addmm_(left, right)


if not hasattr(torch.ops.tessera, add_product_.__name__):
    _LIBRARY.define(f"{add_product_.__name__}(Tensor(a!) y, Tensor left, Tensor right) -> ()")
    _LIBRARY.impl(add_product_.__name__, add_product_, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tessera::{add_product_.__name__}", lambda *_: None, lib=_LIBRARY)


def _matmuls() -> set[Any]:
    """Return the operators that give a new tensor of a matmul."""
    names = _LINEARS + tuple(f"{name}_input_grad" for name in _LINEARS)
    operators = (getattr(torch.ops.tessera, name, None) for name in names)
    return {torch.ops.aten.mm.default, _ADDMM} | {operator.default for operator in operators if operator is not None}


class AddProductsInPlace(CustomGraphPass):
    """Rewrite each addmm that only adds to the result of another matmul. Call it with a graph."""

    def __call__(self, graph: Graph) -> None:
        matmuls = _matmuls()
        sums: set[Node] = set()
        for node in list(graph.nodes):  # in their order, so that the second sum of a chain finds the first
            if node.target is not _ADDMM or node.kwargs:
                continue
            y, left, right = node.args
            is_result = y.target in matmuls or y in sums
            if is_result and len(y.users) == 1 and _same_shape(y, node):
                sums.add(_add_in_place(graph, node, y, left, right))

    def uuid(self) -> bytes:
        """Return the key of this code for the caches of compiled graphs."""
        return get_hash_for_files((__file__,))


def _same_shape(y: Node, total: Node) -> bool:
    """Return False for one row that is added to all."""
    pairs = zip(y.meta["val"].shape, total.meta["val"].shape, strict=True)
    return all(statically_known_true(a == b) for a, b in pairs)


def _add_in_place(graph: Graph, node: Node, y: Node, left: Node, right: Node) -> Node:
    """Replace an addmm by the op, in the form without side effects that inductor has for such ops."""
    functional, op = torch.ops.higher_order.auto_functionalized, torch.ops.tessera.add_product_.default
    with graph.inserting_before(node):
        pair = graph.call_function(functional, (op,), {"y": y, "left": left, "right": right})
        total = graph.call_function(operator.getitem, (pair, 1))
    pair.meta["val"] = (None, node.meta["val"])
    total.meta.update(node.meta)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total


ADD_PRODUCTS_IN_PLACE = AddProductsInPlace()
"""The one object of all regions: torch compares options to see whether it can take a graph again."""
