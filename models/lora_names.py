"""The names of every family's modules."""

from collections.abc import Mapping

from .flux.flux2_names import FLUX2
from .flux.names import FLUX
from .name_table import NameTable, Shape
from .qwen_image.names import QWEN_IMAGE
from .wan.names import WAN

TABLES: tuple[NameTable, ...] = (FLUX, FLUX2, QWEN_IMAGE, WAN)


def native_name(flat: str) -> str | None:
    """The native name of a module from its flat one; None where no family has such a module."""
    return next((name for table in TABLES if (name := table.native(flat)) is not None), None)


def table_of(modules: Mapping[str, Shape | None], family: str = "") -> NameTable | None:
    """The names of the family that a LoRA is of: that which it says itself, else the one that has most of its modules,
    and them in their shapes; None where no family has any of them.

    modules: the shapes of the weights, as far as they are known, by flat name; img_in is a module in several families.
    """

    def known(table: NameTable) -> int:
        return sum(table.native(flat) is not None for flat in modules)

    def rank(table: NameTable) -> tuple[bool, int, int]:
        fitting = sum(shape is not None and table.fits(flat, shape) for flat, shape in modules.items())
        return table.family == family, known(table), fitting

    having = [table for table in TABLES if known(table)]
    return max(having, key=rank) if having else None
