"""A column, a rounding or a relaxation that an implementation does not know is refused by it, never computed wrongly.

Each fault that somebody who adds one may leave is planted here.
"""

import re
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.estimator import DGE, RELAXATION_NAMES, SCALE_RELAXATION_NAMES, Through
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.rounding import ROUNDING_NAMES, Nearest, Stochastic
from fp4dse.kernels import LaneNumerics, lanes, native
from fp4dse.kernels.ops.philox import random16
from fp4dse.kernels.quant import descriptor
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.spec import estimators
from fp4dse.kernels.quant.spec.reference import decode_operand
from fp4dse.kernels.quant.triton import limits
from fp4dse.kernels.quant.triton.features import features_of

replace = msgspec.structs.replace
NVFP4 = Quantizer.named("nvfp4")
AWAY = replace(NVFP4, rounding=Nearest(ties="away"))
ODD = descriptor.Column("ties", 0, "elements are rounded to the odd code")


@pytest.fixture
def planted(monkeypatch):
    """A rounding to odd, in the place of half away, with a column of its own that only the table knows."""
    columns = dict(descriptor.INTS)
    new = {"to_odd" if name == "half_away" else name: column for name, column in columns.items()}
    new = {"first": ODD} | new | {"half_away": columns["half_away"]}  # every other column moves
    new["to_odd"] = ODD
    monkeypatch.setitem(descriptor.ROUNDING, Nearest, lambda rounding: {"to_odd": rounding.ties == "away"})
    libraries = native.heeded, native._library, native.why_not_native, limits.heeded, limits.heeded_by_scales
    descriptor.INTS.clear()
    descriptor.INTS.update(new)
    for function in libraries:
        function.cache_clear()
    yield
    descriptor.INTS.clear()
    descriptor.INTS.update(columns)
    for function in libraries:
        function.cache_clear()


def test_columns_reach_the_compiled_code_by_generation(planted):
    """What lies behind a new column is found all the same: lanes without it have their bits."""
    x = torch.randn(2, 40, 64)
    tables = descriptor.descriptor([NVFP4, replace(NVFP4, rounding=Stochastic(), scale=Quantizer.named("mxfp4").scale)])
    seeds, step = torch.arange(2), torch.tensor(3)
    got, dec = native.operand(x, False, Call(16, *tables, features_of(*tables), seeds, step, 5))
    random = random16(seeds, native.STREAMS["rounding"], step, torch.tensor(5), 40 * 64).view(2, -1, 16)
    expected, factors = decode_operand(x.view(2, -1, 16), *tables, random)
    assert torch.equal(got.view_as(expected), expected)
    assert torch.equal(dec, factors)


def test_lanes_that_need_a_column_it_does_not_read_are_refused(planted):
    said = r"^to_odd: found 1; accepted: 0 \(elements are rounded to the odd code\)$"
    path = _compiled()
    kernels = replace(PLAIN, operand=lambda: None).why_not_operand
    for why_not in (path.why_not_operand, path.why_not_by_scales, kernels, PLAIN.why_not_by_scales):
        assert why_not(NVFP4.canonical(), descriptor.descriptor([NVFP4] * 2)) is None
        reason = why_not(AWAY.canonical(), descriptor.descriptor([NVFP4, AWAY]))
        assert isinstance(reason, str)
        assert re.match(said, reason), reason


def test_the_reason_is_in_the_row(planted, monkeypatch):
    monkeypatch.setattr(lanes, "backend", lambda _: _compiled())
    numerics = LaneNumerics([Recipe.uniform(NVFP4), Recipe.uniform(AWAY)], [0, 1])
    assert all(slot.why_not_fused for slot in numerics.slots.values())
    assert numerics.operand_why_not == (
        "quantized by the reference (to_odd: found 1; accepted: 0 (elements are rounded to the odd code))",
    )


def test_what_each_path_does_not_read_today():
    """Of all columns; whoever adds one comes by here."""
    every = {*descriptor.FLOATS, *descriptor.INTS}
    assert every == native.heeded()
    assert every - limits.heeded("block") == {"scale_stochastic", "ema"}
    assert every - limits.heeded("eden") == {"ema"}
    elements = {name for name, column in (descriptor.FLOATS | descriptor.INTS).items() if column.of == "element"}
    assert elements - limits.heeded_by_scales() == {"adapt", "adapt_mae"}


@pytest.mark.parametrize("field", ["rounding", "scale", "adapt", "range"])
def test_a_value_that_the_table_does_not_know_has_no_row(field):
    class Later(Nearest, frozen=True):
        pass

    q = {name: getattr(NVFP4, name) for name in (*NVFP4.__struct_fields__, "is_plain", "val_max", "scaled_to", "codec")}
    q[field] = Later() if field in ("rounding", "scale") else "later"
    with pytest.raises(KeyError, match=r"(?i)later"):
        descriptor._row(SimpleNamespace(**q))


def test_every_rounding_has_a_row():
    assert {type(known) for known in ROUNDING_NAMES.values()} == set(descriptor.ROUNDING)


# --- estimators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "field"), [(0, "element"), (2, "scale"), (3, "scale_rounding")])
def test_a_relaxation_that_the_kernel_does_not_have_is_refused(number, field):
    of = Through(element=DGE(), scale="exact")
    assert limits.why_not_through(NVFP4, of) is None
    form = list(of.form())
    form[number] = "later"
    reason = limits.why_not_through(NVFP4, SimpleNamespace(form=lambda: form))
    assert reason.startswith(f"estimator {field}: found later; accepted: "), reason


def test_the_kernel_has_every_relaxation_of_today():
    tags = {known.__struct_config__.tag for known in RELAXATION_NAMES.values()}
    assert set(limits.RELAXATIONS) == tags
    assert set(limits.SCALE_GRADIENTS) == {"none", *estimators.SCALE_GRADIENTS}
    assert set(estimators.FACTORS) == {type(known) for known in RELAXATION_NAMES.values()}
    assert set(estimators.SCALE_FACTORS) == {type(known) for known in SCALE_RELAXATION_NAMES.values()}


def test_a_gradient_through_the_scale_that_nobody_wrote_is_no_other_one():
    x = torch.randn(1, 2, 16)
    spec = SimpleNamespace(element=RELAXATION_NAMES["ste"], masked=False, scale="later")
    with pytest.raises(KeyError, match="later"):
        estimators.through(x, x, x, torch.ones(1, 2), torch.ones(1), spec, ELEMENTS["e2m1"])


@pytest.mark.parametrize("name", ["shift", "block", "size", "step", "amax"])
def test_a_column_with_the_name_of_another_field_is_not_taken_for_read(name, monkeypatch):
    assert re.search(rf"\.{name}\b", "".join(file.read_text() for file in native.SOURCES))
    monkeypatch.setitem(native.INTS, name, descriptor.INTS["encode"])
    assert name not in native.heeded.__wrapped__()
