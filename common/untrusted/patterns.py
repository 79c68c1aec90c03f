"""User name patterns with * for any text, matched in time linear in the name for each *."""

import fnmatch
import re

from .budgets import PATTERN, check_size

_STARS = re.compile(r"\*+")


def name_matcher(pattern: str, name: str) -> re.Pattern[str]:
    """Compile a pattern of `fnmatch` in which * alone is special; a run of them counts as one.

    name: name of the input in the message.
    Raises OverBudget for more * than a name can need.
    """
    plain = _STARS.sub("*", pattern)
    check_size(PATTERN, name, items=plain.count("*"))
    # `fnmatch` matches each * once, as short as possible, without backtracking.
    return re.compile(fnmatch.translate(plain.replace("[", "[[]").replace("?", "[?]")))
