"""Recordings of the compilations inside them, provoked with the real torch.compile."""

import ctypes
import logging
import threading
import time
from types import FunctionType

import pytest
import torch
from tessera.compile.region import limits_each_region
from tessera.compile.report import events
from tessera.compile.report.events import recording
from tessera.compile.report.explain import advice, explain_break
from tessera.compile.report.torch_private import COMPILE_LOCALS, PRIVATE_NAMES, TESTED_TORCH, missing, unavailable
from torch import nn
from torch._dynamo import utils as dynamo

# An older torch names no cause of a recompile; all else that is read of it is looked for by name below.
newer_torch = pytest.mark.skipif(not limits_each_region(), reason="this torch.compile has no limit for one callable")


@newer_torch
def test_the_installed_torch_is_one_that_was_tested():
    assert torch.__version__.startswith(TESTED_TORCH), f"see whether the names are right, then add {torch.__version__}"


@pytest.mark.parametrize("name", [name for names in PRIVATE_NAMES.values() for name in names])
def test_torch_has_the_private_name(name):
    assert not missing(name)


@newer_torch
@pytest.mark.parametrize("name", COMPILE_LOCALS)
def test_dynamo_has_the_local_that_the_guards_are_read_from(name):
    code = torch._dynamo.convert_frame._compile.__code__
    assert name in code.co_varnames + code.co_cellvars


def test_a_name_that_is_not_there_is_missing():
    assert missing("torch._dynamo.utils:no_such_name")
    assert missing("torch._dynamo.utils:CompilationMetrics.no_such_field")
    assert missing("torch._no_such_module:name")


class Block(nn.Module):
    """Reads what ComfyUI's blocks read: weights, a list of functions, a number, an optional dict of options."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight_function = []
        self.scale = 3

    def forward(self, x, transformer_options=None):
        x = self.linear(x)
        for function in self.weight_function:
            x = function(x)
        for patch in (transformer_options or {}).get("patches", ()):
            x = patch(x)
        return x * self.scale


class OtherBlock(Block):
    pass


def run_block(block, *args):
    return block(*args)


def region(name="region", body=run_block, **options):
    """A compiled callable as compile/apply.py makes one."""
    renamed = FunctionType(body.__code__.replace(co_name=f"run_{name}"), body.__globals__, f"run_{name}")
    if not limits_each_region():
        pytest.skip("this torch.compile has no limit for one callable")
    settings = {"backend": "eager", "dynamic": False, "recompile_limit": 16, "isolate_recompiles": True, **options}
    return torch.compile(renamed, **settings)


def event_of(compiled, *args, region="region"):
    with recording(region) as record:
        compiled(*args)
    return record.event


@pytest.fixture
def block():
    return Block().requires_grad_(False)


def test_a_call_that_compiles_nothing_leaves_no_event(block):
    compiled, x = region(), torch.ones(2, 4)
    assert event_of(compiled, block, x).graphs == 1
    assert event_of(compiled, block, x) is None


def test_seconds_are_of_tracing_and_of_the_backend(block):
    def slow(graph, inputs):
        time.sleep(0.25)  # torch goes by the wall clock, which may be set back a little meanwhile
        return graph.forward

    event = event_of(region(backend=slow), block, torch.ones(2, 4))
    assert event.seconds >= event.tracing_seconds + 0.2 > 0.2


def test_a_graph_with_symbolic_sizes_is_told_from_one_without(block):
    assert not event_of(region(dynamic=False), block, torch.ones(2, 4)).dynamic
    assert event_of(region(dynamic=True), block, torch.ones(2, 4)).dynamic


def test_a_backward_is_recorded_as_well():
    compiled = region(backend="aot_eager")
    loss = compiled(Block(), torch.ones(2, 4)).sum()
    with recording("backward") as record:
        loss.backward()
    assert (record.event.region, record.event.graphs) == ("backward", 0)
    assert record.event.seconds > 0 and record.event.tracing_seconds == 0


# Graph breaks


class NoEnter:
    def __enter__(self):
        return 1

    def __exit__(self, *error):
        return None


@torch.library.custom_op("tessera_test::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.compiler.disable
def excluded(x):
    return x * 3


c_function = ctypes.CDLL(None).getpid
log = logging.getLogger("tessera.test")


def item(x):
    y = x + 1
    if y.sum().item() > 0:  # here
        return y * 2
    return y


def branch(x):
    y = x + 1
    if y.sum() > 0:  # here
        return y * 2
    return y


def nonzero(x):
    return (x + 1).nonzero() * 2  # here


def prints(x):
    y = x + 1
    print("in the middle")  # here
    return y * 2


def logs(x):
    y = x + 1
    log.debug("in the middle")  # here
    return y * 2


def calls_ctypes(x):
    y = x + 1
    c_function()  # here
    return y * 2


def calls_c(x):
    y = x + 1
    time.time()  # here
    return y * 2


def calls_excluded(x):
    return excluded(x + 1) * 2  # here


def within(x):
    y = x + 1
    prints(y)
    return y * 2


def changes_a_tensors_storage(x):
    y = x + 1
    y.resize_(1)  # here
    return y * 2


def in_a_loop(x):
    for i in range(2):
        x = x + 1
        print(i)  # here
    return x


def in_a_with(x):
    with NoEnter():
        x = x + 1
        time.sleep(0)  # here
        x = x * 2
    return x


def generator(x):
    yield x + 1


def first_line(function):
    code = function.__code__
    source = open(code.co_filename, encoding="utf-8").read().splitlines()
    return next(n for n in range(code.co_firstlineno, len(source) + 1) if source[n - 1].endswith("# here"))


@pytest.mark.parametrize(
    ("function", "said", "graphs"),
    [
        (item, "reads a tensor's value", 2),
        (branch, "reads a tensor's value", 2),
        (nonzero, "reads a tensor's value", 2),
        (prints, "prints or logs", 2),
        (logs, "prints or logs", 2),
        (calls_ctypes, "ctypes", 2),
        (calls_c, "cannot look into (one written in C, or one that torch skips): time.time.", 2),
        (calls_excluded, "author excluded this function from compiling: excluded", 2),
        (changes_a_tensors_storage, "changes an object outside the graph", 2),
    ],
)
def test_a_graph_break_is_told_with_its_line_and_cause(function, said, graphs):
    torch._dynamo.reset()
    event = event_of(torch.compile(function, backend="eager"), torch.ones(3))
    (broken,) = event.breaks
    assert (broken.file, broken.line, broken.function) == (__file__, first_line(function), function.__name__)
    assert broken.source.endswith("# here") and not broken.skipped
    assert said in explain_break(broken.detail)
    assert event.graphs == graphs and event.error is None


@pytest.mark.parametrize(
    ("function", "said"), [(in_a_loop, "prints or logs"), (in_a_with, "cannot look into (one written in C")]
)
def test_a_break_that_leaves_the_whole_function_uncompiled_is_told_by_its_first_cause(function, said):
    """Torch's summary ends with the loop or the context manager, which it met while it handled the break."""
    torch._dynamo.reset()
    event = event_of(torch.compile(function, backend="eager"), torch.ones(3))
    (broken,) = event.breaks
    assert (broken.line, broken.skipped, event.graphs) == (first_line(function), True, 0)
    assert said in explain_break(broken.detail)


def test_a_break_in_a_function_within_is_told_once_at_its_own_line():
    torch._dynamo.reset()
    event = event_of(torch.compile(within, backend="eager"), torch.ones(3))
    (broken,) = event.breaks
    assert (broken.line, broken.function) == (first_line(prints), "prints")
    assert event.graphs == 4


def test_two_causes_on_one_line_are_two_breaks():
    def breaks_twice(x):
        y = x + 1
        return y * time.time() * time.perf_counter()

    torch._dynamo.reset()
    event = event_of(torch.compile(breaks_twice, backend="eager"), torch.ones(3))
    assert [explain_break(graph_break.detail).rpartition(": ")[2] for graph_break in event.breaks] == [
        "time.time.",
        "time.perf_counter.",
    ]


def test_breaks_of_another_compilation_of_the_same_code_are_equal():
    torch._dynamo.reset()
    compiled = torch.compile(calls_ctypes, backend="eager", dynamic=False)
    first, second = (event_of(compiled, torch.ones(n)).breaks for n in (3, 4))
    assert set(first) == set(second) and len(first) == 1


def test_a_break_under_fullgraph_is_told_although_the_call_raises():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported), recording("region") as record:
        torch.compile(prints, backend="eager", fullgraph=True)(torch.ones(3))
    (broken,) = record.event.breaks
    assert (broken.line, broken.skipped, record.event.graphs) == (first_line(prints), True, 0)


def test_a_custom_operator_without_a_fake_kernel_is_an_error_in_plain_words():
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError), recording("region") as record:
        torch.compile(lambda x: without_fake(x) * 2, backend="eager")(torch.ones(3))
    assert "has no fake kernel" in explain_break(record.event.error)


def test_a_generator_is_told():
    with pytest.raises(Exception) as raised:  # noqa: B017
        next(torch.compile(generator, backend="eager", fullgraph=True)(torch.ones(3)))
    assert "generator" in explain_break(str(raised.value))


def test_a_backend_that_fails_is_an_error():
    def failing(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed), recording("region") as record:
        region(backend=failing)(Block(), torch.ones(2, 4))
    assert "no compiler" in record.event.error and record.event.breaks == ()


# Recompiles


def plus_one(x):
    return x + 1


def with_function(block):
    block.weight_function.append(plus_one)
    return block, torch.ones(2, 4)


def with_scale(block):
    block.scale = 4
    return block, torch.ones(2, 4)


@pytest.mark.parametrize(
    ("change", "guard", "said"),
    [
        (lambda b: (b, torch.ones(3, 4)), "tensor 'args[0]' size mismatch at index 0. expected 2, actual 3", "size"),
        (lambda b: (b, torch.ones(1, 2, 4)), "tensor 'args[0]' rank mismatch. expected 2, actual 3", "size"),
        (
            lambda b: (b, torch.ones(4, 2).t()),
            "tensor 'args[0]' stride mismatch. expected [4, 1], actual [1, 2]",
            "another memory layout",
        ),
        (
            lambda b: (b.double(), torch.ones(2, 4).double()),
            "tensor 'block.linear.weight' dtype mismatch. expected torch.float32, actual torch.float64",
            "another dtype",
        ),
        (
            lambda b: (b.requires_grad_(True), torch.ones(2, 4)),
            "tensor 'block.linear.weight' requires_grad mismatch. expected False, actual True",
            "with gradients",
        ),
        (with_function, "not block.weight_function, actual 1", "partly loaded model"),
        (with_scale, "block.scale == 3, actual 4", "another value"),
        (
            lambda _: (OtherBlock().requires_grad_(False), torch.ones(2, 4)),
            f"actual <class '{__name__}.OtherBlock'>",
            "another class",
        ),
    ],
)
def test_a_recompile_is_told_with_the_guard_that_failed_and_what_to_change(block, change, guard, said):
    compiled = region()
    assert event_of(compiled, block, torch.ones(2, 4)).recompiles == ()
    event = event_of(compiled, *change(block))
    (recompile,) = event.recompiles
    assert event.graphs == 1 and recompile.function == "run_region" and recompile.graphs == 1
    (text,) = [text for text in recompile.guards if guard in text]
    assert said in advice(text)


def test_a_tensor_on_another_device_is_told(block):
    compiled = region()
    compiled(block, torch.ones(2, 4))
    event = event_of(compiled, block.to("meta"), torch.ones(2, 4, device="meta"))
    assert "tensor 'block.linear.weight' device mismatch. expected cpu, actual meta" in event.recompiles[0].guards
    assert "partly offloaded" in advice(event.recompiles[0].guards[0])


def test_another_grad_mode_is_told_and_not_the_keys_that_follow_from_it(block):
    compiled = region()
    compiled(block, torch.ones(2, 4))
    with torch.inference_mode():
        event = event_of(compiled, block, torch.ones(2, 4))
    assert event.recompiles[0].guards == ("GLOBAL_STATE changed: grad_mode",)
    assert "gradients" in advice(event.recompiles[0].guards[0])


def test_another_setting_of_torch_is_told(block):
    compiled = region()
    compiled(block, torch.ones(2, 4))
    torch.set_default_dtype(torch.float64)
    try:
        event = event_of(compiled, block, torch.ones(2, 4, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert event.recompiles[0].guards == ("GLOBAL_STATE changed: default_dtype",)
    assert "setting of torch" in advice(event.recompiles[0].guards[0])


def test_a_patch_in_the_transformer_options_is_told(block):
    def body(block, x, transformer_options):
        return block(x, transformer_options)

    compiled, x = region(body=body), torch.ones(2, 4)
    compiled(block, x, {"patches": [plus_one]})
    for options in ({}, {"patches": [torch.sin]}, {"patches": [plus_one, plus_one]}):
        (recompile,) = event_of(compiled, block, x, options).recompiles
        assert all("transformer_options" in guard for guard in recompile.guards)
        assert "attention override" in advice(recompile.guards[0])


def test_a_graph_for_an_option_that_is_gone_is_farther_than_one_for_fewer_options(block):
    """A guard on what is not there hides the guards under it."""

    def body(block, x, options):
        copied = options.copy()
        for patch in copied.get("patches", ()):
            x = patch(x)
        return block(x)

    compiled, x = region(body=body), torch.ones(2, 4)
    compiled(block, x, {"a": 1})
    compiled(block, x, {"a": 1, "patches": [plus_one]})
    (recompile,) = event_of(compiled, block, x, {"a": 1, "b": 2}).recompiles
    assert recompile.guards == ("len(options) == 1, actual 2",)


@pytest.mark.parametrize("change", ["the same size", "another size"])
def test_a_baked_lora_is_told_by_its_weight_where_torch_names_another_cause(block, change):
    """Core bakes under inference mode or outside, so baked and untouched weights are of two kinds."""
    compiled, wide = region(), torch.ones(3, 4)
    other = wide if change == "the same size" else torch.ones(2, 4)
    with torch.inference_mode():
        event_of(compiled, block, wide)
        event_of(compiled, block, other)
        block.linear.weight = nn.Parameter(block.linear.weight + 1, requires_grad=False)
        event = event_of(compiled, block, wide)
    (recompile,) = event.recompiles
    (guard,) = recompile.guards
    assert guard.startswith("tensor 'block.linear.weight' dispatch key set mismatch. expected an ordinary tensor")
    assert "LoRA" in advice(recompile.guards[0])
    if change == "another size":
        assert "size mismatch" in dynamo._compilation_metrics[-1].recompile_reason


def test_the_limit_of_graphs_is_told_with_what_did_not_fit(block):
    compiled = region(recompile_limit=1)
    event_of(compiled, block, torch.ones(2, 4))
    event = event_of(compiled, block, torch.ones(3, 4))
    assert event.limit_reached and event.graphs == 0 and event.breaks == ()
    assert event.recompiles[0].guards == ("tensor 'args[0]' size mismatch at index 0. expected 2, actual 3",)
    assert event_of(compiled, block, torch.ones(5, 4)) is None  # eager for good: torch looks no further


def test_the_limit_of_graphs_is_told_under_fullgraph(block):
    compiled = region(recompile_limit=1, fullgraph=True)
    event_of(compiled, block, torch.ones(2, 4))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit), recording("region") as record:
        compiled(block, torch.ones(3, 4))
    assert record.event.limit_reached and record.event.error is None
    assert "size mismatch" in record.event.recompiles[0].guards[0]


# Whose compilation it is


def test_a_compilation_belongs_to_the_innermost_recording(block):
    first, second = region("first"), region("second")
    with recording("outer") as outer:
        first(block, torch.ones(2, 4))
        with recording("inner") as inner:
            second(block, torch.ones(2, 4))
        second(block, torch.ones(3, 4))
    assert (outer.event.graphs, inner.event.graphs) == (2, 1)
    assert len(outer.event.recompiles) == 1


def test_graphs_compiled_outside_a_recording_are_in_none(block):
    region("outside")(block, torch.ones(2, 4))
    event = event_of(region("inside"), block, torch.ones(2, 4))
    region("outside")(block, torch.ones(2, 4))
    assert event.graphs == 1
    with recording("nothing") as record:
        pass
    assert record.event is None


def test_graphs_that_another_thread_compiles_meanwhile_are_its_own(block):
    compiled = {name: region(name) for name in ("one", "two", "neither")}
    started, finished = threading.Event(), threading.Event()
    events = {}

    def other():
        started.wait(60)
        with recording("two") as record:
            compiled["two"](block, torch.ones(2, 4))
        compiled["neither"](block, torch.ones(2, 4))
        events["two"] = record.event
        finished.set()

    thread = threading.Thread(target=other)
    thread.start()
    with recording("one") as record:
        compiled["one"](block, torch.ones(2, 4))
        started.set()
        finished.wait(60)
        compiled["one"](block, torch.ones(3, 4))
    thread.join()
    assert (record.event.graphs, events["two"].graphs) == (2, 1)
    assert len(record.event.recompiles) == 1 and not events["two"].recompiles


def test_more_compilations_in_one_call_than_torch_remembers_are_all_counted():
    def body(x):
        for _ in range(1):
            pass
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        return x + 1

    torch._dynamo.reset()
    size = dynamo._compilation_metrics.maxlen
    dynamo.set_compilation_metrics_limit(2)
    try:
        event = event_of(torch.compile(body, backend="eager"), torch.ones(3))
    finally:
        dynamo.set_compilation_metrics_limit(size)
    assert event.graphs == 4 and len(event.breaks) == 3


def test_recording_goes_on_after_torch_was_reset(block):
    compiled = region()
    assert event_of(compiled, block, torch.ones(2, 4)).graphs == 1
    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    dynamo.reset_recompile_user_contexts()
    assert event_of(compiled, block, torch.ones(2, 4)).graphs == 1
    assert event_of(compiled, block, torch.ones(3, 4)).recompiles[0].graphs == 1


# What it leaves alone


def test_settings_of_torch_and_loggers_are_not_changed_and_nothing_is_printed(block, capfd):
    def state():
        loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]
        return (
            torch._dynamo.config.get_config_copy(),
            torch._inductor.config.get_config_copy(),
            {logger.name: (logger.level, logger.propagate, list(logger.handlers)) for logger in loggers},
            list(torch._dynamo.callback_handler.start_callbacks),
        )

    def record():
        for x in (torch.ones(2, 4), torch.ones(3, 4)):
            event_of(compiled, block, x)

    compiled = region()
    record()  # torch imports parts of itself as it first compiles, with loggers of their own
    torch._dynamo.reset()
    initial = state()
    record()
    assert state() == initial
    event_of(torch.compile(branch, backend="eager"), torch.ones(3))
    assert capfd.readouterr() == ("", "")


def test_an_error_of_ours_does_not_end_the_compilation(block, monkeypatch):
    def broken(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr(events, "_recompile", broken)
    event = event_of(region(), block, torch.ones(2, 4))
    assert event.graphs == 1


@pytest.mark.parametrize(
    ("name", "field", "expected"),
    [
        ("register_hook_for_recompile_user_context", "recompiles", "the guard that failed"),
        ("graph_break_reasons", "breaks", "graph breaks"),
        ("counters", "bypassed", "cache hits"),
    ],
)
def test_a_torch_without_a_private_name_says_what_it_does_not_tell(block, monkeypatch, name, field, expected):
    dynamo.reset_recompile_user_contexts()
    assert unavailable() == ()
    with monkeypatch.context() as patch:
        patch.setattr(events, "dynamo", _Without(dynamo, name))
        patch.delattr(dynamo, name)
        (sentence,) = unavailable()
        patch.undo()
        patch.setattr(events, "dynamo", _Without(dynamo, name))
        event = event_of(region(), block, torch.ones(2, 4))
    assert expected in sentence
    assert getattr(event, field) is None and event.graphs == 1


def test_breaks_are_told_after_a_reset_on_a_torch_that_does_not_say_when_it_compiles(monkeypatch):
    dynamo.reset_recompile_user_contexts()
    monkeypatch.setattr(events, "dynamo", _Without(dynamo, "register_hook_for_recompile_user_context"))
    for _ in range(2):
        torch._dynamo.reset()
        assert len(event_of(torch.compile(prints, backend="eager"), torch.ones(3)).breaks) == 1


def test_a_torch_that_keeps_no_metrics_leaves_no_event(block, monkeypatch):
    monkeypatch.setattr(events, "dynamo", _Without(dynamo, "_compilation_metrics"))
    assert event_of(region(), block, torch.ones(2, 4)) is None


class _Without:
    """The module as an older torch has it."""

    def __init__(self, module, name):
        self._module, self._name = module, name

    def __getattr__(self, attribute):
        if attribute == self._name:
            raise AttributeError(attribute)
        return getattr(self._module, attribute)
