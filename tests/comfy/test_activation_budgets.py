"""Every activation budget of selective checkpointing gives the same gradients."""

import pytest
import torch
from family_cases import CASES


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_every_activation_budget_gives_the_same_gradients(check_gradients, backend, budget):
    torch._dynamo.reset()
    check_gradients(CASES["flux-dev"], "shapes", 1, mode="selective", activation_budget=budget, backend=backend)
