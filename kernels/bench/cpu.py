"""The CPU's rows: 4096 × 4096 float32 quantized and decoded, beside a copy and beside the peers that are installed.

Other programs share a CPU, so all calls are made in turn, round after round, and the fastest of each counts. Memory
that is freed stays with the process: asking the system for 64 MiB at every call takes several times as long as the
copy into a tensor that is there, for us and for the peers alike.

Peers do what their users call: MXFP4 (floor) in blocks of 32 or NVFP4 in blocks of 16 with a tensor scale. Libraries
that only round get their block scales from torch.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.kernels.bench.timing import Timing, stochastic
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of

EDGE, ROUNDS = 4096, 30
SLOW, SLOW_ROUNDS = 0.25, 3  # calls of more seconds are made in the first rounds only

Run = Callable[[], object]


def microxcaling(x: Tensor, rounding: str = "even") -> Run:
    """https://github.com/microsoft/microxcaling, which no package index has."""
    mx = import_module("mx.mx_ops")
    quantize = torch.compile(
        lambda x: mx._quantize_mx(x, 8, "fp4_e2m1", axes=[-1], block_size=32, round=rounding), fullgraph=True
    )
    return lambda: quantize(x)


def torchao_nvfp4(x: Tensor) -> Run:
    nvfp4 = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

    def quantize(x: Tensor) -> object:
        tensor_scale = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        scales, packed = nvfp4.nvfp4_quantize(x, per_tensor_scale=tensor_scale)
        values = nvfp4.f4_unpacked_to_f32(nvfp4.unpack_uint4(packed)).view(*scales.shape, 16)
        return (values * (tensor_scale * scales.float())[:, :, None]).view_as(x)

    compiled = torch.compile(quantize, fullgraph=True)
    return lambda: compiled(x)


def torchao_mxfp4(x: Tensor) -> Run:
    mx = import_module("torchao.prototype.mx_formats.mx_tensor")

    def call() -> object:
        scales, packed = mx.to_mx(x, torch.float4_e2m1fn_x2, 32)
        return mx.to_dtype(packed, scales, torch.float4_e2m1fn_x2, 32, torch.float32)

    return call


def qtorch(x: Tensor, rounding: str = "nearest") -> Run:
    float_quantize = import_module("qtorch.quant").float_quantize
    return lambda: by_floor_scales(x, lambda y: float_quantize(y.clamp(-6, 6), exp=2, man=1, rounding=rounding))


def gfloat(x: Tensor) -> Run:
    library, formats = import_module("gfloat"), import_module("gfloat.formats")
    return lambda: by_floor_scales(x, lambda y: library.round_ndarray(formats.format_info_ocp_e2m1, y, sat=True))


def gfloat_stochastic(x: Tensor) -> Run:
    library, formats = import_module("gfloat"), import_module("gfloat.formats")

    def round_(y: Tensor) -> Any:
        bits, mode = torch.randint(1 << 16, y.shape), library.RoundMode.StochasticFast
        return library.round_ndarray(formats.format_info_ocp_e2m1, y, mode, sat=True, srbits=bits, srnumbits=16)

    return lambda: by_floor_scales(x, round_)


def by_floor_scales(x: Tensor, round_: Callable[[Tensor], Tensor]) -> Tensor:
    """x in blocks of 32, their elements rounded by a function, the scales by MXFP4's floor rule."""
    blocks = x.view(-1, 32)
    amax = blocks.abs().amax(1, keepdim=True)
    scale = (amax.view(torch.int32) & 0x7F800000).view(torch.float32) / 4
    return (round_(blocks / scale) * scale).view_as(x)


class Peer(NamedTuple):
    """A row of another library: its package, what is timed, and how."""

    package: str
    what: str
    call: Callable[[Tensor], Run]


PEERS = (
    Peer("microxcaling", "MXFP4, compiled", microxcaling),
    Peer("microxcaling", "MXFP4 stochastic (dither), compiled", lambda x: microxcaling(x, "dither")),
    Peer("torchao", "NVFP4, compiled", torchao_nvfp4),
    Peer("torchao", "MXFP4, eager (it does not compile on a CPU)", torchao_mxfp4),
    Peer("qtorch", "MXFP4, ties away", qtorch),
    Peer("qtorch", "MXFP4 stochastic", lambda x: qtorch(x, "stochastic")),
    Peer("gfloat", "MXFP4", gfloat),
    Peer("gfloat", "MXFP4 stochastic, 16 bits", gfloat_stochastic),
)


@torch.no_grad()
def on_cpu() -> Iterator[Timing]:
    """A copy, our quantizers, each compared with the reference first, and the peers; see timing.Timing.

    A peer that is not there, or not for this machine, has a row that says so, and no time.
    """
    x = torch.randn(2, EDGE // 2, EDGE)  # two lanes for us, one matrix for the peers
    out = torch.empty_like(x)
    head = f"float32, {torch.get_num_threads()} threads: "
    calls: dict[str, Run] = {"copy": lambda: out.copy_(x)}
    wrong: dict[str, int | None] = {"copy": 0}
    for name, change in itertools.product(("nvfp4", "mxfp4"), (lambda q: q, stochastic)):
        q = change(QUANTIZERS[name])
        what = f"{q.label()}, path `{backend('cpu').name}`"
        calls[what], wrong[what] = _ours(x, q)
    missing = []
    for peer in PEERS:
        what = f"{peer.package} {_version(peer.package)}: {peer.what}"
        try:
            calls[what] = peer.call(x.view(EDGE, EDGE))
            calls[what]()
        except Exception as error:
            calls.pop(what, None)
            missing.append(Timing(f"{head}{what}: not taken, {_reason(error)}", None, None, None, None))
    extra = {what: _extra_memory(call) / x.nbytes for what, call in calls.items()}
    times = _fastest_us(calls)
    for what, us in times.items():
        memory = None if what == "copy" else extra[what]
        yield Timing(head + what, us, 2 * x.nbytes / us / 1e3, times["copy"] / us, wrong.get(what), memory)
    yield from missing


def _ours(x: Tensor, q: Quantizer) -> tuple[Run, int]:
    """The call to time, by the path that training takes, and the number of elements that are not the reference's."""
    quantize = backend("cpu").operand or unfused.operand
    tables = descriptor([q, q])
    of_q = Call(int(q.block), *tables, features_of(*tables), torch.arange(2), torch.tensor(0), 0)

    def call() -> tuple[Tensor, Tensor]:
        return quantize(x, False, of_q)

    expected = unfused.operand(x, False, of_q)
    return call, sum(int((a != b).sum()) for a, b in zip(call(), expected, strict=True))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not a package)"


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"no module {error.name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _fastest_us(calls: dict[str, Run]) -> dict[str, float]:
    """The shortest time of each call, in microseconds, over rounds in which all are called one after the other."""
    keep_freed_memory()
    best = dict.fromkeys(calls, float("inf"))
    for round_ in range(ROUNDS):
        for what, call in calls.items():
            if round_ >= SLOW_ROUNDS and best[what] > SLOW * 1e6:
                continue
            start = time.perf_counter()
            call()
            best[what] = min(best[what], (time.perf_counter() - start) * 1e6)
    return best


def _extra_memory(call: Run) -> float:
    """Bytes that the process holds at most during a call beyond what it held before, the result included; Linux."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is set back to what is held now
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A size from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
