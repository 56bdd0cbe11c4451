"""Metis (2509.00404): the largest singular components are taken off, and quantized by their vectors."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.outliers import LowRank, Mean
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import FP32
from fp4dse.dse.stages import SLOTS, STAGES
from fp4dse.kernels import LaneNumerics, native, quantize
from fp4dse.kernels.ops.philox import signs
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import TERM
from fp4dse.kernels.quant.spec import low_rank
from fp4dse.kernels.quant.spec.low_rank import components, orthonormal

from .stage_products import GEMM_DIMS, exact, product, same_bits_alone, same_bits_on_both_paths, uniform_with

replace = msgspec.structs.replace
NV, BF16 = QUANTIZERS["nvfp4"], QUANTIZERS["bf16"]
FINE = Quantizer(element="e4m3", block=16, scale=FP32())
METIS = Recipe.named("metis")
LAYER = 3


def recipe_of(
    q: Quantizer, rank: int = 4, rotation: Hadamard | None = None, vectors: str = "quantized", **of: Quantizer
) -> Recipe:
    """Every operand quantized by q without its largest components, but for those that are given."""
    low, recipe = replace(q, outliers=LowRank(rank, vectors=vectors)), Recipe.uniform(q)
    return uniform_with(recipe, rotation, **dict.fromkeys("xwg", low) | of)


def tensors(tokens: int = 24, inputs: int = 40, outputs: int = 20, size: float = 30.0) -> dict[str, torch.Tensor]:
    """Of two lanes: standard normal numbers and three directions that are larger, each half of the one before."""
    g = torch.Generator().manual_seed(5)
    shapes = {"x": (2, tokens, inputs), "w": (2, outputs, inputs), "g": (2, tokens, outputs)}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name, (_, rows, columns) in shapes.items():
        scale = size * 0.5 ** torch.arange(3)
        made[name] += torch.randn(2, rows, 3, generator=g) * scale @ torch.randn(2, 3, columns, generator=g)
    return made


def iterated(x: np.ndarray, v: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U [R, r], s [r] and V [C, r] of x [R, C] from v [C, r], with numpy's QR, in float64."""
    for _ in range(iterations):
        u, triangle = np.linalg.qr(x @ v)
        u = u * np.sign(np.diag(triangle))
        w = x.T @ u
        s = np.linalg.norm(w, axis=0)
        v = w / s
    return u, s, v


def random_signs(seed: int, *shape: int) -> torch.Tensor:
    return 1.0 - 2.0 * torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(seed: int, rows: int, columns: int, values: list[float]) -> np.ndarray:
    """A matrix with these singular values, then zeros."""
    rng, count = np.random.default_rng(seed), len(values)
    u, v = (np.linalg.qr(rng.standard_normal((n, count)))[0] for n in (rows, columns))
    return u * np.array(values) @ v.T


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rank=st.integers(1, 8),
    iterations=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_components_are_those_of_the_iteration_in_numpy(shape, rank, iterations, seed):
    rank = min(rank, *shape)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))
    start = random_signs(seed, 2, rank, shape[1])
    if torch.linalg.matrix_rank(start).min() < rank:  # the same sign vector twice
        return
    found = components(x, start, iterations)
    for lane in range(2):
        u, s, v = iterated(x[lane].double().numpy(), start[lane].T.double().numpy(), iterations)
        expected, size = u * s @ v.T, np.linalg.norm(x[lane])
        assert np.abs(found.product()[lane].numpy() - expected).max() < 1e-3 * size
        assert np.allclose(found.s[lane], s, atol=1e-3 * size)
        assert np.abs((x - found.product())[lane].double().numpy().T @ u).max() < 1e-3 * size  # nothing of U is left


@pytest.mark.parametrize("shape", [(48, 32), (20, 70)])
@pytest.mark.parametrize("seed", range(3))
def test_components_far_above_the_others_are_singular_vectors(shape, seed):
    """Whichever signs it begins with: against numpy's singular value decomposition."""
    values = [1e4, 100.0, 1.0, 1e-4, 1e-4]
    x = with_spectrum(seed, *shape, values)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    found = components(torch.tensor(x, dtype=torch.float32)[None], random_signs(seed + 9, 1, 3, shape[1]), 2)
    for theirs, ours, count in ((u.T, found.u, 3), (v, found.v, 3)):
        cosines = np.abs((theirs[:count] * ours[0].numpy()).sum(1))
        assert (cosines > [0.9999, 0.9999, 0.999]).all()  # of the third, 1, FP32 beside 1e4 leaves steps of 1e-3
    assert np.allclose(found.s[0], s[:3], rtol=1e-3)
    assert np.linalg.norm(x - found.product()[0].numpy()) < 1.05 * np.linalg.norm(s[3:]) + 4e-6 * s[0]  # 64 ulps


def test_components_beyond_the_rank_are_zero():
    x = torch.tensor(with_spectrum(1, 40, 24, [3.0, 2.0, 1.0]), dtype=torch.float32)[None]
    found = components(x, random_signs(4, 1, 8, 24), 2)
    assert (found.s[0, :3] > 0.5).all()
    assert (found.s[0, 3:] < 1e-5).all()
    assert torch.allclose(found.product(), x, atol=1e-5)
    none = components(torch.zeros(1, 40, 24), random_signs(4, 1, 8, 24), 2)
    assert not any(t.any() for t in none)
    rows = torch.tensor([[[3.0, 4.0], [6.0, 8.0], [4.0, -3.0]]])
    assert torch.equal(orthonormal(rows), torch.tensor([[[0.6, 0.8], [0.0, 0.0], [0.8, -0.6]]]))


@pytest.mark.parametrize("start", [(1.0, 1.0), (1.0, -1.0), (-1.0, -1.0)])
def test_the_worked_example(start):
    x = torch.tensor([[[6.0, 12.0], [3.0, 6.0]]])
    found, sign = components(x, torch.tensor([[start]]), 1), 1.0 if start[1] > 0 else -1.0
    assert torch.allclose(found.u, sign * torch.tensor([2.0, 1.0]) / 5**0.5)
    assert torch.allclose(found.v, sign * torch.tensor([1.0, 2.0]) / 5**0.5)
    assert torch.allclose(found.s, torch.tensor(15.0))
    assert torch.allclose(found.product(), x, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_lane_alone(value):
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    x[1, 3, 5] = value
    rest = x - components(x, random_signs(1, 2, 2, 16), 2).product()
    assert torch.isfinite(rest[0]).all()
    assert not torch.isfinite(rest[1]).any()


@pytest.mark.parametrize("power", [-80, -30, 40])
def test_the_unit_of_an_operand_does_not_matter(power):
    x, start = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(2)), random_signs(2, 1, 4, 32)
    one, other = components(x, start, 2), components(x * 2.0**power, start, 2)
    assert torch.equal(one.u, other.u)
    assert torch.equal(one.v, other.v)
    assert torch.equal(one.s * 2.0**power, other.s)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 17), st.integers(1, 70)),
    power=st.integers(-60, 60),
    distinct=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_native_code_has_the_bits_of_the_definition(shape, power, distinct, seed):
    """Rows of which some are multiples of others, or not finite, among them."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=g) * 2.0**power
    rows = rows[:, torch.arange(shape[1]) % distinct] * (1 + torch.arange(shape[1]))[:, None]
    if seed % 10 == 0:
        rows[-1, -1, -1] = [float("nan"), float("inf")][seed % 20 // 10]
    assert torch.equal(native.orthonormal(rows).nan_to_num(7.0), orthonormal(rows).nan_to_num(7.0))


def decoded(x: torch.Tensor, q: Quantizer, rotation: Hadamard | None, vectors: str, start: torch.Tensor) -> np.ndarray:
    """An operand [R, C] as float64, dense, by its definition: x̂ = Q(U) S Q(V)ᵀ + Q(x - U S Vᵀ), the latter rotated; the
    former U S Vᵀ where vectors are not quantized."""

    def of(values: np.ndarray, rotation: np.ndarray | None = None) -> np.ndarray:
        """Q of rows, padded to whole blocks and rotated before."""
        length = values.shape[1]
        values = np.pad(values, ((0, 0), (0, -length % 32)))
        turned = values if rotation is None else values @ rotation
        out = quantize(torch.tensor(turned, dtype=torch.float32), q).values.double().numpy()
        return (out if rotation is None else out @ rotation.T)[:, :length]

    wide, turn = x.double().numpy(), None
    if rotation:
        one = np.ones((1, 1))
        while len(one) < rotation.size:
            one = np.block([[one, one], [one, -one]])
        turn = np.kron(np.eye(-(-x.shape[1] // 32) * 32 // rotation.size), one / np.sqrt(rotation.size))
    u, s, v = iterated(wide, start.T.double().numpy(), 2)
    part = of(u.T).T * s @ of(v.T) if vectors == "quantized" else u * s @ v.T
    return part + of(wide - u * s @ v.T, turn)


@pytest.mark.parametrize(
    ("rotation", "vectors"),
    [(None, "quantized"), (Hadamard(size=32, signs="none"), "quantized"), (Hadamard(size=32, signs="none"), "fp32")],
    ids=["plain", "rotated", "vectors in FP32"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_every_product_is_that_of_the_definition_written_in_numpy(path, stage, rotation, vectors):
    """Sizes that no block divides. Numbers near a tie may go either way: the difference is small beside the error."""
    of = tensors()
    seeds = torch.tensor([7, 8])
    got = product(LaneNumerics([recipe_of(NV, 4, rotation, vectors)] * 2, seeds.tolist()), stage, of, LAYER)
    for lane in range(2):
        operands = []
        for name, dim in zip(STAGES[stage], GEMM_DIMS[stage], strict=True):
            x = of[name][lane] if dim == 2 else of[name][lane].T
            site = torch.tensor(8 * LAYER + SLOTS.index(f"{stage}.{name}") + TERM)
            start = signs(seeds, torch.tensor(0), site, 4 * x.shape[1]).view(2, 4, -1)[lane]
            operands.append(decoded(x, NV, rotation, vectors, start))
        expected = operands[0] @ operands[1].T
        lost = np.linalg.norm(expected - exact(stage, of)[lane].numpy())
        assert np.linalg.norm(got[lane].double().numpy() - expected) < 0.1 * lost


LOW_RANK = {vectors: replace(NV, outliers=LowRank(3, vectors=vectors)) for vectors in ("quantized", "fp32")}


def test_what_is_small_beside_a_few_large_directions_is_kept(path):
    """Errors of quantized vectors lie in these directions: outside, all but the rest's are of second order. As a whole
    they are no smaller, since a block's error is relative to its numbers either way, and in a product of what the large
    directions share they are larger, since they do not average out. Vectors in FP32 have none of them."""
    x = tensors(tokens=128, inputs=96, size=1000.0)["x"]
    eye, errors = torch.eye(96).expand(2, -1, -1), {}
    for name, q in {**LOW_RANK, "none": NV}.items():
        recipe = Recipe.uniform(NV)
        recipe = replace(recipe, fprop=replace(recipe.fprop, x=q, w=QUANTIZERS["none"]))
        error = (LaneNumerics([recipe] * 2, [0, 1]).gemm("fprop", LAYER, x, 2, eye, 2) - x).double().numpy()
        u, _, v = np.linalg.svd(x.double().numpy())
        small = u.transpose(0, 2, 1)[:, 3:] @ error @ v.transpose(0, 2, 1)[:, :, 3:]
        shared = error @ v.transpose(0, 2, 1)[:, :, :1]
        errors[name] = [np.linalg.norm(of) for of in (small, error, shared)]
    assert errors["quantized"][0] < 0.2 * errors["none"][0]
    assert 0.5 < errors["quantized"][1] / errors["none"][1] < 2
    assert errors["quantized"][2] > 2 * errors["none"][2]
    assert all(a < 0.02 * b for a, b in zip(errors["fp32"], errors["none"], strict=True))


def test_ranks_above_the_sizes_are_cut(path):
    """An operand that is all components: its rest is rounding, and one output or one token trains as others do."""
    for shape in ({"outputs": 1}, {"tokens": 1}, {"inputs": 2}):
        of = tensors(**shape)
        numerics = LaneNumerics([recipe_of(FINE, 16)] * 2, [0, 1])
        for stage in STAGES:
            got = product(numerics, stage, of, LAYER).double()
            assert (got - exact(stage, of)).norm() < 0.1 * exact(stage, of).norm()


@pytest.mark.parametrize("stage", STAGES)
def test_a_mean_of_one_operand_meets_components_of_the_other(path, stage):
    of = tensors(tokens=64)
    means = {name: replace(FINE, outliers=Mean()) for name in STAGES[stage][:1] if name != "w"}
    for first in (means, {STAGES[stage][1]: replace(FINE, outliers=Mean())} if stage == "wgrad" else {}):
        got = product(LaneNumerics([recipe_of(FINE, **first)] * 2, [0, 1]), stage, of, LAYER).double()
        assert (got - exact(stage, of)).norm() < 0.05 * exact(stage, of).norm()


@pytest.mark.parametrize("rotation", [None, Hadamard(size=16)])
def test_the_forwards_copy_has_the_components(path, rotation):
    of, recipe = tensors(), recipe_of(NV, rotation=rotation)
    recipe = replace(
        recipe, dgrad=replace(recipe.dgrad, source="forward"), wgrad=replace(recipe.wgrad, source="forward")
    )
    forward = LaneNumerics([recipe] * 2, [0, 1]).forward(LAYER, of["x"], of["w"])
    assert forward.x.shape == of["x"].shape
    assert torch.allclose(forward.y, forward.x @ forward.w.mT, rtol=1e-4, atol=1e-1)
    assert (forward.x - of["x"]).square().sum() < 0.03 * of["x"].square().sum()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lane_has_the_same_bits_alone(path, stage, dtype):
    of = {name: x.to(dtype) for name, x in tensors(tokens=40, inputs=48, outputs=32).items()}
    recipes = [recipe_of(q, 4, Hadamard(size=16)) for q in (NV, replace(NV, rounding=Stochastic()))]
    assert same_bits_alone(recipes, stage, of, LAYER)


def test_both_paths_have_the_same_bits(monkeypatch):
    assert same_bits_on_both_paths(monkeypatch, METIS, tensors(inputs=48, outputs=32), LAYER)


def test_a_backend_without_code_for_it_says_so():
    q, native_code = replace(NV, outliers=LowRank()), _compiled()
    backends = {native_code: None, replace(native_code, orthonormal=orthonormal): "found by torch", PLAIN: None}
    for backend, said in backends.items():
        why = slot_of([q], 0, torch.device("cpu"), backend).why_not_fused
        assert said in why if said else why is None


def test_sums_over_few_numbers_at_a_time_have_the_same_bits(monkeypatch):
    rows = torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(3))
    whole = orthonormal(rows)
    monkeypatch.setattr(low_rank, "AT_ONCE", 2000)
    assert torch.equal(orthonormal(rows), whole)


def test_signs_are_drawn_anew_in_each_step_layer_and_part_and_kept_under_evaluation(path):
    of, recipe = tensors(size=0.0), recipe_of(NV)
    numerics = LaneNumerics([recipe] * 2, [0, 1])
    first = product(numerics, "fprop", of, LAYER)
    assert torch.equal(product(numerics, "fprop", of, LAYER), first)
    numerics.part = 1
    assert not torch.equal(product(numerics, "fprop", of, LAYER), first)
    numerics.part = 0
    numerics.step.fill_(1)
    assert not torch.equal(product(numerics, "fprop", of, LAYER), first)
    numerics.step.fill_(0)
    rounded = LaneNumerics([recipe_of(replace(NV, rounding=Stochastic()))] * 2, [0, 1])
    assert not torch.equal(product(rounded, "fprop", of, LAYER), first)
    rounded.evaluation = "quantized"
    assert torch.equal(product(rounded, "fprop", of, LAYER), first)
