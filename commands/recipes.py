"""Commands about recipes, spaces and tasks on paper: nothing is trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.options import AsJson, Axes, Chip, Device, Model, RecipeName, StorePath, Workload
from fp4dse.commands.printing import print_facts, print_json, print_rows, print_tables, short
from fp4dse.commands.topics import new_app, under, warn_overridden
from fp4dse.dse import ConfigError

app = new_app()
command = under(app, "Design")
recipe_app = new_app(help="The recipes that come with fp4dse.")
app.add_typer(recipe_app, name="recipe", rich_help_panel="Design")


@recipe_app.command("list", epilog="Example: fp4dse recipe list")
def recipe_list(model: Model = None, chip: Chip = None, as_json: AsJson = False) -> None:
    """All of them: name, modelled step time relative to BF16, points, what it is, where it is from."""
    from fp4dse.dse import recipe_files
    from fp4dse.dse.cost import points
    from fp4dse.sweeps.arguments import find_cost

    cost = find_cost(model, chip)
    columns = ["name", "overhead", "points", "summary", "source"]
    rows = [
        {
            "name": name,
            "overhead": round(cost.overhead(file.recipe), 3),
            "points": points(file.recipe),
            "summary": file.summary,
            "source": file.source,
        }
        for name, file in recipe_files().items()
    ]
    print_rows(columns, rows, as_json)
    if not as_json:
        print(cost.explanation)


@recipe_app.command("show", epilog="Example: fp4dse recipe show nvfp4-sr > mine.toml")
def recipe_show(
    recipe: RecipeName,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """One recipe as TOML: to read, or to change and to name as the base of a space.

    Of those that were trained, any can be shown by what a table or the report calls it.
    """
    from fp4dse.dse import recipe_files, recipe_to_dict, recipe_to_toml
    from fp4dse.sweeps.arguments import find_recipe

    found, file = find_recipe(recipe, store), recipe_files().get(recipe)
    about = {"summary": file.summary, "source": file.source} if file else {}
    facts = {**about, "label": found.label(), "config_id": found.config_id}
    if as_json:
        print_json({**facts, **recipe_to_dict(found)})
    else:
        print(*(f"# {name}: {text}" for name, text in facts.items()), recipe_to_toml(found), sep="\n", end="")


@recipe_app.command("import", epilog="Example: fp4dse recipe import te_quant.cfg > mine.toml")
def recipe_import(
    file: Annotated[Path, typer.Argument(help="Megatron's formats per layer (--te-precision-config-file): YAML.")],
    arguments: Annotated[
        str | None, typer.Option(help="Megatron's arguments: the format of all other layers, BF16 blocks at the ends.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A recipe from another library's file, as TOML, with what the file has and a recipe has not as comments."""
    from fp4dse.dse import recipe_to_dict, recipe_to_toml
    from fp4dse.dse.export.te_quant_reading import read_te_quant
    from fp4dse.dse.reading.files import read_text

    found = read_te_quant(read_text(file, "YAML file"), str(file), arguments)
    facts = {"label": found.recipe.label(), "config_id": found.recipe.config_id}
    if as_json:
        print_json({**facts, "notes": found.notes, **recipe_to_dict(found.recipe)})
        return
    lines = [*(f"{name}: {text}" for name, text in facts.items()), *(f"note: {note}" for note in found.notes)]
    print(*(f"# {line}" for line in lines), recipe_to_toml(found.recipe), sep="\n", end="")


@command(epilog="Example: fp4dse space quickstart")
def space(
    space: Annotated[
        str | None,
        typer.Argument(
            metavar="SPACE",
            help="A .toml file, or the name of a shipped space. Without one, these are told.",
            autocompletion=offer(completing.spaces_and_recipes),
        ),
    ] = None,
    axis: Axes = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Axes of a space, and the number of its recipes: raw product, merged as equivalent, rejected and why, left.

    An axis is idle where all of its values compute the same, as the rounding of scales that are not rounded: such
    combinations are merged. The share is of some that are drawn at random.
    """
    from fp4dse.dse.space.space import Count
    from fp4dse.sweeps.arguments import find_space, shipped_spaces
    from fp4dse.sweeps.planning.plan import count_space

    if space is None:
        rows = [{"name": name, "asks": find_space(name).summary} for name in shipped_spaces()]
        print_rows(["name", "asks"], rows, as_json)
        return
    found, count = find_space(space, axis), Count()
    facts, axes = count_space(found, count), found.describe()
    if as_json:
        print_json({**facts, "overridden": found.overridden(), "faults": count.faults, "axes": axes})
        return
    name = facts.pop("space")
    print_facts({"space": name, "asks": found.summary, **facts})
    warn_overridden(found)
    rejected = [{"rule": rule, "because": text} for rule, text in count.faults.items() if text != rule]
    varied = [{**row, "idle": f"{row['idle']:.0%}" if row["idle"] else ""} for row in axes]
    print_tables({"Axes:": varied, "Rejected, for example:": rejected})


@command(epilog="Example: fp4dse tasks")
def tasks(as_json: AsJson = False) -> None:
    """List every task and preset with its parameters, steps, rough time and the data that it needs.

    The time is of one lane among four on one core of a CPU; `fp4dse sweep … --estimate` says what a sweep takes here.
    """
    import msgspec

    from fp4dse.dse.program.terminal import duration
    from fp4dse.tasks.listing import list_tasks

    found = list_tasks()
    if as_json:
        print_json([msgspec.to_builtins(one) for one in found])
        return
    rows = [
        {
            "task": one.task,
            "parameters": one.parameters and f"{one.parameters:,}",
            "steps": one.steps,
            "batch": one.batch,
            "learning rate": f"{one.lr:g} ({'tuned' if one.tuned else 'not tuned'})",
            "time on a CPU": "a GPU's" if one.seconds is None else duration(one.seconds),
            "data": one.data,
            "what": "; ".join(filter(None, (one.about, one.note))),
        }
        for one in found
    ]
    print_rows(list(rows[0]), rows)


@command(epilog="Example: fp4dse cost nvidia-nvfp4 --model llama-8b --chip gb200")
def cost(
    recipe: RecipeName,
    model: Model = None,
    chip: Chip = None,
    store: StorePath = None,
    extra_tokens: Annotated[
        float | None, typer.Option(help="Share of tokens more than BF16 to the same quality: gives time to quality.")
    ] = None,
    workload: Workload = "reasoning",
    rollout_share: Annotated[
        float | None,
        typer.Option(help="Share of rollouts in BF16's iteration, 0 to 1. Default: that of --workload, modelled."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time this project's layers on --device.")] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Cost of a recipe: modelled step time relative to BF16, split by technique; points, bits, memory."""
    from fp4dse.dse.cost import load_chip, load_model, load_workload, report
    from fp4dse.dse.cost.decoding import CONTEXT
    from fp4dse.sweeps.arguments import find_cost, find_recipe

    if device != "cpu" and not measure:
        raise ConfigError("--device", device, "nothing without --measure")
    target = find_cost(model, chip)
    found, shape, on = find_recipe(recipe, store), load_model(target.model), load_chip(target.chip)
    facts = report.summary(found, shape, on, extra_tokens)
    parts, work, layers = report.split(found, shape, on), report.operations(found, on), []
    software, rollout = report.by_scenario(found, shape, on), report.rollout(found, shape, on)
    learned = load_workload(workload)
    iterations = report.iterations(found, shape, on, learned, rollout_share)
    memory, sent = report.fits(found, shape, on), report.sent(found, shape)
    if measure:
        from fp4dse.kernels.layer_time import layer_rows, layer_times, measured_overhead
        from fp4dse.results.text.frames import plain
        from fp4dse.tasks import check_device

        check_device(device)
        times = list(layer_times(found, shape, device))
        facts["measured"], layers = plain(measured_overhead(times)), layer_rows(times, found, shape, on)
    if as_json:
        tables = {"scenarios": software, "split": parts, "operations": work, "memory": memory, "sent": sent}
        tables |= {"rollout": rollout, "iteration": iterations}
        print_json({**facts, "workload": learned.name, **tables, "measured_layers": layers})
        return
    print_facts({name: short(value, 4) for name, value in facts.items()})
    tables = {
        "The step by how good the software is:": software,
        "The step by part:": parts,
        "Bytes and instructions per element of the tensor:": work,
        "Memory, and the share of blocks to be made again so that it fits:": memory,
        "Tokens to experts on other GPUs, in a micro-batch:": sent,
        f"A token of a rollout for so many sequences of {CONTEXT:,} tokens at once:": rollout,
        f"An iteration of reinforcement learning, {learned.summary}:": iterations,
        f"This project's layers on {device}, emulating FP4: one lane, forward and backward:": layers,
    }
    print_tables(
        {title: [{name: short(value) for name, value in row.items()} for row in rows] for title, rows in tables.items()}
    )


@command(epilog="Example: fp4dse export te-nvfp4 --to te")
def export(
    recipe: RecipeName,
    to: Annotated[
        str, typer.Option(help="te (NVIDIA Transformer Engine), te_quant (Megatron), torchao, modelopt or json.")
    ],
    blocks: Annotated[
        int | None, typer.Option(help="Blocks of the model, for rules about the last ones or a share.")
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Settings of another library that compute a recipe; exit code 1 with what it cannot express if there are none."""
    from fp4dse.dse.export import export as find_settings
    from fp4dse.sweeps.arguments import find_recipe

    done = find_settings(find_recipe(recipe, store), to, blocks)
    settings = done.settings
    if as_json:
        facts = {"target": to, "cannot": done.cannot, "nearest" if done.cannot else "settings": settings.text}
        print_json({**facts, "environment": settings.environment, "notes": settings.notes})
    elif done.cannot:
        lines = [f"fp4dse: {to} cannot express {recipe}:", *(f"  {line}" for line in done.cannot)]
        print(*lines, "the nearest that it has:", "", settings.text, sep="\n", file=sys.stderr)
    else:
        variables = [f"# or in the environment: {name}={value}" for name, value in settings.environment.items()]
        print(settings.text, *variables, *(f"# {note}" for note in settings.notes), sep="\n")
    raise typer.Exit(int(bool(done.cannot)))
