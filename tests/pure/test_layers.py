"""The rules of the layout: layers, sizes, names, and families that only their own folders know."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What each top folder may import, besides itself.
BELOW = {
    "nodes": {"train", "data", "lora", "compile", "models", "memory", "common"},
    "train": {"data", "lora", "compile", "models", "memory", "common"},
    "data": {"models", "memory", "common"},
    "lora": {"models", "memory", "common"},
    "compile": {"models", "memory", "common"},
    "models": {"memory", "common"},
    "memory": {"common"},
    "common": set(),
    "headless": set(),  # runs before ComfyUI and the pack are loaded
}
FILES = sorted(file for layer in BELOW for file in (ROOT / layer).rglob("*.py"))
# ComfyUI's node API and its server.
OF_THE_NODES = {"comfy_api", "comfy_execution", "execution", "folder_paths", "nodes", "server"}
MOST_MODULES, MOST_LINES = 12, 500
MOST_METHODS, MOST_ATTRIBUTES = 15, 12
FRAMEWORKS = {"comfy", "torch"}  # a subclass of one of their classes has its methods


@dataclass(frozen=True)
class Import:
    """module: dotted, from the pack's root where `own`. name: what is taken from it, empty for the module itself."""

    module: str
    name: str
    is_own: bool
    at_once: bool


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def imports_of(file: Path) -> Iterator[Import]:
    package = file.relative_to(ROOT).parent.parts

    def walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, "", False, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield from (Import(child.module or "", alias.name, False, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                start = [*package[: len(package) + 1 - child.level], *(child.module or "").split(".")]
                module = ".".join(part for part in start if part)
                for alias in child.names:
                    inner = f"{module}.{alias.name}" if module else alias.name
                    is_module = inner in MODULES
                    yield Import(inner if is_module else module, "" if is_module else alias.name, True, at_once)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                later |= isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from walk(child, at_once and not later)

    return walk(tree_of(file), True)


def folder_of(module: str) -> str:
    """The folder of a module; that of a package is itself."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def families() -> dict[str, Path]:
    """The folder of each family: a package of models/ with a module `family`."""
    return {file.parent.name: file.parent for file in FILES if file.match("models/*/family.py")}


def test_the_imports_of_the_pack_are_found():
    assert len(FILES) > 200
    pairs = {
        (name_of(file).partition(".")[0], imported.module.partition(".")[0])
        for file in FILES
        for imported in imports_of(file)
    }
    assert {("nodes", "train"), ("train", "compile"), ("compile", "models"), ("models", "memory")} <= pairs
    assert {"flux", "qwen_image", "wan"} <= families().keys()


@pytest.mark.parametrize("layer", BELOW)
def test_imports_run_down_the_layers(layer):
    wrong = []
    for file in (file for file in FILES if name_of(file).partition(".")[0] == layer):
        for imported in imports_of(file):
            message = f"{file.relative_to(ROOT)} imports {imported.module}"
            top = imported.module.partition(".")[0]
            if imported.is_own:
                if top not in {layer, *BELOW[layer]}:
                    wrong.append(f"{message}, which stands above or beside it")
                continue
            if top in {*BELOW, ROOT.name} and (layer, top) != ("nodes", "nodes"):
                wrong.append(f"{message}: not relative")
            if layer != "nodes" and top in OF_THE_NODES:
                wrong.append(f"{message}, which only nodes/ may")
    assert not wrong, "\n".join(wrong)


def no_circle(needs: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_do_not_need_themselves():
    """Imports in functions and for type checkers count: they hide a circle, and do not open it."""
    no_circle({name_of(file): {imported.module for imported in imports_of(file) if imported.is_own} for file in FILES})


def test_imports_between_folders_run_down_the_table_of_the_architecture():
    """A folder and the folders in it are no exception: each of both may be the upper one."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [row.replace("/", ".") for row in re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)]
    position = {folder: number for number, folder in enumerate(rows)}
    wrong = []
    for file in FILES:
        upper = folder_of(name_of(file))
        lower_folders = {
            folder_of(imported.module) for imported in imports_of(file) if imported.is_own and imported.module
        }
        for lower in lower_folders - {upper}:
            if position[upper] > position[lower]:
                wrong.append(f"{file.relative_to(ROOT)} imports {lower}, a row above {upper}")
    assert not wrong, "\n".join(wrong)


def test_packages_re_export_nothing():
    """`__init__.py` holds no import but that of a family's one line, and what ComfyUI asks of nodes/."""
    allowed = {ROOT / "nodes" / "__init__.py"}
    for file in FILES:
        if file.name == "__init__.py" and file not in allowed:
            assert len(list(imports_of(file))) <= (file.parent in families().values()), file.relative_to(ROOT)


def test_folders_and_files_are_small():
    files = [*FILES, *sorted((ROOT / "nodes" / "web" / "js").rglob("*.js"))]
    modules: dict[Path, int] = defaultdict(int)
    for file in files:
        modules[file.parent] += file.name != "__init__.py"
    long = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    full = [f"{folder.relative_to(ROOT)}: {n} modules" for folder, n in modules.items() if n > MOST_MODULES]
    full += [f"{file.relative_to(ROOT)}: {n} lines" for file, n in long.items() if n > MOST_LINES]
    assert not full, "\n".join(full)


def taken_of_frameworks(tree: ast.Module) -> set[str]:
    """The names by which a module knows ComfyUI and torch and what is in them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        names |= {name for module, name in modules if module.partition(".")[0] in FRAMEWORKS}
    return names


def classes_of_frameworks(trees: list[ast.Module]) -> set[str]:
    """The classes that derive from one of ComfyUI's or torch's, directly or through classes of the pack."""
    bases: dict[str, set[str]] = {}
    for tree in trees:
        framework_names = taken_of_frameworks(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).partition("[")[0].partition(".")[0] for base in node.bases}
                bases[node.name] = {"" if name in framework_names else name for name in names}  # empty: a framework's
    derived = {""}
    while further := {name for name, names in bases.items() if names & derived} - derived:
        derived |= further
    return derived - {""}


def overrides(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a method that calls that of its own name of `super()`: the base class has it, and asks for it."""
    calls = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return any(ast.unparse(call) == f"super().{method.name}" for call in calls)


def sizes_of_class(node: ast.ClassDef, is_derived: bool) -> tuple[int, int]:
    """The methods of a class, without overrides of those of ComfyUI and torch, and the attributes that it sets."""
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and ast.unparse(child.value) == "self"
    }
    return sum(not (is_derived and overrides(method)) for method in methods), len(attributes)


def test_classes_are_small():
    derived = classes_of_frameworks([tree_of(file) for file in FILES])
    assert {"SwapPatcher", "Block", "NativeBlock"} <= derived and not derived & {"Family", "Notes", "SwappedBlocks"}
    wide = []
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                methods, attributes = sizes_of_class(node, node.name in derived)
                if methods > MOST_METHODS or attributes > MOST_ATTRIBUTES:
                    place = f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
                    wide.append(f"{place}: {methods} methods, {attributes} attributes")
    assert not wide, "\n".join(wide)


def test_only_overrides_of_a_framework_are_not_counted():
    methods = "\n".join(f"    def f{n}(self):\n        return super().f{n}()" for n in range(3))
    texts = {
        "from torch import nn\nclass A(nn.Module):\n": (0, 0),
        "class A(Own):\n": (3, 0),
        "from torch import nn\nclass A(nn.Module):\n    def g(self):\n        self.a, self.b = 1, super().f0()\n": (
            1,
            2,
        ),
    }
    for text, sizes in texts.items():
        tree = ast.parse(text + methods)
        assert sizes_of_class(tree.body[-1], "A" in classes_of_frameworks([tree])) == sizes


def test_folders_of_tests_and_benchmarks_have_rooms():
    """Tests lie by the folders of the pack that they are about, below the folder that says what they need."""
    modules: dict[Path, int] = defaultdict(int)
    for file in (file for top in ("tests", "benchmarks") for file in (ROOT / top).rglob("*.py")):
        modules[file.parent] += file.name not in ("__init__.py", "conftest.py")
    assert len(modules) > 40
    full = [f"{folder.relative_to(ROOT)}: {n} modules" for folder, n in modules.items() if n > MOST_MODULES]
    assert not full, "\n".join(full)


def test_coroutines_of_tests_are_awaited_by_one_helper():
    """A browser test leaves a loop running on its worker's thread, on which `asyncio.run` fails from then on."""
    folders = (ROOT / "tests" / part for part in ("unit", "comfy", "browser"))
    files = [file for folder in folders for file in folder.rglob("*.py")]
    runs = re.compile(r"asyncio\.run\(|run_until_complete\(|asyncio\.Runner\(")
    wrong = [file.name for file in files if runs.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 300 and not wrong, f"{wrong}: use tiny.nodes.prompt.awaited"


def test_a_public_class_name_stands_once():
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(file))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, twice


def test_private_names_stay_in_their_folder():
    wrong = [
        f"{file.relative_to(ROOT)} imports {imported.name} of {imported.module}"
        for file in FILES
        for imported in imports_of(file)
        if imported.is_own and imported.name.startswith("_") and folder_of(imported.module) != folder_of(name_of(file))
    ]
    assert not wrong, "\n".join(wrong)


# Rule 5


def family_names() -> set[str]:
    """Titles and folder names of the families, and the names of the classes in their folders."""
    names = set(families())
    for folder in families().values():
        for file in folder.rglob("*.py"):
            for node in ast.walk(tree_of(file)):
                if isinstance(node, ast.ClassDef):
                    names.add(node.name)
                    names |= {
                        statement.value.value
                        for statement in node.body
                        if isinstance(statement, ast.Assign | ast.AnnAssign)
                        and "title" in ast.unparse(statement).partition("=")[0]
                        and isinstance(statement.value, ast.Constant)
                    }
    return names


def conditions(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Compare | ast.BoolOp | ast.Match):
            yield node if isinstance(node, ast.expr) else node.subject
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield node


def table_names(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts of tuples, lists and sets, and keys of dicts, one level deep; words by which users search don't count."""
    words = {
        id(word)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "search_aliases"
        for word in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else getattr(node, "keys", ())
        for value in values:
            for constant in value.elts if isinstance(value, ast.Tuple | ast.List) else (value,):
                if isinstance(constant, ast.Constant) and id(constant) not in words:
                    yield constant


def adapter_names() -> set[str]:
    """Algorithms and initialisations of the adapters, as their classes have them."""
    return {
        statement.value.value
        for file in (ROOT / "models" / "adapters").glob("*.py")
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and ast.unparse(statement).partition(" ")[0].rstrip(":") in ("algorithm", "init")
        and isinstance(statement.value, ast.Constant)
        and statement.value.value
    }


def adapters_asked_for(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines with the name of an adapter in a condition or a table; a table may say lora, as all files are called."""
    for condition in conditions(tree):
        yield from (
            (node.lineno, node.value)
            for node in ast.walk(condition)
            if isinstance(node, ast.Constant) and node.value in names
        )
    yield from ((node.lineno, node.value) for node in table_names(tree) if node.value in names - {"lora"})


def test_only_an_adapter_knows_which_adapter_a_network_has():
    names = adapter_names()
    assert {"lora", "loha", "lokr", "dora", "oft", "pissa"} <= names
    wrong = [
        f"{file.relative_to(ROOT)}:{line} asks for {name!r}"
        for file in FILES
        if not file.is_relative_to(ROOT / "models" / "adapters")
        for line, name in adapters_asked_for(tree_of(file), names)
    ]
    assert not wrong, "\n".join(wrong)
    for text in ("x = a == 'lora'", "if a in ('oft',): pass", "T = {'dora': 1}", "T = (('dora', 1),)"):
        assert list(adapters_asked_for(ast.parse(text), names)), text


def test_only_a_family_knows_which_family_a_model_is():
    names = family_names()
    assert {"flux", "Flux", "FLUX.1", "Wan", "QwenImage", "Qwen-Image"} <= names
    wrong = []
    for file in FILES:
        inside = any(file.is_relative_to(folder) for folder in families().values())
        if inside or file == ROOT / "models" / "catalogue" / "registry.py":
            continue
        for condition in conditions(tree_of(file)):
            for node in ast.walk(condition):
                literal = (
                    node.value if isinstance(node, ast.Constant) else getattr(node, "id", getattr(node, "attr", ""))
                )
                if (isinstance(literal, str) and literal in names) or (
                    isinstance(node, ast.Attribute) and literal == "title"
                ):
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} asks for {literal!r}")
        for node in table_names(tree_of(file)):
            if node.value in names:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} has {node.value!r} in a table")
        for imported in imports_of(file):
            if imported.is_own and any(f"{imported.module}.".startswith(f"models.{family}.") for family in families()):
                wrong.append(f"{file.relative_to(ROOT)} imports {imported.module}, which is a family's own")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = [
        f"{file.relative_to(ROOT)}: {doc.splitlines()[0]}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (doc := ast.get_docstring(node)) and doc.split()[0] in {"What", "Whether", "How", "Which", "Where"}
    ]
    assert not wrong, "\n".join(wrong)


# Beside what `eval` and `exec` are: a code object, and what runs a statement of a text in another way.
RUNNING_TEXT = {"eval", "exec", "compile", "__import__"}
RUNNING_MODULES = {"code", "codeop", "runpy"}


def run_as_code(tree: ast.Module) -> set[str]:
    """The lines that run a text, or take hold of a function that does: under another name it could be called anywhere.

    A parameter may be called `compile`; a call of that name runs a text.
    """
    calls = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNING_TEXT:
            calls.add(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in RUNNING_TEXT - {"compile"}:
            calls.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in RUNNING_TEXT:
            if isinstance(node.value, ast.Name) and node.value.id in ("builtins", "__builtins__"):
                calls.add(ast.unparse(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            calls |= RUNNING_MODULES & {name for name in names if not getattr(node, "level", 0)}
            if "builtins" in names:
                calls |= {alias.name for alias in node.names} & RUNNING_TEXT
    return calls


def test_texts_are_not_run_as_code():
    """The registry of nodes forbids it: a workflow, a model and a LoRA come from strangers."""
    files = [*FILES, ROOT / "__init__.py"]
    assert {name_of(file): lines for file in files if (lines := run_as_code(tree_of(file)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "x = eval('1')",
        "run = exec",
        "builtins.eval(text)",
        "from builtins import exec as run",
        "code = compile(text, '', 'exec')",
        "def f(text):\n    return list(map(eval, text))",
        "__import__(name)",
        "import code",
    ],
)
def test_every_way_to_run_a_text_is_found(text):
    assert run_as_code(ast.parse(text))


def test_functions_that_only_share_a_name_are_allowed():
    snippets = ["re.compile('a')", "torch.compile(f)", "model.eval()", "def f(compile):\n    return compile == 'auto'"]
    assert not run_as_code(ast.parse("\n".join(snippets)))
