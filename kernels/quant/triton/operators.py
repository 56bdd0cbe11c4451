"""The fused GPU kernels as PyTorch operators, for torch.compile and CUDA graphs too.

Operators are flat: each has one wrapper, which takes the call record, and is called by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.ops.fp8 import History, Shift, empty
from fp4dse.kernels.quant.call import Call, schema, unflat
from fp4dse.kernels.quant.triton.limits import span, why_not_form, why_not_operand


def operand(x: Tensor, columns: bool, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` with `philox.random16`: the operand [L, R, C] as `dtype`, decode factors float32 [L].

    x: float32 or bfloat16, [L, R, C], or [L, C, R] where `columns`; blocks lie along C, which they divide.
    dtype: float32 or bfloat16 (one rounding). The codec is one of `limits.CODECS`; but for `eden`, no lane rounds
    scales stochastically. Raises ValueError for what the kernels do not take.
    """
    return _operand(x, columns, dtype, *call)


@torch.library.custom_op(
    "fp4dse::operand",
    mutates_args=(),
    schema=f"(Tensor x, bool columns, ScalarType dtype, {schema()}) -> (Tensor, Tensor)",
)
def _operand(x: Tensor, columns: bool, dtype: torch.dtype, *of_call: Any) -> tuple[Tensor, Tensor]:
    call = unflat(of_call)
    _check(x, columns, call, dtype)
    out, dec = _decoded(x, columns, dtype)
    _run(x, columns, call, (out, None, dec))
    return out, dec


@_operand.register_fake
def _(x: Tensor, columns: bool, dtype: torch.dtype, *_: Any) -> tuple[Tensor, Tensor]:
    return _decoded(x, columns, dtype)


def fp8(x: Tensor, columns: bool, call: Call, dtype: torch.dtype, history: History) -> tuple[Tensor, Shift, Tensor]:
    """The operand in FP8: `ops.fp8.to_fp8` of what `operand` makes, values and shift, and decode factors float32 [L].

    Arguments as in `operand`, but dtype: E4M3 or E5M2. history: of the same step as `call`.
    """
    if history.step is not call.step:
        raise ValueError("history: found a step of its own; accepted: the tensor of the call")
    values, *shift, dec = _fp8(x, columns, dtype, history.tops, history.training, *call)
    return values, Shift(*shift), dec


@torch.library.custom_op(
    "fp4dse::fp8",
    mutates_args=("tops",),
    schema=f"(Tensor x, bool columns, ScalarType dtype, Tensor(a!) tops, bool training, {schema()}) -> Tensor[]",
)
def _fp8(x: Tensor, columns: bool, dtype: torch.dtype, tops: Tensor, training: bool, *of_call: Any) -> list[Tensor]:
    from fp4dse.kernels.quant.triton.launch import launch_fp8

    call = unflat(of_call)
    _check(x, columns, call, torch.bfloat16)
    with torch.cuda.device_of(x):
        values, shift, dec = launch_fp8(x, columns, _ready(x, columns, call), dtype, History(tops, call.step, training))
    return [values, *shift, dec]


@_fp8.register_fake
def _(x: Tensor, columns: bool, dtype: torch.dtype, *rest: Any) -> list[Tensor]:
    from fp4dse.kernels.quant.triton.launch import programs_of_fp8

    shape = x.mT.shape if columns else x.shape
    values, shift = empty(x, shape, dtype, programs_of_fp8(x, columns, unflat(rest[2:])))
    return [values, *shift, x.new_empty(len(x), dtype=torch.float32)]


def both_fp8(
    x: Tensor, calls: tuple[Call, Call], dtypes: tuple[torch.dtype, torch.dtype], histories: tuple[History, History]
) -> list[tuple[Tensor, Shift, Tensor]]:
    """The results of `fp8` for the rows of x [L, R, C] and for its columns, each of its dtype and history; from one
    read of x where `pair_both.are_paired`.

    calls: for rows and for columns, of the same seeds and step, which histories have, too; ValueError for others.
    """
    (rows, columns), (of_rows, of_columns) = calls, histories
    if rows.seeds is not columns.seeds or any(of.step is not rows.step for of in (columns, *histories)):
        raise ValueError("calls, histories: found seeds or steps of their own; accepted: the same tensors in all")
    if of_rows.training != of_columns.training:
        raise ValueError("histories: found one that is written and one that is not; accepted: two of one kind")
    found = _both_fp8(x, *dtypes, of_rows.tops, of_columns.tops, of_rows.training, *rows, *columns)
    return [(values, Shift(*shift), dec) for values, *shift, dec in (found[:6], found[6:])]


@torch.library.custom_op(
    "fp4dse::both_fp8",
    mutates_args=("tops_rows", "tops_columns"),
    schema="(Tensor x, ScalarType dtype_rows, ScalarType dtype_columns, Tensor(a!) tops_rows, Tensor(b!) tops_columns, "
    f"bool training, {schema('_rows')}, {schema('_columns')}) -> Tensor[]",
)
def _both_fp8(
    x: Tensor,
    dtype_rows: torch.dtype,
    dtype_columns: torch.dtype,
    tops_rows: Tensor,
    tops_columns: Tensor,
    training: bool,
    *of_calls: Any,
) -> list[Tensor]:
    from fp4dse.kernels.quant.triton.launch import launch_both_fp8

    calls = _two(of_calls)
    for columns, call in enumerate(calls):
        _check(x, bool(columns), call, torch.bfloat16)
    with torch.cuda.device_of(x):
        ready = [_ready(x, bool(columns), call) for columns, call in enumerate(calls)]
        histories = [History(tops, calls[0].step, training) for tops in (tops_rows, tops_columns)]
        made = launch_both_fp8(x, ready, (dtype_rows, dtype_columns), histories)
    return [t for values, shift, dec in made for t in (values, *shift, dec)]


@_both_fp8.register_fake
def _(x: Tensor, dtype_rows: torch.dtype, dtype_columns: torch.dtype, *rest: Any) -> list[Tensor]:
    from fp4dse.kernels.quant.triton.launch import programs_of_both_fp8

    programs = programs_of_both_fp8(x, _two(rest[3:]))
    shapes, dtypes = (x.shape, x.mT.shape), (dtype_rows, dtype_columns)
    made = [empty(x, *of) for of in zip(shapes, dtypes, programs, strict=True)]
    return [t for values, shift in made for t in (values, *shift, x.new_empty(len(x), dtype=torch.float32))]


def packed(x: Tensor, columns: bool, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The operand as stored: codes uint8 [L, R, C/2], scale codes uint8 [L, R, C/B], decode factors float32 [L].

    Arguments as in `operand`; `packed.py` has the layout. For tables of quantizers that `packed.why_not_packed` takes,
    whose elements have `limits.MAGNITUDES`.
    """
    return _packed(x, columns, *call)


@torch.library.custom_op(
    "fp4dse::packed", mutates_args=(), schema=f"(Tensor x, bool columns, {schema()}) -> (Tensor, Tensor, Tensor)"
)
def _packed(x: Tensor, columns: bool, *of_call: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = unflat(of_call)
    _check(x, columns, call, torch.float32, ("block",))
    outputs = _codes(x, columns, call)
    _run(x, columns, call, outputs)
    return outputs


@_packed.register_fake
def _(x: Tensor, columns: bool, *of_call: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _codes(x, columns, unflat(of_call))


def both(x: Tensor, calls: tuple[Call, Call], dtype: torch.dtype) -> list[Tensor]:
    """The results of `operand` for the rows of x and for its columns, one after the other, from one read of x [L, R,
    C].

    calls: for rows and for columns, of the same seeds and step; ValueError for others. dtype: also torch.uint8, for
    what `packed` returns. Where neither is rotated they share one tensor maximum.
    """
    rows, columns = calls
    if rows.seeds is not columns.seeds or rows.step is not columns.step:
        raise ValueError("calls: found seeds or steps of their own; accepted: the same tensors in both")
    return _both(x, dtype, *rows, *columns)


@torch.library.custom_op(
    "fp4dse::both",
    mutates_args=(),
    schema=f"(Tensor x, ScalarType dtype, {schema('_rows')}, {schema('_columns')}) -> Tensor[]",
)
def _both(x: Tensor, dtype: torch.dtype, *of_calls: Any) -> list[Tensor]:
    from fp4dse.kernels.quant.triton.launch import launch_both, tensor_maxima

    x, calls = x.contiguous(), [_for_lanes(call, len(x)) for call in _two(of_calls)]
    for columns, call in enumerate(calls):
        _check(x, bool(columns), call, torch.float32 if dtype == torch.uint8 else dtype, ("block",))
    outputs = _outputs(x, calls, dtype)
    with torch.cuda.device_of(x):
        shared = all(call.features.tensor_scale and call.tensor_amax is None and not call.rotation for call in calls)
        maxima = tensor_maxima(x) if shared else None
        for n, call in enumerate(calls):
            if call.features.tensor_scale and call.tensor_amax is None:
                amax = tensor_maxima(x, n == 1, call.rotation, call.signs) if maxima is None else maxima
                calls[n] = call._replace(tensor_amax=amax)
        launch_both(x, calls, outputs)
    return [t for of_one in outputs for t in of_one]


@_both.register_fake
def _(x: Tensor, dtype: torch.dtype, *of_calls: Any) -> list[Tensor]:
    return [t for of_one in _outputs(x, _two(of_calls), dtype) for t in of_one]


def rotated_maxima(x: Tensor, columns: bool, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """`reference.rotated_maxima`."""
    from fp4dse.kernels.quant.triton.launch import tensor_maxima

    with torch.cuda.device_of(x):
        return tensor_maxima(x, columns, rotation, _of_each(signs, len(x)))


def squares(x: Tensor, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [L, R, C] quantized in tiles where it lies; arguments as in squares.squares."""
    from fp4dse.kernels.quant.triton import squares

    with torch.cuda.device_of(x):
        return squares.squares(x, call, dtype)


def through(g: Tensor, x: Tensor, call: Call, numbers: Tensor, form: tuple[str, bool, str, str]) -> Tensor:
    """The gradient of x from g, the gradient of the quantized x: float32 [L, R, C] all three, not rotated, with blocks
    along C. It is that of `estimators.through`, for quantizers that `why_not_through` has no reason against.

    call: as `operand` had it, with the maxima that it took, None where no lane has a tensor scale.
    numbers, form: of the estimator, see `estimators.numbers` and `Through.form`.
    """
    return _through(g, x, numbers, *form, *call)


@torch.library.custom_op(
    "fp4dse::through",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor numbers, str element, bool masked, str scale, str scale_rounding, "
    f"{schema()}) -> Tensor",
)
def _through(
    g: Tensor, x: Tensor, numbers: Tensor, element: str, masked: bool, scale: str, scale_rounding: str, *of_call: Any
) -> Tensor:
    from fp4dse.kernels.quant.triton.estimators import launch

    call = _for_lanes(unflat(of_call), len(x))
    _check(x, False, call, torch.float32)
    if reason := why_not_form((element, masked, scale, scale_rounding)):
        raise ValueError(reason)
    if g.shape != x.shape or g.dtype != torch.float32:
        raise ValueError(f"g: found {g.dtype} {tuple(g.shape)}; accepted: float32 {tuple(x.shape)}")
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(x):
        launch(g, x, call, numbers, (element, masked, scale, scale_rounding), out)
    return out


@_through.register_fake
def _(g: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(g, memory_format=torch.contiguous_format)


def _check(x: Tensor, columns: bool, call: Call, dtype: torch.dtype, codecs: Sequence[str] = ()) -> None:
    """ValueError for what the kernels do not take; codecs: those of this one, where it has fewer."""
    if codecs and call.codec not in codecs:
        raise ValueError(f"codec: found {call.codec}; accepted: {', '.join(codecs)}")
    if reason := why_not_operand(x, call.block, dtype, call.rotation, call.codec):
        raise ValueError(reason)
    for name, size in ("blocks of", span(call.block, 0, call.codec)), ("a rotation of", call.rotation or 1):
        if x.shape[1 if columns else 2] % size:
            raise ValueError(f"x: found {tuple(x.shape)}; accepted: a contraction axis that {name} {size} divides")


def _run(x: Tensor, columns: bool, call: Call, outputs: tuple[Tensor, Tensor | None, Tensor]) -> None:
    """One launch, and one for the tensor maximum where it is needed and not given."""
    from fp4dse.kernels.quant.triton.launch import launch

    with torch.cuda.device_of(x):
        launch(x, columns, _ready(x, columns, call), outputs)


def _ready(x: Tensor, columns: bool, call: Call) -> Call:
    """The call with signs for each lane, and with maxima where they are needed."""
    from fp4dse.kernels.quant.triton.launch import tensor_maxima

    call = _for_lanes(call, len(x))
    if call.features.tensor_scale and call.tensor_amax is None:
        call = call._replace(tensor_amax=tensor_maxima(x, columns, call.rotation, call.signs))
    return call


def _for_lanes(call: Call, lanes: int) -> Call:
    """With signs for each lane, and maxima one behind the other, as kernels read them: learned clips lie apart, each
    among the parameters of its lane."""
    amax = None if call.tensor_amax is None else call.tensor_amax.contiguous()
    return call._replace(signs=_of_each(call.signs, lanes), tensor_amax=amax)


def _of_each(signs: Tensor | None, lanes: int) -> Tensor | None:
    return None if signs is None else signs.expand(lanes, -1).contiguous()


def _two(of_calls: Sequence[Any]) -> list[Call]:
    half = len(Call._fields)
    return [unflat(of_calls[:half]), unflat(of_calls[half:])]


def _decoded(x: Tensor, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = x.mT.shape if columns else x.shape
    return x.new_empty(shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)


def _codes(x: Tensor, columns: bool, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    lanes, rows, width = x.mT.shape if columns else x.shape
    codes, scales = (x.new_empty((lanes, rows, width // n), dtype=torch.uint8) for n in (2, call.block))
    return codes, scales, x.new_empty(lanes, dtype=torch.float32)


def _outputs(x: Tensor, calls: Sequence[Call], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    if dtype == torch.uint8:
        return [_codes(x, bool(columns), call) for columns, call in enumerate(calls)]
    return [_decoded(x, columns, dtype) for columns in (False, True)]
