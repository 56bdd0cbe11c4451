"""One of a layer's three products (dse/stages.py), in all lanes: its two operands quantized, and multiplied.

Both operands are padded with zeros to whole blocks, rotated, quantized along the contraction, and multiplied by the
stage's backend of gemm.py; factors that are not in the operands are applied to the result.

A mean over tokens or the largest singular components are taken off before all that, and multiplied apart
(operand/low_rank.py).

Channels that are treated apart (dse/channels.py) are put first in the operands that have them: x and w of fprop, whose
product is the sum of that of the channels held in another format and that of the others; x of wgrad, where the two
products are the columns of the result. Only the others are padded to the stage's blocks and rotated.
"""

from __future__ import annotations

from functools import partial

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import STAGES, Hadamard
from fp4dse.dse.channels import Corrected
from fp4dse.kernels.gemm import GEMMS, Filled, product
from fp4dse.kernels.ops.fp8 import is_taken
from fp4dse.kernels.ops.philox import signs
from fp4dse.kernels.ops.products import AS_IT_IS, Finish, finished
from fp4dse.kernels.ops.rotation import signs_of
from fp4dse.kernels.ops.sums import divided, wide_sum
from fp4dse.kernels.quant.operand.choice import Choice
from fp4dse.kernels.quant.operand.kinds import Converted, Repeated, Scaled, Spectral, laid_out
from fp4dse.kernels.quant.operand.low_rank import Factors, Mean, Part, of_both
from fp4dse.kernels.quant.operand.paths import written_both
from fp4dse.kernels.quant.operand.records import Apart, Operand, Rotation, Saved, SavedInput, Stored, Term, Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.operand.state import history
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.quant.spec.channels import by_errors, by_score, in_order, put_back


class Stage(msgspec.Struct):
    """A product of all lanes.

    name          fprop, dgrad or wgrad
    slots         name of an operand -> its slot, in the order of the product
    rotation      of both operands, or None
    gemm          name of the backend (gemm.GEMMS)
    gemm_why_not  why backends before it were passed over
    fp8           operand -> the FP8 that the backend takes both in, where their shapes are ops/fp8's; else empty
    fp8_itself    operands whose elements are FP8 numbers, and so need no power of two
    plain_factors operands in FP8 whose decode factor is 1 in all lanes, and so is left out
    choice        of channels that are treated apart, None where there are none
    held          the stage of channels that are held in another format, not rotated; None where there are none
    """

    name: str
    slots: dict[str, Slot]
    rotation: Hadamard | None
    gemm: str
    gemm_why_not: tuple[str, ...]
    fp8: dict[str, torch.dtype] = {}
    fp8_itself: frozenset[str] = frozenset()
    plain_factors: frozenset[str] = frozenset()
    choice: Choice | None = None
    held: Stage | None = None

    @property
    def unit(self) -> int:
        """The contraction is padded to a multiple of it."""
        return max([self.rotation.size if self.rotation else 1, *(slot.unit for slot in self.slots.values())])

    def draw_rotation(self, use: Use) -> Rotation | None:
        """The rotation of this step: with random signs, these depend on the keys of `use`."""
        if self.rotation is None:
            return None
        size, device, number = self.rotation.size, use.seeds.device, list(STAGES).index(self.name)

        def draw() -> Tensor:
            return signs(use.seeds, use.sign_step, torch.full((), use.site(number), device=device), size)

        return Rotation(size, signs_of(self.rotation, device, draw), self.rotation.order)

    def choose(self, a: Tensor, b: Tensor, use: Use, dims: tuple[int, int]) -> None:
        """Choose the channels of a product of a and b, contracted over these dimensions, where the choice follows from
        the errors of both (`by = "error"`). To be called before either operand is quantized for the product."""
        if self.choice is None or self.choice.channels.by != "error":
            return
        operands = zip(self.slots, (a, b), dims, strict=True)
        errors = (self._error(name, x.detach(), replace(use, dim=dim)) for name, x, dim in operands)
        self.choice.of_forward(lambda: by_errors(*errors), use)

    def operand(self, name: str, x: Tensor | Stored, use: Use, rotation: Rotation | None) -> Operand:
        """x [L, ·, ·] quantized as the product takes it, contracted over `use.dim`; or converted from codes."""
        if isinstance(x, Tensor):
            return self._quantized(name, x, use, rotation)
        slot = self.slots[name]
        assert isinstance(slot, Converted)
        use = replace(use, dtype=self._dtype)
        return self._as_taken(name, slot.convert(x, use), use)

    def takes_fp8(self, a: Tensor, b: Tensor | Stored, dims: tuple[int, int], rows: Tensor | None) -> bool:
        """True if the product of a and b, contracted over these dimensions, is one of FP8 units: by the shapes alone,
        never by the number of lanes. rows: as in `multiply`; what is filled in part has kernels of its own."""
        if not self.fp8 or rows is not None or self.choice is not None or not isinstance(b, Tensor):
            return False
        length = a.shape[dims[0]]
        return is_taken(a.shape[3 - dims[0]], b.shape[3 - dims[1]], length + -length % self.unit)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of operands that are not written in FP8."""
        gemm = GEMMS[self.gemm]
        return torch.float32 if gemm.whole else gemm.operand

    def _as_taken(self, name: str, operand: Operand, use: Use) -> Operand:
        """The operand as the backend takes it."""
        if name in self.fp8 and use.takes_fp8:
            known = None if name in self.fp8_itself else partial(history, self.slots[name].state, use)
            operand = operand.in_fp8(self.fp8[name], known)
            if name in self.plain_factors and len(operand.terms) == 1:
                operand = operand._replace(terms=[operand.terms[0]._replace(factor=None)])
            return operand
        return operand.whole() if GEMMS[self.gemm].whole else operand

    def _quantized(self, name: str, x: Tensor, use: Use, rotation: Rotation | None) -> Operand:
        """The operand of all channels, each as it is to be treated."""
        if self.choice is None:
            return self._operand(name, x, use, rotation)
        if self.choice.channels.by == "error":
            return self._operand(name, x, replace(use, chosen=self._hot(name, x.detach(), use)), rotation)
        x, order, count, held = x.detach(), None, 0, None
        first = x  # of a gradient, which has no such channels, both products take all
        if name != "g":
            dim = use.dim if self.name == "fprop" else 3 - use.dim
            is_new = self.name == "fprop" and name == "x"
            find = partial(by_score, x, dim, self.choice.channels.by)
            order = self.choice.of_forward(find, use) if is_new else self.choice.last(find, use)
            x = in_order(x, order, dim)
            count = self.choice.channels.count(x.shape[dim])
            if self.held is not None:
                first, x = (part.contiguous() for part in x.split([count, x.shape[dim] - count], dim))
        if self.held is not None and (name == "g" or count):
            held = self.held.operand(name, first, replace(use, counting=False), None)
        return self._operand(name, x, use, rotation)._replace(apart=Apart(order, count, held))

    def _operand(self, name: str, x: Tensor, use: Use, rotation: Rotation | None) -> Operand:
        """The operand of channels that are not treated apart."""
        length, x, slot = x.shape[use.dim], x.detach(), self.slots[name]
        part: Part | None = None
        if slot.is_centred:
            x, part = self._centred(x, use, rotation)
        elif isinstance(slot, Spectral):
            x, use = use.contracted_last(x).to(torch.float32), replace(use, dim=2)
            x, part = self._without_components(slot, x, use, rotation)
        x = blocks.pad(x, use.dim, self.unit)
        if rotation:
            length += -length % rotation.size  # a rotation fills its last group
        fp8 = self.fp8.get(name) if use.takes_fp8 and name not in self.fp8_itself else None
        use = replace(use, length=length, dtype=self._dtype, fp8=fp8, rotation=rotation)
        if rotation and not self._rotates(name, use):
            x, use = rotation.rotate(x.to(torch.float32), use.dim), replace(use, rotation=None)
        return self._as_taken(name, slot.quantize(x, use)._replace(part=part), use)

    def use_in_fp8(self, name: str, x: Tensor, use: Use) -> Use | None:
        """The use of a slot that quantizes x as it lies to FP8 under a power of two; None where more is done to x."""
        if name in self.fp8_itself or name not in self.fp8 or self.rotation is not None or x.shape[use.dim] % self.unit:
            return None
        return replace(use, length=x.shape[use.dim], dtype=self._dtype, fp8=self.fp8[name])

    def of_term(self, name: str, x: Tensor, term: Term, use: Use) -> Operand:
        """The operand that a slot's quantizers made of x, as the product takes it."""
        return self._as_taken(name, Operand([term._replace(values=laid_out(term.values, use.dim))], x), use)

    def _hot(self, name: str, x: Tensor, use: Use) -> Tensor | None:
        """The channels of x whose errors are multiplied, int64 [L, k]; None for a single channel."""
        assert self.choice is not None
        order = self.choice.last(lambda: by_errors(self._error(name, x, use)), use)
        count = self.choice.channels.count(x.shape[use.dim])
        return order[:, :count] if count else None

    def _error(self, name: str, x: Tensor, use: Use) -> Tensor:
        """x without what its quantizer makes of it, float32 [L, rows, contraction]; no state changes."""
        slot, length = self.slots[name], x.shape[use.dim]
        slot = slot.scaled if isinstance(slot, Repeated) else slot
        use = replace(use, training=False, counting=False, length=length)
        operand = slot.quantize(blocks.pad(x, use.dim, self.unit).to(torch.float32), use)
        return (operand.raw.to(torch.float32) - operand.decoded())[:, :, :length]

    def multiply(self, a: Operand, b: Operand, rows: Tensor | None = None, end: Finish = AS_IT_IS) -> Tensor:
        """a [L, R, C] · b [L, S, C]ᵀ, float32 [L, R, S], with the product of channels that are held apart, then as
        `end` says, which has no factors. rows: how many of the layer's M rows are filled, int64 [L], where those after
        them are zeros; None: all may be."""
        filled = self._filled(a, b, rows)
        if _is_one_product(a) and _is_one_product(b):
            return self._product(a.terms[0], b.terms[0], filled, end)
        return finished(self._sum(a, b, filled), end)

    def _product(self, a: Term, b: Term, filled: Filled | None, end: Finish = AS_IT_IS) -> Tensor:
        factors, shifts = (a.factor, b.factor), (a.shift, b.shift)
        return product(GEMMS[self.gemm], (a.values, b.values), factors, filled, end, shifts)

    def _sum(self, a: Operand, b: Operand, filled: Filled | None) -> Tensor:
        """The sum of all products that operands of several parts make."""
        out = self._multiply(a, b, filled)
        if a.apart is None or b.apart is None:
            return out
        held = None
        if self.held is not None and a.apart.held is not None and b.apart.held is not None:
            held = self.held.multiply(a.apart.held, b.apart.held)
        if self.name == "fprop":
            return out if held is None else out + held
        assert b.apart.order is not None
        return put_back(out if held is None else torch.cat([held, out], 2), b.apart.order, 2)

    def _filled(self, a: Operand, b: Operand, rows: Tensor | None) -> Filled | None:
        """The rows or numbers that the products take of the operands; None for all. Where rows are contracted, a
        rotation spreads them over groups; what is taken off before, a mean among it, is not zero where x is."""
        if rows is None or a.part is not None or b.part is not None:
            return None
        contracted = self.name == "wgrad"
        return Filled((rows + self.unit - 1) // self.unit * self.unit if contracted else rows, contracted)

    def _multiply(self, a: Operand, b: Operand, filled: Filled | None) -> Tensor:
        """The same of what is not held apart. What clamping cut off meets the other operand unquantized, a part of
        low rank meets it quantized; errors of channels do not meet each other."""
        out, no_errors = None, self.choice is not None and isinstance(self.choice.channels, Corrected)
        for i, s in enumerate(a.terms):
            for j, t in enumerate(b.terms):
                if i and j and no_errors:
                    continue
                part = self._product(s, t, filled)
                out = part if out is None else out + part
        assert out is not None
        unquantized = GEMMS["fp32"].run
        if a.rest is not None:
            out = out + unquantized(a.rest, b.raw.to(torch.float32))
        if b.rest is not None:
            raw = a.raw.to(torch.float32)
            out = out + unquantized(raw if a.rest is None else raw - a.rest, b.rest)
        if a.part is not None:
            out = out + a.part.times(b.with_rest())
        if b.part is not None:
            out = out + b.part.spread(unquantized(a.with_rest(), b.part.columns))
        if a.part is not None and b.part is not None:
            out = out + of_both(a.part, b.part)
        return out

    def backward(self, name: str, g: Tensor, saved: Saved, use: Use) -> Tensor:
        """The gradient of an operand [L, R, C] from g, that of what the product took for it, rotated back."""
        slot, length, rotation = self.slots[name], g.shape[2], self.draw_rotation(use)
        g, use = blocks.pad(g, 2, self.unit), replace(use, rotation=rotation, save=True)
        if rotation is None or (isinstance(saved, SavedInput) and self._rotates(name, use)):
            return slot.backward(g, saved, use)[:, :, :length]
        g = slot.backward(rotation.rotate(g, 2), saved, replace(use, rotation=None))
        return rotation.rotate_back(g, 2)[:, :, :length]

    def input_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The smallest dtype that an operand of this dtype may be rounded to beforehand, with the same product."""
        rounds_first = self.slots[name].only_bf16 and not self.rotation
        rounds_first = rounds_first and self.choice is None  # which follows from x as it is
        return torch.bfloat16 if rounds_first and not self._other(name).multiplies_rest else dtype

    def _centred(self, x: Tensor, use: Use, rotation: Rotation | None) -> tuple[Tensor, Mean]:
        """x [L, ·, ·] without its mean over tokens, float32, and that mean. Tokens are what wgrad contracts, elsewhere
        the rows of x and g."""
        contracted = self.name == "wgrad"
        dim = use.dim if contracted else 3 - use.dim
        mean = divided(wide_sum(x, dim), x.shape[dim]).unsqueeze(dim)
        taken = use.contracted_last(mean)
        one = taken.new_ones(1, 1, 1)
        columns = one.expand(len(x), 1, x.shape[dim]) if contracted else taken
        columns = self._as_columns(columns, rotation)
        return x.to(torch.float32) - mean, Mean(taken, taken if contracted else one, columns)

    def _without_components(
        self, slot: Spectral, x: Tensor, use: Use, rotation: Rotation | None
    ) -> tuple[Tensor, Factors]:
        """x, float32 [L, R, length], without its largest singular components, and these."""
        x, (u, s, v) = slot.split(x, use)
        return x, Factors(v, (u * s[:, :, None]).mT.contiguous(), self._as_columns(v, rotation))

    def _as_columns(self, vectors: Tensor, rotation: Rotation | None) -> Tensor:
        """float32 [L, r, length], padded and rotated as the operand that they are taken off: [L, r, C]."""
        vectors = blocks.pad(vectors, 2, self.unit)
        return rotation.rotate(vectors, 2) if rotation else vectors

    def _other(self, name: str) -> Slot:
        [other] = (slot for operand, slot in self.slots.items() if operand != name)
        return other

    def _rotates(self, name: str, use: Use) -> bool:
        """True if the slot's kernel rotates the operand; not if what clamping cuts off the other is multiplied with
        it, which is rotated too."""
        return self.slots[name].rotates(use) and not self._other(name).multiplies_rest


def operands_of_both(name: str, stages: tuple[Stage, Stage], x: Tensor, use: Use) -> tuple[Operand, ...]:
    """x [L, R, C], an operand of this name of both stages, for products in FP8: contracted over C in the first and over
    R in the second, from one read. Empty where a kernel does not do so."""
    uses, quantizers = [], []
    for stage, dim in zip(stages, (2, 1), strict=True):
        slot, of = stage.slots[name], stage.use_in_fp8(name, x, replace(use, dim=dim))
        if of is None or type(slot) is not Scaled:  # others do more than quantize
            return ()
        uses.append(of)
        quantizers.append(slot.quantizers)
    terms = written_both(quantizers, x.detach(), uses)
    made = zip(stages, terms, uses, strict=True) if terms else ()
    return tuple(stage.of_term(name, x.detach(), term, use) for stage, term, use in made)


def _is_one_product(of: Operand) -> bool:
    """True if the operand has one term and nothing that is multiplied apart."""
    return len(of.terms) == 1 and of.rest is None and of.part is None and of.apart is None
