"""Print the table of docs/untrusted_files.md from the budgets: `python tools/budget_page.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common" / "untrusted"))

import budgets  # noqa: E402

if __name__ == "__main__":
    for budget in budgets.ALL:
        print(budget.table_row())
