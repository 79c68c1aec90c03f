"""In a real ComfyUI: one training goes on from another's LORA_MODEL, and from its file, on top of it too."""

import pytest
from comfy_server import ServerFailure
from tiny.nodes.prompt import node
from tiny.nodes.server_runs import put_pictures, training_graph


def network(**inputs):
    plain = {"algorithm": "lora", "rank": 4, "alpha": 4.0, "targets": "single_blocks.*.linear2", "dropout": 0.0}
    return node("TesseraLoraNetwork", **plain, **inputs)


def test_a_lora_of_the_graph_and_a_file_of_it_begin_the_same_run(server, tiny_loaders):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, name="first", steps=2, save_every=0)
    graph["own"] = network()
    graph["train"]["inputs"]["network"] = ["own", 0]
    graph["further"] = network(start_lora=["train", 0])
    settings = graph["train"]["inputs"] | {"steps": 1, "save_every": 0}
    graph["second"] = node("TesseraTrainLora", **settings | {"output_name": "second", "network": ["further", 0]})
    outputs = server.run(graph)["outputs"]
    (first,), (second,) = outputs["train"]["tessera"], outputs["second"]["tessera"]
    assert (first["status"], second["status"]) == ("finished", "finished")
    assert second["loss"][0] != first["loss"][0]

    file = first["path"].removeprefix("loras/")
    third_run = training_graph(tiny_loaders, name="third", steps=1, save_every=0)
    third_run["own"] = network(start_from=file, base_lora=file, base_strength=0.5)
    third_run["train"]["inputs"]["network"] = ["own", 0]
    (third,) = server.run(third_run)["outputs"]["train"]["tessera"]
    assert "Trained on top of first.safetensors at strength 0.5; the saved LoRA has only what is new." in third["notes"]
    third_run["own"] = network(start_from=file)
    (fourth,) = server.run(third_run)["outputs"]["train"]["tessera"]
    assert fourth["loss"] == second["loss"] and third["loss"] != second["loss"]
    third_run["own"] = network(start_from="../../escape.safetensors")
    with pytest.raises(ServerFailure, match="escape.safetensors"):
        server.run(third_run)
