"""LoRAs on distilled models: how far training undoes the distillation, plainly and with each remedy.

Run: python benchmarks distilled > benchmarks/results/distilled.md
A tiny FLUX is the teacher, fitted to a toy set whose exact velocities are known. Two students are distilled from it:
one has its guidance in one forward, the other takes few steps besides. The pack's own trainer then trains LoRAs of a
new caption on them. Needs ComfyUI as the other benchmarks do; a few minutes for each seed, on a core each.
"""

import argparse
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from comfyui import ROOT, load_tiny_writers, set_up_comfyui
from figures import markdown_table
from safetensors.torch import save_file
from torch import Tensor

Tensors = Mapping[str, Tensor]
Lora = Mapping[str, tuple[Tensor, Tensor, float]]
Field = Callable[[Tensor, float, Sequence[int]], Tensor]
"""(x_t, sigma, captions) → velocity, (B, 16, 4, 4)."""

GUIDANCE = 3.0
CHANNELS = 16
SIDE = 4
WIDTH = 16
KNOWN = 6
EMPTY, NEW = -1, KNOWN  # captions besides the known ones: none, and the one that a LoRA learns
SPREAD, REST = 0.5, 0.05  # of a picture around its caption's, along the four directions of the set and elsewhere
FINE, FEW = 16, 4  # steps of the students' samplers
BATCH = 32
EXACT_STEPS = 64
SCALE, SHIFT = 0.3611, 0.1159  # FLUX.1's latents to the model's space
flux_forward = runpy.run_path(str(ROOT / "tests" / "reference" / "flux.py"))["flux_forward"]


class ToySet:
    """Captions that overlap: pictures of caption k are normally distributed around a point in a space of four
    directions.

    The new caption is a known one with another word; its pictures are between those of the known ones.
    """

    def __init__(self, seed: int):
        draw = torch.Generator().manual_seed(seed)
        size = CHANNELS * SIDE * SIDE
        self.directions = torch.linalg.qr(torch.randn(size, 4, generator=draw)).Q
        points = torch.randn(KNOWN, 4, generator=draw)
        points = 1.5 * points / points.norm(dim=1, keepdim=True)
        new = 0.5 * points[0] + 0.5 * points[1] + 0.3 * torch.randn(4, generator=draw)
        self.points = torch.cat((points, new[None]))
        words = torch.randn(KNOWN + 2, WIDTH, generator=draw)
        blank, trigger = words[KNOWN], words[KNOWN + 1]
        texts = [torch.stack((words[k], blank)) for k in range(KNOWN)] + [torch.stack((words[0], trigger))]
        self.texts = torch.stack([*texts, torch.stack((blank, blank))])  # the last one is the empty caption
        self.pooled = self.texts.mean(dim=1)

    def pictures(self, captions: Sequence[int], draw: torch.Generator) -> Tensor:
        inside = self.points[list(captions)] + SPREAD * torch.randn(len(captions), 4, generator=draw)
        flat = inside @ self.directions.T
        flat = flat + REST * torch.randn(flat.shape, generator=draw)
        return flat.view(-1, CHANNELS, SIDE, SIDE)

    def velocity(self, x: Tensor, sigma: float | Tensor, captions: Sequence[int]) -> Tensor:
        """The exact mean of noise − x0, of normal distributions; the empty caption's is the known ones mixed."""
        flat = x.flatten(1)
        inside = flat @ self.directions
        narrow = REST**2
        wide = REST**2 + SPREAD**2
        sigma = torch.as_tensor(sigma).reshape(-1, 1)
        keep = 1.0 - sigma

        def shrunk(variance: float) -> Tensor:
            return keep * variance / (keep**2 * variance + sigma**2)

        away = inside[:, None] - keep[..., None] * self.points[None]  # (B, captions, 4)
        guess = self.points[None] + shrunk(wide)[..., None] * away
        logs = -away[:, :KNOWN].square().sum(2) / (2 * (keep**2 * wide + sigma**2))
        mixed = (logs.softmax(1)[..., None] * guess[:, :KNOWN]).sum(1)
        rows = torch.tensor(list(captions))
        caption_guess = guess[torch.arange(len(x)), rows.clamp_min(0)]
        inside_clean = torch.where(rows[:, None] == EMPTY, mixed, caption_guess)
        outside = flat - inside @ self.directions.T
        clean = inside_clean @ self.directions.T + shrunk(narrow) * outside
        return ((flat - clean) / sigma).view_as(x)


def guided(field: Field) -> Field:
    def velocity(x: Tensor, sigma: float, captions: Sequence[int]) -> Tensor:
        empty = field(x, sigma, [EMPTY] * len(captions))
        return empty + GUIDANCE * (field(x, sigma, captions) - empty)

    return velocity


def path(field: Field, noise: Tensor, captions: Sequence[int], steps: int) -> list[Tensor]:
    """Return all points of Euler's method from noise to the picture, both included."""
    points = [noise]
    for step in range(steps):
        points.append(points[-1] - field(points[-1], 1.0 - step / steps, captions) / steps)
    return points


def tokens(x: Tensor) -> Tensor:
    half = SIDE // 2
    return x.reshape(-1, CHANNELS, half, 2, half, 2).permute(0, 2, 4, 1, 3, 5).reshape(len(x), half * half, -1)


def latents(t: Tensor) -> Tensor:
    half = SIDE // 2
    return t.reshape(-1, half, half, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, CHANNELS, SIDE, SIDE)


def forward(weights: Tensors, toy: ToySet, x: Tensor, sigma: Tensor, captions: Sequence[int], lora: Lora) -> Tensor:
    half, rows = SIDE // 2, list(captions)
    places = torch.stack(torch.meshgrid(torch.arange(half), torch.arange(half), indexing="ij"), -1).reshape(1, -1, 2)
    ids = torch.cat((torch.zeros(1, half * half, 1), places), dim=2).expand(len(x), -1, -1)
    out = flux_forward(weights, tokens(x), ids, toy.texts[rows], toy.pooled[rows], sigma, None, num_heads=1, lora=lora)
    return latents(out)


def field_of(weights: Tensors, toy: ToySet, lora: Lora | None = None) -> Field:
    def velocity(x: Tensor, sigma: float, captions: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return forward(weights, toy, x, torch.full((len(x),), sigma), captions, lora or {})

    return velocity


def fit(
    weights: Tensors, toy: ToySet, steps: int, batch: Callable[[], tuple[Tensor, Tensor, list[int], Tensor]]
) -> Any:
    """Train all weights towards the targets that `batch` gives: (x_t, sigma, captions, target)."""
    learned = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    optimizer = torch.optim.Adam(learned.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x, sigma, captions, target = batch()
        loss = (forward(learned, toy, x, sigma, captions, {}) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimizer.step()
        schedule.step()
    return {name: tensor.detach() for name, tensor in learned.items()}


@dataclass(frozen=True)
class Sizes:
    teacher: int
    student: int
    adapter: int
    lora: int
    pictures: int
    measured: int


def known_captions(count: int, draw: torch.Generator, dropout: float = 0.15) -> list[int]:
    captions = torch.randint(KNOWN, (count,), generator=draw)
    return torch.where(torch.rand(count, generator=draw) < dropout, EMPTY, captions).tolist()


def make_teacher(weights: Tensors, toy: ToySet, sizes: Sizes, draw: torch.Generator) -> Tensors:
    def batch() -> tuple[Tensor, Tensor, list[int], Tensor]:
        true_captions = torch.randint(KNOWN, (BATCH,), generator=draw).tolist()
        x0 = toy.pictures(true_captions, draw)
        dropped = (torch.rand(BATCH, generator=draw) < 0.2).tolist()
        captions = [EMPTY if drop else caption for drop, caption in zip(dropped, true_captions, strict=True)]
        sigma, noise = torch.rand(BATCH, generator=draw).clamp_min(0.05), torch.randn(x0.shape, generator=draw)
        level = sigma.view(-1, 1, 1, 1)
        x = (1 - level) * x0 + level * noise
        # The mean itself, instead of noise − x0, is learnt in fewer steps.
        return x, sigma, captions, toy.velocity(x, sigma, captions)

    return fit(weights, toy, sizes.teacher, batch)


def make_student(teacher: Tensors, toy: ToySet, sizes: Sizes, draw: torch.Generator, jump: int) -> Tensors:
    """Distil the guided teacher: its velocity (jump 1), or the straight line over `jump` of FINE steps of its path."""
    count = 320
    captions = known_captions(count, draw)
    noise = torch.randn(count, CHANNELS, SIDE, SIDE, generator=draw)
    points = torch.stack(path(guided(field_of(teacher, toy)), noise, captions, FINE))

    def batch() -> tuple[Tensor, Tensor, list[int], Tensor]:
        rows, step = (torch.randint(limit, (BATCH,), generator=draw) for limit in (count, FINE))
        end = (step + jump).clamp_max(FINE)
        x = points[step, rows]
        target = (x - points[end, rows]) * FINE / (end - step).view(-1, 1, 1, 1)
        return x, 1.0 - step / FINE, [captions[row] for row in rows], target

    return fit(teacher, toy, sizes.student, batch)


def training_data(toy: ToySet, captions: Sequence[int], draw: torch.Generator) -> Any:
    from tessera.data.samples import Prompt, Sample, SampleTensors, TrainingData

    def prompt(caption: int) -> Any:
        return Prompt(toy.texts[caption][None], {"pooled_output": toy.pooled[caption][None]})

    samples = []
    for number, (caption, x0) in enumerate(zip(captions, toy.pictures(captions, draw), strict=True)):
        caption_prompt = prompt(caption)
        read = SampleTensors(
            x0 / SCALE + SHIFT, caption_prompt.text, caption_prompt.conditioning, empty_prompt=prompt(EMPTY)
        )
        half, name = SIDE // 2, f"{number} of caption {caption}"
        load = lambda choice=None, read=read: read if choice.empty_caption else replace(read, empty_prompt=None)  # noqa: E731
        samples.append(Sample(name, (1, half, half), half * half, 2, load, empty_length=2))
    return TrainingData(tuple(samples), "toy")


def train(weights: Tensors, data: Any, steps: int, seed: int, rank: int = 8, guidance_loss: float = 0.0) -> Lora:
    """Train a LoRA by the pack's own trainer."""
    from tessera.lora.options import NetworkOptions
    from tessera.train.config.settings import MemoryOptions
    from tessera.train.objective.options import ObjectiveOptions
    from tessera.train.optim.options import OptimizerOptions

    tiny = load_tiny_writers()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, {"format": "pt"})
        trainer = tiny.make_trainer(
            tiny.load_flux(file),
            data,
            Path(folder),
            steps=steps,
            batch_size=8,
            seed=seed,
            network=NetworkOptions(rank=rank, alpha=float(rank)),
            optimizer=OptimizerOptions(learning_rate=2e-3, lr_scheduler="cosine"),
            objective=ObjectiveOptions(guidance_loss_scale=guidance_loss),
            memory=MemoryOptions(checkpointing="none"),
        )
        trainer.run()
        pairs = {
            name: (down.detach().clone(), up.detach().clone(), 1.0)
            for name, (down, up) in trainer.network.pairs.items()
        }
        trainer.close()
    return pairs


def with_lora(weights: Tensors, lora: Lora) -> Tensors:
    patched = {f"{name}.weight": weights[f"{name}.weight"] + s * up @ down for name, (down, up, s) in lora.items()}
    return {**weights, **patched}


def errors(toy: ToySet, sizes: Sizes, seed: int, field: Field, steps: int) -> tuple[float, float]:
    """Distance of pictures of the new caption, and of the known ones, from those of exact guidance at the same noise:
    |x − exact| / SPREAD along the four directions, root mean square."""
    draw = torch.Generator().manual_seed(10_000 + seed)
    distances = []
    for captions in ([NEW] * sizes.measured, [k % KNOWN for k in range(sizes.measured)]):
        noise = torch.randn(sizes.measured, CHANNELS, SIDE, SIDE, generator=draw)
        exact = path(guided(toy.velocity), noise, captions, EXACT_STEPS)[-1]
        away = (path(field, noise, captions, steps)[-1] - exact).flatten(1) @ toy.directions
        distances.append(float(away.square().mean().sqrt()) / SPREAD)
    return distances[0], distances[1]


def one_seed(seed: int, sizes: Sizes) -> dict[tuple[str, str], tuple[float, float]]:
    toy, draw = ToySet(seed), torch.Generator().manual_seed(seed)
    tiny = load_tiny_writers()
    shapes = tiny.models.flux.flux_shapes(128, 1, 1, WIDTH, WIDTH, False)
    teacher = make_teacher(tiny.models.weights.fill(shapes, seed), toy, sizes, draw)
    base = errors(toy, sizes, seed, guided(field_of(teacher, toy)), FINE)
    print(seed, "teacher", base, file=sys.stderr)
    new = training_data(toy, [NEW] * sizes.pictures, draw)
    known_data = training_data(toy, [k % KNOWN for k in range(8 * KNOWN * 4)], draw)
    on_base = train(teacher, new, sizes.lora, seed)
    results = {}
    results["teacher, guided", ""] = errors(toy, sizes, seed, guided(field_of(teacher, toy)), FINE)
    results["teacher, guided, with its LoRA", ""] = errors(
        toy, sizes, seed, guided(field_of(teacher, toy, on_base)), FINE
    )
    for kind, jump, steps in (("guidance", 1, FINE), ("guidance and steps", FINE // FEW, FEW)):
        student = make_student(teacher, toy, sizes, draw, jump)
        adapter = train(student, known_data, sizes.adapter, seed, rank=32)
        loras = {
            "no LoRA": {},
            "plain LoRA": train(student, new, sizes.lora, seed),
            "training adapter": train(with_lora(student, adapter), new, sizes.lora, seed),
            "trained on the teacher": on_base,
        }
        for g in (2 - 1 / GUIDANCE, GUIDANCE):
            loras[f"guidance_loss_scale {g:.2f}"] = train(student, new, sizes.lora, seed, guidance_loss=g)
        for name, lora in loras.items():
            results[name, kind] = errors(toy, sizes, seed, field_of(student, toy, lora), steps)
        print(
            seed,
            kind,
            {n: tuple(round(e, 2) for e in v) for (n, k), v in results.items() if k == kind},
            file=sys.stderr,
        )
    return results


def spread(values: Sequence[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


PAGE = """# LoRAs on distilled models

How far pictures are from those of exact guidance {guidance:g}, from the same noise: root mean square, in units of how
far the pictures of one caption lie apart. Mean of {seeds} seeds, in brackets the least and the greatest; each seed has
a toy set, a teacher, students and LoRAs of its own. The table is made by `python benchmarks distilled`.

The models are tiny: a FLUX.1 schnell with one block of each kind, pictures of 2 x 2 tokens, six captions whose pictures
overlap. Both students are distilled from the teacher as it is guided: one gives that in one forward and is sampled in
{fine} steps, the other takes {few} steps too. Neither is a perfect copy, so what counts is the difference from
*no LoRA*. The LoRAs learn a caption that none of the models has seen, from {sizes.pictures} pictures in {sizes.lora}
steps of 8. *New caption* is what they are to learn, *known captions* is what they are to leave alone. The training
adapter is a LoRA of {sizes.adapter} steps on plain pictures of the known captions, in force while the other LoRA is
trained and not while it is sampled.

{table}
"""


def set_up() -> None:
    set_up_comfyui("cpu")
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at the same time")
    parser.add_argument("--quick", action="store_true", help="a few steps of each, to see that it runs")
    args = parser.parse_args()
    sizes = Sizes(8, 8, 4, 4, 16, 16) if args.quick else Sizes(300, 200, 150, 100, 32, 96)
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), set_up) as pool:
        runs = list(pool.map(one_seed, range(args.seeds), repeat(sizes)))
    rows = []
    for name, kind in runs[0]:
        new, old = zip(*(run[name, kind] for run in runs), strict=True)
        rows.append([name, kind or "–", spread(new), spread(old)])
    table = markdown_table(["model", "distilled", "new caption", "known captions"], rows)
    print(PAGE.format(guidance=GUIDANCE, few=FEW, fine=FINE, seeds=args.seeds, sizes=sizes, table=table))


if __name__ == "__main__":
    main()
