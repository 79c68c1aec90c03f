"""Exit codes, and errors that end a run before it begins."""

DONE = 0
FAILED = 1
WRONG = 2
TRY_AGAIN = 75
CANCELLED = 130
TERMINATED = 143


class UsageError(Exception):
    """Mistake in the arguments or the workflow, as a sentence for the user.

    is_local: True if other devices may not have this error.
    """

    def __init__(self, text: str, is_local: bool = False):
        super().__init__(text)
        self.is_local = is_local


class NoDevice(Exception):
    """ComfyUI finds no GPU and was not started with --cpu."""
