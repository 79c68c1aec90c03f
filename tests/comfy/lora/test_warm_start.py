"""Training that begins from a LoRA: its delta W at step 0, whatever its format and rank, and the same run after a
resume."""

import os
from pathlib import Path

import folder_paths
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import save_file
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.lora.warm_start import fit_to_rank, read_warm_start
from tessera.nodes.options.lora_files import lora_source
from tessera.nodes.options.network import TesseraLoraNetwork
from tiny.lora.adapters import ALGORITHMS, fill
from tiny.lora.lora_files import delta, loaded_in_comfyui, patched_deltas, random_update, random_updates
from tiny.nodes.prompt import executed
from tiny.train.runs import Watcher, cancel_at, mixed_data, sample, train, training_data

NO_STEP = {"steps": 1, "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}


def blocks(updates):
    return {name: part for name, part in updates.items() if "blocks" in name and "mod" not in name}


def source(updates, layout="kohya", dtype="fp32"):
    return LoraSource.from_lora(convert(LoraModel.from_modules(updates), layout, dtype))


def started(model, root, network):
    """The LoRA after one step that moves nothing."""
    watcher = Watcher()
    result = train(model, mixed_data(), root, watcher, **NO_STEP, network=network)
    return result, watcher.notes


@pytest.mark.parametrize(("layout", "dtype"), [("kohya", "fp32"), ("comfyui", "bf16"), ("diffusers", "fp16")])
def test_delta_w_at_the_start_is_what_comfyui_makes_of_the_file(layout, dtype, tiny_flux, tmp_path, caplog):
    file = convert(LoraModel.from_modules(blocks(random_updates(tiny_flux))), layout, dtype)
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, file, caplog))
    result, notes = started(tiny_flux, tmp_path, {"rank": 6, "start_from": LoraSource.from_lora(file)})
    modules = result.lora.modules()
    assert modules.keys() == expected.keys() and all(module.rank == 6 for module in modules.values())
    for name, delta_w in expected.items():
        product = (modules[name].scaled_up @ modules[name].down).double()
        assert (product - delta_w).norm() <= 1e-5 * delta_w.norm(), name
        # What is added to the rank can learn: its part of down is no zero.
        assert modules[name].up[:, 4:].abs().max() < 1e-20 and modules[name].down[4:].abs().min() > 0
    assert not [note for note in notes if "start_from" in note]


def test_tensors_of_the_same_rank_and_alpha_are_the_same_bits(tiny_flux, tmp_path):
    updates = {name: LowRank(part.down, part.up, 4.0) for name, part in blocks(random_updates(tiny_flux)).items()}
    result, _ = started(tiny_flux, tmp_path, {"start_from": source(updates)})
    for name, module in result.lora.modules().items():
        assert torch.equal(module.down, updates[name].down) and torch.equal(module.up, updates[name].up), name


def test_a_lower_rank_keeps_the_largest_singular_parts_and_says_what_is_lost(tiny_flux, tmp_path):
    updates = blocks(random_updates(tiny_flux))
    result, notes = started(tiny_flux, tmp_path, {"rank": 2, "alpha": 1.0, "start_from": source(updates)})
    losses = {}
    for name, module in result.lora.modules().items():
        left, sizes, right = torch.linalg.svd(delta(updates[name]), full_matrices=False)
        best = left[:, :2] * sizes[:2] @ right[:2]
        product = (module.scaled_up @ module.down).double()
        assert (product - best).norm() <= 1e-5 * best.norm(), name
        losses[name] = float((delta(updates[name]) - best).norm() / delta(updates[name]).norm())
    (message,) = [note for note in notes if "start_from" in note]
    worst = max(losses, key=losses.get)
    assert (
        f"{sum(losses.values()) / len(losses):.1%} of their update is lost (most in {worst}: {losses[worst]:.1%})"
        in message
    )


def test_an_update_of_a_rank_that_fits_loses_nothing_though_it_is_written_with_more():
    small = random_update(20, 30, 1)
    twice = LowRank(torch.cat((small.down, small.down)), torch.cat((small.up, small.up), dim=1), small.alpha)
    fitted = fit_to_rank(twice, torch.ones(6, 30), 0.5)
    expected = delta(small)  # twice the product, half the scale
    assert fitted.relative_error < 1e-7
    # The rest can learn, as in a new LoRA.
    assert torch.equal(fitted.down[4:], torch.ones(2, 30)) and not fitted.up[:, 4:].any()
    torch.testing.assert_close(0.5 * fitted.up.double() @ fitted.down.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_lower_rank_than_the_files_on_a_layer_that_is_narrower_than_both():
    wide = random_update(20, 5, 1)
    update = LowRank(torch.cat([wide.down] * 3), torch.cat([wide.up] * 3, dim=1), wide.alpha)  # rank 12 of at most 5
    start = torch.ones(8, 5)
    fitted = fit_to_rank(update, start, 0.5)
    assert fitted.down.shape == (8, 5) and fitted.up.shape == (20, 8) and fitted.relative_error < 1e-7
    # Three times the product, a third of the scale.
    torch.testing.assert_close(0.5 * fitted.up.double() @ fitted.down.double(), delta(wide), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["loha", "lokr", "lokr whole", "dora", "oft constrained"])
def test_each_algorithm_begins_where_its_file_ended(name, tiny_flux, tmp_path):
    """Of its own kind, size and alpha the tensors are the same bits; DoRA's lengths are added again."""
    network = ALGORITHMS[name]
    data = training_data(sample("one", 4, 4))
    first = train(tiny_flux, data, tmp_path / "first", steps=1, network=network)
    file = convert(first.lora, "kohya", "fp32")
    second = train(tiny_flux, data, tmp_path, network=network | {"start_from": LoraSource.from_lora(file)}, **NO_STEP)
    assert second.lora.keys() == first.lora.keys() == file.keys()
    for key, tensor in first.lora.items():
        exactly = "dora_scale" not in key
        torch.testing.assert_close(second.lora[key], tensor, rtol=0 if exactly else 1e-6, atol=1e-20 if exactly else 0)
    kind = network["algorithm"]
    other = {"algorithm": "oft" if kind == "loha" else "loha", "rank": 4, "start_from": LoraSource.from_lora(file)}
    message = f"is a {kind} .* and the network trains {other['algorithm']}; set algorithm to {kind}, or choose"
    with pytest.raises(ValueError, match=message):
        train(tiny_flux, data, tmp_path, network=other)


@pytest.mark.parametrize("name", ["loha", "lokr", "lokr whole"])
def test_a_lora_begins_from_the_largest_parts_of_what_is_none(name, tiny_flux, tmp_path, caplog):
    """Of LoHa's and LoKr's files, by ComfyUI's reader; at a rank that holds all of it nothing is lost or said."""
    targets = {"include": ("double_blocks.0.img_attn.proj", "single_blocks.1.linear2")}
    trainer = tiny.make_trainer(
        tiny_flux, mixed_data(), tmp_path, network=NetworkOptions(**ALGORITHMS[name], **targets)
    )
    for index, adapter in enumerate(trainer.network.adapters.values()):
        fill(adapter, index, 0.3)
    file = convert(trainer.learner.snapshot(), "comfyui")
    trainer.close()
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, file, caplog))
    for rank in (3, 128):
        options = targets | {"rank": rank, "alpha": 2.0, "start_from": LoraSource.from_lora(file)}
        result, notes = started(tiny_flux, tmp_path / str(rank), options)
        for layer, module in result.lora.modules().items():
            left, sizes, right = torch.linalg.svd(expected[layer], full_matrices=False)
            best = left[:, :rank] * sizes[:rank] @ right[:rank]
            product = (module.scaled_up @ module.down).double()
            loss, least = ((expected[layer] - w).norm() / expected[layer].norm() for w in (product, best))
            assert loss < least * 1.01 + 2e-5, layer
            assert rank == 128 or loss > 0.1
            assert (module.down.abs().amax(dim=1) > 1e-3).all(), layer
        assert any("of their update is lost" in note for note in notes) == (rank == 3)


def test_a_run_goes_on_bit_for_bit_and_without_the_file(tiny_flux, tmp_path):
    data, updates = mixed_data(), blocks(random_updates(tiny_flux))
    network = {"start_from": source(updates), "dropout": 0.1}
    average = {"learning_rate": 1e-2, "ema_decay": 0.5}
    whole = train(tiny_flux, data, tmp_path / "whole", network=network, optimizer=average)
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, data, tmp_path / "cut", cancel_at(4), network=network, optimizer=average)
    resumed = train(tiny_flux, data, tmp_path / "cut", network=network, optimizer=average)
    (folder,) = (tmp_path / "cut").iterdir()
    restarted = train(
        tiny_flux,
        data,
        tmp_path / "cut",
        network={"dropout": 0.1},
        optimizer=average,
        resume=f"{folder.name}/state-000004.tessera",
    )
    for other in (resumed, restarted):
        assert other.loss == whole.loss and all(torch.equal(other.lora[name], whole.lora[name]) for name in whole.lora)
    changed = {**updates, "single_blocks.0.linear2": random_update(128, 640, 99)}
    keys = {whole.summary["key"], restarted.summary["key"]}
    for start in (source(changed), None):
        keys.add(train(tiny_flux, data, tmp_path / "keys", steps=1, network={"start_from": start}).summary["key"])
    assert len(keys) == 4
    # The average began at the LoRA, not at what it replaced.
    first = train(
        tiny_flux, data, tmp_path / "first", **{**NO_STEP, "optimizer": average | NO_STEP["optimizer"]}, network=network
    )
    modules = first.lora.modules()
    assert all(
        (modules[n].scaled_up @ modules[n].down - delta(p)).norm() < 1e-4 * delta(p).norm() for n, p in updates.items()
    )


def test_loras_that_do_not_fit_are_one_sentence(tiny_flux, tiny_files):
    from tessera.models.catalogue.registry import family_of

    def start(updates, targets=("single_blocks.0.linear2",), **changes):
        options = NetworkOptions(start_from=LoraSource.from_lora(updates), **changes)
        return read_warm_start(options, family_of(tiny_flux), tiny_flux.model, targets)

    wan = convert(LoraModel.from_modules(random_updates(tiny.load_wan(tiny_files["wan"]))))
    with pytest.raises(
        ValueError,
        match=r"start_from: LORA_MODEL has no update for FLUX.1: 0 of the 26 layers",
    ):
        start(wan)
    larger = convert(LoraModel.from_modules({"single_blocks.0.linear2": random_update(256, 640, 1)}))
    with pytest.raises(ValueError, match=r"does not fit .*single_blocks.0.linear2: 256 x 640 there, 128 x 640 here"):
        start(larger)
    qkv = {f"transformer.transformer_blocks.0.attn.to_{part}": random_update(256, 128, 1) for part in "qkv"}
    parts = {f"{n}.lora_{side}.weight": t for n, m in qkv.items() for side, t in (("A", m.down), ("B", m.up))}
    with pytest.raises(ValueError, match=r"does not fit .*double_blocks.0.img_attn.qkv: 256 x 128 there, 128 x 128 h"):
        start(parts)
    file_tensors = convert(LoraModel.from_modules(blocks(random_updates(tiny_flux))))
    with pytest.raises(ValueError, match="has updates only for layers that are not trained .*; add them to targets"):
        start(file_tensors, targets=("img_in",))
    loha = {f"diffusion_model.single_blocks.0.linear2.hada_w{i}_{s}": torch.ones(4, 4) for i in (1, 2) for s in "ab"}
    with pytest.raises(ValueError, match="does not fit .*single_blocks.0.linear2: 4 x 4 there, 128 x 640 here"):
        start(loha)
    with pytest.raises(
        ValueError, match="changes single_blocks.0.linear2.bias in a way that training can't start from"
    ):
        start({"diffusion_model.single_blocks.0.linear2.diff_b": torch.zeros(128)})
    broken = {
        key: torch.full_like(tensor, torch.nan) if "lora_up" in key else tensor for key, tensor in file_tensors.items()
    }
    with pytest.raises(ValueError, match="start_from: LORA_MODEL holds NaN or infinite values .*; choose an earlier"):
        start(broken)
    empty = {f"diffusion_model.single_blocks.0.linear2.lora_{side}.weight": torch.ones(0, 0) for side in "AB"}
    with pytest.raises(ValueError, match=r"start_from: .*linear2.lora_A.weight is empty, as of a rank of 0"):
        start(empty)
    # What is not trained is not looked at; the alpha of two whole matrices is used by no reader, a missing one is rank.
    whole = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(32, 160), "alpha": torch.tensor(1e10)}
    loha = {f"hada_w{i}_{s}": torch.ones(*((128, 4) if s == "a" else (4, 640))) for i in (1, 2) for s in "ab"}
    for tensors, network in (
        (whole, {"algorithm": "lokr", "rank": 80, "factor": 4}),
        (loha, {"algorithm": "loha", "rank": 4, "alpha": 4.0}),
    ):
        file = {f"diffusion_model.single_blocks.0.linear2.{suffix}": tensor for suffix, tensor in tensors.items()}
        odd = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
        file |= {f"diffusion_model.img_in.{suffix}": torch.ones(2, 2) for suffix in odd}
        start_lora, _ = start(file, **network)
        assert start_lora is not None and list(start_lora.modules) == ["single_blocks.0.linear2"]
    _, notes = start(
        file_tensors | {"lora_te1_x.lora_up.weight": torch.ones(1)}, targets=("single_blocks.0.linear2", "img_in")
    )
    assert "start_from also has updates for 19 layers that are not trained" in notes[0]
    assert "1 key for the text encoder, which is ignored" in notes[1]
    assert "1 of the 2 trained layers is not in start_from and starts from zero" in notes[2]


def test_the_node_takes_files_of_the_lora_folders_only(tiny_flux, lora_folder):
    (lora_folder / "styles").mkdir()
    file = lora_folder / "styles" / "mine.safetensors"
    tensors = convert(LoraModel.from_modules({"single_blocks.0.linear2": random_update(128, 640, 1)}))
    save_file(tensors, file)
    (lora_folder / "broken.safetensors").write_bytes(b"nothing")
    folder_paths.filename_list_cache.clear()
    name = str(Path("styles", "mine.safetensors"))
    choices = TesseraLoraNetwork.INPUT_TYPES()["optional"]["start_from"][1]["options"]
    assert name in choices
    base = {"algorithm": "lora", "rank": 8, "alpha": 8.0, "targets": "", "dropout": 0.0}
    with torch.inference_mode():
        options, _ = executed(TesseraLoraNetwork, **base, start_from=name).result
        connected, _ = executed(TesseraLoraNetwork, **base, start_lora=tensors).result
    assert options.start_from.name == "mine.safetensors" and "/" not in repr(options)
    assert options.start_from.content == connected.start_from.content
    assert options.start_from.tensors().keys() == tensors.keys()
    fingerprint = TesseraLoraNetwork.fingerprint_inputs(start_from=name)
    assert fingerprint == TesseraLoraNetwork.fingerprint_inputs(start_from=name)
    save_file({key: tensor + 1 for key, tensor in tensors.items()}, file)
    os.utime(file, (1, 1))  # of the same size, and perhaps of the same tick
    assert fingerprint != TesseraLoraNetwork.fingerprint_inputs(start_from=name)
    for wrong in ("../mine.safetensors", str(file), "absent.safetensors"):
        with pytest.raises(ValueError, match="start_from: there is no LoRA .* in ComfyUI's LoRA folders; choose one"):
            executed(TesseraLoraNetwork, **base, start_from=wrong)
    with pytest.raises(ValueError, match="start_from: broken.safetensors can't be read as safetensors"):
        lora_source("start_from", "broken.safetensors")
    with pytest.raises(ValueError, match="is connected too; set start_from to none, or disconnect it"):
        executed(TesseraLoraNetwork, **base, start_from=name, start_lora=tensors)


def test_training_on_a_base_lora_is_training_on_the_model_with_it_and_saves_what_is_new(tiny_flux, tmp_path, caplog):
    """ComfyUI's loader puts the same LoRA on the MODEL."""
    import json

    import comfy.sd

    base = convert(LoraModel.from_modules(random_updates(tiny_flux)), "diffusers", "bf16")
    loaded, _ = comfy.sd.load_lora_for_models(tiny_flux, None, base, 0.7, 0.0)
    data, base_options = (
        mixed_data(),
        {"base_lora": LoraSource("base.safetensors", "x", lambda: base), "base_strength": 0.7},
    )
    expected = train(loaded, data, tmp_path / "on the model")
    watcher = Watcher()
    result = train(tiny_flux, data, tmp_path / "base", watcher, network=base_options)
    assert result.loss == expected.loss and result.lora.keys() == expected.lora.keys()
    assert all(torch.equal(result.lora[name], expected.lora[name]) for name in result.lora)
    assert "Trained on top of base.safetensors at strength 0.7; the saved LoRA has only what is new." in watcher.notes
    assert not tiny_flux.patches
    swapped = train(tiny_flux, data, tmp_path / "swapped", network=base_options, memory={"blocks_to_swap": 3})
    assert swapped.loss == result.loss
    header = json.loads(result.lora.metadata["tessera"])["network"]
    assert header["base_lora"]["name"] == "base.safetensors" and header["base_strength"] == 0.7
    keys = {result.summary["key"], expected.summary["key"]}
    for other in ({"base_strength": 0.6}, {"base_lora": LoraSource("base.safetensors", "y", lambda: base)}):
        keys.add(train(tiny_flux, data, tmp_path / "other", steps=1, network=base_options | other).summary["key"])
    assert len(keys) == 4


def test_a_base_lora_that_does_not_fit_is_one_sentence(tiny_flux, tiny_files, tmp_path):
    wan = source(random_updates(tiny.load_wan(tiny_files["wan"])))
    with pytest.raises(
        ValueError,
        match="base_lora: LORA_MODEL has no update for FLUX.1: 0 of the 26 layers",
    ):
        train(tiny_flux, mixed_data(), tmp_path, network={"base_lora": wan})
    larger = source({"double_blocks.0.img_attn.qkv": random_update(384, 256, 1)})
    with pytest.raises(ValueError, match=r"base_lora: .* \(double_blocks.0.img_attn.qkv: 384 x 256 there, 384 x 128 "):
        train(tiny_flux, mixed_data(), tmp_path, network={"base_lora": larger})
    for tensors, shape in (
        ({f"hada_w{i}_{s}": torch.ones(*((96, 2) if s == "a" else (2, 64))) for i in (1, 2) for s in "ab"}, "96 x 64"),
        ({"lokr_w1": torch.ones(4, 4), "lokr_w2_a": torch.ones(8, 2), "lokr_w2_b": torch.ones(2, 16)}, "32 x 64"),
        ({"oft_blocks": torch.zeros(4, 8, 8)}, "32 x any"),
        ({"diff": torch.zeros(96, 128)}, "96 x 128"),
    ):
        file = {f"diffusion_model.double_blocks.0.img_attn.qkv.{suffix}": t for suffix, t in tensors.items()}
        with pytest.raises(ValueError, match=rf"\(double_blocks.0.img_attn.qkv: {shape} there, 384 x 128 here\)"):
            train(tiny_flux, mixed_data(), tmp_path, network={"base_lora": LoraSource.from_lora(file)})
    with pytest.raises(ValueError, match="base_strength is 0, at which base_lora has no effect"):
        NetworkOptions(base_lora=larger, base_strength=0.0)
