"""Ends of run.py, and what it gives on to the processes that it starts."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from tessera.headless import comfyui, command, execution, launch
from tessera.headless.errors import TERMINATED, UsageError
from tessera.headless.execution import Run
from tessera.headless.rank import Rank
from tessera.headless.reports import Reporter, Result, saved_a_state
from tessera.headless.workflow import TRAIN

TRAINS = {"4": {"class_type": TRAIN, "inputs": {}}}
WITH_MORE = TRAINS | {"5": {"class_type": "TesseraSaveLora", "inputs": {"lora": ["4", 0]}}}
STARTED = 1000.0


@pytest.fixture
def output(tmp_path, monkeypatch):
    """ComfyUI's output folder."""
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace(get_output_directory=lambda: str(tmp_path)))
    return tmp_path


@pytest.fixture
def nodes(monkeypatch):
    """ComfyUI's nodes; `cancelled` holds what was interrupted."""
    cancelled = []
    stand_in = SimpleNamespace(interrupt_processing=lambda: cancelled.append(True), cancelled=cancelled)
    monkeypatch.setitem(sys.modules, "nodes", stand_in)
    return stand_in


@pytest.fixture
def executor(monkeypatch):
    """ComfyUI's executor, which would hand every input to a node."""
    stand_in = SimpleNamespace(get_input_data=lambda inputs, kind, number: (inputs, {}, {}))
    monkeypatch.setitem(sys.modules, "execution", stand_in)


def run_of(rank=None, result=None, prompt=TRAINS, changed=()):
    reporter = Reporter(None)
    rank = rank or Rank()
    result = result or Result(None)
    run = Run(prompt, {}, set(changed), reporter, rank, result)
    run.started = STARTED
    return run


def write_file(path, mtime):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (mtime, mtime))


@pytest.mark.parametrize(
    ("files", "is_it"),
    [
        ({"summary.json": 1001, "state-000001.tessera": 5}, True),  # it went on from a state and ended
        ({"summary.json": 999, "state-000001.tessera": 5}, False),
        ({"summary.json": 1001}, False),
        ({"state-000001.tessera": 1001}, True),  # its process was killed
        ({"summary.json": 1001, "tiny.safetensors": 1001}, False),
        ({}, False),
    ],
)
def test_a_state_is_one_of_a_run_that_was_told_of_since_the_start(files, is_it, tmp_path):
    for name, mtime in files.items():
        write_file(tmp_path / "loras" / "folder" / "a (1)" / name, mtime)
    assert saved_a_state(str(tmp_path), STARTED) is is_it


@pytest.mark.parametrize(
    ("size", "stop_signal", "has_failed", "saved", "unsaved"),
    [
        (1, signal.SIGTERM, False, 75, 143),
        (1, signal.SIGINT, False, 130, 130),
        (1, None, False, 130, 130),
        (2, None, False, 75, 143),  # the signal came to another device
        (2, signal.SIGINT, False, 130, 130),
        (1, None, True, 75, 1),
        (1, signal.SIGTERM, True, 75, 1),
    ],
)
def test_the_exit_code_says_whether_and_how_it_goes_on(size, stop_signal, has_failed, saved, unsaved, output, capsys):
    error = {"exception_message": "no room\n", "node_type": "A", "node_id": "4"}
    messages = [["execution_error", error] if has_failed else ["execution_interrupted", {}]]
    for code in (unsaved, saved):
        run = run_of(Rank(0, size, 0))
        run.signal = stop_signal
        assert run.code({"status": {"status_str": "error", "messages": messages}}) == code
        message = capsys.readouterr().err
        assert ("run the same command again" in message) is any(output.rglob("state-*"))
        assert ("A (4): no room\n" in message) is has_failed
        write_file(output / "loras" / "a (1)" / "state-000001.tessera", STARTED + 1)


def test_a_run_that_is_done_tells_its_files(output, capsys):
    outputs = {"4": {"tessera": [{"path": "loras/a.safetensors"}], "images": [{"type": "temp", "filename": "b.png"}]}}
    outputs["5"] = {"images": [{"type": "output", "subfolder": "c", "filename": "d.png"}]}
    assert run_of().code({"status": {"status_str": "success"}, "outputs": outputs}) == 0
    assert capsys.readouterr().out.split() == ["loras/a.safetensors", "c/d.png"]


def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(nodes, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    run = run_of()
    for number, exits in ((signal.SIGTERM, []), (signal.SIGTERM, []), (signal.SIGINT, [130])):
        run.end_by_signal(number, None)
        assert (nodes.cancelled, ended, run.signal) == ([True], exits, signal.SIGTERM)


def test_a_signal_that_comes_before_the_graph_is_not_forgotten(nodes, monkeypatch):
    monkeypatch.setitem(sys.modules, "protocol", SimpleNamespace(BinaryEventTypes=SimpleNamespace(TEXT=3)))
    run = run_of()
    run.tell("execution_start", {})
    assert nodes.cancelled == []
    run.signal = signal.SIGTERM
    run.tell("execution_start", {})
    assert nodes.cancelled == [True]


class Server:
    """Stand-in for ComfyUI's server: what is queued is done at once."""

    def __init__(self):
        self.queued, self.messages = [], asyncio.Queue()
        self.node_replace_manager = SimpleNamespace(apply_replacements=lambda prompt: None)
        self.prompt_queue = SimpleNamespace(put=self.queued.append, get_history=self.history)

    def trigger_on_prompt(self, data):
        return data

    def history(self, number):
        return {number: {"status": {"status_str": "success"}, "outputs": {}}} if self.queued else {}


@pytest.mark.parametrize(("rank", "expected"), [(0, ["4", "5"]), (1, ["4"])])
def test_only_the_first_device_saves_and_shows(rank, expected, output, nodes, monkeypatch):
    async def validate_prompt(number, prompt, partial):
        return True, None, ["4", "5"], {}

    monkeypatch.setitem(sys.modules, "execution", SimpleNamespace(validate_prompt=validate_prompt))
    nodes.NODE_CLASS_MAPPINGS = {}

    async def execute():
        server = Server()
        return await run_of(Rank(rank, 2, rank), prompt=WITH_MORE).execute_on(server), server.queued

    code, ((_, _, prompt, _, outputs, _),) = asyncio.run(execute())
    assert (code, outputs, prompt) == (0, expected, WITH_MORE)


@pytest.mark.parametrize("is_known", [False, True])
def test_lack_of_a_device_is_told_by_it_and_to_the_others_unless_one_has_told_of_it(
    is_known, output, nodes, monkeypatch
):
    async def validate_prompt(number, prompt, partial):
        validation_error = {"message": "Value not in list", "details": "no such model"}
        return False, {}, [], {"4": {"errors": [validation_error]}}

    messages, loop = [], asyncio.new_event_loop()
    world = SimpleNamespace(
        faults=SimpleNamespace(first=lambda seconds: "fault" if is_known else None),
        abort=lambda error, text: messages.append(text),
    )
    server = Server()
    server.loop = loop
    nodes.NODE_CLASS_MAPPINGS = {}
    modules = {
        "tessera.train.distributed.world": SimpleNamespace(current_world=lambda: world),
        "execution": SimpleNamespace(validate_prompt=validate_prompt),
        "main": SimpleNamespace(asset_seeder=SimpleNamespace(shutdown=list), cleanup_temp=list),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(execution, "start_comfyui", lambda folder, options: server)
    monkeypatch.setattr(signal, "signal", lambda number, act: None)
    with pytest.raises(UsageError, match="Value not in list. no such model") as error:
        run_of(Rank(1, 2, 1)).execute(output, [])
    loop.close()
    assert error.value.is_local is not is_known
    assert messages == ([] if is_known else ["TesseraTrainLora (4): Value not in list. no such model"])


def test_an_input_that_its_node_does_not_have_is_told(nodes, executor):
    kind = SimpleNamespace(INPUT_TYPES=lambda: {"required": {"steps": ()}, "optional": {"data": ()}})
    nodes.NODE_CLASS_MAPPINGS = {TRAIN: kind}
    run_of(prompt={"4": {"class_type": TRAIN, "inputs": {"steps": 1, "data.a": 2}}}).check_inputs()
    message = r"^TesseraTrainLora \(4\) has no input called stepz; it has steps, data\.$"
    with pytest.raises(UsageError, match=message):
        run_of(prompt={"4": {"class_type": TRAIN, "inputs": {"stepz": 1}}}).check_inputs()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_a_sigterm_while_comfyui_starts_is_on_record(tmp_path, rank):
    """torchrun gives 1 of it, so the record is all that tells."""
    folder, result = tmp_path / "ComfyUI", tmp_path / "result.json"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfy" / "options.py").write_text("import time\nprint('starts', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "w.json").write_text(json.dumps(TRAINS))
    environment = {**os.environ, "COMFYUI_PATH": str(folder)}
    if rank is not None:
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    started = [sys.executable, str(launch.RUN), str(tmp_path / "w.json"), "--result", str(result)]
    with subprocess.Popen(started, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "starts\n"
        process.terminate()
        assert process.wait(30) == TERMINATED
    assert result.exists() == (rank != "1") and (rank == "1" or json.loads(result.read_text()) == {"code": 143})


@pytest.fixture
def executed(monkeypatch, output, tmp_path):
    """Call `main` for a rank up to the start of ComfyUI. Returns the exit code and ComfyUI's options."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0,1")
    monkeypatch.setenv("TESSERA_WORLD_OF", "")
    monkeypatch.setattr(command, "watch_parent", lambda rank, launches: None)
    monkeypatch.setattr(signal, "signal", lambda number, act: None)
    monkeypatch.setattr(command, "find_comfyui", lambda: tmp_path)
    (tmp_path / "w.json").write_text(json.dumps(TRAINS))
    calls = []

    def execute(run, comfyui, options):
        run.reporter.event("started")
        calls.append((run.prompt["4"]["inputs"], list(options)))
        return 75

    monkeypatch.setattr(Run, "execute", execute)

    def call(rank, size, *options):
        calls.clear()
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "here"}.items():
            monkeypatch.setenv(name, str(value))
        return command.main([str(tmp_path / "w.json"), *options]), *(calls[0] if calls else ({}, []))

    return call


def test_the_first_device_logs_and_writes_the_result_and_each_has_its_own_place(executed, tmp_path, monkeypatch):
    log, result = tmp_path / "log.jsonl", tmp_path / "result.json"
    flags = ["--log", str(log), "--result", str(result), "--output", "out", "--set", "4.steps=3", "--", "--lowvram"]
    output = ["--output-directory", os.path.abspath("out"), "--lowvram"]
    code, inputs, options = executed(1, 2, *flags)
    assert (code, inputs) == (75, {"steps": 3}) and not log.exists() and not result.exists()
    *first, _, temporary, _, level = options
    assert first == [*output, "--database-url", "sqlite:///:memory:"] and level == "ERROR"
    assert options[-4] == "--temp-directory" and not os.path.exists(temporary)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1" and os.environ["TESSERA_WORLD_OF"] == str(os.getpid())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for lines in (1, 2):
        assert executed(0, 1 + lines % 2, *flags) == (75, {"steps": 3}, output)
        assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == lines * ["started"]
        assert json.loads(result.read_text()) == {"code": 75}
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--launch", "2"], "--launch starts torchrun itself; leave it out"),
        (["--", "--cuda-device", "1"], "--cuda-device can't be used with several devices"),
        (["--", "--default-device=1"], "--default-device can't be used with several devices"),
        (["--set", "9.steps=3"], "no node of the workflow is called 9"),
    ],
)
def test_work_that_several_devices_cannot_do_is_told_once(options, said, executed, capsys):
    assert executed(0, 2, *options)[0] == 2
    assert said in capsys.readouterr().err
    assert executed(1, 2, *options)[0] == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_several_devices_cannot_share_is_told_before_a_node_runs(size, monkeypatch):
    def shard_step(rank, size, batch_size, accumulation):
        raise ValueError(f"{size} devices can't share {batch_size} and {accumulation}")

    for name in [name for name in sys.modules if name.endswith(".train.distributed.share")]:
        monkeypatch.delitem(sys.modules, name)  # tests of the pack in this process have loaded it
    monkeypatch.setitem(sys.modules, "the pack.train.distributed.share", SimpleNamespace(shard_step=shard_step))
    rank = Rank(0, size, 0)
    linked = {"batch_size": ["1", 0], "gradient_accumulation": 2}
    rank.check_shares({"4": {"class_type": TRAIN, "inputs": linked}, "5": WITH_MORE["5"]})
    prompt = {"4": {"class_type": TRAIN, "inputs": linked | {"batch_size": 3}}}
    with pytest.raises(UsageError, match="2 devices can't share 3 and 2") if size > 1 else nullcontext():
        rank.check_shares(prompt)


@pytest.mark.parametrize(("rank", "first", "tells"), [(0, False, True), (1, True, False), (1, False, True)])
def test_faults_that_the_first_device_finds_too_are_left_to_it(rank, first, tells, monkeypatch):
    waits, messages = [], []

    def fault(seconds):
        waits.append(seconds)
        return {"rank": 0} if first else None

    abort = lambda error, sentence: messages.append(sentence)  # noqa: E731
    world = SimpleNamespace(faults=SimpleNamespace(first=fault), abort=abort)
    monkeypatch.setattr(Rank, "world", lambda self: world)
    assert Rank(rank, 2, rank).tell_others("no file", 5.0) is tells
    assert waits == [5.0 if rank else 0.0] and messages == (["no file"] if tells else [])


def test_a_process_without_a_device_is_told(executed, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert executed(1, 2, "--", "--cpu")[0] == 75
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES is 3, and 2 devices or more are to train"):
        with Rank(1, 2, 1).prepared(TRAINS, []):
            pass


@pytest.mark.parametrize(
    ("rank", "gpus", "said"),
    [
        (Rank(), 0, "torch finds no GPU here; put -- --cpu at the end to run on the CPU."),
        (Rank(5, 6, 2), 0, "This machine has no GPU for its process 3; start as many processes as it has"),
        (Rank(), 1, None),
    ],
)
def test_a_process_that_finds_no_gpu_is_told_in_a_sentence(rank, gpus, said, monkeypatch, tmp_path):
    (tmp_path / "main.py").write_text("raise RuntimeError('No CUDA GPUs are available')")
    for name in ("main", "comfy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    options = SimpleNamespace(enable_args_parsing=lambda: None)
    monkeypatch.setitem(sys.modules, "comfy.options", options)
    monkeypatch.setitem(sys.modules, "comfy.cli_args", SimpleNamespace(args=None))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: gpus)))
    monkeypatch.setattr(comfyui, "set_environment", lambda args: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    with pytest.raises(RuntimeError if said is None else UsageError) as error:
        run_of(rank).execute(tmp_path, [])
    assert str(error.value).startswith(said or "No CUDA GPUs")
    assert said is None or error.value.is_local


def test_a_device_is_one_of_several_where_torchrun_says_so(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert Rank.from_environment() == (3, 4, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Rank.from_environment() == (0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("MASTER_ADDR")
    assert Rank.from_environment() == (0, 1, 0)


@pytest.mark.parametrize(
    ("devices", "gpus", "prompt", "options", "said"),
    [
        (0, 2, TRAINS, ["--cpu"], "--launch is 0; give the number of devices"),
        (2, 2, {"5": WITH_MORE["5"]}, ["--cpu"], "The workflow has no Train LoRA"),
        (3, 2, TRAINS, [], r"--launch is 3, and torch sees 2 CUDA devices here; give 2 or fewer\."),
        (1, 0, TRAINS, [], "--launch is 1, and torch sees 0 CUDA devices here; put -- --cpu at the end"),
    ],
)
def test_launches_that_fail_are_told(devices, gpus, prompt, options, said, monkeypatch):
    cuda = SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(sys, "platform", "linux")
    launch.check_launch(gpus or 2, TRAINS, [] if gpus else ["--cpu"])
    with pytest.raises(UsageError, match=said):
        launch.check_launch(devices, prompt, options)


@pytest.mark.parametrize("option", [["--launch", "2"], ["--launch=2"]])
def test_the_devices_get_the_options_but_for_launch(option, monkeypatch, tmp_path):
    calls = []

    def torchrun(arguments, devices):
        calls.append((arguments, devices))
        (tmp_path / "result").write_text('{"code": 130}')

    monkeypatch.setattr(launch, "torchrun_failure", torchrun)
    command_line = ["w.json", *option, "--set", "4.steps=1", "--result", "x", "--log=l"]
    behind = ["--", "--cpu", "--launch", "7"]
    assert launch.launch(2, [*command_line, *behind], str(tmp_path / "result")) == 130
    expected = ["w.json", "--set", "4.steps=1", "--log=l", "--result", str(tmp_path / "result")]
    started = ["--standalone", "--nproc-per-node=2", "--", str(launch.RUN)]
    assert calls == [([*started, *expected, *behind], 2)]


@pytest.mark.parametrize(("omp_threads", "threads"), [(None, "4"), ("3", "3")])
def test_the_devices_share_the_threads_of_the_machine(omp_threads, threads, monkeypatch):
    class Fake(SimpleNamespace):
        ChildFailedError = SignalException = RuntimeError
        PContext = SimpleNamespace(close=None)

    thread_counts = []
    fake = Fake(main=lambda arguments: thread_counts.append(os.environ["OMP_NUM_THREADS"]))
    monkeypatch.setattr(launch.importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 8)
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", launch.PARENT):
        monkeypatch.setenv(name, omp_threads or "1")
        if omp_threads is None:
            monkeypatch.delenv(name)
    assert launch.torchrun_failure(["run.py"], 2) is None
    assert thread_counts == [threads]


def test_the_result_of_launch_is_the_code_that_it_ends_with(monkeypatch, tmp_path):
    """Not what the first device wrote, which may have been killed before it could."""
    path, workflow = tmp_path / "result", tmp_path / "w.json"
    workflow.write_text(json.dumps(TRAINS))
    monkeypatch.setattr(command, "find_comfyui", lambda: tmp_path)
    monkeypatch.setattr(command, "check_launch", lambda *_: None)
    monkeypatch.setattr(command, "launch", lambda *_: path.write_text('{"output": "x"}') and 75)
    assert command.main([str(workflow), "--launch", "2", "--result", str(path)]) == 75
    assert json.loads(path.read_text()) == {"code": 75}


ENDS = {
    "done": ({"code": 0}, None, (0, 0)),
    "cancelled": ({"code": 130}, None, (130, 130)),
    "ended by SIGTERM": ({"code": 143}, None, (143, 143)),
    "ended while they start": ({}, None, (143, 143)),
    "killed long after SIGTERM": ({"output": True}, None, (75, 143)),
    "an error of the first": ({"code": 1}, (0, 1), (1, 1)),
    "wrong for another": ({"code": 1}, (1, 2), (2, 2)),
    "wrong for the first": ({"code": 2}, (0, 2), (2, 2)),
    "another was killed": ({"code": 143, "output": True}, (1, -signal.SIGKILL), (75, 143)),
    "the first was killed": ({"output": True}, (0, -signal.SIGSEGV), (75, 1)),
    "before it trained": ({}, (1, -signal.SIGKILL), (1, 1)),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_code_of_launch_is_that_of_the_first_or_says_whether_it_goes_on(end, monkeypatch, tmp_path, capsys):
    result, failed, codes = ENDS[end]
    if "output" in result:
        result = result | {"output": str(tmp_path), "started": STARTED}

    def torchrun(arguments, devices):
        with open(arguments[arguments.index("--result") + 1], "w") as file:
            json.dump(result, file)
        return failed

    monkeypatch.setattr(launch, "torchrun_failure", torchrun)
    unsaved = launch.launch(2, ["w.json", "--launch", "2"], None)
    write_file(tmp_path / "loras" / "a (1)" / "state-000001.tessera", STARTED + 1)
    assert (launch.launch(2, ["w.json", "--launch", "2"], None), unsaved) == codes
    lines = capsys.readouterr().err.splitlines()
    if failed is None or failed[1] > 0:
        assert lines == []
    else:
        assert lines == 2 * [f"Device {failed[0]}: its process was ended by {signal.Signals(-failed[1]).name}."]
