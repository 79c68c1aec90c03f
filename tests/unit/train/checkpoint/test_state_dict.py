import json

import pytest
import torch
from tessera.train.optim.state_dict import pack_state, unpack_state


def there_and_back(state):
    tensors, tree = pack_state(state, "x")
    return tensors, unpack_state(tensors, json.loads(json.dumps(tree, allow_nan=False)))


def test_python_values_come_back_with_their_types():
    state = {
        "a": [1, 1.0, True, None, "text", (2, (3.5,)), [], {}],
        0: {"0": 0.1 + 0.2, 1: float("inf"), (1, "b"): float("-inf")},
        "dict": {"tuple": "tensor", "float": -0.0},
    }
    back = there_and_back(state)[1]
    assert repr(back) == repr(state)


def test_nan_comes_back():
    assert there_and_back({"a": float("nan")})[1]["a"] != there_and_back(0)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_tensors_come_back_bit_for_bit(dtype):
    state = {3: {"m": torch.arange(6).reshape(2, 3).to(dtype), "step": torch.tensor(7.0), "empty": torch.empty(0, 4)}}
    tensors, back = there_and_back(state)
    assert set(tensors) == {"x.3.m", "x.3.step", "x.3.empty"}
    for name, tensor in state[3].items():
        assert torch.equal(back[3][name], tensor) and back[3][name].dtype == tensor.dtype


def test_packed_state_does_not_change_with_the_next_step():
    live = torch.zeros(3)
    tensors, _ = pack_state({"m": live})
    live += 1
    assert all(torch.equal(t, torch.zeros(3)) for t in tensors.values())


def test_a_shared_tensor_is_stored_once_and_a_view_becomes_contiguous():
    table, base = torch.arange(4.0), torch.arange(6.0).reshape(2, 3)
    tensors, back = there_and_back({"p": table, "q": table, "r": base.T})
    assert len(tensors) == 2 and back["p"] is back["q"]
    assert all(t.is_contiguous() for t in tensors.values())
    assert torch.equal(back["r"], base.T)


def test_values_that_cannot_be_held_are_refused():
    with pytest.raises(TypeError, match="x.a is a set"):
        pack_state({"a": {1}}, "x")


def test_a_damaged_state_is_named():
    tensors, tree = pack_state({"m": torch.zeros(1)}, "x")
    with pytest.raises(ValueError, match="lacks the tensor 'x.m'"):
        unpack_state({}, tree)
    with pytest.raises(ValueError, match="no part of a state"):
        unpack_state(tensors, {"pickle": "x"})
