"""Pictures of several LoRAs side by side, from the same noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from comfy.model_patcher import ModelPatcher
from PIL import Image
from torch import Tensor

from .sampling import Sampling, Stages, check_fits, decode, sample_latent, titled, with_lora
from .sheet import Cell, draw_sheet, middle, to_picture

_CELL = 1024


@dataclass(frozen=True)
class Column:
    """One LoRA at one strength. read: its tensors, read anew each time, as only one is in memory; None is the MODEL
    without it. name: what messages call it."""

    title: str
    name: str
    strength: float
    read: Callable[[], Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class Comparison:
    """pictures: row by row, each (frames, H, W, 3), 0 to 1; grid: all of them with their names."""

    grid: Image.Image
    pictures: list[Tensor]


def compare(
    model: ModelPatcher, samplings: Sequence[Sampling], columns: Sequence[Column], tell: Callable[[], None]
) -> Comparison:
    """Samples every prompt and seed with every LoRA, as core's Load LoRA, KSampler and VAE Decode do.

    tell: called after each step of the sampler, may raise. Raises ValueError, before anything is sampled, for what
    cannot be sampled and for a LoRA that changes nothing of the model. Call it under inference mode.
    """
    for sampling in samplings:
        check_fits(sampling, model)
    for column in columns:
        _model_of(model, column)
    rows = titled(samplings)
    # All of one LoRA first, so that it is patched once; then the VAE, so that it is loaded once.
    latents: dict[Cell, Tensor] = {}
    for number, column in enumerate(columns):
        stages = Stages(_model_of(model, column))
        for row, (_, sampling, seed) in enumerate(rows):
            latents[row, number] = sample_latent(stages, sampling, seed, tell)
    pictures = dict(_decoded(rows, len(columns), latents))
    cells = {at: to_picture(middle(frames)) for at, frames in pictures.items()}
    grid = draw_sheet([title for title, _, _ in rows], [column.title for column in columns], cells, _CELL)
    return Comparison(grid, list(pictures.values()))


def _decoded(
    rows: Sequence[tuple[str, Sampling, int]], columns: int, latents: dict[Cell, Tensor]
) -> Iterator[tuple[Cell, Tensor]]:
    for row, (_, sampling, _) in enumerate(rows):
        for column in range(columns):
            yield (row, column), decode(sampling.vae, latents.pop((row, column)))


def _model_of(model: ModelPatcher, column: Column) -> ModelPatcher:
    if column.read is None:
        return model
    patched, changed = with_lora(model, column.read(), column.strength)
    if not changed:
        raise ValueError(
            f"loras: {column.name} changes no weight of this model, so it is a LoRA of another one; take it out, or "
            "connect the model that it was trained on."
        )
    return patched
