"""Errors for ComfyUI's code that uses what training replaces, its kernels and layers, in a way unknown here."""

import comfy.model_management

from ....common.core import version

# What ComfyUI's own code raises. Other errors are ours, or the compiler's.
OF_CORE = (RuntimeError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
# Classes that stand in for ComfyUI's layers.
LAYERS = ("NativeLinear", "NativeConv", "PlacedLinear")


def unusable(name: str, cause: str) -> ValueError:
    """Make the error for a call by ComfyUI's code that the replacement does not support."""
    return ValueError(
        f"model calls {name} of ComfyUI {version()} in a way that Train LoRA doesn't know ({cause}); update Tessera or "
        "choose another model."
    )


def unread_option(key: str) -> ValueError:
    """Make the error for an entry, such as an option of the sampler, that ComfyUI's code reads and training lacks."""
    return ValueError(
        f"model reads {key} in ComfyUI {version()}, which Train LoRA doesn't set; update Tessera or choose another "
        "model."
    )


def is_of_core(error: BaseException) -> bool:
    """Return whether ComfyUI's own code may have raised the error, for another reason than want of memory."""
    builtin = type(error).__module__ == "builtins" and not isinstance(error, NotImplementedError)
    return builtin and not comfy.model_management.is_oom(error)


def cause_of(error: BaseException) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0]


def refusal(error: BaseException, kernel: str | None) -> ValueError | None:
    """Make the error for a call of a kernel or a layer that its replacement does not support, or for an option that
    training does not set; None if the error has another cause.

    kernel: name of ComfyUI's kernel in whose replacement it was raised, if any.
    """
    cause = cause_of(error)
    if type(getattr(error, "obj", None)).__name__ in LAYERS or any(name in cause for name in LAYERS):
        return unusable("its layers", cause)
    if kernel is not None:
        return unusable(kernel, cause)
    return unread_option(cause) if isinstance(error, KeyError) else None
