"""The kinds of slots, and which one an operand takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import QUANTIZERS, SLOTS, Quantizer, Recipe
from fp4dse.dse.channels import Corrected
from fp4dse.dse.estimator import STE, Through
from fp4dse.dse.formats import FloatFormat
from fp4dse.dse.outliers import Clamp, LearnedClip, LowRank, Mean, TrainedFactors, TrainedScales
from fp4dse.dse.outliers import Residual as SecondQuantizer
from fp4dse.dse.own_formats import element_format
from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.dse.rounding import of_one_sample, samples_of
from fp4dse.kernels.ops.mxfp4 import columns_to_fp8
from fp4dse.kernels.ops.philox import many_signs
from fp4dse.kernels.ops.unpacked import unpacked
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.descriptor import FLOATS
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.paths import count_lost, encode, kept, quantized, why_not_whole, written
from fp4dse.kernels.quant.operand.records import Operand, Saved, SavedBlocks, SavedInput, Stored, Term, Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec.blocks import pad
from fp4dse.kernels.quant.spec.estimators import numbers, rounded_slope, through
from fp4dse.kernels.quant.spec.low_rank import Components, components, orthonormal
from fp4dse.kernels.quant.triton.limits import why_not_through

LINE = 16
"""Numbers in a line of a CPU's cache."""
LSQ_UNIT: dict[str, Callable[[float], float]] = {"pact": lambda _: 0.0, "lsq": lambda largest: largest**-0.5}
"""`LearnedClip.gradient` -> 1/sqrt(largest element) where it is LSQ's, else zero."""
QUANTIZES_VECTORS = {"quantized": True, "fp32": False}
"""`LowRank.vectors` -> True if they are quantized."""


def make_slot(recipes: Sequence[Recipe], name: str, device: torch.device, backend: Backend) -> Slot:
    """The slot of that name (`dse.SLOTS`) for recipes of equal structural signature, one a lane."""
    quantizers = [recipe.slot(name).canonical() for recipe in recipes]
    stage, operand = name.split(".")
    if name == "wgrad.x" and recipes[0].canonical().wgrad.source == "converted":
        return Converted(LaneQuantizers(quantizers, SLOTS.index(name), device, backend))
    if stage != "fprop":
        return slot_of(quantizers, SLOTS.index(name), device, backend)
    first = recipes[0].canonical()
    slot = slot_of(quantizers, SLOTS.index(name), device, backend, getattr(first.estimator, operand))
    channels = first.fprop.channels
    if isinstance(channels, Corrected) and isinstance(slot, Scaled) and channels.of in (operand, "both"):
        return Repeated(slot, channels)
    return slot


def slot_of(
    quantizers: Sequence[Quantizer],
    number: int,
    device: torch.device,
    backend: Backend,
    estimator: Through = Through(),  # noqa: B008  (frozen)
) -> Slot:
    """The slot of canonical quantizers of one layout, one a lane. number: a key of its random numbers, below 8."""
    if quantizers[0].is_plain:
        return Plain(quantizers, device)
    samples, centred = samples_of(quantizers[0].rounding), isinstance(quantizers[0].outliers, Mean)
    quantizers = [replace(q, rounding=of_one_sample(q.rounding)) for q in quantizers]
    of = LaneQuantizers(quantizers, number, device, backend)
    scaled = Sampled(of, samples, centred) if samples > 1 else Centred(of) if centred else Scaled(of)
    match quantizers[0].outliers:  # of one kind in all lanes
        case LowRank() as low_rank:
            return Spectral(of, low_rank)
        case Clamp():
            return Clamped(scaled, [q.outliers for q in quantizers if isinstance(q.outliers, Clamp)], device)
        case SecondQuantizer():
            residuals = [q.outliers for q in quantizers if isinstance(q.outliers, SecondQuantizer)]
            return Residual(scaled, residuals, device)
        case LearnedClip():
            scaled.learns_clip = True
            units = [_lsq_unit(q) for q in quantizers]
            scaled.lsq = torch.tensor(units, device=device)[:, None] if any(units) else None
        case Mean() | TrainedFactors() | TrainedScales() | None:  # these are taken off by the stage, by the layer
            pass
        case later:
            assert_never(later)
    return scaled if estimator == Through() else Estimated(scaled, quantizers, estimator, device)


def _lsq_unit(q: Quantizer) -> float:
    """LSQ_UNIT of a quantizer whose bound is learned."""
    assert isinstance(q.outliers, LearnedClip)
    return LSQ_UNIT[q.outliers.gradient](element_format(q.element).max)


class Plain(Slot):
    """An operand that lanes round to BF16 or leave as it is."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        super().__init__()
        self.each = quantizers
        rounds = [q.element == "bf16" for q in quantizers]
        self.only_bf16 = all(rounds)
        self.rounds = torch.tensor(rounds, device=device)[:, None, None] if any(rounds) else None

    def quantize(self, x: Tensor, use: Use) -> Operand:
        x = use.contracted_last(x)
        if self.rounds is None:
            return Operand([Term(x.to(torch.float32), None)], x)
        rounded = x.to(torch.bfloat16).to(use.dtype)
        return Operand([Term(rounded if self.only_bf16 else torch.where(self.rounds, rounded, x), None)], x)


class Scaled(Slot):
    """A block-scaled operand."""

    def __init__(self, quantizers: LaneQuantizers) -> None:
        super().__init__(quantizers)
        self.quantizers = quantizers
        self.each = quantizers.each if type(self) is Scaled else ()  # others take parts off, or make several
        self.why_not_codes = quantizers.why_not_codes if element_format(quantizers.first.element).bits == 4 else None

    def quantize(self, x: Tensor, use: Use) -> Operand:
        if why_not_whole(self.quantizers, use):
            x = x.to(torch.float32)
        if use.keeping:
            x = use.contracted_last(x)
            term, codes = kept(self.quantizers, x, replace(use, dim=2))
            return Operand([term._replace(values=laid_out(term.values, use.dim))], x, stored=codes)
        term = quantized(self.quantizers, x, use)
        return Operand([term._replace(values=laid_out(term.values, use.dim))], use.contracted_last(x))

    def rotates(self, use: Use) -> bool:
        of, rotation = self.quantizers, use.rotation
        if rotation is None or rotation.order != "sylvester" or rotation.size not in of.backend.rotations:
            return False
        return why_not_whole(of, use) is None


class Converted(Scaled):
    """A Scaled that takes the forward pass's MXFP4 codes as they are and makes FP8 of them by exponents alone, under
    powers of two of 128 tokens and 32 channels (ops/mxfp4; 2603.02731). Without codes it quantizes."""

    def convert(self, x: Stored, use: Use) -> Operand:
        """The operand [L, C, R] from codes [L, R, C / 2], contracted over R, which zeros fill up to whole segments."""
        values, factor, _ = columns_to_fp8(x.codes, x.scales)
        term = Term(laid_out(values.to(use.dtype), use.dim), factor)
        return Operand([term], self._counted(x, term, use) if use.counting else values)

    def _counted(self, x: Stored, term: Term, use: Use) -> Tensor:
        """The numbers that the codes stand for, float32 [L, C, R]; what the term lost of them is counted."""
        of, tokens = self.quantizers, x.codes.shape[1]
        exact = unpacked(x.codes, x.scales, [QUANTIZERS["mxfp4"]] * len(x.codes))
        exact = pad(exact, 1, self.unit).mT
        assert term.factor is not None
        dec = term.factor.flatten(1)
        blocks = SavedBlocks(of.cut(exact), of.cut(term.values.to(torch.float32)), torch.ones_like(dec), dec)
        count_lost(of, blocks, use, exact.shape[1] * tokens)
        return exact


class Centred(Scaled):
    """A Scaled of the operand without its mean over tokens (Averis, 2603.10444), which the stage, as it knows where
    tokens lie, takes off before it pads and rotates."""

    is_centred = True


class Spectral(Scaled):
    """A Scaled of the operand without its largest singular components (Metis, 2509.00404), which the stage takes off
    before it pads and rotates. Their vectors are quantized by the same quantizers, in blocks along each, or not at
    all."""

    def __init__(self, quantizers: LaneQuantizers, low_rank: LowRank) -> None:
        super().__init__(quantizers)
        self.low_rank, self.quantizes_vectors = low_rank, QUANTIZES_VECTORS[low_rank.vectors]
        if quantizers.backend.operand and quantizers.backend.orthonormal is orthonormal:
            self.why_not_fused = self.why_not_fused or "outliers: components are found by torch, the rest by kernels"

    def split(self, x: Tensor, use: Use) -> tuple[Tensor, Components]:
        """x, float32 [L, R, length], without its largest components; and these, vectors quantized if they are to be."""
        found = components(x, self._start(x, use), self.low_rank.iterations, self.quantizers.backend.orthonormal)
        if not self.quantizes_vectors:
            return x - found.product(), found
        u, v = (self._quantized(vectors, replace(use, term=term)) for term, vectors in ((1, found.u), (2, found.v)))
        return x - found.product(), Components(u, found.s, v)

    def _start(self, x: Tensor, use: Use) -> Tensor:
        """Random signs [L, r, length], drawn anew for each use. Rotations have the sites of the first term."""
        count, length = self.low_rank.count(*x.shape[1:]), x.shape[2]
        site = torch.full((), replace(use, term=1).site(self.quantizers.number), device=x.device)
        return many_signs(use.seeds, use.sign_step, site, count * length).view(len(x), count, length)

    def _quantized(self, vectors: Tensor, use: Use) -> Tensor:
        """Vectors, float32 [L, r, n], quantized, float32."""
        length = vectors.shape[2]
        use = replace(use, dim=2, length=length, counting=False, dtype=torch.float32, rotation=None, save=False)
        return quantized(self.quantizers, pad(vectors, 2, self.unit), use).decoded()[:, :, :length]


class Sampled(Scaled):
    """A Scaled of the operand several times, each with random bits of its own; the terms are averaged (SMP,
    2112.10769). Under evaluation, where all samples are equal, one is made.

    Every path that takes one sample takes them all, one after the other.
    """

    def __init__(self, quantizers: LaneQuantizers, samples: int, is_centred: bool) -> None:
        super().__init__(quantizers)
        self.samples, self.is_centred = samples, is_centred

    def quantize(self, x: Tensor, use: Use) -> Operand:
        if use.evaluating:
            return super().quantize(x, use)
        operands = [super(Sampled, self).quantize(x, replace(use, term=term)) for term in range(self.samples)]
        share = 1 / self.samples  # a power of two: nothing is rounded
        each = torch.full((len(x),), share, device=x.device)
        terms = [term for of in operands for term in of.terms]
        return operands[0]._replace(
            terms=[t._replace(factor=each if t.factor is None else t.factor * share) for t in terms]
        )


class Clamped(Slot):
    """A Scaled of the operand clamped to its quantiles; what is cut off is multiplied apart in lanes that compensate
    (OCC, 2501.17116)."""

    def __init__(self, scaled: Scaled, clamps: Sequence[Clamp], device: torch.device) -> None:
        super().__init__(scaled.quantizers)
        self.scaled = scaled
        self.quantiles = torch.tensor([c.quantile for c in clamps], dtype=torch.float64, device=device)
        self.multiplies_rest = any(c.compensate for c in clamps)
        self.compensates = torch.tensor([c.compensate for c in clamps], device=device)[:, None, None]

    def quantize(self, x: Tensor, use: Use) -> Operand:
        x = use.contracted_last(x.to(torch.float32))
        kept = clamped(x, self.quantiles)
        rest = torch.where(self.compensates, x - kept, 0.0) if self.multiplies_rest else None
        return self.scaled.quantize(kept, replace(use, dim=2))._replace(raw=x, rest=rest)


class Residual(Slot):
    """Q(x) + alpha · Q(x - Q(x)), in two terms (2605.20402)."""

    def __init__(self, scaled: Scaled, residuals: Sequence[SecondQuantizer], device: torch.device) -> None:
        super().__init__(scaled.quantizers)
        self.scaled = scaled
        self.alphas = torch.tensor([r.alpha for r in residuals], device=device)

    def quantize(self, x: Tensor, use: Use) -> Operand:
        operand = self.scaled.quantize(x.to(torch.float32), use)
        error = operand.raw - operand.decoded()
        [second] = self.scaled.quantize(error, replace(use, dim=2, term=1)).terms
        factor = self.alphas
        if second.factor is not None:
            factor = second.factor * self.alphas.view(-1, *[1] * (second.factor.ndim - 1))
        return operand._replace(terms=[*operand.terms, second._replace(factor=factor)])


class Repeated(Slot):
    """A Scaled with a second term: its error in some channels, quantized by the same quantizers. These are the first
    channels of the contraction (ARCQuant, 2601.07475), or chosen ones that keep their places (HCP, 2602.02047)."""

    def __init__(self, scaled: Scaled, channels: Corrected) -> None:
        super().__init__(scaled.quantizers)
        self.scaled, self.channels = scaled, channels

    def quantize(self, x: Tensor, use: Use) -> Operand:
        operand = self.scaled.quantize(x.to(torch.float32), use)
        if use.chosen is not None:
            return self._in_place(operand, use.chosen, use)
        count, size = self.channels.count(use.length or x.shape[use.dim]), operand.raw.shape[2]
        if not count:
            return operand
        error = pad((operand.raw - operand.decoded())[:, :, :count], 2, self.unit)
        [second] = self.scaled.quantize(error, replace(use, dim=2, term=1, length=count, fp8=None)).terms
        values, factor = F.pad(second.values, (0, size - error.shape[2])), second.factor
        if factor is not None and factor.ndim == 3:
            factor = F.pad(factor, (0, size // MACRO_BLOCK - factor.shape[2]), value=1.0)
        return operand._replace(terms=[*operand.terms, Term(laid_out(values, use.dim), factor)])

    def _in_place(self, operand: Operand, chosen: Tensor, use: Use) -> Operand:
        """The operand with a term for the errors of its chosen channels, which are side by side in blocks of their own
        and then back in their places."""
        places, count = chosen[:, None].expand(-1, operand.raw.shape[1], -1), chosen.shape[1]
        error = pad((operand.raw - operand.decoded()).gather(2, places), 2, self.unit)
        [second] = self.scaled.quantize(error, replace(use, dim=2, term=1, length=count, fp8=None)).terms
        values = second.values.new_zeros(operand.raw.shape).scatter(2, places, second.values[:, :, :count])
        return operand._replace(terms=[*operand.terms, Term(laid_out(values, use.dim), second.factor)])


class Estimated(Slot):
    """A Scaled with another gradient than straight through.

    numbers: what the backend's kernel takes of the estimator; None where gradients pass through the reference.
    """

    has_estimator = True

    def __init__(
        self, scaled: Scaled, quantizers: Sequence[Quantizer], estimator: Through, device: torch.device
    ) -> None:
        super().__init__(scaled.quantizers)
        self.scaled = scaled
        self.estimator = estimator
        element = element_format(quantizers[0].element)
        assert isinstance(element, FloatFormat)  # rule estimator-needs-one-grid
        self.element = element
        row = dict(zip(FLOATS, scaled.quantizers.tables[0][:, : len(FLOATS)].unbind(1), strict=True))
        self.gain = row["prescale"] * row["postscale"]  # a constant, except that 3/4 and 4/3 cancel
        self.slope = row["inv_val_max"] / row["prescale"]
        self.numbers: Tensor | None = None
        if scaled.quantizers.backend.through:
            self.why_not_through = next(filter(None, (why_not_through(q, estimator) for q in quantizers)), None)
            if not (self.why_not_through or scaled.quantizers.why_not_operand):
                self.numbers = numbers(estimator, element, device)

    def quantize(self, x: Tensor, use: Use) -> Operand:
        if not use.save:
            return self.scaled.quantize(x, use)
        of, x, use = self.scaled.quantizers, use.contracted_last(x), replace(use, dim=2)
        if self.numbers is not None and why_not_whole(of, use) is None:
            call = of.with_maxima(of.call_for(x, int(of.block), use), x)
            return Operand([written(of, x, False, call, use)], x, saved=SavedInput(x, call.tensor_amax))
        x = x.to(torch.float32)
        term, saved = encode(of, x, use)
        return Operand([term], x, saved=saved)

    def rotates(self, use: Use) -> bool:
        return self.scaled.rotates(use) and (not use.save or self.numbers is not None)

    def backward(self, g: Tensor, saved: Saved, use: Use) -> Tensor:
        of = self.scaled.quantizers
        if isinstance(saved, SavedInput):
            assert of.backend.through is not None
            call = of.call(int(of.block), use, saved.amax)
            return of.backend.through(g, saved.x, call, self.numbers, self.estimator.form())
        dec = saved.dec.view(len(g), -1) / self.gain[:, None]
        slope = self.slope
        if self.estimator.scale_rounding != STE():
            slope = rounded_slope(saved.x, dec, slope, self.estimator, of.first)
        cut = through(of.cut(g), saved.x, saved.q, saved.scale, dec, self.estimator, self.element, slope)
        return of.joined(cut, g.shape)


def laid_out(values: Tensor, dim: int) -> Tensor:
    """An operand [L, R, C] as a CPU's product is to find it in memory, since the product's bits follow from that.

    What was contracted over dimension 1 goes on to lie along R, whichever path quantized it. Rows that do not fill
    lines of the cache lie along C: MKL's product of such depends on how a lane's result is aligned.
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
