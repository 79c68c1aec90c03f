"""Errors that end a run: each message names the cause, the saved state and how to resume from it."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import comfy.model_management
import torch

from ...compile.region import CompileFailed, over_the_limit

log = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """Error of a run that cannot continue. The message is for the user; earlier saves are on disk."""


def saved_state_message(step: int, state: str) -> str:
    """Describe the last state of a stopped run.

    step: optimizer steps in that state.
    state: its name in the `resume` input.
    """
    if step == 0:
        return "Nothing was trained yet."
    return f"Everything up to step {step} is saved: to continue with other settings, choose {state} under resume."


def unsaved_steps_message(saved: int, state: str, saves_on_the_way: bool) -> str:
    """Describe the last save of a run whose later steps are not saved.

    saved: step of the last save, 0 without one.
    state: its name in the `resume` input.
    saves_on_the_way: True if `save_every` or `save_every_epochs` is set.
    """
    if saved == 0:
        return f"Nothing was saved before that{'' if saves_on_the_way else '; set save_every to save on the way'}."
    return saved_state_message(saved, state)


def stopped_message(step: int, saved: int, state: str, resume: str) -> str:
    """Describe the step at which the user stopped a run, and how to continue.

    step: last complete step.
    saved: step of the last save, 0 without one.
    state: its name in the `resume` input.
    resume: the `resume` input.
    """
    if step == 0:
        return "Stopped before the first step; nothing was trained yet."
    if saved == 0:
        return f"Stopped at step {step}, but no state could be saved to continue from."
    status = (
        f"Stopped at step {step} and saved" if saved == step else f"Stopped at step {step}, saved up to step {saved}"
    )
    if resume == "latest":
        return f"{status}; Run goes on from there."
    return f"{status}; to continue from there, choose {state if resume != 'off' else 'latest'} under resume."


def out_of_memory_while_loading() -> TrainingStopped:
    """Make the error of an OOM before the first step."""
    return TrainingStopped(
        "Out of memory while loading the model; set blocks_to_swap to -1 on Load Diffusion Model (Block Swap) or "
        "Training Memory, or load the model with weight_dtype fp8_e4m3fn, or close other programs on this GPU, and "
        "queue again."
    )


def log_error(message: str, error: BaseException) -> None:
    """Log an error that does not end the run, with its traceback.

    It is formatted immediately: a LogRecord that holds the exception would keep the tensors of its frames alive.
    """
    log.warning("%s\n%s", message, "".join(traceback.format_exception(error)))


@contextmanager
def first_error_kept() -> Iterator[None]:
    """Log an exception inside the context if another one, the one to report, is already ending the run; else raise."""
    ending = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        if ending is None:
            raise
        log_error("The end of a run failed after its error", error)


class CannotContinue(RuntimeError):
    """Known reason to end a run. The message is the reason only: `explain_error` adds the saved state to it."""


def error_sentence(error: BaseException) -> str:
    """Format an error as one sentence for another process."""
    if isinstance(error, Exception) and comfy.model_management.is_oom(error):
        return "it is out of memory."
    return str(error).strip().partition("\n")[0] or f"{type(error).__name__}."


def broken_weight(diffusion_model: torch.nn.Module) -> str:
    """Return the name of the first weight of a model that holds NaN or infinite values; empty if none does."""
    for name, weight in diffusion_model.named_parameters():
        if weight.is_floating_point() and not weight.is_meta:
            values = weight.detach()
            if not torch.isfinite(values.float() if values.element_size() == 1 else values).all():
                return name
    return ""


def not_finite(name: str, step: int, weight: str = "") -> CannotContinue:
    """Make the error of a NaN or infinite value.

    name: name of the value.
    step: last complete step.
    weight: name of a frozen weight that is broken itself.
    """
    if weight:
        return CannotContinue(
            f"The {name} is NaN or infinite at step {step + 1}, because the model's file holds such values "
            f"({weight}); load another copy of the model."
        )
    if step:
        return CannotContinue(f"The {name} became NaN or infinite at step {step + 1}; lower learning_rate.")
    return CannotContinue(
        f"The {name} is NaN or infinite at step 1, before the LoRA has changed anything; choose another attention on "
        "Training Memory, and set low_bit_matmul to off there and compile to off. If that doesn't help, prepare the "
        "data again."
    )


def not_unloaded(step: int) -> CannotContinue:
    """Make the error of a model whose LoRA patches could not be removed after the preview at `step`."""
    return CannotContinue(
        f"ComfyUI could not take the model off the device after the preview at step {step}, so training can't "
        "continue; restart ComfyUI."
    )


def explain_error(error: BaseException, step: int, last_save: str, planned_graphs: int) -> TrainingStopped | None:
    """Translate a known error into one sentence for the user; None for an unknown one.

    step: last complete step.
    last_save: description of the saved state, made by `saved_state_message` or `unsaved_steps_message`.
    planned_graphs: number of graphs that were to be compiled.
    """
    if isinstance(error, CannotContinue | CompileFailed):
        return TrainingStopped(f"{error} {last_save}")
    if isinstance(error, Exception) and comfy.model_management.is_oom(error):
        return TrainingStopped(
            f"Out of memory at step {step + 1}; set checkpointing to 'full', or lower batch_size or megapixels, or set "
            f"blocks_to_swap to -1. {last_save}"
        )
    if over_the_limit(error):
        return TrainingStopped(
            f"Step {step + 1} needed more graphs than the {planned_graphs} planned; set compile to 'off' and queue "
            f"again. {last_save} This is a bug in Tessera; please report it."
        )
    return None
