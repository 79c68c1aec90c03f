"""A WD tagger: its table, the choice of tags, and a tiny ONNX model if the packages for it are installed."""

import sys

import numpy as np
import pytest
import torch
from tessera.data.captioning.instruction import CaptionStyle
from tessera.data.captioning.tagger import TABLE, Tagger, chosen_tags, read_table

ROWS = "tag_id,name,category,count\n1,general,9,1\n2,red_fox,0,9\n3,^_^,0,9\n4,miss_fox,4,9\n5,snow,0,9\n"


@pytest.fixture
def table(tmp_path):
    (tmp_path / TABLE).write_text(ROWS, encoding="utf-8")
    return tmp_path / TABLE


def test_likely_tags_are_chosen_characters_first_and_no_rating(table):
    tags = read_table(table)
    assert [tag.name for tag in tags] == ["general", "red fox", "^_^", "miss fox", "snow"]
    assert chosen_tags(tags, [0.99, 0.4, 0.2, 0.9, 0.7], 0.35) == ["miss fox", "snow", "red fox"]
    assert chosen_tags(tags, [0.99, 0.4, 0.2, 0.8, 0.7], 0.35) == ["snow", "red fox"]


def test_a_missing_or_damaged_table_and_a_missing_package_say_what_to_do(table, monkeypatch):
    with pytest.raises(ValueError, match="put selected_tags.csv of the same download beside the model"):
        read_table(table.with_name("other") / TABLE)
    table.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no columns name and category"):
        read_table(table)
    table.write_text(ROWS)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match="pip install onnxruntime"):
        Tagger(table.with_name("model.onnx"), CaptionStyle(), 0.35)


def write_model(path, weights, side=8):
    """A tagger whose tags are sums over a picture (N, side, side, 3), each by the weights of blue, green and red."""
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    floats = onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [
            make.make_node("ReduceMean", ["picture"], ["colour"], axes=[1, 2], keepdims=0),
            make.make_node("MatMul", ["colour", "weights"], ["logits"]),
            make.make_node("Sigmoid", ["logits"], ["tags"]),
        ],
        "tagger",
        [make.make_tensor_value_info("picture", floats, ["N", side, side, 3])],
        [make.make_tensor_value_info("tags", floats, ["N", weights.shape[1]])],
        [onnx.numpy_helper.from_array(weights.astype(np.float32), "weights")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(path))


def test_a_tagger_reads_pictures_as_wd_taggers_do(table):
    pytest.importorskip("onnxruntime")
    model = table.with_name("model.onnx")
    weights = np.zeros((3, 5))
    weights[2, 1] = weights[0, 4] = 1 / 32  # "red fox" of red, "snow" of blue
    weights[:, [0, 2, 3]] = -1
    write_model(model, weights)
    tagger = Tagger(model, CaptionStyle("tags", never_use="snow"), 0.9)
    assert tagger.size(100, 50) == (8, 4)
    red = torch.zeros(1, 8, 4, 3)
    red[..., 0] = 1
    blue = red.flip(-1)
    assert tagger.caption(red) == "red fox"  # beside white, which holds all colours; and snow may not be named
    assert Tagger(model, CaptionStyle("tags"), 0.99).caption(blue) == "snow"
    assert tagger.key() != Tagger(model, CaptionStyle("tags"), 0.9).key()
    table.write_text(ROWS + "6,more,0,1\n")
    with pytest.raises(ValueError, match="knows 5 tags, but its table has 6"):
        Tagger(model, CaptionStyle(), 0.35).caption(red)
    model.write_bytes(b"no model")
    with pytest.raises(ValueError, match="can't be loaded"):
        Tagger(model, CaptionStyle(), 0.35)
