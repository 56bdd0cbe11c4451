"""The speed of the quantizers on a device, as a share of the speed at which it copies the same tensor.

Every row is first compared with the reference, bit for bit, and then timed, next to a copy measured in the same run. On
a GPU a CUDA graph of several calls is replayed, so that the time is that of the kernels alone, no tensor fits in the
cache, and medians count; for a CPU see cpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import QUANTIZERS, ConfigError, Quantizer
from fp4dse.dse.scale import SCALE_NAMES
from fp4dse.kernels import dispatch
from fp4dse.kernels.bench.clock import CALLS, copy_us, graph, median_us, named
from fp4dse.kernels.bench.conversion import conversions
from fp4dse.kernels.bench.cpu import on_cpu
from fp4dse.kernels.bench.timing import Timing, stochastic
from fp4dse.kernels.ops.philox import signs
from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of

EDGE = 8192
_BOTH: tuple[Literal["two calls", "one call"], ...] = ("two calls", "one call")


class Case(msgspec.Struct, frozen=True):
    """A row of the GPU table: lanes of a tensor of 2^26 elements.

    given: the tensor maximum is known, else it is taken from the tensor. columns: the contraction axis comes first.
    rotation: of this size, with random signs. packed: codes. both: the operands of rows and of columns, by one call or
    two.
    """

    what: str
    quantizers: tuple[Quantizer, ...]
    given: bool = True
    columns: bool = False
    rotation: int = 0
    packed: bool = False
    both: Literal["", "one call", "two calls"] = ""


def bench(device: str, only: Sequence[str] = ()) -> Iterator[Timing]:
    """The rows of a device, one after the other; of a GPU's those whose name holds one of the words, if there are any.

    ConfigError for a GPU on which the fused kernels are not taken, for words that no row has, and on a CPU, whose rows
    are measured in turn, for any.
    """
    if torch.device(device).type == "cpu":
        if only:
            raise ConfigError("--only", ", ".join(only), "nothing on a CPU, whose rows are measured in turn")
        yield from on_cpu()
        return
    if reason := dispatch.why_not_fused(device):
        raise ConfigError("device", device, f"a device with the fused kernels ({reason})")
    found = False
    with torch.cuda.device(device):
        for rows in (
            _on_gpu(torch.bfloat16, _cases(), only),
            _on_gpu(torch.float32, _cases()[:4], only),
            conversions(only),
        ):
            for row in rows:
                found = True
                yield row
    if not found:
        raise ConfigError("--only", ", ".join(only), "a part of the name of a row, such as mxfp4")


def _cases() -> list[Case]:
    nv, mx = QUANTIZERS["nvfp4"], QUANTIZERS["mxfp4"]
    mixed = tuple(QUANTIZERS[name] for name in ("nvfp4", "ue5m3-t448", "nvfp4-1716", "e4m3-b16"))
    return [
        Case("nvfp4, maximum given", (nv,)),
        Case("mxfp4", (mx,)),
        Case("nvfp4, current maximum", (nv,), given=False),
        Case("nvfp4 stochastic, maximum given", (stochastic(nv),)),
        Case("mxfp4 stochastic", (stochastic(mx),)),
        Case("mxfp4 stochastic, 8 bits", (stochastic(mx, 8),)),
        Case("ue5m3", (QUANTIZERS["ue5m3"],)),
        Case("1x32, BF16 scale", (Quantizer(block=32, scale=SCALE_NAMES["bf16"]),)),
        Case("1x16, E4M3 scale, encode convention", (Quantizer(scale=SCALE_NAMES["e4m3-encode"]),)),
        Case("nvfp4-4over6-mse, maximum given", (QUANTIZERS["nvfp4-4over6-mse"],)),
        Case("nvfp4 of columns, maximum given", (nv,), columns=True),
        Case("mxfp4 of columns", (mx,), columns=True),
        Case("nvfp4 stochastic of columns, maximum given", (stochastic(nv),), columns=True),
        *(Case(f"nvfp4 + rotation {n}, maximum given", (nv,), rotation=n) for n in (16, 128)),
        Case("nvfp4 + rotation 128, current maximum", (nv,), given=False, rotation=128),
        Case("nvfp4 + rotation 16 stochastic, maximum given", (stochastic(nv),), rotation=16),
        Case("nvfp4 + rotation 128 stochastic, maximum given", (stochastic(nv),), rotation=128),
        Case("nvfp4 + rotation 128 of columns, maximum given", (nv,), columns=True, rotation=128),
        Case("nvfp4 packed, maximum given", (nv,), packed=True),
        Case("mxfp4 packed", (mx,), packed=True),
        Case("nvfp4 packed, of columns, maximum given", (nv,), columns=True, packed=True),
        *(Case(f"nvfp4 of rows and columns, {n}", (nv,), both=n) for n in _BOTH),
        *(Case(f"nvfp4 of rows and columns, packed, {n}", (nv,), packed=True, both=n) for n in _BOTH),
        Case("256 lanes, one recipe", (nv,) * 256),
        Case("256 lanes, four recipes", mixed * 64),
        Case("256 lanes, one recipe, stochastic", (stochastic(nv),) * 256),
        Case("256 lanes, four recipes, half stochastic", (*mixed, *map(stochastic, mixed)) * 32),
    ]


def _on_gpu(dtype: torch.dtype, cases: Sequence[Case], only: Sequence[str]) -> Iterator[Timing]:
    x = torch.randn(EDGE, EDGE, device="cuda").to(dtype)
    word = str(dtype).removeprefix("torch.")
    cases = [case for case in cases if named(f"{word}: {case.what}", only)]
    if not cases:
        return
    copy = copy_us(x)
    yield Timing(f"{word}: copy", copy, 2 * x.nbytes / copy / 1e3, 1.0, 0)
    for case in cases:
        lanes = len(case.quantizers)
        edge = int((x.numel() // lanes) ** 0.5)
        call, wrong, nbytes = _checked(case, x.view(lanes, edge, edge))
        us = median_us(graph(call)) / CALLS
        yield Timing(f"{word}: {case.what}", us, (x.nbytes + nbytes) / us / 1e3, copy / us, wrong)


def _checked(case: Case, x: Tensor) -> tuple[Callable[[], object], int, int]:
    """The call to time, the number of outputs in which it differs from the reference, and the bytes that it writes."""
    tables = descriptor(case.quantizers, "cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    seeds = torch.arange(len(x), device="cuda")
    of_case = Call(int(case.quantizers[0].block), *tables, features_of(*tables), seeds, step, 7)
    if case.rotation:
        of_case = of_case._replace(rotation=case.rotation, signs=signs(seeds, step, step, case.rotation))
    orientations = (False, True) if case.both else (case.columns,)
    if case.given and of_case.features.tensor_scale:
        rotated = rotate(x.float(), case.rotation, 1 + (not case.columns), of_case.signs) if case.rotation else x
        of_case = of_case._replace(tensor_amax=rotated.abs().amax((1, 2)).float())

    def calls() -> list[Tensor]:
        if case.packed:
            return [t for columns in orientations for t in fused.packed(x, columns, of_case)]
        return [t for columns in orientations for t in fused.operand(x, columns, of_case, x.dtype)]

    def call() -> list[Tensor]:
        return fused.both(x, (of_case, of_case), torch.uint8 if case.packed else x.dtype)

    chosen = call if case.both == "one call" else calls
    got = chosen()
    expected: list[Tensor] = []
    for columns in orientations:
        if case.packed:
            expected += unfused.packed(x, columns, of_case, case.quantizers)
        else:
            expected += unfused.operand(x, columns, of_case)
    wrong = sum(int((a != b.to(a.dtype)).sum().item()) for a, b in zip(got, expected, strict=True))
    return chosen, wrong, sum(t.nbytes for t in got)
