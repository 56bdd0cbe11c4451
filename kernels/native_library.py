"""The library of cpp/: what its sources are compiled with, and the record that it takes; built for this processor, kept
and loaded.

It is built once, in five seconds, and kept in the user's cache folder under a name that follows from the sources, the
compiler and the processor. What lies there and is not whole is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fp4dse.dse.formats import ELEMENTS, SMALLEST
from fp4dse.dse.program.cache import cache_folder
from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.kernels import compiling
from fp4dse.kernels.ops.adamw import NUMBERS
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, LEVELS

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
MAIN = Path(__file__).with_name("cpp") / "native.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
CODECS = (
    *("block", "table", "softmax", "quest", "sawb", "macro", "split", "eden", "hif4", "if4"),
    *("mixfp4", "razer", "dialects", "radix4", "exact"),
)
"""Those of `codecs.CODECS` that are here: the names of functions of cpp/codecs.h."""
_KINDS = {
    "int64_t": (
        *("stride", "rows", "width", "block", "columns", "unpadded", "codec", "factors", "decoded"),
        *("step", "site", "stream", "scales", "metas1", "metas2"),
    ),
    "const float*": ("x", "amax", "guide", "nearest"),
    "const Floats*": ("floats",),
    "const Ints*": ("ints",),
    "const Levels*": ("levels",),
    "const int64_t*": ("seeds",),
    "const uint16_t*": ("random", "scale_random"),
    "float*": ("out", "dec", "scale", "meta1", "meta2"),
}
CALL = {name: kind for kind, names in _KINDS.items() for name in names}
"""The fields of what `quantize` in cpp/native.cpp is called with, and their types. A pointer to nothing is null.

x                     lanes `stride` numbers apart, each [rows, width], or [width, rows] of `columns`
block                 numbers along width that share a scale, of which so many are not padding (`unpadded`)
codec                 its place in CODECS
floats, ints, levels  descriptor tables, a row a lane; levels of codec `table`
factors, amax         parts of a lane with a tensor factor each; their maxima [lanes, factors], or null for those of x
guide                 as x, without gaps; nearest: `dialects.NEAREST`
random, scale_random  of the elements as x lies, without gaps, and [lanes, n] of the scales
seeds …               or keys that the random bits of the elements are drawn by
out, dec              as x, without gaps: q · scale if it is to be `decoded`, else q; and [lanes, factors]
scale, meta1, meta2   what else is asked for: [lanes, `scales`], [lanes, `metas1`], [lanes, `metas2`]
"""


class Arguments(ctypes.Structure):
    """CALL as C++ has it."""

    __slots__ = ()  # a field of another name is an error
    _fields_ = [(name, ctypes.c_void_p if kind.endswith("*") else ctypes.c_int64) for name, kind in CALL.items()]


@cache
def library() -> ctypes.CDLL:
    """Built if this processor has none yet, or a broken one. Raises what `why_not_native` catches if that fails."""
    file = _folder() / f"native-{_key()}.so"
    command = [_compiler(), *FLAGS, *_definitions(), "-fPIC", "-shared", "-o", str(file), str(MAIN)]
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
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.quantize.argtypes = [pointer, *[number] * 2]
    library.words.argtypes = [pointer, *[number] * 5, pointer, *[number] * 2]
    library.adamw.argtypes = [*[pointer] * 7, *[number] * 3]
    library.silu.argtypes = [*[pointer] * 2, *[number] * 2]
    library.silu_gradient.argtypes = [*[pointer] * 3, *[number] * 2]
    library.orthonormal.argtypes = [*[pointer] * 2, *[number] * 4]
    for name in ("quantize", "words", "adamw", "silu", "silu_gradient", "orthonormal"):
        getattr(library, name).restype = None
    return library


def _compiler() -> str:
    for name in os.environ.get("CXX", "g++"), "clang++":
        if found := shutil.which(name):
            return found
    raise OSError("no C++ compiler found (install g++ or set CXX)")


def _definitions() -> list[str]:
    """Definitions for the sources: columns of tables, of which their structures are made, names, and formats."""
    named = {"FLOAT_COLUMNS": FLOATS, "INT_COLUMNS": INTS, "ADAMW_NUMBERS": NUMBERS, "CODEC_NAMES": CODECS}
    lists = [f"-D{name}={','.join(columns)}" for name, columns in named.items()]
    fields = "".join(f"{kind} {name};" for name, kind in CALL.items())
    grid = ELEMENTS["int4"]
    numbers = {"LEVELS": str(LEVELS), "MACRO_BLOCK": str(MACRO_BLOCK), "SMALLEST": f"({SMALLEST})"}
    numbers |= {"INT4_PMIN": f"{2.0**grid.emin}f", "INT4_ULPS": f"{2.0**grid.mantissa}f", "INT4_MAX": f"{grid.max}f"}
    return [*lists, f"-DCALL_FIELDS={fields}", *(f"-D{name}={value}" for name, value in numbers.items())]


def _key() -> str:
    """A hash of all that the library depends on: source, flags, compiler and processor."""
    version = subprocess.run([_compiler(), "--version"], check=True, capture_output=True, text=True).stdout
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    text = "\n".join([*(file.read_text() for file in SOURCES), *FLAGS, *_definitions(), version, *processor])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _folder() -> Path:
    """Of the user's cache; where that cannot be written, a new one that is this process's alone: code is loaded."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="fp4dse-"))
