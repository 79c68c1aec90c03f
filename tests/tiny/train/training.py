"""Synthetic training data and a trainer over it, for tests that look inside a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .runs import sample, training_data


def make_data(grids: Sequence[tuple[int, int]], text_lengths: Sequence[int], tokens: int | None = None) -> Any:
    """TrainingData of random latents: `grids` are (height, width) in tokens; `tokens` keeps fewer (ragged edge)."""
    pairs = zip(grids, text_lengths, strict=True)
    samples = [sample(f"sample {index}", h, w, length) for index, ((h, w), length) in enumerate(pairs)]
    return training_data(*(replace(s, tokens=tokens or s.tokens) for s in samples))


def make_trainer(
    model: Any,
    data: Any,
    folder: Path,
    *,
    backend: str | None = None,
    compile_settings: Any = None,
    held_out: Any = None,
    **changes: Any,
) -> Any:
    """A Trainer that has not trained yet. `backend` or `compile_settings` compile; `changes` are fields of
    TrainSettings; `held_out` is the data of its `validation`."""
    from tessera.compile.settings import CompileSettings
    from tessera.lora.options import NetworkOptions
    from tessera.lora.plan import choose_targets
    from tessera.models.catalogue.registry import family_of
    from tessera.models.model_patches import trainable_model
    from tessera.train.config.settings import MemoryOptions, TrainSettings
    from tessera.train.loop.trainer import Trainer
    from tessera.train.objective.options import ObjectiveOptions
    from tessera.train.optim.options import OptimizerOptions
    from tessera.train.preflight.context import RunContext
    from tessera.train.report.observer import SilentObserver
    from tessera.train.runs.run_folder import RunFolder
    from tessera.train.watch.validation import Validation

    compile_options = compile_settings or (CompileSettings(backend) if backend else None)
    defaults = {
        "output_name": "test",
        "steps": 4,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "seed": 3,
        "compile": "auto" if compile_options else "off",
        "save_every": 0,
        "resume": "off",
        "network": NetworkOptions(rank=4, alpha=8.0),
        "optimizer": OptimizerOptions(learning_rate=1e-3),
        "objective": ObjectiveOptions(),
        "memory": MemoryOptions(checkpointing="full"),
    }
    settings = TrainSettings(**{**defaults, **changes})
    family = family_of(model)
    patcher, _ = trainable_model(model)
    targets = choose_targets(family, patcher.model, settings.network)
    run = RunFolder(folder, "test")
    watchers = [] if held_out is None else [Validation(settings.validation, held_out)]
    part = {"made_with": {"data_fingerprint": data.fingerprint}, "asked": "lineage"}
    run_context = RunContext(
        patcher,
        family,
        data,
        targets,
        settings,
        run,
        "lineage",
        lambda *_: {},
        compile_settings=compile_options,
        validation=held_out,
        parts=[part],
    )
    return Trainer(run_context, SilentObserver(), watchers)


def observe(trainer: Any, observer: Any) -> Any:
    """Give a trainer another observer, and return it."""
    trainer.observer = trainer.train_step.observer = trainer.train_step.retries.observer = observer
    return observer


def micro_batch(*indices: int) -> list[Any]:
    """Return a micro-batch of these samples, as the trainer draws it, each in its first variant."""
    from tessera.data.samples import FIRST_VARIANT

    return [(index, FIRST_VARIANT) for index in indices]


def fill_up_matrices(trainer: Any, size: float = 0.05) -> None:
    """Move the LoRA away from its start, at which the down matrices have no gradient."""
    with torch.no_grad():
        for index, (_, up) in enumerate(trainer.network.pairs.values()):
            up.copy_(size * torch.randn(up.shape, generator=torch.Generator().manual_seed(index)))


def check_gradients(trainer: Any, expected: Mapping[str, torch.Tensor], bound: float) -> None:
    """Assert that the gradient of each matrix of a LoRA is within `bound` of the expected one, relative to its norm.

    expected: in fp64, by the names of `reference_masters`.
    """
    for name, pair in trainer.network.pairs.items():
        for side, p in zip(("down", "up"), pair, strict=True):
            gradient = expected[f"{name}.{side}"]
            assert float((p.grad.double() - gradient).norm() / gradient.norm()) < bound, (name, side)


def reference_masters(trainer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A LoRA's numbers in fp64, for a reference: (down, up, scale) of each layer, and the leaves by their state's
    names."""
    scale = trainer.settings.network.alpha / trainer.settings.network.rank
    lora, masters = {}, {}
    for name, (down, up) in trainer.network.pairs.items():
        pair = [p.detach().double().requires_grad_() for p in (down, up)]
        masters[f"{name}.down"], masters[f"{name}.up"] = pair
        lora[name] = (*pair, scale)
    return lora, masters


@contextmanager
def adding_more(block: Any, share: float = 0.02) -> Iterator[None]:
    """Let one block of a transformer add this much more to its streams than it does."""
    forward = block.forward

    def stronger(*args: Any) -> Any:
        out = forward(*args)
        streams = [arg for arg in args if isinstance(arg, torch.Tensor)]
        results = []
        for result in (out,) if isinstance(out, torch.Tensor) else out:
            reference = next(stream for stream in streams if stream.shape == result.shape)
            results.append(result + share * (result - reference))
        return results[0] if isinstance(out, torch.Tensor) else tuple(results)

    block.forward = stronger
    try:
        yield
    finally:
        del block.forward
