"""Malformed states: each one is refused by name in one sentence, and passed over where a good one lies beside it."""

import copy
import json
import re
import shutil
from itertools import islice, product

import pytest
import safetensors.torch
import tiny
from comfy.model_management import InterruptProcessingException
from safetensors import safe_open
from tessera.train.checkpoint.state import DamagedState, read_header
from tessera.train.preflight.checks import check_run
from tessera.train.preflight.run_start import find_run_start, run_start_notes
from tiny.train.runs import Watcher, cancel_at, mixed_data, run_settings, train

GONE = object()
DEEP = "deeply nested"
DIGITS = "more digits than Python reads"
VALUES = {
    "missing": GONE,
    "null": None,
    "text": "text",
    "hostile text": "\ud800\n" + "x" * 10_000,
    "list": [],
    "dict": {},
    "other list": [[1, "a"], {"b": None}],
    "other dict": {"dict": [["a", 1], [2]]},
    "list as key": {"dict": [[[1], 2]]},
    "no tensor": {"tensor": "no such tensor"},
    "true": True,
    "negative": -1,
    "fraction": 0.5,
    "huge": 10**12,
    "larger": 10**400,
    "nan": float("nan"),
    "infinite": float("inf"),
    "nan in a tree": {"float": "nan"},
    "deep": DEEP,
    "digits": DIGITS,
}
# Fields that say nothing of the weights, or are those of the settings.
HARMLESS = ("machine", "validation", "point", "adapters.constraint", "adapters.factor", "parts.asked", "loss.0")
HARMLESS += ("tree: average", "entries", "group: ", "scheduler: ")
NETWORK = {"rank": 4, "alpha": 4.0, "include": ("double_blocks.0.img_attn.qkv",)}
OPTIONS = {"network": NETWORK, "optimizer": {"ema_decay": 0.9}, "steps": 3, "save_every": 1}
OPTIONS |= {"validation": {"every_n_steps": 1, "keep_best": False}}


def options(**changes):
    """Settings of the runs here; the validation is made anew, as `run_settings` takes it out."""
    return copy.deepcopy(OPTIONS) | changes


@pytest.fixture(scope="module")
def runs(tiny_files, tmp_path_factory):
    """A run that was stopped at its second step, with the states of both."""
    root = tmp_path_factory.mktemp("runs")
    model = tiny.load_flux(tiny_files["flux"])
    with pytest.raises(InterruptProcessingException):
        train(model, mixed_data(), root, cancel_at(2), **options())
    return model, check_run(model, mixed_data(), run_settings(**options())), root


@pytest.fixture
def stopped(runs, tmp_path):
    """(model, its checks, a copy of the runs' folder, the newest state in it)."""
    model, checked, root = runs
    shutil.copytree(root, tmp_path / "runs")
    (newest,) = (tmp_path / "runs").glob("*/state-000002.tessera")
    return model, checked, tmp_path / "runs", newest


def read(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def write(path, tensors, metadata, plain):
    text = json.dumps(plain)
    text = text.replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).replace(json.dumps(DIGITS), "9" * 5000)
    safetensors.torch.save_file(tensors, path, metadata | {"tessera": text})


def part(packed, *keys):
    """The packed value under these keys of packed dicts."""
    for key in keys:
        (packed,) = [value for name, value in packed["dict"] if name == key]
    return packed


def places(plain):
    """Places of every field of a state: (a dict or list, the place in it) by the field's name."""
    (adapter,) = plain["adapters"]
    (segment,) = plain["parts"]
    tree = plain["tree"]
    (point, *_), groups = plain["validation"]["points"], part(tree, "optimizer", "param_groups")
    tables = {"": plain, "adapters.": adapter, "parts.": segment, "machine.": plain["machine"]}
    tables |= {"validation.": plain["validation"], "point.": point}
    entries = {f"{prefix}{name}": (table, name) for prefix, table in tables.items() for name in table}
    lists = {"adapters": plain["adapters"], "layers": adapter["layers"], "parts": plain["parts"], "loss": plain["loss"]}
    lists |= {"points": plain["validation"]["points"], "groups": groups}
    entries |= {f"{name}.0": (table, 0) for name, table in lists.items()}
    packed = {
        "tree": tree,
        "optimizer": part(tree, "optimizer"),
        "entries": part(tree, "optimizer", "state"),
        "entry": part(tree, "optimizer", "state", 0),
        "group": groups[0],
        "scheduler": part(tree, "scheduler"),
        "average": part(tree, "average"),
        "averages": part(tree, "average", "masters"),
    }
    for prefix, table in packed.items():
        entries |= {f"{prefix}: {name}": (table["dict"], number) for number, (name, _) in enumerate(table["dict"])}
    return entries


def change(table, place, value, packed):
    if value is GONE:
        del table[place]
    elif packed:
        table[place][1] = value
    else:
        table[place] = value


def malformed(plain, fields, value):
    """The state with another value for these fields."""
    plain = copy.deepcopy(plain)
    entries = places(plain)
    for field in reversed(fields):  # the last ones first, as others move up where one is deleted
        change(*entries[field], value, ": " in field)
    return plain


def start_run(stopped, **changes):
    """(state that the run goes on from, the notes on it)."""
    _, checked, root, _ = stopped
    settings = run_settings(**options(**changes))
    start = find_run_start(checked.patcher, checked, settings, root)
    return start.state, list(run_start_notes(start, settings, root))


def assert_one_sentence(sentence):
    assert sentence.startswith("resume: ") and sentence.isprintable() and len(sentence) < 400 and sentence[-1] == "."


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.wide)])
def test_a_value_that_no_state_has_is_named_and_the_older_state_is_taken_or_it_does_no_harm(step, stopped):
    """Each field with each value, or with every `step`-th in turn. Where a state is taken, the run goes on from it to
    its end."""
    model, _, root, newest = stopped
    tensors, metadata = read(newest)
    plain = json.loads(metadata["tessera"])
    resume = newest.relative_to(root).as_posix()
    fields_by_kind = {kind: [] for kind in VALUES}
    for field, (kind, value) in islice(product(places(plain), VALUES.items()), None, None, step):
        write(newest, tensors, metadata, malformed(plain, [field], value))
        state, notes = start_run(stopped)
        if state == newest:
            fields_by_kind[kind].append(field)
            continue
        assert state is not None and state.name == "state-000001.tessera", (field, kind)
        if (field, kind) == ("lineage", "text"):  # of another run, for all that it says
            continue
        (note,) = notes
        assert note.startswith(f"{resume} is skipped: ") and len(note) < 400, (field, kind, note)
        with pytest.raises(ValueError) as refused:
            start_run(stopped, resume=resume)
        assert_one_sentence(str(refused.value))
    assert {field for fields in fields_by_kind.values() for field in fields if not field.startswith(HARMLESS)} == set()
    for number, (kind, fields) in enumerate(fields_by_kind.items()):
        if fields:
            shutil.copytree(root, copy := root.with_name(str(number)))
            write(copy / resume, tensors, metadata, malformed(plain, fields, VALUES[kind]))
            watcher = Watcher()
            result = train(model, mixed_data(), copy, watcher, **options())
            assert result.summary["status"] == "finished" and len(watcher.losses) == 1, (kind, fields)


def with_unknown(plain, location):
    """The state with what a later version might add."""
    plain = copy.deepcopy(plain)
    adapter = plain["adapters"][0]
    if location == "format":
        plain["format"] = 2
    elif location == "algorithm":
        adapter["algorithm"] = "boft"
    elif location == "tree":
        plain["tree"]["dict"].append(["another", 1])
    else:
        (adapter if location == "adapter" else plain)["another"] = 1
    return plain


@pytest.mark.parametrize("location", ["state", "adapter", "tree", "algorithm", "format"])
@pytest.mark.parametrize("version", ["0.2.0", "\n<b>0.2", None])
def test_a_field_that_this_version_does_not_know_says_which_version_wrote_it(location, version, stopped):
    _, _, root, newest = stopped
    tensors, metadata = read(newest)
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata.pop("tessera_version"))
    metadata |= {} if version is None else {"tessera_version": version}
    write(newest, tensors, metadata, with_unknown(json.loads(metadata["tessera"]), location))
    writer = "version 0.2.0" if version == "0.2.0" else "another version"
    with pytest.raises(DamagedState) as refused:
        read_header(newest)
    sentence = str(refused.value)
    assert_one_sentence(sentence)
    assert f"{newest.name} was written by {writer} of Tessera, and this one (" in sentence
    field = {"algorithm": "algorithm boft", "format": "format"}.get(location, "another")
    assert f"does not know its field '{field}'; update Tessera, choose another state" in sentence
    state, (note,) = start_run(stopped)
    assert state.name == "state-000001.tessera" and f"skipped: it was written by {writer} of Tessera" in note


def test_a_damaged_state_of_a_run_with_other_settings_is_not_spoken_of(stopped):
    *_, newest = stopped
    tensors, metadata = read(newest)
    write(newest, tensors, metadata, json.loads(metadata["tessera"]) | {"lineage": "of others", "step": -1})
    state, notes = start_run(stopped)
    assert state.name == "state-000001.tessera" and notes == []


def test_damaged_states_are_named_up_to_five(stopped):
    _, _, root, newest = stopped
    for step in range(3, 12):
        newest.with_name(f"state-{step:06d}.tessera").write_bytes(b"half a state")
    state, notes = start_run(stopped)
    assert state == newest and len(notes) == 6 and notes[-1] == "4 more damaged states are skipped."
