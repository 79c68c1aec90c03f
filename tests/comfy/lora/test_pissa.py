"""PiSSA begins at the model bit for bit, has the gradients of the paper's A and B, and loads on the model itself."""

import pytest
import tiny
import torch
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.models.adapters.base import AdapterSpec, DropMask
from tessera.models.adapters.pissa import PissaAdapter, largest_parts
from tessera.train.config.settings import MemoryOptions
from tiny.lora.lora_files import loaded_in_comfyui, patched_deltas
from tiny.train.resuming import resumed_as_whole
from tiny.train.runs import mixed_data, train

PISSA = {"init": "pissa"}
RANK, ALPHA = 4, 6.0


def weight_of(rows: int, columns: int) -> torch.Tensor:
    """A weight whose singular values fall by a tenth each."""
    left, right = (torch.linalg.qr(torch.randn(n, 24, generator=generator(0, n)).double())[0] for n in (rows, columns))
    return (left * 3 * 0.9 ** torch.arange(24) @ right.T).float()


def adapter_on(weight: torch.Tensor) -> PissaAdapter:
    adapter = PissaAdapter(AdapterSpec("lora", RANK, ALPHA, init="pissa"), *weight.shape)
    adapter.start(generator(1, "start"), lambda: FrozenLinear(weight, None, None))
    return adapter


def test_pissa_begins_at_the_largest_singular_parts():
    weight = weight_of(60, 40)
    adapter, (left, sizes, right) = adapter_on(weight), torch.linalg.svd(weight.double())
    best = left[:, :RANK] * sizes[:RANK] @ right[:RANK]
    product = ALPHA / RANK * adapter.up_start.double() @ adapter.down_start.double()
    assert (product - best).norm() < 1e-3 * best.norm()
    # A and B share the sizes evenly.
    torch.testing.assert_close(adapter.up_start.norm(dim=0), adapter.down_start.norm(dim=1), rtol=1e-4, atol=0)
    assert torch.equal(adapter_on(weight).up_start, adapter.up_start)
    _, all_sizes, _ = largest_parts(weight, 100, generator(0))
    torch.testing.assert_close(all_sizes.double(), sizes, rtol=1e-4, atol=1e-4)
    scaled = PissaAdapter(adapter.spec, *weight.shape)
    scaled.start(
        generator(1, "start"), lambda: FrozenLinear(weight.div(4).to(torch.float8_e4m3fn), torch.tensor(4.0), None)
    )
    assert (scaled.up_start @ scaled.down_start - adapter.up_start @ adapter.down_start).norm() < 0.1 * best.norm()


@pytest.mark.parametrize("width", [RANK, 1, None])
def test_outputs_and_gradients_are_those_of_the_paper_in_fp64(width):
    """y = (W − s·B₀·A₀)·x + s·B·A·x by autograd in A and B, with a mask over A's outputs in both products."""
    weight = weight_of(60, 40)
    adapter, x = adapter_on(weight), torch.randn(2, 5, 40, generator=generator(3))
    grad = torch.randn(2, 5, 60, generator=generator(4))
    mask = None if width is None else (torch.rand(2, 5, width, generator=generator(5)) > 0.4).float() / 0.6
    frozen = FrozenLinear(weight, None, None)
    assert torch.equal(adapter(x, frozen, None if mask is None else DropMask(mask)), frozen.apply(x))
    with torch.no_grad():
        for p in adapter.parameters():
            p.copy_(0.05 * torch.randn(p.shape, generator=generator(6, str(p.shape))))
    down_start, up_start = adapter.down_start.double(), adapter.up_start.double()
    a = (down_start + adapter.down.double()).detach().requires_grad_()
    b = (up_start + adapter.up.double()).detach().requires_grad_()
    mask_factor = torch.ones(()).double() if mask is None else mask.double()
    inputs = x.double().requires_grad_()
    expected = inputs @ weight.double().T + ALPHA / RANK * (
        (inputs @ a.T * mask_factor) @ b.T - (inputs @ down_start.T * mask_factor) @ up_start.T
    )
    expected.backward(grad.double())
    x.requires_grad_()
    actual = adapter(x, frozen, None if mask is None else DropMask(mask))
    actual.backward(grad)
    pairs = {
        "y": (actual, expected),
        "x": (x.grad, inputs.grad),
        "a": (adapter.down.grad, a.grad),
        "b": (adapter.up.grad, b.grad),
    }
    for name, (value, reference) in pairs.items():
        assert (value.double() - reference).norm() < 1e-5 * reference.norm(), name


def test_small_changes_in_bf16_are_no_difference_of_large_numbers():
    """Beside the same sum taken from A and B in bf16, which loses it among their roundings."""
    adapter, x = adapter_on(weight_of(60, 40)), torch.randn(1, 50, 40, generator=generator(3))
    nothing = FrozenLinear(torch.zeros(60, 40, dtype=torch.bfloat16), None, None)
    with torch.no_grad():
        for p in adapter.parameters():
            p.copy_(1e-4 * torch.randn(p.shape, generator=generator(6, str(p.shape))))
        a, b = adapter.down_start + adapter.down, adapter.up_start + adapter.up
        deltas = b.double() @ a.double() - adapter.up_start.double() @ adapter.down_start.double()
        expected = ALPHA / RANK * x.bfloat16().double() @ deltas.T
        actual = adapter(x.bfloat16(), nothing, None)
        low = [t.bfloat16() for t in (a, b, adapter.down_start, adapter.up_start)]
        naive = ALPHA / RANK * (x.bfloat16() @ low[0].T @ low[1].T - x.bfloat16() @ low[2].T @ low[3].T)
    error, other = ((y.double() - expected).norm() / expected.norm() for y in (actual, naive))
    assert error < 0.01 and other > 1


def test_the_first_step_starts_from_the_model_and_the_file_then_changes_nothing(tiny_flux, tmp_path):
    plain, pissa = (
        tiny.make_trainer(tiny_flux, mixed_data(), tmp_path / init, network=NetworkOptions(rank=4, init=init))
        for init in ("kaiming", "pissa")
    )
    saved = pissa.learner.snapshot()
    for name, module in saved.modules().items():
        assert module.rank == 8 and not (module.up @ module.down).any() and module.up.any(), name
    losses = [trainer.train_step.forward_backward([tiny.micro_batch(0)]) for trainer in (plain, pissa)]
    assert losses[0] == losses[1]
    assert all(p.grad.abs().max() > 0 for p in pissa.network.parameters())
    for trainer in (plain, pissa):
        trainer.close()


def test_a_run_goes_on_bit_for_bit_and_its_file_loads_on_the_model(tiny_flux, tmp_path, caplog):
    changes = {"network": PISSA | {"dropout": 0.2}, "optimizer": {"ema_decay": 0.5}}
    whole = resumed_as_whole(tiny_flux, mixed_data(), tmp_path, **changes)
    actual = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, whole.lora, caplog))
    trainer = tiny.make_trainer(
        tiny_flux, mixed_data(), tmp_path, network=NetworkOptions(rank=4, alpha=4.0, init="pissa")
    )
    starts = {n: (a.up_start.double(), a.down_start.double()) for n, a in trainer.network.adapters.items()}
    trainer.close()
    assert actual.keys() == starts.keys()
    for name, module in whole.lora.modules().items():
        up_start, down_start = starts[name]
        up, down = up_start + module.up[:, 4:].double(), module.down[4:].double()
        expected = up @ down - up_start @ down_start
        assert (actual[name] - expected).norm() < 1e-5 * expected.norm(), name
        assert torch.equal(module.up[:, :4].double(), up_start)
    plain = train(tiny_flux, mixed_data(), tmp_path / "plain", steps=1)
    assert plain.summary["key"] != whole.summary["key"]
    assert whole.lora.metadata["ss_network_dim"] == "8" and whole.lora.metadata["ss_network_alpha"] == "8.0"


def test_swapped_blocks_begin_alike_and_train_alike(tiny_flux, tmp_path):
    results = [
        train(
            tiny_flux,
            mixed_data(),
            tmp_path / str(swap),
            steps=3,
            network=PISSA,
            memory={"blocks_to_swap": swap, "checkpointing": "full"},
        )
        for swap in (0, 2)
    ]
    assert results[0].loss == results[1].loss
    assert all(torch.equal(results[0].lora[name], results[1].lora[name]) for name in results[0].lora)


def test_gaussian_draws_down_with_the_inverse_rank_for_its_spread(tiny_flux, tmp_path):
    """As PEFT's init_lora_weights='gaussian'."""
    for algorithm in ("lora", "dora"):
        network = NetworkOptions(algorithm, rank=8, init="gaussian")
        trainer = tiny.make_trainer(
            tiny_flux, mixed_data(), tmp_path, network=network, memory=MemoryOptions(checkpointing="full")
        )
        values = torch.cat([a.down.detach().flatten() for a in trainer.network.adapters.values()])
        assert float(values.std()) == pytest.approx(1 / 8, rel=2e-2) and abs(float(values.mean())) < 1e-3
        assert values.abs().max() > 3 / 8
        assert not any(a.up.any() for a in trainer.network.adapters.values())
        trainer.close()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"init": "xavier"}, "init is 'xavier'; choose one of kaiming, gaussian, pissa."),
        (
            {"init": "pissa", "algorithm": "loha"},
            "init is pissa, which is for lora, and algorithm is loha; set init to",
        ),
        (
            {"init": "gaussian", "algorithm": "oft"},
            "init is gaussian, which is for lora and dora, and algorithm is oft",
        ),
        ({"init": "pissa", "scale_weight_norms": 1.0}, "scale_weight_norms is 1 and init is pissa"),
    ],
)
def test_options_that_contradict_an_init_are_one_sentence(values, sentence):
    with pytest.raises(ValueError) as raised:
        NetworkOptions(**values)
    assert str(raised.value).startswith(sentence)


def test_blocks_of_a_kind_share_one_graph_and_no_step_compiles_again(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(
        tiny_flux,
        tiny.make_data([(4, 4)], [16]),
        tmp_path,
        backend="aot_eager",
        steps=3,
        network=NetworkOptions(rank=4, init="pissa", dropout=0.1),
    )
    trainer.run()
    facts = trainer.summary()
    assert facts["graphs_compiled"] == facts["graphs_planned"] == 2 and facts["graph_breaks"] == 0
    trainer.close()
