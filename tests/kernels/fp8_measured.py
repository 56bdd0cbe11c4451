"""FP8 units, second measurement: checks first; then what is computed anew in a training, by product; then times.

python3 .gpu/fp8_next.py [check] [wide] [quantizers] [shares] [steps] [profile]   (all without a word)
Run the GPU tests first: pytest -q -m gpu tests/kernels/test_fp8_units.py tests/test_cuda.py -k 'fp8 or fastest'
"""

from __future__ import annotations

import collections
import gc
import sys
import traceback

import msgspec
import torch

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.kernels import stage
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, Fp8, History, library, wide
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import launch
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.features import features_of
from fp4dse.tasks import get_task
from fp4dse.tasks.bench.speed import step_us
from fp4dse.tasks.engine.lane_counts import TIMED_STEPS, lanes_of
from fp4dse.tasks.engine.population import Population, with_steps

TOKENS, WIDTH, INNER = 16384, 1024, 2736
MX = Recipe.named("mxfp4")
RECIPES = {"bf16": Recipe.named("bf16"), "mxfp4": MX, "fp8": msgspec.structs.replace(MX, gemm="fp8-exact")}


def row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def seconds(run, rounds=20):
    for _ in range(5):
        run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            run()
    least = float("inf")
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(); graph.replay(); end.record()
        torch.cuda.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3 / rounds)
    return least


def codes(rows, length, seed):
    """Whole numbers up to 3, so that sums of a product are exact, bfloat16 [1, R, K]."""
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, (1, rows, length), generator=g, device="cuda").to(torch.bfloat16)


def operand(x, dtype):
    power = torch.ones(1, device=x.device)
    return Fp8(*fp8.split(x, dtype, power))


def check():
    """Results of both dtypes at real sizes, with flags in a few rows, columns, and segments; every number compared."""
    for rows, columns, length, dtype in (
        (TOKENS, WIDTH, 3072, torch.bfloat16), (3072, WIDTH, TOKENS, torch.float32), (WIDTH, INNER, TOKENS, torch.float32),
        (TOKENS, INNER, WIDTH, torch.bfloat16), (TOKENS, 2 * INNER, WIDTH, torch.float32),
    ):
        x, y = codes(rows, length, 1), codes(columns, length, 2)
        for n in range(0, rows, 1024):  # a row's first segment
            x[0, n, 5], y[0, :, 5] = 2.0**-60, 0.0
        for n in range(7, columns, 500):
            y[0, n, length - 3], x[0, :, length - 3] = 2.0**-60, 0.0
        a, b = operand(x, E5M2), operand(y, E4M3)
        got = fp8.multiply(a, b, Finish(dtype=dtype))
        expected = torch.bmm(x.float(), y.float().mT)
        exact = torch.bmm(x[:, :2048].double(), y.double().mT)
        assert torch.equal(exact.float(), expected[:, :2048]), "expected is not exact: TF32?"
        lines = (a.shift.flags > 0).any(2)[:, :, None] | (b.shift.flags > 0).any(2)[:, None, :]
        twice = lines if dtype == torch.bfloat16 else torch.zeros_like(lines)  # of what is added to BF16, both are rounded
        wrong = int(((got.float() != expected.to(dtype).float()) & ~twice).sum())
        error = float((got.float() - expected).abs().max() / expected.abs().max())
        flags = int(a.shift.flags.sum()), int(b.shift.flags.sum())
        row("check", f"{rows} × {columns} × {length} {dtype}", f"flags {flags}", f"differing {wrong}", f"largest error {error:.1e}")
        assert flags[0] and flags[1] and not wrong and error < 2.0**-7 and got.isfinite().all()


def time_wide():
    """The kernel alone: nothing flagged; the first row of 16 sequences; one segment; 40 segments."""
    for name, rows, columns, length, dtype in (
        ("qkv dgrad", TOKENS, WIDTH, 3072, torch.bfloat16), ("up dgrad", TOKENS, WIDTH, 5472, torch.bfloat16),
        ("up fprop", TOKENS, 5472, WIDTH, torch.bfloat16), ("qkv wgrad", 3072, WIDTH, TOKENS, torch.float32),
        ("up wgrad", 5472, WIDTH, TOKENS, torch.float32), ("down wgrad", WIDTH, INNER, TOKENS, torch.float32),
    ):
        cells = []
        for kind in ("none", "rows", "one", "forty"):
            x, y = codes(rows, length, 1), codes(columns, length, 2)
            if kind == "rows":
                x[0, ::1024, 5] = 2.0**-60
            elif kind != "none":
                for n in range(1 if kind == "one" else 40):
                    x[0, n * 977 % rows, n * 1013 % length] = 2.0**-60
            a, b = operand(x, E5M2), operand(y, E4M3)
            out = library.multiply(a, b, Finish(dtype=dtype))
            cells.append(f"{1e6 * seconds(lambda: wide.widen(out, a, b, Finish(dtype=dtype))):.1f}")
        row(f"wide kernel, {name} {rows} × {columns} × {length}, µs: none, rows, one, forty", *cells)


def call_of(lanes):
    """The call record of mxfp4 in all lanes."""
    tables = descriptor([QUANTIZERS["mxfp4"].canonical()] * lanes, torch.device("cuda"))
    known = {
        "floats": tables[0], "ints": tables[1], "features": features_of(*tables), "codec": "block", "block": 32,
        "seeds": torch.arange(lanes, dtype=torch.int64, device="cuda"), "site": 1, "tensor_amax": None, "rotation": 0,
        "step": torch.zeros((), dtype=torch.int64, device="cuda"), "signs": None,
    }
    return Call(**{name: known[name] for name in Call._fields})


def time_quantizers():
    call = call_of(1)
    for rows, width, columns, dtype in (
        (TOKENS, WIDTH, False, E5M2), (TOKENS, WIDTH, True, E4M3), (TOKENS, WIDTH, True, E5M2), (TOKENS, 3072, True, E5M2),
        (TOKENS, 2752, True, E4M3), (TOKENS, 2 * INNER, False, E5M2), (TOKENS, 2 * INNER, True, E5M2),
        (2 * INNER, WIDTH, False, E4M3), (2 * INNER, WIDTH, True, E4M3),
    ):
        x = torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)
        history = History(torch.full((1, 3), 130, dtype=torch.int32, device="cuda"), call.step, True)
        bf16 = seconds(lambda: fused.operand(x, columns, call, torch.bfloat16))
        cells = []
        for tiles in ((4, 1), (4, 2), (4, 4), (4, 8)):  # of columns; the second is what it was
            kept, launch._TILES_OF_FP8 = launch._TILES_OF_FP8, tiles
            try:
                cells.append(f"{1e6 * seconds(lambda: fused.fp8(x, columns, call, dtype, history)):.1f}")
            finally:
                launch._TILES_OF_FP8 = kept
        what = f"{'columns' if columns else 'rows'} of {rows} × {width} to {str(dtype)[12:]}, µs: BF16; FP8 of 1, 2, 4, 8 tiles"
        row(what, f"{1e6 * bf16:.1f}", *cells)


def shares():
    """Of tiles that are computed anew or added to, and of segments of both operands with a flag, by stage and sizes; in
    a captured graph, since what is counted is added to a tensor that exists."""
    names: list[str] = []
    sums = torch.zeros(64, 6, device="cuda", dtype=torch.float64)
    multiply = stage.Stage.multiply
    edge = wide.TILES[0]

    def lines(of):
        x = (of.flags[0] > 0).any(1).float()
        return torch.nn.functional.pad(x, (0, -len(x) % edge)).view(-1, edge).amax(1)

    def watched(self, a, b, *more):
        shifts = [of.terms[0].shift for of in (a, b)]
        if None not in shifts:
            (r, k), s = a.terms[0].values.shape[1:], b.terms[0].values.shape[1]
            name = f"{self.name} {r} × {s} × {k}"
            if name not in names:
                names.append(name)
            rows, columns = map(lines, shifts)
            tiles = 1 - (1 - rows.mean()) * (1 - columns.mean())
            any_ = ((shifts[0].notes != 0).any() | (shifts[1].notes != 0).any()).double()
            found = [torch.ones_like(any_), any_, tiles, *((of.flags != 0).double().mean() for of in shifts), rows.mean()]
            sums[names.index(name)] += torch.stack([x.double() for x in found])
        return multiply(self, a, b, *more)

    stage.Stage.multiply = watched
    try:
        population = Population(with_steps(get_task("language", "350M+bf16"), TIMED_STEPS), lanes_of(
            get_task("language", "350M+bf16"), [RECIPES["fp8"]], 1), "cuda")
        for step in range(64):
            if step in (1, 2, 6, 20, 52):
                sums.zero_()
            population.train_step(step)
            if step in (0, 1, 5, 19, 51, 63):
                torch.cuda.synchronize()
                row(f"steps up to {step}", "products with a flag", "tiles", "segments of a", "of b", "strips of a")
                for name, found in sorted(zip(names, sums.tolist(), strict=False)):
                    count = max(found[0], 1)
                    row(name, *(f"{x / count:.2e}" for x in found[1:]))
    finally:
        stage.Stage.multiply = multiply


def steps():
    for task in ("350M+bf16", "350M"):
        ms = {name: step_us(get_task("language", task), of, 1, "cuda", 10) / 1000 for name, of in RECIPES.items()}
        row(f"language:{task}, ms a step", *(f"{name} {x:.1f} ({x / ms['bf16']:.3f} ×)" for name, x in ms.items()))
        gc.collect(); torch.cuda.empty_cache()


def profile():
    from torch.profiler import ProfilerActivity, profile as profiled

    for name in ("fp8", "mxfp4"):
        with profiled(activities=[ProfilerActivity.CUDA]) as p:
            step_us(get_task("language", "350M+bf16"), RECIPES[name], 1, "cuda", 6)
        times, calls = collections.Counter(), collections.Counter()
        longest = collections.Counter()
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                times[e.name[:70]] += e.self_device_time_total
                calls[e.name[:70]] += 1
                if "wide" in e.name:
                    longest[round(e.self_device_time_total / 10) * 10] += 1
        row(name, f"{sum(times.values()) / 1e3:.0f} ms in all")
        for kernel, us in times.most_common(24):
            row(kernel, f"{us / 1e3:.1f} ms", calls[kernel])
        row("wide kernel, µs: calls", dict(sorted(longest.items())))
        gc.collect(); torch.cuda.empty_cache()


def main():
    parts = {"check": check, "wide": time_wide, "quantizers": time_quantizers, "shares": shares, "steps": steps, "profile": profile}
    keep_freed_memory()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in sys.argv[1:] or parts:
        try:
            parts[name]()
        except Exception:
            traceback.print_exc()
            row(name, "FAILED")
        gc.collect(); torch.cuda.empty_cache()


main()
