"""native.cpp, compiled for this processor and called lane by lane: the fast path of training on a CPU.

A step on a CPU is bound by passes over tensors, by transposing what a product contracts over its rows, and by the calls
themselves. A function here reads an operand in the orientation that it has, keeps a lane in the cache from the first
read to the last write, and costs a few microseconds to call. Its specification is the reference, whose bits it has.

The library is built once, in a second or two, and kept in the user's cache folder under a name that follows from the
source, the compiler and the processor. What lies there and is not whole is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fp4dse.dse.cache import cache_folder
from fp4dse.kernels import compiling
from fp4dse.kernels.call import Call
from fp4dse.kernels.descriptor import FLOATS, INTS, LEVELS
from fp4dse.kernels.ops.adamw import NUMBERS
from fp4dse.kernels.ops.philox import STREAMS

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
CODECS = ("block", "table")
"""Those of `codecs.CODECS` that `operand` has."""
BLOCKS = (8, 16, 32, 64, 128, 256)
"""Blocks of rows that it takes; a tile is one of up to 1024. Eight elements share a counter, halves are added."""

SERIAL = 1 << 16
"""Elements that are not worth a second thread."""


@cache
def why_not_native() -> str | None:
    """The reason why the library cannot be had, or None if it can: it is then built and loaded."""
    if os.environ.get("FP4DSE_EAGER"):
        return "native code not taken: FP4DSE_EAGER is set"
    try:
        _library()
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"native code not taken: {' '.join(said.split())[:200]}"
    return None


@cache
def heeded() -> frozenset[str]:
    """Columns of the descriptor tables that the source reads; lanes that need another one are not for it."""
    code = re.sub(r"//.*", "", SOURCE.read_text())
    return frozenset(re.findall(r"\b\w+\.(\w+)", code)) & {*FLOATS, *INTS}


def takes(x: Tensor) -> bool:
    """Whether functions of this module are taken for x."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and why_not_native() is None


def operand(x: Tensor, columns: bool, call: Call, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What `fused.operators.operand` returns, as float32, where nothing is to be rotated.

    Lanes need no columns but those that are `heeded`. Of columns the values are a view, [L, R, C] of [L, C, R].
    """
    fits = 8 <= call.block == call.block & -call.block <= 1024
    if dtype != torch.float32 or call.rotation or call.codec not in CODECS or not fits:
        found = f"{dtype}, rotation {call.rotation}, codec {call.codec}, block {call.block}"
        accepted = f"float32, 0, {' or '.join(CODECS)}, a power of two from 8 to 1024"
        raise ValueError(f"operand: found {found}; accepted: {accepted}")
    x = x.to(torch.float32)
    if x.stride()[1:] != (x.shape[2], 1):
        x = x.contiguous()
    lanes, rows, width = x.mT.shape if columns else x.shape
    out, dec = torch.empty(x.shape), torch.empty(lanes)
    amax = None if call.tensor_amax is None else call.tensor_amax.contiguous()
    levels = call.floats[:, len(FLOATS) :].contiguous() if call.codec == "table" else None
    floats, ints = call.floats[:, : len(FLOATS)].contiguous(), call.ints.contiguous()
    tensors = floats, ints, levels, amax, call.seeds.contiguous()
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    numbers = x.data_ptr(), x.stride(0), rows, width, call.block, columns
    at = int(call.step), call.site, STREAMS["rounding"], out.data_ptr(), dec.data_ptr()
    _over(lanes, x.numel(), _library().operand, *numbers, *pointers, *at)
    return out.mT if columns else out, dec


def words(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """`philox.words`."""
    out = torch.empty(len(seeds), count, 4, dtype=torch.int32)
    at = stream, int(step), int(site), int(first), count, out.data_ptr()
    _over(len(seeds), out.numel(), _library().words, seeds.contiguous().data_ptr(), *at)
    return out


def adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
) -> None:
    """`ops.adamw`, in place."""
    decaying = torch.zeros(flat.shape[1], dtype=torch.bool) if decaying is None else decaying
    tensors = flat, mean, square, gradient.contiguous(), alive, numbers.contiguous(), decaying
    pointers = [t.data_ptr() for t in tensors]
    _over(len(flat), flat.numel(), _library().adamw, *pointers, flat.shape[1])


def silu(x: Tensor) -> Tensor:
    """`ops.silu` of float32 x, without a gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _over(x.numel(), x.numel(), _library().silu, x.data_ptr(), out.data_ptr())
    return out


def silu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of silu(x)."""
    x, g = x.contiguous(), g.contiguous()
    out = torch.empty_like(x)
    _over(x.numel(), x.numel(), _library().silu_gradient, x.data_ptr(), g.data_ptr(), out.data_ptr())
    return out


def _over(count: int, elements: int, function: Callable[..., None], *arguments) -> None:
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
def _threads(count: int, pid: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(count)


@cache
def _library() -> ctypes.CDLL:
    """Built if this processor has none yet, or a broken one. Raises what `why_not_native` catches if that fails."""
    file = _folder() / f"native-{_key()}.so"
    command = [_compiler(), *FLAGS, *_columns(), "-fPIC", "-shared", "-o", str(file), str(SOURCE)]
    if not compiling.is_there(file):
        compiling.build(command, timeout=120)
    try:
        return _loaded(file)
    except (OSError, AttributeError) as error:  # another library, or a damaged one
        compiling.say_again(file, error)
        compiling.build(command, timeout=120)
        return _loaded(file)


def _loaded(file: Path) -> ctypes.CDLL:
    """The library in the file. OSError if it is none, AttributeError if a function is missing."""
    library = ctypes.CDLL(str(file))
    pointer, number, truth = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.operand.argtypes = [
        pointer,
        *[number] * 4,
        truth,
        *[pointer] * 5,
        *[number] * 3,
        *[pointer] * 2,
        *[number] * 2,
    ]
    library.words.argtypes = [pointer, *[number] * 5, pointer, *[number] * 2]
    library.adamw.argtypes = [*[pointer] * 7, *[number] * 3]
    library.silu.argtypes = [*[pointer] * 2, *[number] * 2]
    library.silu_gradient.argtypes = [*[pointer] * 3, *[number] * 2]
    for function in library.operand, library.words, library.adamw, library.silu, library.silu_gradient:
        function.restype = None
    return library


def _compiler() -> str:
    for name in os.environ.get("CXX", "g++"), "clang++":
        if found := shutil.which(name):
            return found
    raise OSError("no C++ compiler found (install g++ or set CXX)")


def _columns() -> list[str]:
    """What the source's structures are made of: the columns of the tables that it is given."""
    named = {"FLOAT_COLUMNS": FLOATS, "INT_COLUMNS": INTS, "ADAMW_NUMBERS": NUMBERS}
    return [f"-D{name}={','.join(columns)}" for name, columns in named.items()] + [f"-DLEVELS={LEVELS}"]


def _key() -> str:
    """What the library depends on: source, flags, compiler and processor."""
    version = subprocess.run([_compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    text = "\n".join([SOURCE.read_text(), *FLAGS, *_columns(), version, *processor])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _folder() -> Path:
    """Of the user's cache; where that cannot be written, a new one that is this process's alone: code is loaded."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="fp4dse-"))
