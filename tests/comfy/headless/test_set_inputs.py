"""Inputs that --set of run.py names, of nodes as ComfyUI itself has them."""

import nodes as core
import pytest
from comfy_api.latest import io
from comfy_extras.nodes_post_processing import ResizeImageMaskNode
from tessera.headless.errors import UsageError
from tessera.headless.execution import Run
from tessera.headless.rank import Rank
from tessera.headless.reports import Reporter, Result
from tessera.headless.workflow import set_input


class AnyName(dict):
    """As packs write it whose nodes take any input."""

    def __contains__(self, name):
        return True

    def __getitem__(self, name):
        return ("*",)


class PowerLoader:
    @classmethod
    def INPUT_TYPES(cls):
        return {"optional": AnyName()}


class TakesAll(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema("TakesAll", inputs=[io.Int.Input("steps")], outputs=[], accept_all_inputs=True)

    @classmethod
    def execute(cls, **inputs):
        return io.NodeOutput()


class TakesNone:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}


PROMPT = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "a.png", "upload": "image"}},
    "2": {"class_type": "PowerLoader", "inputs": {}},
    "3": {"class_type": "TakesAll", "inputs": {"steps": 1}},
    "4": {
        "class_type": "ResizeImageMaskNode",
        "inputs": {
            "input": ["1", 0],
            "resize_type": "scale dimensions",
            "resize_type.width": 8,
            "resize_type.height": 8,
            "resize_type.crop": "center",
            "scale_method": "area",
        },
    },
    "5": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 1}},
    "6": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}},
    "7": {"class_type": "TakesNone", "inputs": {}},
    "8": {"class_type": "Absent", "inputs": {}},
}


def check(monkeypatch, *changes):
    node_classes = {"PowerLoader": PowerLoader, "TakesAll": TakesAll, "TakesNone": TakesNone}
    for name, kind in (node_classes | {"ResizeImageMaskNode": ResizeImageMaskNode}).items():
        monkeypatch.setitem(core.NODE_CLASS_MAPPINGS, name, kind)
    prompt = {number: node | {"inputs": dict(node["inputs"])} for number, node in PROMPT.items()}
    changed = {set_input(prompt, change) for change in changes}
    Run(prompt, {}, changed, Reporter(None), Rank(), Result(None)).check_inputs()


@pytest.mark.parametrize(
    "change",
    [
        "1.image=b.png", "2.lora_1=a", "3.anything=1", "4.resize_type.width=64", "5.denoise=1", "6.prompt=a",
        "8.lora=1",
    ],
)  # fmt: skip
def test_an_input_that_the_node_takes_is_set(change, monkeypatch):
    """Required, optional and hidden ones, inputs of inputs, and any of a node that says so."""
    check(monkeypatch, change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("1.upload=a", r"LoadImage \(1\) has no input called upload; it has image"),
        ("5.step=3", r"KSampler \(5\) has no input called step; it has model, seed, steps, cfg, .*denoise"),
        ("7.a=1", r"TakesNone \(7\) has no input called a"),
        (
            "4.resize_type.widht=64",
            r"ResizeImageMaskNode \(4\) has no input called resize_type\.widht; it has input, resize_type, "
            r"scale_method, resize_type\.width, resize_type\.height, resize_type\.crop",
        ),
    ],
)
def test_an_input_that_the_node_does_not_take_is_told_with_those_that_it_has(change, said, monkeypatch):
    with pytest.raises(UsageError, match=f"^{said}\\.$"):
        check(monkeypatch, change)


def test_inputs_of_a_workflow_of_an_older_version_are_left_alone(monkeypatch):
    check(monkeypatch, "1.image=b.png")
