"""Run a real ComfyUI server with this pack and the fixture pack, and talk to it over HTTP.

Standard library only: the tests, `dev.py serve` and the demo all use it.
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PACK = TESTS.parent
PATIENCE = 300.0  # timeout in seconds: a busy machine takes many times as long as an idle one
TELLING = 5.0  # seconds between the lines of a long start
# The server is on this machine: a proxy that the environment names can't reach it.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailure(RuntimeError):
    """The server refused a prompt, died or took too long; the message ends with the last lines of its log."""


def link_folder(target: Path, link: Path) -> None:
    """Make `link` lead to `target`: a symbolic link, on Windows a junction if links need rights.

    A link that leads elsewhere, or nowhere, is replaced; a real folder in its place is an error.
    """
    try:
        os.readlink(link)  # reads junctions as well
    except FileNotFoundError:
        pass
    except OSError:
        raise RuntimeError(f"{link} is to become a link to {target}, but holds files; move it away.") from None
    else:
        if os.path.realpath(link) == os.path.realpath(target):
            return
        os.unlink(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        link.symlink_to(target, target_is_directory=True)
    except OSError:
        if sys.platform != "win32":
            raise
        import _winapi

        _winapi.CreateJunction(str(target), str(link))


def prepare_base(base: Path) -> None:
    """Make ComfyUI's folders below `base`, with this pack and the fixture pack among its custom nodes."""
    for folder in ("custom_nodes", "input", "output", "temp", "user", "models", "datasets"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    link_folder(PACK, base / "custom_nodes" / "tessera")
    link_folder(TESTS / "fixture_pack", base / "custom_nodes" / "tessera_fixtures")


def command(comfyui: Path, base: Path, port: int, cpu: bool, python: str = sys.executable) -> list[str]:
    """The command that starts ComfyUI over `base`; nothing is written into ComfyUI's own folder.

    TESSERA_FRONTEND names the folder `static` of another frontend than the one installed.
    """
    options = ["--use-pytorch-cross-attention", "--disable-auto-launch", "--port", str(port)]
    options += ["--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    if frontend := os.environ.get("TESSERA_FRONTEND"):
        options += ["--front-end-root", frontend]
    return [python, str(comfyui / "main.py"), *options, *(["--cpu"] if cpu else [])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ComfyServer:
    """A ComfyUI server over `base`. A killed server may be started again over the same base.

    with ComfyServer(base, comfyui) as server:
        entry = server.run(prompt)
    """

    def __init__(
        self,
        base: Path,
        comfyui: Path,
        cpu: bool = True,
        env: Mapping[str, str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """tell: called with a line every few seconds of a long start; with it, the start has no timeout while the
        process lives."""
        self.tell = tell
        self.base = Path(base).resolve()
        self.comfyui = comfyui
        self.cpu = cpu
        self.env = dict(env or {})
        self.log = self.base / "server.log"
        self.process: subprocess.Popen | None = None
        self.url = ""
        prepare_base(self.base)

    def __enter__(self) -> "ComfyServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout: float = PATIENCE) -> None:
        """Start the server and return when it answers."""
        end = time.monotonic() + (timeout if self.tell is None else math.inf)
        while not self._start_at(free_port(), end):
            pass

    def start_again(self, timeout: float = PATIENCE) -> None:
        """Start a killed server at its earlier address, for pages of it that are still open."""
        assert self._start_at(int(self.url.rpartition(":")[2]), time.monotonic() + timeout), "the port was taken"

    def _start_at(self, port: int, end: float) -> bool:
        """Return whether it got the port, which another process may take first."""
        assert self.process is None, "the server runs already"
        self.url = f"http://127.0.0.1:{port}"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command(self.comfyui, self.base, port, self.cpu),
                cwd=self.base,
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        last_report = time.monotonic()
        while not self._answers():
            if self.tell is not None and time.monotonic() > last_report + TELLING:
                last_report = time.monotonic()
                self.tell(self.log_tail(1).splitlines()[-1])
            try:
                self._check_alive()
            except ServerFailure as failure:
                if f"Port {port} is already in use" in str(failure):
                    return False
                raise
            if time.monotonic() > end:
                self.kill()
                raise ServerFailure(f"ComfyUI did not answer in time.\n{self.log_tail()}")
            time.sleep(0.2)
        return True

    def _answers(self) -> bool:
        try:
            return str(self.base) in self.get("/system_stats")["system"]["argv"]
        except (OSError, HTTPException, ValueError, KeyError):
            return False

    def stop(self, timeout: float = 60) -> None:
        """Stop the server, by force if necessary."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def get(self, path: str) -> Any:
        with DIRECT.open(self.url + path, timeout=PATIENCE) as reply:
            return json.load(reply)

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with DIRECT.open(request, timeout=PATIENCE) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            raise ServerFailure(f"{path} answered {error.code}: {error.read().decode()}") from None
        return json.loads(text) if text else None

    def queue(self, prompt: Mapping[str, Any], client_id: str | None = None) -> str:
        """Queue a prompt in API format and return its id."""
        body: dict[str, Any] = {"prompt": prompt}
        if client_id is not None:
            body["client_id"] = client_id
        return self.post("/prompt", body)["prompt_id"]

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The history entry of a prompt that has ended, else None."""
        return self.get(f"/history/{prompt_id}").get(prompt_id)

    def wait(self, prompt_id: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait for a prompt to end, well or badly, and return its history entry. A server whose prompt does not end
        is killed: every later one would wait behind it."""
        end = time.monotonic() + timeout
        while (entry := self.history(prompt_id)) is None:
            self._check_alive()
            if time.monotonic() > end:
                self.kill()
                raise ServerFailure(f"The prompt did not end within {timeout:g} s.\n{self.log_tail()}")
            time.sleep(0.1)
        return entry

    def wait_until_running(self, prompt_id: str, timeout: float = PATIENCE) -> None:
        """Wait until a queued prompt is being executed (or has ended already)."""
        end = time.monotonic() + timeout
        while prompt_id not in [item[1] for item in self.get("/queue")["queue_running"]]:
            if self.history(prompt_id) is not None:
                return
            self._check_alive()
            if time.monotonic() > end:
                raise ServerFailure(f"The prompt did not start within {timeout:g} s.\n{self.log_tail()}")
            time.sleep(0.05)

    def run(self, prompt: Mapping[str, Any], timeout: float = PATIENCE) -> dict[str, Any]:
        """Queue a prompt, wait for it and return its history entry; fail if it did not succeed."""
        entry = self.wait(self.queue(prompt), timeout)
        if entry["status"]["status_str"] != "success":
            raise ServerFailure(f"{error_of(entry)}\n{self.log_tail()}")
        return entry

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    def cancel(self, prompt_id: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Interrupts a prompt until it has ended, and returns its history entry: core forgets an interrupt that comes
        between taking the prompt from its queue and beginning to execute it."""
        end = time.monotonic() + timeout
        while (entry := self.history(prompt_id)) is None and time.monotonic() < end:
            self.interrupt()
            time.sleep(0.3)
        return entry or self.wait(prompt_id, 0)

    def log_tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(["The last lines of ComfyUI's log:", *text.splitlines()[-lines:]])

    def _check_alive(self) -> None:
        if self.process is None:
            raise ServerFailure("The server was not started, or was killed by what came before.")
        if (status := self.process.poll()) is not None:
            self.process = None
            raise ServerFailure(f"ComfyUI ended with status {status}.\n{self.log_tail()}")


def error_of(entry: Mapping[str, Any]) -> str:
    """Return the error text of a history entry, with the node it came from; empty if there was none."""
    for kind, message in entry["status"]["messages"]:
        if kind == "execution_error":
            return f"{message['node_type']} {message['node_id']}: {message['exception_message'].strip()}"
        if kind == "execution_interrupted":
            return f"{message['node_type']} {message['node_id']} was interrupted."
    return ""
