"""The parts of dev.py that decide what is taken for whole and what is unpacked."""

import io
import os
import re
import subprocess
import sys
import tarfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

dev = sys.modules["tessera_dev"]


def archive(path: Path, files: dict[str, bytes], links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    return path


def comfyui(folder: Path) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text("")
    (folder / "comfy" / "sd.py").write_text("")
    (folder / "requirements.txt").write_text("torch\n")
    return folder


def test_only_files_below_the_wanted_folder_are_unpacked(tmp_path):
    source = archive(
        tmp_path / "a.tar.gz",
        {"p-1/vendor/ComfyUI/main.py": b"main", "p-1/vendor/ComfyUI/comfy/sd.py": b"sd", "p-1/setup.py": b"no"},
        links=("p-1/vendor/ComfyUI/link",),
    )
    dev.unpack(source, "vendor/ComfyUI", tmp_path / "out")
    names = {str(p.relative_to(tmp_path / "out").as_posix()) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {"main.py", "comfy/sd.py"}
    assert (tmp_path / "out" / "main.py").read_bytes() == b"main"


@pytest.mark.parametrize("name", ["../../evil.py", "a/../../../evil.py", "..\\evil.py", "C:evil.py"])
def test_a_name_that_leads_out_of_the_folder_is_refused_and_leaves_nothing(name, tmp_path):
    source = archive(
        tmp_path / "a.tar.gz", {"p-1/vendor/ComfyUI/main.py": b"ok", f"p-1/vendor/ComfyUI/{name}": b"evil"}
    )
    with pytest.raises(SystemExit, match="not safe to unpack"):
        dev.unpack(source, "vendor/ComfyUI", tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil.py")) and not (tmp_path / "deep" / "out").exists()
    assert not list((tmp_path / "deep").iterdir())


def test_a_broken_archive_leaves_nothing_that_could_be_taken_for_whole(tmp_path):
    source = archive(
        tmp_path / "a.tar.gz", {"p-1/vendor/ComfyUI/main.py": b"x", "p-1/vendor/ComfyUI/b": os.urandom(9999)}
    )
    source.write_bytes(source.read_bytes()[:5000])
    with pytest.raises((EOFError, tarfile.ReadError)):
        dev.unpack(source, "vendor/ComfyUI", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_of_another_hash_is_refused(tmp_path):
    file = tmp_path / "a.tar.gz"
    file.write_bytes(b"other")
    with pytest.raises(SystemExit, match="not the release that was pinned"):
        dev.check_sha256(file, dev.OLDEST.sha256)
    dev.check_sha256(file, "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa")


def test_the_environment_key_changes_with_each_requirements_file(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    (tmp_path / "requirements.txt").write_text("a\n")
    (tmp_path / "requirements-dev.txt").write_text("b\n")
    keys = [dev.environment_key(path)]
    assert dev.environment_key(path) == keys[0]
    for file in (path / "requirements.txt", tmp_path / "requirements.txt", tmp_path / "requirements-dev.txt"):
        file.write_text(file.read_text() + "more\n")
        keys.append(dev.environment_key(path))
    assert len(set(keys)) == 4


def test_an_environment_without_its_stamp_is_not_taken_for_whole(tmp_path):
    python = dev.venv_python(tmp_path)
    python.parent.mkdir()
    python.touch()
    assert not dev.is_complete(tmp_path)
    (tmp_path / dev.STAMP).touch()
    assert dev.is_complete(tmp_path)
    python.unlink()
    assert not dev.is_complete(tmp_path)


def test_an_environment_that_is_whole_is_used_without_installing_anything(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.delenv("TESSERA_PYTHON", raising=False)
    commands: list[list[str]] = []

    def install(command, **_):
        commands.append(command)
        if len(commands) == 1:
            raise SystemExit(1)

    def make_venv(folder):
        python = dev.venv_python(folder)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()
        return python

    monkeypatch.setattr(dev, "run", install)
    monkeypatch.setattr(dev, "make_venv", make_venv)
    with pytest.raises(SystemExit):
        dev.python_of_environment(path)
    assert len(commands) == 1
    python = dev.python_of_environment(path)
    assert len(commands) == 3 and Path(python).exists()
    assert dev.python_of_environment(path) == python
    assert len(commands) == 3


PURE, FAST = "tests/pure", "fast"


def recorded(monkeypatch, failing=()):
    """Lets `dev.test` run nothing, and gives the list of what it would have run."""
    commands: list[list[str]] = []

    def call(command, **variables):
        commands.append([*command, *(f"{name}={value}" for name, value in variables.items())])
        return int(any(word in command for word in failing))

    monkeypatch.setattr(dev, "setup", lambda: ("python", Path("comfyui")))
    monkeypatch.setattr(dev, "check_types", lambda python: call([python, "mypy"]))
    monkeypatch.setattr(dev, "call", call)
    return commands


def test_browser_tests_fail_by_name_without_a_chromium_and_everything_else_is_checked(monkeypatch, capsys):
    def none(python):
        raise SystemExit("no Chromium here")

    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "provide_chromium", none)
    assert dev.test([]) == 1
    *checks, pure, tests, core = commands
    browser = str(dev.ROOT / "tools" / "browser" / "check.py")
    assert [set(c) & {"format", "mypy", "RUF027", browser} or {"check"} for c in checks] == [
        {"check"},
        {"RUF027"},
        {"format"},
        {"mypy"},
        {browser},
    ]
    assert PURE in pure and "--ignore" not in pure
    files = dev.test_files(dev.CORE_TESTS)
    other = [path for path in files if not path.startswith("tests/browser/")]
    assert ignored(tests) == ["tests/browser", PURE, *other] and ignored(core) == ["tests/browser"]
    assert 10 < len(other) < len(files) and [word for word in core if word in files] == other
    assert "no Chromium here" in capsys.readouterr().out.splitlines()


def ignored(command):
    return [word for flag, word in zip(command, command[1:], strict=False) if flag == "--ignore"]


def test_linters_and_types_come_before_chromium_is_looked_for_and_every_failure_is_named(monkeypatch, capsys):
    commands = recorded(monkeypatch, failing=("format", "pytest"))
    command_counts: list[int] = []
    monkeypatch.setattr(dev, "provide_chromium", lambda python: command_counts.append(len(commands)))
    assert dev.test([]) == 1
    assert (
        command_counts == [6]
        and len(commands) == 8
        and ignored(commands[-2]) == [PURE, *dev.test_files(dev.CORE_TESTS)]
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Failed: ruff format, pytest without torch, pytest, pytest with the newest packages."
    recorded(monkeypatch)
    assert dev.test([]) == 0


def test_the_whole_run_is_of_one_comfyui_the_oldest_that_the_pages_and_the_package_ask_for(monkeypatch):
    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "provide_chromium", lambda python: "chromium")
    monkeypatch.setattr(dev, "setup", lambda: ("python", dev.unpacked_comfyui()))
    monkeypatch.setattr(dev, "newest_packages", lambda python, comfyui: {})
    assert dev.test([]) == 0 and len(commands) == 8
    parts = [word for command in commands for word in command if word.startswith("COMFYUI_PATH=")]
    assert parts == [f"COMFYUI_PATH={dev.unpacked_comfyui()}"] * 3
    match = re.search(r'^requires-comfyui = ">=(.+)"$', (dev.ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert match and match[1] == dev.OLDEST.version
    assert f"with {dev.OLDEST.version})" in (dev.ROOT / "README.md").read_text("utf-8")


def test_the_core_tests_run_alone_with_the_comfyui_that_is_there(monkeypatch):
    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "provide_chromium", lambda python: "chromium")
    assert dev.test(["--core", "-x"]) == 0
    (command,) = commands
    files = [word for word in command if word.startswith("tests/")]
    assert files == dev.test_files(dev.CORE_TESTS) and all((dev.ROOT / file).is_file() for file in files)
    assert "-x" in command and "COMFYUI_PATH=comfyui" in command and "CHROMIUM=chromium" in command


def test_the_core_part_has_the_newest_packages_before_the_environment_s_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.delenv("TESSERA_PACKAGES", raising=False)
    commands = recorded(monkeypatch)

    def install(command, **_):
        Path(command[command.index("--target") + 1]).mkdir(parents=True)
        commands.append(list(command))

    monkeypatch.setattr(dev, "run", install)
    monkeypatch.setattr(dev, "provide_chromium", lambda python: "chromium")
    monkeypatch.setattr(dev, "setup", lambda: ("python", dev.unpacked_comfyui()))
    for _ in range(2):
        assert dev.test(["--core"]) == 0
    install, first, second = commands
    assert install[-len(dev.NEWEST_PACKAGES) :] == list(dev.NEWEST_PACKAGES)
    folder = install[install.index("--target") + 1]
    assert f"PYTHONPATH={folder}" in first and f"PYTHONPATH={folder}" in second
    monkeypatch.setenv("TESSERA_PACKAGES", "pinned")
    assert dev.newest_packages("python", dev.unpacked_comfyui()) == {}
    monkeypatch.delenv("TESSERA_PACKAGES")
    assert dev.newest_packages("python", Path("another")) == {}


def test_the_fast_tier_is_the_pure_tests_and_the_marked_ones_and_tells_what_it_leaves_out(monkeypatch, capsys):
    commands = recorded(monkeypatch, failing=(FAST,))
    assert dev.test(["--fast"]) == 1
    pure, marked = commands
    assert PURE in pure and "-m" not in pure[3:]
    assert marked[marked.index("-m", 3) + 1] == FAST and set(dev.FAST_TESTS) <= set(marked)
    *_, left_out, last = capsys.readouterr().out.splitlines()
    assert left_out.startswith("Left out: linters and types") and last == "Failed: pytest."
    with pytest.raises(SystemExit, match="give one of them"):
        dev.test(["--fast", "--core"])


def test_the_wide_part_is_what_the_whole_run_leaves_out(monkeypatch):
    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "provide_chromium", lambda python: "chromium")
    monkeypatch.setattr(dev, "newest_packages", lambda python, comfyui: {})
    assert dev.test([]) == 0 and dev.test(["--wide"]) == 0
    *_, rest, core, wide = commands
    marks = [command[command.index("-m", 3) + 1] for command in (rest, core, wide)]
    assert marks == ["not wide", "not wide", "wide"]


def test_another_torch_runs_units_and_families_and_names_what_failed(monkeypatch, capsys):
    commands = recorded(monkeypatch, failing=("tests/unit",))
    versions: list[str | None] = []
    monkeypatch.setattr(dev, "setup", lambda torch=None: versions.append(torch) or ("python", Path("comfyui")))
    assert dev.test(["--torch", "2.11"]) == 1
    pure, units, families = commands
    assert PURE in pure and "tests/unit" in units and families[families.index("-m", 3) + 1] == FAST
    assert capsys.readouterr().out.splitlines()[-1] == "Failed: pytest of units."
    monkeypatch.setattr(dev, "find_chromium", lambda python: None)
    assert dev.test(["--torch=2.14.1", "tests/comfy", "-x"]) == 0
    assert [word for word in commands[3] if "=" not in word] == ["python", "-m", "pytest", "tests/comfy", "-x"]
    assert versions == ["2.11", "2.14.1"]


def test_the_fast_tier_with_another_torch_runs_what_torch_changes(monkeypatch):
    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "setup", lambda torch=None: ("python", Path("comfyui")))
    assert dev.test(["--fast", "--torch", "2.11"]) == 0
    units, families = commands
    files = dev.test_files(dev.TORCH_TESTS)
    assert set(files) <= set(units) and PURE not in units and all((dev.ROOT / file).is_file() for file in files)
    assert families[families.index("-m", 3) + 1] == FAST


def test_ci_runs_what_the_pages_say_and_then_the_oldest_torch_that_they_name():
    lines = (dev.ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line.partition("#")[0].split()[2:] for line in lines if line.startswith("python3 dev.py")]
    assert commands[0] == ["test"] and len(commands) == 2
    oldest, rest = dev.take_torch(commands[1][1:])
    assert rest == ["--fast"]
    (pinned,) = re.findall(
        r'^torch = \["torch>=(.+)"\]$', (dev.ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    assert oldest == pinned and f"torch {oldest} or newer" in (dev.ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("arguments", [["--torch"], ["--torch", "tests/unit"], ["--torch=2"], ["--torch", "2.11; x"]])
def test_a_torch_without_a_version_is_a_sentence(arguments):
    with pytest.raises(SystemExit, match="--torch is .*give it one, such as --torch 2.11"):
        dev.test(arguments)


def test_another_torch_comes_first_and_all_else_from_the_first_environment(tmp_path, monkeypatch):
    """A real environment; in place of pip, a package is written into it."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    plain = dev.call

    def call(command, **variables):
        if "pip" not in command:
            return plain([*command, "--without-pip"], **variables)
        installed.append(command[-3:])
        (Path(dev.packages_of(command[0])[0]) / "pytest.py").write_text("own = True")
        return len(installed) == 1

    installed: list[list[str]] = []
    monkeypatch.setattr(dev, "call", call)
    with pytest.raises(SystemExit, match="torch 2.99 could not be installed"):
        dev.python_with_torch(sys.executable, "2.99")
    python = dev.python_with_torch(sys.executable, "2.99")
    assert dev.python_with_torch(sys.executable, "2.99") == python
    assert installed == [["torch==2.99", "torchvision", "torchaudio==2.11.0"]] * 2
    code = "import pytest, _pytest; print(pytest.own, _pytest.__file__)"
    output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert output[0] == "True" and any(output[1].startswith(folder) for folder in dev.packages_of(sys.executable))


def test_with_arguments_pytest_runs_alone_and_with_no_other_options(monkeypatch):
    commands = recorded(monkeypatch)
    monkeypatch.setattr(dev, "find_chromium", lambda python: "chromium")
    assert dev.test(["tests/unit", "-k", "a b"]) == 0
    words = [word for word in commands[0] if "=" not in word]
    assert words == ["python", "-m", "pytest", "tests/unit", "-k", "a b"]
    assert "CHROMIUM=chromium" in commands[0]


def test_the_check_is_linters_and_types_and_fails_by_name(monkeypatch, capsys):
    commands = recorded(monkeypatch, failing=("mypy",))
    monkeypatch.setattr(dev, "fetch_comfyui", lambda: Path("comfyui"))
    monkeypatch.setattr(dev, "python_of_environment", lambda comfyui: "python")
    assert dev.check([]) == 1
    assert len(commands) == 5 and not any("pytest" in command for command in commands)
    assert capsys.readouterr().out.splitlines()[-1] == "Failed: mypy."


REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one[x]" time="1.5"/>
<testcase classname="tests.unit.test_a" name="test_two" time="2.0"><skipped/></testcase>
<testcase classname="tests.comfy.test_b" name="test_three" time="{}"/>
</testsuite></testsuites>"""


def test_the_seconds_of_every_part_are_added_by_folder_and_file_the_slowest_first(monkeypatch, capsys):
    reports: list[str] = []

    def call(command, **variables):
        (report,) = (word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        Path(report).write_text(REPORT.format(4.0 + len(reports)))
        reports.append(report)
        return 0

    recorded(monkeypatch)
    monkeypatch.setattr(dev, "call", call)
    assert dev.test(["--fast", "--slowest"]) == 0
    assert len(set(reports)) == 2
    table = capsys.readouterr().out.partition("Where the time goes: ")[2].splitlines()
    assert table[0] == "16 s in 6 tests"
    assert [line.split() for line in table[2:9]] == [
        ["Seconds", "by", "folder"],
        ["9.0", "tests.comfy"],
        ["7.0", "tests.unit"],
        [],
        ["Seconds", "by", "file"],
        ["9.0", "tests.comfy.test_b"],
        ["7.0", "tests.unit.test_a"],
    ]
    assert [line.split() for line in table[10:13]] == [
        ["Slowest", "tests"],
        ["5.0", "tests.comfy.test_b", "test_three"],
        ["4.0", "tests.comfy.test_b", "test_three"],
    ]


def test_a_link_to_another_checkout_or_to_nowhere_is_replaced(tmp_path):
    link_folder = sys.modules["comfy_server"].link_folder
    mine = tmp_path / "mine"
    other = tmp_path / "other"
    link = tmp_path / "nodes" / "tessera"
    mine.mkdir()
    other.mkdir()
    link_folder(other, link)
    link_folder(mine, link)
    assert link.samefile(mine)
    inode = os.lstat(link).st_ino
    link_folder(mine, link)
    assert os.lstat(link).st_ino == inode
    os.unlink(link)
    os.symlink(tmp_path / "gone", link)
    link_folder(mine, link)
    assert link.samefile(mine) and other.is_dir()


def test_a_real_folder_in_the_place_of_a_link_is_told_and_kept(tmp_path):
    (tmp_path / "tessera" / "work").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="holds files; move it away"):
        sys.modules["comfy_server"].link_folder(tmp_path, tmp_path / "tessera")
    assert (tmp_path / "tessera" / "work").is_dir()


def test_the_server_is_asked_without_the_proxy_of_the_environment(monkeypatch, tmp_path):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[1]")

        def log_message(self, *args):
            pass

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = sys.modules["comfy_server"].ComfyServer(tmp_path, tmp_path)
    with HTTPServer(("127.0.0.1", 0), Answer) as answering:
        Thread(target=answering.handle_request, daemon=True).start()
        server.url = f"http://127.0.0.1:{answering.server_port}"
        assert server.get("/") == [1]


def test_comfyui_path_comes_first_and_must_hold_a_comfyui(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    monkeypatch.setenv("COMFYUI_PATH", str(path))
    assert dev.find_comfyui() == path
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no ComfyUI in it"):
        dev.find_comfyui()


def test_the_comfyui_that_the_pack_sits_in_is_used_before_the_pinned_one(tmp_path, monkeypatch):
    path = comfyui(tmp_path / "comfyui")
    pack = path / "custom_nodes" / "tessera"
    pack.mkdir(parents=True)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dev, "ROOT", pack)
    assert dev.find_comfyui() == path
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="dev.py setup"):
        dev.find_comfyui()
    comfyui(dev.unpacked_comfyui())
    assert dev.find_comfyui() == dev.unpacked_comfyui()


@pytest.mark.parametrize(
    ("flags", "status", "limited"), [("amx_bf16", 132, True), ("amx_bf16", 0, False), ("", 132, False)]
)
def test_a_processor_that_kills_what_it_lists_is_held_to_less(tmp_path, monkeypatch, flags, status, limited):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"flags : fpu avx512f {flags}\n")
    monkeypatch.setattr(dev, "call", lambda command: status)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # so that it is put back as it was
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    dev.avoid_forbidden_instructions("python", facts)
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) == limited


SLOW_COMFYUI = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

print("loading custom nodes", flush=True)
time.sleep(1.5)

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"system": {"argv": sys.argv}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


def test_a_start_that_is_told_of_is_waited_for_as_long_as_the_server_lives(monkeypatch, tmp_path):
    comfy_server = sys.modules["comfy_server"]
    monkeypatch.setattr(comfy_server, "TELLING", 0.2)
    path = comfyui(tmp_path / "comfyui")
    (path / "main.py").write_text(SLOW_COMFYUI)
    lines: list[str] = []
    server = comfy_server.ComfyServer(tmp_path / "told", path, tell=lines.append)
    try:
        server.start(timeout=0.1)
        assert "loading custom nodes" in lines
    finally:
        server.kill()
    with pytest.raises(comfy_server.ServerFailure, match="did not answer in time"):
        comfy_server.ComfyServer(tmp_path / "silent", path).start(timeout=0.1)
    (path / "main.py").write_text("raise SystemExit('no torch here')")
    with pytest.raises(comfy_server.ServerFailure, match="ended with status 1(.|\n)*no torch here"):
        comfy_server.ComfyServer(tmp_path / "dead", path, tell=lines.append).start()
