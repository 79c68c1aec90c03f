"""Facts by name: default targets on tiny models of ComfyUI's classes, and what stands in its workflow templates."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_base
import comfy.samplers
import comfy.supported_models
import pytest
from tessera.lora.patterns import match_targets
from tessera.models.blocks import linear_shapes
from tessera.models.native.facts.lookup import NAMED, facts_of
from tessera.models.native.facts.model_facts import ModelFacts, NamedRelease
from tessera.models.native.facts.targets import as_patterns, default_targets
from tessera.models.native.family import NativeFamily
from tiny.native import ROWS, build
from workflow_templates import cfg_of, has_template, samplers_of, schedulers_of, steps_of, values

RELEASES = [(facts, release) for facts in NAMED for release in facts.releases]
ATTENTION = {f"attn{n}.to_{part}" for n in (1, 2) for part in ("q", "k", "v", "out.*")}
TRANSFORMER = {f"transformer_blocks.*.{name}" for name in (*ATTENTION, "ff.net.*.proj", "ff.net.*")}
UNET = {
    f"{place}.{name}" for place in ("input_blocks.*.*", "middle_block.*", "output_blocks.*.*") for name in TRANSFORMER
}
NEXT_BLOCK = ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
OMNIGEN_BLOCK = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.*", *(f"feed_forward.linear_{n}" for n in "123"))
KREA_BLOCK = ("attn.wq", "attn.wk", "attn.wv", "attn.gate", "attn.wo", "mlp.gate", "mlp.up", "mlp.down")
DOUBLE = (*(f"{s}_attn.{part}" for s in ("img", "txt") for part in ("qkv", "proj")), "img_mlp.*", "txt_mlp.*")
HIDREAM_BLOCK = (*(f"attn1.to_{p}" for p in ("q", "k", "v", "out")), *(f"ff_i.shared_experts.w{n}" for n in "123"))
HIDREAM_TEXT = (*(f"attn1.to_{part}_t" for part in ("q", "k", "v", "out")), *(f"ff_t.w{n}" for n in "123"))
KANDINSKY_BLOCK = (
    *(f"{a}_attention.{n}" for a in ("self", "cross") for n in ("to_query", "to_key", "to_value", "out_layer")),
    "feed_forward.in_layer",
    "feed_forward.out_layer",
)
ERNIE_BLOCK = (
    *(f"self_attention.to_{part}" for part in ("q", "k", "v", "out.*")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "linear_fc2")),
)


def within(blocks: str, names: Iterable[str]) -> set[str]:
    return {f"{blocks}.*.{name}" for name in names}


def attention_and(mlp: str, parts: Iterable[str]) -> set[str]:
    return within("blocks", [f"{a}_attn.{part}" for a in ("self", "cross") for part in parts]) | {f"blocks.*.{mlp}"}


NEXT_DIT = within("layers", NEXT_BLOCK) | within("noise_refiner", NEXT_BLOCK)
COSMOS_2 = attention_and("mlp.layer1", ("q_proj", "k_proj", "v_proj", "output_proj")) | {"blocks.*.mlp.layer2"}
DOUBLE_AND_SINGLE = within("double_blocks", DOUBLE) | within("single_blocks", ("linear1", "linear2"))
JOINT = [f"{s}.{n}" for s in ("x_block", "context_block") for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
WAN = attention_and("ffn.*", "qkvo")

# The default targets of each named model: their number on the tiny model, and their names without numbers.
PINNED: dict[str, tuple[int, set[str]]] = {
    "z-image": (15, NEXT_DIT),
    "lumina-2": (15, NEXT_DIT),
    "krea-2": (16, within("blocks", KREA_BLOCK)),
    "anima": (20, COSMOS_2),
    "cosmos-predict2": (20, COSMOS_2),
    "sdxl": (70, UNET),
    "sd1.5": (70, UNET),
    "sd3.5": (
        15,
        within("joint_blocks", JOINT) | {"joint_blocks.*.x_block.attn2.qkv", "joint_blocks.*.x_block.attn2.proj"},
    ),
    "omnigen2": (21, within("layers", OMNIGEN_BLOCK) | within("noise_refiner", OMNIGEN_BLOCK)),
    "hidream": (
        42,
        within("double_stream_blocks", [f"block.{name}" for name in HIDREAM_BLOCK + HIDREAM_TEXT])
        | within("single_stream_blocks", [f"block.{name}" for name in HIDREAM_BLOCK]),
    ),
    "chroma-radiance": (20, DOUBLE_AND_SINGLE),
    "longcat": (20, DOUBLE_AND_SINGLE),
    "hunyuan-image": (20, DOUBLE_AND_SINGLE),
    "hunyuan-video": (20, DOUBLE_AND_SINGLE),
    "hunyuan-video-1.5": (16, within("double_blocks", DOUBLE)),
    "ernie-image": (14, within("layers", ERNIE_BLOCK)),
    "ideogram-4": (10, within("layers", ("attention.qkv", "attention.o", *NEXT_BLOCK[2:]))),
    "kandinsky-5": (20, within("visual_transformer_blocks", KANDINSKY_BLOCK)),
    "kandinsky-5-image": (20, within("visual_transformer_blocks", KANDINSKY_BLOCK)),
    "ltx-video": (20, TRANSFORMER),
    "ltx-2": (20, TRANSFORMER),
    "minimax-h3": (8, within("blocks", ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"))),
    "wan-vace": (20, WAN),
    "wan-camera": (20, WAN),
    "wan-s2v": (20, WAN),
}
ROW = {row.name: row for row in ROWS}


# Models of a newer ComfyUI than that of the tests, which plays their class in tests of their own.
NEWER = {"qwen-image-2.1": "test_qwen_image21.py", "ltx-2.5": "test_ltx25.py"}


def test_every_named_model_is_pinned():
    assert PINNED.keys() | NEWER.keys() == {facts.name for facts in NAMED}
    folder = Path(__file__).parents[3] / "comfy" / "models" / "native"
    assert all((folder / file).is_file() for file in NEWER.values())


@pytest.mark.parametrize("name", PINNED)
def test_the_default_targets_of_a_named_model_are_pinned(name):
    model = build(ROW[name]).model
    names = list(linear_shapes(model))
    facts = facts_of(model)
    targets = match_targets(names, facts.default_targets, ())
    count, patterns = PINNED[name]
    assert facts.name == name and len(targets) == count
    assert {re.sub(r"(?<=\.)\d+", "*", target) for target in targets} == patterns
    # The rule for models that nobody has named finds the same.
    assert match_targets(names, default_targets(model), ()) == targets


def test_a_model_that_no_row_names_has_its_class_for_a_title_and_targets_by_rule():
    class MadeUp(comfy.model_base.Lumina2):
        pass

    model = build(ROW["z-image"]).model
    row = facts_of(model)
    model.__class__ = MadeUp
    facts = facts_of(model)
    assert (facts.title, facts.name, facts.releases, facts.remarks()) == ("MadeUp", "madeup", (), [])
    names = list(linear_shapes(model))
    assert match_targets(names, facts.default_targets, ()) == match_targets(names, row.default_targets, ())


def test_a_pattern_that_would_match_more_than_it_should_is_a_name():
    names = ["blocks.0.1", "blocks.0.2", "blocks.1.1", "blocks.1.2"]
    assert as_patterns(["blocks.0.1", "blocks.1.1"], names) == ("blocks.0.1", "blocks.1.1")
    assert as_patterns(["blocks.0.1", "blocks.0.2", "blocks.1.1", "blocks.1.2"], names) == ("blocks.*.*",)


def test_every_row_names_classes_of_core_and_has_a_name_of_its_own():
    assert max(Counter(facts.name for facts in NAMED).values()) == 1
    assert max(Counter(facts.title for facts in NAMED).values()) == 1
    claimed: Counter[tuple[Any, ...]] = Counter()
    for facts in NAMED:
        classes = [getattr(comfy.model_base, name, None) for name in facts.model_classes]
        assert all(
            issubclass(model_class, comfy.model_base.BaseModel)
            for model_class in classes
            if model_class or facts.name not in NEWER
        )
        for config in facts.configs or [""]:
            assert not config or hasattr(comfy.supported_models, config)
            claimed.update((kind, config, facts.unet_config) for kind in facts.model_classes)
    assert max(claimed.values()) == 1


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("auraflow", "double_layers.0.modC.1"),
        ("hidream-o1", "visual.blocks.0.attn.qkv"),
        ("wan-dancer", "music_injector.injector.0.q"),
        ("z-image-pixel", "context_refiner.0.attention.qkv"),
        ("boogu", "double_stream_layers.0.img_norm1.linear"),
    ],
)
def test_the_rule_leaves_out_what_the_latent_does_not_pass_through(name, left_out):
    model = build(ROW[name]).model
    names = list(linear_shapes(model))
    targets = match_targets(names, facts_of(model).default_targets, ())
    assert left_out in names and left_out not in targets and len(targets) > 10


@pytest.mark.parametrize(("facts", "release"), RELEASES, ids=[release.title for _, release in RELEASES])
def test_files_and_sampling_are_those_of_the_workflow_template(facts: ModelFacts, release: NamedRelease):
    sampling, template = release.sampling, release.template
    assert sampling.sampler in comfy.samplers.KSampler.SAMPLERS
    assert sampling.scheduler in comfy.samplers.KSampler.SCHEDULERS
    if not template or (facts.name in NEWER and not has_template(template)):
        return
    loader = "CheckpointLoaderSimple" if release.checkpoint else "UNETLoader"
    assert release.file in {row[0] for row in values(template, loader)}
    assert facts.vae in {row[0] for row in values(template, "VAELoader")} | {""}
    encoders = [
        row for row in values(template, "CLIPLoader", "DualCLIPLoader", "QuadrupleCLIPLoader", "LTXAVTextEncoderLoader")
    ]
    if facts.encoders:
        count = len(facts.encoders)
        types = [row[count : count + 1] for row in encoders if tuple(row[:count]) == facts.encoders]
        assert types and all(not facts.clip_type or kind == [facts.clip_type] for kind in types)
    else:
        assert release.checkpoint and not encoders
    assert sampling.steps in steps_of(template)
    assert sampling.cfg in cfg_of(template)
    assert sampling.sampler in samplers_of(template)
    schedulers = schedulers_of(template)
    assert sampling.scheduler in (schedulers or {"simple", "beta", "sgm_uniform"})


def test_a_run_says_the_remarks_of_its_model():
    model = build(ROW["krea-2"]).model
    family = NativeFamily(model)
    (licence,), (distilled,) = family.notes(model, []), family.distillation_notes(model)
    assert "on Krea 2 Raw" in distilled and "Krea 2 Community License" in licence


def test_a_distilled_release_says_what_to_do():
    said = {facts.name: facts.distillation_notes() for facts in NAMED}
    assert said["z-image"] == [
        "If this is Z-Image-Turbo: it's distilled, and plain training undoes that; train on Z-Image and look at the "
        "LoRA on Z-Image-Turbo (model of Training Preview), or choose ostris/zimage_turbo_training_adapter "
        "(zimage_turbo_training_adapter_v2.safetensors) at training_adapter of LoRA Network."
    ]
    (krea_2,) = (facts for facts in NAMED if facts.name == "krea-2")
    assert krea_2.remarks()[0].startswith("Krea 2 is under the Krea 2 Community License;")
    assert said["minimax-h3"][0].startswith("MiniMax H3 is distilled, and plain training undoes that: choose ostris/")
    assert "train on SDXL and look at the LoRA on SDXL Turbo (model of Training Preview)." in said["sdxl"][0]
    assert said["sd1.5"] == []


def test_the_sound_of_minimax_h3_is_that_of_comfyui():
    from comfy.ldm.minimax.model import time_shift_sigma
    from comfy_extras.nodes_minimax_h3 import temporal_shape

    sound = next(facts.sound for facts in NAMED if facts.name == "minimax-h3")
    for length in (5, 22, 39, 124):
        _, latent_frames, latents = temporal_shape(length)
        assert sound.shape(latent_frames, None) == (32, 2, latents)
    for sigma in (0.02, 0.5, 0.9, 1.0):
        assert sound.sigma(sigma) == pytest.approx(time_shift_sigma(sigma, 12.0, 3.0), rel=1e-9)


@pytest.mark.parametrize(("frames", "rate"), [(1, None), (4, None), (4, 24.0), (13, 12.5), (13, 50.0)])
def test_the_sound_of_ltx_2_is_as_long_as_its_video_at_the_rate_that_it_is_told(frames, rate):
    from comfy.ldm.lightricks.vae.audio_vae import AudioVAE

    sound = next(facts.sound for facts in NAMED if facts.name == "ltx-2")
    core = SimpleNamespace(latents_per_second=16000 / 160 / 4)
    latents = AudioVAE.num_of_latents_from_frames(core, 8 * (frames - 1) + 1, rate or 25.0)
    assert sound.shape(frames, rate) == (8, latents, 16)
