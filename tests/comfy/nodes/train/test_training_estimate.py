"""Training Estimate, queued over the API in place of Train LoRA, with the same inputs."""

from tessera.nodes.train.train_lora import TesseraTrainLora
from tessera.nodes.train.training_estimate import TesseraTrainingEstimate
from tiny.nodes.server_runs import put_pictures, training_graph


def test_the_graph_of_a_training_gives_its_estimate_and_no_file(server, tiny_loaders):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, "estimated", steps=1000, devices="this one", preset="custom")
    graph["train"]["class_type"] = "TesseraTrainingEstimate"
    before = sorted((server.base / "output").rglob("*"))
    shown = server.run(graph)["outputs"]["train"]
    assert sorted((server.base / "output").rglob("*")) == before
    (payload,) = shown["tessera"]
    (text,) = shown["text"]
    assert text.startswith("\n".join(payload["lines"])) and payload["fixes"] == []
    assert all(cell in text for row in payload["rows"] for cell in row)
    assert payload["estimate"]["trial"]["seconds"] > 0 and payload["estimate"]["steps"] == 1000
    assert payload["lines"][0].startswith("Measured ") and "rank 4 to 8" in [row[0] for row in payload["rows"]]


def test_the_inputs_are_those_of_train_lora():
    inputs, expected = (
        [i.as_dict() for i in n.define_schema().inputs] for n in (TesseraTrainingEstimate, TesseraTrainLora)
    )
    assert inputs == expected
