"""What CONTRIBUTING.md says of adding a thing holds: in a copy of the tree one of each kind is added, in the files that
its table names, and all are trained, counted and shown.

Each entry of ADDED is what somebody would write: file -> (a text that stands there once, what follows it). A new file
has None in the place of that text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

Edits = dict[str, list[tuple[str | None, str]]]

ADDED: dict[str, Edits] = {
    "element format": {
        "dse/formats.py": [
            (
                "radix=4),  # the other phase: 4^-3/2 … 4^3/2\n",
                '    "e3m1": FloatFormat(mantissa=1, emin=-2, max=24.0, bits=5),\n',
            )
        ]
    },
    "scale format": {
        "dse/formats.py": [
            (
                "bits=8),  # every code finite\n",
                '    "ue3m3": FloatFormat(mantissa=3, emin=-2, max=30.0, bits=6),\n',
            )
        ],
        "dse/scale.py": [
            (
                '"""4 exponent and 3 mantissa bits, max 448."""\n',
                '\n\nclass UE3M3(FloatScale, frozen=True, tag="ue3m3"):\n    """Max 30."""\n',
            ),
            ("Scale = E8M0 | E6M2 | E4M3", " | UE3M3"),
            ('dict.fromkeys(("e8m0", "e6m2", "bf16", "fp32", "one"), 1.0),\n', '    "ue3m3": 30.0,\n'),
            ('    "e4m3": E4M3(),\n', '    "ue3m3": UE3M3(),\n'),
        ],
    },
    "rounding": {
        "dse/rounding.py": [
            (
                "import Part, name_in\n",
                '\n\nclass Down(Part, frozen=True, tag_field="mode", tag="down"):\n    """Towards zero."""\n',
            ),
            ("Rounding = Nearest", " | Down"),
            ('    "nearest": Nearest(),\n', '    "down": Down(),\n'),
            ('ROUNDING_WORDS = {"nearest": ""', ', "down": "down"'),
        ],
        "kernels/quant/descriptor.py": [
            (
                '"ties go away from zero", known=FLAG),\n',
                '    "down": Column("ties", 0, "elements are rounded towards zero"),\n',
            ),
            ('lambda rounding: {"half_away": TIES[rounding.ties]},\n', '    Down: lambda _: {"down": 1},\n'),
            ("from fp4dse.dse.rounding import ", "Down, "),
        ],
        "kernels/quant/spec/grid.py": [
            (
                "torch.where(by_threshold, round_up_from(t, threshold), nearest)",
                '.where(column["down"] == 0, torch.floor(t))',
            )
        ],
    },
    "rotation": {
        "dse/stages.py": [
            ('signs: Literal["random"', ', "halves"'),
            ('_ROTATION_WORDS = {"random": "rht"', ', "halves": "halves"'),
        ],
        "kernels/ops/rotation/__init__.py": [
            (
                '    "fixed": lambda size, device, _: fixed_signs(size, device),\n',
                '    "halves": lambda size, *_: 1 - 2.0 * (torch.arange(size)[None] < size // 2),\n',
            )
        ],
    },
    "operation with kernels": {
        "kernels/ops/doubled/__init__.py": [
            (
                None,
                '"""2 x."""\n\nfrom fp4dse.kernels.dispatch import Operation\n\n_DOUBLED = Operation(__name__)\n\n\n'
                "def doubled(x):\n"
                "    if kernels := _DOUBLED.kernels(x):\n"
                "        return kernels.doubled(x)\n"
                "    return 2 * x\n",
            )
        ],
        "kernels/ops/doubled/triton.py": [
            (
                None,
                "import torch\nimport triton\nimport triton.language as tl\n\n"
                "from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid\n\n\n"
                "@triton.jit\n"
                "def _kernel(x_ptr, y_ptr, n, TILE: tl.constexpr):\n"
                "    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)\n"
                "    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, at < n, 0.0), at < n)\n\n\n"
                "def doubled(x):\n"
                "    x, y = x.contiguous(), torch.empty_like(x)\n"
                "    _kernel[launch_grid(triton.cdiv(x.numel(), TILE))](x, y, x.numel(), **FLAT)\n"
                "    return y\n",
            )
        ],
        "pyproject.toml": [
            ('    "fp4dse.kernels.ops.columns",\n', '    "fp4dse.kernels.ops.doubled",\n'),
            (
                '"fp4dse.kernels.ops.columns" = "kernels/ops/columns"\n',
                '"fp4dse.kernels.ops.doubled" = "kernels/ops/doubled"\n',
            ),
        ],
    },
    "estimator": {
        "dse/estimator.py": [
            (
                "from fp4dse.dse.scale import E8M0, FP32, Scale\n",
                '\n\nclass Half(Part, frozen=True, tag_field="kind", tag="half"):\n    """One half beyond 1."""\n',
            ),
            ("\nRelaxation = STE", " | Half"),
            ("\nRELAXATION_NAMES: dict[str, Relaxation] = {\n", '    "half": Half(),\n'),
        ],
        "kernels/quant/spec/estimators.py": [
            ("    STE: _ste,\n", "    Half: lambda z, q, spec, element: torch.where(z.abs() > 1, 0.5, 1.0),\n"),
            ("from fp4dse.dse.estimator import DGE, STE, Clipped,", " Half,"),
        ],
        "dse/cost/work.py": [("ESTIMATOR: dict[str, Work] = {\n", '    "half": Work(vector=1),\n')],
    },
    "codec": {
        "dse/quantizer.py": [('scaling: Literal["amax"', ', "second"')],
        "dse/rules/quantizers.py": [
            ("REQUIRES: dict[str, tuple[Requirement, ...]] = {\n", '    "second": (_BLOCKS, _NO_ADAPTION),\n')
        ],
        "dse/cost/work.py": [("SCALING: dict[str, Work] = {\n", '    "second": Work(vector=1),\n')],
        "kernels/quant/spec/codecs/second.py": [
            (
                None,
                '"""Scales from the second largest magnitude of a block: the largest saturates."""\n\n'
                "from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block\n\n\n"
                "def second(b: Blocks) -> Encoded:\n"
                '    """The general codec with that for the block maxima."""\n'
                "    return block(b._replace(amax=b.x.abs().topk(2, dim=2).values[:, :, 1]))\n",
            )
        ],
        "kernels/quant/spec/codecs/__init__.py": [
            (
                "from fp4dse.kernels.quant.spec.codecs.razer import razer\n",
                "from fp4dse.kernels.quant.spec.codecs.second import second\n",
            ),
            ("CODECS: dict[str, Callable[[Blocks], Encoded]] = {\n", '    "second": second,\n'),
        ],
    },
    "optimizer": {
        "dse/optimizer.py": [
            (
                "from fp4dse.dse.record import NotNegative, Part, Positive, name_or_numbers\n",
                '\n\nclass Signs(Part, frozen=True, tag_field="kind", tag="signs"):\n    """The gradient\'s sign."""\n',
            ),
            ("Optimizer = AdamW | SGD", " | Signs"),
            ("OPTIMIZER_NAMES: dict[str, AdamW | SGD | StableSPAM | Muon", " | Signs"),
            ('] = {\n    "adamw": AdamW(),\n', '    "signs": Signs(),\n'),
        ],
        "tasks/optimizers/signs.py": [
            (
                None,
                '"""The gradient\'s sign."""\n\nSTATE = {}\n\n\n'
                "def columns(n):\n    return {}\n\n\ndef row(step, n):\n    return []\n\n\n"
                "def update(g, state, c, numbers, _):\n    return g.sign(), {}\n",
            )
        ],
        "tasks/optimizers/lane_optimizer.py": [
            ("KINDS: dict[type, ModuleType] = {AdamW: adamw", ", Signs: signs"),
            ("from fp4dse.dse.optimizer import SGD, AdamW", ", Signs"),
            ("from fp4dse.tasks.optimizers import adamw", ", signs"),
        ],
    },
    "task": {
        "tasks/twice.py": [
            (
                None,
                '"""The teacher–student regression with labels twice as large."""\n\n'
                "import msgspec\n\nfrom fp4dse.kernels.ops.doubled import doubled\n"
                "from fp4dse.tasks.regression import PRESETS as REGRESSION\n\n\n"
                "def _doubled(seeds):\n"
                '    found = REGRESSION["smoke"].problem(seeds)\n'
                "    labels = doubled(found.train_y), doubled(found.val_y)\n"
                "    return msgspec.structs.replace(found, train_y=labels[0], val_y=labels[1])\n\n\n"
                'PRESETS = {"smoke": msgspec.structs.replace(REGRESSION["smoke"], name="twice", problem=_doubled)}\n',
            )
        ],
        "tasks/catalogue.py": [
            ("from fp4dse.tasks import diffusion, finetune, language, regression", ", twice"),
            ('    "regression": regression.PRESETS,\n', '    "twice": twice.PRESETS,\n'),
        ],
    },
    "executor": {
        "sweeps/executors/again.py": [
            (
                None,
                '"""This machine, by another name."""\n\n'
                "from fp4dse.sweeps.executors.local import open_local as open_again\n\n"
                '__all__ = ["open_again"]\n',
            )
        ],
        "sweeps/executors/__init__.py": [('    "local": "local.open_local",\n', '    "again": "again.open_again",\n')],
        "commands/options.py": [('EXECUTOR_NAMES = ["local"', ', "again"')],
    },
    "statistic": {
        "results/stats/recipes/lucky.py": [
            (
                None,
                '"""The best seed of each recipe."""\n\n\n'
                "def lucky(runs):\n"
                '    """config_id, val_loss."""\n'
                '    return runs.groupby("config_id", observed=True)["val_loss"].min().reset_index()\n',
            )
        ],
        "results/views.py": [
            ("VIEWS: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {\n", '    "lucky": lucky,\n'),
            (
                "from fp4dse.results.stats.techniques.lasso import stability\n",
                "from fp4dse.results.stats.recipes.lucky import lucky\n",
            ),
        ],
    },
    "panel of the report": {
        "results/report/count.py": [
            (
                None,
                '"""How many recipes there are."""\n\nfrom fp4dse.results.report.findings import Findings\n'
                "from fp4dse.results.report.panel import Panel\n\n\n"
                "def count(found: Findings) -> str:\n"
                '    """HTML."""\n'
                '    return f"<p>{len(found.recipes)} recipes were counted.</p>"\n\n\n'
                'PANEL = Panel("count", "Count", "How many", count, ("FROM recipes",))\n',
            )
        ],
        "results/report/__init__.py": [
            ("from fp4dse.results.report import (\n    answer,\n", "    count,\n"),
            ("PANELS = (\n    answer.PANEL,\n", "    count.PANEL,\n"),
        ],
    },
}

SPACE = {
    "name": "added",
    "base": "nvfp4",
    "design": "one-at-a-time",
    "axes": {
        "*.element": ["e2m1", "e3m1"],
        "*.scale": ["e4m3", "ue3m3"],
        "*.rounding": ["nearest", "down"],
        "wgrad.rotation": ["none", "halves16"],
        "estimator.x.element": ["ste", "half"],
        "*.scaling": ["amax", "second"],
        "training.optimizer": ["task", "signs"],
    },
}
LABELS = {
    "element format": "e3m1",
    "scale format": "ue3m3",
    "rounding": "down",
    "rotation": "halves16",
    "estimator": "half",
    "codec": "second",
    "optimizer": "signs",
}
"""Kind -> what the label of its recipe has."""

RUN = """
import json, sys
from fp4dse.dse import Space
from fp4dse.results import open_store, write_report
from fp4dse.sweeps import run_sweep
space, store = Space.from_dict(json.loads(sys.argv[1])), sys.argv[2]
done = run_sweep(space, tasks=[("twice", "smoke")], seeds=[0], store=store, executor="again", jobs=1)
store = open_store(store)
rows = store.sql("SELECT * FROM (SELECT config_id, val_loss, overhead FROM runs) JOIN recipes USING (config_id)")
write_report(store, store.path.parent / "report.html")
counted = "recipes were counted" in (store.path.parent / "report.html").read_text()
rows = json.loads(rows[["label", "val_loss", "overhead"]].to_json(orient="records"))
why, lucky = [failure.reason for failure in done.failures], len(store.sql("FROM lucky"))
print(json.dumps({"failed": done.failed, "why": why, "counted": counted, "rows": rows, "lucky": lucky}))
"""


def copied(to: Path, *left_out: str) -> Path:
    """A copy of the tree in which all of ADDED are added, but for these kinds."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith("docs/") and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
            _copy_compiled(ROOT / name, to / name)
    (to / "typings").mkdir()
    (to / "typings/fp4dse").symlink_to("..")
    for kind, edits in ADDED.items():
        for name, changes in edits.items() if kind not in left_out else ():
            for place, text in changes:
                _add(to / name, place, text)
    return to


def _copy_compiled(file: Path, to: Path) -> None:
    """Python takes it where the time of change is the same, and need not compile the whole tree again."""
    compiled = Path(cache_from_source(str(file)))
    if file.suffix == ".py" and compiled.exists():
        there = Path(cache_from_source(str(to)))
        there.parent.mkdir(exist_ok=True)
        shutil.copy2(compiled, there)


def _add(file: Path, place: str | None, text: str) -> None:
    if place is None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return
    before, *after = file.read_text().split(place)
    assert len(after) == 1, f"{file.name} has {place!r} {len(after)} times: mend the test that adds behind it"
    file.write_text(f"{before}{place}{text}{after[0]}")


def run(command: list[str], tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command says that imports the tree."""
    environment = os.environ | {"PYTHONPATH": str(tree / "typings"), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy with all that was added, which stays as it is."""
    return copied(tmp_path_factory.mktemp("tree"))


@pytest.mark.heavy
def test_all_that_was_added_is_trained_asked_for_and_shown(tree, tmp_path):
    """On a new task, by a new executor: a recipe of each kind has a row with its name, loss and cost; a statistic
    answers, a panel is in the report. One test, since the sweep is its time, and processes do not share fixtures."""
    command = [sys.executable, "-c", RUN, json.dumps(SPACE), str(tmp_path / "store")]
    done = run(command, tree, FP4DSE_EAGER="1")  # nothing to compile
    assert done.returncode == 0, done.stderr[-3000:]
    swept = json.loads(done.stdout.splitlines()[-1])
    assert (swept["failed"], swept["why"]) == (0, [])
    assert len(swept["rows"]) == len(LABELS) + 3  # and the base, BF16, and BF16 with the optimizer that was added
    losses = [row["val_loss"] for row in swept["rows"]]
    assert len(set(losses)) == len(losses), losses
    for kind, label in LABELS.items():
        found = [row for row in swept["rows"] if label in row["label"] and not row["label"].startswith("bf16")]
        assert len(found) == 1, kind
        assert found[0]["val_loss"] > 0, kind
        assert found[0]["overhead"] > 0, kind
    assert swept["lucky"] == len(swept["rows"])
    assert swept["counted"]


BOTH = """
import torch
from fp4dse.kernels.dispatch import OPERATIONS
from fp4dse.kernels.ops.doubled import doubled, triton
x = torch.randn(3, 2000)
there = triton.doubled(x)
OPERATIONS["doubled"].has_kernels = lambda x: True
triton.doubled = lambda x: there if x.numel() else None
print(doubled(x) is there and torch.equal(there, 2 * x))
"""
CHECKS = """
from tests.kernels.test_dispatch import test_every_folder_with_kernels_is_in_the_registry as registry
from tests.house.test_packaging import test_every_folder_with_modules_is_a_listed_package as packages
for check in registry, packages:
    try:
        check()
        print("all listed")
    except AssertionError:
        print("left out")
"""


def test_an_operation_is_in_the_registry_and_its_kernel_has_the_bits_of_its_definition(tree):
    done = run([sys.executable, "-c", BOTH + CHECKS], tree, TRITON_INTERPRET="1", FP4DSE_EAGER="1")
    assert done.stdout.splitlines() == ["True", "all listed", "all listed"], done.stderr[-3000:]


def test_an_operation_that_is_left_out_of_the_registry_or_of_the_packages_is_found(tree, tmp_path):
    lacking = shutil.copytree(tree, tmp_path / "lacking", symlinks=True, copy_function=os.link)
    for changed in ("kernels/ops/doubled/__init__.py", "pyproject.toml"):
        (lacking / changed).unlink()
    (lacking / "kernels/ops/doubled/__init__.py").write_text("")
    shutil.copy(ROOT / "pyproject.toml", lacking)
    done = run([sys.executable, "-c", CHECKS], lacking, FP4DSE_EAGER="1")
    assert done.stdout.splitlines() == ["left out", "left out"], done.stderr[-3000:]


@pytest.mark.parametrize("kind", ADDED)
def test_the_guide_names_the_files(kind):
    """In the table of CONTRIBUTING.md; NAME stands for a file of its own."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    [line] = re.findall(rf"(?m)^\| {re.escape(kind)} \|(.*)$", guide)
    named = set(re.findall(r"`([\w/]+\.(?:py|toml))`", line.split("|")[0].split("(")[0]))
    assert named == {_as_in_the_guide(name, changes) for name, changes in ADDED[kind].items()}


def _as_in_the_guide(name: str, changes: list[tuple[str | None, str]]) -> str:
    """With NAME for the name of a new file, or of its folder if that is new."""
    file = Path(name)
    if all(after is not None for after, _ in changes):
        return name
    return str(file.with_stem("NAME") if (ROOT / file.parent).exists() else file.parent.with_name("NAME") / file.name)


def paths_of(page: str) -> set[str]:
    """What a page writes as the path of a file or folder: `kernels/quant/`, `tests/kernels/test_dispatch.py`."""
    words = {word for said in re.findall(r"`([^`\n]+)`", page) for word in said.replace("::", " ").split()}
    options = {word for word in words if re.fullmatch(r"[\w.{},*/-]*(/|\.(py|toml|md|cpp|h|npz))", word)}
    return {inner for word in options for inner in _expanded(word)}


def _expanded(word: str) -> list[str]:
    """`a/{b,c}.py` as two."""
    if not (found := re.fullmatch(r"(.*)\{(.*)\}(.*)", word)):
        return [word]
    return [f"{found[1]}{inner}{found[3]}" for inner in found[2].split(",")]


def test_every_path_in_the_guide_exists_and_begins_at_the_root():
    paths = {path for path in paths_of((ROOT / "CONTRIBUTING.md").read_text()) if "NAME" not in path}
    paths -= {"my.py", "__init__.py", "triton.py", ".toml"}  # of whoever reads it, and of every folder
    assert len(paths) > 60
    assert not {path for path in paths if not (ROOT / path).exists()}


def test_a_path_of_the_guide_that_does_not_exist_is_found():
    assert paths_of("`a/b.py`, `x → y` and `a/{c,d}.h` of `e/` in a\nrow with `python -m f.g h.md`") == {
        "a/b.py", "a/c.h", "a/d.h", "e/", "h.md",
    }  # fmt: skip
