"""Rows as a sweep writes them, with outcomes that the tests choose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe, Space
from fp4dse.dse.rounding import Stochastic
from fp4dse.results import Store, open_store, recipe_columns

STEPS = [1, 4, 16, 64, 200]
WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def _row(recipe: str | Recipe = "nvfp4", seed: int = 0, loss: float | None = 0.5, **columns: object) -> dict:
    recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    finished = loss is not None
    return {
        **recipe_columns(recipe),
        "lr": 1e-3,
        "task": "vision",
        "preset": "quickstart",
        "dataset_digest": "0123abcd",
        "seed": seed,
        "device_class": "cpu-2t",
        "software_class": "torch-2.13",
        "rev_quantizers": 1,
        "rev_engine": 1,
        "rev_task": 1,
        "status": "done" if finished else "diverged",
        "diverged_step": None if finished else 37,
        "train_loss_min": loss,
        "train_loss_final": loss,
        "val_loss": loss,
        "val_metric": 0.9 if finished else None,
        "metric_name": "accuracy",
        "metric_better": "higher",
        "steps": 200,
        "train_s": 12.5,
        "setup_s": 3.0,
        "lane_s": 12.5 / 32,
        "lanes": 32,
        "peak_memory_bytes": 300 << 20,
        "device": "cpu",
        "device_name": "Some CPU",
        "threads": 2,
        "dtype": "float32",
        "quantizer_backend": "compiled",
        "gemm_backend": "fp32",
        "fallbacks": [],
        "torch_version": "2.13.0",
        "python_version": "3.11.2",
        "fp4dse_version": "0.1.0",
        "git_commit": "abc1234",
        "host": "somewhere",
        "created_at": WRITTEN,
        "curve_step": STEPS if finished else [1, 4],
        "curve_loss": [(loss or 1.0) * (1 + 9 / step) for step in (STEPS if finished else [1, 4])],
        **columns,
    }


@pytest.fixture(scope="session")
def row() -> Callable[..., dict]:
    """row(recipe, seed, loss, **columns): a finished lane, or a diverged one with loss = None."""
    return _row


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def runs() -> Callable[..., pd.DataFrame]:
    """runs(bf16=[losses by seed], nvfp4=[…], …) -> frame; `recipe@lr` for another learning rate."""

    def build(**losses: list) -> pd.DataFrame:
        rows: list[dict] = []
        for key, values in losses.items():
            name, _, lr = key.replace("_", "-").partition("@")
            rows += [_row(name, seed, loss, lr=float(lr or 1e-3)) for seed, loss in enumerate(values)]
        return pd.DataFrame(rows)

    return build


@pytest.fixture(scope="session")
def swept(tmp_path_factory, row) -> Store:
    """24 recipes × 3 seeds on two tasks: rotation helps, stochastic rounding forward harms; one recipe diverged."""
    store = open_store(tmp_path_factory.mktemp("swept") / "store", create=True)
    space = Space.from_dict(
        {
            "base": "nvfp4",
            "axes": {
                "*": ["mxfp4", "nvfp4", "ue5m3"],
                "forward.rounding": ["nearest", "stochastic"],
                "*.g.rounding": ["nearest", "stochastic"],
                "wgrad.rotation": ["none", "rht16"],
            },
        }
    )
    recipes = list(space.recipes())
    rng = np.random.default_rng(5)
    for task in ("vision", "regression"):
        rows = [row("bf16", seed, 0.2 * np.exp(0.01 * rng.normal()), task=task) for seed in range(3)]
        for i, recipe in enumerate(recipes):
            effect = 0.3 - 0.1 * bool(recipe.wgrad.rotation) + 0.2 * isinstance(recipe.fprop.x.rounding, Stochastic)
            effect += 0.02 * i / len(recipes)
            for seed in range(3):
                blown = task == "vision" and i == len(recipes) - 1
                rows.append(row(recipe, seed, None if blown else 0.2 * np.exp(effect + 0.01 * rng.normal()), task=task))
        store.add(rows, task)
    store.add([row("nvfp4", 7, status="failed", failure="<b>killed</b>")], "failed")
    store.add([row("mxfp4", 8, 0.3, fallbacks=["eager: no compiler"])], "eager")
    return store


SERVER = """
from moto.server import ThreadedMotoServer
import sys
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def server():
    """The port of an S3 server on loopback."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield int(process.stdout.readline())
        process.stdin.close()
