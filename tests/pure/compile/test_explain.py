"""Sentences for every kind of graph break that the installed torch knows."""

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from tessera.compile.report.explain import advice, explain_break

_TORCH = find_spec("torch")  # found, not loaded
assert _TORCH is not None and _TORCH.origin is not None
_REGISTRY = json.loads((Path(_TORCH.origin).parent / "_dynamo" / "graph_break_registry.json").read_text())
KINDS = sorted({entry["Gb_type"] for entries in _REGISTRY.values() for entry in entries})
# Torch 2.11 has them not yet, 2.14 has them.
NEWER = {"Custom op missing fake impl during tracing", "Data pointer comparison", "Tensor device mismatch"}
HAS_NEWER = tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "reads a tensor's value"),
        ("Data-dependent branching", "reads a tensor's value"),
        ("Dynamic shape operator", "reads a tensor's value"),
        ("Attempted to call function marked as skipped", "cannot look into"),
        ("Failed to trace builtin operator", "cannot look into"),
        ("Skip calling `torch.compiler.disable()`d function", "excluded"),
        ("Attempt to trace generator", "generator"),
        ("Unsupported context manager", "context manager"),
        ("logging.Logger method not supported for non-export cases", "prints or logs"),
        ("HOP: Unsafe side effect", "changes an object outside"),
        ("Operator does not support running with fake tensors", "fake kernel"),
        ("Custom op missing fake impl during tracing", "fake kernel"),
        ("Data pointer comparison", "memory address"),
        ("Dynamo recompile limit exceeded", "limit of graphs"),
        ("Storing Tensor hook handle in globals", "hook"),
        ("Tensor.numpy() with trace_numpy=False", "numpy"),
        ("Tensor device mismatch", "different devices"),
        ("graph break in loop", "inside a loop"),
    ],
)
def test_the_kinds_that_models_meet_are_kinds_of_this_torch_and_have_their_words(kind, said):
    assert kind in KINDS or (kind in NEWER and not HAS_NEWER)
    assert said in explain_break(f"{kind}\n  Explanation: what torch says\n  Hint: no hint")


def test_every_kind_has_one_sentence_that_names_no_part_of_torchs_inside():
    for kind in KINDS:
        words = explain_break(f"{kind}\n  Explanation: Dynamo gives up.\n  Hint: report it")
        assert words.endswith(".") and "\n" not in words and "Dynamo gives" not in words and "report it" not in words


def test_a_kind_without_words_of_ours_is_told_with_torchs_own():
    words = explain_break("A kind of tomorrow\n  Explanation: Dynamo does not know\n  this yet.\n  Hint: wait")
    assert words == "Torch cannot trace this (A kind of tomorrow): torch does not know this yet."


def test_the_first_cause_is_told_where_another_followed():
    words = explain_break(
        "Data-dependent branching\n  Explanation: x\n\n"
        "*** While handling this graph break, another graph break occurred: ***\n\ngraph break in loop"
    )
    assert "reads a tensor's value" in words


def test_a_message_that_is_empty_or_plain_is_told_too():
    assert explain_break("something odd") == "Torch cannot trace this (something odd): something odd."


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ("2 <= x.size()[0] <= 5", "dynamic"),
        ("len(block.img_attn.qkv.weight_function) == 1, actual 0", "partly loaded"),
        ("not ___dict_contains('optimized_attention_override', kwargs['transformer_options'])", "attention override"),
        ("___check_obj_id(block.act, 12), type=<class 'function'>, actual function gelu", "replaces one"),
        ("len(args) == 1, actual 2", "more or fewer"),
        ("___tuple_iterator_len(x) == 3", "another value"),
        ("the graph was made invalid", "reload"),
        ("something of tomorrow", "has changed"),
    ],
)
def test_a_guard_has_its_advice(guard, said):
    assert said in advice(guard)
