"""Which module imports which: by statements, by name, and late."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.modules import ROOMS, TOP, parsed

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
