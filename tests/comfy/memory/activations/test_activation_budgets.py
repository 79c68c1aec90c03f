"""Every activation budget of selective checkpointing gives the same gradients, for more or less computed again."""

from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from tessera.memory.activations.checkpointing import full, selective_compiled, selective_eager
from tessera.memory.activations.results import ResultBytes
from tessera.memory.swap.block_cost import LEAST_BUDGET
from tessera.train.config.settings import MemoryOptions
from thinned import one_in
from tiny.compile.compiling import Ops
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("unchecked")


BUDGETS = [("aot_eager", 0.3), (None, 0.3), (None, 0.0), ("aot_eager", 0.0), ("aot_eager", 1.0), (None, 1.0)]


@pytest.mark.parametrize(("backend", "budget"), one_in(2, BUDGETS))
def test_every_activation_budget_gives_the_same_gradients(check_gradients, backend, budget):
    torch._dynamo.reset()
    check_gradients(CASES["flux-dev"], "shapes", 1, mode="selective", activation_budget=budget, backend=backend)


def test_an_eager_budget_is_the_part_of_the_products_that_is_not_computed_again(tiny_flux, tmp_path):
    def products(mode: str, budget: float = 0.5) -> tuple[int, int]:
        """Matrix products and attentions of a forward and its backward."""
        memory = MemoryOptions(checkpointing=mode, activation_budget=budget)
        trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, memory=memory)
        with Ops() as ops:
            trainer.train_step.forward_backward([tiny.micro_batch(0)])
        trainer.close()
        attentions = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
        return ops.counts["mm"] + ops.counts["addmm"], attentions

    (least, attentions), whole = products("none"), products("full")
    blocks, recomputed = 4, whole[0] - least
    assert attentions == blocks and whole[1] == 2 * blocks and recomputed > 10 * blocks
    assert products("selective", 0.0) == whole
    assert products("selective", 1.0) == (least, attentions)
    assert products("selective", LEAST_BUDGET) == (whole[0], attentions)  # full, but for attention's second run
    for budget in (0.25, 0.75):
        actual, attention_count = products("selective", budget)
        # Of each block's products so many as are whole.
        assert 0 <= actual - least - (1 - budget) * recomputed < blocks and attention_count == attentions


def parallel_block(x, wide, narrow):
    """Attention beside an MLP, as FLUX's single blocks have it. x: (1, T, D)."""
    qkv, hidden = linear(x, wide).split((3 * x.shape[-1], wide.shape[0] - 3 * x.shape[-1]), dim=-1)
    q, k, v = qkv.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return x + linear(torch.cat((attended, gelu(hidden)), dim=-1), narrow)


def attentions_of_backward(budget: float) -> int:
    """Attentions that the backward of a compiled block computes again."""
    torch._dynamo.reset()
    counts: Counter[str] = Counter()

    def recorded(graph: Any, inputs: Any) -> Any:
        counts.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=recorded,
        partition_fn=min_cut_rematerialization_partition,
    )
    width = 16
    weights = [torch.randn(7 * width, width), torch.randn(width, 5 * width)]
    x = torch.randn(1, 48, width, requires_grad=True)
    run = selective_compiled(torch.compile(parallel_block, backend=backend, fullgraph=True), budget)
    run(x, *(weight.requires_grad_() for weight in weights)).sum().backward()
    assert any("attention" in name and "backward" in name for name in counts)
    return sum(n for name, n in counts.items() if "attention" in name and "backward" not in name)


def test_the_gpus_attention_is_not_computed_again_at_the_least_budget() -> None:
    """The op of a GPU gives tensors of random states too; here in bf16 on the meta device."""
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    weight = torch.randn(16, 16, dtype=torch.bfloat16, device="meta")

    def attend(q: Any, k: Any, v: Any) -> Any:
        heads = (x @ weight for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(*heads)[0] * 2

    counts = {}
    for name, run in (("full", full(attend)), ("least", selective_eager(attend, LEAST_BUDGET))):
        with Ops() as ops:
            run(q, k, v).sum().backward()
        counts[name] = [ops.counts[f"_scaled_dot_product_flash_attention{way}"] for way in ("", "_backward")]
    assert counts == {"full": [2, 1], "least": [1, 1]}
    with ResultBytes() as results:
        attend(q, k, v)
    # The result in bf16, its log-sum-exp in fp32, and three numbers of the random state.
    assert results.attention == 2 * 8 * 16 * 2 + 2 * 8 * 4 + 3 * 8


@pytest.mark.parametrize("budget", [LEAST_BUDGET, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
def test_a_compiled_budget_never_computes_attention_again(budget):
    assert attentions_of_backward(budget) == 0


def test_attention_is_computed_again_without_a_budget():
    assert attentions_of_backward(0.0) == 1
