"""Merge LoRAs, Resize LoRA and Extract LoRA: by PEFT's own merging, by core's patched weights, by torch's SVD."""

import pytest
import tiny
import torch
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import MODULES, LoraModel, LowRank
from tessera.lora.tools.components import components_of, largest_components
from tessera.lora.tools.merge import METHODS, merge
from tessera.models.catalogue.registry import family_of
from tessera.nodes.loras.tools import TesseraExtractLora, TesseraMergeLoras, TesseraResizeLora
from tiny.lora.foreign_loras import foreign
from tiny.lora.lora_files import loaded_in_comfyui, patched_deltas
from tiny.native import ROWS, build

QKV, PROJ, MOD = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj", "double_blocks.1.img_mod.lin"
SIZES = {QKV: (384, 128), PROJ: (128, 128), MOD: (768, 128)}
MERGE = {"weights": "1", "method": "weighted", "rank": 0, "density": 0.5, "seed": 0, "energy": 1.0}


def update(seed, name, rank=4, alpha=2.0):
    draw = torch.Generator().manual_seed(seed)
    rows, columns = SIZES[name]
    return LowRank(torch.randn(rank, columns, generator=draw), torch.randn(rows, rank, generator=draw), alpha)


def lora_of(seed, *names, rank=4):
    return LoraModel.from_modules({name: update(seed + n, name, rank) for n, name in enumerate(names)})


def delta(part):
    return part.alpha / part.rank * (part.up.double() @ part.down.double())


def deltas(result):
    lora, report = result.args
    return {name: delta(part) for name, part in lora.modules().items()}, report


def close(actual, expected, error=1e-5):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= error * tensor.norm(), name


def merge_loras(model, *loras, **changes):
    return TesseraMergeLoras.execute(model, {f"lora{n}": lora for n, lora in enumerate(loras)}, **MERGE | changes)


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_merging_is_peft_s(density):
    draw = torch.Generator().manual_seed(0)
    updates = [torch.randn(7, 5, generator=draw) for _ in range(3)]
    weights = [1.0, 0.5, -0.25]
    numbers = torch.tensor(weights)
    assert torch.allclose(
        merge(updates, weights, "weighted", density, 0), merge_utils.task_arithmetic(updates, numbers)
    )
    assert torch.allclose(merge(updates, weights, "ties", density, 0), merge_utils.ties(updates, numbers, density))


@pytest.mark.parametrize(("method", "other"), [("dare", "dare_linear"), ("dare ties", "dare_ties")])
def test_drawn_merging_is_peft_s_on_the_same_draws(method, other, monkeypatch):
    updates = [torch.randn(70, 50, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    result = merge(updates, [1.0, 0.5], method, 0.5, 3)
    source, draw = torch.Generator().manual_seed(3), torch.bernoulli
    monkeypatch.setattr(
        merge_utils.torch, "bernoulli", lambda chance, generator=source: draw(chance, generator=generator)
    )
    assert torch.equal(result, getattr(merge_utils, other)(updates, torch.tensor([1.0, 0.5]), 0.5))
    assert not torch.equal(result, merge(updates, [1.0, 0.5], method, 0.5, 4))


def test_a_weighted_merge_is_what_comfyui_makes_of_all_at_these_strengths(tiny_flux, tmp_path, caplog):
    loras = [lora_of(0, QKV, PROJ), lora_of(5, PROJ, MOD, rank=8)]
    result = merge_loras(tiny_flux, *loras, weights="1, 0.5")
    merged, report = deltas(result)
    first, second = (lora.modules() for lora in loras)
    expected = {QKV: delta(first[QKV]), MOD: 0.5 * delta(second[MOD])}
    expected[PROJ] = delta(first[PROJ]) + 0.5 * delta(second[PROJ])
    close(merged, expected)
    assert "3 layers of rank 4 to 12; 0.00% of the change is left out." in report
    save_file(convert(result.args[0]), tmp_path / "merged.safetensors")
    close(
        patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, load_file(tmp_path / "merged.safetensors"), caplog)),
        expected,
    )


def test_a_single_weight_counts_for_all(tiny_flux):
    loras = [lora_of(0, PROJ), lora_of(5, PROJ)]
    merged, _ = deltas(merge_loras(tiny_flux, *loras, weights="-0.5"))
    close(merged, {PROJ: -0.5 * sum(delta(lora.modules()[PROJ]) for lora in loras)})


@pytest.mark.parametrize("method", METHODS[1:])
def test_other_methods_merge_layer_by_layer_to_the_rank_that_is_asked_for(method, tiny_flux):
    loras = [lora_of(0, QKV, PROJ), lora_of(5, PROJ)]
    result = merge_loras(tiny_flux, *loras, method=method, rank=3)
    assert {part.rank for part in result.args[0].modules().values()} == {3}
    again = merge_loras(tiny_flux, *loras, method=method, rank=3)
    close(deltas(again)[0], deltas(result)[0], 0.0)
    if method == "ties":
        full, _ = deltas(merge_loras(tiny_flux, *loras, method=method, rank=128))
        parts = [lora.modules().get(PROJ) for lora in loras]
        expected = merge_utils.ties([delta(part).float() for part in parts], torch.ones(2), 0.5)
        assert (full[PROJ] - expected).norm() <= 1e-4 * expected.norm()
        alone = delta(loras[0].modules()[QKV]).float()
        expected = merge_utils.ties([alone, torch.zeros_like(alone)], torch.ones(2), 0.5)
        assert (full[QKV] - expected).norm() <= 1e-4 * expected.norm()
        together = merge_loras(tiny_flux, *loras, method=method).args[0].modules()
        assert (together[QKV].rank, together[PROJ].rank) == (4, 8)


def test_dare_draws_other_numbers_for_each_seed_and_layer(tiny_flux):
    other = "double_blocks.1.img_attn.proj"
    part = update(0, PROJ)
    lora = LoraModel.from_modules({PROJ: part, other: part})
    first, _ = deltas(merge_loras(tiny_flux, lora, lora, method="dare", rank=128))
    second, _ = deltas(merge_loras(tiny_flux, lora, lora, method="dare", rank=128, seed=1))
    assert (first[PROJ] - second[PROJ]).norm() > 0.1 * first[PROJ].norm()
    assert (first[PROJ] - first[other]).norm() > 0.1 * first[PROJ].norm()


def test_rank_is_reduced_with_the_least_loss(tiny_flux):
    lora = lora_of(0, QKV, PROJ, rank=16)
    result = TesseraResizeLora.execute(lora, tiny_flux, 4, "", 1.0)
    resized, report = deltas(result)
    for name, part in lora.modules().items():
        left, sizes, right = torch.linalg.svd(delta(part), full_matrices=False)
        best = left[:, :4] * sizes[:4] @ right[:4]
        assert (resized[name] - best).norm() <= 1e-5 * best.norm()
    lost = 1 - sum(t.square().sum() for t in resized.values()) / sum(
        delta(p).square().sum() for p in lora.modules().values()
    )
    assert f"2 layers of rank 4; {float(lost) ** 0.5:.2%} of the change is left out." in report
    whole, _ = deltas(TesseraResizeLora.execute(lora, tiny_flux, 0, "", 1.0))
    close(whole, {name: delta(part) for name, part in lora.modules().items()})


def test_energy_takes_the_fewest_ranks_that_hold_it(tiny_flux):
    lora = lora_of(0, QKV, rank=16)
    (part,) = TesseraResizeLora.execute(lora, tiny_flux, 0, "", 0.5).args[0].modules().values()
    shares = torch.linalg.svdvals(delta(lora.modules()[QKV])).square()
    shares = shares.cumsum(0) / shares.sum()
    assert part.rank == int((shares < 0.5).sum()) + 1 and 1 < part.rank < 16


def test_rank_0_keeps_no_empty_ranks(tiny_flux):
    part = update(0, PROJ)
    padded = LowRank(torch.cat([part.down, part.down]), torch.cat([part.up, part.up], dim=1), 8.0)
    resized = TesseraResizeLora.execute(LoraModel.from_modules({PROJ: padded}), tiny_flux, 0, "", 1.0).args[0]
    assert resized.modules()[PROJ].rank == 4


def test_convolutions_keep_their_kernels(caplog):
    model = build(next(row for row in ROWS if row.name == "sd1.5"))
    draw, name = torch.Generator().manual_seed(0), "input_blocks.0.0"
    rows, *inner = model.model.diffusion_model.get_submodule(name).weight.shape
    down, up = torch.randn(3, *inner, generator=draw), torch.randn(rows, 3, 1, 1, generator=draw)
    resized = TesseraResizeLora.execute(LoraModel.from_modules({name: LowRank(down, up, 3.0)}), model, 0, "", 1.0)
    (part,) = resized.args[0].modules().values()
    assert part.down.shape[1:] == tuple(inner) and part.up.shape[2:] == (1, 1)
    change = patched_deltas(model, loaded_in_comfyui(model, convert(resized.args[0]), caplog))[name]
    expected = (up.flatten(1) @ down.flatten(1)).double()
    assert (change.flatten(1) - expected).norm() <= 1e-5 * expected.norm()
    assert resized.args[0].metadata[MODULES] == family_of(model).names.recorded() != ""


def test_parts_that_a_result_can_t_hold_are_named(tiny_flux):
    extra = {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0),
        "lora_unet_ninth_wheel.alpha": torch.tensor(1.0),
    }
    report = TesseraResizeLora.execute({**lora_of(0, QKV), **extra}, tiny_flux, 0, "", 1.0).args[1]
    assert "lora: 1 keys of text encoders are left out." in report
    assert "these parts are left out: " in report and "ninth_wheel" in report


def test_blocks_are_scaled_in_other_kinds_too(tiny_flux, caplog):
    tensors = foreign("loha", {f"diffusion_model.{PROJ}": SIZES[PROJ]})
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, dict(tensors), caplog))[PROJ]
    scaled, _ = deltas(TesseraResizeLora.execute(tensors, tiny_flux, 0, "* -0.5", 1.0))
    close(scaled, {PROJ: -0.5 * expected}, 1e-4)


def test_blocks_are_scaled_and_dropped(tiny_flux):
    lora = lora_of(0, QKV, PROJ, MOD)
    result = TesseraResizeLora.execute(lora, tiny_flux, 0, "double_blocks.0.* 0.5\ndouble_blocks.1 0\n*.proj -1", 1.0)
    parts = lora.modules()
    close(deltas(result)[0], {QKV: 0.5 * delta(parts[QKV]), PROJ: -delta(parts[PROJ])})


@pytest.mark.parametrize("form", ["loha", "lokr", "oft"])
def test_other_kinds_become_plain_lora(form, tiny_flux, caplog):
    tensors = foreign(form, {f"diffusion_model.{PROJ}": SIZES[PROJ]})
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, dict(tensors), caplog))
    close(deltas(TesseraResizeLora.execute(tensors, tiny_flux, 0, "", 1.0))[0], expected, 1e-4)


def test_difference_at_full_rank_is_the_second_model(tiny_files, caplog):
    model, tuned = (tiny.load_flux(tiny_files["flux"]) for _ in range(2))
    draw = torch.Generator().manual_seed(1)
    changes = {name: 0.1 * torch.randn(SIZES[name], generator=draw) for name in (QKV, PROJ)}
    with torch.no_grad():
        for name, change in changes.items():
            layer = tuned.model.diffusion_model.get_submodule(name)
            layer.weight = torch.nn.Parameter(layer.weight + change, requires_grad=False)
    result = TesseraExtractLora.execute(model, tuned, 0, 1.0)
    close(deltas(result)[0], {name: change.double() for name, change in changes.items()}, 1e-4)
    small = TesseraExtractLora.execute(model, tuned, 8, 1.0)
    assert {part.rank for part in small.args[0].modules().values()} == {8}
    with pytest.raises(ValueError, match="tuned_model has the same weights as model"):
        TesseraExtractLora.execute(model, model, 8, 1.0)


def test_inputs_that_do_not_fit_are_one_sentence(tiny_flux, tiny_files):
    lora = lora_of(0, QKV)
    wan = tiny.load_wan(tiny_files["wan"])
    with pytest.raises(ValueError, match="weights is '1, 2, 3'; give one number, or one for each of the 2 LoRAs"):
        merge_loras(tiny_flux, lora, lora, weights="1, 2, 3")
    with pytest.raises(ValueError, match="connect at least two"):
        merge_loras(tiny_flux, lora)
    with pytest.raises(ValueError, match="lora_models: LoRA 1 .*0 of the 1 layer in the file"):
        merge_loras(wan, lora, lora)
    with pytest.raises(ValueError, match="blocks: 'triple_blocks 1' names no layer"):
        TesseraResizeLora.execute(lora, tiny_flux, 0, "triple_blocks 1", 1.0)
    with pytest.raises(ValueError, match="blocks: 'double_blocks nan' has no number"):
        TesseraResizeLora.execute(lora, tiny_flux, 0, "double_blocks nan", 1.0)
    for line in ("double_blocks half", "double_blocks 101", "double_blocks -101"):
        with pytest.raises(ValueError, match=f"blocks: '{line}' has no number between -100 and 100"):
            TesseraResizeLora.execute(lora, tiny_flux, 0, line, 1.0)
    with pytest.raises(ValueError, match="blocks: 'double_blocks.0.img_a 1' names no layer"):
        TesseraResizeLora.execute(lora, tiny_flux, 0, "double_blocks.0.img_a 1", 1.0)
    broken = {key: tensor * float("nan") for key, tensor in lora.items()}
    with pytest.raises(ValueError, match="lora .*NaN"):
        TesseraResizeLora.execute(broken, tiny_flux, 0, "", 1.0)
    with pytest.raises(ValueError, match="No layer is left"):
        TesseraResizeLora.execute(lora, tiny_flux, 0, "double_blocks 0", 1.0)
    with pytest.raises(ValueError, match="tuned_model is of another kind or size than model"):
        TesseraExtractLora.execute(tiny_flux, wan, 8, 1.0)


def test_components_of_factors_are_those_of_the_whole_matrix():
    part = update(0, PROJ, rank=6)
    whole = largest_components(delta(part).float(), 6, torch.Generator().manual_seed(0))
    factors = components_of(part)
    assert torch.allclose(factors.sizes, whole.sizes, rtol=1e-4) and factors.total == pytest.approx(
        whole.total, rel=1e-4
    )
