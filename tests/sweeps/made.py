"""Rows as a sweep stores them, with outcomes that the tests choose."""

from fp4dse.dse import Recipe
from fp4dse.results import recipe_columns

SETTING = {
    "task": "vision",
    "preset": "small",
    "dataset_digest": "d",
    "device_class": "cpu",
    "software_class": "torch",
    "rev_quantizers": 1,
    "rev_engine": 1,
    "rev_task": 1,
    "metric_name": "accuracy",
    "metric_better": "higher",
    "val_metric": 0.5,
    "steps": 10,
}


def row(recipe: Recipe, seed: int = 0, loss: float | None = 1.0, **more: object) -> dict:
    """A finished lane, a diverged one without a loss."""
    status = "diverged" if loss is None else "done"
    return {**recipe_columns(recipe), **SETTING, "lr": 1e-3, "seed": seed, "status": status, "val_loss": loss, **more}
