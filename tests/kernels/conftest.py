"""Where kernels are tested: Triton's interpreter, mended where it differs from a device, a CUDA device, and a CPU."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import math
import re
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from fp4dse import kernels
from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics, gemm, lanes, stage
from fp4dse.kernels.ops.fp8 import library
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from tests.kernels.quick_operators import of_words, quicken

tl = pytest.importorskip("triton.language")


KERNELS = Path(kernels.__file__).parent


def _name(file):
    """`sums` of ops/sums/triton.py, `attention_kernels` of ops/attention/kernels.py, `launch` of launch.py."""
    return {"triton": file.parent.name, "kernels": f"{file.parent.name}_kernels"}.get(file.stem, file.stem)


MODULES = {
    _name(file): ".".join(["fp4dse.kernels", *file.relative_to(KERNELS).with_suffix("").parts])
    for file in sorted(KERNELS.rglob("*.py"))
    if "\nimport triton\n" in file.read_text()
}
"""Name -> module with Triton code."""
PAIRS = "pair_columns", "pair_rows", "pair_both"


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    """Where the kernels run: `device`, and by their names the modules, or copies of them for the interpreter; `module`
    is that of `launch`."""
    compiling = request.config.pluginmanager.has_plugin("tests.kernels.compiling")
    if request.param == "cuda" or compiling:
        modules = {name: importlib.import_module(path) for name, path in MODULES.items()}
        device = "cpu" if compiling else "cuda"
        yield SimpleNamespace(device=device, module=modules["launch"], **modules)
        return
    with pytest.MonkeyPatch.context() as patch:
        modules = _interpreted(patch)
        # what the interpreter lacks: maxima that keep NaN, quick reductions, and assembly
        for module in ("trees", "blocks", "wide"):
            patch.setattr(modules[module], "plus", tl.standard._sum_combine)
        for module in ("attention_kernels", "forward"):
            patch.setattr(modules[module], "plus", tl.standard._sum_combine)
            patch.setattr(modules[module], "higher_of", tl.standard._elementwise_max)
        for module in ("backward", "codecs", "estimators", "inner", "launch", "squares", "tiles"):
            patch.setattr(modules[module], "block_maximum", _maximum_of_bits)
        patch.setattr(modules["tiles"], "pair_maximum", _maximum_of_pairs)
        patch.setattr(modules["numbers"], "toward_zero", _toward_zero)
        for name, twin in (("unknown", _same), ("opaque", _same), ("address", _address)):
            patch.setattr(modules["tiles"], name, twin)
        patch.setattr(modules["pair_both"], "unknown", _same)
        patch.setattr(modules["silu"], "quotient", _quotient)
        patch.setattr(modules["codes"], "saturated", _saturated)
        for module in ("codes", "mxfp4", *PAIRS):
            patch.setattr(modules[module], "prmt", _prmt)
        for module in ("mxfp4", *PAIRS):
            patch.setattr(modules[module], "permuted", _permuted)
        patch.setattr(modules["pairs"], "between", _between)
        for module in ("pair_tiles", "pair_rows", "pair_both"):
            patch.setattr(modules[module], "larger_of_pairs", _larger_of_pairs)
        for name, twin in (
            ("larger_pair", _larger_pair),
            ("either_of_pairs", _maximum_of_pairs),
            ("nearest_codes", _nearest_codes),
        ):
            for module in PAIRS:
                patch.setattr(modules[module], name, twin)
        for module in (
            "eights",
            "fp8",
            "max_abs",
            "messages",
            "mxfp4",
            "pair_columns",
            "pair_rows",
            "pair_both",
            "shifting",
            "wide",
        ):
            patch.setattr(modules[module], "higher", tl.standard._elementwise_max)
        patch.setattr(modules["eights"], "eight_bits", _eight_bits)
        patch.setattr(modules["shifting"], "upward", _upward)
        _mend_bfloat16(patch)
        _mend_minimum(patch)
        _mend_dot(patch)
        _mend_bounds(patch)
        with np.errstate(all="ignore"), _hastened(patch):
            yield SimpleNamespace(device="cpu", module=modules["launch"], **modules)


def _interpreted(patch):
    """Copies of the modules, each made after those that it imports."""
    paths = {path: name for name, path in MODULES.items()}
    modules = {}
    for path in paths:  # all of them before the first copy, which they would import else
        importlib.import_module(path)

    def load(path):
        if paths[path] in modules:
            return
        spec = importlib.util.find_spec(path)
        for of in re.findall(
            r"^from (fp4dse\.[\w.]+) import", inspect.getsource(importlib.import_module(path)), re.MULTILINE
        ):
            if of in paths:
                load(of)
        module = modules[paths[path]] = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, path, module)
        with pytest.MonkeyPatch.context() as while_loading:
            while_loading.setenv("TRITON_INTERPRET", "1")
            spec.loader.exec_module(module)

    for path in paths:
        load(path)
    return modules


def _maximum_of_bits(magnitude):
    """As integers NaN is larger than infinity."""
    bits = tl.reduce(magnitude.to(tl.int32, bitcast=True), 1, tl.standard._elementwise_max)
    return bits.to(tl.float32, bitcast=True)


def _maximum_of_pairs(word, axis=1):
    """One after the other, the pair of them again one word."""
    low, high = (tl.reduce(bits & 0x7FFF, axis, tl.standard._elementwise_max) for bits in (word, word >> 16))
    return low | high << 16


def _halves(word):
    """Integers of 16 bits without sign, [..., 2]."""
    return np.ascontiguousarray(word)[..., None].view(np.uint16)


def _word(halves):
    return np.ascontiguousarray(halves).view(np.int32)[..., 0]


@of_words
def _larger_pair(a, b):
    return _word(np.maximum(_halves(a), _halves(b)))


@of_words
def _larger_of_pairs(a, b):
    return _word(np.maximum(_halves(a) & 0x7FFF, _halves(b) & 0x7FFF))


@of_words
def _between(x, low, high):
    return _word(np.minimum(np.maximum(_halves(x), _halves(low)), _halves(high)))


@of_words
def _nearest_codes(x, limit, first, second, third, _MANY=False):
    """Sums have few enough digits for float32, which then rounds to whole numbers."""
    limit, *factors = ((_halves(of).astype(np.uint32) << 16).view(np.float32) for of in (limit, first, second, third))
    x = np.fmin(((_halves(x) & 0x7FFF).astype(np.uint32) << 16).view(np.float32), limit)
    a, b, c = (x * factor + np.float32(128 + 2 * n) for n, factor in enumerate(factors))
    whole = np.float32(2**23)
    rounded = np.fmin(a, np.fmin(b, c)) + whole - whole
    return _word((0x4300 + (rounded - np.float32(128)).astype(np.int32)).astype(np.uint16))


def _same(x):
    return x


def _address(start, n, apart):
    return start + n.to(tl.int64) * apart


def _quotient(a, e):
    return tl.div_rn(a, 1.0 + e)


def _saturated(x, factor, add):
    """The product is exact; NaN gives 0."""
    return tl.minimum(tl.maximum(x * factor + add, 0.0), 1.0)


def _prmt(a, b, selector):
    return _permuted(a, b, getattr(selector, "value", selector))


@of_words
def _permuted(a, b, selector):
    a, b, selector = np.broadcast_arrays(a, b, selector)
    each = np.stack([a, b], -1).view(np.uint8)
    chosen = selector[..., None] >> np.array([0, 4, 8, 12]) & 15
    found = np.take_along_axis(each, chosen & 7, -1)
    found = np.where(chosen & 8, (found >> 7) * np.uint8(255), found)
    return np.ascontiguousarray(found).view(np.int32)[..., 0]


def _toward_zero(y, power):
    """One less where the nearest lies above."""
    near = y * power
    return (near.to(tl.int32, bitcast=True) - (near / power > y).to(tl.int32)).to(tl.float32, bitcast=True)


def _upward(y, power):
    near = y * power
    return (near.to(tl.int32, bitcast=True) + (near / power < y).to(tl.int32)).to(tl.float32, bitcast=True)


def _eight_bits(x, mantissa):
    """Of numbers that FP8 has."""
    mantissa = getattr(mantissa, "value", mantissa)
    bits = (tl.abs(x) * 2.0 ** {2: -112, 3: -120}[mantissa]).to(tl.int32, bitcast=True) >> 23 - mantissa
    return (bits | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)


def _mend_bfloat16(patch):
    """The interpreter loses subnormal bfloat16 numbers, cuts off where a device rounds, and knows no NaN of FP8."""
    from triton.runtime import interpreter

    original = interpreter._convert_float
    eight = {tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}

    def convert(x, source, target, mode):
        if (source, target) == (tl.bfloat16, tl.float32):
            return x.view(np.uint16).astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            x = torch.from_numpy(np.ascontiguousarray(x).view(np.float32))
            return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if source in eight and target == tl.float32:
            codes = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8))
            return codes.view(eight[source]).to(torch.float32).numpy().view(np.uint32)
        return original(x, source, target, mode)

    patch.setattr(interpreter, "_convert_float", convert)


def _mend_minimum(patch):
    """The interpreter lets NaN through where a device takes the other number."""
    from triton.runtime import interpreter

    patch.setattr(interpreter.InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))


def _mend_dot(patch):
    """The interpreter multiplies the bits of bfloat16 numbers, as integers, and FP8 numbers with rounding."""
    from triton.runtime import interpreter

    fp8 = {tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}

    def wide(x):
        if x.dtype.scalar in fp8:
            return torch.from_numpy(np.ascontiguousarray(x.data)).view(fp8[x.dtype.scalar]).to(torch.float32)
        data = (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
        return torch.from_numpy(np.ascontiguousarray(data))

    def dot(self, a, b, d, *_):
        return interpreter.TensorHandle((wide(a) @ wide(b)).numpy() + d.data, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _mend_bounds(patch):
    """Loops whose bounds are computed: the interpreter's numbers are arrays of one element, not integers."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def mended(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", mended)


@contextmanager
def _hastened(patch):
    """Without what the interpreter does at every operation and throws away, or does again."""
    from triton.runtime import interpreter

    # it would put its functions into triton.language for every launch, and for every device function that is called
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    quicken(scope)
    patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
    patch.setattr(
        interpreter.InterpretedFunction, "__call__", lambda self, *args, **more: self.rewrite()(*args, **more)
    )
    # every integer sum and product again in int64, for an assertion that is off
    quiet = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", quiet)
    # types and shapes, of which there are few
    dtype_of = cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)
    patch.setattr(interpreter, "_get_np_dtype", lambda kind: pointer if kind.scalar.is_ptr() else dtype_of(kind.scalar))
    shape_of = cache(lambda shape: (tl.core.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))))

    def tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of(kind.shape if kind.is_block() else ())

    patch.setattr(tl.tensor, "__init__", tensor)
    size_of = cache(tl.core.validate_block_shape)

    def block(self, element_ty, shape):
        plain = type(shape) in (tuple, list) and all(type(n) is int for n in shape)
        self.element_ty, self.shape = element_ty, tuple(shape if plain else tl.core._unwrap_shape(shape))
        self.numel, self.name = size_of(self.shape), "a block"

    patch.setattr(tl.block_type, "__init__", block)
    try:
        yield
    finally:
        scope.restore()


@pytest.fixture(params=["reference", "native"])
def path(request, monkeypatch):
    """Operands quantized by the reference, and by the fast path of a CPU."""
    backend = {"reference": lambda: PLAIN, "native": _compiled}[request.param]()
    monkeypatch.setattr(lanes, "backend", lambda _: backend)


@pytest.fixture
def any_size(monkeypatch):
    """FP8 units take products of all sizes that cuBLAS takes: what the interpreter does in good time."""
    for module in (library, stage):
        monkeypatch.setattr(module, "is_taken", lambda *sizes: not any(size % 16 for size in sizes))


@pytest.fixture
def on_units(monkeypatch):
    """Numerics of two lanes of a recipe, on a CPU that is said to have FP8 units."""
    monkeypatch.setattr(gemm, "_why_not_device", lambda name, *_: None if name == "fp8-exact" else f"{name}: no")
    monkeypatch.setattr(gemm, "why_not_fused", lambda _: None)
    monkeypatch.setattr(lanes, "backend", lambda _: PLAIN)

    def made(of, lanes_=2):
        of = Recipe.named(of) if isinstance(of, str) else of
        return LaneNumerics([msgspec.structs.replace(of, gemm="fp8-exact")] * lanes_, (3, 4)[:lanes_])

    return made
