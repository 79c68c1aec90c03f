"""The guards over sizes that fail, one by one: torch checks those of a graph as one."""

import pytest
import torch
from tessera.compile.report.guards import failed_guards
from torch._dynamo.eval_frame import _debug_get_cache_entry_list


def branching(x, n):
    if 2 * x.shape[0] > n and x.shape[0] % 4 == 0 and x.shape[1] != 7:
        return x.sin()
    return x.cos()


@pytest.mark.parametrize(
    ("shape", "n", "failed"),
    [
        ((6, 5), 3, ("(x.size()[0] % 4) == 0",)),
        ((8, 7), 30, ("2*x.size()[0] > n", "x.size()[1] != 7")),
        ((12, 9), 4, ("no guard fails any more",)),
    ],
)
def test_only_the_conditions_on_sizes_that_fail_are_told(shape, n, failed):
    torch._dynamo.reset()
    torch.compile(branching, backend="eager", dynamic=True)(torch.ones(8, 5), 3)
    (entry,) = _debug_get_cache_entry_list(branching.__code__)
    assert failed_guards(entry.guard_manager, {"x": torch.ones(shape), "n": n}) == failed
