"""LoRA Network before a run: the preview, ranks by pattern, what does not fit."""

from dataclasses import fields

import pytest
import torch
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import adapter_specs, choose_targets, network_notes
from tessera.models.flux.family import Flux
from tessera.nodes.options.network import NO_MODEL, TesseraLoraNetwork
from tiny.nodes.prompt import executed, node
from tiny.train.runs import Watcher, mixed_data, train


def test_the_preview_says_what_a_run_trains(tiny_flux, tmp_path):
    values = {
        "algorithm": "dora",
        "rank": 4,
        "alpha": 8.0,
        "targets": "single_blocks.*\n-*.modulation.*",
        "dropout": 0.0,
    }
    patterns = "single_blocks.0.*: rank=2"
    with torch.inference_mode():
        options, text = executed(TesseraLoraNetwork, **values, rank_patterns=patterns, model=tiny_flux).result
        assert executed(TesseraLoraNetwork, **values).result[1] == NO_MODEL
        output = executed(TesseraLoraNetwork, **values, model=tiny_flux).ui["tessera"]
    assert list(output[0]) == ["text"]
    watcher = Watcher()
    result = train(
        tiny_flux,
        mixed_data(),
        tmp_path,
        watcher,
        steps=1,
        network={field.name: getattr(options, field.name) for field in fields(options)},
    )
    head = text.splitlines()[0]
    assert f"dora on {result.summary['targets']} of " in head
    assert f"{result.summary['parameters']:,} trained numbers" in head
    assert any(
        line.split() == ["single_blocks.0.linear1", "1", "×", "896×128", "rank", "2", "2,176"]
        for line in text.splitlines()
    )
    assert [line for line in text.splitlines() if line.startswith("rank_patterns split")] == [
        note for note in watcher.notes if note.startswith("rank_patterns")
    ]


def test_patterns_that_contradict_the_model_are_one_sentence(tiny_flux):
    family, model = Flux(), tiny_flux.model

    def choose(**changes):
        return choose_targets(family, model, NetworkOptions(**changes))

    with pytest.raises(ValueError, match=r"The pattern 'single.\*' in rank_patterns matches no layer that is trained;"):
        choose(include=("double_blocks.*",), rank_patterns="single.*: rank=2")
    with pytest.raises(
        ValueError, match="oft cannot cut .*img_attn.qkv, whose output is 384, into blocks of at most rank 1"
    ):
        choose(algorithm="oft", rank=1, alpha=1.0)
    targets = choose()
    specs = adapter_specs(NetworkOptions(rank_patterns="*: rank=8\nsingle_blocks.0.*: alpha=3"), targets)
    assert specs["single_blocks.1.linear1"].alpha == 8.0 and specs["single_blocks.0.linear1"].alpha == 3.0

    def notes(**changes):
        return " ".join(network_notes(NetworkOptions(**changes), family, model, targets))

    assert notes() == ""
    text = notes(algorithm="oft", rank=100, alpha=100.0)
    assert "oft cuts 20 of 20 layers into smaller blocks than rank 100" in text and "blocks of 96: the largest" in text
    assert (
        "rank 256 is more than 20 of the layers can use, such as double_blocks.0.img_attn.qkv of 384 × 128."
        in notes(rank=256, alpha=256.0)
    )
    assert "loha of rank 16 reaches rank 256, more than 20 of the layers" in notes(algorithm="loha")
    assert "lokr keeps its second matrix whole in 20 of 20 layers" in notes(algorithm="lokr")
    text = notes(algorithm="lokr", factor=5, rank=4, alpha=4.0)
    assert "lokr cuts 20 of 20 layers otherwise than by factor 5, such as double_blocks.0.img_attn.qkv of" in text
    assert "384 × 128 by 4: the largest divisor up to it." in text
    assert "otherwise than by factor" not in notes(algorithm="lokr", factor=8, rank=4, alpha=4.0)


def test_node_in_a_graph_shows_the_layers_that_train_lora_then_trains(server, tiny_loaders):
    network = {"algorithm": "dora", "rank": 4, "alpha": 4.0, "targets": "single_blocks.*.linear?", "dropout": 0.1}
    inputs = {"output_name": "dora", "steps": 2, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 0}
    inputs |= {"gradient_accumulation": 1, "compile": "off", "save_every": 0, "resume": "off"}
    prompt = tiny_loaders | {
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a fox"),
        "data": node("TesseraLatentsToDataset", latents=["latent", 0], positive=["positive", 0]),
        "network": node("TesseraLoraNetwork", model=["model", 0], module_dropout=0.1, **network),
        "train": node("TesseraTrainLora", model=["model", 0], data=["data", 0], network=["network", 0], **inputs),
        "text": node("PreviewAny", source=["network", 1]),
    }
    outputs = server.run(prompt)["outputs"]
    (network_output,), (run,) = outputs["network"]["tessera"], outputs["train"]["tessera"]
    message = f"dora on {run['targets']} of 36 layers of FLUX.1: {run['parameters']:,} trained numbers"
    assert (
        run["targets"] == 4
        and network_output["text"].startswith(message)
        and outputs["text"]["text"] == [network_output["text"]]
    )
