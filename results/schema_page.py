"""docs/schema.md: what every column of a row and every view of a query holds, from the code that makes them.

python -m fp4dse.results.schema_page > docs/schema.md
"""

from __future__ import annotations

import inspect
import re

import pyarrow as pa

from fp4dse.results.stats.factors import AXES
from fp4dse.results.store.schema import BY_NAME, COLUMNS, CURVES, KEY, OUTCOME, RECIPE, ROW, SCHEMA_VERSION
from fp4dse.results.views import VIEWS

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
    "channels": "input channels that are treated apart: held in another format, or with their error; none without any",
}
AROUND = {
    "precise": "layers that stay as in BF16, by their place in the model",
    "layers": "layers that compute otherwise: where they stand, and what is different there; none without any",
    "attention": "operands of the attention core that are quantized, none by default",
    "finish": "last share of the steps that is trained in higher precision",
    "gemm": "how operands are multiplied: exact, or as others do it",
    "optimizer": "kind of optimizer; task: the task's own",
    "weight_decay": "of the recipe, null for the task's own",
    "beta1": "of the recipe, null for the task's own",
    "beta2": "of the recipe, null for the task's own",
    "clip": "bound of the gradient's norm, null for the task's own",
    "loss_scale": "what the loss is multiplied with for the backward pass",
    "loss_scale_growth": "steps with finite gradients after which it doubles, null where it stays",
    "accumulate": "parts of a batch whose gradients are added up",
    "schedule": "of the learning rate; task: the task's own",
    "reset": "of weights that oscillate, none without one",
    "ramping": "of the steps between updates of weights that oscillate, none without one",
    "rollout": "forward pass that samples of reinforcement learning come from; trainer: that of training",
    "noise": "on parameters of the policy that samples, none without it",
    "coreset": "share of the training samples that is read, and who chooses it; none: all",
    "inject": "parts of a quantizer's error that the weights of the policy that samples have, none without any",
    "distill": "weight and temperature of the distance from a teacher in the loss; none without one",
    "trains": "what is trained: all, what quantizers have learned alone, or none",
    "replay": "router: the trainer sends tokens to the experts that the rollout chose; none by default",
    "kl": "weight of the divergence from the policy that training began with, null for the task's own",
    "tis": "bound of the weight that corrects samples for it, null without one",
}
OPERANDS = {"x": "the layer's input", "w": "the weight", "g": "the gradient of the output"}


def schema_page() -> str:
    """The page as Markdown."""
    text = f"""# What a store holds

Schema {SCHEMA_VERSION}. Made from the code by `python -m fp4dse.results.schema_page`; [results.md](results.md) says how
to use it. A row is one trained lane: one recipe at one learning rate and seed. `runs` has all columns but the curves,
and with them:

| column | type | meaning |
| --- | --- | --- |
| `baseline_loss` | double | held-out loss of BF16 at its best learning rate, same setting and seed |
| `gap_matched` | double | the same against BF16 with the recipe's training side (`baseline_id`) |
| `gap_reducible` | double | the gap of the loss above the entropy of the data, where a task knows it (`metric_name` \
`excess`) |
| `gap` | double | log(val_loss / baseline_loss); exp(gap) - 1 is what tables show. Where \
`gap_unit` is `points`, val_loss - baseline_loss. inf if diverged, null without BF16 |
| `overhead_low` | double | `overhead` with better software (`low` of cost.md), worked out when rows are read |
| `overhead_high` | double | the same with worse software (`high`) |
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
        module = function.__module__.removeprefix("fp4dse.")
        text += f"### {name}\n\n`{module}.{function.__name__}(runs)`\n\n{_plain(inspect.getdoc(function) or '')}\n\n"
    return text.rstrip() + "\n"


def _meaning(name: str) -> str:
    if name not in AXES:
        return COLUMNS[name].meaning
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
