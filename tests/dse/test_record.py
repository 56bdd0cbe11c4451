"""Records are strict when made, and equal records are written alike."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import ConfigError, Hadamard, Quantizer, Recipe
from fp4dse.dse.record import plain
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import E4M3, E8M0, UE5M3, TensorScale
from fp4dse.dse.stages import Fprop

WRONG = {
    "unknown name": (lambda: Quantizer(element="e9m9"), "Quantizer.element", "e9m9", "e2m1, e1m2"),
    "unlisted size": (lambda: Quantizer(block=17), "Quantizer.block", 17, "16, 32"),
    "float for int": (lambda: Quantizer(block=16.0), "Quantizer.block", 16.0, "16, 32"),
    "text for part": (lambda: Quantizer(scale="e4m3"), "Quantizer.scale", "e4m3", 'a table with format = "e8m0", rule'),
    "another part": (lambda: Quantizer(scale=Nearest()), "Quantizer.scale", Nearest(), "e8m0"),
    "none": (lambda: Quantizer(rounding=None), "Quantizer.rounding", None, 'mode = "nearest"'),
    "rule of another": (lambda: E8M0(rule="round"), "E8M0.rule", "round", "floor, ceil"),
    "zero": (lambda: TensorScale(target=0.0), "TensorScale.target", 0.0, "a number above 0"),
    "infinite": (lambda: TensorScale(target=float("inf")), "TensorScale.target", float("inf"), "a number above 0"),
    "bool": (lambda: TensorScale(target=True), "TensorScale.target", True, "a number above 0"),
    "text for number": (lambda: TensorScale(target="448"), "TensorScale.target", "448", "a number above 0, none"),
    "rotation size": (lambda: Hadamard(size=24), "Hadamard.size", 24, "16, 32, 64, 128"),
    "slot": (lambda: Fprop(x="nvfp4", w=Quantizer()), "Fprop.x", "nvfp4", "a table with element, block"),
}


@pytest.mark.parametrize(("make", "where", "found", "accepted"), WRONG.values(), ids=WRONG)
def test_a_record_with_a_wrong_value_cannot_be_made(make, where, found, accepted):
    with pytest.raises(ConfigError) as caught:
        make()
    assert (caught.value.where, caught.value.found) == (where, found)
    assert accepted in caught.value.accepted
    assert "\n" not in str(caught.value)


def test_a_nan_target_is_refused():
    with pytest.raises(ConfigError, match="found nan"):
        TensorScale(target=float("nan"))


def test_a_part_cannot_carry_the_field_of_another():
    with pytest.raises(TypeError):
        E4M3(rule="floor")
    with pytest.raises(TypeError):
        E8M0(zero="one")


def test_records_are_immutable_and_hashable():
    q = Quantizer()
    with pytest.raises(AttributeError):
        q.block = 32
    assert len({q, Quantizer(), Quantizer(block=32)}) == 2


def test_a_whole_number_is_a_number():
    assert msgspec.json.encode(TensorScale(target=448)) == msgspec.json.encode(TensorScale(target=448.0))


def test_defaults_are_left_out_by_value():
    spelled_out = Quantizer(element="".join(["e2", "m1"]), block=16, scale=E4M3(zero="keep"), rounding=Nearest())
    assert plain(spelled_out) == plain(Quantizer()) == {}


def test_what_is_written_names_its_kind():
    q = Quantizer(block=32, scale=UE5M3(zero="keep"), tensor_scale=TensorScale(), rounding=Stochastic())
    assert plain(q) == {
        "block": 32,
        "scale": {"format": "ue5m3", "zero": "keep"},
        "tensor_scale": {},
        "rounding": {"mode": "stochastic"},
    }


@given(a=st.from_type(Quantizer), b=st.from_type(Quantizer))
def test_quantizers_are_equal_exactly_if_they_are_written_alike(a, b):
    assert (a == b) == (plain(a) == plain(b))


@given(recipe=st.from_type(Recipe))
def test_records_travel_as_json(recipe):
    assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe
