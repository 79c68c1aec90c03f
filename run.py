"""Run a workflow from a terminal, without a browser and without a server.

  python run.py WORKFLOW.api.json [--set NODE.INPUT=VALUE …] [--output FOLDER] [--log FILE] [--launch DEVICES]
                [--result FILE] [-- COMFYUI OPTIONS]

The file is one that ComfyUI exports by Workflow > Export (API); those of this pack lie in workflows/api. ComfyUI is the
one whose custom_nodes this pack lies in, or the one that COMFYUI_PATH names. What comes behind -- goes to ComfyUI, such
as --cuda-device 1 or --lowvram.

With --launch 2, two devices of this machine train together, a process for each; over several machines, torchrun starts
this file in the same way: torchrun --nproc-per-node 2 run.py WORKFLOW.api.json. See docs/many_cards.md.

Exit codes: 0 done; 1 an error; 2 the workflow or an option is wrong, nothing ran; 75 ended by SIGTERM or an error, with
a state saved to go on from: run the same line again; 130 cancelled by Ctrl+C; 143 ended by SIGTERM, with nothing saved.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

DONE, FAILED, WRONG, TRY_AGAIN, CANCELLED, TERMINATED = 0, 1, 2, 75, 130, 143
Prompt = dict[str, dict[str, Any]]
TRAIN = "TesseraTrainLora"
SAME = 5.0  # seconds in which the first device finds the same mistake, and is the one that tells of it
PARENT = "TESSERA_PARENT"  # id of the process without which this one is not to run


class Wrong(Exception):
    """A mistake in what was given, in a sentence."""

    of_this_device = False  # true where the other devices may not have it


class NoDevice(Exception):
    """ComfyUI finds no GPU and was not started with --cpu."""


def main(arguments: Sequence[str]) -> int:
    rank = Rank.of_environment()
    result = Result(None)
    try:
        options, comfyui_options = parse(arguments)
        watch_parent(rank, launches=options.launch is not None)
        result = Result(options.result if rank.rank == 0 else None)
        # Until ComfyUI is there to save what was trained; nothing is yet.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(result.ended(TERMINATED)))
        prompt, extra_data = read_workflow(Path(options.workflow))
        changed = {set_input(prompt, change) for change in options.set}
        comfyui = find_comfyui()
        if options.launch is not None:
            if rank.size > 1:
                raise Wrong("--launch starts torchrun itself; leave it out where torchrun has started run.py.")
            check_launch(options.launch, prompt, comfyui_options)
            return result.ended(launch(options.launch, arguments, options.result))
        with (
            rank.prepared(prompt, comfyui_options) as comfyui_options,
            open_log(options.log if not rank.rank else None) as log,
        ):
            if options.output:
                comfyui_options = ["--output-directory", os.path.abspath(options.output), *comfyui_options]
            run = Run(prompt, extra_data, changed, Told(log, rank.rank), rank, result)
            return result.ended(run.execute(comfyui, comfyui_options))
    except Wrong as mistake:
        if rank.rank == 0 or mistake.of_this_device:
            print(rank.named(str(mistake)), file=sys.stderr)
        return result.ended(WRONG)
    except KeyboardInterrupt:  # while ComfyUI starts
        return result.ended(CANCELLED)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the options of this file from ComfyUI's."""
    own, comfyui = list(arguments), []
    if "--" in own:
        at = own.index("--")
        own, comfyui = own[:at], own[at + 1 :]
    assert __doc__ is not None
    described, _, codes = __doc__.partition("Exit codes: ")
    parser = argparse.ArgumentParser(
        description=described.splitlines()[0],
        epilog=f"Exit codes: {codes}",
        usage="%(prog)s WORKFLOW [--set NODE.INPUT=VALUE …] [--output FOLDER] [--log FILE] [--launch DEVICES] "
        "[--result FILE] [-- COMFYUI OPTIONS]",
    )
    parser.add_argument("workflow", help="a workflow in API format, a JSON file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is a node's number, title or class, such as TesseraTrainLora.steps=2000",
    )
    parser.add_argument("--output", help="folder in place of ComfyUI's output folder")
    parser.add_argument("--log", help="file to which each event is added as a line of JSON")
    parser.add_argument("--launch", type=int, metavar="DEVICES", help="train on as many devices of this machine")
    parser.add_argument("--result", help="file to which the exit code is written as JSON")
    return parser.parse_args(own), comfyui


# The workflow


def read_workflow(path: Path) -> tuple[Prompt, dict[str, Any]]:
    """Read a workflow in API format, and what came with it if it is as it was posted to a server.

    Raises Wrong for anything else.
    """
    try:
        prompt = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise Wrong(f"{path} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise Wrong(f"{path} isn't a JSON file: {error}.") from error
    if isinstance(prompt, dict) and isinstance(prompt.get("nodes"), list):
        raise Wrong(f"{path} is a workflow for the browser; open it there and use Workflow > Export (API).")
    extra_data: Any = {}
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), dict):
        prompt, extra_data = prompt["prompt"], prompt.get("extra_data")
    if not isinstance(prompt, dict) or not prompt or not all(_is_node(node) for node in prompt.values()):
        raise Wrong(f"{path} isn't a workflow in API format; use Workflow > Export (API) in ComfyUI.")
    return prompt, extra_data if isinstance(extra_data, dict) else {}


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and "class_type" in node and isinstance(node.get("inputs", {}), dict)


def set_input(prompt: Prompt, change: str) -> tuple[str, str]:
    """Change an input as `NODE.INPUT=VALUE` says. Returns the node's number and the input's name.

    Raises Wrong where that does not name one node, or an input that has a value.
    """
    place, equals, text = change.partition("=")
    if not equals or "." not in place:
        raise Wrong(f"--set {change}: write NODE.INPUT=VALUE, such as TesseraTrainLora.steps=2000.")
    name, found = "", list[str]()
    parts = place.split(".")
    for at in reversed(range(1, len(parts))):  # titles have dots, and so have inputs of inputs
        name, key = ".".join(parts[:at]), ".".join(parts[at:])
        found = [name] if name in prompt else [number for number, node in prompt.items() if name in _names(node)]
        if found:
            break
    if len(found) != 1:
        how_many = "no node" if not found else f"{len(found)} nodes ({', '.join(found)})"
        raise Wrong(f"--set {change}: {how_many} of the workflow {'are' if len(found) > 1 else 'is'} called {name}.")
    inputs = prompt[found[0]].setdefault("inputs", {})
    now = inputs.get(key)
    if isinstance(now, list):
        raise Wrong(f"--set {change}: {key} is connected to another node, so it has no value.")
    value = text if isinstance(now, str) else _value(text)
    if isinstance(now, bool) and not isinstance(value, bool):
        raise Wrong(f"--set {change}: {key} is a switch; give true or false.")
    inputs[key] = value
    return found[0], key


def _names(node: dict[str, Any]) -> tuple[str, str]:
    return node["class_type"], (node.get("_meta") or {}).get("title", "")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):  # ComfyUI takes every other text for true, False too
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


# ComfyUI


def find_comfyui() -> Path:
    """Return ComfyUI's folder. Raises Wrong where there is none."""
    beside = Path(os.path.abspath(__file__)).parents[2]  # not resolved: the pack may be linked into custom_nodes
    named = os.environ.get("COMFYUI_PATH")
    folder = Path(named) if named else beside
    if (folder / "main.py").is_file() and (folder / "comfy").is_dir():
        return folder
    if named:
        raise Wrong(f"COMFYUI_PATH is {named}, which isn't a ComfyUI folder; give the folder with main.py.")
    raise Wrong(
        f"{beside} isn't a ComfyUI folder; put this pack into ComfyUI's custom_nodes, or set COMFYUI_PATH to its "
        "folder."
    )


def set_environment(args: Any) -> None:
    """Set what ComfyUI's main.py sets before torch is loaded, where it is started itself."""
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL="1")
    if args.default_device is not None:
        rest = [device for device in range(32) if device != args.default_device]
        _see_devices(",".join(map(str, [args.default_device, *rest])))
    if args.cuda_device is not None:
        _see_devices(str(args.cuda_device))
    if args.oneapi_device_selector is not None:
        os.environ["ONEAPI_DEVICE_SELECTOR"] = args.oneapi_device_selector
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _see_devices(devices: str) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        os.environ[name] = devices


def start_comfyui(folder: Path, options: Sequence[str]) -> Any:
    """Start ComfyUI as its main.py does, with all custom nodes, but do not listen. Returns its server.

    Its modules are imported by name, as they are there; SystemExit is raised for an option that it does not know.
    """
    sys.argv = [str(folder / "main.py"), *options]
    sys.path[0] = str(folder)  # in place of this pack's own folder, which ComfyUI's loader imports as a package
    importlib.import_module("comfy.options").enable_args_parsing()
    set_environment(importlib.import_module("comfy.cli_args").args)
    try:
        main = importlib.import_module("main")
    except (AssertionError, RuntimeError) as error:  # of torch, which ComfyUI asks for its device while it is loaded
        if any(word in str(error) for word in ("CUDA", "NVIDIA", "HIP")) and not device_count():
            raise NoDevice from error
        raise
    _, server, _ = main.start_comfyui()
    return server


def device_count() -> int:
    """Return how many GPUs torch sees. Loads torch."""
    return int(importlib.import_module("torch").cuda.device_count())


class Told:
    """Tells what happens: on the terminal, and as lines of JSON in a log. Of several devices only the first does."""

    def __init__(self, log: TextIO | None, rank: int = 0) -> None:
        self.log, self.on_terminal, self.silent = log, sys.stdout.isatty(), rank > 0
        self.open, self.last = False, 0.0

    def event(self, event: str, **facts: Any) -> None:
        if self.log is not None:
            self.log.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}, default=str) + "\n")
            self.log.flush()

    def line(self, text: str, to: TextIO | None = None) -> None:
        if self.silent:
            return
        if self.open:
            print()
            self.open = False
        print(text, file=to or sys.stdout, flush=True)

    def progress(self, text: str) -> None:
        """Show in one line on a terminal, and every few seconds elsewhere."""
        if self.silent:
            return
        if self.on_terminal:
            print(f"\r    {text[:110]:<110}", end="", flush=True)
            self.open = True
        elif time.monotonic() - self.last > 3:
            print(f"    {text}", flush=True)
            self.last = time.monotonic()


@contextlib.contextmanager
def open_log(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        log = open(path, "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise Wrong(f"--log {path} can't be written: {error.strerror}.") from error
    with log:
        yield log


# The run


class Run:
    """One execution of a prompt. The main thread watches, while ComfyUI's worker executes in its own."""

    def __init__(
        self,
        prompt: Prompt,
        extra_data: dict[str, Any],
        changed: set[tuple[str, str]],
        told: Told,
        rank: "Rank",
        result: "Result",
    ) -> None:
        """changed: the inputs that were set for this run, by number of the node and name."""
        self.prompt, self.extra_data, self.changed = prompt, extra_data, changed
        self.told, self.rank, self.result = told, rank, result
        self.id, self.client = str(uuid.uuid4()), uuid.uuid4().hex
        self.started = time.time()
        self.signal: int | None = None

    def execute(self, comfyui: Path, options: Sequence[str]) -> int:
        """Run the prompt to its end; returns the exit code."""
        try:
            server = start_comfyui(comfyui, options)
        except NoDevice as error:
            raise self.rank.without_device() from error
        self.rank.meet_others()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.end_by_signal)
        main = importlib.import_module("main")
        self.result.begun(importlib.import_module("folder_paths").get_output_directory(), self.started)
        try:
            return int(server.loop.run_until_complete(self._execute(server)))
        except Wrong as mistake:
            self.told.event("error", node=None, message=str(mistake))
            mistake.of_this_device = self.rank.tell_others(str(mistake), SAME)
            raise
        finally:
            main.asset_seeder.shutdown()
            main.cleanup_temp()

    def end_by_signal(self, number: int, _: Any) -> None:
        """Cancel, as the browser's button does: a run that trains saves first. A second Ctrl+C ends it at once.

        A second SIGTERM is one that several have sent, such as systemd and torchrun, while it saves.
        """
        if self.signal is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.signal = number
        importlib.import_module("nodes").interrupt_processing()

    async def _execute(self, server: Any) -> int:
        execution = importlib.import_module("execution")
        self.check_inputs()
        given = server.trigger_on_prompt({"prompt": self.prompt, "client_id": self.client})
        prompt = given["prompt"]
        server.node_replace_manager.apply_replacements(prompt)
        valid, error, outputs, node_errors = await execution.validate_prompt(self.id, prompt, None)
        if not valid:
            raise Wrong("\n".join(self.explain(error, node_errors)))
        if node_errors:
            raise Wrong("\n".join(self.explain({}, node_errors)))  # a server would leave these nodes out
        self.rank.check_shares(prompt)
        if self.rank.rank > 0:  # nothing but training and what it needs: the first device saves, shows and compares
            outputs = [number for number in outputs if self.prompt[number]["class_type"] == TRAIN]
        data = {**self.extra_data, "client_id": self.client, "create_time": int(time.time() * 1000)}
        self.told.event("started", prompt_id=self.id)
        server.prompt_queue.put((0, self.id, prompt, data, outputs, {}))
        await self.watch(server)
        history = server.prompt_queue.get_history(self.id)[self.id]
        return self.code(history)

    async def watch(self, server: Any) -> None:
        """Tell of the events that a browser would get, until the prompt is in the history."""
        while self.id not in server.prompt_queue.get_history(self.id):
            with contextlib.suppress(asyncio.TimeoutError):
                kind, data, _ = await asyncio.wait_for(server.messages.get(), 0.2)
                self.tell(kind, data)
        while not server.messages.empty():
            self.tell(*server.messages.get_nowait()[:2])

    def tell(self, kind: Any, data: Any) -> None:
        if kind == "execution_start" and self.signal is not None:
            importlib.import_module("nodes").interrupt_processing()  # ComfyUI forgets one that comes before
        elif kind == importlib.import_module("protocol").BinaryEventTypes.TEXT:
            # The length of the node's number, the number, the text.
            end = 4 + int.from_bytes(data[:4], "big")
            text = data[end:].decode("utf-8", "replace")
            self.told.progress(text)
            self.told.event("text", node=data[4:end].decode(), text=text)
        elif kind == "executing" and data.get("node") in self.prompt:
            self.told.line(f"  {self.title(data['node'])}")
            self.told.event("node", node=data["node"], class_type=self.prompt[data["node"]]["class_type"])
        elif kind == "progress":
            self.told.event("progress", node=data.get("node"), value=data.get("value"), max=data.get("max"))
        elif kind == "tessera.train":
            self.told.event("train", **data)

    def title(self, number: str) -> str:
        kind, title = _names(self.prompt[number])
        return title or kind

    def check_inputs(self) -> None:
        """Raise Wrong for an input that its node does not have: ComfyUI would ignore it without a word.

        Of other packs' nodes only what was set for this run counts; their workflows may hold inputs of older versions.
        """
        kinds = importlib.import_module("nodes").NODE_CLASS_MAPPINGS
        for number, node in self.prompt.items():
            kind, ours = kinds.get(node["class_type"]), node["class_type"].startswith("Tessera")
            inputs = node.get("inputs", {})
            changed = {name for name in inputs if (number, name) in self.changed}
            if kind is None or not (ours or changed):
                continue
            groups = kind.INPUT_TYPES()
            # ComfyUI's own word on what it hands to the node, which may take inputs of inputs, or any.
            given = importlib.import_module("execution").get_input_data(inputs, kind, number)[0]
            for name in inputs:
                known = any(name.partition(".")[0] in group for group in groups.values())
                if (ours and not known) or (name in changed and name not in given):
                    its = [name for kind in ("required", "optional") for name in groups.get(kind, {})]
                    its += [one for one in inputs if one in given and one.partition(".")[0] in its and one not in its]
                    told = f"; it has {', '.join(its)}" if its else ""
                    raise Wrong(f"{self.title(number)} ({number}) has no input called {name}{told}.")

    def explain(self, error: dict[str, Any], node_errors: dict[str, Any]) -> Iterator[str]:
        """Yield what ComfyUI found wrong with the workflow, a line each."""
        for number, found in node_errors.items():
            for one in found["errors"]:
                yield f"{self.title(number)} ({number}): {one['message']}. {one['details']}".rstrip()
        if not node_errors:
            yield f"The workflow can't run: {error.get('message')} {error.get('details', '')}".rstrip()

    def code(self, history: dict[str, Any]) -> int:
        """Tell how the run ended. Returns the exit code."""
        status = history["status"]
        if status["status_str"] == "success":
            for path in self.files(history["outputs"]):
                self.told.line(f"  {path}")
            self.told.event("done", outputs=history["outputs"])
            return DONE
        messages = dict(status["messages"])
        failed = messages.get("execution_error")
        if failed is not None:
            text = str(failed["exception_message"]).strip()
            self.told.line(f"{failed['node_type']} ({failed['node_id']}): {text}", sys.stderr)
            self.told.event("error", node=failed["node_id"], message=text)
            if self.rank.tell_others(text) and self.rank.rank > 0:
                print(self.rank.named(text), file=sys.stderr, flush=True)
        again = saved_a_state(importlib.import_module("folder_paths").get_output_directory(), self.started)
        if again:
            self.told.line("Everything up to here is saved; run the same command again to continue.", sys.stderr)
        if failed is not None:
            code = TRY_AGAIN if again else FAILED
        elif self.signal == signal.SIGTERM or (self.signal is None and self.rank.size > 1):  # it came to another device
            code = TRY_AGAIN if again else TERMINATED
        else:
            code = CANCELLED
        self.told.event("ended", code=code)
        return code

    @staticmethod
    def files(outputs: dict[str, Any]) -> Iterator[str]:
        """Yield the files that the nodes tell of, below the output folder."""
        for node in outputs.values():
            for entry in (entry for entries in node.values() if isinstance(entries, list) for entry in entries):
                if isinstance(entry, dict) and entry.get("path"):
                    yield str(entry["path"])
                elif isinstance(entry, dict) and entry.get("type") == "output":
                    yield "/".join(filter(None, (entry.get("subfolder"), entry.get("filename"))))


def saved_a_state(output: str, started: float) -> bool:
    """Return True if a run that was told of since `started` has a state to go on from."""
    for summary in Path(output, "loras").rglob("summary.json"):
        if summary.stat().st_mtime >= started and any(summary.parent.glob("state-*")):
            return True
    return any(state.stat().st_mtime >= started for state in Path(output, "loras").rglob("state-*.tessera"))


# Several devices


class Rank(NamedTuple):
    """This process among those that torchrun has started, one for each device; alone where it has not.

    rank: number among all of them. Rank 0 writes and tells.
    size: how many there are.
    local: number on this machine.
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def of_environment(cls) -> "Rank":
        """Read what torchrun has set."""
        values = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
        if None in values or int(values[1] or 1) < 2:
            return cls()
        return cls(*(int(value or 0) for value in values[:3]))

    def named(self, text: str) -> str:
        return f"Device {self.rank}: {text}" if self.rank else text

    @contextlib.contextmanager
    def prepared(self, prompt: Prompt, options: Sequence[str]) -> Iterator[list[str]]:
        """Choose this process's device, and give ComfyUI's options for it."""
        if self.size == 1:
            yield list(options)
            return
        check_many(prompt, options)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
        devices = None if visible is None else [one for one in visible.split(",") if one.strip()]
        if devices is not None and "--cpu" not in options:
            if self.local >= len(devices):
                raise Wrong(f"CUDA_VISIBLE_DEVICES is {visible}, and {self.local + 1} devices or more are to train.")
            _see_devices(devices[self.local])
        else:
            _see_devices(str(self.local))
        os.environ["TESSERA_WORLD_OF"] = str(os.getpid())  # train/distributed/current.py waits for the others then
        if self.rank == 0:
            yield list(options)
            return
        temporary = tempfile.mkdtemp(prefix="tessera-device-")  # ComfyUI empties the one that it has
        quiet = [] if "--verbose" in options else ["--verbose", "ERROR"]
        try:
            own = [*options, "--database-url", "sqlite:///:memory:", "--temp-directory", temporary, *quiet]
            yield own
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def without_device(self) -> Wrong:
        """Make the error of a process that finds no GPU."""
        mistake = Wrong(
            "torch finds no GPU here; put -- --cpu at the end to run on the CPU."
            if self.size == 1
            else f"This machine has no GPU for its process {self.local + 1}; start as many processes as it has GPUs, "
            "or put -- --cpu at the end."
        )
        mistake.of_this_device = True
        return mistake

    def meet_others(self) -> None:
        """Wait for the other devices, before any of them does something that takes long or may fail."""
        try:
            self.world()
        except TimeoutError as error:
            mistake = Wrong("Another device has not started for half an hour.")
            mistake.of_this_device = True
            raise mistake from error

    def world(self) -> Any:
        """Return what joins this device to the others, once the pack is loaded; None for one that trains alone."""
        names = [name for name in sys.modules if name.endswith(".train.distributed.current")]
        return sys.modules[names[0]].current_world() if names and self.size > 1 else None

    def check_shares(self, prompt: Prompt) -> None:
        """Raise Wrong where several devices can't share a step evenly: here, before nodes in front encode and load."""
        name = next((name for name in sys.modules if name.endswith(".train.distributed.share")), None)
        for node in prompt.values() if name is not None and self.size > 1 else ():
            given = [node.get("inputs", {}).get(one) for one in ("batch_size", "gradient_accumulation")]
            if node["class_type"] == TRAIN and all(isinstance(one, int) for one in given):
                try:
                    sys.modules[name].share_of(self.rank, self.size, *given)
                except ValueError as error:
                    raise Wrong(str(error)) from error

    def tell_others(self, text: str, seconds: float = 0.0) -> bool:
        """Tell the other devices why this one ends. Returns True unless one has done so before.

        seconds: in which the first one may do so, which is left to it.
        """
        world = self.world()
        if world is None:
            return True
        with contextlib.suppress(RuntimeError):  # of the store, which may be gone
            if world.fault(seconds if self.rank else 0.0) is not None:
                return False
        world.tell(RuntimeError(text), text.partition("\n")[0])
        return True


def watch_parent(rank: Rank, launches: bool) -> None:
    """End with the process that started this one, however that ends: who launches asks the devices to save and end.

    A device that torchrun has started ends at once, since the others are gone as well.
    """
    given = os.environ.get(PARENT)
    parent = int(given) if given else os.getppid()
    if sys.platform == "win32" or not (given or (rank.size > 1 and not launches)):
        return
    number = signal.SIGTERM if launches else signal.SIGKILL
    if given and not launches and sys.platform == "linux":
        # Also while this process hangs in a call that lets no other thread run. 1 is PR_SET_PDEATHSIG; the launcher
        # starts its devices in its main thread, whose end it is.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            if given and launches:
                # The server's end of this pipe is closed as well where the server starts anew in its own process.
                if select.select([sys.stdin], [], [], 0.5)[0] and not os.read(sys.stdin.fileno(), 1):
                    break
            else:
                time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="tessera-parent", daemon=True).start()


class Result:
    """File with the exit code: torchrun makes 1 of every other code than 0."""

    def __init__(self, path: str | None) -> None:
        self.path, self.facts = path, dict[str, Any]()
        if path is not None:
            self.write()

    def write(self) -> None:
        if self.path is None:
            return
        try:
            Path(self.path).write_text(json.dumps(self.facts), encoding="utf-8")
        except OSError as error:
            raise Wrong(f"--result {self.path} can't be written: {error.strerror}.") from error

    def begun(self, output: str, started: float) -> None:
        """Tell where a state would lie, for a process that can't tell any more at its end."""
        self.facts |= {"output": output, "started": started}
        self.write()

    def ended(self, code: int) -> int:
        self.facts["code"] = code
        with contextlib.suppress(Wrong):
            self.write()
        return code


def check_many(prompt: Prompt, options: Sequence[str]) -> None:
    """Raise Wrong for what several devices can't run."""
    if not any(node["class_type"] == TRAIN for node in prompt.values()):
        raise Wrong(
            "The workflow has no Train LoRA, and nothing else is shared by several devices; leave --launch out."
        )
    for option in ("--cuda-device", "--default-device"):
        if any(one.partition("=")[0] == option for one in options):
            raise Wrong(f"{option} can't be used with several devices; let CUDA_VISIBLE_DEVICES name those to use.")


def check_launch(devices: int, prompt: Prompt, options: Sequence[str]) -> None:
    """Raise Wrong where as many devices can't be launched."""
    if sys.platform == "win32":
        raise Wrong("--launch needs torchrun, which torch for Windows does not start; use WSL, or leave --launch out.")
    if devices < 1:
        raise Wrong(f"--launch is {devices}; give the number of devices to train on.")
    check_many(prompt, options)
    if "--cpu" in options:
        return
    there = device_count()
    if there < devices:
        mend = f"give {there} or fewer" if there else "put -- --cpu at the end to run on the CPU"
        raise Wrong(f"--launch is {devices}, and torch sees {there} CUDA devices here; {mend}.")


def launch(devices: int, arguments: Sequence[str], result: str | None) -> int:
    """Start this file once for each device by torchrun. Returns the exit code of the first, and tells who failed."""
    own = list(arguments)
    end = own.index("--") if "--" in own else len(own)
    behind, own = own[end:], own[:end]
    kept: list[str] = []
    while own:
        one = own.pop(0)
        name, equals, _ = one.partition("=")
        if name in ("--launch", "--result"):
            own = own if equals else own[1:]
        else:
            kept.append(one)
    with tempfile.TemporaryDirectory(prefix="tessera-launch-") as folder:
        path = result or str(Path(folder, "result.json"))
        torchrun = [
            "--standalone",
            f"--nproc-per-node={devices}",
            "--",
            os.path.abspath(__file__),
            *kept,
            "--result",
            path,
        ]
        failed = torchrun_failure([*torchrun, *behind], devices)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
    code = found.get("code")
    if failed is not None:
        rank, exit_code = failed
        if exit_code < 0:
            print(f"Device {rank}: its process was ended by {signal.Signals(-exit_code).name}.", file=sys.stderr)
        if rank > 0 and exit_code == WRONG:
            return WRONG
    elif code is not None:
        return int(code)
    else:
        code = TERMINATED  # by a signal while the first one started, or because it took too long to end
    if code is None or code == TERMINATED:
        again = "output" in found and saved_a_state(found["output"], found["started"])
        return TRY_AGAIN if again else FAILED if code is None else int(code)
    return int(code)


def torchrun_failure(arguments: Sequence[str], devices: int) -> tuple[int, int] | None:
    """Run torchrun. Returns rank and exit code of the process that failed first; None where none has of itself."""
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    api = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    os.environ[PARENT] = str(os.getpid())  # for the devices
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Seconds until torchrun kills a process that it has asked to end: a long micro-batch comes before the save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # It holds where torchrun itself is asked to end; where a process has failed, torchrun gives the others 30 seconds.
    close = api.PContext.close

    def patient(context: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(context, death_sig, max(timeout, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])))

    api.PContext.close = patient
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))  # torchrun would set 1
    for name in ("torch.distributed.elastic", "torch.distributed.run"):  # what is worth telling is told in a sentence
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        importlib.import_module("torch.distributed.run").main(list(arguments))
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return rank, failure.exitcode
    except (api.SignalException, KeyboardInterrupt):
        return None
    return None


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads of other packs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
