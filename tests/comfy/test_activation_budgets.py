"""Every activation budget of selective checkpointing gives the same gradients, for more or less computed again."""

from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from tessera.train.settings import MemoryOptions
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_every_activation_budget_gives_the_same_gradients(check_gradients, backend, budget):
    torch._dynamo.reset()
    check_gradients(CASES["flux-dev"], "shapes", 1, mode="selective", activation_budget=budget, backend=backend)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_an_eager_budget_is_the_part_of_the_products_that_is_not_computed_again(tiny_flux, tmp_path):
    def products(mode: str, budget: float = 0.5) -> tuple[int, int]:
        """Matrix products and attentions of a forward and its backward."""
        memory = MemoryOptions(checkpointing=mode, activation_budget=budget)
        trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, memory=memory)
        with Ops() as ops:
            trainer.forward_backward([tiny.shown(0)])
        trainer.close()
        attentions = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
        return ops.counts["mm"] + ops.counts["addmm"], attentions

    (least, attentions), whole = products("none"), products("full")
    blocks, again = 4, whole[0] - least
    assert attentions == blocks and whole[1] == 2 * blocks and again > 10 * blocks
    assert products("selective", 0.0) == whole
    assert products("selective", 1.0) == (least, attentions)
    for budget in (0.25, 0.75):
        found, kept = products("selective", budget)
        # Of each block's products so many as are whole.
        assert 0 <= found - least - (1 - budget) * again < blocks and kept == attentions
