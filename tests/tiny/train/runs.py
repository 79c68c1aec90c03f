"""Training runs of a few seconds: random samples, settings in one line, and an observer that breaks in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from ..data.encoders import CLIP_WIDTH, T5_WIDTH


def sample(name: str, height: int, width: int, text_length: int = 16, repeats: int = 1, scale: float = 1.0) -> Any:
    """A sample of height x width tokens whose numbers are a function of its name."""
    from tessera.data.samples import Sample, SampleTensors

    generator = torch.Generator().manual_seed(crc32(name.encode()))
    tensors = SampleTensors(
        scale * torch.randn(16, 2 * height, 2 * width, generator=generator),
        torch.randn(1, text_length, T5_WIDTH, generator=generator),
        {"pooled_output": torch.randn(1, CLIP_WIDTH, generator=generator)},
    )
    return Sample(name, (1, height, width), height * width, text_length, lambda *_: tensors, repeats)


def training_data(*samples: Any) -> Any:
    from tessera.data.samples import TrainingData

    return TrainingData(samples, "-".join(f"{s.name}:{s.grid}:{s.text_length}x{s.repeats}" for s in samples))


def mixed_data() -> Any:
    """Five samples: three of 16 tokens and two of 24, in four shapes."""
    shapes = [(4, 4), (2, 8), (8, 2), (4, 6), (6, 4)]
    return training_data(*(sample(f"picture {i}", *shape) for i, shape in enumerate(shapes)))


def masked_data() -> Any:
    """The same with masks, some of which leave out most."""
    from tessera.data.samples import SampleTensors

    def masked(source: Any, left_out: int) -> Any:
        read, weights = source.load(), torch.ones(source.grid[1] * source.grid[2])
        weights[:left_out] = 0.0
        tensors = SampleTensors(read.latent, read.text, read.conditioning, weights)
        return replace(source, load=lambda *_: tensors)

    whole = mixed_data().samples
    return training_data(
        *(masked(source, 6 * number) if 0 < number < 3 else source for number, source in enumerate(whole))
    )


def varied_data() -> Any:
    """The same with two images and two captions for each, captions that are dropped, class captions and weights."""
    from tessera.data.samples import FIRST_VARIANT, Prompt

    def varied(source: Any, number: int) -> Any:
        shape = source.grid[1:]
        read = {(i, c): sample(f"{source.name} {i} {c}", *shape).load() for i in range(2) for c in (0, 1, None)}
        class_tensors = sample(f"the class of {source.name}", *shape).load()

        def load(choice: Any = FIRST_VARIANT) -> Any:
            prompt = Prompt(class_tensors.text, class_tensors.conditioning) if choice.class_caption else None
            return replace(read[choice.image, choice.caption], class_prompt=prompt)

        variants = {"image_variants": 2, "caption_variants": 2, "caption_dropout": 0.3}
        return replace(source, load=load, loss_weight=1.0 + number, class_caption=number > 0, **variants)

    return training_data(*(varied(source, number) for number, source in enumerate(mixed_data().samples)))


def planned_experts(files: Sequence[str], settings: Any) -> tuple[list[Any], Any]:
    """The runs of two experts of Wan 2.2 on one clip."""
    from tessera.train.experts import plan_experts

    from .. import load_wan
    from ..models.wan import wan_sample

    data = training_data(wan_sample("a", (1, 4, 4)), wan_sample("b", (2, 2, 4)), wan_sample("c", (4, 2, 2)))
    return plan_experts(*(load_wan(Path(file)) for file in files), data, settings), data


def partly_without_gradient(batch_loss: Any) -> Any:
    """Losses in which one weight has no gradient in the first 6 micro-batches of a step, and another one in none."""

    def partly(losses: Any, batch: Any, rng_key: tuple[int, int]) -> Any:
        weights = [w for group in losses.placed.network.flat for w in group.casts or group.weights]
        first, second, *_ = (w for w in weights if w.detach().any())  # which weight decay would change
        left_out = [first, second] if rng_key[1] < 6 else [second]
        for weight in left_out:
            weight.requires_grad_(False)
        loss = batch_loss(losses, batch, rng_key)
        for weight in left_out:
            weight.requires_grad_(True)
        return loss

    return partly


def run_settings(**changes: Any) -> Any:
    """Settings of a short eager run. Options are given as dicts: network={"rank": 4}.

    It makes no certificate unless memory={"verify": "auto"} asks for one.
    """
    from tessera.lora.options import NetworkOptions
    from tessera.train.config.settings import MemoryOptions, TrainSettings, ValidationOptions
    from tessera.train.objective.options import ObjectiveOptions
    from tessera.train.optim.options import OptimizerOptions

    base: dict[str, Any] = {
        "network": NetworkOptions(rank=4, alpha=4.0),
        "optimizer": OptimizerOptions(learning_rate=1e-2),
        "objective": ObjectiveOptions(),
        "memory": MemoryOptions(checkpointing="none", verify="off"),
    }
    values = {"output_name": "tiny", "steps": 6, "batch_size": 1, "gradient_accumulation": 1, "seed": 3}
    values |= {"compile": "off", "save_every": 2, "resume": "latest"}
    if isinstance(changes.get("validation"), dict):
        values["validation"] = ValidationOptions(**changes.pop("validation"))
    options = {k: replace(base[k], **v) if k in base else v for k, v in changes.items()}
    return TrainSettings(**(base | values | options))


class Watcher:
    """Observer that keeps the reports of a run. `at_step(done)` is called after each step, `before_step(done)` before
    it."""

    def __init__(
        self, at_step: Callable[[int], None] | None = None, before_step: Callable[[int], None] | None = None
    ) -> None:
        self.at_step, self.before_step = at_step, before_step
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.files: list[str] = []
        self.sheets: list[tuple[int, Path]] = []
        self.validations: list[tuple[int, float]] = []
        self.asks: dict[int, frozenset[str]] = {}  # by the step after which the user asks
        self.ends: list[tuple[str, str]] = []
        self.steps_done = 0

    def take_requests(self) -> frozenset[str]:
        return self.asks.pop(self.steps_done, frozenset())

    def began(self, folder: Path) -> None:
        self.folder = folder

    def ended(self, status: str, text: str) -> None:
        self.ends.append((status, text))

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
        if text.startswith("Resumed at step "):
            self.steps_done = int(text.removeprefix("Resumed at step ").rstrip("."))

    def step(self, report: Any) -> None:
        self.steps_done = report.step
        self.losses.append(report.loss)
        self.learning_rates.append(report.learning_rate)
        if self.at_step:
            self.at_step(self.steps_done)

    def saved(self, path: Path) -> None:
        self.files.append(path.name)

    def previewed(self, sheet: Path, step: int) -> None:
        self.sheets.append((step, sheet))

    def validated(self, step: int, loss: float) -> None:
        self.validations.append((step, loss))

    def check_interrupted(self) -> None:
        if self.before_step:
            self.before_step(self.steps_done)


def cancel_at(step: int) -> Watcher:
    """A watcher that presses Cancel when `step` steps are done."""
    from comfy.model_management import InterruptProcessingException

    def check(steps_done: int) -> None:
        if steps_done == step:
            raise InterruptProcessingException

    return Watcher(before_step=check)


def train(model: Any, data: Any, root: Path, watcher: Any = None, **changes: Any) -> Any:
    from tessera.train.train_lora import RunRequest, train_lora

    return train_lora(RunRequest(model, data, run_settings(**changes), root, watcher or Watcher()))


def tiny_preview(vae: Any, number: int) -> Any:
    """A preview of two steps at each optimizer step, whose text and seed go by its number."""
    from tessera.train.preview.sampling import Sampling
    from tessera.train.watch.previewer import Preview

    from ..models.sampling import conditioning

    return Preview(Sampling(vae, conditioning("flux", 16, number), width=64, height=48, steps=2, seed=number), 1)
