"""Files of every kind that ComfyUI's reader knows: a LoRA begins from each, and is trained on top of each, with the
delta W that ComfyUI makes of it."""

import logging
import weakref

import comfy.lora
import comfy.sd
import comfy.utils
import comfy.weight_adapter
import pytest
import tiny
import torch
from comfy.weight_adapter import LoKrAdapter, WeightAdapterBase
from safetensors.torch import save_file
from tessera.lora.base import apply_base_lora
from tessera.lora.files.patches import DoesNotFit, Patch
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.lora.warm_start import read_warm_start
from tessera.models.adapters.base import AdapterSpec
from tessera.models.adapters.lora import LoraAdapter
from tessera.models.blocks import linear_shapes
from tessera.models.catalogue.registry import family_of
from tessera.train.preflight.checks import check_run
from tiny.lora.foreign_loras import FOREIGN, foreign
from tiny.lora.lora_files import patched_deltas
from tiny.train.runs import Watcher, mixed_data, run_settings, train

NO_STEP = {"steps": 1, "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}
# ComfyUI 0.30's own reader fails on it, and leaves the weight as it is.
FAILS = "lokr with a core"
FORMS = [form for form in FOREIGN if form not in (FAILS, "lora")]
PART = "transformer.transformer_blocks.1.attn.to_"
FUSED = "double_blocks.1.img_attn.qkv"


def layers(model):
    """One layer of the blocks for each form."""
    names = [n for n in linear_shapes(model.model) if "blocks" in n and "mod" not in n and n != FUSED]
    return dict(zip(names, FORMS, strict=False))


def write(model, path):
    """A file in which every layer is of another form, and q, k and v of one layer are three forms."""
    shapes, tensors = linear_shapes(model.model), {}
    for name, form in layers(model).items():
        tensors |= foreign(form, {f"diffusion_model.{name}": shapes[name]})
    for part, form in zip("qkv", ("oft", "lora", "set_weight"), strict=True):
        tensors |= foreign(form, {f"{PART}{part}": (128, 128)})
    tensors["diffusion_model.single_blocks.0.linear1.diff_b"] = torch.ones(shapes["single_blocks.0.linear1"][0])
    save_file(tensors, path)
    return LoraSource.from_file(path, "start_from"), tensors


def core_deltas(model, path):
    """ComfyUI's patched weights less the weights, by layer."""
    loaded, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(path)), 1.0, 0.0)
    return {name: delta for name, delta in patched_deltas(model, loaded).items() if not name.endswith("bias")}


def assert_best_of(lora, expected, rank):
    """Every delta W is as near to the expected one as the best of its rank, which fp64's SVD gives."""
    modules, cut = lora.modules(), []
    assert expected.keys() <= modules.keys()
    for name, module in modules.items():
        delta = (module.scaled_up @ module.down).double()
        if name not in expected:
            assert delta.abs().max() < 1e-20, name
            continue
        size = expected[name].norm()
        left, sizes, right = torch.linalg.svd(expected[name], full_matrices=False)
        least = (expected[name] - left[:, :rank] * sizes[:rank] @ right[:rank]).norm()
        assert size > 0.1 and (expected[name] - delta).norm() < 1.01 * least + 2e-5 * size, name
        cut.append(least > 0.01 * size)
    assert sum(cut) > (len(cut) // 2 if rank < 100 else -1)


@pytest.mark.parametrize("rank", [4, 128])
def test_a_lora_begins_from_the_best_of_its_rank_of_what_comfyui_makes_of_each_form(rank, tiny_flux, tmp_path):
    assert len(layers(tiny_flux)) == len(FORMS) == len(FOREIGN) - 2
    source, _ = write(tiny_flux, tmp_path / "forms.safetensors")
    expected = core_deltas(tiny_flux, tmp_path / "forms.safetensors")
    assert len(expected) == len(FORMS) + 1
    watcher = Watcher()
    options = {"network": {"rank": rank, "alpha": 2.0, "start_from": source}, **NO_STEP}
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, **options)
    assert_best_of(result.lora, expected, rank)
    assert any("and these are dropped: single_blocks.0.linear1.bias" in note for note in watcher.notes)
    assert any(
        "start_from is lora with a middle in 1 layer, dora in 1 layer, dora by rows in" in n for n in watcher.notes
    )
    assert any("of their update" in note for note in watcher.notes) == (rank == 4)


def test_updates_that_depend_on_the_weight_take_the_one_that_training_stands_on(tiny_flux, tmp_path):
    """A frozen LoRA beneath, and the weights on the host: ComfyUI loads both files one after the other."""
    source, _ = write(tiny_flux, tmp_path / "forms.safetensors")
    shapes = linear_shapes(tiny_flux.model)
    names = {f"diffusion_model.{name}": shapes[name] for name in (*layers(tiny_flux), FUSED)}
    base = {key: 0.1 * tensor for key, tensor in foreign("diff", names).items()}
    with_base, _ = comfy.sd.load_lora_for_models(tiny_flux, None, base, 0.5, 0.0)
    base_deltas = patched_deltas(tiny_flux, with_base)
    all_deltas = core_deltas(with_base, tmp_path / "forms.safetensors")
    expected = {name: all_deltas[name] - base_deltas[name] for name in all_deltas}
    alone = core_deltas(tiny_flux, tmp_path / "forms.safetensors")
    changed = {name for name in expected if (expected[name] - alone[name]).norm() > 1e-3 * alone[name].norm()}
    assert len(changed) == 14  # DoRA's lengths, GLoRA, OFT, BOFT, a whole weight
    network = {"rank": 128, "start_from": source, "base_lora": LoraSource.from_lora(base), "base_strength": 0.5}
    swapped = {"memory": {"blocks_to_swap": 3}}
    result = train(tiny_flux, mixed_data(), tmp_path, network=network, **swapped, **NO_STEP)
    assert_best_of(result.lora, expected, 128)


def test_on_fp8_weights_it_is_what_comfyui_makes_of_their_values(tmp_path):
    model = tiny.load_flux(tiny.write_flux(tmp_path / "fp8.safetensors", fp8=True))
    name = "single_blocks.1.linear2"
    tensors = foreign("dora by columns", {f"diffusion_model.{name}": (128, 640)})
    stored = model.model.diffusion_model.single_blocks[1].linear2.weight
    plain = stored.dequantize().float()
    loaded, _ = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 0.0)
    patched = comfy.lora.calculate_weight(loaded.patches[f"diffusion_model.{name}.weight"], plain.clone(), name)
    network = {"rank": 128, "include": (name,), "start_from": LoraSource.from_lora(tensors)}
    watcher = Watcher()
    result = train(model, mixed_data(), tmp_path, watcher, network=network, **NO_STEP)
    assert_best_of(result.lora, {name: (patched - plain).double()}, 128)
    assert any(
        "With algorithm dora and its own rank and alpha it would continue unchanged." in n for n in watcher.notes
    )


@pytest.mark.parametrize("form", [form for form in FOREIGN if form != FAILS])
def test_a_base_lora_is_put_under_as_comfyui_s_loader_does_it(form, tiny_flux, tmp_path, caplog):
    names = {"diffusion_model.double_blocks.0.img_attn.proj": (128, 128), f"{PART}k": (128, 128)}
    tensors = foreign(form, names)
    tensors["diffusion_model.double_blocks.0.img_attn.proj.diff_b"] = torch.arange(128.0)
    tensors["diffusion_model.double_blocks.0.img_attn.norm.query_norm.w_norm"] = torch.arange(128.0)
    save_file(tensors, tmp_path / "base.safetensors")
    source = LoraSource.from_file(tmp_path / "base.safetensors", "base_lora")
    clone = tiny_flux.clone()
    notes = apply_base_lora(clone, NetworkOptions(base_lora=source, base_strength=0.5), family_of(tiny_flux))
    assert notes == ["Trained on top of base.safetensors at strength 0.5; the saved LoRA has only what is new."]
    file = comfy.utils.load_torch_file(str(tmp_path / "base.safetensors"))
    loaded, _ = comfy.sd.load_lora_for_models(tiny_flux, None, file, 0.5, 0.0)
    expected, actual = patched_deltas(tiny_flux, loaded), patched_deltas(tiny_flux, clone)
    assert expected.keys() == actual.keys() and len(expected) == 4
    assert all(torch.equal(actual[name], expected[name]) and expected[name].any() for name in expected)


PROJ = "diffusion_model.double_blocks.0.img_attn.proj"


def broken(form, **changes):
    """A file of one layer, with tensors in place of its own; None takes one away."""
    tensors = foreign(form, {PROJ: (128, 128)})
    tensors |= {f"{PROJ}.{suffix.replace('__', '.')}": tensor for suffix, tensor in changes.items()}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(FAILS), "ComfyUI cannot apply it to 128 x 128 .lokr_t2 3 x 3 x 1 x 1, lokr_w1_a 4 x 3"),
        (broken("boft", alpha=None), "a boft without alpha, which ComfyUI does not apply"),
        (broken("boft", oft_blocks=torch.zeros(2, 8, 8, 8)), "64 x any there, 128 x 128 here"),
        (broken("dora by rows", dora_scale=torch.ones(64, 1)), "ComfyUI cannot apply it to 128 x 128 .dora_scale 64"),
        (broken("glora", b2__weight=torch.ones(3, 64)), "ComfyUI cannot apply it to 128 x 128 .a1.weight 128 x 3"),
        (broken("glora", a2__weight=None), "only a part of an update: .*proj.a2.weight is missing"),
        (broken("lora", lora_down__weight=None), "only a part of an update: .*proj.lora_down.weight is missing"),
        (broken("lora with a middle", lora_mid__weight=torch.ones(3, 3)), "ComfyUI cannot apply it to 128 x 128 .lora"),
        (broken("set_weight", set_weight=torch.ones(64, 128)), "64 x 128 there, 128 x 128 here"),
        (broken("lora", reshape_weight=torch.tensor([128, 256])), "makes a layer of 128 x 256 of one of 128 x 128, as"),
        (broken("lora", reshape_weight=torch.tensor(128)), r"reshape_weight is of the shape \(\), which is no matrix"),
        (broken("lora", alpha=torch.ones(3)), r".*proj.alpha has 3 numbers in place of one"),
        (
            broken("lora", lora_up__weight=torch.ones(128)),
            r"lora_up.weight is of the shape \(128,\), which is no matrix",
        ),
        (broken("loha", hada_w2_b=torch.ones(3)), r"hada_w2_b is of the shape \(3,\), which is no matrix"),
        (broken("lokr", lokr_w1=torch.tensor(1.0)), r"lokr_w1 is of the shape \(\), which is no matrix"),
        (broken("lora", config={"rank": 4}), "proj.config is a dict and no tensor"),
    ],
)
def test_updates_that_comfyui_cannot_apply_are_one_sentence_that_names_the_input(tensors, message, tiny_flux, caplog):
    family, source = family_of(tiny_flux), LoraSource.from_lora(tensors)
    targets = ["double_blocks.0.img_attn.proj"]
    with pytest.raises(ValueError, match=rf"start_from: LORA_MODEL does not fit .*{message}"):
        read_warm_start(NetworkOptions(start_from=source), family, tiny_flux.model, targets)
    with pytest.raises(ValueError, match=rf"base_lora: LORA_MODEL does not fit .*{message}"):
        apply_base_lora(tiny_flux.clone(), NetworkOptions(base_lora=source), family)


class LaterAdapter(WeightAdapterBase):
    """An adapter that a later ComfyUI may have."""

    name = "later"

    def __init__(self, loaded_keys, weights):
        self.loaded_keys, self.weights = loaded_keys, weights

    @classmethod
    def load(cls, x, lora, alpha, dora_scale, loaded_keys):
        return cls({f"{x}.later"}, (lora[f"{x}.later"],)) if f"{x}.later" in lora else None


@pytest.mark.parametrize("option", ["start_from", "base_lora"])
def test_an_adapter_that_comfyui_adds_later_is_named(option, tiny_flux, monkeypatch):
    monkeypatch.setattr(comfy.weight_adapter, "adapters", [*comfy.weight_adapter.adapters, LaterAdapter])
    network = NetworkOptions(**{option: LoraSource.from_lora({f"{PROJ}.later": torch.ones(128, 128)})})
    message = (
        f"{option}: LORA_MODEL does not fit .*img_attn.proj.weight: ComfyUI reads it as a LaterAdapter, which this"
    )
    with pytest.raises(ValueError, match=message):
        if option == "start_from":
            read_warm_start(network, family_of(tiny_flux), tiny_flux.model, ["double_blocks.0.img_attn.proj"])
        else:
            apply_base_lora(tiny_flux.clone(), network, family_of(tiny_flux))


def later(content, **attributes):
    """The content with what a later ComfyUI may set on it."""
    for name, value in attributes.items():
        setattr(content, name, value)
    return content


EIGHT = (None,) * 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (("diff", (torch.ones(2, 2), {"pad_weight": True})), "a full difference with settings"),
        (("later", (torch.ones(2, 2),)), "a patch of another kind"),
        (({"rank": 4},), "a patch of another kind"),
        (LoKrAdapter(set(), (torch.ones(2, 2), *EIGHT, {"factor": 4})), "a LoKrAdapter with settings"),
        (LoKrAdapter(set(), ({"rank": 4}, *EIGHT)), "a LoKrAdapter with settings"),
        (
            later(LoKrAdapter(set(), (torch.ones(2, 2), *EIGHT)), row_offset=128),
            "a LoKrAdapter of some rows of a wider",
        ),
    ],
)
def test_content_that_a_later_comfyui_may_give_is_named(content, message):
    with pytest.raises(
        DoesNotFit, match=f"img_in: ComfyUI reads it as {message}.*, which this version of Tessera does no"
    ):
        Patch(content).check_known("img_in")


def test_fields_that_a_later_comfyui_leaves_empty_change_nothing():
    adapter = later(LoKrAdapter(set(), (torch.ones(2, 2), torch.ones(2, 2), *EIGHT)), row_offset=None)
    Patch(adapter).check_known("img_in")
    assert Patch(adapter).tensors().keys() == {"lokr_w1", "lokr_w2"} and Patch(adapter).shape() == (4, 4)


def test_comfyui_itself_leaves_the_weight_as_it_is_by_them(tiny_flux, caplog):
    for tensors in (broken(FAILS), broken("boft", alpha=None), broken("dora by rows", dora_scale=torch.ones(64, 1))):
        with caplog.at_level(logging.ERROR):
            loaded, _ = comfy.sd.load_lora_for_models(tiny_flux, None, tensors, 1.0, 0.0)
            (delta,) = patched_deltas(tiny_flux, loaded).values()
        assert not delta.any() and caplog.records, tensors.keys()


def test_a_shape_of_its_own_that_is_the_layer_s_changes_nothing(tiny_flux):
    tensors = broken("lora", reshape_weight=torch.tensor([128, 128]))
    targets = ["double_blocks.0.img_attn.proj"]
    start, notes = read_warm_start(
        NetworkOptions(start_from=LoraSource.from_lora(tensors)), family_of(tiny_flux), tiny_flux.model, targets
    )
    assert list(start.modules) == targets and not start.dense and notes == []
    assert apply_base_lora(
        tiny_flux.clone(), NetworkOptions(base_lora=LoraSource.from_lora(tensors)), family_of(tiny_flux)
    )


def test_layers_that_the_model_lacks_are_said(tiny_files):
    qwen = tiny.load_model("qwen_image", tiny_files["qwen_image"])
    name = next(n for n in linear_shapes(qwen.model) if n.endswith("img_mlp.net.2"))
    tensors = foreign("diff", {f"diffusion_model.{name}": linear_shapes(qwen.model)[name]})
    tensors |= {"diffusion_model.txt_norm.diff_b": torch.zeros(4)}
    notes = apply_base_lora(qwen.clone(), NetworkOptions(base_lora=LoraSource.from_lora(tensors)), family_of(qwen))
    assert (
        "base_lora also changes parts that this model doesn't have, such as txt_norm.bias; they are ignored."
    ) in notes


def test_one_weight_is_read_at_a_time_and_only_where_the_update_depends_on_it(tiny_flux, tmp_path):
    source, _ = write(tiny_flux, tmp_path / "forms.safetensors")
    options = NetworkOptions(rank=4, start_from=source)
    start, _ = read_warm_start(options, family_of(tiny_flux), tiny_flux.model, [*layers(tiny_flux), FUSED])
    shapes = linear_shapes(tiny_flux.model)
    adapters = {
        name: LoraAdapter(AdapterSpec("lora", 4, 4.0), *shapes[name]) for name in (*start.modules, *start.dense)
    }
    refs = []

    def read(name):
        assert all(weight() is None for weight in refs)
        weight = torch.eye(*shapes[name])
        refs.append(weakref.ref(weight))
        return weight

    start.load_into(adapters, read)
    assert len(refs) == 14 and all(adapter.up.any() for adapter in adapters.values())


def test_a_model_with_a_control_lora_is_refused_before_anything_is_loaded(tiny_flux):
    """Such a LoRA gives img_in twice the channels, from which it reads a picture."""
    file = foreign("lora", {"diffusion_model.img_in": (128, 128)})
    file["diffusion_model.img_in.reshape_weight"] = torch.tensor([128, 128])
    loaded, _ = comfy.sd.load_lora_for_models(tiny_flux, None, file, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"a LoRA that makes img_in.weight \(128, 128\) of \(128, 64\), as control"):
        check_run(loaded, mixed_data(), run_settings())
