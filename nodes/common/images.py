"""Pillow images as ComfyUI's IMAGE."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def image_tensor(image: Image.Image) -> Tensor:
    """Convert to float32 (1, H, W, 3) in 0 to 1."""
    return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255.0)[None]
