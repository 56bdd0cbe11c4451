"""Random records of any kind: `st.from_type(Recipe)` draws every field from what its type accepts.

Fields added later are drawn too, without a line here.
"""

from __future__ import annotations

import typing

from hypothesis import strategies as st

from fp4dse.dse.attention import Attention, Scores
from fp4dse.dse.own_formats import FloatElement, TableElement
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part, field_types, options
from fp4dse.dse.scale import OwnScale
from fp4dse.dse.stages import Dgrad, Fprop, Hadamard, Wgrad

NUMBERS = st.sampled_from([1.0, 256.0, 448.0, 2048.0, 61440.0, 1e6])
"""Few and far apart, so that equal recipes are drawn now and then; some are above a scale format's largest value."""

SHARES = st.sampled_from([0.0, 0.25, 0.5, 2.0])
PARTS = st.sampled_from([0.0, 0.25, 1.0])


def own_scale(like: tuple[int, int, float], **fields) -> OwnScale:
    mantissa, emin, largest = like
    return OwnScale(mantissa=mantissa, emin=emin, max=largest, name="mine", **fields)


FORMATS = [(1, 0, 6.0), (2, 0, 1.75), (0, -1, 4.0), (3, -2, 15.0)]
OWN = {
    TableElement: st.sets(st.sampled_from([-7.0, -6.0, -1.5, -0.1, 0.1, 0.5, 1.0, 1.5, 6.0]), min_size=1).map(
        lambda chosen: TableElement(values=(0.0, *chosen), name="mine")
    ),
    FloatElement: st.sampled_from([FloatElement(*numbers, name="mine") for numbers in FORMATS]),
    OwnScale: st.builds(
        own_scale,
        st.sampled_from([*FORMATS, (3, -6, 448.0)]),
        zero=st.sampled_from(["keep", "min"]),
        rounding=st.sampled_from(["nearest", "up"]),
    ),
    Attention: st.sampled_from([Attention(), Attention(Scores(QUANTIZERS["fp8"], QUANTIZERS["mxfp4"]), smooth_k=True)]),
}
"""Formats of one's own, whose fields have to fit each other; and the attention core, which has twelve quantizers."""


def values(type_: typing.Any) -> st.SearchStrategy:
    """What a field of this type may hold."""
    choices = []
    for option in options(type_):
        if typing.get_origin(option) is typing.Literal:
            choices.append(st.sampled_from(typing.get_args(option)))
        elif typing.get_origin(option) is typing.Annotated:
            meta = option.__metadata__[0]
            numbers = (
                NUMBERS
                if meta.ge is None
                else SHARES
                if meta.le is None
                else SHARES.filter(lambda v, most=meta.le: v <= most)
            )
            choices.append(st.integers(meta.ge, meta.ge + 3) if option.__origin__ is int else numbers)
        elif option is type(None):
            choices.append(st.none())
        elif typing.get_origin(option) is tuple:
            choices.append(st.just(()))  # rules for layers have a test file of their own
        elif option is bool:
            choices.append(st.booleans())
        else:
            choices.append(OWN[option] if option in OWN else by_name(option))
    return st.one_of(choices)


NAMED = (Hadamard, Quantizer, Fprop, Dgrad, Wgrad, Recipe)
"""Records that strategies call by name: written out in each, they have more than hypothesis wants to print."""


def by_name(cls: type[Part]) -> st.SearchStrategy:
    return st.from_type(cls) if cls in NAMED else records(cls)


def records(cls: type[Part]) -> st.SearchStrategy:
    return st.builds(cls, **{name: values(type_) for name, type_ in field_types(cls).items()})


for cls in NAMED:
    st.register_type_strategy(cls, records(cls))
