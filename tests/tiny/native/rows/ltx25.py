"""A stand-in for ComfyUI's LTX-2.5, which is newer than the ComfyUI of the tests.

Ours, after the interface that its stored sources show (comfy/ldm/lightricks/model.py and comfy/model_detection.py):
LTX-2.3's class whose configuration names a marker that is added to the tokens of the first frame, and whose MLPs of the
video have no bias.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import comfy.ldm.lightricks.av_model as core
import torch
from torch import nn

from . import videos

_LTX_2_3 = next(row for row in videos.FURTHER if row.name == "ltx-2.3")
ROW = replace(_LTX_2_3, name="ltx-2.5", unet={**_LTX_2_3.unet, "use_keyframes_abs_pos_embedding": True})


class MarkedModel(core.LTXAVModel):
    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        self.keyframes_abs_pos_embedding = nn.Parameter(torch.zeros(1, self.inner_dim))
        for block in self.transformer_blocks:
            for module in block.ff.modules():
                if getattr(module, "bias", None) is not None:
                    module.bias = None

    def _process_input(self, *args: Any, **kwargs: Any) -> Any:
        (video, sound), coordinates, additional_args = super()._process_input(*args, **kwargs)
        begins = coordinates[0][:, 0]
        is_first = (begins[..., 0] if begins.ndim == 3 else begins) == 0
        video = video + is_first.unsqueeze(-1).to(video.dtype) * self.keyframes_abs_pos_embedding.to(video)
        return [video, sound], coordinates, additional_args


@contextmanager
def newer_comfyui() -> Iterator[None]:
    """Run LTX-2.3's class as it is in a ComfyUI that has LTX-2.5."""
    with patch.object(core, "LTXAVModel", MarkedModel):
        yield
