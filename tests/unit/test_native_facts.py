"""Facts by name: default targets on tiny models of ComfyUI's classes, and what stands in its workflow templates."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.samplers
import comfy.supported_models
import pytest
import torch
from tessera.lora.patterns import match_targets
from tessera.models.family import linear_shapes
from tessera.models.native.facts.lookup import NAMED, facts_of
from tessera.models.native.facts.model_facts import ModelFacts, NamedRelease
from tessera.models.native.facts.targets import as_patterns, default_targets

RELEASES = [(facts, release) for facts in NAMED for release in facts.releases]
HEADS = {"num_heads": 2, "axes_dim": [4, 6, 6]}
NEXT_DIT = {"patch_size": 2, "in_channels": 16, "dim": 64, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2}
NEXT_DIT |= {
    "n_kv_heads": 2,
    "axes_dims": [8, 12, 12],
    "axes_lens": [32, 32, 32],
    "cap_feat_dim": 16,
    "multiple_of": 32,
}
COSMOS_2 = {"max_img_h": 24, "max_img_w": 24, "max_frames": 8, "in_channels": 16, "out_channels": 16}
COSMOS_2 |= {"patch_spatial": 2, "patch_temporal": 1, "model_channels": 96, "num_blocks": 3, "num_heads": 3}
COSMOS_2 |= {"crossattn_emb_channels": 1024, "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 8}
UNET = {"image_size": 8, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1]}
UNET |= {"channel_mult": [1, 2], "transformer_depth": [0, 2], "transformer_depth_output": [0, 0, 2, 2]}
UNET |= {"transformer_depth_middle": 1, "context_dim": 16, "num_head_channels": 16, "use_spatial_transformer": True}
HUNYUAN = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 8, "context_in_dim": 16, "hidden_size": 32, **HEADS}
HUNYUAN |= {"mlp_ratio": 2.0, "depth": 2, "depth_single_blocks": 3, "theta": 256, "patch_size": [1, 2, 2]}
HUNYUAN |= {"qkv_bias": True, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow": False}
HUNYUAN |= {"meanflow_sum": False, "byt5": False, "guidance_embed": True}
KREA_2 = {"features": 64, "tdim": 16, "txtdim": 16, "heads": 2, "kvheads": 1, "multiplier": 2, "layers": 3, "patch": 2}
KREA_2 |= {"channels": 16, "txtlayers": 2, "txtheads": 1, "txtkvheads": 1}
LTXV = {"in_channels": 16, "cross_attention_dim": 32, "attention_head_dim": 16, "num_attention_heads": 2}
LTXV |= {"caption_channels": 16, "num_layers": 3}
SD3 = {"in_channels": 16, "patch_size": 2, "depth": 3, "input_size": None, "adm_in_channels": 16}
SD3 |= {"context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 16, "out_features": 192}}}
OMNIGEN_2 = {"patch_size": 2, "in_channels": 16, "hidden_size": 48, "num_layers": 3, "num_refiner_layers": 1}
OMNIGEN_2 |= {"num_attention_heads": 2, "num_kv_heads": 2, "multiple_of": 32, "axes_dim_rope": [8, 8, 8]}
OMNIGEN_2 |= {"axes_lens": [32, 32, 32], "text_feat_dim": 16}
HIDREAM = {"patch_size": 2, "in_channels": 16, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16}
HIDREAM |= {"num_attention_heads": 2, "caption_channels": [16, 16], "text_emb_dim": 8, "num_routed_experts": 4}
HIDREAM |= {"num_activated_experts": 2, "axes_dims_rope": (4, 6, 6), "max_resolution": (32, 32), "llama_layers": [0]}
ATTENTION = {f"attn{n}.to_{part}" for n in (1, 2) for part in ("q", "k", "v", "out.*")}
TRANSFORMER = {f"transformer_blocks.*.{name}" for name in (*ATTENTION, "ff.net.*.proj", "ff.net.*")}
QKVO = ("q_proj", "k_proj", "v_proj", "output_proj")
COSMOS_BLOCK = {f"blocks.*.{a}.{part}" for a in ("self_attn", "cross_attn") for part in QKVO}
COSMOS_BLOCK |= {"blocks.*.mlp.layer1", "blocks.*.mlp.layer2"}
NEXT_BLOCK = {"attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
DOUBLE = {f"{s}_attn.{part}" for s in ("img", "txt") for part in ("qkv", "proj")} | {"img_mlp.*", "txt_mlp.*"}
OMNIGEN_BLOCK = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.*"} | {f"feed_forward.linear_{n}" for n in "123"}
HIDREAM_ATTENTION = {f"attn1.to_{part}" for part in ("q", "k", "v", "out")}
SHARED = {f"ff_i.shared_experts.w{n}" for n in "123"}
STREAMS = HIDREAM_ATTENTION | {f"{name}_t" for name in HIDREAM_ATTENTION} | SHARED | {f"ff_t.w{n}" for n in "123"}


def within(blocks: str, names: set[str]) -> set[str]:
    return {f"{blocks}.*.{name}" for name in names}


# Class of core, its config, the name of its row, the number of its default targets, and their names without numbers.
MODELS: list[tuple[str, dict[str, Any], str, int, set[str]]] = [
    ("ZImage", NEXT_DIT, "z-image", 20, within("layers", NEXT_BLOCK) | within("noise_refiner", NEXT_BLOCK)),
    ("Lumina2", NEXT_DIT, "lumina2", 20, within("layers", NEXT_BLOCK) | within("noise_refiner", NEXT_BLOCK)),
    (
        "Krea2",
        KREA_2,
        "krea2",
        24,
        within("blocks", {"attn.wq", "attn.wk", "attn.wv", "attn.gate", "attn.wo", "mlp.gate", "mlp.up", "mlp.down"}),
    ),
    ("Anima", COSMOS_2, "anima", 30, COSMOS_BLOCK),
    (
        "SDXL",
        UNET | {"num_classes": "sequential", "adm_in_channels": 16, "use_linear_in_transformer": True},
        "sdxl",
        70,
        {
            f"{place}.{name}"
            for place in ("input_blocks.*.*", "middle_block.*", "output_blocks.*.*")
            for name in TRANSFORMER
        },
    ),
    (
        "SD15",
        UNET,
        "sd15",
        70,
        {
            f"{place}.{name}"
            for place in ("input_blocks.*.*", "middle_block.*", "output_blocks.*.*")
            for name in TRANSFORMER
        },
    ),
    (
        "SD3",
        SD3,
        "sd3",
        21,
        within(
            "joint_blocks",
            {f"{s}.{n}" for s in ("x_block", "context_block") for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")},
        ),
    ),
    (
        "Omnigen2",
        OMNIGEN_2,
        "omnigen2",
        28,
        within("layers", OMNIGEN_BLOCK) | within("noise_refiner", OMNIGEN_BLOCK),
    ),
    (
        "HiDream",
        HIDREAM,
        "hidream",
        49,
        within("double_stream_blocks", {f"block.{name}" for name in STREAMS})
        | within("single_stream_blocks", {f"block.{name}" for name in HIDREAM_ATTENTION | SHARED}),
    ),
    ("LTXV", LTXV, "ltxv", 30, TRANSFORMER),
    (
        "HunyuanVideo",
        HUNYUAN,
        "hunyuan-video",
        22,
        within("double_blocks", DOUBLE) | within("single_blocks", {"linear1", "linear2"}),
    ),
    (
        "HunyuanVideo15",
        HUNYUAN | {"depth_single_blocks": 0, "guidance_embed": False, "vec_in_dim": None},
        "hunyuan-video-1.5",
        16,
        within("double_blocks", DOUBLE),
    ),
]


def tiny(core: str, config: dict[str, Any]) -> Any:
    """A BaseModel of one of core's classes without storage, since only its names matter."""
    of_core = getattr(comfy.supported_models, core)(dict(config))
    of_core.unet_config = dict(config)
    of_core.set_inference_dtype(torch.float32, torch.float32)
    return of_core.get_model({}, "", torch.device("meta"))


@pytest.mark.parametrize(("core", "config", "name", "count", "patterns"), MODELS, ids=[row[0] for row in MODELS])
def test_the_default_targets_of_a_named_model_are_pinned(core, config, name, count, patterns):
    model = tiny(core, config)
    names = list(linear_shapes(model))
    facts = facts_of(model)
    targets = match_targets(names, facts.default_targets, ())
    assert facts.name == name and len(targets) == count
    assert {re.sub(r"(?<=\.)\d+", "*", target) for target in targets} == patterns
    # The rule for models that nobody has named finds the same.
    assert match_targets(names, default_targets(model), ()) == targets


def test_a_model_that_no_row_names_has_its_class_for_a_title_and_targets_by_rule():
    class MadeUp(comfy.model_base.Lumina2):
        pass

    model = tiny("ZImage", NEXT_DIT)
    named = facts_of(model)
    model.__class__ = MadeUp
    facts = facts_of(model)
    assert (facts.title, facts.name, facts.releases, facts.remarks()) == ("MadeUp", "madeup", (), [])
    names = list(linear_shapes(model))
    assert match_targets(names, facts.default_targets, ()) == match_targets(names, named.default_targets, ())


def test_a_pattern_that_would_match_more_than_it_should_is_a_name():
    names = ["blocks.0.1", "blocks.0.2", "blocks.1.1", "blocks.1.2"]
    assert as_patterns(["blocks.0.1", "blocks.1.1"], names) == ("blocks.0.1", "blocks.1.1")
    assert as_patterns(["blocks.0.1", "blocks.0.2", "blocks.1.1", "blocks.1.2"], names) == ("blocks.*.*",)


def test_every_row_names_classes_of_core_and_has_a_name_of_its_own():
    assert max(Counter(facts.name for facts in NAMED).values()) == 1
    assert max(Counter(facts.title for facts in NAMED).values()) == 1
    claimed: Counter[tuple[str, str]] = Counter()
    for facts in NAMED:
        assert all(
            issubclass(getattr(comfy.model_base, name), comfy.model_base.BaseModel) for name in facts.model_classes
        )
        for config in facts.configs or [""]:
            assert not config or hasattr(comfy.supported_models, config)
            claimed.update((kind, config) for kind in facts.model_classes)
    assert max(claimed.values()) == 1


@cache
def nodes_of(template: str) -> list[dict[str, Any]]:
    """The nodes of a workflow template that are not switched off, those of its subgraphs too."""
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None and spec.origin is not None
    workflow = json.loads((Path(spec.origin).parent / "templates" / f"{template}.json").read_text(encoding="utf-8"))
    subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
    nodes = workflow["nodes"] + [node for subgraph in subgraphs for node in subgraph["nodes"]]
    return [node for node in nodes if node.get("mode", 0) == 0]


def values(template: str, *kinds: str) -> Iterator[list[Any]]:
    return (node["widgets_values"] for node in nodes_of(template) if node["type"] in kinds)


def steps_of(template: str) -> set[int]:
    found = {row[2] for row in values(template, "KSampler")} | {row[3] for row in values(template, "KSamplerAdvanced")}
    found |= {row[1] for row in values(template, "BasicScheduler")}
    kinds = ("LTXVScheduler", "BetaSamplingScheduler", "SDTurboScheduler", "Ideogram4Scheduler")
    return found | {row[0] for row in values(template, *kinds)}


def cfg_of(template: str) -> set[float]:
    found = {row[3] for row in values(template, "KSampler")} | {row[4] for row in values(template, "KSamplerAdvanced")}
    found |= {row[3] for row in values(template, "SamplerCustom")} | {1.0 for _ in values(template, "BasicGuider")}
    return found | {row[0] for row in values(template, "CFGGuider", "DualCFGGuider", "DualModelGuider")}


def samplers_of(template: str) -> set[str]:
    found = {row[4] for row in values(template, "KSampler")} | {row[5] for row in values(template, "KSamplerAdvanced")}
    return found | {row[0] for row in values(template, "KSamplerSelect")}


def schedulers_of(template: str) -> set[str]:
    found = {row[5] for row in values(template, "KSampler")} | {row[6] for row in values(template, "KSamplerAdvanced")}
    return found | {row[0] for row in values(template, "BasicScheduler")}


@pytest.mark.parametrize(("facts", "release"), RELEASES, ids=[release.title for _, release in RELEASES])
def test_files_and_sampling_are_those_of_the_workflow_template(facts: ModelFacts, release: NamedRelease):
    sampling, template = release.sampling, release.template
    assert sampling.sampler in comfy.samplers.KSampler.SAMPLERS
    assert sampling.scheduler in comfy.samplers.KSampler.SCHEDULERS
    if not template:
        return
    loader = "CheckpointLoaderSimple" if release.checkpoint else "UNETLoader"
    assert release.file in {row[0] for row in values(template, loader)}
    assert facts.vae in {row[0] for row in values(template, "VAELoader")} | {""}
    encoders = [row for row in values(template, "CLIPLoader", "DualCLIPLoader", "QuadrupleCLIPLoader")]
    if facts.encoders:
        count = len(facts.encoders)
        types = [row[count : count + 1] for row in encoders if tuple(row[:count]) == facts.encoders]
        assert types and all(not kind or kind == [facts.clip_type] for kind in types)
    else:
        assert release.checkpoint and not encoders
    assert sampling.steps in steps_of(template)
    assert sampling.cfg in cfg_of(template)
    assert sampling.sampler in samplers_of(template)
    schedulers = schedulers_of(template)
    assert sampling.scheduler in (schedulers or {"simple", "beta", "sgm_uniform"})


def test_a_distilled_release_says_what_to_do():
    said = {facts.name: "\n".join(facts.remarks()) for facts in NAMED}
    assert "Z-Image-Turbo is distilled" in said["z-image"] and "zimage_turbo_training_adapter_v2" in said["z-image"]
    assert "rain on Krea 2 Raw and look at the LoRA on Krea 2 Turbo" in said["krea2"]
    assert "Krea 2 Community License" in said["krea2"]
    assert said["hunyuan-video"].startswith("HunyuanVideo is under the Tencent")
