"""Exit codes, and mistakes that end a run before it begins."""

DONE, FAILED, WRONG, TRY_AGAIN, CANCELLED, TERMINATED = 0, 1, 2, 75, 130, 143


class UsageError(Exception):
    """A mistake in what was given, in a sentence."""

    of_this_device = False  # true where the other devices may not have it


class NoDevice(Exception):
    """ComfyUI finds no GPU and was not started with --cpu."""
