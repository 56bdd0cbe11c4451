"""The six products of the attention core and their twelve operands, as data. By default all are BF16.

    scores   S  = q kᵀ        contraction over the head's numbers
    context  o  = P v         contraction over the keys             P = softmax(S / sqrt d)
    dv       dv = Pᵀ do       contraction over the queries
    dp       dP = do vᵀ       contraction over the head's numbers
    dq       dq = dS k        contraction over the keys             dS = P ∘ (dP - rowsum(do ∘ o))
    dk       dk = dSᵀ q       contraction over the queries

Every operand is quantized along the contraction of its own product, as in linear layers; gradients pass straight
through. What lies between the products (softmax, dS) is FP32.
"""

from __future__ import annotations

from typing import Literal

from fp4dse.dse.exactness import operand_format
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.record import Part
from fp4dse.dse.rounding import Stochastic


class Scores(Part, frozen=True, omit_defaults=True):
    """S = q kᵀ."""

    q: Quantizer = BF16
    k: Quantizer = BF16


class Context(Part, frozen=True, omit_defaults=True):
    """o = P v. p is quantized as softmax gives it, or before each row is divided by its sum (Attention.weights)."""

    p: Quantizer = BF16
    v: Quantizer = BF16


class ValueGradient(Part, frozen=True, omit_defaults=True):
    """dv = Pᵀ do."""

    p: Quantizer = BF16
    g: Quantizer = BF16


class WeightGradient(Part, frozen=True, omit_defaults=True):
    """dP = do vᵀ."""

    g: Quantizer = BF16
    v: Quantizer = BF16


class QueryGradient(Part, frozen=True, omit_defaults=True):
    """dq = dS k."""

    s: Quantizer = BF16
    k: Quantizer = BF16


class KeyGradient(Part, frozen=True, omit_defaults=True):
    """dk = dSᵀ q."""

    s: Quantizer = BF16
    q: Quantizer = BF16


class Attention(Part, frozen=True, omit_defaults=True):
    """The six products, and how operands are made ready.

    smooth_k   the mean key of each head is subtracted from its keys before they are quantized (SageAttention,
               2411.10958): softmax does not change by it, and keys have less of a common part that takes the range
    weights    what the forward product quantizes: `normalized`, P itself, or `unnormalized`, exp(S - m) with the
               maximum m of the whole row, whose sums divide the product afterwards (as in SageAttention3, 2505.11594,
               but for its running maximum)
    """

    scores: Scores = Scores()
    context: Context = Context()
    dv: ValueGradient = ValueGradient()
    dp: WeightGradient = WeightGradient()
    dq: QueryGradient = QueryGradient()
    dk: KeyGradient = KeyGradient()
    smooth_k: bool = False
    weights: Literal["normalized", "unnormalized"] = "normalized"

    def operand(self, slot: str) -> Quantizer:
        """The quantizer of `scores.q` … `dk.q`."""
        product, _, name = slot.partition(".")
        found: Quantizer = getattr(getattr(self, product), name)
        return found

    @property
    def is_plain(self) -> bool:
        """True where no operand has a block scale."""
        return all(self.operand(slot).is_plain for slot in ATTENTION_SLOTS)

    def canonical(self) -> Attention:
        """The one spelling of all that compute the same; with plain operands, the default."""
        if self.is_plain:
            return Attention()
        products = {}
        for name, operands in ATTENTION_PRODUCTS.items():
            part = getattr(self, name)
            products[name] = type(part)(*(getattr(part, operand).canonical() for operand in operands))
        plain_k = self.scores.k.is_plain and self.dq.k.is_plain
        weights = "normalized" if self.context.p.is_plain else self.weights
        return Attention(**products, smooth_k=self.smooth_k and not plain_k, weights=weights)

    def evaluated(self) -> Attention:
        """The attention that held-out data go through (`Quantizer.evaluated`)."""
        scores = Scores(*(getattr(self.scores, x).evaluated() for x in ATTENTION_PRODUCTS["scores"]))
        context = Context(*(getattr(self.context, x).evaluated() for x in ATTENTION_PRODUCTS["context"]))
        return Attention(scores, context, self.dv, self.dp, self.dq, self.dk, self.smooth_k, self.weights)

    @property
    def layout(self) -> str:
        """The part that fixes tensor shapes, control flow and the path of the core; empty for the default."""
        if self.is_plain:
            return ""
        words = [_layout(self.operand(slot).canonical()) for slot in ATTENTION_SLOTS]
        return ",".join([*words, *(["smooth"] if self.smooth_k else []), self.weights])

    def label(self) -> str:
        """The operands that are quantized, in words; `none` for the default."""
        if self.is_plain:
            return "none"
        labels = {slot: self.operand(slot).label() for slot in ATTENTION_SLOTS}
        words = _by_product(labels) if len(set(labels.values())) > 1 else [labels[ATTENTION_SLOTS[0]]]
        words += ["smooth k"] if self.smooth_k else []
        words += ["weights unnormalized"] if self.weights != "normalized" else []
        return ", ".join(words)


ATTENTION_PRODUCTS: dict[str, tuple[str, str]] = {
    "scores": ("q", "k"),
    "context": ("p", "v"),
    "dv": ("p", "g"),
    "dp": ("g", "v"),
    "dq": ("s", "k"),
    "dk": ("s", "q"),
}
"""Product -> its two operands, in the order of the product: the first has its rows in the result, the second its
columns."""
ATTENTION_SLOTS = tuple(f"{name}.{operand}" for name, operands in ATTENTION_PRODUCTS.items() for operand in operands)
"""The twelve operands."""
FORWARD = ("scores", "context")
"""Products of the forward pass."""


def stages_of(product: str) -> set[str]:
    """The stages of linear layers that a product of the core follows in the recipe's finish: BF16 once all are."""
    return {"fprop"} if product in FORWARD else {"dgrad", "wgrad"}


def _layout(q: Quantizer) -> str:
    """The layout of an operand, and what decides on the products that take it and on the kernels of the core, whose
    sums have an order of their own: lanes that share a population must all have the same."""
    if q.is_plain:
        return "-" if q == BF16 else str(q.element)
    words = [q.layout, "" if (held := operand_format(q)) == "bf16" else held]
    words += ["stochastic scales"] if q.stochastic_scales else []
    if q.block == "tensor":
        words += [q.adapt if q.adapt != "none" else "", "stochastic" if isinstance(q.rounding, Stochastic) else ""]
    return " ".join(filter(None, words))


def _by_product(labels: dict[str, str]) -> list[str]:
    """Phrases: products by what both operands are, operands apart where they differ; what is BF16 is left out."""
    phrases: dict[str, list[str]] = {}
    for name, (a, b) in ATTENTION_PRODUCTS.items():
        first, second = labels[f"{name}.{a}"], labels[f"{name}.{b}"]
        pairs = [(name, first)] if first == second else [(f"{name}.{a}", first), (f"{name}.{b}", second)]
        for what, label in pairs:
            if label != BF16.label():
                phrases.setdefault(label, []).append(what)
    return [f"{' and '.join(what)} {label}" for label, what in phrases.items()]
