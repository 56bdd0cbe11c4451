"""The C++ of cpp/ (native_library.py), called lane by lane: the fast path of training on a CPU.

A step on a CPU is bound by passes over tensors, by transposing what a product contracts over its rows, and by the calls
themselves. A function here reads an operand in the orientation that it has, keeps a lane in the cache from the first
read to the last write, and costs a few microseconds to call. Its specification is the reference, whose bits it has.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.kernels.native_library import CODECS, SOURCES, Arguments, library
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.ops.rounded.copies import Copies
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import FLOATS
from fp4dse.kernels.quant.reading import columns_read_in_cpp
from fp4dse.kernels.quant.spec.codecs import Encoded
from fp4dse.kernels.quant.spec.codecs.dialects import NEAREST

OPERAND_CODECS = ("block", "table")
"""Those that `operand` has, in either orientation."""
BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Blocks that it takes. Eight elements share a counter."""
META: dict[str, dict[str, tuple[torch.dtype, int]]] = {
    "macro": {"factor": (torch.float32, 0)},
    "split": {"scale_positive": (torch.float32, 1), "scale_negative": (torch.float32, 1)},
    "hif4": {"e1_8": (torch.uint8, 8), "e1_16": (torch.uint8, 16)},
    "if4": {"integer": (torch.bool, 1)},
    "mixfp4": {"e1m2": (torch.bool, 1)},
    "razer": {"special": (torch.float32, 1)},
    "dialects": {"dialect": (torch.int64, 1)},
}
"""Stored by codecs beside elements and scales (`codecs.Encoded.meta`): its dtype, and how many a block; 0: one for
each macro block."""
BESIDE = ("ema", "scale_stochastic")
"""Columns of lanes that need tensors which a call record does not carry: a guide, random bits of scales."""

SERIAL = 1 << 16
"""Elements that are not worth a second thread."""


@cache
def why_not_native() -> str | None:
    """The reason why the library cannot be had, or None if it can: it is then built and loaded."""
    if os.environ.get("FP4DSE_EAGER"):
        return "native code not taken: FP4DSE_EAGER is set"
    try:
        library()
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"native code not taken: {' '.join(said.split())[:200]}"
    return None


@cache
def heeded(codec: str) -> frozenset[str]:
    """Columns of the descriptor tables that the code of a codec reads; lanes that need another one are not for it."""
    return columns_read_in_cpp("\n".join(file.read_text() for file in SOURCES), ("quantize", codec))


def takes(x: Tensor) -> bool:
    """True if functions of this module are taken for x on a CPU: numbers, or the keys of random ones."""
    return x.dtype in (torch.float32, torch.int64) and why_not_native() is None


def operand(x: Tensor, columns: bool, call: Call, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The result of `quant.triton.operators.operand`, as float32, where nothing is to be rotated.

    Lanes need no columns but those that are `heeded`, and none of BESIDE. Of columns the values are a view, [L, R, C]
    of [L, C, R].
    """
    if dtype != torch.float32 or call.rotation or call.codec not in OPERAND_CODECS or call.block not in BLOCKS:
        found = f"{dtype}, rotation {call.rotation}, codec {call.codec}, block {call.block}"
        accepted = f"float32, 0, {' or '.join(OPERAND_CODECS)}, one of {', '.join(map(str, BLOCKS))}"
        raise ValueError(f"operand: found {found}; accepted: {accepted}")
    x = x.to(torch.float32)
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    rows, width = x.mT.shape[1:] if columns else x.shape[1:]
    shape = {"rows": rows, "width": width, "block": call.block, "columns": columns}
    tensors = {"amax": call.tensor_amax, "seeds": call.seeds}
    at = {"step": int(call.step), "site": call.site, "stream": STREAMS["rounding"]}
    out, _, _, dec = _quantize(x, call.codec, call.floats, call.ints, tensors, True, **shape, **at)
    return out.mT if columns else out, dec


def by_scales(
    x: Tensor,
    call: Call,
    _dtype: torch.dtype = torch.float32,
    *,
    factors: int = 1,
    unpadded: int | None = None,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The result of `quant.triton.by_scales.by_scales`, as float32, of all CODECS.

    tensors: guide and scale_random, as in `reference.quantize_blocks`.
    """
    tensors |= {"amax": call.tensor_amax, "seeds": call.seeds}
    at = {"step": int(call.step), "site": call.site, "stream": STREAMS["rounding"]}
    more = {"factors": factors, "unpadded": unpadded or x.shape[2], **at}
    out, _, _, dec = _quantize(x, call.codec, call.floats, call.ints, tensors, True, **_as_rows(x), **more)
    return out, dec


def quantize_blocks(
    x: Tensor,
    floats: Tensor,
    ints: Tensor,
    random: Tensor | None = None,
    _adaptive: bool = False,
    *,
    codec: str = "block",
    factors: int = 1,
    tensor_amax: Tensor | None = None,
    unpadded: int | None = None,
    **tensors: Tensor | None,
) -> tuple[Encoded, Tensor]:
    """`reference.quantize_blocks`. Whether some lane is adaptive the tables say too."""
    tensors |= {"amax": tensor_amax, "random": random}
    more = {"factors": factors, "unpadded": unpadded or x.shape[2]}
    q, scale, meta, dec = _quantize(x, codec, floats, ints, tensors, False, **_as_rows(x), **more)
    assert scale is not None  # where q is not decoded
    return Encoded(q, scale, meta), dec


def _as_rows(x: Tensor) -> dict[str, int]:
    """Blocks [L, n, B] as an operand."""
    return {"rows": x.shape[1], "width": x.shape[2], "block": x.shape[2]}


def _quantize(
    x: Tensor,
    codec: str,
    floats: Tensor,
    ints: Tensor,
    tensors: dict[str, Tensor | None],
    decoded: bool,
    factors: int = 1,
    **numbers: int,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
    """q · scale if it is to be `decoded`, else q, scale and what else is stored; decode factors [L], or [L, factors].

    tensors, numbers: other fields of CALL.
    """
    lanes, block = len(x), numbers["block"]
    n = numbers["rows"] * numbers["width"] // block
    part = n // factors * block
    wrong = {"hif4": block != 64, "macro": bool(MACRO_BLOCK % block or part % MACRO_BLOCK)}
    if n % factors or wrong.get(codec):
        found = f"{n} blocks of {block} in {factors} parts of codec {codec}"
        raise ValueError(f"blocks: found {found}; accepted: equal parts; of 64 for hif4; whole macro blocks for macro")
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    dec = torch.empty(lanes) if factors == 1 else torch.empty(lanes, factors)
    given = {"x": x, "floats": floats, "ints": ints.contiguous(), "out": torch.empty(x.shape), "dec": dec}
    if codec == "table":
        given |= {"floats": floats[:, : len(FLOATS)], "levels": floats[:, len(FLOATS) :].contiguous()}
    given["floats"] = given["floats"].contiguous()
    if codec == "dialects":
        given["nearest"] = NEAREST
    for name, tensor in tensors.items():
        if tensor is not None:
            given[name] = (tensor.to(torch.int16) if "random" in name else tensor).contiguous()
    scales = n * block if codec == "split" else n
    metas = {} if decoded else META.get(codec, {})
    if not decoded:
        given["scale"] = torch.empty(x.shape if codec == "split" else (lanes, n))
    for number, (_, each) in enumerate(metas.values(), 1):
        numbers[f"metas{number}"] = count = each * n if each else n * block // MACRO_BLOCK
        given[f"meta{number}"] = torch.empty(lanes, count)
    numbers |= {"stride": x.stride(0), "codec": CODECS.index(codec), "decoded": decoded, "scales": scales}
    arguments = Arguments(factors=factors, **numbers, **{name: tensor.data_ptr() for name, tensor in given.items()})
    _over(lanes, x.numel(), library().quantize, ctypes.byref(arguments))
    meta = {}
    for number, (name, (dtype, each)) in enumerate(metas.items(), 1):
        values = given[f"meta{number}"].to(dtype)
        meta[name] = values.view(lanes, n, each) if each > 1 else values
    return given["out"], given.get("scale"), meta, dec


def words(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """`philox.words`."""
    out = torch.empty(len(seeds), count, 4, dtype=torch.int32)
    at = stream, int(step), int(site), int(first), count, out.data_ptr()
    _over(len(seeds), out.numel(), library().words, seeds.contiguous().data_ptr(), *at)
    return out


def adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
    copies: Copies | None = None,
) -> None:
    """`ops.adamw`, in place."""
    tensors = flat, mean, square, gradient.contiguous(), alive, numbers.contiguous(), decaying
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    _over(len(flat), flat.numel(), library().adamw, *pointers, flat.shape[1])
    if copies is not None:
        copies.refresh(changed=True)


def silu(x: Tensor) -> Tensor:
    """`ops.silu` of float32 x, without a gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _over(x.numel(), x.numel(), library().silu, x.data_ptr(), out.data_ptr())
    return out


def silu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of silu(x)."""
    x, g = x.contiguous(), g.contiguous()
    out = torch.empty_like(x)
    _over(x.numel(), x.numel(), library().silu_gradient, x.data_ptr(), g.data_ptr(), out.data_ptr())
    return out


def orthonormal(rows: Tensor) -> Tensor:
    """`quant.spec.low_rank.orthonormal`."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    lanes, count, n = rows.shape
    _over(lanes, count * rows.numel(), library().orthonormal, rows.data_ptr(), out.data_ptr(), count, n)
    return out


def _over(count: int, elements: int, function: Callable[..., None], *arguments: Any) -> None:
    """The function over `count` lanes or elements, in as many parts as there are threads."""
    threads = torch.get_num_threads() if elements > SERIAL else 1
    if threads == 1:
        function(*arguments, 0, count)
        return
    ends = [count * n // threads for n in range(threads + 1)]
    parts = [_threads(threads, os.getpid()).submit(function, *arguments, *ends[n : n + 2]) for n in range(threads)]
    for part in parts:
        part.result()


@cache
def _threads(count: int, _pid: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(count)
