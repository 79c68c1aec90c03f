"""Run a benchmark: python benchmarks NAME [ARGUMENTS …]. README.md lists them, each with its question."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def module_of(name: str) -> str:
    """Return the module of a script by its name, or by its room and name, such as step.contestant.

    Raises SystemExit with the names if there is no such script.
    """
    if "." in name:
        return name
    modules = {file.stem: f"{file.parent.name}.{file.stem}" for file in HERE.glob("*/*.py") if is_listed(file.stem)}
    if name not in modules:
        raise SystemExit(f"There is no benchmark {name!r}; choose one of {', '.join(sorted(modules))}.")
    return modules[name]


def is_listed(name: str) -> bool:
    """Tell whether README.md has a row for this script."""
    return f"\n| `{name}` |" in (HERE / "README.md").read_text(encoding="utf-8")


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(f"{__doc__}\n\n{(HERE / 'README.md').read_text(encoding='utf-8')}")
    sys.path[0] = str(HERE)
    module = module_of(sys.argv.pop(1))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
