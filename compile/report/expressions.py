"""Evaluate the expressions in torch's guards: names, attributes, items, comparisons and a few calls, nothing else.

A guard's text comes from the names and keys of a model, and so in part from an untrusted file.
"""

import ast
import operator
from collections.abc import Mapping
from typing import Any

# Names of torch's own helpers begin with ___; these are the other functions and methods in its guards.
_FUNCTIONS = {
    function.__name__: function for function in (abs, bool, dict, float, int, len, list, max, min, str, tuple, type)
}
_METHODS = {"keys", "size", "storage_offset", "stride"}
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression. names: the values of its names.

    Raises ValueError for syntax that no guard uses, such as another call; errors from missing values propagate.
    """
    return _value(ast.parse(text.strip(), mode="eval").body, names)


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    def evaluate(inner: ast.AST) -> Any:
        return _value(inner, names)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name] if name in names else _FUNCTIONS[name]
        case ast.Attribute(value=inner, attr=name):
            return getattr(evaluate(inner), name)
        case ast.Subscript(value=inner, slice=key):
            return evaluate(inner)[evaluate(key)]
        case ast.Slice():
            return slice(*(None if part is None else evaluate(part) for part in (node.lower, node.upper, node.step)))
        case ast.Tuple(elts=items):
            return tuple(evaluate(item) for item in items)
        case ast.List(elts=items):
            return [evaluate(item) for item in items]
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(left), evaluate(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(evaluate(value) for value in values)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            values = [evaluate(left), *(evaluate(other) for other in comparators)]
            return all(_OPERATORS[type(op)](values[i], values[i + 1]) for i, op in enumerate(ops))
        case ast.Call(func=function, args=arguments, keywords=[]) if _may_be_called(function):
            return evaluate(function)(*(evaluate(item) for item in arguments))
    raise ValueError(f"no expression of a guard: {ast.unparse(node)[:100]}")


def _may_be_called(function: ast.AST) -> bool:
    match function:
        case ast.Name(id=name):
            return name in _FUNCTIONS or name.startswith("___")
        case ast.Attribute(attr=name):
            return name in _METHODS
    return False
