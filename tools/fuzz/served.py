"""Readers inside a real ComfyUI: of run folders, folders of captions, and workflows through its executor.

While it works on an input another connection asks `/queue` again and again. A time in which that has no answer, and the
server computes, is a freeze.
"""

import copy
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import folders
import hostile
import psutil
from hypothesis import strategies as st
from readers import CAPTION_OPTIONS, ROOT_FOLDER, Reader, run_folders, write_run
from watch import Broken

FREEZE = 1.0  # seconds of the server's CPU in which it answers nothing
MEMORY = 1_000_000_000  # bytes that an input may add for a moment
# Names of errors whose message is a sentence for users.
SENTENCES = ("ValueError", "OSError", "FileNotFoundError", "OverBudget", "DoesNotFit", "DamagedState")

TRY_IT = json.loads((ROOT_FOLDER / "workflows" / "api" / "try_it.json").read_text(encoding="utf-8"))


class Served:
    """A running server, and the longest freeze and largest growth seen."""

    def __init__(self, server: Any):
        self.server = server
        self.process = psutil.Process(server.process.pid)
        self.longest = 0.0  # seconds
        self.growth = 0  # bytes
        self.log_read = 0

    def readers(self) -> list[Reader]:
        captions = st.lists(hostile.texts(), min_size=1, max_size=3)
        return [
            Reader("run folders on a page", run_folders(), self.read_run),
            Reader("a folder of captions on a page", captions, self.read_folder),
            Reader("a folder layout on a page", folders.layouts(), self.read_layout),
            Reader("a folder of captions in the executor", st.tuples(captions, CAPTION_OPTIONS), self.execute_folder),
            Reader("texts of a workflow in the executor", changes(), self.execute_texts),
        ]

    def summary(self) -> str:
        memory = f"the most memory was {self.growth / 1e6:,.0f} MB more"
        return f"the longest time without an answer was {self.longest:.2f} s of CPU, {memory}"

    @contextmanager
    def watched(self) -> Any:
        """Ask `/queue` meanwhile. Raises Broken for a freeze, and for a raw error in the log."""
        stopped = threading.Event()
        highest = {"freeze": 0.0, "peak": 0}
        start_bytes = self.process.memory_info().rss

        def ask() -> None:
            while not stopped.is_set():
                start = self._cpu()
                self.server.get("/queue")
                highest["freeze"] = max(highest["freeze"], self._cpu() - start)
                highest["peak"] = max(highest["peak"], self.process.memory_info().rss)
                stopped.wait(0.02)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
        self.longest = max(self.longest, highest["freeze"])
        self.growth = max(self.growth, highest["peak"] - start_bytes)
        if highest["freeze"] > FREEZE:
            raise Broken(f"/queue had no answer for {highest['freeze']:.1f} s of the server's CPU")
        if highest["peak"] - start_bytes > MEMORY:
            raise Broken(f"the server took {(highest['peak'] - start_bytes) / 1e6:,.0f} MB more")
        self._check_log()

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def _check_log(self) -> None:
        with open(self.server.log, encoding="utf-8", errors="replace") as file:
            file.seek(self.log_read)
            new = file.read()
            self.log_read = file.tell()
        if "Error handling request" in new:
            raise Broken(f"a request ended in an error: {new.strip()[-300:]}")

    def ask(self, path: str) -> None:
        """GET a path. Raises Broken if the answer is a fault of the server, or no JSON."""
        try:
            self.server.get(path)
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise Broken(f"{path} answered {error.code}") from error
        except ValueError as error:
            raise Broken(f"{path} answered what is no JSON") from error

    def read_run(self, files: dict[str, str]) -> None:
        folder = self.server.base / "output" / "fox (001)"
        shutil.rmtree(folder, ignore_errors=True)
        write_run(folder, files)
        with self.watched():
            self.ask("/tessera/runs")
            runs = self.server.get("/tessera/runs").get("runs", [])
            for run in runs:
                for end in ("", "?since=0&points=2000", "/previews", "/saves", "/workflow"):
                    self.ask(f"/tessera/runs/{quote(str(run.get('id')))}{end}")

    def write_captions(self, captions: list[str]) -> None:
        folder = self.server.base / "input" / "strangers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, text in enumerate(captions):
            (folder / f"{number}.png").write_bytes(hostile.pictures()[0])
            (folder / f"{number}.txt").write_text(text, encoding="utf-8")

    def read_folder(self, captions: list[str]) -> None:
        self.write_captions(captions)
        with self.watched():
            self.ask("/tessera/folder?kind=pictures&folder=input/strangers&page=0")
            self.ask("/tessera/folder/thumbnail?kind=pictures&folder=input/strangers&file=0.png")

    def read_layout(self, files_and_layout: tuple[dict[str, bytes], str]) -> None:
        files, layout = files_and_layout
        photos = self.server.base / "input" / "strangers"
        shutil.rmtree(photos, ignore_errors=True)
        folders.write_all(photos, files)
        with self.watched():
            for kind in ("pictures", "clips"):
                self.ask(f"/tessera/folder?kind={kind}&folder=input/strangers&layout={quote(layout)}&page=0")

    def execute_folder(self, caption_input: tuple[list[str], dict[str, Any]]) -> None:
        captions, options = caption_input
        self.write_captions(captions)
        images = copy.deepcopy(TRY_IT["5"])
        images["inputs"] |= {"folder": "input/strangers"} | options
        self.execute({"5": images, "6": {"class_type": "PreviewAny", "inputs": {"source": ["5", 0]}}})

    def execute_texts(self, inputs: Mapping[str, Mapping[str, Any]]) -> None:
        prompt = copy.deepcopy({name: TRY_IT[name] for name in ("2", "3", "4", "5", "6", "9", "11")})
        prompt["11"]["inputs"].pop("preview")
        prompt["11"]["inputs"] |= {"steps": 1, "save_every": 0, "rank": 2, "batch_size": 1}
        prompt["12"] = {"class_type": "PreviewAny", "inputs": {"source": ["11", 0]}}
        for node, changed in inputs.items():
            prompt[node]["inputs"] |= changed
        self.execute(prompt)

    def execute(self, prompt: dict[str, Any]) -> None:
        """Run a prompt to its end. Raises Broken for an error of a node that is no sentence for users."""
        with self.watched():
            try:
                entry = self.server.wait(self.server.queue(prompt), 120)
            except Exception as error:
                if "/prompt answered 400" in str(error):
                    return
                raise Broken(str(error)[:400]) from error
            for kind, message in entry["status"]["messages"]:
                if kind == "execution_error" and message["exception_type"].rpartition(".")[2] not in SENTENCES:
                    error = f"{message['exception_type']}: {message['exception_message'][:300]}"
                    raise Broken(f"{message['node_type']}: {error}")


def changes() -> st.SearchStrategy[dict[str, dict[str, Any]]]:
    """Texts of the nodes of *Try it*, by node and input."""
    fields = {
        "3": ("targets", "rank_patterns"),
        "4": ("lr_curve", "optimizer_args", "optimizer_class"),
        "5": ("trigger_words", "class_word", "keep_tokens_separator", "caption_extension"),
        "11": ("output_name", "resume"),
    }
    node_fields = {
        node: st.fixed_dictionaries({}, optional={name: hostile.texts() for name in names})
        for node, names in fields.items()
    }
    return st.fixed_dictionaries({}, optional=node_fields)
