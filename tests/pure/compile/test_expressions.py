"""The expressions of torch's guards are read; nothing else that stands in a text is done."""

import os
from types import SimpleNamespace

import pytest
from tessera.compile.report.expressions import value_of

BLOCK = SimpleNamespace(_modules={"norm": SimpleNamespace(eps=1e-6), "mlp": [1, 2, 3]}, size=lambda: (4, 6))
NAMES = {
    "L": {"block": BLOCK, "x": 5, "flags": {"a": True}},
    "G": {"torch": SimpleNamespace(float32="float32"), "__import_os": os},
    "___tuple_iterator_len": len,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("L['block']._modules['norm'].eps", 1e-6),
        (" L['x'] <= 5  # y = x + 1  # model.py:3 in forward", True),
        ("2 <= L['block'].size()[1] < 6", False),
        ("L['block'].size()[0] * 2 == 8 and not L['x'] != 5", True),
        ("(L['block'].size()[1] % 4) // 2 - -L['x']", 6),
        ("list(dict.keys(L['block']._modules))[1]", "mlp"),
        ("dict(type(L['x']).__dict__)['__doc__'][:3]", "int"),
        ("L['block']._modules['mlp'][-2:]", [2, 3]),
        ("___tuple_iterator_len(L['block']._modules['mlp']) in (3, 4)", True),
        ("G['torch'].float32 is None or L['flags']['a']", True),
    ],
)
def test_an_expression_is_read(text, value):
    assert value_of(text, NAMES) == value


@pytest.mark.parametrize(
    "text",
    [
        "G['__import_os'].getcwd()",
        "__import__('os')",
        "G['__import_os'].system('true')",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "str.format('{}', 1)",
        "getattr(L['block'], 'size')",
        "type(L['x'])(3)",
        "len(obj=(1,))",
        "(y := 3)",
        "f'{1}'",
    ],
)
def test_an_expression_does_nothing_else(text):
    with pytest.raises(ValueError, match="no expression of a guard"):
        value_of(text, NAMES)


def test_names_that_are_gone_are_errors_of_reading():
    for text, error in (("L['y']", KeyError), ("L['x'].eps", AttributeError), ("z", KeyError)):
        with pytest.raises(error):
            value_of(text, NAMES)
