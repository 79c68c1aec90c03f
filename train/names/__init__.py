"""The names of every family's modules."""

from collections.abc import Collection

from .flux import FLUX
from .qwen_image import QWEN_IMAGE
from .table import NameTable, flat_name
from .wan import WAN

TABLES: tuple[NameTable, ...] = (FLUX, QWEN_IMAGE, WAN)


def native_name(flat: str) -> str | None:
    """The native name of a module from its flat one; None where no family has such a module."""
    return next((name for table in TABLES if (name := table.native(flat)) is not None), None)


def table_of(name: str, others: Collection[str] = ()) -> NameTable | None:
    """The names of the family that has a module of this native name, and most of the `others` of its LoRA (flat names):
    img_in is the name of a module in several families."""
    having = [table for table in TABLES if table.native(flat_name(name)) is not None]
    if len(having) < 2:
        return having[0] if having else None
    return max(having, key=lambda table: sum(table.native(other) is not None for other in others))


__all__ = ["FLUX", "QWEN_IMAGE", "TABLES", "WAN", "NameTable", "flat_name", "native_name", "table_of"]
