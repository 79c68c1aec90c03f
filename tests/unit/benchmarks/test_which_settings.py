"""The page "Which settings for my card" says what the planner says."""

from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def which_settings() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return import_module("studies.which_settings")


def pack(name: str) -> ModuleType:
    return import_module(f"tessera.{name}")


def test_the_page_is_the_planners(which_settings: ModuleType) -> None:
    page = which_settings.which_settings(pack, which_settings.parser().parse_args([]))
    committed = (BENCHMARKS / "results" / "which_settings.md").read_text()
    assert page == committed, "run python benchmarks which_settings > benchmarks/results/which_settings.md"


def test_the_blocks_have_the_weights_of_flux_dev(which_settings: ModuleType) -> None:
    costs = which_settings.block_costs(pack, "bf16", 4096, 16, 80.0, True)
    numbers = sum(cost.weights for cost, _ in costs) / 2 + which_settings.OUTER
    assert numbers / 1e9 == pytest.approx(11.9, abs=0.01)  # as black-forest-labs/flux states it: 12 B
    # The forward that is known for 4096 + 512 tokens.
    assert sum(cost.forward for cost, _ in costs) * 80 == pytest.approx(74.4, abs=0.1)


def rows_of(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table behind a heading."""
    lines = text.split(heading, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[start:]))
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_the_readme_shows_what_the_page_says() -> None:
    page = (BENCHMARKS / "results" / "which_settings.md").read_text()
    training, sampling = rows_of(page, "## Training a LoRA"), rows_of(page, "## Sampling")
    expected: dict[str, dict[str, str]] = {}
    for row in training:
        setting = f"{row['blocks_to_swap']}, {row['checkpointing']}"
        expected.setdefault(row["card"], {"card": row["card"]})[f"train, {row['weights']}"] = setting
    for row in sampling:
        expected[row["card"]][f"sample, {row['weights']}"] = row["blocks_to_swap"]
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    assert rows_of(readme, "## Which settings for my card") == list(expected.values())
