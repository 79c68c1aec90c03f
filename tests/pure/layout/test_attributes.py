"""Nobody sets an attribute of an object from outside its class: its owner has a method that says what happens."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("nodes", "train", "data", "lora", "compile", "models", "memory", "common", "headless")
OF_TENSORS = {"data", "grad"}  # torch has no other way to set them
SETUP_CONTEXT = ["ctx", "inputs", "output"]
SETTERS = ("setattr", "object.__setattr__", "delattr", "object.__delattr__")
# Objects of torch, ComfyUI and other libraries, by file: the targets, and why they are set.
FOREIGN = {
    "common/core.py": (
        {"comfy.model_management.TOTAL_PINNED_MEMORY", "model.cached_patcher_init", "whole.(name)"},
        "private touches of ComfyUI, which has no function for them",
    ),
    "compile/region.py": ({"config.enable_autograd_cache"}, "torch's setting, for one call"),
    "compile/weights.py": (
        {"function.tessera_opaque", "module.(name)"},
        "ComfyUI's patches at each use of a weight are hidden from the compiler while it runs",
    ),
    "data/media/decoding.py": ({"decoder.options", "frame.pts"}, "PyAV's settings are attributes"),
    "data/media/strips.py": ({"reduced.info"}, "Pillow's settings are attributes"),
    "data/media/thumbnails.py": ({"stream.codec_context.options", "stream.thread_type"}, "PyAV's, as above"),
    "data/media/videos.py": ({"stream.thread_type"}, "PyAV's, as above"),
    "headless/launch.py": ({"api.PContext.close"}, "torchrun has no option for this time limit"),
    "memory/activations/offload.py": (
        {"weakref.finalize(self, offload.pool.free[layout.size].append, self.buffer).atexit"},
        "Python's finalizer takes it in no other way",
    ),
    "memory/comfy_compiler.py": ({"command_line.__class__"}, "ComfyUI's options get a switch for each thread"),
    "memory/host/flat_weights.py": ({"rebuilt._is_param"}, "torch's mark of a parameter on a tensor of another class"),
    "memory/host/mapped_file.py": ({"query.argtypes", "query.restype"}, "ctypes declares a foreign function so"),
    "memory/swap/inference.py": (
        {
            "base.model_loaded_weight_memory",
            "module.(f'{attribute}_function')",
            "module.comfy_cast_weights",
            "module.comfy_force_cast_weights",
            "module.prev_comfy_cast_weights",
        },
        "what ComfyUI's loader itself sets on a model and its modules",
    ),
    "memory/swap/patcher.py": (
        {
            "clone.__class__",
            "clone.offload_device",
            "clone.patches_uuid",
            "clone.size",
            "self.model.model_loaded_weight_memory",
            "self.model.model_lowvram",
        },
        "a clone of ComfyUI's patcher, and what its loader sets on a model",
    ),
    "memory/weights/check_format.py": (
        {
            "clone.(f'{part}_function')",
            "clone.comfy_cast_weights",
            "clone.comfy_force_cast_weights",
            "clone.weight_function",
        },
        "a copy of ComfyUI's module that reads its weights as when it samples",
    ),
    "models/native/comfyui/entries.py": (
        {"core.('__class__')", "inner.('__dict__')"},
        "a block of ComfyUI's is called by its own class, and its twin shares its attributes",
    ),
    "models/native/comfyui/leftovers.py": ({"config.unet_config", "outer._modules"}, "copies of ComfyUI's model"),
    "models/native/forward/inputs.py": ({"outer._modules"}, "a copy of ComfyUI's model"),
    "models/native/forward/kernels.py": (
        {"management.in_training", "module.(name)"},
        "ComfyUI's kernels are replaced while a step runs",
    ),
    "models/native/forward/shadow.py": (
        {"self.base._modules", "self.base.current_patcher"},
        "a copy of ComfyUI's model",
    ),
    "models/native/text.py": (
        {"literal.(name)", "literal.disable_weights", "literal.tokenizer"},
        "copies of ComfyUI's tokenizers",
    ),
    "models/text.py": (
        {"literal.(name)", "part.embedding_directory", "part.embedding_identifier"},
        "copies of ComfyUI's tokenizers",
    ),
    "nodes/common/types.py": ({"node.execute"}, "ComfyUI calls it: the check of inputs is the same for every node"),
    "train/optim/optimizers.py": ({"scheduler._last_lr"}, "torch sets it in a step only, and `get_last_lr` reads it"),
    "train/runs/run_record.py": ({"self._timer.daemon"}, "Python's timer takes it in no other way"),
}


def attributes_set(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, target) of each attribute that is set or deleted from outside of its object's class."""
    for owner, function in functions(tree):
        names = {"self", "cls", *([owner.name] if owner else [])} | made_here(function)
        if is_of_autograd(owner) or is_setup_context(function):
            names |= {"ctx"}
        for node in own_nodes(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                value, target = node.value, ast.unparse(node)
                if node.attr in OF_TENSORS:
                    continue
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS:
                value, target = node.args[0], f"{ast.unparse(node.args[0])}.({ast.unparse(node.args[1])})"
            else:
                continue
            if not (isinstance(value, ast.Name) and value.id in names):
                yield node.lineno, target


def functions(tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[ast.ClassDef | None, ast.AST]]:
    """Yield the module, class bodies and each function, with the class in which it stands."""
    yield owner, tree
    for node in own_nodes(tree, with_scopes=True):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from functions(node, owner)


def own_nodes(scope: ast.AST, with_scopes: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes of a scope without those of the classes and functions in it."""
    for child in ast.iter_child_nodes(scope):
        is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_scope == with_scopes:
            yield child
        if not is_scope:
            yield from own_nodes(child, with_scopes)


def made_here(function: ast.AST) -> set[str]:
    """Return the names of objects that a classmethod has just made of its own class."""
    if not any(ast.unparse(decorator) == "classmethod" for decorator in getattr(function, "decorator_list", ())):
        return set()
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(ast.unparse(part) == "cls" for part in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def is_of_autograd(owner: ast.ClassDef | None) -> bool:
    """Return whether a class is one of `torch.autograd.Function`, whose `ctx` takes anything."""
    return owner is not None and any(ast.unparse(base).endswith("autograd.Function") for base in owner.bases)


def is_setup_context(function: ast.AST) -> bool:
    """Return whether torch calls a function with its arguments of `setup_context`."""
    arguments = getattr(function, "args", None)
    return isinstance(arguments, ast.arguments) and [argument.arg for argument in arguments.args] == SETUP_CONTEXT


def test_attributes_are_set_by_their_class():
    wrong, exempted = [], set()
    for file in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        name = file.relative_to(ROOT).as_posix()
        exempt = FOREIGN.get(name, (set(), ""))[0]
        for line, target in attributes_set(ast.parse(file.read_text(encoding="utf-8"))):
            if target in exempt:
                exempted.add((name, target))
            else:
                wrong.append(f"{name}:{line} {target}")
    assert not wrong, "\n".join(wrong)
    assert exempted == {(name, target) for name, (targets, _) in FOREIGN.items() for target in targets}


@pytest.mark.parametrize(
    "text",
    [
        "def f(run):\n    run.step = 1",
        "def f(run):\n    run.step += 1",
        "def f(run):\n    run.a, run.b = 1, 2",
        "def f(run):\n    del run.step",
        "def f(run):\n    setattr(run, 'step', 1)",
        "class A:\n    def f(self):\n        self.run.step = 1",
        "class A:\n    def f(self):\n        for self.run.step in range(3): pass",
        "class A:\n    def f(self, ctx):\n        ctx.step = 1",
        "class A:\n    def f(cls):\n        run = cls.__new__(cls)\n        run.step = 1",
    ],
)
def test_every_way_to_set_an_attribute_is_found(text):
    assert list(attributes_set(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        self.step = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        cls.step = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        run = cls.__new__(cls)\n        run.step = 1",
        "class A:\n    def f(self):\n        A.count += 1",
        "class A(torch.autograd.Function):\n    def f(ctx):\n        ctx.step = 1",
        "def f(ctx, inputs, output):\n    ctx.step = 1",
        "weight.grad = None",
        "rows[1] = 2",
    ],
)
def test_a_class_may_set_its_own_attributes(text):
    assert not list(attributes_set(ast.parse(text)))
