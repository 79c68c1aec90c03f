"""Execution of a workflow by ComfyUI, from its start to an exit code."""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .comfyui import start_comfyui
from .errors import CANCELLED, DONE, FAILED, TERMINATED, TRY_AGAIN, NoDevice, UsageError
from .rank import Rank
from .reports import Reporter, Result, saved_a_state
from .workflow import TRAIN, Prompt, names_of_node

SAME = 5.0  # seconds for the first device to find the same mistake and report it


class Run:
    """Execution of a prompt. The main thread watches while ComfyUI's worker thread executes."""

    def __init__(
        self,
        prompt: Prompt,
        extra_data: dict[str, Any],
        changed: set[tuple[str, str]],
        reporter: Reporter,
        rank: Rank,
        result: Result,
    ) -> None:
        """changed: inputs set for this run, as (number of the node, name)."""
        self.prompt = prompt
        self.extra_data = extra_data
        self.changed = changed
        self.reporter = reporter
        self.rank = rank
        self.result = result
        self.id, self.client = str(uuid.uuid4()), uuid.uuid4().hex
        self.started = time.time()
        self.signal: int | None = None

    def execute(self, comfyui: Path, options: Sequence[str]) -> int:
        """Run the prompt to its end. Returns the exit code."""
        try:
            server = start_comfyui(comfyui, options)
        except NoDevice as error:
            raise self.rank.without_device() from error
        self.rank.meet_others()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.end_by_signal)
        main = importlib.import_module("main")
        self.result.record_start(importlib.import_module("folder_paths").get_output_directory(), self.started)
        try:
            return int(server.loop.run_until_complete(self.execute_on(server)))
        except UsageError as mistake:
            self.reporter.event("error", node=None, message=str(mistake))
            raise UsageError(str(mistake), self.rank.tell_others(str(mistake), SAME)) from mistake
        finally:
            main.asset_seeder.shutdown()
            main.cleanup_temp()

    def end_by_signal(self, number: int, _: Any) -> None:
        """Cancel, as the browser's button does: a run that trains saves first. A second Ctrl+C ends it at once.

        A second SIGTERM is ignored: several senders, such as systemd and torchrun, may send one while it saves.
        """
        if self.signal is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.signal = number
        importlib.import_module("nodes").interrupt_processing()

    async def execute_on(self, server: Any) -> int:
        """Run the prompt on the started ComfyUI. Returns the exit code."""
        execution = importlib.import_module("execution")
        self.check_inputs()
        request = server.trigger_on_prompt({"prompt": self.prompt, "client_id": self.client})
        prompt = request["prompt"]
        server.node_replace_manager.apply_replacements(prompt)
        valid, error, outputs, node_errors = await execution.validate_prompt(self.id, prompt, None)
        if not valid:
            raise UsageError("\n".join(self.explain(error, node_errors)))
        if node_errors:
            raise UsageError("\n".join(self.explain({}, node_errors)))  # a server would leave these nodes out
        self.rank.check_shares(prompt)
        if self.rank.rank > 0:  # only training and its inputs: the first device saves, shows and compares
            outputs = [number for number in outputs if self.prompt[number]["class_type"] == TRAIN]
        data = {**self.extra_data, "client_id": self.client, "create_time": int(time.time() * 1000)}
        self.reporter.event("started", prompt_id=self.id)
        server.prompt_queue.put((0, self.id, prompt, data, outputs, {}))
        await self.watch(server)
        history = server.prompt_queue.get_history(self.id)[self.id]
        return self.code(history)

    async def watch(self, server: Any) -> None:
        """Report the events that a browser would get, until the prompt is in the history."""
        while self.id not in server.prompt_queue.get_history(self.id):
            with contextlib.suppress(asyncio.TimeoutError):
                kind, data, _ = await asyncio.wait_for(server.messages.get(), 0.2)
                self.tell(kind, data)
        while not server.messages.empty():
            self.tell(*server.messages.get_nowait()[:2])

    def tell(self, kind: Any, data: Any) -> None:
        if kind == "execution_start" and self.signal is not None:
            importlib.import_module("nodes").interrupt_processing()  # ComfyUI discards an earlier interrupt
        elif kind == importlib.import_module("protocol").BinaryEventTypes.TEXT:
            # Layout: length of the node's number, the number, the text.
            end = 4 + int.from_bytes(data[:4], "big")
            text = data[end:].decode("utf-8", "replace")
            self.reporter.progress(text)
            self.reporter.event("text", node=data[4:end].decode(), text=text)
        elif kind == "executing" and data.get("node") in self.prompt:
            self.reporter.line(f"  {self.title(data['node'])}")
            self.reporter.event("node", node=data["node"], class_type=self.prompt[data["node"]]["class_type"])
        elif kind == "progress":
            self.reporter.event("progress", node=data.get("node"), value=data.get("value"), max=data.get("max"))
        elif kind == "tessera.train":
            self.reporter.event("train", **data)

    def title(self, number: str) -> str:
        kind, title = names_of_node(self.prompt[number])
        return title or kind

    def check_inputs(self) -> None:
        """Raise UsageError for an input that its node does not have: ComfyUI would ignore it silently.

        For other packs' nodes only inputs set for this run count; their workflows may hold inputs of older versions.
        """
        kinds = importlib.import_module("nodes").NODE_CLASS_MAPPINGS
        for number, node in self.prompt.items():
            kind, is_tessera = kinds.get(node["class_type"]), node["class_type"].startswith("Tessera")
            inputs = node.get("inputs", {})
            changed = {name for name in inputs if (number, name) in self.changed}
            if kind is None or not (is_tessera or changed):
                continue
            groups = kind.INPUT_TYPES()
            # The inputs that ComfyUI itself passes to the node, which may take nested inputs, or any.
            resolved_inputs = importlib.import_module("execution").get_input_data(inputs, kind, number)[0]
            for name in inputs:
                is_declared = any(name.partition(".")[0] in group for group in groups.values())
                if (is_tessera and not is_declared) or (name in changed and name not in resolved_inputs):
                    names = _input_names(groups, [key for key in inputs if key in resolved_inputs])
                    hint = f"; it has {', '.join(names)}" if names else ""
                    raise UsageError(f"{self.title(number)} ({number}) has no input called {name}{hint}.")

    def explain(self, error: dict[str, Any], node_errors: dict[str, Any]) -> Iterator[str]:
        """Yield ComfyUI's validation errors for the workflow, one line each."""
        for number, report in node_errors.items():
            for problem in report["errors"]:
                yield f"{self.title(number)} ({number}): {problem['message']}. {problem['details']}".rstrip()
        if not node_errors:
            yield f"The workflow can't run: {error.get('message')} {error.get('details', '')}".rstrip()

    def code(self, history: dict[str, Any]) -> int:
        """Report how the run ended. Returns the exit code."""
        status = history["status"]
        if status["status_str"] == "success":
            for path in self.files(history["outputs"]):
                self.reporter.line(f"  {path}")
            self.reporter.event("done", outputs=history["outputs"])
            return DONE
        messages = dict(status["messages"])
        failed = messages.get("execution_error")
        if failed is not None:
            text = str(failed["exception_message"]).strip()
            self.reporter.line(f"{failed['node_type']} ({failed['node_id']}): {text}", sys.stderr)
            self.reporter.event("error", node=failed["node_id"], message=text)
            if self.rank.tell_others(text) and self.rank.rank > 0:
                print(self.rank.with_rank(text), file=sys.stderr, flush=True)
        can_resume = saved_a_state(importlib.import_module("folder_paths").get_output_directory(), self.started)
        if can_resume:
            self.reporter.line("Everything up to here is saved; run the same command again to continue.", sys.stderr)
        if failed is not None:
            code = TRY_AGAIN if can_resume else FAILED
        elif self.signal == signal.SIGTERM or (self.signal is None and self.rank.size > 1):  # sent to another device
            code = TRY_AGAIN if can_resume else TERMINATED
        else:
            code = CANCELLED
        self.reporter.event("ended", code=code)
        return code

    @staticmethod
    def files(outputs: dict[str, Any]) -> Iterator[str]:
        """Yield the files that the nodes report, relative to the output folder."""
        for node in outputs.values():
            for entry in (entry for entries in node.values() if isinstance(entries, list) for entry in entries):
                if isinstance(entry, dict) and entry.get("path"):
                    yield str(entry["path"])
                elif isinstance(entry, dict) and entry.get("type") == "output":
                    yield "/".join(filter(None, (entry.get("subfolder"), entry.get("filename"))))


def _input_names(groups: Mapping[str, Mapping[str, Any]], nested: Sequence[str]) -> list[str]:
    """List the inputs of a node. nested: those that a workflow sets inside others, as `group.name`, and others."""
    names = [name for kind in ("required", "optional") for name in groups.get(kind, {})]
    return names + [key for key in nested if key.partition(".")[0] in names and key not in names]
