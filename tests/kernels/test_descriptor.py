"""A column, a rounding or a relaxation that an implementation does not know is refused by it, never computed wrongly.

Each fault that somebody who adds one may leave is planted here.
"""

import copy
import re
from importlib import import_module
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe
from fp4dse.dse.estimator import DGE, RELAXATION_NAMES, SCALE_RELAXATION_NAMES, Through, Trust
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.outliers import LearnedClip, LowRank
from fp4dse.dse.own_formats import TableElement
from fp4dse.dse.record import Part
from fp4dse.dse.rounding import ROUNDING_NAMES, Nearest, Stochastic
from fp4dse.dse.scale import TensorScale
from fp4dse.kernels import LaneNumerics, lanes, native, native_library
from fp4dse.kernels.ops.philox import random16
from fp4dse.kernels.quant import descriptor
from fp4dse.kernels.quant.backend import PLAIN, Backend, _compiled
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.operand import kinds
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.state import Maxima
from fp4dse.kernels.quant.reading import columns_read, constant_of
from fp4dse.kernels.quant.spec import estimators
from fp4dse.kernels.quant.spec.codecs import CODECS, SCALES
from fp4dse.kernels.quant.spec.reference import decode_operand, unread, with_numbers
from fp4dse.kernels.quant.triton import heeding, limits
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.by_scales import elements
from fp4dse.kernels.quant.triton.features import Features, features_of

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language
blocks = import_module("fp4dse.kernels.quant.triton.blocks")
triton_codecs = import_module("fp4dse.kernels.quant.triton.codecs")
triton_tiles = import_module("fp4dse.kernels.quant.triton.tiles")

replace = msgspec.structs.replace
NVFP4 = Quantizer.named("nvfp4")
AWAY = replace(NVFP4, rounding=Nearest(ties="away"))
RAZER = next(q for q in QUANTIZERS.values() if q.codec == "razer").canonical()
BASES = [q.canonical() for q in QUANTIZERS.values() if not q.is_plain]
BASES += [replace(NVFP4, scaling="softmax"), replace(NVFP4, element=TableElement(values=(-1.0, 0.0, 1.0)))]
WITH_OPERAND = replace(PLAIN, operand=fused.operand)
ODD = descriptor.Column("ties", 0, "elements are rounded to the odd code")


@pytest.fixture
def planted(monkeypatch):
    """A rounding to odd, in the place of half away, with a column of its own that only the table knows. Tests may write
    to descriptor.INTS: all of it is put back here. By monkeypatch, which ends later, the column would come back."""
    columns = dict(descriptor.INTS)
    new = {"to_odd" if name == "half_away" else name: column for name, column in columns.items()}
    new = {"first": ODD} | new | {"half_away": columns["half_away"]}  # every other column moves
    new["to_odd"] = ODD
    monkeypatch.setitem(descriptor.ROUNDING, Nearest, lambda rounding: {"to_odd": rounding.ties == "away"})
    quick = ("-O1", *native_library.FLAGS[1:])  # half the time to compile, the same bits
    monkeypatch.setattr(native_library, "FLAGS", quick)
    of_native = native.heeded, native_library.library, native.why_not_native
    libraries = *of_native, heeding.heeded, heeding.heeded_by_scales, unread
    descriptor.INTS.clear()
    descriptor.INTS.update(new)
    for function in libraries:
        function.cache_clear()
    yield
    descriptor.INTS.clear()
    descriptor.INTS.update(columns)
    for function in libraries:
        function.cache_clear()


TO_ODD = constant_of("to_odd", tl.constexpr(0))


@triton.jit
def reads_it(i):
    return tl.load(i + TO_ODD)


@triton.jit
def reads_it_if_unusual(i, UNUSUAL: tl.constexpr):
    if UNUSUAL >= 2:
        tl.load(i + TO_ODD)


def refusal(why_not, q):
    """Of lanes of q, one of which needs the planted column."""
    away = replace(q, rounding=Nearest(ties="away"))
    return why_not(q, descriptor.descriptor([q, away]))


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


# --- what code reads ---------------------------------------------------------------------------------------------


EVERYTHING, NOTHING = Features(*[True] * 5), Features(*[False] * 5)
NEITHER = {"ema", "scale_stochastic"}  # of the kernels of whole operands: a record of a call has no tensors for them
LACKING = {"block": NEITHER, "split": NEITHER, "if4": NEITHER, "mixfp4": NEITHER, "razer": NEITHER, "dialects": set()}
LACKING |= {"softmax": NEITHER | {"adapt", "adapt_mae"}, "exact": NEITHER | {"half_away"}}


def needed(codec):
    return columns_read(with_numbers, CODECS[codec])


def test_what_each_path_does_not_read_today():
    """Of the columns that its definition reads; whoever adds one comes by here."""
    assert {*descriptor.FLOATS, *descriptor.INTS} == needed("block")
    assert {codec: needed(codec) - native.heeded(codec) for codec in native_library.CODECS} == {
        codec: {"ema"} if codec == "exact" else set() for codec in CODECS
    }
    for codec in limits.CODECS:
        assert needed(codec) - heeding.heeded(codec, EVERYTHING) == LACKING.get(codec, {"ema"}), codec
    for codec in limits.SCALE_CODECS:
        adaptive = {"adapt", "adapt_mae"} & needed(codec) if codec != "radix4" else set()
        assert needed(codec) - heeding.heeded_by_scales(codec, EVERYTHING) == adaptive, codec


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_is_found_not_to_read_is_nothing_to_it(codec):
    q = next(q for q in BASES if q.codec == codec)
    floats, ints = descriptor.descriptor([q] * 2)
    x, random = torch.randn(2, 16, 64), torch.randint(2**16, (2, 16, 64), dtype=torch.int32)
    expected = decode_operand(x, floats, ints, random, True, codec=codec)
    for columns, table in (descriptor.FLOATS, floats), (descriptor.INTS, ints):
        for number, name in enumerate(columns):
            if name in unread(codec):
                table[:, number] += 1
    for got, wanted in zip(decode_operand(x, floats, ints, random, True, codec=codec), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("feature", Features._fields)
def test_a_column_that_is_compiled_out_belongs_to_the_feature_that_is_missing(feature):
    for codec in limits.CODECS:
        without = heeding.heeded(codec, EVERYTHING._replace(**{feature: False}))
        for name in heeding.heeded(codec, EVERYTHING) - without:
            assert (descriptor.FLOATS | descriptor.INTS)[name].feature == feature


def test_every_feature_has_a_column():
    columns = (descriptor.FLOATS | descriptor.INTS).values()
    assert {column.feature for column in columns} - {""} == set(Features._fields)


def test_a_column_that_one_codec_alone_reads_in_native_code_is_refused_for_the_others(planted, monkeypatch, tmp_path):
    for file in native_library.SOURCES:
        text = file.read_text().replace("void razer(const Lane& b) {", "void razer(const Lane& b) { (void)b.i.to_odd;")
        (tmp_path / file.name).write_text(text)
    monkeypatch.setattr(native, "SOURCES", sorted(tmp_path.iterdir()))
    assert [codec for codec in native_library.CODECS if "to_odd" in native.heeded(codec)] == ["razer"]
    assert refusal(_compiled().why_not_by_scales, RAZER) is None
    assert refusal(_compiled().why_not_by_scales, NVFP4).startswith("to_odd: found 1; accepted: 0 (")


def test_a_column_that_one_codec_alone_reads_in_triton_is_refused_for_the_others(planted, monkeypatch):
    monkeypatch.setattr(triton_codecs, "_razer", reads_it)
    assert [codec for codec in limits.CODECS if "to_odd" in heeding.heeded(codec, EVERYTHING)] == ["razer"]
    assert refusal(WITH_OPERAND.why_not_operand, RAZER) is None
    assert refusal(WITH_OPERAND.why_not_operand, NVFP4).startswith("to_odd: found 1; accepted: 0 (")


def test_a_column_that_one_kernel_of_whole_operands_does_not_read_is_refused(planted, monkeypatch):
    """The gradient through a quantizer makes the operand again: it must know what the forward pass knows."""
    monkeypatch.setattr(triton_tiles, "quantized", reads_it)  # of the forward kernel alone
    assert refusal(WITH_OPERAND.why_not_operand, NVFP4).startswith("to_odd: found 1; accepted: 0 (")


@pytest.mark.parametrize("q", [NVFP4, Quantizer.named("fp8")], ids=["blocks", "tensor"])
def test_a_column_that_the_attention_core_does_not_read_is_refused(planted, q):
    slots = import_module("fp4dse.kernels.ops.attention_core.slots")
    lanes = [q.canonical(), replace(q, rounding=Nearest(ties="away")).canonical()]
    of = [slot_of(lanes[:n], 0, torch.device("cpu"), PLAIN) for n in (1, 2)]
    assert slots.why_not_slot(of[0], inner=True) is None
    assert slots.why_not_slot(of[1], inner=True).startswith("to_odd: found 1; accepted: 0 (")


@pytest.mark.parametrize(("feature", "taken"), [("ties", True), ("", False), ("scales", False)])
def test_a_new_column_of_ties_is_compiled_in_for_lanes_that_need_it_or_refused(planted, monkeypatch, feature, taken):
    """The code that reads it stands where the other ties do, which are compiled out unless a lane needs ties."""
    monkeypatch.setattr(blocks, "_to_nearest", reads_it_if_unusual)
    descriptor.INTS["to_odd"] = ODD._replace(feature=feature)
    tables = descriptor.descriptor([NVFP4, AWAY])
    assert features_of(*tables).ties == taken
    assert features_of(*descriptor.descriptor([NVFP4])).ties is False
    reason = refusal(WITH_OPERAND.why_not_operand, NVFP4)
    assert reason is None if taken else reason.startswith("to_odd: found 1; accepted: 0 (")


def test_a_feature_that_nobody_knows_is_an_error(planted):
    descriptor.INTS["to_odd"] = ODD._replace(feature="later")
    with pytest.raises(TypeError, match="later"):
        features_of(*descriptor.descriptor([AWAY]))


def test_a_codec_whose_elements_the_kernel_has_no_grid_for_is_refused(monkeypatch):
    monkeypatch.setitem(SCALES, "hif4", SCALES["block"])
    q = Quantizer.named("hif4").canonical()
    said = "codec: found hif4; accepted: block, softmax, sawb, radix4"
    assert PLAIN.scale_codecs is limits.SCALE_CODECS  # and not what the reference has
    assert PLAIN.why_not_by_scales(q, descriptor.descriptor([q])) == said
    tables, x, scale = descriptor.descriptor([q]), torch.randn(1, 2, 64), torch.ones(1, 2)
    call = Call(64, *tables, features_of(*tables), torch.arange(1), torch.tensor(0), 0, codec="hif4")
    with pytest.raises(ValueError, match=said):
        elements(x, scale, scale, None, call, torch.float32)


@pytest.mark.parametrize("name", ["shift", "block", "size", "step", "amax"])
def test_a_column_with_the_name_of_another_field_is_not_taken_for_read(name, monkeypatch):
    assert re.search(rf"\.{name}\b", "".join(file.read_text() for file in native_library.SOURCES))
    monkeypatch.setitem(descriptor.INTS, name, descriptor.INTS["encode"])
    assert not any(name in native.heeded.__wrapped__(codec) for codec in native_library.CODECS)


# --- what the table knows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["rounding", "scale", "adapt", "range"])
def test_a_value_that_the_table_does_not_know_has_no_row(field):
    class Later(Nearest, frozen=True):
        pass

    q = {name: getattr(NVFP4, name) for name in (*NVFP4.__struct_fields__, "is_plain", "val_max", "scaled_to", "codec")}
    q[field] = Later() if field in ("rounding", "scale") else "later"
    with pytest.raises(KeyError, match=r"(?i)later"):
        descriptor._row(SimpleNamespace(**q))


def with_later(part, field):
    """The part with a value of the field that somebody has added to the type alone."""
    part = copy.copy(part)
    msgspec.structs.force_setattr(part, field, "later")
    return part


@pytest.mark.parametrize(
    ("at", "part", "field"),
    [
        ("rounding", Nearest(), "ties"),
        ("scale", NVFP4.scale, "rounding"),
        ("scale", NVFP4.scale, "convention"),
        ("scale", NVFP4.scale, "zero"),
        ("outliers", LearnedClip(), "gradient"),
        ("outliers", LowRank(), "vectors"),
    ],
)
def test_a_value_that_no_slot_knows_is_an_error_and_not_another_value(at, part, field):
    q = replace(NVFP4, tensor_scale=None)
    msgspec.structs.force_setattr(q, at, with_later(part, field))
    with pytest.raises(KeyError, match="later"):
        slot_of([q], 0, torch.device("cpu"), PLAIN)


def test_a_treatment_of_outliers_that_no_slot_knows_is_an_error(monkeypatch):
    monkeypatch.setattr(kinds, "replace", lambda q, **_: q)  # which would look at its type

    class Later(Part, frozen=True, tag_field="kind", tag="later"):
        pass

    q = replace(NVFP4, tensor_scale=None)
    msgspec.structs.force_setattr(q, "outliers", Later())
    with pytest.raises(AssertionError, match="Later"):
        slot_of([q], 0, torch.device("cpu"), PLAIN)


def test_a_policy_of_maxima_that_nobody_wrote_is_an_error():
    with pytest.raises(KeyError, match="later"):
        Maxima([SimpleNamespace(tensor_scale=with_later(TensorScale(), "amax"))], torch.device("cpu"))


def test_a_later_arithmetic_is_a_codec_that_is_not_there_and_a_later_finish_has_no_stages():
    assert with_later(NVFP4, "arithmetic").codec == "later"
    with pytest.raises(KeyError, match="later"):
        _ = with_later(Finish(share=0.1), "what").stages


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
    tables, x = descriptor.descriptor([NVFP4]), torch.randn(1, 2, 16)
    call = Call(16, *tables, features_of(*tables), torch.arange(1), torch.tensor(0), 0)
    with pytest.raises(ValueError, match=f"estimator {field}: found later; accepted: "):
        fused.through(x, x, call, torch.zeros(32), tuple(form))


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


def test_a_value_that_no_implementation_was_written_for_is_refused(monkeypatch):
    """A new rounding in a column that is there already, as `half_away = 2`."""
    of_rounding = {**descriptor.ROUNDING, Nearest: lambda rounding: {"half_away": 2 * (rounding.ties == "away")}}
    monkeypatch.setattr(descriptor, "ROUNDING", of_rounding)
    q = AWAY.canonical()
    tables = descriptor.descriptor([q])
    for of in (_compiled(), Backend("triton", operand=print, by_scales=print)):
        for reason in (of.why_not_operand(q, tables), of.why_not_by_scales(q, tables)):
            assert reason == "half_away: found 2; accepted: 0, 1 (ties go away from zero)"


@pytest.mark.parametrize("relaxation", estimators.NUMBERS)
def test_every_number_of_a_relaxation_reaches_its_kernel(relaxation):
    usual = estimators.numbers(Through(relaxation()), ELEMENTS["e2m1"], torch.device("cpu"))
    for field in relaxation.__struct_fields__:
        other = relaxation(**{field: 0.5 * getattr(relaxation(), field) or 0.25})
        assert not torch.equal(estimators.numbers(Through(other), ELEMENTS["e2m1"], torch.device("cpu")), usual), field


def test_a_relaxation_that_the_numbers_do_not_know_is_an_error(monkeypatch):
    monkeypatch.delitem(estimators.NUMBERS, Trust)
    with pytest.raises(KeyError):
        estimators.numbers(Through(Trust()), ELEMENTS["e2m1"], torch.device("cpu"))
