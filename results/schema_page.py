"""docs/schema.md: what every column of a row and every view of a query holds, from the code that makes them.

python -m fp4dse.results.schema_page > docs/schema.md
"""

from __future__ import annotations

import inspect
import re

import pyarrow as pa

from fp4dse.results.stats.factors import AXES
from fp4dse.results.store.schema import BY_NAME, CURVES, KEY, OUTCOME, RECIPE, ROW, SCHEMA_VERSION
from fp4dse.results.views import VIEWS

MEANING = {
    "schema_version": "version of this schema that the row was written with",
    "run_id": "16 hex digits over the key: equal ids mean the same training",
    "config_id": "16 hex digits over the canonical recipe; learning rate and seed are not part of it",
    "lr": "learning rate, its highest value where it has a schedule",
    "task": "what is learned",
    "preset": "how big",
    "dataset_digest": "over the data as they were trained on",
    "seed": "of initial weights, data order and stochastic rounding",
    "device_class": "what of the device can change bits",
    "software_class": "what of the software can change bits",
    "rev_quantizers": "revision of the quantizers; a fix that changes results raises it",
    "rev_engine": "revision of the training engine",
    "rev_task": "revision of the task",
    "recipe": "the canonical recipe as JSON",
    "recipe_label": "the recipe in words",
    "recipe_name": "the shipped recipe that it equals, or null",
    "is_baseline": "plain BF16",
    "points": "overhead as the technique count of arXiv 2509.17791; 0 for BF16",
    "bits_per_element": "stored bits per operand element, scales included, mean over the six operands",
    "overhead": "modelled time of a training step relative to BF16 on a named chip; where the chip lacks what the "
    "recipe needs, as if it had it (`fp4dse cost` says so)",
    "overhead_of": "the model, the chip and the revision of the cost model that it is of",
    "activation_bits": "bits that the backward pass keeps of each element of a layer's input",
    "signature": "what of the recipe decides the shape of the computation; lanes that share it run together",
    "status": "done, diverged (a result), pruned (dropped at a rung) or failed (the machine's fault, tried again)",
    "pruned_step": "the step after which the lane was dropped",
    "diverged_step": "the step at which the loss became NaN or Inf",
    "failure": "why the lane failed, in one line",
    "train_loss_min": "lowest logged training loss",
    "train_loss_final": "last logged training loss",
    "val_loss": "loss on held-out data after training, with the quantizers on as in training; what gaps are made of",
    "val_metric": "the task's metric on the held-out data, with the quantizers on as in training",
    "metric_name": "its name, null if the task has none",
    "metric_better": "`lower` or `higher`: which way it is better; null if the task does not say",
    "steps": "optimizer steps",
    "train_s": "seconds of training of the whole population of lanes",
    "setup_s": "seconds before the first step",
    "lane_s": "train_s / lanes",
    "lanes": "how many were trained together",
    "peak_memory_bytes": "of the population",
    "device": "cpu or cuda",
    "device_name": "as the driver gives it",
    "threads": "of the worker",
    "dtype": "of activations between layers",
    "quantizer_backend": "which path quantized",
    "gemm_backend": "which products were used: one name, or three in the order fprop, dgrad, wgrad",
    "fallbacks": "paths that were wanted and not taken, with the reason",
    "torch_version": "of PyTorch",
    "python_version": "of Python",
    "fp4dse_version": "of this program",
    "git_commit": "the commit of this program",
    "host": "name of the machine",
    "created_at": "when the row was made, UTC",
    "curve_step": "the steps at which the training loss was logged",
    "curve_loss": "the training loss there",
    "metrics": "all metrics of the task by name",
    "pictures": "PNG files by name",
    "recorded": "gradient norms, noise ratios and lost shares at log-spaced steps, if asked for (`sweep --record`)",
}

FIELDS = {
    "element": "element format",
    "block": "elements that share a scale: along the contraction axis, or a tile",
    "scale": "format of the block scale, with its rounding and convention",
    "tensor_scale": "target of the tensor's scale, null without one",
    "tensor_amax": "which maximum the tensor scale is made from",
    "rounding": "rounding of elements",
    "range": "the share of the format's range that block maxima are scaled to",
    "adapt": "how a block chooses among several encodings",
    "scaling": "what the block scale follows from",
    "arithmetic": "arithmetic of the quantizer",
    "outliers": "how outliers are treated",
    "rotation": "rotation of both operands",
    "source": "what its operands are quantized from",
}
AROUND = {
    "precise": "layers that stay as in BF16, by their place in the model",
    "finish": "last share of the steps that is trained in higher precision",
    "gemm": "how operands are multiplied: exact, or as others do it",
    "optimizer": "kind of optimizer; task: the task's own",
    "weight_decay": "of the recipe, null for the task's own",
    "beta1": "of the recipe, null for the task's own",
    "beta2": "of the recipe, null for the task's own",
    "clip": "bound of the gradient's norm, null for the task's own",
    "loss_scale": "what the loss is multiplied with for the backward pass",
    "accumulate": "parts of a batch whose gradients are added up",
    "schedule": "of the learning rate; task: the task's own",
}
OPERANDS = {"x": "the layer's input", "w": "the weight", "g": "the gradient of the output"}


def schema_page() -> str:
    """The whole page, Markdown."""
    text = f"""# What a store holds

Schema {SCHEMA_VERSION}. Made from the code by `python -m fp4dse.results.schema_page`; [results.md](results.md) says how
to use it. A row is one trained lane: one recipe at one learning rate and seed. `runs` has all columns but the curves,
and with them:

| column | type | meaning |
| --- | --- | --- |
| `baseline_loss` | double | held-out loss of BF16 at its best learning rate, same setting and seed |
| `gap` | double | log(val_loss / baseline_loss); exp(gap) - 1 is what tables show; inf if diverged, null without BF16 |
| `measured` | double | time of emulated layers relative to BF16, if `fp4dse store measure` took it; see cost.md |
| `measured_of` | string | the model, the device and the software that it is of |

The view `recorded` (and `Store.recorded`) has what `sweep --record` stored: run_id, name, step, value.

A **setting** is what two rows share if their losses may be compared: task, preset, dataset_digest, device_class,
software_class, rev_quantizers, rev_engine, rev_task.

"""
    groups = {
        "The key: equal keys mean the same training": ["run_id", *KEY],
        "What follows from the recipe": [name for name in RECIPE if name not in AXES],
        "The axes of the recipe, one column each": list(AXES),
        "What became of it": ["schema_version", *OUTCOME],
        "Curves (view `curves`, or `Store.runs(curves=True)`)": list(CURVES),
        "By name (`Store.by_name`)": list(BY_NAME),
    }
    for title, names in groups.items():
        lines = [f"| `{name}` | {_type(ROW.field(name).type)} | {_meaning(name)} |" for name in names]
        text += "\n".join([f"## {title}", "", "| column | type | meaning |", "| --- | --- | --- |", *lines, "", ""])
    text += "## Views of the statistics\n\nEach is a function of the runs, made when a query names it.\n\n"
    for name, function in VIEWS.items():
        place = function.__module__.removeprefix("fp4dse.")
        text += f"### {name}\n\n`{place}.{function.__name__}(runs)`\n\n{_plain(inspect.getdoc(function) or '')}\n\n"
    return text.rstrip() + "\n"


def _meaning(name: str) -> str:
    if name in MEANING or name not in AXES:
        return MEANING[name]
    if name in AROUND:
        return AROUND[name]
    stage, _, rest = name.partition("_")
    if stage == "estimator":
        return f"how the gradient passes the quantizer of {OPERANDS[rest]}"
    operand, _, field = rest.partition("_")
    return f"{stage}: {FIELDS[field or rest]}" + (f", {OPERANDS[operand]}" if field in FIELDS else "")


def _type(type_: pa.DataType) -> str:
    return str(type_).replace("list<item: ", "list of ").replace("list<element: ", "list of ").rstrip(">")


def _plain(doc: str) -> str:
    """A docstring as Markdown: SETTING in words, columns in code."""
    return (
        re.sub(r"\bSETTING\b", "the setting", doc.replace("er SETTING", "er setting"))
        .replace("*", r"\*")
        .replace("|", r"\|")
    )


if __name__ == "__main__":
    print(schema_page(), end="")
