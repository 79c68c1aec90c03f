"""Why a run could not go on, in one sentence for the user that says what is kept and how to go on from it."""

import comfy.model_management

from ..compile.region import over_the_limit


class TrainingStopped(RuntimeError):
    """The run cannot go on; the message is for the user. What was trained before is on disk."""


def kept(step: int, state: str) -> str:
    """What a stopped run leaves. state: its name in the `resume` input."""
    if step == 0:
        return "Nothing was trained yet."
    return f"What was trained up to step {step} is kept: choose {state} in resume to go on from it with other settings."


def broken_off(saved: int, state: str) -> str:
    """What is left where the optimizer broke off amid moving the weights. saved: the step of the last save."""
    return kept(saved, state) if saved else "What was trained was not saved before; set save_every to save on the way."


def out_of_memory_while_loading() -> TrainingStopped:
    return TrainingStopped(
        "Out of memory while the model was loaded; set blocks_to_swap to -1 on Load Diffusion Model (Block Swap) or "
        "Training Memory, or load the model with weight_dtype fp8_e4m3fn, or close other programs on this GPU, and "
        "queue again."
    )


class CannotGoOn(RuntimeError):
    """Ends a run for a reason that we know, told with what is left once that is saved. The message is the reason."""


def not_finite(what: str, step: int) -> CannotGoOn:
    """step: the last whole one."""
    return CannotGoOn(f"The {what} became NaN or infinite at step {step + 1}; lower learning_rate.")


def not_unloaded(step: int) -> CannotGoOn:
    return CannotGoOn(
        f"ComfyUI could not take the model off the device after the preview at step {step}, so its weights can't be "
        "trained on any more; restart ComfyUI."
    )


def explained(error: BaseException, step: int, left: str, planned_graphs: int) -> TrainingStopped | None:
    """The error as one sentence, where we know what it means. step: the last whole one; left: what is kept of the run,
    as `kept` says it."""
    if isinstance(error, CannotGoOn):
        return TrainingStopped(f"{error} {left}")
    if isinstance(error, Exception) and comfy.model_management.is_oom(error):
        return TrainingStopped(
            f"Out of memory at step {step + 1}; set checkpointing to 'full', or lower batch_size or megapixels, or set "
            f"blocks_to_swap to -1. {left}"
        )
    if over_the_limit(error):
        return TrainingStopped(
            f"More graphs were needed than the {planned_graphs} planned, at step {step + 1}; set compile to 'off' and "
            f"queue again. {left} This is a fault of Tessera: please report it."
        )
    return None
