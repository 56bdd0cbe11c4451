"""The command that says why a recipe loses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.options import AsJson, Data, Device, RecipeName, Start, only
from fp4dse.commands.printing import print_facts, print_json, print_tables
from fp4dse.commands.topics import new_app, under
from fp4dse.dse import ConfigError

SHOWN = 8
"""Lines of a table on a terminal; the page has all."""

app = new_app()
command = under(app, "Train")


@command(epilog="Example: fp4dse diagnose nvfp4 --task regression:deep")
def diagnose(
    recipe: RecipeName,
    task: Annotated[
        str,
        typer.Option(help="TASK, TASK:PRESET, or FILE.py:NAME of your own.", autocompletion=offer(completing.tasks)),
    ] = "regression",
    data: Data = None,
    start: Start = [],  # noqa: B006
    passes: Annotated[int, typer.Option(help="Backward passes at each step looked at: 16, 32, 64 …")] = 64,
    at: Annotated[str, typer.Option(help="Shares of the training at which to look, with commas.")] = "0.1,0.5,1",
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: the task's for the recipe's class.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and random bits.")] = 0,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="The page, an .html file. Default: runs/diagnosis/RECIPE-TASK-PRESET.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one lane of a recipe beside BF16, and say why it loses: clipping, flushing, bias or variance, and where.

    At some steps the gradient of one batch is taken many times, with other random bits each time: an unbiased one
    falls as 1/n in the mean of n, a biased one flattens. As JSON all is printed, and no page is written but to --out.
    """
    import msgspec

    from fp4dse.results.report import diagnosis_page as page
    from fp4dse.results.stats.recipes.causes import causes, sentence
    from fp4dse.sweeps.arguments import find_recipe, parse_lrs, parse_tasks
    from fp4dse.tasks import Lane, check_device, get_task
    from fp4dse.tasks.facts import rate_of
    from fp4dse.tasks.inspection.diagnosis import diagnose_lane
    from fp4dse.tasks.threads import torch_threads

    if out and out.suffix != ".html":
        raise ConfigError("--out", str(out), "a path that ends in .html")
    check_device(device)
    [asked] = parse_tasks([task], None, data, only(start))
    found, on = find_recipe(recipe, None), get_task(*asked)
    [rate] = (parse_lrs([str(lr)]) if lr is not None else None) or [rate_of(on, found)]
    try:
        shares = [float(share) for share in at.split(",")]
    except ValueError:
        raise ConfigError("--at", at, "shares of the training with commas: 0.1,0.5,1") from None
    with torch_threads(1):  # as workers train
        diagnosis = msgspec.to_builtins(diagnose_lane(on, Lane(found, rate, seed), device, shares, passes))
    target = out or Path("runs") / "diagnosis" / f"{Path(recipe).stem}-{on.name}-{on.preset}.html".replace("/", "-")
    if out or not as_json:
        page.write_diagnosis_page(diagnosis, target)
    if as_json:
        print_json({"sentence": sentence(diagnosis), "causes": [c._asdict() for c in causes(diagnosis)], **diagnosis})
        return
    print_facts(page.facts(diagnosis))
    tables = {"Causes, the farthest above its threshold first:": page.cause_rows(diagnosis)}
    for moment in diagnosis["moments"][-1:]:
        layers, operands, step = page.layer_rows(moment), page.operand_rows(moment), moment["step"]
        tables |= {
            f"Gradients of weights at step {step}, worst first{_part(layers)}:": layers[:SHOWN],
            f"Operands at step {step}, worst first{_part(operands)}:": operands[:SHOWN],
            "Error of the mean of n backward passes:": page.curve_rows(diagnosis),
        }
    print_tables(tables)
    print("", sentence(diagnosis), f"page: {target}", sep="\n")


def _part(rows: list[Any]) -> str:
    """Words that say how many rows are left out, if any are."""
    return f" ({SHOWN} of {len(rows)}; the page has all)" if len(rows) > SHOWN else ""
