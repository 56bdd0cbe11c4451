"""Commands about this machine and the tensors on it: what it has, whether it computes right, how fast it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4dse.commands.completing import offer
from fp4dse.commands.options import AsJson, Device
from fp4dse.commands.printing import print_each, print_json, print_rows
from fp4dse.commands.topics import new_app, under
from fp4dse.dse import QUANTIZERS, ConfigError

Only = Annotated[list[str], typer.Option(help="Rows to measure, by a part of their name. Default: all.")]

app = new_app()
command = under(app, "Check")
bench_app = new_app(help="Speed of this machine.")
app.add_typer(bench_app, name="bench", rich_help_panel="Check")


@command(epilog="Example: fp4dse doctor")
def doctor(device: Device = "cpu", as_json: AsJson = False) -> None:
    """Show what this machine has, which paths a sweep will take, and why not the others."""
    from fp4dse.sweeps.jobs.machine import find_machine
    from fp4dse.tasks import diagnose

    machine = find_machine(device)
    workers = (
        "workers",
        str(len(machine.slots)),
        f"of {machine.threads} thread{'s' * (machine.threads > 1)}; --jobs changes the number",
    )
    columns = ["topic", "found", "note"]
    rows = [dict(zip(columns, line, strict=True)) for line in [*diagnose(device), workers]]
    print_rows(columns, rows, as_json)


@command(epilog="Example: fp4dse selftest --device cuda")
def selftest(device: Device = "cpu", as_json: AsJson = False) -> None:
    """Check this machine's quantizers against their definitions and frozen vectors; exit code 1 on any mismatch.

    What is done is told on standard error.
    """
    from fp4dse.kernels.selftest import selftest as checks
    from fp4dse.tasks import check_device

    check_device(device)
    rows = []
    for check in checks(device):
        rows.append({"check": check.name, "cases": check.cases, "wrong": check.wrong})
        print(f"{check.name}: {check.wrong} wrong", file=sys.stderr)
    print_rows(["check", "cases", "wrong"], rows, as_json)
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


@command(epilog="Example: fp4dse tensor weights.safetensors --quantizer nvfp4 --quantizer mxfp4 --plot error.html")
def tensor(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npy, .npz, .safetensors, .pt or .pth file.")],
    quantizer: Annotated[
        list[str] | None,
        typer.Option(
            help="A named quantizer; may be repeated. Default: four usual ones.",
            autocompletion=offer(lambda: QUANTIZERS),
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the errors, an .html file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize the tensors in a file: error, gain, what is clipped and flushed, where the error is from.

    Blocks lie along the last axis. scale, dead, grid and cross are the shares of the squared error that come from
    storing the block scale, from the dead zone around zero, from the grid, and from their cross terms.
    """
    from fp4dse.kernels import inspect_file
    from fp4dse.results.report.tensor_page import tensor_table, write_tensor_page

    if plot and plot.suffix != ".html":
        raise ConfigError("--plot", str(plot), "a path that ends in .html (the page saves its picture as PNG)")
    found = inspect_file(file, quantizer)
    if plot:
        write_tensor_page(found["rows"], found["skipped"], f"Quantization error of {file.name}", plot)
    if as_json:
        print_json(found)
    else:
        print(tensor_table(found["rows"], found["skipped"]), *([plot] if plot else []), sep="\n\n")


@bench_app.command("kernels", epilog="Example: fp4dse bench kernels --device cuda")
def bench_kernels(only: Only = [], device: Device = "cpu", as_json: AsJson = False) -> None:  # noqa: B006
    """Time the quantizers beside a copy of the same tensor, on a GPU also conversions between MXFP4 and FP8.

    Exit code 1 if one differs from the reference.
    """
    from fp4dse.kernels.bench.table import bench
    from fp4dse.tasks import check_device

    check_device(device)
    columns = ["what", "time_us", "gb_s", "of_copy", "wrong", "extra_memory"]
    rows = [{name: getattr(row, name) for name in columns} for row in bench(device, only)]
    print_rows(columns, rows, as_json)
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


@bench_app.command("train", epilog="Example: fp4dse bench train --device cuda --only language:10M-256 --json")
def bench_train(only: Only = [], device: Device = "cpu", as_json: AsJson = False) -> None:  # noqa: B006
    """Time the training of populations beside the same training one lane at a time; ratios are from one run.

    Every row is printed as soon as it is measured; as JSON it is a line. --only may be repeated, and takes any part of
    a row's name, so that one row can be chosen: --only '350M+bf16, bf16' is the decoder of 350M in BF16 beside
    torch.compile. A part that no row has names them all. A peer by torch.compile has four minutes to compile, and is
    left out of its rows if it does not.
    """
    from fp4dse.tasks import check_device
    from fp4dse.tasks.bench.speed import bench

    check_device(device)
    columns = ["what", "value", "unit", "reach", "reached", "note"]
    print_each(({name: getattr(row, name) for name in columns} for row in bench(device, only)), as_json)


@bench_app.command("kept", epilog="Example: fp4dse bench kept 10M-256+bf16")
def bench_kept(
    preset: Annotated[str, typer.Argument(help="A preset of language, with +bf16 or without.")] = "10M-256+bf16",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Count what a block of a decoder keeps for the backward pass: inputs of linear layers in BF16, FP8 and MXFP4, and
    SwiGLU's in MXFP8.

    On a GPU also the peak memory and the speed of a training of two lanes: compare rows of like recomputation, or of
    like peak.
    """
    from fp4dse.tasks import check_device
    from fp4dse.tasks.bench.kept import bench

    check_device(device)
    columns = ["what", "bytes_per_token_and_block", "of_bf16", "of_fp8", "peak_mib", "tokens_per_s", "note"]
    rows = [{name: getattr(row, name) for name in columns} for row in bench(preset, device)]
    print_rows(columns, rows, as_json)


@bench_app.command("experts", epilog="Example: fp4dse bench experts --only fp8 --device cuda")
def bench_experts(only: Only = [], device: Device = "cuda", as_json: AsJson = False) -> None:  # noqa: B006
    """Time products of experts in one launch beside torch's in BF16 and FP8; exit code 1 if one is wrong."""
    from fp4dse.kernels.bench.experts import bench
    from fp4dse.tasks import check_device

    check_device(device)
    wrong = False
    columns = ["what", "time_us", "tflops", "of_torch_fp8", "wrong", "note"]
    rows = []
    for row in bench(device, only):
        wrong = wrong or bool(row.wrong)
        rows.append({name: getattr(row, name) for name in columns})
    print_rows(columns, rows, as_json)
    raise typer.Exit(int(wrong))


@bench_app.command("exchange", epilog="Example: fp4dse bench exchange --device cuda --ranks 2")
def bench_exchange(
    ranks: Annotated[int, typer.Option(help="Processes, on a GPU each where the device is one.", min=1)] = 2,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure a layer of experts on several ranks beside one: its bits, its all-to-alls, its memory.

    Exit code 1 if a bit differs.
    """
    from fp4dse.tasks import check_device
    from fp4dse.tasks.bench.exchange import bench

    check_device(device)
    wrong = 0.0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal wrong
        for row in bench(device, ranks):
            wrong += row.value if row.unit == "wrong" else 0
            yield row._asdict()

    print_each(rows(), as_json)
    raise typer.Exit(int(wrong > 0))


@bench_app.command("sweep", epilog="Example: fp4dse bench sweep")
def bench_sweep(
    only: Only = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Measure planning, harness cost, resume, memory and a simulated cluster against their targets; exit code 1 on a
    miss."""
    from fp4dse.sweeps.bench.harness import bench

    columns = ["what", "measured", "target", "met"]
    rows = [{name: getattr(row, name) for name in columns} for row in bench(only)]
    print_rows(columns, rows, as_json)
    raise typer.Exit(int(not all(row["met"] for row in rows)))


@bench_app.command("results", epilog="Example: fp4dse bench results --rows 100000 --files 2000")
def bench_results(
    rows: Annotated[int, typer.Option(help="Rows with curves that are queried.")] = 1_000_000,
    files: Annotated[int, typer.Option(help="Inbox files that are joined.")] = 20_000,
    recipes: Annotated[int, typer.Option(help="Recipes in the report, which a browser opens.")] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Time queries, compaction, statistics and the report on generated runs; takes minutes and a gigabyte of disk."""
    from fp4dse.results.bench.report import bench as bench_report
    from fp4dse.results.bench.store import bench

    for name, number in (("--rows", rows), ("--files", files), ("--recipes", recipes)):
        if number < 1:
            raise ConfigError(name, number, "a whole number above 0")
    times, pages = list(bench(rows, files)), list(bench_report(recipes))
    if as_json:
        print_json([*times, *pages])
    else:
        print_rows(["what", "seconds", "cpu_s", "target_s"], times)
        print_rows(["what", "value", "unit", "target"], pages)


@bench_app.command("statistics", epilog="Example: fp4dse bench statistics --studies 60 --size 48")
def bench_statistics(
    size: Annotated[
        list[str],
        typer.Option(
            help="Recipes of a study: 48, 160 or 17664; or `scaling`: fits over sizes; or `published`: orders "
            "against a published table. May be repeated."
        ),
    ] = ["48"],  # noqa: B006
    studies: Annotated[int, typer.Option(help="Studies of each size.")] = 120,
    seed: Annotated[int, typer.Option(help="Other studies for another seed.")] = 0,
    store: Annotated[str | None, typer.Option(help="A store whose settings are resampled as often, too.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the studies.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Hold what the statistics say against studies whose truth is known: coverage, calibration, bias, power."""
    from fp4dse.results import open_store
    from fp4dse.results.bench.scaling_studies import bench_published, bench_scaling
    from fp4dse.results.bench.statistics import bench
    from fp4dse.results.bench.studies import SIZES
    from fp4dse.results.stats.recipes.recommendation import VERDICTS_READ
    from fp4dse.results.stats.techniques.effects import EFFECTS_READ

    own = {"scaling": bench_scaling, "published": bench_published}
    for name in size:
        if name not in (*SIZES, *own):
            raise ConfigError("--size", name, ", ".join([*SIZES, *own]))
    if studies < 1:
        raise ConfigError("--studies", studies, "a whole number above 0")
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "a whole number above 0")
    runs = open_store(store).runs([*dict.fromkeys([*VERDICTS_READ, *EFFECTS_READ])]) if store else None
    lines = list(bench([name for name in size if name in SIZES], studies, seed, runs, jobs))
    lines += [line for name in size if name in own for line in own[name](studies, seed)]
    print_rows(["studies", "what", "value", "error", "target", "drawn"], lines, as_json)
