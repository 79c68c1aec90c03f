"""Every family that can be trained has rows in tests/families."""

from family_cases import CASES
from tessera.models.catalogue.registry import FAMILIES


def test_every_family_has_a_row():
    assert {case.family for case in CASES.values()} == {family.name for family in FAMILIES}


def test_omissions_of_a_row_have_a_reason():
    assert all(reason.strip() for case in CASES.values() for reason in case.left_out.values())
