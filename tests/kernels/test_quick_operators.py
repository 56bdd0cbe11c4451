"""Operators of the interpreter that tests take (quick_operators.py) do what Triton's own do: types, bits, mistakes."""

import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.conftest import _mend_minimum
from tests.kernels.quick_operators import BOOL, COMPARISONS, FLOATS, INTEGERS, LARGER, OPERATORS, SHIFTS, SIGNS, quicken

SHAPES = (), (4,), (1,), (2, 1), (2, 4), (8,)
"""Of which some are not made alike by any rule."""
NUMBERS = 0, 1, -1, 7, 31, 64, 127, 128, 255, 2**15, -(2**31), 2**31 - 1, 2**31, 2**40, 0.5, -0.0, -1e-30, 1e300
NUMBERS += float("nan"), float("inf")


@pytest.fixture(scope="module")
def language():
    """Triton's language as its interpreter has it, and the functions by their names: the interpreter's and the quick
    ones."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    names = [f"__{name}__" for name in [*OPERATORS, *(f"r{name}" for name in OPERATORS), *SHIFTS, *COMPARISONS]]
    of_tensors, of_language = [*names, *(f"__{name}__" for name in SIGNS), "__getitem__", "to"], [*LARGER, "where"]

    def functions():
        return {n: getattr(tl.tensor, n) for n in of_tensors} | {n: getattr(tl, n) for n in of_language}

    own = functions()
    quicken(scope)
    quick = functions()
    with np.errstate(all="ignore"), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        _mend_minimum(patch)  # as a device has it, in all versions
        warnings.simplefilter("ignore")
        yield own, quick
    scope.restore()


KINDS = [*INTEGERS, *FLOATS, *BOOL, "fp16", "bf16"]


def made(name, shape, seed=0):
    """A tensor of this kind with all that it holds among its numbers."""
    kind = getattr(tl, name.replace("bf", "bfloat") if name == "bf16" else name.replace("fp", "float"))
    rng = np.random.default_rng([seed, len(shape), *shape])
    of = (INTEGERS | FLOATS | BOOL | {"fp16": np.dtype("float16"), "bf16": np.dtype("uint16")})[name]
    data = rng.integers(0, 256, (*(shape or (1,)), of.itemsize), dtype=np.uint8).view(of)[..., 0]
    data = data if name not in BOOL else rng.integers(0, 2, shape or (1,)).astype(bool)
    if name in FLOATS:
        odd = np.array(["nan", "inf", "-inf", "0", "-0", "1e-310" if of.itemsize == 8 else "1e-40"]).astype(of)
        usual = rng.standard_normal(data.shape).astype(of)
        data = np.where(rng.integers(0, 2, data.shape) == 0, rng.choice(odd, data.shape), usual)
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(function, signless, *arguments, **more):
    """What a call gives, in parts that can be compared, zeros without their sign if asked for; of one that fails what
    kind of mistake it is."""
    try:
        x = function(*arguments, **more)
    except Exception as error:  # whatever Triton says
        return type(error)
    if not isinstance(x, tl.tensor):
        return x
    data = x.handle.data
    if signless and data.dtype.kind == "f":
        data = data + 0.0  # of -0.0 as of 0.0
    numbers = data.dtype, data.shape, data.tobytes()
    return str(x.type), str(x.dtype), [int(n.value) for n in x.shape], x.numel.value, str(x.handle.dtype), *numbers


def assert_same(language, name, *arguments, **more):
    own, quick = (outcome(functions[name], name in LARGER, *arguments, **more) for functions in language)
    assert own == quick, (name, arguments, more)


@pytest.mark.parametrize("name", [*OPERATORS, *SHIFTS, *COMPARISONS, *LARGER])
def test_two_operands_of_all_kinds_and_shapes(language, name):
    of = name if name in LARGER else f"__{name}__"
    for first, second in itertools.product(KINDS, KINDS):
        all_shapes = first == second and first in ("int32", "fp32", "int1")
        shapes = itertools.product(SHAPES, SHAPES) if all_shapes else [((2, 4), (2, 4))]
        for a, b in shapes:
            assert_same(language, of, made(first, a), made(second, b, 1))


@pytest.mark.parametrize("name", [*OPERATORS, *SHIFTS, *COMPARISONS, *LARGER])
def test_a_tensor_and_a_number_on_either_side(language, name):
    sides = [name] if name in LARGER else [f"__{name}__", *[f"__r{name}__"] * (name in OPERATORS)]
    for kind, number, side in itertools.product(KINDS, (*NUMBERS, True), sides):
        assert_same(language, side, made(kind, ()), tl.constexpr(number))
        assert_same(language, side, made(kind, (2, 4)), number)


def test_pointers_go_on_by_whole_numbers(language):
    kind = tl.pointer_type(tl.int16)
    for shape, steps in itertools.product(SHAPES, ("int32", "int64", "uint32", "int8", "fp32", "int1")):
        data = np.full(shape or (1,), 2**40, np.uint64)
        x = tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)
        for other in (made(steps, (2, 4)), made(steps, ()), 5, -5, 2**31, 0.5, tl.constexpr(3), x):
            for name in ("__add__", "__radd__", "__sub__", "__and__", "__eq__"):
                assert_same(language, name, x, other)


def test_where(language):
    for condition, x, y in itertools.product(SHAPES, SHAPES, SHAPES):
        assert_same(language, "where", made("int1", condition), made("fp32", x), made("fp32", y, 1))
    for kind, other, (first, second) in itertools.product(KINDS, KINDS, [((2, 4), (2, 1)), ((), (2, 4))]):
        assert_same(language, "where", made("int1", (2, 4)), made(kind, first), made(other, second, 1))
    for kind, number in itertools.product(KINDS, NUMBERS):
        assert_same(language, "where", made("int1", (2, 4)), made(kind, (2, 1)), number)
        assert_same(language, "where", made("int1", (2, 4)), number, made(kind, ()))
        assert_same(language, "where", made("int1", (4,)), number, 1)
        assert_same(language, "where", made(kind, (4,)), 3, number)


def test_casts(language):
    for kind, to, shape in itertools.product(KINDS, KINDS, ((), (2, 4))):
        x, new = made(kind, shape), made(to, ()).dtype
        assert_same(language, "to", x, new)
        assert_same(language, "to", x, new, bitcast=True)
        assert_same(language, "to", x, new, None, True)
        assert_same(language, "to", x, new, fp_downcast_rounding="rtne")


def test_one_operand(language):
    rest, every = (None, slice(None)), itertools.product
    for kind, shape in every(KINDS, SHAPES):
        x = made(kind, shape)
        for name in SIGNS:
            assert_same(language, f"__{name}__", x)
        for axes in [*every(rest, rest), *every(rest, rest, rest), None, slice(None), (0, None), (slice(1), None)]:
            assert_same(language, "__getitem__", x, axes)


def test_what_kernels_do_most_is_quick(language, monkeypatch):
    """None of it comes to Triton's own operators."""
    _, quick = language

    def failing(*_, **__):
        raise AssertionError("the interpreter's own")

    monkeypatch.setattr(interpreter.TritonSemantic, "binary_op_type_checking_impl", failing)
    monkeypatch.setattr(interpreter.TritonSemantic, "cast", failing)
    x, y, condition = made("int32", (2, 4)), made("int32", (2, 1)), made("int1", (2, 4))
    for name in [*OPERATORS, *SHIFTS, *COMPARISONS]:
        for other in (5, *[y] * (name not in SHIFTS)):
            assert isinstance(quick[f"__{name}__"](x, other), tl.tensor)
    for name in LARGER:
        assert quick[name](x, y).type == quick[name](x, 3).type
    assert quick["where"](condition, x, 0).type == quick["where"](condition, x, y).type
    assert quick["to"](x, tl.float32).dtype == tl.float32
