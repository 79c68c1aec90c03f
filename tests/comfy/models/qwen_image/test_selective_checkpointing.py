"""Selective checkpointing of Qwen-Image keeps what attention gave, and does not compute it again."""

from typing import Any

import pytest
import tiny
from family_cases import CASES
from tessera.models.layers import ragged_attention
from tessera.train.config.settings import MemoryOptions
from tiny.models.qwen_image import qwen_sample
from tiny.train.runs import training_data
from torch.nn.attention import SDPBackend

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_what_attention_gave(case_file, tmp_path, monkeypatch, backend, mode, forwards):
    calls = []
    kernel = ragged_attention._OF_CPU[SDPBackend.FLASH_ATTENTION.value]

    def forward(*tensors: Any) -> Any:
        calls.append(1)
        return kernel.forward(*tensors)

    monkeypatch.setitem(ragged_attention._OF_CPU, SDPBackend.FLASH_ATTENTION.value, kernel._replace(forward=forward))
    data = training_data(qwen_sample("one", 4, 6, 9, [(4, 6)]))
    case = CASES["qwen-image-edit-2511"]
    trainer = tiny.make_trainer(
        case.load(case_file(case)), data, tmp_path, backend=backend, steps=1, memory=MemoryOptions(checkpointing=mode)
    )
    trainer.run()
    assert len(calls) == 2 * forwards  # two blocks
