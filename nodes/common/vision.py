"""Vision encoders of the graph."""

from typing import Any

import torch

from ...common.fingerprint import weights_fingerprint
from ...data.review.check import Encoder


def vision_encoder(clip_vision: Any) -> Encoder:
    """Make the encoder of a CLIP_VISION, whose embeddings compare pictures."""

    def encode(image: torch.Tensor) -> torch.Tensor:
        embedding: torch.Tensor = clip_vision.encode_image(image)["image_embeds"]
        return embedding

    return Encoder(encode, weights_fingerprint(clip_vision.patcher))
