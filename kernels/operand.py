"""One operand slot of a population: what each lane does to it, as tables on the device, and the state it keeps.

An operand is [L, rows, contraction]. Quantized, it is a sum of terms, values · factor, of which there is one unless
large elements get a second quantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import SLOTS, Recipe
from fp4dse.dse.estimator import STE, Through
from fp4dse.dse.formats import FloatFormat
from fp4dse.dse.outliers import Clamp, Residual
from fp4dse.dse.own_formats import element_format
from fp4dse.dse.quantizer import tile
from fp4dse.kernels import reference
from fp4dse.kernels.arithmetic import blocks
from fp4dse.kernels.arithmetic.philox import STREAMS, random16
from fp4dse.kernels.backend import Backend
from fp4dse.kernels.call import Call
from fp4dse.kernels.codecs import Encoded
from fp4dse.kernels.counters import count, largest_element
from fp4dse.kernels.descriptor import FLOATS, descriptor
from fp4dse.kernels.estimators import numbers, rounded_slope, through
from fp4dse.kernels.fused.features import features_of
from fp4dse.kernels.fused.limits import BLOCKS, why_not_squares, why_not_through
from fp4dse.kernels.fused.operators import rotated_maxima, squares
from fp4dse.kernels.kept import Average, Keys, Maxima
from fp4dse.kernels.reference import decoded, tensor_maxima, widened

USE = 1 << 28
"""Added to a site for its second use in a step."""
PART = 1 << 20
"""Added to a site for each part of a batch after the first."""
LINE = 16
"""Numbers in a line of a CPU's cache."""


class Term(NamedTuple):
    """values [L, R, C], float32 or what the product takes; factor [L], or [L, R] for one per row, or None for one."""

    values: Tensor
    factor: Tensor | None

    def decoded(self) -> Tensor:
        values = self.values.to(torch.float32)
        return values if self.factor is None else values * self.factor.view(len(values), -1, 1)


class Kept(NamedTuple):
    """What the backward pass through a quantizer needs of its blocks: the operand and its elements [L, n, B], scales
    [L, n] or [L, n, B], decode factors [L] or [L, R].

    A kernel that makes elements and scales again, q None, takes the operand [L, R, C] as `quantize` got it, and the
    tensor maxima [L] that it was scaled by, None where no lane has a tensor scale.
    """

    x: Tensor
    q: Tensor | None = None
    scale: Tensor | None = None
    dec: Tensor | None = None
    amax: Tensor | None = None


class Operand(NamedTuple):
    """A quantized operand: the sum of its terms. raw: what it was, in its own dtype; rest: what clamping cut off, if it
    counts."""

    terms: list[Term]
    raw: Tensor
    rest: Tensor | None = None
    kept: Kept | None = None

    def decoded(self) -> Tensor:
        """[L, R, C] as the product sees it, without what clamping cut off."""
        first, *others = (term.decoded() for term in self.terms)
        return sum(others, first)

    def whole(self) -> Operand:
        """With its factors multiplied into its values."""
        return self._replace(terms=[Term(self.decoded(), None)])


class Turn(NamedTuple):
    """A rotation along the contraction: its size, signs [L, size] or None, and order, as rotation.rotate takes them."""

    size: int
    signs: Tensor | None
    order: str


class Slot:
    """One slot of all lanes. All lanes have the same layout (`Quantizer.layout`)."""

    def __init__(self, recipes: Sequence[Recipe], name: str, device: torch.device, backend: Backend) -> None:
        quantizers = [recipe.slot(name).canonical() for recipe in recipes]
        first = self.first = quantizers[0]
        self.name, self.number, self.backend = name, SLOTS.index(name), backend
        self.block = None if first.is_plain else first.block
        self.unit = first.unit
        self.fused, self.by_scales, self.compensated = None, None, None
        self.why_not_through: str | None = None  # its kernel does not pass gradients through
        self.why_not_fused: str | None = None  # the backend has no kernel for these codecs or blocks
        self.state: dict[str, Tensor] = {}  # what is kept from step to step, the lane axis first
        self.counts: dict[str, Tensor] = {}  # what was lost while counting, int64 [L]; see counters.COUNTERS
        if self.block is None:
            bf16 = torch.tensor([q.element == "bf16" for q in quantizers], device=device)
            self.bf16 = "all" if bf16.all() else "some" if bf16.any() else "none"
            self.bf16_lanes = bf16[:, None, None]
            return
        self.tables = descriptor(quantizers, device)
        self.features = features_of(*self.tables)
        self.codec = first.codec
        self.factors, self.factors_over = first.factors, first.factors_over
        self.stochastic_scales = any(q.stochastic_scales for q in quantizers)
        self.maxima = Maxima(quantizers, device)
        self.average = Average(quantizers, device)
        clamps = [q.outliers for q in quantizers if isinstance(q.outliers, Clamp)]  # of all lanes or none
        residuals = [q.outliers.alpha for q in quantizers if isinstance(q.outliers, Residual)]
        self.clamps = torch.tensor([c.quantile for c in clamps], dtype=torch.float64, device=device) if clamps else None
        compensated = torch.tensor([c.compensate for c in clamps], device=device)[:, None, None]
        self.compensated = compensated if any(c.compensate for c in clamps) else None
        self.residuals = torch.tensor(residuals, device=device)[:, None] if residuals else None
        self.why_not_fused = backend.why_not_operand(first, self.tables)
        self.fused = None if self.why_not_fused else backend.operand
        if backend.by_scales and not backend.why_not_by_scales(first, self.tables):
            self.by_scales, self.why_not_fused = backend.by_scales, None
        stage, operand = name.split(".")
        self.through = getattr(recipes[0].canonical().estimator, operand) if stage == "fprop" else Through()
        element = element_format(first.element)
        self.element = element if isinstance(element, FloatFormat) else None  # a table's gradient passes straight
        self.numbers: Tensor | None = None
        if self.through != Through() and self.backend.through is not None:
            reasons = (why_not_through(q, self.through) for q in quantizers)
            self.why_not_through = next(filter(None, reasons), None)
            if self.fused and self.element and not self.why_not_through:
                self.numbers = numbers(self.through, self.element, device)
        column = dict(zip(FLOATS, self.tables[0][:, : len(FLOATS)].unbind(1), strict=True))
        self.gain = column["prescale"] * column["postscale"]  # a constant, except that 3/4 and 4/3 cancel
        self.slope = column["inv_val_max"] / column["prescale"]

    def quantize(
        self,
        x: Tensor,
        dim: int,
        keys: Keys,
        dtype: torch.dtype = torch.float32,
        keep: bool = False,
        turn: Turn | None = None,
    ) -> Operand:
        """x, float32 or bfloat16, with its contraction over `dim` (1 or 2), padded to `unit` there: the operand
        [L, rows, contraction].

        dtype: what the product takes. Fused kernels and BF16 operands come in it at once, others in float32.
        keep: its gradient is going to be passed through the quantizer (`backward`). turn: x is to be rotated, which the
        slot must be able to do (`rotates`).
        """
        if self.block is None:
            return self._plain(x if dim == 2 else x.mT, dtype)
        if not self._whole_by_kernel(keys, keep):
            x = x.to(torch.float32)
        if self.clamps is not None:
            x = x if dim == 2 else x.mT
            kept = clamped(x, self.clamps)
            rest = None if self.compensated is None else torch.where(self.compensated, x - kept, 0.0)
            return Operand([self._term(kept, 2, keys, 0, dtype)], x, rest)
        if keep and self.through != Through():
            x = x if dim == 2 else x.mT
            return self._kept_whole(x, keys, dtype, turn) if self._whole_by_kernel(keys, keep) else self._kept(x, keys)
        if turn:
            call = self._call(x, dim == 1, self.block, keys, 0, turn)  # type: ignore[arg-type]
            return Operand([self._fused(x, dim == 1, call, dtype)], x)
        first = self._term(x, dim, keys, 0, dtype)
        first = first._replace(values=laid_out(first.values, dim))
        x = x if dim == 2 else x.mT
        if self.residuals is None:
            return Operand([first], x)
        second = self._term(x - first.decoded(), 2, keys, 1, dtype)
        factor = self.residuals if second.factor is None else second.factor.view(len(x), -1) * self.residuals
        return Operand([first, Term(second.values, factor)], x)

    def rotates(self, turn: Turn, keys: Keys, keep: bool) -> bool:
        """Whether the backend's kernel rotates the operand while it quantizes it."""
        return self._whole_by_kernel(keys, keep) and turn.size in self.backend.rotations and turn.order == "sylvester"

    def _whole_by_kernel(self, keys: Keys, keep: bool) -> bool:
        """Whether the backend's kernel does all that is done to the operand, from whatever dtype it comes in."""
        if not self.fused or not isinstance(self.block, int):
            return False
        passes = not keep or self.through == Through() or self.numbers is not None
        plain = self.clamps is None and self.residuals is None
        return plain and passes and not keys.counting

    def encode(self, x: Tensor, keys: Keys, use: int = 0) -> tuple[Tensor, Encoded, Tensor]:
        """x [L, R, C] in blocks [L, n, B], their elements and scales, and the decode factors."""
        cut = self._cut(x)
        call = self._call_of_blocks(cut, keys, use)
        random, more = self._arguments(x, cut, call, keys)
        quantize_blocks = self.backend.quantize_blocks if self.by_scales else reference.quantize_blocks
        encoded, dec = quantize_blocks(cut, *self.tables, random, self.features.adaptive, **more)
        if keys.counting:
            self._count(cut, encoded, dec, x.shape[1] * (keys.length or x.shape[2]))
        return cut, encoded, dec

    def _count(self, cut: Tensor, encoded: Encoded, dec: Tensor, elements: int) -> None:
        """Add to `counts` what these blocks lost, of how many elements that are no padding and blocks that hold any."""
        largest = largest_element(self.codec, encoded.meta)
        lost = count(cut, encoded.q, encoded.scale, dec, *self.tables, largest)
        lost["elements"] = torch.full_like(lost["flushed"], elements)
        lost["blocks"] = (cut != 0).any(2).sum(1)
        for name, number in lost.items():
            self.counts[name] = self.counts.get(name, 0) + number

    def _plain(self, x: Tensor, dtype: torch.dtype) -> Operand:
        if self.bf16 == "none":
            return Operand([Term(x.to(torch.float32), None)], x)
        rounded = x.to(torch.bfloat16).to(dtype)
        return Operand([Term(rounded if self.bf16 == "all" else torch.where(self.bf16_lanes, rounded, x), None)], x)

    def backward(self, g: Tensor, kept: Kept, keys: Keys, turn: Turn | None = None) -> Tensor:
        """The gradient of the operand from g [L, R, C], that of the decoded one, both padded and rotated as it was.

        keys: those of `quantize`. turn: the rotation, where the kernel did it; then both are not rotated.
        """
        if kept.q is None or kept.scale is None or kept.dec is None:
            assert self.backend.through is not None
            call = self._call_by(kept.amax, self.block, keys, 0, turn)  # type: ignore[arg-type]
            return self.backend.through(g, kept.x, call, self.numbers, self.through.form())
        dec = kept.dec.view(len(g), -1) / self.gain[:, None]
        slope = self.slope
        assert self.element is not None
        if self.through.scale_rounding != STE():
            slope = rounded_slope(kept.x, dec, slope, self.through, self.first)
        cut = through(self._cut(g), kept.x, kept.q, kept.scale, dec, self.through, self.element, slope)
        return self._joined(cut, g.shape)

    def _term(self, x: Tensor, dim: int, keys: Keys, use: int, dtype: torch.dtype) -> Term:
        if keys.counting:
            x = x if dim == 2 else x.mT
            _, encoded, dec = self.encode(x, keys, use)
            return self._as_term(decoded(encoded), dec, x.shape)
        if self.fused and isinstance(self.block, int):
            return self._fused(x, dim == 1, self._call(x, dim == 1, self.block, keys, use), dtype)
        edge = tile(self.block or 0)
        if edge and self.fused and x.is_cuda and not why_not_squares(x, edge, self.features, self.codec, dim == 1):
            values, dec = squares(x, self._with_maxima(x, self._call(x, False, edge, keys, use)), dtype)
            return Term(values if dim == 2 else values.mT, dec)
        x = x if dim == 2 else x.mT
        cut = self._cut(x)
        if self.fused and cut.shape[2] in BLOCKS:
            values, factor = self._fused(cut, False, self._call(cut, False, cut.shape[2], keys, use), dtype)
            return Term(self._joined(values, x.shape), factor)
        call = self._call_of_blocks(cut, keys, use)
        if self.by_scales:
            values, dec = self.by_scales(cut, call, self._made(dtype), **self._of_some(x, cut, call, keys))
            return self._as_term(values, dec, x.shape)
        random, more = self._arguments(x, cut, call, keys)
        values, dec = reference.decode_operand(cut, *self.tables, random, self.features.adaptive, **more)
        return self._as_term(values, dec, x.shape)

    def _made(self, dtype: torch.dtype) -> torch.dtype:
        """What the operand is made as, where the product takes `dtype`: factors that cannot wait are in float32."""
        return torch.float32 if self.factors_over == "segment" else dtype

    def _kept(self, x: Tensor, keys: Keys) -> Operand:
        """x [L, R, C] quantized as by `_term`, with what `backward` needs."""
        cut, encoded, dec = self.encode(x, keys)
        kept = Kept(cut, encoded.q, encoded.scale, dec)
        return Operand([self._as_term(decoded(encoded), dec, x.shape)], x, kept=kept)

    def _kept_whole(self, x: Tensor, keys: Keys, dtype: torch.dtype, turn: Turn | None) -> Operand:
        """The same by the backend's kernels."""
        call = self._with_maxima(x, self._call(x, False, self.block, keys, 0, turn))  # type: ignore[arg-type]
        return Operand([self._fused(x, False, call, dtype)], x, kept=Kept(x, amax=call.tensor_amax))

    def _as_term(self, cut: Tensor, dec: Tensor, shape: torch.Size) -> Term:
        """Decoded blocks and their factors as an operand [L, R, C]."""
        if self.factors_over == "segment":  # it changes along the contraction: it cannot wait for the product
            return Term(self._joined(cut * widened(dec, cut.shape[1])[:, :, None], shape), None)
        return Term(self._joined(cut, shape), dec)

    def _cut(self, x: Tensor) -> Tensor:
        """Blocks [L, n, B] of x [L, R, C]."""
        x = blocks.pad(x, 1, tile(self.block or 0) or 1)
        return blocks.cut(x, self.block).contiguous().detach()  # type: ignore[arg-type]

    def _joined(self, cut: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `_cut`: shape [L, R, C]."""
        lanes, rows, columns = shape
        padded = (lanes, rows + -rows % (tile(self.block or 0) or 1), columns)
        return blocks.join(cut, padded, self.block)[:, :rows]  # type: ignore[arg-type]

    def _fused(self, x: Tensor, columns: bool, call: Call, dtype: torch.dtype) -> Term:
        """x [L, R, C] (columns: [L, C, R]) quantized in blocks along C by the backend's own kernel: [L, R, C]."""
        assert self.fused is not None
        return Term(*self.fused(x, columns, call, dtype))

    def _call(self, x: Tensor, columns: bool, block: int, keys: Keys, use: int, turn: Turn | None = None) -> Call:
        """The record for x as `_fused` takes it, with maxima where they are kept from step to step."""
        call = self._call_by(None, block, keys, use, turn)
        if not self.maxima.has_state:
            return call
        amax = self._tensor_amax(lambda: rotated_maxima(x, columns, call.rotation, call.signs)[:, None], keys, use)
        return call._replace(tensor_amax=amax[:, 0])

    def _call_of_blocks(self, cut: Tensor, keys: Keys, use: int) -> Call:
        """The same for blocks [L, n, B] whose scales the reference makes; maxima [L, 1]."""
        amax = self._tensor_amax(lambda: tensor_maxima(cut), keys, use) if self.maxima.has_state else None
        return self._call_by(amax, cut.shape[2], keys, use)

    def _call_by(self, amax: Tensor | None, block: int, keys: Keys, use: int, turn: Turn | None = None) -> Call:
        site = 8 * keys.layer + self.number + PART * keys.part + USE * use
        size, signs = turn[:2] if turn else (0, None)
        return Call(block, *self.tables, self.features, keys.seeds, keys.step, site, amax, size, signs, self.codec)

    def _with_maxima(self, x: Tensor, call: Call) -> Call:
        """With those of x [L, R, C] where a kernel needs them and none are kept."""
        if call.tensor_amax is not None or not self.features.tensor_scale:
            return call
        return call._replace(tensor_amax=rotated_maxima(x, False, call.rotation, call.signs))

    def _arguments(self, x: Tensor, cut: Tensor, call: Call, keys: Keys) -> tuple[Tensor | None, dict]:
        """What the reference takes beside blocks and tables: the random bits of the elements, and the rest by name."""
        random = None
        if self.features.stochastic:
            count, words = cut[0].numel(), self.backend.words
            random = random16(stream=STREAMS["rounding"], count=count, **_at(call), words=words).view_as(cut)
        more = self._of_some(x, cut, call, keys)
        if call.codec != "block":
            more["codec"] = call.codec
        if call.tensor_amax is not None:
            more["tensor_amax"] = call.tensor_amax
        return random, more

    def _of_some(self, x: Tensor, cut: Tensor, call: Call, keys: Keys) -> dict:
        """What only some populations need, by its name in the reference."""
        more: dict = {}
        if self.codec == "sawb" and keys.length:
            more["unpadded"] = keys.length * (x.shape[1] if self.block == "tensor" else 1)
        if self.factors_over != "tensor":
            more["factors"] = self.factors(x.shape[1], x.shape[2])
        if self.stochastic_scales:
            words = self.backend.words
            more["scale_random"] = random16(stream=STREAMS["scales"], count=cut.shape[1], **_at(call), words=words)
        if self.average.betas is not None:
            more["guide"] = self._cut(self.average(self.state, x, keys))
        return more

    def _tensor_amax(self, take: Callable[[], Tensor], keys: Keys, use: int) -> Tensor:
        return self.maxima(self.state, f"amax {keys.layer} {use}", take, keys)


def _at(call: Call) -> dict[str, Tensor]:
    """The keys of random numbers."""
    site = torch.full((), call.site, device=call.step.device)  # made there: nothing waits for a copy
    return {"seeds": call.seeds, "step": call.step, "site": site}


def laid_out(values: Tensor, dim: int) -> Tensor:
    """An operand [L, R, C] as a CPU's product is to find it, whose bits follow from the layout.

    What was contracted over dimension 1 goes on to lie along R, whoever quantized it, but for rows that do not fill
    lines of the cache: MKL's product of such depends on how a lane's result is aligned.
    """
    if dim == 2 or values.is_cuda:
        return values
    return values.contiguous() if values.shape[1] % LINE else values.mT.contiguous().mT


def clamped(x: Tensor, quantiles: Tensor) -> Tensor:
    """x [L, R, C], each lane clamped to its quantiles (1 - q, q), float64 [L]: elements of the sorted tensor."""
    ordered = x.reshape(len(x), -1).sort(dim=1).values
    n = ordered.shape[1]
    high = torch.clamp((quantiles * n).to(torch.int64), max=n - 1)[:, None]
    low = n - 1 - high
    return torch.minimum(torch.maximum(x, ordered.gather(1, low)[:, :, None]), ordered.gather(1, high)[:, :, None])
