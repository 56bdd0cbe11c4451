"""Random records of any kind: `st.from_type(Recipe)` draws every field from what its type accepts.

Fields added later are drawn too, without a line here.
"""

from __future__ import annotations

import typing

from hypothesis import strategies as st

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part, field_types, options
from fp4dse.dse.stages import Dgrad, Fprop, Hadamard, Wgrad

NUMBERS = st.sampled_from([1.0, 256.0, 448.0, 2048.0, 61440.0, 1e6])
"""Few and far apart, so that equal recipes are drawn now and then; some are above a scale format's largest value."""

SHARES = st.sampled_from([0.0, 0.25, 0.5, 2.0])
PARTS = st.sampled_from([0.0, 0.25, 1.0])


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
        elif option is bool:
            choices.append(st.booleans())
        else:
            choices.append(records(option))
    return st.one_of(choices)


def records(cls: type[Part]) -> st.SearchStrategy:
    return st.builds(cls, **{name: values(type_) for name, type_ in field_types(cls).items()})


for cls in (Hadamard, Quantizer, Fprop, Dgrad, Wgrad, Recipe):
    st.register_type_strategy(cls, records(cls))
