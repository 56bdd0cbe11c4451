"""The ways to quantize a block-scaled operand (PATHS), and which operands each does not take.

All have the same bits. `quantized` takes the first that has no reason against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse.own_formats import element_format
from fp4dse.dse.quantizer import block_elements
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.counters import count, largest_element
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.records import SavedBlocks, Stored, Term, Use
from fp4dse.kernels.quant.operand.state import history
from fp4dse.kernels.quant.operand.stored import stored
from fp4dse.kernels.quant.packed import pack
from fp4dse.kernels.quant.spec import reference
from fp4dse.kernels.quant.spec.codecs import Encoded
from fp4dse.kernels.quant.spec.reference import decoded
from fp4dse.kernels.quant.triton.limits import EDGES, RELAXATIONS, why_not_squares


class Path(NamedTuple):
    """A way to quantize an operand x.

    does     what it does, for `fp4dse doctor`
    takes    backend -> the quantizers that it takes with this backend, "" if none, for `fp4dse doctor`
    why_not  (quantizers, x, use) -> why it cannot be taken, None if it can
    run      (quantizers, x, use) -> the term [L, R, C]
    """

    does: str
    takes: Callable[[Backend], str]
    why_not: Callable[[LaneQuantizers, Tensor, Use], str | None]
    run: Callable[[LaneQuantizers, Tensor, Use], Term]


def quantized(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    """x, float32 (or bfloat16, where `why_not_whole` has no reason), quantized by the first path that takes it."""
    return PATHS[first_path(of, x, use)].run(of, x, use)


def first_path(of: LaneQuantizers, x: Tensor, use: Use) -> str:
    """The name of the first path that takes x."""
    return next(name for name, path in PATHS.items() if path.why_not(of, x, use) is None)


def described(backend: Backend, unfused: str | None) -> list[tuple[str, str, str]]:
    """Lines for `fp4dse doctor`: (name, quantizers that it takes with this backend, what it does) of each path, and one
    for gradients through quantizers. unfused: why Triton kernels are not taken."""
    through = "gradients of estimators in one kernel; others by the reference"
    ways = [(f"quantizing {name}", path.takes(backend), path.does) for name, path in PATHS.items()]
    ways.append(("gradient through quantizers", ", ".join(RELAXATIONS) if backend.through else "", through))
    return [(name, takes or "no", does if takes or not unfused else f"{does}: {unfused}") for name, takes, does in ways]


def why_not_whole(of: LaneQuantizers, use: Use) -> str | None:
    """The reason why the backend's kernel does not take the operand where it lies, None if it does."""
    if use.counting:
        return "counting: the kernel does not show elements and scales"
    if of.why_not_operand:
        return of.why_not_operand
    return None if isinstance(of.block, int) else "block: found no number of elements along the contraction"


def kept(of: LaneQuantizers, x: Tensor, use: Use) -> tuple[Term, Stored]:
    """x [L, R, C], contracted last, as `quantized` makes it, and its codes.

    A kernel writes them, with the same random bits, where it takes x. Else they are made of the reference's elements
    and scales; those of tiles, and of other formats than 4 bits, of the decoded values.
    """
    if of.why_not_codes or first_path(of, x, use) != "whole":
        if not isinstance(of.block, int) or element_format(of.first.element).bits != 4:
            term = quantized(of, x, use)
            return term, stored(term, of.each)
        term, found = encode(of, x.to(torch.float32), use)
        codes, scales = pack(Encoded(found.q, found.scale), of.each)
        return term, Stored(codes.view(*x.shape[:2], -1), scales.view(*x.shape[:2], -1), found.dec)
    assert of.backend.packed
    call = of.with_maxima(of.call_for(x, int(of.block), use), x)
    codes, scales, factor = of.backend.packed(x, False, call)
    return written(of, x, False, call, use)._replace(factor=factor), Stored(codes, scales, factor)


def encode(of: LaneQuantizers, x: Tensor, use: Use) -> tuple[Term, SavedBlocks]:
    """The term of x [L, R, C] by the reference, with its elements and scales; while counting, what they lost is added
    to `of.counts`."""
    cut = of.cut(x)
    arguments, more = of.reference_arguments(x, cut, use)
    quantize_blocks = reference.quantize_blocks if of.why_not_by_scales else of.backend.quantize_blocks
    encoded, dec = quantize_blocks(*arguments, **more)
    saved = SavedBlocks(cut, encoded.q, encoded.scale, dec)
    if use.counting:
        elements = x.shape[1] * (use.length or x.shape[2])  # but for padding
        count_lost(of, saved, use, elements, largest_element(of.first.codec, encoded.meta))
    return of.as_term(decoded(encoded), dec, x.shape), saved


def count_lost(of: LaneQuantizers, blocks: SavedBlocks, use: Use, elements: int, largest: Tensor | None = None) -> None:
    """Add what blocks lost to `of.counts`. elements: of a lane, without padding; largest: as `elem_max` in `count`."""
    lost = count(*blocks, *of.tables_for(use), largest)
    lost |= {"elements": torch.full_like(lost["flushed"], elements), "blocks": (blocks.x != 0).any(2).sum(1)}
    for name, number in lost.items():
        of.counts[name] = of.counts.get(name, 0) + number


def _counted(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    return encode(of, use.contracted_last(x), use)[0]


def written(of: LaneQuantizers, x: Tensor, columns: bool, call: Call, use: Use) -> Term:
    """The term that the backend's kernel of whole operands makes of x, in FP8 where the product takes that."""
    if use.fp8 is not None and of.backend.fp8:
        with history(of.state, use, use.term) as known:
            values, shift, factor = of.backend.fp8(x, columns, call, use.fp8, known)
        return Term(values, factor, shift)
    assert of.backend.operand
    return Term(*of.backend.operand(x, columns, call, use.dtype))


def written_both(of: Sequence[LaneQuantizers], x: Tensor, uses: Sequence[Use]) -> list[Term]:
    """The terms in FP8 that the backend's kernel makes of the rows of x [L, R, C] and of its columns, of quantizers and
    uses of both, with the bits of `written`; empty where it does not take x."""
    both_fp8 = of[0].backend.both_fp8
    if both_fp8 is None or any(first_path(each, x, use) != "whole" for each, use in zip(of, uses, strict=True)):
        return []
    calls = [each.call_for(x, int(each.block), use, use.dim == 1) for each, use in zip(of, uses, strict=True)]
    rows, columns = (history(each.state, use, use.term) for each, use in zip(of, uses, strict=True))
    with rows as of_rows, columns as of_columns:
        made = both_fp8(x, tuple(calls), tuple(use.fp8 for use in uses), (of_rows, of_columns))
    return [Term(values, factor, shift) for values, shift, factor in made]


def _whole(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    columns = use.dim == 1
    return written(of, x, columns, of.call_for(x, int(of.block), use, columns), use)


def _tiles(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    assert of.backend.squares
    values, dec = of.backend.squares(x, of.with_maxima(of.call_for(x, of.edge, use), x), use.dtype)
    return Term(use.contracted_last(values), dec)


def _blocks(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    assert of.backend.operand
    x = use.contracted_last(x)
    cut = of.cut(x)
    values, dec = of.backend.operand(cut, False, of.call_for(cut, cut.shape[2], use), use.dtype)
    return Term(of.joined(values, x.shape), dec)


def _by_scales(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    assert of.backend.by_scales
    x = use.contracted_last(x)
    cut = of.cut(x)
    call = of.call_for_blocks(cut, use)
    in_operand = of.first.factors_over == "segment" and not of.first.scales_partial_sums
    dtype = torch.float32 if in_operand else use.dtype  # those factors are multiplied in FP32
    values, dec = of.backend.by_scales(cut, call, dtype, **of.extra_arguments(x, cut, call, use))
    return of.as_term(values, dec, x.shape)


def _reference(of: LaneQuantizers, x: Tensor, use: Use) -> Term:
    x = use.contracted_last(x)
    arguments, more = of.reference_arguments(x, of.cut(x), use)
    values, dec = reference.decode_operand(*arguments, **more)
    return of.as_term(values, dec, x.shape)


def _why_not_tiles(of: LaneQuantizers, x: Tensor, use: Use) -> str | None:
    if of.why_not_operand:
        return of.why_not_operand
    if not (of.edge and of.backend.squares):
        return "block: accepted: tiles, on a CUDA device"
    return why_not_squares(x, of.edge, of.features_for(use), of.first.codec, use.dim == 1)


def _why_not_blocks(of: LaneQuantizers, x: Tensor, use: Use) -> str | None:
    if of.why_not_operand:
        return of.why_not_operand
    rows, columns = use.contracted_last(x).shape[1:]
    size = block_elements(of.block) or (columns if of.block == "row" else rows * columns)
    known = of.backend.blocks
    return None if size in known else f"block: found {size} elements; accepted: {', '.join(map(str, known))}"


def _of_operand(backend: Backend) -> str:
    sizes = ", ".join(map(str, backend.blocks))
    return f"{', '.join(backend.codecs)}; blocks of {sizes}" if backend.operand else ""


PATHS = {
    "counted": Path(
        "by the reference, while what it loses is counted",
        lambda _: "all",
        lambda _of, _x, use: None if use.counting else "counting: off",
        _counted,
    ),
    "whole": Path(
        "the operand where it lies, along its rows or down its columns",
        _of_operand,
        lambda of, _, use: why_not_whole(of, use),
        _whole,
    ),
    "tiles": Path(
        "2-D tiles where they lie",
        lambda backend: f"block; tiles of {', '.join(map(str, EDGES))}" if backend.squares else "",
        _why_not_tiles,
        _tiles,
    ),
    "blocks": Path(
        "other tiles, and blocks as long as a row: cut out first",
        _of_operand,
        _why_not_blocks,
        _blocks,
    ),
    "by-scales": Path(
        "other blocks and codecs; on a GPU their scales are made before their elements",
        lambda backend: ", ".join(backend.scale_codecs) if backend.by_scales else "",
        lambda of, *_: of.why_not_by_scales,
        _by_scales,
    ),
    "reference": Path("the rest, by the reference in torch", lambda _: "all", lambda *_: None, _reference),
}
"""Every path by name, in the order in which they are asked."""
