"""Backends hold what they say they hold, refuse the rest in a sentence, and never round in silence."""

import copy

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, STAGES, Quantizer, Recipe, exactness
from fp4dse.dse.exactness import OPERAND_FORMATS, operand_format
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.scale import BF16, E8M0, FP32
from fp4dse.kernels import LaneNumerics, gemm, lanes
from fp4dse.kernels.gemm import FASTEST, GEMMS, pick
from fp4dse.kernels.ops import fp8, products
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.spec.codecs import CODECS

NVFP4, MXFP4, WIDE = Quantizer.named("nvfp4"), Quantizer.named("mxfp4"), Quantizer(scale=BF16())


def pretend(monkeypatch, *capability: int) -> None:
    """A CUDA device of that compute capability, as far as `why_not` asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


def mxfp4_operand(lanes: int, rows: int, k: int, spread: int = 12) -> torch.Tensor:
    """E2M1 elements × powers of two whose exponents lie within `spread`, a block of 16 a scale."""
    grid = torch.tensor(ELEMENTS["e2m1"].magnitudes())
    signs = 1 - 2 * torch.randint(2, (lanes, rows, k))
    elements = grid[torch.randint(8, (lanes, rows, k))] * signs
    scales = torch.exp2(torch.randint(0, spread + 1, (lanes, rows, -(-k // 16))).float() - 20)
    return elements * scales.repeat_interleave(16, dim=2)[..., :k]


# --- what is taken -----------------------------------------------------------------------------------------------


def test_on_the_cpu_every_product_is_fp32_and_nothing_was_passed_over():
    for q in QUANTIZERS.values():
        assert pick("cpu", [q], [q]) == ("fp32", ())


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        (NVFP4, NVFP4, "bf16-exact"),
        (NVFP4, Quantizer(element="bf16"), "bf16-exact"),
        (NVFP4, WIDE, "tf32-exact"),
        (WIDE, Quantizer(element="none"), "fp32"),
        (NVFP4, Quantizer(scale=FP32()), "fp32"),
    ],
)
def test_on_a_gpu_the_fastest_exact_product_is_taken_and_the_others_say_why_not(monkeypatch, a, b, name):
    pretend(monkeypatch, 9, 0)
    taken, reasons = pick("cuda", [NVFP4, a], [NVFP4, b])
    assert taken == name
    assert [reason.split(" ")[0] for reason in reasons] == [*FASTEST, "fp32"][: len(reasons)]
    assert len(reasons) == [*FASTEST, "fp32"].index(name)
    assert pick("cuda", [NVFP4, b], [NVFP4, a])[0] == name


def test_a_gpu_without_bf16_units_says_so(monkeypatch):
    pretend(monkeypatch, 7, 5)
    name, reasons = pick("cuda", [NVFP4], [NVFP4])
    assert name == "fp32"
    assert reasons[0] == "bf16-exact not taken: it needs compute capability 8.0, Some GPU has 7.5"


def test_a_reason_names_the_operand_that_does_not_fit(monkeypatch):
    pretend(monkeypatch, 9, 0)
    (reason,) = pick("cuda", [NVFP4, WIDE], [NVFP4, NVFP4])[1]
    assert reason == (
        f"bf16-exact not taken: bf16 does not hold {WIDE.label()}, which has up to 10 significant bits, down to 2^-134"
    )


@pytest.mark.parametrize("q", [*QUANTIZERS.values(), WIDE, Quantizer(scale=FP32())], ids=Quantizer.label)
def test_what_is_taken_depends_on_the_signature_alone(q, monkeypatch):
    pretend(monkeypatch, 9, 0)
    of_product = dict(zip([*OPERAND_FORMATS, "fp32"], [*FASTEST, "fp32"], strict=True))
    (product,) = set(Recipe.uniform(q).signature().products)
    for company in ([q], [q, NVFP4], [NVFP4, q]):
        assert pick("cuda", company, company)[0] == of_product[product]


def test_lanes_choose_their_products_once():
    made = LaneNumerics([Recipe.named("bf16")] * 2, [0, 1])
    assert made.gemms == dict.fromkeys(STAGES, "fp32")
    assert made.gemm_why_not == ()


def test_fp8_is_offered_for_e2m1_in_blocks_and_fp8_of_a_tensor_on_chips_that_have_it(monkeypatch):
    why_not = GEMMS["fp8-exact"].why_not
    pretend(monkeypatch, 8, 9)
    of_tensor = Quantizer.named("fp8-current")
    assert why_not("cuda", [MXFP4], [of_tensor]) is None
    for other in (NVFP4, Quantizer.named("mxfp8"), Quantizer(element="int4", scale=E8M0())):
        reason = f"found {other.label()}; accepted: E2M1 × E8M0 in blocks, or FP8 under a factor of the tensor"
        assert why_not("cuda", [MXFP4], [MXFP4, other]) == f"fp8-exact not taken: {reason}"
        assert pick("cuda", [MXFP4], [other], "fp8-exact")[0] == "bf16-exact"
    pretend(monkeypatch, 8, 0)
    assert "compute capability 8.9, Some GPU has 8.0" in str(why_not("cuda", [MXFP4], [MXFP4]))
    assert "fp8-exact" not in FASTEST


def test_a_row_says_what_was_not_added_in_fp32():
    names = [gemm.name_with_sums(name) for name in ("bf16-exact", "fp8-exact")]
    assert names == ["bf16-exact", "fp8-exact/promoted+rest"]


def test_a_backend_that_the_device_does_not_have_says_so():
    reason = "bf16-exact not taken on cpu: it needs a CUDA device"
    assert GEMMS["bf16-exact"].why_not("cpu", [NVFP4], [NVFP4]) == reason
    assert GEMMS["bf16-rounded"].why_not("cpu", [WIDE], [WIDE]) is None


# --- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, q in QUANTIZERS.items() if operand_format(q) == "bf16"])
def test_decoded_operands_of_the_bf16_class_survive_the_cast_bit_for_bit(name, monkeypatch):
    x = torch.randn(2, 64, 128) * torch.exp2(torch.randint(-60, 60, (2, 64, 1)).float())
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)  # the reference: nothing to compile
    made = LaneNumerics([Recipe.uniform(QUANTIZERS[name])] * 2, [0, 1])
    for stage, operands in STAGES.items():
        for operand in operands:
            (term,) = made.slots[f"{stage}.{operand}"].quantize(x, made.use(0)).terms
            assert torch.equal(term.values.to(torch.bfloat16).to(torch.float32), term.values)


def test_rounded_products_are_those_of_bf16_operands():
    a, b = torch.randn(2, 5, 48), torch.randn(2, 7, 48)
    expected = torch.bmm(a.bfloat16().double(), b.bfloat16().double().mT)
    got = GEMMS["bf16-rounded"].run(a, b)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", range(1, 16))
def test_the_largest_number_of_a_segment_is_at_the_top_of_e4m3(n):
    x = torch.nn.functional.pad(torch.tensor([[[n * 2.0**-20]]]), (0, 127))
    values, shift = fp8.to_fp8(x, fp8.E4M3)
    assert 224 < values[0, 0, 0].item() <= 448
    assert torch.equal(shift.decoded(values), x)


def test_settings_of_the_matrix_units_hold_for_the_call_only():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    for precision in ("tf32", "ieee"):
        with products._math(precision):
            assert matmul.fp32_precision == precision
            assert not matmul.allow_bf16_reduced_precision_reduction
        assert (matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction) == before
    with pytest.raises(ZeroDivisionError), products._math("tf32"):
        raise ZeroDivisionError
    assert (matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction) == before


def test_of_every_codec_of_today_it_is_known_which_numbers_its_operands_are():
    assert exactness.OF_ONE_CODEBOOK | exactness._ADAPTED.keys() == CODECS.keys()


def test_of_a_codec_that_is_not_listed_the_reason_says_so():
    later = copy.copy(NVFP4)
    msgspec.structs.force_setattr(later, "scaling", "later")
    assert gemm._bits(later) == "is of a codec that dse/exactness.py does not know"
    assert gemm._bits(Quantizer(scale=FP32())) == "is rounded even in FP32"
