"""The time that this project's quantized layers take on a device, at a model's shapes, beside what the cost model says.

A layer's forward and backward pass, made by the code that training runs: on a GPU the fused kernels and the fastest
exact products, on a CPU native code. These **emulate** FP4, so their times say what an experiment costs here
and what a technique adds to it, and nothing about FP4 hardware.

Recipe and BF16 take turns, each right after the other, so that what else the machine does meets both; their ratio r in
such a pair is what is sampled. The median of n independent ratios lies between the k-th smallest and the k-th largest
but for 2 · P(Binomial(n, 1/2) < k), whatever their distribution. After 16, 64, 256 and 1,024 pairs that interval is
looked at, with k such that all four looks together miss with a chance of 5 % at most; sampling ends as soon as it is
within ±2 % of the median. Where it never is, the time is not steady, and says so.

On a GPU a call is a CUDA graph, as a step of training is, and events time it: what the host does between launches is in
no figure. On a CPU a sample is the fastest of some calls, and a single thread is timed by its own clock.

    t = r · t_BF16        the median of r, the median of t_BF16
    measured = Σ (n_q · t + n_p · t_BF16) / Σ (n_q + n_p) · t_BF16        over the kinds of layers with weights

n_q layers of a kind are quantized, n_p are kept precise by the recipe. What is no layer with weights (attention core,
norms, optimizer) is not in it, and weights are quantized at every pass, not once an optimizer step.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from fp4dse.dse import Recipe
from fp4dse.dse.cost import Chip, Model
from fp4dse.dse.cost.at_place import BF16
from fp4dse.dse.cost.model import Linear
from fp4dse.dse.cost.report import layer_overhead
from fp4dse.dse.cost.step import finished, is_bf16, layers_by_recipe
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import QuantLinear

log = logging.getLogger(__name__)

Timer = Callable[[], float]
"""Repeats a call for a few ms; µs of one."""
LANES = 2
"""Times are of one: a small product of a single lane would count twice (ops/products)."""
LOOKS = (16, 64, 256, 1024)
"""Numbers of pairs after which the interval is looked at."""
MISS, STEADY = 0.05, 0.02
"""The chance that the interval of one of the looks misses, and how far its ends may be from the median, relatively."""
SAMPLE_S, MOST_S = 5e-3, 10.0
"""Seconds that a sample takes, of as many calls as that needs; and after which no more pairs are measured."""


class LayerTime(msgspec.Struct, frozen=True):
    """One kind of layer of a model: how many of its layers are quantized and how many precise, µs of one lane's forward
    and backward pass where it is quantized and with BF16 operands, and what quantized. Where rules for layers make them
    differ, a kind has several of these, each with its recipe."""

    linear: Linear
    quantized: int
    precise: int
    us: float
    bf16_us: float
    steady: bool
    backend: str
    recipe: Recipe | None = None


def layer_times(recipe: Recipe, model: Model, device: str) -> Iterator[LayerTime]:
    """Every kind of layer with weights. Seconds to minutes, the first time compilation."""
    for linear in model.linears:
        alone = msgspec.structs.replace(model, linears=[linear])
        counts = [(r, sum(n.count for n in part.linears)) for r, part in layers_by_recipe(recipe, alone)]
        precise = sum(n for r, n in counts if is_bf16(r))
        for r, quantized in [(r, n) for r, n in counts if not is_bf16(r)] or [(BF16, 0)]:
            yield LayerTime(linear, quantized, precise, *_layer_us(r, linear, model, device), recipe=r)
            precise = 0  # counted once


def measured_overhead(times: Iterable[LayerTime]) -> float:
    """The time of all layers with weights relative to BF16's: see above. NaN where a time is not steady."""
    times = list(times)
    if not all(line.steady for line in times):
        return math.nan
    mine = sum(line.quantized * line.us + line.precise * line.bf16_us for line in times)
    return mine / sum((line.quantized + line.precise) * line.bf16_us for line in times)


def layer_rows(times: Iterable[LayerTime], recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, object]]:
    """The times as lines of a table, each beside the ratio that is modelled for the chip."""
    return [
        {
            "layer": line.linear.name,
            "rows": round(model.tokens * line.linear.tokens),
            "inputs": line.linear.inputs,
            "outputs": line.linear.outputs,
            "quantized": line.quantized,
            "precise": line.precise,
            "us": line.us,
            "bf16_us": line.bf16_us,
            "measured": line.us / line.bf16_us,
            "modelled": layer_overhead(line.recipe or recipe, line.linear, model, chip) if line.quantized else 1.0,
            "steady": line.steady,
            "backend": line.backend,
        }
        for line in times
    ]


def _layer_us(recipe: Recipe, linear: Linear, model: Model, device: str) -> tuple[float, float, bool, str]:
    """µs of a pass for one lane and of a BF16 one, whether they are steady, and what quantized. A finish counts for its
    share of the steps."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(LANES, rows, columns, generator=generator, device=device)

    weight, x, g = (normal(*shape) for shape in _shapes(linear, round(model.tokens * linear.tokens)))
    x.requires_grad_()

    def step(computed: Recipe) -> tuple[Callable[[], None], str]:
        numerics = LaneNumerics([computed] * LANES, range(LANES), device)
        layer = QuantLinear(weight.clone(), None, numerics, 0)

        def run() -> None:
            x.grad = layer.weight.grad = None
            layer(x).backward(g)

        return run, numerics.backend.name

    end = recipe.finish.share if recipe.finish else 0.0
    calls = {r: step(r) for r in (recipe, finished(recipe), BF16)}  # equal ones are timed once
    timers = dict(zip(calls, _timers([call for call, _ in calls.values()], device), strict=True))
    bf16 = timers.pop(BF16)
    us, ratios, steady = _paired(bf16, list(timers.values()))
    ratio = {BF16: 1.0, **dict(zip(timers, ratios, strict=True))}
    us /= LANES
    return us * ((1 - end) * ratio[recipe] + end * ratio[finished(recipe)]), us, steady, calls[recipe][1]


def _shapes(linear: Linear, tokens: int) -> tuple[tuple[int, int], ...]:
    """Of the weight, the input and the gradient of the output."""
    return (linear.outputs, linear.inputs), (tokens, linear.inputs), (tokens, linear.outputs)


def _paired(base: Timer, others: list[Timer]) -> tuple[float, list[float], bool]:
    """Median µs of `base`, the median ratio of each of the others to it, and whether all of these are steady."""
    taken: list[list[float]] = []
    begin = time.perf_counter()
    for pairs in LOOKS:
        while len(taken) < pairs and (len(taken) < LOOKS[0] or time.perf_counter() - begin < MOST_S):
            taken.append([timer() for timer in (base, *others)])
        us = [first for first, *_ in taken]
        ratios = [sorted(own / first for first, own in zip(us, column, strict=True)) for column in _columns(taken)]
        steady = all(map(_is_steady, ratios))
        if steady or len(taken) < pairs:
            break
    return statistics.median(us), [statistics.median(found) for found in ratios], steady


def _columns(taken: list[list[float]]) -> list[tuple[float, ...]]:
    """The times of all timers but the first."""
    return list(zip(*taken, strict=True))[1:]


def _is_steady(ratios: list[float]) -> bool:
    """True if the interval of the median is narrow. ratios: sorted."""
    middle, k = statistics.median(ratios), order_statistic(len(ratios), MISS / len(LOOKS))
    return k > 0 and max(middle - ratios[k - 1], ratios[-k] - middle) <= STEADY * middle


def order_statistic(n: int, miss: float) -> int:
    """The largest k for which the k-th smallest and the k-th largest of n independent values have their median between
    them but for a chance of at most `miss`; 0 if there is none."""
    k, below = 0, 0.5**n  # P(Binomial(n, 1/2) <= k)
    while 2 * below <= miss:
        k += 1
        below += math.comb(n, k) * 0.5**n
    return k


def _timers(calls: list[Callable[[], None]], device: str) -> list[Timer]:
    """A timer of each call. On a GPU all of them as CUDA graphs, or none, with a word why."""
    for call in calls * 2:
        call()  # may compile
    if torch.device(device).type != "cuda":
        return [_timer(call, _host_s) for call in calls]
    try:
        return [_timer(_captured(call), _device_s) for call in calls]
    except RuntimeError as error:
        log.warning("timed with launches, not as CUDA graphs: %s", " ".join(str(error).split())[:200])
        return [_timer(call, _device_s) for call in calls]


def _timer(call: Callable[[], None], clock: Callable[[Callable[[], None], int], float]) -> Timer:
    times = max(1, math.ceil(SAMPLE_S / max(clock(call, 1), 1e-9)))
    return lambda: 1e6 * clock(call, times)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """A call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is made on the first call of a stream is made before
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def _host_s(call: Callable[[], None], times: int) -> float:
    """The fastest of some calls: what interrupts a call only makes it longer. One thread does not count what others
    have of its core."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    fastest = math.inf
    for _ in range(times):
        begin = clock()
        call()
        fastest = min(fastest, clock() - begin)
    return fastest


def _device_s(call: Callable[[], None], times: int) -> float:
    """The mean of some calls, one after the other on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3 / times
