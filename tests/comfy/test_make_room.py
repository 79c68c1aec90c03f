"""A call of the model that found no memory is made again with all that the first one was given."""

from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import tiny
import torch
from comfy.patcher_extension import WrappersMP
from tessera.memory import make_room
from tessera.models.swapped_model import SwapSettings, swap
from tiny.sampling import sample


@pytest.mark.parametrize("by_name", [False, True])
def test_a_second_try_has_what_a_controlnet_gave(by_name: bool, tiny_files: dict[str, Path], monkeypatch: Any) -> None:
    """Core's UNet takes it out of the lists as it goes."""
    model, notes = swap(tiny.load_model("sdxl", tiny_files["sdxl"]), SwapSettings(2))
    (room,) = model.get_wrappers(WrappersMP.APPLY_MODEL, make_room.KEY)
    room.automatic = True
    monkeypatch.setattr(make_room, "_free_some", lambda patcher: 1)
    out, fails, strength = model.model.diffusion_model.out, [False], [0.0]
    forward = out.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if fails[0]:
            fails[0] = False
            raise torch.OutOfMemoryError("no room for activations")
        return forward(*args, **kwargs)

    def control(executor: Any, x: Any, t: Any, concat: Any, text: Any, _: Any, options: Any, **conds: Any) -> Any:
        added = {name: [torch.full((1, 1, 1, 1), strength[0])] * 3 for name in ("output", "middle")}
        if by_name:
            return executor(x, t, concat, text, control=added, transformer_options=options, **conds)
        return executor(x, t, concat, text, added, options, **conds)

    monkeypatch.setattr(out, "forward", run)
    # Around all others.
    model.wrappers[WrappersMP.APPLY_MODEL] = {"control": [control], **model.wrappers[WrappersMP.APPLY_MODEL]}
    bare = sample(model, "sdxl", steps=1)
    strength[0] = 0.5
    want = sample(model, "sdxl", steps=1)
    fails[0] = True
    assert torch.equal(sample(model, "sdxl", steps=1), want) and not torch.equal(want, bare)
    assert not fails[0] and any("did not suffice" in note for note in notes)
    comfy.model_management.unload_all_models()
