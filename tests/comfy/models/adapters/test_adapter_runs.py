"""Runs of every adapter: resume bit for bit, the graphs that are planned, dropout, automatic memory."""

from itertools import product

import pytest
import tiny
import torch
from tessera.lora.dropout import sample_masks
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import network_notes
from tessera.models.flux.family import Flux
from tessera.train.config.settings import MemoryOptions
from tessera.train.optim.optimizers import build_optimizer
from tessera.train.optim.options import OptimizerOptions
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.lora.adapters import ALGORITHMS, fill
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import mixed_data, train

DROPOUTS = {"rank_dropout": 0.3, "module_dropout": 0.2}


OPTIMIZERS = ("adamw", "adamw8bit", "prodigy", "adafactor", "came", "adamw_schedulefree", "lion", "muon")
REFUSED = {("dora", "muon"), ("oft", "muon"), ("oft constrained", "muon")}
# Each algorithm with every other optimizer, in turn, so that each of these meets every other one of those.
PAIRS = [
    (name, optimizer)
    for row, name in enumerate(ALGORITHMS)
    for optimizer in OPTIMIZERS[row % 2 :: 2]
    if (name, optimizer) not in REFUSED and name != "lora"
]


def skip_where_8bit_does_not_run():
    pytest.importorskip("bitsandbytes")
    try:
        build_optimizer(OptimizerOptions("adamw8bit"), [torch.nn.Parameter(torch.zeros(1))])
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("name", "optimizer"), one_in(4, PAIRS))
def test_a_resumed_run_learns_the_same_bits(tiny_flux, tmp_path, name, optimizer):
    """Cancelled amid and gone on, it learns the same bits; with dropout, so that this is drawn alike."""
    if optimizer == "adamw8bit":
        skip_where_8bit_does_not_run()
    network = {**ALGORITHMS[name], **DROPOUTS}
    steps = {"optimizer": optimizer, "learning_rate": 1e-3}
    whole = resumed_as_whole(tiny_flux, mixed_data(), tmp_path, network=network, batch_size=2, optimizer=steps)
    zero_at_start = ("lora_up.weight", "hada_w2_a", "lokr_w2", "lokr_w2_b", "oft_blocks")
    assert all(tensor.any() for key, tensor in whole.lora.items() if key.endswith(zero_at_start))


def test_muon_is_refused_where_there_is_more_than_matrices(tiny_flux, tmp_path):
    for name, kind in (("dora", "a vector of lengths for each layer too"), ("oft", "stacks of blocks")):
        with pytest.raises(ValueError, match=f"muon trains matrices only, and {name} trains {kind}; choose another"):
            train(tiny_flux, mixed_data(), tmp_path, network=ALGORITHMS[name], optimizer={"optimizer": "muon"})


def test_every_kind_of_dropout_keeps_the_planned_graphs_and_its_note_counts_them(tiny_flux, tmp_path):
    torch._dynamo.reset()
    patterns = "single_blocks.0.*: rank=2\ndouble_blocks.*.img_mlp.*: rank=8"
    network = NetworkOptions("dora", 4, 8.0, dropout=0.1, rank_patterns=patterns, **DROPOUTS)
    graphs = Graphs()
    data = tiny.make_data([(4, 4), (2, 8)], [16, 16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend="aot_eager", steps=4, network=network)
    trainer.run()
    family = Flux()
    notes = network_notes(network, family, tiny_flux.model, list(trainer.network.adapters))
    assert "rank_patterns split 2 block types into 3, and each is compiled separately: 3 graphs for each" in notes[-1]
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 3
    assert graphs.breaks == 0
    ranks = {n: a.spec.rank for n, a in trainer.network.adapters.items()}
    assert ranks["single_blocks.0.linear1"] == 2 and ranks["single_blocks.1.linear1"] == 4
    assert ranks["double_blocks.1.img_mlp.2"] == 8 and ranks["double_blocks.1.txt_mlp.2"] == 4
    trainer.close()


def test_a_recompute_sees_the_same_dropout(tiny_flux, tmp_path):
    data, gradients = tiny.make_data([(4, 4), (2, 8)], [16, 16]), []
    network = NetworkOptions("dora", 4, 8.0, dropout=0.2, **DROPOUTS)
    for mode in ("none", "full"):
        memory = MemoryOptions(checkpointing=mode)
        trainer = tiny.make_trainer(tiny_flux, data, tmp_path, batch_size=2, network=network, memory=memory)
        for index, adapter in enumerate(trainer.network.adapters.values()):
            fill(adapter, index)
        trainer.train_step.forward_backward([tiny.micro_batch(0, 1)])
        gradients.append([p.grad.clone() for p in trainer.network.parameters()])
        trainer.close()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert sum(float(g.abs().sum()) for g in gradients[0]) > 0


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_dropout_is_as_frequent_as_asked(tiny_flux, tmp_path, name):
    network = NetworkOptions(**ALGORITHMS[name])
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)] * 4, [16] * 4), tmp_path, network=network)
    block = trainer.placed.weights.transformer.blocks()[-1][1]
    inputs = batch_inputs(trainer)

    def draw_masks(kind, step, p=0.3):
        options = NetworkOptions(**{**ALGORITHMS[name], kind: p})
        return sample_masks(options, block, inputs, 3, ("dropout", step), torch.float32)

    adapter = block.linears()["linear1"].adapter
    kinds = adapter.drops
    assert ("dropout" in kinds) == (adapter.algorithm in ("lora", "dora"))
    for kind in kinds:
        masks = [draw_masks(kind, step)["linear1"].update for step in range(60)]
        values = torch.stack(masks)
        scaled = kind != "module_dropout" and (kind == "dropout" or adapter.algorithm != "oft")
        assert set(values.unique().tolist()) == {0.0, torch.tensor(1 / 0.7 if scaled else 1.0).item()}
        rows = {"dropout": 16 + 16, "rank_dropout": 1, "module_dropout": 1}[kind]
        width = 1 if kind == "module_dropout" else adapter.drop_width()
        assert values.shape[1:] == (4, rows, width)
        share = float((values == 0).float().mean())
        assert abs(share - 0.3) < 4 * (0.21 / values.numel()) ** 0.5, kind
        assert torch.equal(draw_masks(kind, 7)["linear1"].update, masks[7])
        whole = draw_masks(kind, 0)["linear1"].without_drops().update
        assert bool((whole == 1).all())
    if adapter.algorithm == "dora":
        mask = draw_masks("module_dropout", 0)["linear1"]
        assert mask.module is not None and torch.equal(mask.module, mask.update)
    trainer.close()


def test_each_kind_of_dropout_is_drawn_by_itself(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path)
    block, inputs = trainer.placed.weights.transformer.blocks()[-1][1], batch_inputs(trainer)

    def is_kept(kind, step):
        options = NetworkOptions(**{**ALGORITHMS["lora"], kind: 0.5})
        masks = sample_masks(options, block, inputs, 3, ("dropout", step), torch.float32)
        return bool(masks["linear1"].update[0, 0, 0])

    kinds = ("dropout", "rank_dropout", "module_dropout")
    patterns = {tuple(is_kept(kind, step) for kind in kinds) for step in range(60)}
    assert patterns == set(product((False, True), repeat=3))
    trainer.close()


def batch_inputs(trainer):
    from tessera.train.objective.batch import make_batch

    samples = [(sample, sample.load()) for sample in trainer.context.data.samples]
    return make_batch(
        trainer.context.patcher, trainer.context.family, samples, trainer.settings.objective, trainer.device, 3, (0, 0)
    ).inputs


def test_automatic_memory_measures_the_adapter_and_trains_the_same(tiny_flux, tmp_path):
    memory = {"blocks_to_swap": -1, "checkpointing": "auto"}
    automatic = train(tiny_flux, mixed_data(), tmp_path / "auto", network=ALGORITHMS["dora"], memory=memory)
    other = train(tiny_flux, mixed_data(), tmp_path / "plain", network=ALGORITHMS["dora"])
    assert automatic.summary["memory_plan"] and automatic.loss == pytest.approx(other.loss, rel=1e-5)
