"""What is installed is what is in the tree, under one name, and the arrows between the folders run one way."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fp4dse
from tests.each import each

ROOT = Path(__file__).parent.parent
TOP = ("__init__.py", "__main__.py", "cli.py")
ROOMS = ("dse", "kernels", "tasks", "sweeps", "results", "commands")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> dict[str, Path]:
    """Import name -> folder of everything that has modules, `fp4dse` itself included."""
    folders = [file.parent for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    names = {".".join(("fp4dse", *folder.relative_to(ROOT).parts)): folder for folder in folders}
    return {"fp4dse": ROOT, **names}


def modules() -> list[Path]:
    return [*(ROOT / name for name in TOP), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]


@cache
def parsed(source: str) -> ast.Module:
    """Several tests ask for the same modules, and parsing all of them takes seconds."""
    return ast.parse(source)


@pytest.fixture(autouse=True, scope="module")
def parsed_no_more():
    """The trees of a few hundred modules are much to keep for the rest of the session."""
    yield
    parsed.cache_clear()


def test_the_tests_see_this_tree():
    assert Path(fp4dse.__file__).resolve().parent == ROOT
    assert fp4dse.__version__ == importlib.metadata.version("fp4dse")


def test_every_folder_with_modules_is_a_listed_package():
    on_disk = packages_on_disk()
    assert set(SETUP["packages"]) == set(on_disk)
    assert {name: (ROOT / folder).resolve() for name, folder in SETUP["package-dir"].items()} == on_disk
    assert all((folder / "__init__.py").exists() for folder in on_disk.values())


def test_the_package_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "fp4dse", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == importlib.metadata.version("fp4dse")


def test_the_top_of_the_tree_holds_no_module_but_the_cli():
    """All that lies there is shipped as `fp4dse.<name>`."""
    assert {file.name for file in ROOT.glob("*.py")} == set(TOP)


# --- imports -----------------------------------------------------------------------------------------------------

MAY_IMPORT = {
    "dse": set(),
    "kernels": {"dse"},
    "tasks": {"dse", "kernels"},
    "results": {"dse"},
    "sweeps": {"dse", "tasks", "results"},
    "commands": set(ROOMS),
    "cli": {"dse", "commands"},
    "__main__": {"cli"},
    "__init__": set(),
}
NO_TORCH = ("dse", "results")


def imports_of(file: Path) -> set[str]:
    """Dotted names that a module imports, wherever in it; `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(parsed(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@each("file", modules())
def test_imports_run_one_way(file):
    room = file.relative_to(ROOT).parts[0].removesuffix(".py")
    imports = imports_of(file)
    rooms = {name.split(".")[1] for name in imports if name.startswith("fp4dse.")}
    assert rooms - {room} <= MAY_IMPORT[room]
    assert not {name.split(".")[0] for name in imports} & {*ROOMS, "cli"}, "rooms are imported as fp4dse.<room>"
    if room in NO_TORCH:
        assert not {name for name in imports if name.split(".")[0] == "torch"}


Functions = tuple[ast.FunctionDef, ...]

IMPORTERS = ("import_module", "__import__", "exec_module", "load_module", "run_module", "run_path")
"""Functions that import what an argument names."""


class ByName(NamedTuple):
    """An import of a module by its name, which no import statement shows."""

    targets: str
    """Pattern of the modules of the tree that it may import."""
    reason: str
    plugged_in: bool = False
    """They know who imports them: a circle that is meant."""


BY_NAME = {
    ("fp4dse.dse.program.lazy", "f'{package}.{home[name]}'"): ByName(
        "", "public names that a package imports late: `Tree.late` has their edges, from that package"
    ),
    ("fp4dse.kernels.dispatch", "self._triton"): ByName(
        r"fp4dse\.kernels\.ops\.\w+\.triton", "without triton, or without a GPU, there are none", plugged_in=True
    ),
    ("fp4dse.kernels.dispatch", "_NATIVE"): ByName(
        r"fp4dse\.kernels\.native", "an implementation knows its definition, not the other way round", plugged_in=True
    ),
    ("fp4dse.kernels.dispatch", "'fp4dse.kernels.ops'"): ByName(
        r"fp4dse\.kernels\.ops", "`fp4dse doctor` lists what no other module has imported", plugged_in=True
    ),
    ("fp4dse.kernels.dispatch", "f'{package.__name__}.{module.name}'"): ByName(
        r"fp4dse\.kernels\.ops\.\w+", "`fp4dse doctor` lists what no other module has imported", plugged_in=True
    ),
    ("fp4dse.sweeps.executors", "f'{__name__}.{module}'"): ByName(
        r"fp4dse\.sweeps\.executors\.\w+", "the package of an executor may be missing"
    ),
    ("fp4dse.tasks.own.loading", ""): ByName("", "a file of the user's, with a task"),
}
"""(module, what it imports as written there) of all imports by name, apart from constant names of other packages."""


class Tree:
    """The modules below a root by dotted name, and what each imports, but for what types alone need."""

    def __init__(self, root: Path) -> None:
        files = [*(root / name for name in TOP), *(file for room in ROOMS for file in (root / room).rglob("*.py"))]
        dotted = {".".join(("fp4dse", *file.relative_to(root).with_suffix("").parts)): file for file in files}
        self.trees = {name.removesuffix(".__init__"): parsed(file.read_text()) for name, file in dotted.items()}
        self.imports = {name: list(self._imports(tree)) for name, tree in self.trees.items()}

    def _imports(self, node: ast.AST, functions: Functions = ()) -> Iterator[tuple[str, Functions]]:
        """(module of the tree or name of another package, the functions around the import)."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    ours = alias.name.startswith("fp4dse.")
                    yield alias.name if ours else alias.name.split(".")[0], functions
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield self.home(child.module or "", alias.name), functions
            elif is_for_types(child):
                yield from self._imports(ast.Module(child.orelse, []), functions)
            else:
                inner = (*functions, child) if isinstance(child, ast.FunctionDef) else functions
                yield from self._imports(child, inner)

    def home(self, module: str, name: str) -> str:
        """The module behind `from module import name`; a package says under TYPE_CHECKING where its late names are."""
        if not module.startswith("fp4dse"):
            return module.split(".")[0]
        if f"{module}.{name}" in self.trees:
            return f"{module}.{name}"
        for node in filter(is_for_types, self.trees[module].body if module in self.trees else ()):
            for found in node.body:
                if isinstance(found, ast.ImportFrom) and name in {alias.name for alias in found.names}:
                    return self.home(found.module or "", name)
        return module

    def graph(self) -> dict[str, set[str]]:
        """Module -> the modules that it imports, within functions, too, and the packages that these lie in, which run
        before them. A package that the module itself lies in does not count: it is there before."""
        return {
            name: {
                home
                for other, _ in imports
                if other in self.trees
                for home in {other, *parents(other)} & self.trees.keys()
                if home != name and not name.startswith(f"{home}.")
            }
            for name, imports in self.imports.items()
        }

    def by_name(self) -> dict[tuple[str, str], bool]:
        """Imports by name, written as in BY_NAME -> whether all of them stand in functions."""
        found: dict[tuple[str, str], bool] = {}
        for name, tree in self.trees.items():
            nodes = list(ast.walk(tree))
            names = {getattr(node, "id", getattr(node, "attr", getattr(node, "name", None))) for node in nodes}
            if names.isdisjoint(IMPORTERS):
                continue
            within = {node for function in nodes if is_function(function) for node in ast.walk(function)}
            called = {node.func: node for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                if isinstance(node, ast.alias) and node.name in IMPORTERS and node.asname:
                    found[name, f"as {node.asname}"] = False
                elif getattr(node, "id", getattr(node, "attr", None)) in IMPORTERS:
                    of = called[node].args[0] if node in called else None
                    constant = of.value if isinstance(of, ast.Constant) else "fp4dse"
                    if str(constant).split(".")[0] == "fp4dse":
                        key = name, ast.unparse(of) if of else ""
                        found[key] = found.get(key, True) and node in within
        return found

    def late(self) -> dict[str, set[str]]:
        """Package -> its modules that `lazy` imports when one of their names is asked for."""
        found: dict[str, set[str]] = {}
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "lazy":
                    named = [keyword.arg for keyword in node.keywords if keyword.arg]
                    unpacked = [k.value.keys for k in node.keywords if isinstance(k.value, ast.Dict)]
                    named += [ast.literal_eval(key) for keys in unpacked for key in keys if key]
                    found[name] = {f"{name}.{module}" for module in named}
        return found

    def whole_graph(self, plugged_in: bool) -> dict[str, set[str]]:
        """`graph` and the imports by name in it; those of implementations that are `plugged_in` if that is asked."""
        late = self.late()
        graph = {name: others | late.get(name, set()) for name, others in self.graph().items()}
        for (name, _), edge in BY_NAME.items():
            if name in graph and (plugged_in or not edge.plugged_in):
                graph[name] |= {other for other in graph if re.fullmatch(edge.targets, other)} - {name}
        return graph

    def brings(self) -> dict[str, set[str]]:
        """Module -> the heavy packages that are loaded with it."""
        direct = {name: {other for other, functions in of if not functions} for name, of in self.imports.items()}
        loaded = {name: {other for other in of if other in direct} | parents(name) for name, of in direct.items()}
        brought = {name: {other for other in of if is_heavy(other)} for name, of in direct.items()}
        for _ in direct:  # at most so many steps from one end to the other
            before = sum(map(len, brought.values()))
            for name, others in loaded.items():
                brought[name].update(*(brought[other] for other in others if other in brought))
            if sum(map(len, brought.values())) == before:
                break
        return brought


def parents(name: str) -> set[str]:
    """The packages that a module lies in."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts))}


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, whose body no program runs; what stands behind `else` or `not` is run."""
    return isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


LIGHT = ("msgspec", "rich", "typer")
"""What every command loads."""


def is_heavy(package: str) -> bool:
    return not package.startswith("fp4dse") and package not in {*sys.stdlib_module_names, *LIGHT}


def is_command(module: str, function: ast.FunctionDef) -> bool:
    """Of `fp4dse`, or what the tab key runs instead of one."""
    if module == "fp4dse.commands.completing":
        return True
    decorators = [node.func for node in function.decorator_list if isinstance(node, ast.Call)]
    return any(ast.unparse(decorator).endswith("command") for decorator in decorators)


@pytest.fixture(scope="module")
def our_tree() -> Tree:
    return Tree(ROOT)


def test_no_module_imports_itself_by_way_of_others(our_tree):
    """Imports within functions and by name counted: they put a cost off, and untie nothing. One knot is meant: the
    registry of operations imports implementations, which know their definitions, which ask the registry."""
    graphlib.TopologicalSorter(our_tree.whole_graph(plugged_in=False)).prepare()
    with pytest.raises(graphlib.CycleError) as error:
        graphlib.TopologicalSorter(our_tree.whole_graph(plugged_in=True)).prepare()
    assert "fp4dse.kernels.dispatch" in error.value.args[1]
    assert {name for (name, _), edge in BY_NAME.items() if edge.plugged_in} == {"fp4dse.kernels.dispatch"}


def test_every_import_by_name_is_listed_and_finds_modules(our_tree):
    assert our_tree.by_name() == dict.fromkeys(BY_NAME, True), "each in a function, and each in the list"
    for edge in filter(lambda edge: edge.targets, BY_NAME.values()):
        assert any(re.fullmatch(edge.targets, name) for name in our_tree.trees), edge
    late = our_tree.late()
    assert late.keys() == {"fp4dse.results", "fp4dse.tasks"}
    assert not set().union(*late.values()) - our_tree.trees.keys()


def made(root: Path, files: dict[str, str]) -> Tree:
    for name, text in {**dict.fromkeys(TOP, ""), **files}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return Tree(root)


def test_a_circle_that_somebody_ties_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "from fp4dse.dse.b import two\none = 1\n",
            "dse/b.py": "from fp4dse.kernels import c\ntwo = 2\n",
            "kernels/c.py": "def three():\n    from fp4dse.dse.a import one\n",
        },
    )
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


@pytest.mark.parametrize(
    "back",
    [
        "import fp4dse.dse.a as a",
        "if TYPE_CHECKING:\n    import json\nelse:\n    from fp4dse.dse.a import one",
        "if not TYPE_CHECKING:\n    from fp4dse.dse import a",
    ],
)
def test_a_circle_is_found_however_its_import_is_written(tmp_path, back):
    tree = made(tmp_path, {"dse/a.py": "from fp4dse.dse.b import two\none = 1\n", "dse/b.py": f"{back}\ntwo = 2\n"})
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


def test_a_circle_by_way_of_a_package_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "def one():\n    from fp4dse.kernels.b import two\n",
            "kernels/__init__.py": "from fp4dse.dse.a import one\n",
            "kernels/b.py": "two = 2\n",
        },
    )
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(tree.graph()).prepare()


def test_an_import_by_name_that_nobody_listed_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "dse/a.py": "import importlib\ndef one(name):\n    return importlib.import_module(f'fp4dse.{name}')\n",
            "dse/b.py": "from importlib import import_module as other\n",
            "dse/c.py": "two = import_module('fp4dse.dse.a')\n",
            "dse/d.py": "def three():\n    return import_module('torchao.mx'), __import__('fp4dse.dse.c')\n",
            "tasks/__init__.py": "__getattr__ = lazy(__name__, e=('four',), **{'f.g': ('five',)})\n",
            "tasks/e.py": "from fp4dse.dse import a\n",
        },
    )
    assert tree.by_name() == {
        ("fp4dse.dse.a", "f'fp4dse.{name}'"): True,
        ("fp4dse.dse.b", "as other"): False,
        ("fp4dse.dse.c", "'fp4dse.dse.a'"): False,
        ("fp4dse.dse.d", "'fp4dse.dse.c'"): True,
    }
    assert tree.late() == {"fp4dse.tasks": {"fp4dse.tasks.e", "fp4dse.tasks.f.g"}}
    assert tree.whole_graph(plugged_in=True)["fp4dse.tasks"] == {"fp4dse.tasks.e", "fp4dse.tasks.f.g"}


def vain(tree: Tree) -> list[str]:
    """Imports within functions that put nothing off: neither in a command, nor of what brings a heavy package that
    the module does not bring itself."""
    brings = tree.brings()
    return [
        f"{name}: {functions[-1].name} imports {other}"
        for name, imports in tree.imports.items()
        for other, functions in imports
        if functions and not is_command(name, functions[0])
        if not (({other} if is_heavy(other) else brings.get(other, set())) - brings[name])
    ]


def test_an_import_within_a_function_puts_a_heavy_package_off(our_tree):
    assert vain(our_tree) == []


def test_an_import_within_a_function_that_puts_nothing_off_is_found(tmp_path):
    tree = made(
        tmp_path,
        {
            "tasks/__init__.py": "if TYPE_CHECKING:\n    from fp4dse.tasks.engine import train\n",
            "tasks/engine.py": "import torch\ndef again():\n    import torch\n",
            "tasks/light.py": "import json\n",
            "tasks/driver.py": "def one():\n    from fp4dse.tasks import train, light\n    import torch, json\n",
            "sweeps/user.py": "from fp4dse.tasks import train\ndef two():\n    from fp4dse.tasks import engine\n",
            "commands/all.py": "@app.command()\ndef three():\n    from fp4dse.tasks import light\n",
        },
    )
    assert sorted(vain(tree)) == [
        "fp4dse.sweeps.user: two imports fp4dse.tasks.engine",
        "fp4dse.tasks.driver: one imports fp4dse.tasks.light",
        "fp4dse.tasks.driver: one imports json",
        "fp4dse.tasks.engine: again imports torch",
    ]


DRIVER_ONLY = ("optuna", "duckdb", "plotly", "ray", "pandas", "pyarrow")

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ImportError("a worker must not import " + name)
sys.meta_path.insert(0, Refuse())
import {wanted}
"""


def import_without(wanted: str, refused: tuple[str, ...]) -> subprocess.CompletedProcess:
    code = REFUSE.format(refused=set(refused), wanted=wanted)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_a_worker_imports_without_the_packages_of_the_driver():
    modules = ", ".join(
        ".".join(("fp4dse", *file.relative_to(ROOT).with_suffix("").parts))
        for room in ("dse", "kernels", "tasks")
        for file in (ROOT / room).rglob("*.py")
        if file.name != "__init__.py"
    )
    done = import_without(modules, DRIVER_ONLY)
    assert done.returncode == 0, done.stderr


def test_the_design_space_imports_without_torch():
    done = import_without("fp4dse.dse", ("torch", "numpy", *DRIVER_ONLY))
    assert done.returncode == 0, done.stderr


def test_a_driver_and_the_commands_that_read_import_without_torch():
    modules = (
        "fp4dse.cli, fp4dse.sweeps.sweep, fp4dse.sweeps.searching.search, fp4dse.sweeps.state, "
        "fp4dse.results.store.query"
    )
    done = import_without(modules, ("torch", "scipy", "optuna", "duckdb", "plotly", "ray"))
    assert done.returncode == 0, done.stderr


def test_the_refusal_refuses():
    assert "must not import pandas" in import_without("pandas", DRIVER_ONLY).stderr


# --- parameters --------------------------------------------------------------------------------------------------

MOST_PARAMETERS = 10
_OPERATOR = "a custom operator: torch hands it tensors and numbers one by one, its one wrapper takes a record"
_HELPER = "of a kernel: what Triton hands on are numbers and tiles, which it knows no records of"
WITH_MORE = {
    "sweeps/sweep.py:run_sweep": "a public entry point: its arguments are the documented ones",
    "sweeps/searching/search.py:run_search": "a public entry point: its arguments, and `run_sweep`'s",
    "commands/sweep.py:sweep": "a command: each parameter is an option of it",
    "commands/search.py:search": "a command: each parameter is an option of it",
    "commands/sweep.py:confirm": "a command: each parameter is an option of it",
    "commands/layers.py:sensitivity": "a command: each parameter is an option of it",
    "commands/diagnosis.py:diagnose": "a command: each parameter is an option of it",
    "commands/weights.py:fit": "a command: each parameter is an option of it",
    "kernels/quant/triton/operators.py:_operand": _OPERATOR,
    "kernels/quant/triton/operators.py:_fp8": _OPERATOR,
    "kernels/quant/triton/operators.py:_packed": _OPERATOR,
    "kernels/quant/triton/operators.py:_both": _OPERATOR,
    "kernels/quant/triton/operators.py:_through": _OPERATOR,
    "kernels/quant/triton/by_scales.py:_elements": _OPERATOR,
    "kernels/ops/attention/kernels.py:_maxima_and_sums": _HELPER,
    "kernels/ops/attention/kernels.py:_outputs": _HELPER,
    "kernels/ops/attention/kernels.py:_toward_keys": _HELPER,
    "kernels/ops/attention/kernels.py:_toward_queries": _HELPER,
    "kernels/ops/fp8/wide.py:_exact": _HELPER,
    "kernels/ops/products/triton.py:finish_tile": _HELPER,
    "kernels/quant/triton/blocks.py:_encoded": _HELPER,
    "kernels/quant/triton/programs.py:_operand": _HELPER,
    "kernels/quant/triton/eights.py:put_blocks": _HELPER,
    "kernels/quant/triton/eights.py:put_fp8": _HELPER,
    "kernels/quant/triton/tiles.py:write": _HELPER,
}
"""Functions with more, each with its reason. Triton kernels have as many as they need, with one launcher."""


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, word: str) -> bool:
    return any(word in ast.unparse(decorator) for decorator in node.decorator_list)


def with_more_parameters(files: dict[str, str]) -> set[str]:
    """`file:function` of those with more than MOST_PARAMETERS, apart from kernels. files: name -> source.

    `*` and `**` are a parameter each; of a custom operator `*` is a whole record. A kernel is a function for Triton
    that one place launches: `name[grid](…)`.
    """
    trees = {name: parsed(source) for name, source in files.items()}
    launches: dict[str, list[ast.Call]] = {}
    for name, tree in trees.items():
        home = {
            alias.asname
            or alias.name: f"{(node.module or '').removeprefix('fp4dse.').replace('.', '/')}.py:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                of = ast.unparse(node.func.value)
                launches.setdefault(home.get(of, f"{name}:{of}"), []).append(node)
    found = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            of = node.args
            number = len([*of.posonlyargs, *of.args, *of.kwonlyargs]) + (of.vararg is not None) + (of.kwarg is not None)
            if of.vararg and decorated(node, "custom_op"):
                number += MOST_PARAMETERS
            is_kernel = decorated(node, "jit") and len(launches.get(f"{name}:{node.name}", [])) == 1
            if number > MOST_PARAMETERS and not is_kernel:
                found.add(f"{name}:{node.name}")
    return found


def test_no_function_has_more_than_ten_parameters_but_for_those_listed():
    found = with_more_parameters({str(file.relative_to(ROOT)): file.read_text() for file in modules()})
    assert found == WITH_MORE.keys(), "put what goes together into a record (kernels/quant/call.py is one)"


def test_a_function_with_eleven_parameters_is_found():
    of = ", ".join(f"p{n}" for n in range(9))
    source = f"def ten({of}, *, a): ...\nclass C:\n    async def more({of}, /, a, *, b): ...\n"
    stars = f"def nine({of}, *more): ...\ndef stars({of}, *more, **others): ...\n"
    operator = "@torch.library.custom_op('a::b')\ndef operator(x, *of_call): ...\n"
    assert with_more_parameters({"a.py": source + stars + operator}) == {"a.py:more", "a.py:stars", "a.py:operator"}


def test_a_kernel_that_nothing_launches_or_two_functions_do_counts_its_parameters():
    of = ", ".join(f"p{n}" for n in range(11))
    kernels = "".join(f"@triton.jit(debug=True)\ndef {name}({of}): ...\n" for name in ("helper", "one", "two"))
    launcher = "from fp4dse.ops.a import one as it, two\nit[grid](*of)\ntwo[grid](1)\ntwo[grid](2)\nhelper(1)\n"
    assert with_more_parameters({"ops/a.py": kernels, "b.py": launcher}) == {"ops/a.py:helper", "ops/a.py:two"}


def without_types(source: str) -> set[str]:
    """Functions that say no type of a parameter or of their result, but for Triton's."""
    return {
        node.name
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef) and not decorated(node, "jit")
        for of in [node.args]
        for all_ in [[*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]]
        if node.returns is None or any(a.annotation is None and a.arg not in ("self", "cls") for a in all_)
    }


@each("file", sorted({*ROOT.glob("kernels/ops/**/*.py"), *ROOT.glob("kernels/quant/triton/*.py")}))
def test_of_modules_that_mypy_is_lenient_with_only_tritons_functions_have_no_types(file):
    assert not without_types(file.read_text())


def test_a_function_without_types_is_found():
    typed = "class C:\n    def whole(self, x: int, *_: int) -> int: ...\n"
    kernel = "@triton.jit\ndef kernel(x): ...\n"
    assert without_types(f"{typed}{kernel}def one(x) -> int: ...\ndef two(**x): ...\n") == {"one", "two"}


# --- code that nothing needs ---------------------------------------------------------------------------------------


UNCALLED = {
    "kernels/quant/descriptor.py: BOUNDS": "the width of a column that a test reads",
    "kernels/quant/counters.py: SQUARED_ERRORS": "the names of sums, which `count` writes out",
    "results/stats/agreement.py: agreement_with_fewer_seeds": "docs/study/tables.py makes the study's page of it",
}
"""What no code of the package needs, each with the reason why it stays."""


def words_of(tree: ast.AST) -> Iterator[str]:
    """Names that are read, imported or spelled in short texts, which is how lazy names and Triton's launchers are asked
    for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            yield from re.findall(r"\w+", node.value)


def uncalled(sources: dict[str, str]) -> set[str]:
    """Functions, classes and constants of modules that are named nowhere but where they are defined; commands are
    called by their users."""
    trees = {name: parsed(source) for name, source in sources.items()}
    counts = Counter(word for tree in trees.values() for word in words_of(tree))
    found = set()
    for file, tree in trees.items():
        for node in tree.body:
            own: Counter[str] = Counter()
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    names = [] if any("command" in ast.unparse(of) for of in node.decorator_list) else [node.name]
                    own = Counter(words_of(node))
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    names = [name]
                case _:
                    names = []
            found |= {f"{file}: {n}" for n in names if counts[n] <= own[n] and n != "_" and not n.startswith("__")}
    return found


def test_all_code_is_needed_by_other_code():
    assert uncalled({str(file.relative_to(ROOT)): file.read_text() for file in modules()}) == UNCALLED.keys()


def test_code_that_nothing_needs_is_found():
    used = {"a.py": "def f(): ...\nN = 3\nclass C: ...\n", "b.py": "from a import f\nf(N, 'C')\n"}
    assert not uncalled(used)
    assert uncalled({"a.py": "def f(): f()\nX: int = 3\nclass C:\n    def g(self): return C()\n"}) == {
        "a.py: f",
        "a.py: X",
        "a.py: C",
    }


# --- docstrings ---------------------------------------------------------------------------------------------------


def questions(source: str) -> list[str]:
    """Docstrings that begin with What, Whether, How or Which: of functions, classes, modules, and below constants."""
    texts = (
        node.value.value
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return [text for text in texts if re.match(r"\s*(What|Whether|How|Which)\b", text)]


def test_a_docstring_begins_with_what_a_thing_is_or_does():
    found = {str(file.relative_to(ROOT)): questions(file.read_text()) for file in modules()}
    assert not {name: texts for name, texts in found.items() if texts}


def test_a_docstring_that_begins_with_a_question_is_found():
    source = 'def f():\n    """Which of them."""\nX = 1\n"""What it is."""\nY = "What"\n"""Whatever."""\n'
    assert sorted(questions(source)) == ["What it is.", "Which of them."]


# --- wheel -------------------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; with the end of standard error in the failure if the command fails."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def tracked_files() -> list[Path]:
    """Files that git would have in a clone made now, relative to the root."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the source distribution of a clean copy of the tree."""
    copy = tmp_path_factory.mktemp("clone")
    for file in tracked_files():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes((ROOT / file).read_bytes())
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-W", "error", "-c", build, dist, cwd=copy)
    sdist = next(dist.glob("*.tar.gz"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", dist, sdist, cwd=dist)
    return next(dist.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_of_the_tree_and_nothing_else(wheel):
    rooms = [file for file in tracked_files() if file.parts[0] in ROOMS]
    expected = {Path("fp4dse", file) for file in [*rooms, *map(Path, TOP), Path("py.typed")]}
    shipped = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {file for file in shipped if not file.parts[0].endswith(".dist-info")} == expected


@pytest.mark.slow
def test_the_wheel_works_from_anywhere_beside_a_package_named_kernels(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("origin = 'another project'\n")
    # torch and the rest come from this environment, but not fp4dse: a .pth line adds no finder of editable packages
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps")
    run(*pip, "--no-index", "--ignore-installed", wheel, cwd=tmp_path)

    where = (
        "import kernels, fp4dse, fp4dse.kernels; print(kernels.origin, fp4dse.__file__, fp4dse.__version__, sep='|')"
    )
    origin, file, version = run(python, "-c", where, cwd=tmp_path).strip().split("|")
    assert origin == "another project"
    assert Path(file) == site / "fp4dse" / "__init__.py"
    assert version == importlib.metadata.version("fp4dse")

    script = tmp_path / "venv" / "bin" / "fp4dse"
    assert "sweep" in run(script, "--help", cwd=tmp_path)
    recipes = run(script, "recipe", "list", cwd=tmp_path)
    assert all(file.stem in recipes for file in (ROOT / "dse" / "recipes").glob("*.toml"))
