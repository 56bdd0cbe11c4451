"""Rules of the house that no linter has: few parameters, types, no code that nothing needs, docstrings that say."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.each import each
from tests.house.modules import ROOT, modules, parsed, scripts

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
    "kernels/quant/triton/operators.py:_both_fp8": _OPERATOR,
    "kernels/quant/triton/operators.py:_through": _OPERATOR,
    "kernels/quant/triton/by_scales.py:_elements": _OPERATOR,
    "kernels/quant/triton/by_scales.py:_scales": _OPERATOR,
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


UNCALLED = {
    "kernels/quant/descriptor.py: BOUNDS": "the width of a column that a test reads",
    "kernels/quant/counters.py: SQUARED_ERRORS": "the names of sums, which `count` writes out",
    "results/stats/sizes/agreement.py: agreement_with_fewer_seeds": "docs/study/sizes.py makes the study's page of it",
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


def docstrings(source: str) -> list[str]:
    """Of functions, classes, modules, and below constants."""
    return [
        node.value.value
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def questions(source: str) -> list[str]:
    """Docstrings that begin with What, Whether, How or Which."""
    return [text for text in docstrings(source) if re.match(r"\s*(What|Whether|How|Which)\b", text)]


def test_a_docstring_begins_with_what_a_thing_is_or_does():
    found = {str(file.relative_to(ROOT)): questions(file.read_text()) for file in (*modules(), *scripts())}
    assert not {name: texts for name, texts in found.items() if texts}


def test_a_docstring_that_begins_with_a_question_is_found():
    source = 'def f():\n    """Which of them."""\nX = 1\n"""What it is."""\nY = "What"\n"""Whatever."""\n'
    assert sorted(questions(source)) == ["What it is.", "Which of them."]


ELSEWHERE = {
    "dse/export/te_quant.py: core/quantization/quant_config.py": "of Megatron-LM",
    "dse/export/te_quant.py: core/extensions/transformer_engine.py": "of Megatron-LM",
    "sweeps/arguments.py: FILE.py": "a user's",
    "tasks/own/loading.py: my_task.py": "a user's",
}
"""Modules that docstrings and comments name and that are not of this tree, each with the reason."""


def named_modules(source: str) -> set[str]:
    """Modules that docstrings and comments name, with the folders they are given with: `NAME.py`, `folder/NAME.py`."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return {name for text in (*docstrings(source), *comments) for name in re.findall(r"[\w/]+\.py\b", text)}


def not_there(sources: dict[str, str], tree: Iterable[str]) -> set[str]:
    """`file: module` of those named that are the end of no path of the tree. sources: name -> source."""
    ends = {path.split("/", n)[n] for path in tree for n in range(path.count("/") + 1)}
    return {f"{file}: {name}" for file, source in sources.items() for name in named_modules(source) if name not in ends}


def test_modules_that_docstrings_and_comments_name_exist():
    tree = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")]
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in (*modules(), *scripts())}
    assert not_there(sources, [*sources, *tree]) == ELSEWHERE.keys()


def test_a_module_that_is_not_there_is_found():
    source = '"""See a.py, in/a.py and x/a.py."""\nN = 1\n"""As gone.py."""\n# of b.py\ns = "c.py"\n'
    assert not_there({"f.py": source}, ["a.py", "far/in/a.py", "far/b.pyi"]) == {
        "f.py: x/a.py",
        "f.py: gone.py",
        "f.py: b.py",
    }
