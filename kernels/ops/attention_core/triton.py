"""The quantized attention core, forward and backward, without a matrix of weights in memory.

    forward    for a block of queries over the keys: of each row m = max s and 1/l = 1 / sum 2^(s - m), s being
               S · log2(e); then, over the keys again, o = P v with P = 2^(s - m) / l, quantized tile by tile
    backward   rowsum(do ∘ o); max |dS|, where scales follow it; then dk and dv for a block of keys over the queries,
               and dq for a block of queries over the keys, P and dS made anew and quantized along each contraction

Q, K, V and do are quantized before (operands.py), in training for both of their products at once. Products take BF16
numbers, which hold what quantizers make; what is left of the scales multiplies the sums, a number a lane. Given S, both
P and dS are quantized to the bits of the reference: blocks along the contraction do not depend on tiles, and random
numbers are those of an element's place. The largest P of a row is 1/l, as 2^0 is 1, so that the largest of a lane needs
no pass over the matrix; that of |dS| needs one, two products of nine.

Exponentials and the order in which products are accumulated are the device's, so an element near a tie may be rounded
to its other neighbour than in the definition. A scale of FP32 for a whole operand multiplies the sum, not its terms,
which is one rounding in another place. A matrix is computed by programs of its own, whose tiles follow from the length,
the head's size and the blocks, and nothing is added atomically: its bits depend on no other lane.

Not timed on a device yet. From instruction counts and bytes language:10M-256 is expected to take 1.08 to 1.22 × the
step with a plain core (docs/log.md); 1.25 × is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import e, log2, sqrt
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from fp4dse.dse.attention import ATTENTION_PRODUCTS
from fp4dse.kernels.ops.attention import triton as unquantized
from fp4dse.kernels.ops.attention.kernels import prepare_kernel
from fp4dse.kernels.ops.attention.triton import padded
from fp4dse.kernels.ops.attention_core import AttentionCore, CoreUse
from fp4dse.kernels.ops.attention_core.backward import keys_kernel, maxima_kernel, queries_kernel
from fp4dse.kernels.ops.attention_core.forward import outputs_kernel, statistics_kernel
from fp4dse.kernels.ops.attention_core.operands import Along, across, along, both, use_of
from fp4dse.kernels.ops.attention_core.slots import INNER, why_not_slot, why_not_stochastic
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.quant.operand.kinds import Scaled
from fp4dse.kernels.quant.triton.launch import flags

BF16 = torch.bfloat16
_EDGE, _ROWS = 64, 64
"""Queries and keys of a tile, at most; rows of a program that prepares the gradient."""
_REASONS: WeakKeyDictionary[AttentionCore, str | None] = WeakKeyDictionary()
"""Results of `_why_not_core`, which waits for the device."""


class Inner(NamedTuple):
    """A slot within a kernel: its arguments, runs of 16 in a row among them, and what is compiled in."""

    arguments: tuple[Tensor | int, ...]
    constants: dict[str, int]


class Scores(NamedTuple):
    """The operands of S, bfloat16 [N, T, padded d], their factors [L], and m and 1/l, float32 [N, T], as arguments."""

    q: Tensor
    k: Tensor
    factor_q: Tensor
    factor_k: Tensor
    m: Tensor
    inverse: Tensor


class ForBackward(NamedTuple):
    """Results of the forward pass that the backward pass needs. others: operands of q in dk, of k in dq, and of v in dP
    with its factors; None where no backward pass follows."""

    scores: Scores
    others: tuple[Along, Along, tuple[Tensor, Tensor]] | None


def why_not(q: Tensor, k: Tensor, v: Tensor, use: CoreUse) -> str | None:
    """The reason why the kernels do not take this use of q, k, v, or None if they do."""
    if reason := unquantized.why_not(q, k, v):
        return reason
    if use.core not in _REASONS:
        _REASONS[use.core] = _why_not_core(use.core)
    if reason := _REASONS[use.core]:
        return reason
    for name, product in use.core.products.items():
        size = q.shape[2] + -q.shape[2] % product.unit
        if name in ("scores", "dp") and size > unquantized.LARGEST:
            return f"{name}: found {size} numbers in a padded head; accepted: up to {unquantized.LARGEST}"
        if name in INNER and (reason := why_not_stochastic(product, len(q) // use.numerics.lanes, q.shape[1])):
            return f"{name}.{ATTENTION_PRODUCTS[name][0]}: {reason}"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, use: CoreUse) -> tuple[Tensor, ForBackward]:
    """softmax(q kᵀ / sqrt d) v of [N, T, d] each, in v's dtype, and what `backward` needs."""
    shape, length, lanes = Shape(q, use), q.shape[1], use.numerics.lanes
    of_s, of_o, others = use.product("scores"), use.product("context"), None
    if use.save:
        (of_q, factor_q), q_along = both(of_s, 0, use.product("dk"), q, use)
        (of_k, factor_k), k_along = both(of_s, 1, use.product("dq"), k, use)
        v_across, of_v = both(use.product("dp"), 1, of_o, v, use)
        others = q_along, k_along, v_across
    else:
        (of_q, factor_q), (of_k, factor_k), of_v = across(of_s, 0, q, use), across(of_s, 1, k, use), along(of_o, v, use)
    m, inverse = torch.empty(2, *q.shape[:2], dtype=torch.float32, device=q.device).unbind(0)
    scores, width = Scores(of_q, of_k, factor_q, factor_k, m, inverse), {"WIDTH": of_q.shape[2]}
    statistics_kernel[shape.grid](*scores, *shape.sizes, **width, **shape.compiled)
    normalized = use.core.normalized
    p = _inner("context", use, cache(partial(_largest_weight, inverse, lanes, normalized)), length)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    arguments = *scores, *of_v, out, *p.arguments, *shape.common, *shape.sizes
    constants = width | p.constants | {"SIZE": q.shape[2], "NORMALIZED": normalized}
    outputs_kernel[shape.grid](*arguments, **constants, **shape.compiled)
    return out, ForBackward(scores, others)


def backward(
    g: Tensor, out: Tensor, kept: ForBackward, use: CoreUse, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in `dtypes` from g, that of out; the rest as `forward` took and returned it."""
    shape, (_, length, size), lanes = Shape(out, use), out.shape, use.numerics.lanes
    g, low, mean = g.contiguous(), torch.empty(out.shape, dtype=BF16, device=g.device), torch.empty_like(kept.scores.m)
    rows = mean.numel()
    of_rows = {"SIZE": size, "D": padded(size), "ROWS": _ROWS, "HEADS": 1, "enable_fp_fusion": False}
    prepare_kernel[launch_grid(triton.cdiv(rows, _ROWS))](g, out.contiguous(), low, mean, rows, length, **of_rows)

    (of_g, factor_g), g_along = both(use.product("dp"), 0, use.product("dv"), g, use, low)
    assert kept.others is not None
    q_along, k_along, (of_v, factor_v) = kept.others
    read = *kept.scores, of_g, of_v, factor_g, factor_v, mean
    widths = {"WIDTH": kept.scores.q.shape[2], "OTHER": of_g.shape[2]}

    @cache
    def largest_gradient() -> Tensor:
        found = torch.empty(shape.grid[0], dtype=torch.float32, device=g.device)
        maxima_kernel[shape.grid](*read, found, *shape.sizes, **widths, **shape.compiled)
        return found.view(lanes, -1).amax(1)

    p = _inner("dv", use, cache(partial(_largest_weight, kept.scores.inverse, lanes, True)), length)
    ds_keys, ds_queries = (_inner(name, use, largest_gradient, length) for name in ("dk", "dq"))
    of_both = {f"{key}_{n}": value for n, of in enumerate((p, ds_keys), 1) for key, value in of.constants.items()}
    grad_q, grad_k, grad_v = (torch.empty(out.shape, dtype=dtype, device=g.device) for dtype in dtypes)
    sizes, common = widths | {"SIZE": size, "SCALE": size**-0.5}, (*shape.common, *shape.sizes)
    arguments = *read, *g_along, *q_along, grad_k, grad_v, *p.arguments, *ds_keys.arguments, *common
    keys_kernel[shape.grid](*arguments, **sizes, **of_both, **shape.compiled)
    arguments = *read, *k_along, grad_q, *ds_queries.arguments, *common
    queries_kernel[shape.grid](*arguments, **sizes, **ds_queries.constants, **shape.compiled)
    return grad_q, grad_k, grad_v


class Shape:
    """The way in which kernels go over the matrices of q [N, T, d]: of the problem alone, but for their number.

    grid      of a launch over the blocks of all matrices
    sizes     the last arguments of every kernel
    common    arguments before these of kernels that draw random numbers
    compiled  compile-time constants, and how to compile
    """

    def __init__(self, q: Tensor, use: CoreUse) -> None:
        (number, length, size), lanes = q.shape, use.numerics.lanes
        widths = [size + -size % use.product(name).unit for name in ("scores", "dp")]
        wide = padded(max(size, *widths))
        edge = max(min(_EDGE, padded(length)), *(use.product(name).slots[0].unit for name in INNER))  # whole blocks
        self.grid = launch_grid(number * triton.cdiv(length, edge))
        self.sizes = length, number // lanes
        self.common = use.numerics.seeds, use.numerics.step, STREAMS["rounding"]
        self.compiled = {"D": wide, "QUERIES": edge, "KEYS": edge, "CAUSAL": use.causal, "FACTOR": log2(e) / sqrt(size)}
        self.compiled |= {"num_warps": edge // 16, "enable_fp_fusion": False}
        self.compiled |= {"num_stages": 2 if wide <= _EDGE else 1}


def _largest_weight(inverse: Tensor, lanes: int, normalized: bool) -> Tensor:
    """The largest P of each lane, or 2^(s - m) where not normalized, which is 1; NaN where one is. float32 [L]."""
    largest = inverse.view(lanes, -1).amax(1)
    return largest if normalized else torch.where(largest.isnan(), largest, 1.0)


def _inner(name: str, use: CoreUse, largest: Callable[[], Tensor], length: int) -> Inner:
    """The first slot of a product, of P or dS, along this length. largest: gives the maxima of the operand, [L]."""
    product = use.product(name)
    slot, runs = product.slots[0], triton.cdiv(length, product.unit) * product.unit // 16
    if not isinstance(slot, Scaled):
        unread = use.numerics.seeds
        return Inner((unread, unread, unread, unread, 0, runs), {"B": 0} | flags((False,) * 5))
    of, at = slot.quantizers, use_of(product, 0, use, length)
    call = of.call(0, at)
    amax = followed = call.floats  # not read, unless
    if of.block == "tensor":
        amax = largest()
    if call.features.tensor_scale:
        found = of.maxima(of.state, largest, at)
        followed = largest() if found is None else found.contiguous()
    block = {"B": of.block if isinstance(of.block, int) else 1}
    return Inner((call.floats, call.ints, followed, amax, call.site, runs), block | flags(call.features))


def _why_not_core(core: AttentionCore) -> str | None:
    """The reason why the kernels do not take a core's quantizers, or None if they do."""
    if not core.exact:
        return "gemm: found other products; accepted: exact"
    for name, operands in ATTENTION_PRODUCTS.items():
        for index, operand in enumerate(operands):
            slot = core.products[name].slots[index]
            if reason := why_not_slot(slot, name in INNER and index == 0):
                return f"{name}.{operand}: {reason}"
    return None
