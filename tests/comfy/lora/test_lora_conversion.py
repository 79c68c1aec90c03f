"""Resize LoRA's `algorithm`: LoRA, LoKr and LoHa made into each other, by dense references in fp64 and by core's
patched weights."""

import json

import pytest
import tiny
import torch
from comfy.weight_adapter.base import factorization
from safetensors.torch import load_file, save_file
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.lora.tools.components import Size
from tessera.lora.tools.hadamard import Side, nearest_hadamard, solve_side
from tessera.lora.tools.kronecker import nearest_kronecker
from tessera.nodes.loras.tools import TesseraResizeLora
from tiny.lora.foreign_loras import foreign
from tiny.lora.lora_files import loaded_in_comfyui, patched_deltas

QKV, PROJ = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj"
SIZES = {QKV: (384, 128), PROJ: (128, 128)}


def draws(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def source():
    return torch.Generator().manual_seed(0)


def lora_of(deltas, rank, metadata=None):
    """A LoRA of these changes, exact if their rank is not above `rank`; alpha is not the rank."""
    modules = {}
    for name, delta in deltas.items():
        left, sizes, right = torch.linalg.svd(delta.double(), full_matrices=False)
        up, down = left[:, :rank] * sizes[:rank] * rank / 2.0, right[:rank]
        modules[name] = LowRank(down.float(), up.float(), 2.0)
    return LoraModel.from_modules(modules, metadata)


def resize(model, lora, algorithm, rank=0, factor=-1, blocks="", energy=1.0):
    return TesseraResizeLora.execute(lora, model, rank, blocks, energy, algorithm, factor)


def suffixes(lora):
    return {flat.removeprefix("lora_unet_"): set(parts) for flat, parts in lora.parts().items()}


def patched(model, lora, folder, caplog):
    """Return the change of the weights by core's loader, for a file of the LoRA."""
    save_file(convert(lora), folder / "lora.safetensors")
    return patched_deltas(model, loaded_in_comfyui(model, load_file(folder / "lora.safetensors"), caplog))


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def percentage(report):
    """The share of the change that a report says is left out."""
    return float(report.split("; ")[1].split("%")[0]) / 100


def rearranged(delta, low, m):
    """Rows are the blocks of a matrix, one for each entry of w1, cut out one by one."""
    k, n = delta.shape[0] // low, delta.shape[1] // m
    blocks = [delta[i * k : (i + 1) * k, j * n : (j + 1) * n].flatten() for i in range(low) for j in range(m)]
    return torch.stack(blocks).double()


@pytest.mark.parametrize("factor", [-1, 4, 8])
@pytest.mark.parametrize("rank", [0, 2])
def test_lokr_finds_a_kronecker_product_exactly(factor, rank, tiny_flux, tmp_path, caplog):
    expected = {}
    for seed, (name, (rows, columns)) in enumerate(SIZES.items()):
        (low, k), (m, n) = factorization(rows, factor), factorization(columns, factor)
        w2 = draws(seed + 9, k, 2) @ draws(seed + 19, 2, n)
        expected[name] = torch.kron(draws(seed, low, m), w2)
    ranks = 2 * max(max(factorization(side, factor)) for side in (384, 128))
    lora, report = resize(tiny_flux, lora_of(expected, min(ranks, 128)), "lokr", rank, factor).args
    changes = patched(tiny_flux, lora, tmp_path, caplog)
    assert changes.keys() == expected.keys()
    assert all(relative(changes[name], expected[name]) < 1e-5 for name in expected)
    assert "2 layers as lokr of rank 2; 0.00% of the change is left out." in report and len(report.split("\n")) == 1
    pair = {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"}
    assert list(suffixes(lora).values()) == [pair, pair]


@pytest.mark.parametrize(("low", "m", "factor"), [(2, 2, 2), (4, 4, 4), (8, 6, -1)])
def test_lokr_is_the_nearest_product_of_a_dense_svd(low, m, factor):
    delta = draws(0, 96, 48) + torch.kron(draws(1, low, m), draws(2, 96 // low, 48 // m)) * 0.5
    update, loss = nearest_kronecker(delta, (96, 48), factor, Size(0), source())
    left, sizes, right = torch.linalg.svd(rearranged(delta, low, m), full_matrices=False)
    best = torch.kron(left[:, 0].view(low, m), (sizes[0] * right[0]).view(96 // low, -1))
    assert update.w1.shape == (low, m) and update.w2.shape == (96 // low, 48 // m)
    assert relative(torch.kron(update.w1, update.w2), best) < 1e-5
    least = float((sizes[1:].square().sum() / sizes.square().sum()).sqrt())
    assert 0.2 < least < 0.95 and loss == pytest.approx(least, rel=1e-5)
    assert float(update.w1.square().mean()) == pytest.approx(float(update.w2.square().mean()), rel=1e-4)


def test_lokr_of_a_low_rank_is_a_stationary_point_below_the_truncated_product():
    """For its w1 no w2 of the rank is nearer, for its w2 no w1 is, and it beats the product that is truncated."""
    other = draws(1, 4, 4) + draws(5, 4, 4)
    delta = torch.kron(2 * draws(1, 4, 4), draws(2, 24, 12)) + torch.kron(other, draws(3, 24, 2) @ draws(4, 2, 12))
    update, loss = nearest_kronecker(delta, (96, 48), 4, Size(2), source())
    blocks, w1 = rearranged(delta, 4, 4), update.w1.double().flatten()
    w2 = (update.w2.scaled_up @ update.w2.down).double()
    left, sizes, right = torch.linalg.svd((w1 @ blocks).view(24, 12) / w1.square().sum(), full_matrices=False)
    assert update.rank == 2 and relative(w2, left[:, :2] * sizes[:2] @ right[:2]) < 1e-4
    assert relative(w1, blocks @ w2.flatten() / w2.square().sum()) < 1e-4
    assert loss == pytest.approx(relative(torch.kron(update.w1.double(), w2), delta), rel=1e-4)
    left, sizes, right = torch.linalg.svd(blocks, full_matrices=False)
    rows, lengths, columns = torch.linalg.svd((sizes[0] * right[0]).view(24, 12), full_matrices=False)
    product = torch.kron(left[:, 0].view(4, 4), rows[:, :2] * lengths[:2] @ columns[:2])
    assert loss < relative(product, delta) - 0.01


def test_lokr_stores_its_second_matrix_whole_as_lycoris_does(tiny_flux, tmp_path, caplog):
    lora = lora_of({PROJ: draws(0, 128, 128)}, 128)
    whole, report = resize(tiny_flux, lora, "lokr", 8, 8).args  # w2 is 16 x 16: whole from rank 8 on
    pair, _ = resize(tiny_flux, lora, "lokr", 7, 8).args
    assert list(suffixes(whole).values()) == [{"lokr_w1", "lokr_w2", "alpha"}]
    assert list(suffixes(pair).values()) == [{"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"}]
    w1, w2 = (next(t for key, t in whole.items() if key.endswith(name)) for name in ("lokr_w1", "lokr_w2"))
    (change,) = patched(tiny_flux, whole, tmp_path, caplog).values()
    assert relative(change, torch.kron(w1, w2)) < 1e-5
    assert "That is much: lokr fits well only a change that was trained as one" in report
    share = relative(change, draws(0, 128, 128))
    assert f"1 layer as lokr of rank 16; {share:.2%} of the change is left out." in report
    assert f"Most is left out in {PROJ} {share:.1%}." in report


def test_lokr_of_an_energy_takes_the_fewest_ranks_that_hold_it():
    w2 = (draws(0, 24, 12) @ torch.diag(0.5 ** torch.arange(12.0))).double()
    sizes = torch.linalg.svdvals(w2).square()
    fewest = int((sizes.cumsum(0) / sizes.sum() < 0.95).sum()) + 1
    update, _ = nearest_kronecker(torch.kron(draws(1, 4, 4), w2.float()), (96, 48), 4, Size(0, 0.95), source())
    assert update.rank == fewest < 6


def test_lokr_of_a_convolution_is_what_core_makes_of_it():
    from comfy.weight_adapter import LoKrAdapter

    w1, w2 = draws(0, 4, 4), draws(1, 8, 4, 3, 3)
    delta = torch.kron(w1[:, :, None, None], w2)
    for rank, keys in ((0, {"lokr_w1", "lokr_w2", "alpha"}), (3, {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "alpha"})):
        update, loss = nearest_kronecker(delta.flatten(1), (32, 16, 3, 3), 4, Size(rank), source())
        tensors = update.tensors((32, 16, 3, 3))
        adapter = LoKrAdapter.load("x", {f"x.{key}": t for key, t in tensors.items()}, float(tensors["alpha"]), None)
        weight = adapter.calculate_weight(torch.zeros(32, 16, 3, 3), "x", 1.0, 1.0, None, lambda change: change)
        assert tensors.keys() == keys and ("lokr_w2" not in keys or tensors["lokr_w2"].shape == (8, 4, 3, 3))
        assert relative(weight, delta) == pytest.approx(loss, abs=1e-5) and (loss < 1e-5) == (rank == 0)


def hadamard_of(update):
    return (update.w1_a.double() @ update.w1_b.double()) * (update.w2_a.double() @ update.w2_b.double())


@pytest.mark.parametrize("seed", range(3))
def test_loha_of_rank_2_is_recovered(seed):
    factors = [draws(4 * seed + n, *shape) for n, shape in enumerate([(96, 2), (2, 64), (96, 2), (2, 64)])]
    delta = (factors[0] @ factors[1]) * (factors[2] @ factors[3])
    update, loss = nearest_hadamard(delta, [delta], 2, source())
    assert relative(hadamard_of(update), delta) < 1e-4 and loss < 1e-4
    assert update.rank == 2 and update.alpha == 2.0
    assert torch.equal(update.delta(), nearest_hadamard(delta, [delta], 2, source())[0].delta())


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_loha_leaves_less_out_than_the_lora_of_its_rank(rank):
    """Rank 1 of both is the same problem, up to signs of rows and columns: a product of two is one of one."""
    up, down = draws(0, 96, 8) * torch.linspace(2, 0.5, 8), draws(1, 8, 64)
    update, loss = nearest_hadamard(up @ down, [up, down], rank, source())
    sizes = torch.linalg.svdvals((up @ down).double()).square()
    best = float((sizes[rank:].sum() / sizes.sum()).sqrt())
    assert loss == pytest.approx(relative(hadamard_of(update), up @ down), rel=1e-4)
    assert loss == pytest.approx(best, rel=1e-4) if rank == 1 else loss < 0.95 * best
    dense, dense_loss = nearest_hadamard(up @ down, [up @ down], rank, source())
    assert dense_loss == pytest.approx(loss, rel=1e-2)
    assert {tuple(m.shape) for m in (dense.w1_a, dense.w2_a)} == {(96, rank)}
    assert {tuple(m.shape) for m in (dense.w1_b, dense.w2_b)} == {(rank, 64)}


def test_loha_solves_each_side_s_least_squares():
    """The rows of one factor are those of torch's own solver, equation by equation."""
    rows_1, rows_2, columns_1, columns_2 = (draws(n, side, 3).double() for n, side in enumerate((20, 20, 15, 15)))
    delta = draws(7, 20, 15).double()
    rows_2[0] = 0  # leaves the other row open
    solved = solve_side([delta], Side(rows_1, rows_2), Side(columns_1, columns_2))
    assert torch.allclose(solved.first[0], rows_1[0], rtol=1e-12)
    for row in range(1, 20):
        first = columns_1 * (columns_2 @ rows_2[row])[:, None]
        expected = torch.linalg.lstsq(first, delta[row, :, None]).solution[:, 0]
        assert torch.allclose(solved.first[row], expected, rtol=1e-5, atol=1e-6)
        second = columns_2 * (columns_1 @ expected)[:, None]
        assert torch.allclose(
            solved.second[row], torch.linalg.lstsq(second, delta[row, :, None]).solution[:, 0], rtol=1e-4, atol=1e-5
        )


def test_loha_in_a_file_is_what_core_makes_of_it(tiny_flux, tmp_path, caplog):
    lora = lora_of({QKV: 0.01 * draws(0, 384, 128), PROJ: 3 * draws(1, 128, 128)}, 6)
    expected = {name: part.scaled_up @ part.down for name, part in lora.modules().items()}
    converted, report = resize(tiny_flux, lora, "loha", 6, blocks="*.proj -0.5").args
    expected[PROJ] *= -0.5
    changes = patched(tiny_flux, converted, tmp_path, caplog)
    assert changes.keys() == expected.keys()
    assert all(relative(changes[name], expected[name]) < 1e-4 for name in expected)  # no worse than the LoRA of rank 6
    assert "2 layers as loha of rank 6; 0.0" in report
    names = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"}
    assert list(suffixes(converted).values()) == [names, names]


def test_loha_of_more_ranks_than_the_change_has_is_exact(tiny_flux, tmp_path, caplog):
    delta = draws(0, 128, 2) @ draws(1, 2, 128)
    converted, _ = resize(tiny_flux, lora_of({PROJ: delta}, 2), "loha", 6).args
    (change,) = patched(tiny_flux, converted, tmp_path, caplog).values()
    assert relative(change, delta) < 1e-4


def test_loha_of_more_ranks_than_the_layer_has_rows_is_exact():
    delta = draws(0, 4, 64)
    update, _ = nearest_hadamard(delta, [delta], 6, source())
    assert update.rank == 6 and relative(update.delta(), delta) < 1e-4


@pytest.mark.parametrize("form", ["loha with cores", "loha with dora_scale"])
def test_loha_of_another_form_is_fitted(form, tiny_flux, tmp_path, caplog):
    tensors = foreign(form, {f"diffusion_model.{PROJ}": SIZES[PROJ]})
    (expected,) = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, dict(tensors), caplog)).values()
    converted, report = resize(tiny_flux, tensors, "loha", 3).args
    (change,) = patched(tiny_flux, converted, tmp_path, caplog).values()
    assert 0.01 < percentage(report) == pytest.approx(relative(change, expected), abs=2e-4)


def test_report_sums_up_layers_by_their_norms_and_names_the_worst(tiny_flux, tmp_path, caplog):
    """The small layer loses much, the large one little; a layer of zeros is left out."""
    noise, product = draws(0, 384, 128), torch.kron(draws(1, 8, 8), draws(2, 16, 16))
    expected = {QKV: 0.1 * noise, PROJ: 10 * product + draws(3, 128, 128)}
    lora = lora_of({**expected, "double_blocks.0.txt_attn.proj": torch.zeros(128, 128)}, 128)
    converted, report = resize(tiny_flux, lora, "lokr", 0, 8).args
    changes = patched(tiny_flux, converted, tmp_path, caplog)
    assert changes.keys() == expected.keys()
    shares = {name: relative(changes[name], expected[name]) for name in expected}
    total = sum(expected[name].square().sum() for name in expected)
    share = float(sum((changes[name] - expected[name]).square().sum() for name in expected) / total) ** 0.5
    assert shares[PROJ] < share < 0.2 < shares[QKV]
    assert percentage(report) == pytest.approx(share, abs=1e-4)
    assert f"Most is left out in {QKV} {shares[QKV]:.1%}, {PROJ} {shares[PROJ]:.1%}." in report


def test_loha_stays_as_it_is_in_a_loha(tiny_flux, tmp_path, caplog):
    tensors = foreign("loha", {f"diffusion_model.{PROJ}": SIZES[PROJ]})
    (expected,) = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, dict(tensors), caplog)).values()
    converted, report = resize(tiny_flux, tensors, "loha", 3, blocks="* 0.5").args
    (change,) = patched(tiny_flux, converted, tmp_path, caplog).values()
    assert relative(change, 0.5 * expected) < 1e-6 and "rank 3; 0.00%" in report
    _, smaller = resize(tiny_flux, tensors, "loha", 2).args
    assert "as loha of rank 2" in smaller and "0.00%" not in smaller


@pytest.mark.parametrize("form", ["lokr", "loha", "oft", "dora by columns"])
def test_kinds_of_every_form_become_lokr_with_the_error_that_is_said(form, tiny_flux, tmp_path, caplog):
    tensors = foreign(form, {f"diffusion_model.{PROJ}": SIZES[PROJ]})
    (expected,) = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, dict(tensors), caplog)).values()
    converted, report = resize(tiny_flux, tensors, "lokr", 0, 4).args
    (change,) = patched(tiny_flux, converted, tmp_path, caplog).values()
    share = relative(change, expected)
    assert (share < 1e-4) == (form == "lokr")
    assert percentage(report) == pytest.approx(share, abs=2e-4)


def test_header_names_the_new_network(tiny_flux):
    header = {
        "ss_network_module": "networks.lora_flux",
        "ss_network_dim": "64",
        "ss_network_alpha": "8.0",
        "ss_network_args": '{"loraplus_lr_ratio": "4"}',
        "ss_output_name": "face",
    }
    lora = lora_of({PROJ: draws(0, 128, 128)}, 6, header)
    lokr = resize(tiny_flux, lora, "lokr", 2, 4).args[0].metadata
    assert (lokr["ss_network_module"], lokr["ss_network_dim"]) == ("lycoris.kohya", "2")
    assert (lokr["ss_network_alpha"], lokr["ss_output_name"]) == ("2.0", "face")
    assert json.loads(lokr["ss_network_args"]) == {"algo": "lokr", "factor": "4"}
    plain = resize(tiny_flux, lora, "lora", 3).args[0].metadata
    assert (plain["ss_network_module"], plain["ss_network_dim"]) == ("networks.lora_flux", "3")
    assert "ss_network_args" not in plain
    lora.metadata |= lokr
    back = resize(tiny_flux, lora, "lora", 3).args[0].metadata
    assert "ss_network_module" not in back and "ss_network_args" not in back
    assert "ss_network_dim" not in resize(tiny_flux, dict(lora), "lora", 3).args[0].metadata


def test_inputs_that_do_not_convert_are_one_sentence(tiny_flux, tiny_files):
    lora = lora_of({PROJ: draws(0, 128, 128)}, 4)
    for inputs, message in (
        ({"algorithm": "glora"}, "algorithm is 'glora'; choose one of lora, lokr, loha."),
        ({"algorithm": "lokr", "factor": 0}, "factor is 0; give the size of the small matrix, such as 8, or -1."),
        ({"algorithm": "loha", "rank": 0}, "rank is 0; loha needs one from 1 to 32, such as 8."),
        ({"algorithm": "loha", "rank": 33}, "rank is 33; loha needs one from 1 to 32"),
        ({"algorithm": "loha", "rank": 4, "energy": 0.9}, "energy is 0.9, and a loha can't be cut by it; set energy"),
        ({"algorithm": "lokr", "blocks": "* 0"}, "No layer is left of the LoRA"),
    ):
        with pytest.raises(ValueError, match=message):
            resize(tiny_flux, lora, **inputs)
    with pytest.raises(ValueError, match="0 of the 1 layer in the file"):
        resize(tiny.load_wan(tiny_files["wan"]), lora, "lokr")
