"""Trains the tiny VAE of the Try it workflow, `models/try_it/vae.safetensors`.

Run: python tools/try_it/train_vae.py, in the environment of the tests. It takes about ten minutes on one core.

It sees photographs from scikit-image and scikit-learn and random coloured shapes, never the pictures of the workflow.
One small network encodes and decodes each colour by itself: 5 latent channels at an eighth of the size. Three of them
side by side, with zeros between, are a TAESD (`models/try_it/vae.py`), which ComfyUI's loader reads; this is why there
are 20 channels, no biases and a tanh.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from photos import write_photos  # noqa: E402

FILE = ROOT / "models" / "try_it" / "vae.safetensors"
WIDTH, LATENT = 20, 5  # channels of one colour
CROP, BATCH = 48, 12
SMALL_SIDES = (96, 128, 192)  # pixels of a photograph's shorter side


class Encoder(nn.Module):
    """(B, 1, H, W) in 0 to 1 → (B, 5, H / 8, W / 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, 2, 1, bias=False) for _ in range(3))
        self.last = nn.Conv2d(WIDTH, LATENT, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for conv in self.down:
            x = F.relu(conv(x))
        return self.last(x)


class Decoder(nn.Module):
    """(B, 5, H, W) → (B, 1, 8 H, 8 W)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(LATENT, WIDTH, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(3))
        self.last = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.first(torch.tanh(z / 3) * 3))
        for conv in self.up:
            x = F.relu(conv(F.interpolate(x, scale_factor=2)))
        return self.last(x)


def photographs() -> list[Tensor]:
    """(3, H, W) in 0 to 1 each."""
    tensors = []
    with tempfile.TemporaryDirectory() as folder:
        for file, _ in write_photos(Path(folder)).values():
            image = Image.open(file).convert("RGB")
            for side in SMALL_SIDES:
                scale = side / min(image.size)
                size = (round(image.width * scale), round(image.height * scale))
                tensors.append(_tensor(image.resize(size, Image.Resampling.LANCZOS)))
    return tensors


def shapes(count: int = 60, side: int = 128) -> list[Tensor]:
    """Pictures of random ovals, boxes and triangles in random colours."""
    tensors = []
    for _ in range(count):
        image = Image.new("RGB", (2 * side, 2 * side), _colour())
        pen = ImageDraw.Draw(image)
        for _ in range(14):
            x, y = (random.uniform(-0.1, 0.9) * 2 * side for _ in range(2))
            width, height = (random.uniform(0.04, 0.5) * 2 * side for _ in range(2))
            draw = random.choice((pen.ellipse, pen.rectangle, None))
            if draw is not None:
                draw((x, y, x + width, y + height), fill=_colour())
            else:
                pen.polygon([(x, y + height), (x + width, y + height), (x + random.random() * width, y)], _colour())
        tensors.append(_tensor(image.resize((side, side), Image.Resampling.LANCZOS)))
    return tensors


def _colour() -> tuple[int, ...]:
    return tuple(random.randrange(256) for _ in range(3))


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def crops(pictures: list[Tensor]) -> Tensor:
    """A batch of one colour each: (B, 1, H, W)."""
    pieces = []
    for _ in range(BATCH):
        picture = random.choice(pictures)
        y, x = (random.randrange(size - CROP + 1) for size in picture.shape[1:])
        crop = picture[random.randrange(3), y : y + CROP, x : x + CROP]
        pieces.append(crop.flip(1) if random.random() < 0.5 else crop)
    return torch.stack(pieces)[:, None]


def train(steps: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    kinds = (photographs(), shapes())
    encoder, decoder = Encoder(), Decoder()
    for module in (*encoder.modules(), *decoder.modules()):
        if isinstance(module, nn.Conv2d):
            gain = 1.4 if module.out_channels == WIDTH else 1.0
            nn.init.orthogonal_(module.weight.data.view(module.weight.shape[0], -1), gain=gain)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=0.1)
    started, mean = time.monotonic(), 0.0
    for step in range(steps):
        pictures = crops(kinds[step % 2])
        latent = encoder(pictures)
        # A little noise, so that noise left by a sampler does no harm.
        decoded = decoder(latent + 0.1 * torch.randn_like(latent))
        error = F.mse_loss(decoded, pictures)
        # Uncorrelated channels of mean 0 and variance 1 are easiest to learn for a model of normal noise.
        by_channel = latent.permute(1, 0, 2, 3).flatten(1)
        centred = by_channel - by_channel.mean(1, keepdim=True)
        covariance = centred @ centred.T / centred.shape[1]
        spread = (covariance - torch.eye(LATENT)).square().mean() + latent.mean((0, 2, 3)).square().mean()
        loss = error + 0.2 * F.l1_loss(decoded, pictures) + 0.002 * spread
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        mean = 0.98 * mean + 0.02 * float(error.detach())
        if step % 500 == 499 or step == steps - 1:
            quality = -10 * np.log10(mean)
            print(f"{step + 1}: {quality:.2f} dB, {time.monotonic() - started:.0f} s", flush=True)
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    tensors |= {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    save_file({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, FILE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    train(parser.parse_args().steps)
