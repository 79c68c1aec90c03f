"""The names of every family's modules."""

from .flux import FLUX
from .table import NameTable, flat_name
from .wan import WAN

TABLES: tuple[NameTable, ...] = (FLUX, WAN)


def native_name(flat: str) -> str | None:
    """The native name of a module from its flat one; None where no family has such a module."""
    return next((name for table in TABLES if (name := table.native(flat)) is not None), None)


def table_of(name: str) -> NameTable | None:
    """The names of the family that has a module of this native name."""
    return next((table for table in TABLES if table.native(flat_name(name)) is not None), None)


__all__ = ["FLUX", "TABLES", "WAN", "NameTable", "flat_name", "native_name", "table_of"]
