"""The graphs of `dev.py card`'s nodes, and what the kit carries for them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from card.nodes import graphs
from card.nodes.cases import OWN_MALLOC, nodes

PACK = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def shared() -> graphs.Graph:
    return graphs.read(PACK / "workflows")


def kinds(graph: graphs.Graph) -> list[str]:
    return sorted(node["class_type"] for node in graph.values())


def model_of(graph: graphs.Graph, number: str) -> list[str]:
    """Kinds of the nodes that a node's model comes through, the nearest first."""
    class_types = []
    while isinstance(link := graph[number]["inputs"].get("model"), list):
        number = link[0]
        class_types.append(graph[number]["class_type"])
    return class_types


def card_graphs(shared: graphs.Graph) -> dict[str, graphs.Graph]:
    chain = [graphs.swap_node(), graphs.compile_node(mode="reduce-overhead")]
    return {
        "training": graphs.training(shared, 120, "auto"),
        "plain": graphs.sampling(shared, [], "plain"),
        "changed": graphs.sampling(shared, chain, "changed"),
        "lora": graphs.swap_with_lora(shared, 20, chain[:1]),
    }


def test_every_link_leads_to_a_node_of_the_graph(shared):
    for name, graph in card_graphs(shared).items():
        links = [value for node in graph.values() for value in node["inputs"].values() if isinstance(value, list)]
        assert links and all(link[0] in graph for link in links), name


def test_training_is_the_shared_workflow_with_fewer_steps(shared):
    graph = graphs.training(shared, 120, "auto")
    assert kinds(graph) == kinds(shared)
    (train,) = (node["inputs"] for node in graph.values() if node["class_type"] == "TesseraTrainLora")
    assert (train["steps"], train["compile"], train["save_every"]) == (120, "auto", 60)
    (original,) = (node["inputs"] for node in shared.values() if node["class_type"] == "TesseraTrainLora")
    assert original["steps"] == 800


def test_two_pictures_are_sampled_behind_the_chain_and_reported_on(shared):
    graph = card_graphs(shared)["changed"]
    samplers = [number for number, node in graph.items() if node["class_type"] == "KSampler"]
    assert [graph[number]["inputs"]["seed"] for number in samplers] == list(graphs.SEEDS)
    for number in samplers:
        assert model_of(graph, number) == ["TesseraCompileModel", "TesseraBlockSwap", "TesseraTryItModels"]
    assert model_of(graph, "report") == model_of(graph, samplers[0])
    assert "TesseraTrainLora" not in kinds(graph) and "report" not in card_graphs(shared)["plain"]


def test_the_lora_is_trained_once_and_sampled_resident_and_swapped(shared):
    graph = card_graphs(shared)["lora"]
    assert kinds(graph).count("TesseraTrainLora") == kinds(graph).count("LoraModelLoader") == 1
    behind = [model_of(graph, number)[0] for number, node in graph.items() if node["class_type"] == "KSampler"]
    assert behind == ["LoraModelLoader"] * 2 + ["TesseraBlockSwap"] * 2


def test_a_report_without_graphs_or_with_eager_calls_fails():
    def report_node(graphs_: int, eager: int) -> dict[str, Any]:
        regions = [{"eager_calls": eager, "recompiles": ["size 3"]}]
        report = {"graphs": graphs_, "compile_seconds": 4.2, "graph_breaks": 0, "notes": ["a note"], "regions": regions}
        return {"report": {"tessera": [report]}}

    words = "2 graphs in 4 s, 0 breaks, 1 compiled again, 0 eager calls; a note"
    assert graphs.read_report(report_node(2, 0)) == (words, True)
    assert not graphs.read_report(report_node(0, 0))[1] and not graphs.read_report(report_node(2, 1))[1]
    assert graphs.read_report({}) == ("", True)


def compile_settings(name: str) -> list[dict[str, Any]]:
    return [case.settings[name] for group in nodes("cuda") for case in group.cases if name in case.settings]


def test_each_mode_and_scope_of_compile_model_runs_and_graphs_have_their_allocator():
    assert {settings.get("mode", "default") for settings in compile_settings("compiled")} == {
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
    }
    assert {settings.get("scope", "blocks") for settings in compile_settings("compiled")} == {
        "blocks",
        "stack",
        "model",
    }
    default, graphs_ = nodes("cuda")
    assert (default.spec["option"], graphs_.spec["option"]) == ("", OWN_MALLOC)
    assert {case.settings["compiled"]["mode"] for case in graphs_.cases} == {"reduce-overhead", "max-autotune"}


def test_the_kit_pins_every_wheel_that_comfyui_does_not_pin_itself():
    card = PACK / "benchmarks" / "card"
    lines = (card / "wheels.txt").read_text().splitlines()
    wheels = [line for line in lines if not line.startswith("#")]
    assert len(wheels) == 17 and all(re.fullmatch(r"[A-Za-z0-9-]+==[0-9.]+", line) for line in wheels)
    pack = (card / "pack.sh").read_text()
    assert "comfy-aimdo==$(asked comfy-aimdo)" in pack and "comfy-kitchen==$(asked comfy-kitchen)" in pack
