"""Operators of Triton's interpreter without what its compiler asks at each of them.

Half of the time of a kernel that is interpreted goes into types: those of both operands are derived, scalars and blocks
made as large as each other. Where both operands have one type, or one is a number that this type holds, the rest
follows from their shapes, which NumPy makes alike by the same rules. All other cases, mistakes among them, go to the
interpreter's own operators. tests/kernels/test_quick_operators.py compares both.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

INTEGERS = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")}
FLOATS = {"fp32": np.dtype("float32"), "fp64": np.dtype("float64")}
BOOL = {"int1": np.dtype("bool")}
_LIMITS = {name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for name, kind in INTEGERS.items()}
_WHOLE = 2**24
"""Whole numbers up to this are the same in all types of numbers."""

NUMBERS, BITS = INTEGERS | FLOATS, INTEGERS | BOOL
OPERATORS = {
    "add": (np.add, NUMBERS),
    "sub": (np.subtract, NUMBERS),
    "mul": (np.multiply, NUMBERS),
    "and": (np.bitwise_and, BITS),
    "or": (np.bitwise_or, BITS),
    "xor": (np.bitwise_xor, BITS),
    "floordiv": (lambda a, b: (a - np.fmod(a, b)) // b, INTEGERS),
    "mod": (np.fmod, INTEGERS),
}
"""Division is that of C."""

SIGNS = {"neg": (np.negative, NUMBERS), "invert": (np.invert, BITS)}
SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
LARGER = {"maximum": (np.maximum, np.fmax), "minimum": (np.minimum, np.fmin)}
"""Of integers, and of floats, where NaN is passed over; of two zeros either, as the interpreter's own."""


def quicken(scope) -> None:
    """Put the quick operators before those that the interpreter has put into Triton's language. scope: notes what was
    there before."""
    put = scope.set_attr
    for name, (function, kinds) in OPERATORS.items():
        slow, reflected = (getattr(tl.tensor, f"__{of}{name}__") for of in ("", "r"))
        quick = _operator(function, kinds, _of_pointers(slow) if name == "add" else slow)
        put(tl.tensor, f"__{name}__", quick)
        put(tl.tensor, f"__r{name}__", _reflected(function, kinds, reflected))
    for name, function in SHIFTS.items():
        put(tl.tensor, f"__{name}__", _shift(function, getattr(tl.tensor, f"__{name}__")))
    for name, (function, kinds) in SIGNS.items():
        put(tl.tensor, f"__{name}__", _of_one(function, kinds, getattr(tl.tensor, f"__{name}__")))
    put(tl.tensor, "__getitem__", _longer(tl.tensor.__getitem__))
    for name, function in COMPARISONS.items():
        put(tl.tensor, f"__{name}__", _operator(function, NUMBERS, getattr(tl.tensor, f"__{name}__"), tl.int1))
    for name, functions in LARGER.items():
        quick = _larger(*functions, getattr(tl, name))
        put(tl, name, quick)
        put(tl.core, name, quick)
    quick = _where(tl.where)
    put(tl, "where", quick)
    put(tl.core, "where", quick)
    put(tl.tensor, "to", _to(tl.tensor.to))


def of_words(function):
    """A function of arrays of words, int32, as one of tensors: what a device has one instruction for, and takes many
    operators."""

    def of_tensors(*operands):
        arrays = [x.handle.data if type(x) is tl.tensor else np.int64(x).astype(np.int32) for x in operands]
        assert all(array.dtype == np.int32 for array in arrays)
        return _made(function(*arrays), tl.int32, tl.int32, *operands)

    return of_tensors


def _made(data, kind, of_handle, *operands):
    """A tensor with elements of a kind, of the shape that the operands have together."""
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, of_handle, {}
    is_block = False
    for like in operands:
        if type(like) is tl.tensor and type(like.type) is tl.block_type:
            is_block = True
            if like.handle.data.shape == data.shape:
                made = tl.tensor.__new__(tl.tensor)
                made.type = like.type if like.dtype is kind else tl.block_type(kind, list(data.shape))
                made.handle, made.dtype, made.shape, made.numel = handle, kind, like.shape, like.numel
                return made
    return tl.tensor(handle, tl.block_type(kind, list(data.shape)) if is_block else kind)


def _value(y, name):
    """The number y where elements of this name hold it, else None."""
    if type(y) is tl.constexpr:
        y = y.value
    kind = type(y)
    if kind is int:
        if name in _LIMITS:
            lowest, highest = _LIMITS[name]
            return y if lowest <= y <= highest else None
        return y if name in FLOATS and -_WHOLE <= y <= _WHOLE else None
    return y if kind is float and name in FLOATS else None


def _array(x, kinds):
    """The array of a tensor whose elements are of these kinds, else None."""
    data = x.handle.data
    return data if data.dtype is kinds.get(x.dtype.name) else None


def _right(x, y, kinds):
    """What NumPy takes for y beside a tensor x: an array of the same kind, or a number; else None."""
    if type(y) is tl.tensor:
        return _array(y, kinds) if y.dtype.name == x.dtype.name else None
    return _value(y, x.dtype.name)


def _operator(function, kinds, slow, result=None):
    """result: of comparisons, the kind of their elements."""

    def operator(x, y):
        a = _array(x, kinds)
        b = None if a is None else _right(x, y, kinds)
        return slow(x, y) if b is None else _made(function(a, b), result or x.dtype, x.handle.dtype, x, y)

    return operator


def _reflected(function, kinds, slow):
    """With a number on the left of a tensor x."""

    def operator(x, y):
        b = None if (a := _array(x, kinds)) is None else _value(y, x.dtype.name)
        return slow(x, y) if b is None else _made(function(b, a), x.dtype, x.dtype, x)

    return operator


def _shift(function, slow):
    """By a number of bits that elements have."""

    def shift(x, y):
        a, bits = _array(x, INTEGERS), y.value if type(y) is tl.constexpr else y
        if a is None or type(bits) is not int or not 0 <= bits < 8 * a.itemsize:
            return slow(x, y)
        return _made(function(a, bits), x.dtype, x.handle.dtype, x)

    return shift


def _of_one(function, kinds, slow):
    def operator(x):
        a = _array(x, kinds)
        return slow(x) if a is None else _made(function(a), x.dtype, x.handle.dtype, x)

    return operator


def _longer(slow):
    """A block with more axes: `x[:, None]`."""

    def getitem(x, axes):
        plain = type(axes) is tuple and type(x.type) is tl.block_type and type(x.handle.data) is np.ndarray
        if not plain or any(axis is not None and axis != slice(None) for axis in axes):
            return slow(x, axes)
        if axes.count(None) + len(x.shape) != len(axes):
            return slow(x, axes)
        data = x.handle.data[axes]
        return tl.tensor(TensorHandle(data, x.handle.dtype.scalar), tl.block_type(x.dtype, list(data.shape)))

    return getitem


def _of_pointers(slow):
    """Pointers and whole numbers to go on by."""

    def add(x, y):
        if type(x.dtype) is not tl.pointer_type:
            return slow(x, y)
        if type(y) is tl.tensor and y.dtype.name in ("int32", "int64"):
            steps = y.handle.data.astype(np.uint64)
        elif type(y) is int and 0 <= y < 2**31:
            steps = np.uint64(y)
        else:
            return slow(x, y)
        width = np.uint64(max(1, x.handle.get_element_ty().primitive_bitwidth // 8))
        return _made(x.handle.data + width * steps, x.dtype, x.handle.dtype, x, y)

    return add


def _larger(of_integers, of_floats, slow):
    def larger(x, y, *more, **named):
        if type(x) is tl.tensor and not more and not named:
            a = _array(x, NUMBERS)
            b = None if a is None else _right(x, y, NUMBERS)
            if b is not None:
                function = of_floats if x.dtype.name in FLOATS else of_integers
                return _made(function(a, b), x.dtype, x.handle.dtype, x, y)
        return slow(x, y, *more, **named)

    return larger


def _where(slow):
    def where(condition, x, y):
        of = x if type(x) is tl.tensor else y
        if type(of) is not tl.tensor or type(condition) is not tl.tensor or _array(condition, BOOL) is None:
            return slow(condition, x, y)
        numbers = _right(of, x, NUMBERS), _right(of, y, NUMBERS)
        if any(n is None for n in numbers):
            return slow(condition, x, y)
        a, b = (n if isinstance(n, np.ndarray) else of.handle.data.dtype.type(n) for n in numbers)
        of_handle = y.handle.dtype if type(y) is tl.tensor else of.dtype
        return _made(np.where(condition.handle.data, a, b), of.dtype, of_handle, x, y, condition)

    return where


def _to(slow):
    """Casts between whole numbers and float32, of truth to either, and what has the same bits."""
    kinds = INTEGERS | {"fp32": np.dtype("float32")}
    sources = kinds | BOOL

    def to(x, kind, fp_downcast_rounding=None, bitcast=False):
        new = None if fp_downcast_rounding is not None or type(kind) is tl.constexpr else kinds.get(kind.name)
        a = None if new is None else _array(x, kinds if bitcast else sources)
        if a is None or (bitcast and new.itemsize != a.itemsize):
            return slow(x, kind, fp_downcast_rounding, bitcast)
        if x.dtype.name == kind.name:
            return x
        return _made(a.view(new) if bitcast else a.astype(new), kind, kind, x)

    return to
