"""Bytes and instructions by technique, against the counts of arXiv 2509.17791's table as this project restated it."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer
from fp4dse.dse.cost import chip_names, load_chip, scenarios, work
from fp4dse.dse.cost.scenario import under
from fp4dse.dse.cost.work import Work
from fp4dse.dse.estimator import RELAXATION_NAMES, SCALE_RELAXATION_NAMES, Through
from fp4dse.dse.record import field_types
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from tests.each import each

B200, H200, GENERIC = (load_chip(name) for name in ("b200", "h200", "generic"))


def literals(cls: type, field: str) -> tuple:
    return typing.get_args(field_types(cls)[field])


def test_every_way_to_scale_encode_and_pass_gradients_is_priced():
    assert set(work.SCALING) == set(literals(Quantizer, "scaling"))
    assert set(work.ADAPT) == {name for name in literals(Quantizer, "adapt") if not name.startswith("4over6")}
    assert set(work.ESTIMATOR) == set(RELAXATION_NAMES)
    assert set(work.SCALE_GRADIENT) == set(literals(Through, "scale"))


@pytest.mark.parametrize("name", SCALE_RELAXATION_NAMES)
def test_the_rounding_of_a_scale_costs_once_a_block_what_that_of_an_element_costs_each(name):
    found, block = work.ESTIMATOR[name], QUANTIZERS["mxfp4"]
    done = work.scale_rounding(SCALE_RELAXATION_NAMES[name], block)
    factor = Work() if name == "ste" else Work(read=2, write=2, vector=1)
    assert done == (Work(vector=found.vector, special=found.special) + factor) * (1 / 32)


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("hif4", 4.5), ("fp8", 8)])
def test_packed_operands_are_written_in_their_stored_bits(name, bits):
    assert work.quantize(QUANTIZERS[name], B200, "fp4").write == bits / 8


@pytest.mark.parametrize(("unit", "nbytes"), [("bf16", 2), ("tf32", 4), ("fp32", 4)])
def test_decoded_operands_are_written_as_their_unit_reads_them(unit, nbytes):
    assert work.quantize(QUANTIZERS["nvfp4"], H200, unit).write == nbytes


def test_a_conversion_instruction_makes_two_elements_and_replaces_many():
    q = QUANTIZERS["nvfp4"]
    assert work.rounding(q, B200) == Work(convert=0.5)
    assert work.rounding(q, H200) == work.ROUND
    assert work.rounding(QUANTIZERS["fp8"], H200) == Work(convert=0.5)


def test_uniform_grids_and_powers_round_with_fewer_instructions_than_a_float_grid():
    kinds = {name: work.by_software(name) for name in ("e2m1", "e1m2", "int4", "s1p2", "e3m0", "radix4", "e4m3")}
    assert kinds == {
        **dict.fromkeys(("e2m1", "e4m3"), work.ROUND),
        **dict.fromkeys(("e1m2", "int4", "s1p2"), work.ROUND_UNIFORM),
        **dict.fromkeys(("e3m0", "radix4"), work.ROUND_POWERS),
    }


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("rounds", [3, 7, 10])
def test_random_bits_are_philox_calls_of_128_and_an_instruction_takes_eight_an_element(bits, rounds):
    q = msgspec.structs.replace(QUANTIZERS["nvfp4"], rounding=Stochastic(bits=bits))
    b200, h200 = (msgspec.structs.replace(chip, philox_rounds=rounds) for chip in (B200, H200))
    assert work.stochastic(q, b200) == Work(vector=8 * rounds * 8 / 128)
    assert work.stochastic(q, h200) == Work(vector=8 * rounds * bits / 128 + 2)  # cut out, added, rounded as without


def test_rounds_of_philox_are_ten_where_nobody_says():
    q = msgspec.structs.replace(QUANTIZERS["nvfp4"], rounding=Stochastic(bits=8))
    assert work.stochastic(q, B200) == Work(vector=5)
    assert under(B200, "low").philox_rounds == 3
    own = msgspec.structs.replace(B200, philox_rounds=7.0)
    assert {under(own, name).philox_rounds for name in scenarios()} == {7.0}  # the chip's file goes first


def test_a_scenario_changes_what_its_numbers_say_and_nothing_else():
    for name, scenario in scenarios().items():
        chip = under(B200, name)
        assert chip.flops("fp4") == pytest.approx(B200.flops("fp4") * scenario.products.value)
        assert [chip.flops(unit) for unit in ("fp8", "bf16", "tf32")] == [
            B200.flops(unit) for unit in ("fp8", "bf16", "tf32")
        ]
        assert (chip.passes, chip.rest) == (scenario.passes.value, scenario.rest.value)


@pytest.mark.parametrize(("size", "count"), [(16, 5), (32, 7), (64, 9), (128, 11)])
def test_a_rotation_adds_once_a_stage_flips_and_exchanges_between_threads_above_16(size, count):
    assert work.rotation(Hadamard(size=size)) == Work(vector=count)
    assert work.rotation(Hadamard(size=size, signs="none")) == Work(vector=count - 1)


@each("chip", [load_chip(name) for name in chip_names()])
@each("name", QUANTIZERS)
def test_every_named_quantizer_has_a_price_on_every_chip(name, chip):
    q = QUANTIZERS[name].canonical()
    if q.is_plain:
        return
    done = work.quantize(q, chip, "fp4") + work.scaling(q, chip) + work.adapt(q, chip)
    assert done.seconds(chip) > 0
    assert done.write > 0
    assert min(msgspec.structs.astuple(done)) >= 0


@given(st.from_type(Quantizer))
def test_techniques_never_take_away(q):
    q = q.canonical()
    if q.is_plain or quantizer_faults(q):
        return
    for added in (work.scaling(q, GENERIC), work.adapt(q, GENERIC), work.outliers(q, GENERIC, "fp4")):
        assert min(msgspec.structs.astuple(added)) >= 0


def test_a_pass_takes_as_long_as_its_slowest_resource():
    read = B200.bandwidth.value * B200.achieved.bandwidth.value
    lanes = B200.vector.value * B200.achieved.vector.value
    assert Work(read=2, write=1, vector=1).seconds(B200) == pytest.approx(3 / read)
    assert Work(read=2, vector=100, convert=20).seconds(B200) == pytest.approx(120 / lanes)
    assert Work(special=1).seconds(B200) == pytest.approx(1 / (B200.special.value * B200.achieved.vector.value))
