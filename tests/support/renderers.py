"""The frontend's two renderers as cases of a test."""

import pytest
from thinned import one_in

CASES = {"canvas renderer": False, "new renderer": True}


def renderers(first: str) -> pytest.MarkDecorator:
    """Parametrize a test's `new_renderer` by both renderers: `first`, one of CASES, in every run, the other in the wide
    one."""
    order = sorted(CASES, key=lambda name: name != first)
    return pytest.mark.parametrize("new_renderer", one_in(2, [CASES[name] for name in order]), ids=order)
