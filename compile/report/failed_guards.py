"""All guards of a graph that do not hold, asked one by one through torch's tree of guards."""

import logging
import re
from collections.abc import Iterable
from typing import Any

from .guards import differences, tidy

logger = logging.getLogger(__name__)

# Guards over several values at once: asking one by itself would leave it half asked.
_RELATIONAL = {"OBJECT_ALIASING", "NO_TENSOR_ALIASING", "STORAGE_OVERLAPPING"}


def failed_guards(manager: Any, values: dict[str, Any]) -> tuple[str, ...]:
    """All guards of one graph that do not hold for the locals `values`.

    Torch names the first that fails and stops, in an order that moves with each failure, so a graph cannot be told to
    be near or far from it. The tree of guards is asked value by value here; torch's own answer is kept beside.
    """
    if not hasattr(manager, "root") or manager.root is None or hasattr(manager, "invalidation_reason"):
        return (str(getattr(manager, "invalidation_reason", "the graph was made invalid")).strip(),)
    info = manager.check_verbose(values)
    own = [] if info.result or len(info.verbose_code_parts) != 1 else [tidy(info.verbose_code_parts[0])]
    found: list[str] = []
    try:
        found = list(dict.fromkeys(_walk(manager, values)))
    except Exception:
        logger.debug("the guards could not be asked one by one", exc_info=True)
    manager.check_verbose(values)  # leaves the relational guards as a whole check does
    if own and own[0].startswith("GLOBAL_STATE"):
        # Another grad mode gives every tensor other dispatch keys.
        found = [guard for guard in found if "dispatch key" not in guard]
    # Of a tensor torch tells the first difference only, and found has them all.
    same = [re.match(r"tensor '.*' (?=[a-z_ ]+ mismatch)|.*", text) for text in own]
    texts = [each.string for each in same if each and not any(text.startswith(each.group()) for text in found)] + found
    return tuple(texts) or ("no guard fails any more",)


def _walk(manager: Any, values: dict[str, Any]) -> Iterable[str]:
    scope = {"L": values, "G": manager.global_scope["G"], **manager.closure_vars}
    for leaf in (*manager.root.get_leaf_guards(), *manager.root.get_epilogue_lambda_guards()):
        if type(leaf).__name__ == "LAMBDA_GUARD" and leaf(values) is False:
            yield from (tidy(part) for part in leaf.verbose_code_parts() if _false(part, manager.global_scope, scope))
    pending = list(manager.root.get_child_managers())
    while pending:
        child = pending.pop(0)
        try:
            value = eval(child.get_source(), dict(manager.global_scope), scope)
        except Exception:  # the value is gone: a guard further up says so
            continue
        failing = [
            leaf for leaf in child.get_leaf_guards() if type(leaf).__name__ not in _RELATIONAL and leaf(value) is False
        ]
        for leaf in failing:
            yield from differences(type(leaf).__name__, leaf.verbose_code_parts(), value)
        if any(type(leaf).__name__ == "TYPE_MATCH" for leaf in failing):
            continue  # what another class holds says nothing
        pending += child.get_child_managers()
        for pair in getattr(child, "get_key_value_managers", dict)().values():
            pending += [each for each in pair if each is not None]


def _false(part: str, names: dict[str, Any], scope: dict[str, Any]) -> bool:
    """One of the conditions that a shape guard is made of; those that cannot be asked alone count as failed."""
    try:
        return not eval(part, dict(names), scope)
    except Exception:
        return True
