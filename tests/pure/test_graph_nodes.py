"""Nothing holds a node of autograd's graph without a tensor that holds it too.

The Python object of a node (`grad_fn`, and `ctx` in a custom Function) does not keep what the node has saved: torch
2.11 frees that as soon as no tensor and no later node leads to it, newer ones let it stay. The same code then trains
here and fails there, so the form itself is what these tests look for.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "memory", "models", "compile", "lora", "data", "train", "nodes")
COLLECTING = {"append", "add", "insert", "extend", "setdefault", "put"}


def held_nodes(code: str) -> list[int]:
    """Return the lines in which a node outlives the tensor beside it, or the call of a custom Function."""
    tree = ast.parse(code)
    parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def is_kept(node: ast.expr) -> bool:
        outer = parent[node]
        if isinstance(outer, ast.Assign | ast.AnnAssign):
            targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
            return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
        if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute):
            return node in outer.args and outer.func.attr in COLLECTING
        return isinstance(outer, ast.Return | ast.Yield)

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad_fn":
            if isinstance(node.value, ast.Call) or is_kept(node):
                lines.append(node.lineno)
        elif isinstance(node, ast.Name) and node.id == "ctx" and is_kept(node):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_graph_nodes_are_held_with_their_tensors_only(folder):
    violations = {
        f"{file.relative_to(ROOT)}:{line}"
        for file in (ROOT / folder).rglob("*.py")
        for line in held_nodes(file.read_text("utf-8"))
    }
    assert not violations


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("self.inputs = Saved.apply(anchor, *tensors).grad_fn", True),
        ("self.node = out.grad_fn", True),
        ("nodes[0] = out.grad_fn", True),
        ("nodes.append(out.grad_fn)", True),
        ("def node(out): return out.grad_fn", True),
        ("def forward(ctx, x): kept.append(ctx)", True),
        ("def forward(ctx, x): table[0] = ctx", True),
        ("def forward(ctx, x): ctx.save_for_backward(x)", False),
        ("def forward(ctx, x): save(ctx, x)", False),
        ("saved = self.inputs.grad_fn.saved_tensors", False),
        ("assert out.grad_fn is not None", False),
        ("nodes = [end.grad_fn for end in ends]", False),
    ],
)
def test_code_that_is_taken_for_holding_a_node(code, expected):
    assert bool(held_nodes(code)) == expected
