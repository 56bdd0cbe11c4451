"""On a CUDA device the same code gives the same quantizers, bit for bit, and the same independence of lanes."""

import warnings

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, STAGES, Quantizer, Recipe
from fp4dse.dse.estimator import DGE, Estimator, PowerLaw, Sigmoid, Spline, Through, Trust
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import BF16, FP32
from fp4dse.kernels import LaneNumerics, backend, lane_sum, lanes, quantize, silu
from fp4dse.kernels.gemm import GEMMS
from fp4dse.kernels.ops import philox
from fp4dse.kernels.ops.fp8 import is_taken
from fp4dse.kernels.ops.products import is_large
from fp4dse.kernels.ops.rotation import hadamard
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.operand.records import SavedInput
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of
from fp4dse.tasks import TASKS, Lane, get_task, train
from fp4dse.tasks.bench.recipes import with_amax
from fp4dse.tasks.engine import Population
from tests.tasks.in_two import train_in_two

pytestmark = pytest.mark.gpu

NAMES = ("nvfp4", "nvfp4-sr", "ue5m3-sr")


def wide(rows: int = 512, columns: int = 128) -> torch.Tensor:
    """Random rows of very different size, a zero row, and a row of subnormal numbers."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-40, 40, (rows, 1)).float())
    x[3] = 0
    x[4] = torch.randn(columns) * 1e-41
    return x


@pytest.mark.parametrize("name", [n for n, q in QUANTIZERS.items() if not q.is_plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizers_have_the_bits_of_the_cpu(name, dtype):
    x = wide().to(dtype)
    for rounding in (QUANTIZERS[name].rounding, Stochastic()):
        q = msgspec.structs.replace(QUANTIZERS[name], rounding=rounding)
        if quantizer_faults(q):
            continue  # there is no stochastic form
        here, there = quantize(x, q, seed=3), quantize(x.cuda(), q, seed=3)
        for field in ("values", "codes", "scales", "tensor_scale"):
            assert torch.equal(getattr(here, field), getattr(there, field).cpu()), field


def test_random_bits_rotations_sums_and_activations_have_the_bits_of_the_cpu():
    seeds, step = torch.arange(3), torch.tensor(7)
    drawn = philox.random16(seeds.cuda(), 1, step.cuda(), step.cuda(), 4096).cpu()
    assert torch.equal(drawn, philox.random16(seeds, 1, step, step, 4096))
    x = torch.randn(4, 96, 128)
    assert torch.equal(hadamard(x.cuda(), 32, 1).cpu(), hadamard(x, 32, 1))
    assert torch.equal(lane_sum(x.cuda(), 1).cpu(), lane_sum(x, 1))
    assert torch.equal(silu(x.cuda()).cpu(), silu(x))


def operand_arguments(shape, dtype=torch.bfloat16):
    """x and what follows it, for lanes that round to nearest and stochastically by turns, blocks along rows."""
    q = QUANTIZERS["nvfp4-1716"]
    lanes = [msgspec.structs.replace(q, rounding=Stochastic()) if i % 2 else q for i in range(1, shape[0] + 1)]
    tables = descriptor(lanes, "cuda")
    seeds, step = torch.arange(shape[0], device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    x = torch.randn(shape, device="cuda").to(dtype)
    return x, False, Call(16, *tables, features_of(*tables), seeds, step, 5)


def test_the_fused_kernels_are_taken():
    assert backend("cuda").name == "triton", backend("cuda").why_not


@pytest.mark.parametrize("shape", [(1, 8192, 2304), (300, 250, 272)])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_operands_have_the_bits_of_the_reference(shape, columns, dtype):
    x, _, call = operand_arguments(shape, dtype)
    x = x.mT.contiguous() if columns else x
    for of_x in (dtype, torch.float32):
        values, dec = fused.operand(x, columns, call, of_x)
        expected, expected_dec = unfused.operand(x, columns, call)
        assert torch.equal(values, expected.to(of_x))
        assert torch.equal(dec, expected_dec)


@pytest.mark.parametrize("shape", [(1, 4096, 2304), (300, 256, 128)])
@pytest.mark.parametrize("rotations", [(0, 0), (0, 128), (16, 0)], ids=str)
def test_large_operands_rotated_packed_and_of_both_orientations_have_the_bits_of_the_reference(shape, rotations):
    x, _, call = operand_arguments(shape)
    lanes = [QUANTIZERS["nvfp4-1716"]] * shape[0]
    signs = [torch.randint(0, 2, (shape[0], n), device="cuda") * 2.0 - 1 if n else None for n in rotations]
    calls = [call._replace(rotation=n, signs=of_n) for n, of_n in zip(rotations, signs, strict=True)]
    for dtype in (torch.bfloat16, torch.uint8):
        got = fused.both(x, tuple(calls), dtype)
        for n, columns in enumerate((False, True)):
            arguments = x, columns, calls[n]
            if dtype == torch.uint8:
                expected, alone = unfused.packed(*arguments, lanes), fused.packed(*arguments)
            else:
                expected, alone = unfused.operand(*arguments), fused.operand(*arguments, dtype)
            together = got[n * len(alone) : (n + 1) * len(alone)]
            for a, b, c in zip(alone, together, expected, strict=True):
                assert torch.equal(a, c.to(a.dtype))
                assert torch.equal(b, a)


def test_a_captured_graph_draws_anew_at_every_step():
    arguments = operand_arguments((4, 64, 128))
    step = arguments[2].step
    fused.operand(*arguments, torch.bfloat16)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, dec = fused.operand(*arguments, torch.bfloat16)
        step.add_(1)
    seen = []
    for _ in range(3):
        expected, expected_dec = unfused.operand(*arguments)
        graph.replay()
        assert torch.equal(values.float(), expected)
        assert torch.equal(dec, expected_dec)
        seen.append(values.clone())
    assert not torch.equal(seen[0], seen[1])


def test_torch_compile_takes_the_operator():
    arguments = operand_arguments((2, 64, 128))
    compiled = torch.compile(lambda *a: fused.operand(*a, torch.float32)[0] * 2, fullgraph=True)
    assert torch.equal(compiled(*arguments), unfused.operand(*arguments)[0] * 2)


def test_the_operators_do_not_wait_for_the_device():
    x, columns, call = operand_arguments((2, 64, 128))
    rotated = call._replace(rotation=128, signs=torch.ones(2, 128, device="cuda"))

    def run():
        fused.operand(x, columns, rotated, torch.float32)
        fused.packed(x, columns, call)

    run()  # compiles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_operator_takes_no_memory_beyond_its_outputs():
    arguments = operand_arguments((1, 4096, 4096))
    fused.operand(*arguments, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = fused.operand(*arguments, torch.bfloat16)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= sum(t.nbytes for t in outputs) + 2**17  # one maximum for every 8192 elements


def test_a_lane_has_the_same_bits_in_any_company():
    recipes = [Recipe.named(n) for n in (*NAMES, "nvfp4", "ue5m3-sr")]
    x, w = torch.randn(5, 256, 192, device="cuda"), torch.randn(5, 64, 192, device="cuda")
    together = LaneNumerics(recipes, range(5), "cuda").gemm("dgrad", 1, x, 2, w, 2)
    for chosen in ([3, 1], [4, 2, 1], [2]):
        few = LaneNumerics([recipes[i] for i in chosen], chosen, "cuda").gemm("dgrad", 1, x[chosen], 2, w[chosen], 2)
        assert torch.equal(few, together[chosen])


ESTIMATORS = {
    "nvfp4-sr-rht": Through(PowerLaw(), scale="softmax", scale_rounding=Sigmoid()),
    "nvfp4": Through(DGE(), scale="exact", scale_rounding=Spline()),
    "mxfp4": Through(Sigmoid(), True, "softmax-diagonal"),
    "quartet": Through(Trust()),
}
"""Named recipe -> what its gradients pass through."""


def estimated(name: str) -> Recipe:
    spec = ESTIMATORS[name]
    return msgspec.structs.replace(Recipe.named(name), estimator=Estimator(x=spec, w=spec))


@pytest.mark.parametrize("shape", [(1, 4096, 1152), (96, 512, 256), (300, 50, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_large_gradients_pass_the_kernel_with_the_bits_of_the_reference_and_of_the_cpu(name, dtype, shape, monkeypatch):
    recipes = [estimated(name)] * shape[0]
    x, g = torch.randn(shape).to(dtype), torch.randn(shape)
    x[:, ::3] *= torch.exp2(torch.randint(-40, 40, (shape[0], len(range(0, shape[1], 3)), 1)).float()).to(dtype)
    x[:, 1] = 0
    expected = None
    for device, kernel in (("cuda", fused.through), ("cuda", None), ("cpu", None)):
        if device == "cpu" and x.numel() > 2**23:
            continue
        chosen = PLAIN if device == "cpu" else msgspec.structs.replace(backend("cuda"), through=kernel)
        monkeypatch.setattr(lanes, "backend", lambda _, chosen=chosen: chosen)
        numerics = LaneNumerics(recipes, range(len(recipes)), device)
        there = x.to(device)
        saved = numerics.forward(3, there[:, :1], there, save=(False, True)).saved_w
        assert isinstance(saved, SavedInput) == (kernel is not None)
        got = numerics.backward("w", 3, g.to(device), saved).cpu()
        expected = got if expected is None else expected
        assert torch.equal(got, expected)


@pytest.mark.parametrize("task", ["regression", "vision"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_training_with_an_estimator_is_that_of_the_reference(task, name, monkeypatch):
    task = msgspec.structs.replace(get_task(task, "smoke"), steps=20)
    trained = [Lane(estimated(name), task.lr, seed) for seed in (0, 1)]
    by_kernel = train(task, trained, "cuda")
    assert not any("gradient" in reason for reason in by_kernel.fallbacks), by_kernel.fallbacks
    chosen = msgspec.structs.replace(backend("cuda"), through=None)
    monkeypatch.setattr(lanes, "backend", lambda _: chosen)
    assert train(task, trained, "cuda").lanes == by_kernel.lanes


GRAPHED = [
    ["bf16"],
    ["nvfp4", "nvfp4-sr", "ue5m3-sr"],
    ["fp4-all-the-way"],
    ["nvidia-nvfp4-finish"],
    ["nvfp4-stable-spam"],
    ["nvfp4-muon"],
    ["nvfp4-sr-rht"],
    ["quartet"],
    ["quartet2"],
    ["tetrajet-qema", "tetrajet"],
    ["tetrajet2"],
    ["tetrajet2-outcontrol"],
    ["arcquant"],
    ["chon"],
    ["tetrajet2-reset"],
    ["ue5m3-graphcore"],
    ["nvidia-nvfp4"],
    ["hif4-ascend"],
    ["wang-dge-occ"],
    ["averis"],
    ["metis"],
    ["pact"],
    ["mixfp4"],
    ["sun-radix4"],
    ["luq-smp"],
]


@pytest.mark.parametrize("names", GRAPHED, ids="+".join)
@pytest.mark.parametrize("between", ["", "+bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("task", ["regression", "vision", "diffusion"])
def test_a_captured_step_trains_as_an_eager_one(task, between, names, monkeypatch):
    """Bit for bit, with all that is kept from step to step."""
    task = msgspec.structs.replace(get_task(task, f"smoke{between}"), steps=25)
    lanes = [Lane(Recipe.named(name), task.lr, seed) for name in names for seed in (0, 1)]
    captured = train(task, lanes, "cuda")
    monkeypatch.setattr("fp4dse.tasks.engine.graphs.EAGER_STEPS", 1000)
    eager = train(task, lanes, "cuda")
    assert not any("graph" in reason for reason in captured.fallbacks), captured.fallbacks
    assert captured.lanes == eager.lanes


def test_steps_that_give_back_their_memory_are_captured_again(monkeypatch):
    """Where little is left, for a finish, what is recorded and evaluations; nothing changes."""
    task = msgspec.structs.replace(get_task("vision", "smoke"), steps=25)
    lanes = [Lane(Recipe.named("nvidia-nvfp4-finish"), task.lr, seed) for seed in (0, 1)]
    usual = train(task, lanes, "cuda", record=True)
    monkeypatch.setattr("fp4dse.tasks.engine.graphs.is_crowded", lambda device: True)
    monkeypatch.setattr("fp4dse.tasks.engine.evaluation.is_tight", lambda population: True)
    crowded = train(task, lanes, "cuda", record=True)
    assert not any("graph" in reason for reason in crowded.fallbacks), crowded.fallbacks
    assert crowded.lanes == usual.lanes


def test_a_recipe_gets_the_products_that_it_asks_for():
    """Of sizes that FP8 units take, so that operands keep a power of two for the next step."""
    exact, rows, columns, k = Recipe.named("mxfp4"), 4096, 2048, 1024
    assert is_taken(rows, columns, k)
    x, w = torch.randn(2, rows, k, device="cuda"), torch.randn(2, columns, k, device="cuda")
    wanted = LaneNumerics([exact] * 2, [0, 1], "cuda").forward(0, x, w).y
    for gemm, error in (("fp8-exact", 2.0**-9), ("bf16-rounded", 1e-6)):  # MXFP4 has no factor that could be rounded
        made = LaneNumerics([msgspec.structs.replace(exact, gemm=gemm)] * 2, [0, 1], "cuda")
        assert set(made.gemms.values()) == {gemm}, made.gemm_why_not
        assert {stage.gemm for stage in made.baseline.values()} == {"bf16-exact"}
        assert (made.forward(0, x, w).y - wanted).norm() / wanted.norm() < error
        assert bool(made.state()) == (gemm == "fp8-exact")


RUN = [name for name, gemm in GEMMS.items() if not gemm.fp8]
"""Backends whose `run` is their product: that of FP8 units takes other operands, tests/kernels/test_fp8_products.py."""
INTEGERS = {"bf16-exact": (255, 64), "tf32-exact": (2047, 4), "fp32": (2047, 4)}
"""Backend -> (largest integer whose smaller ones are all held too, products that FP32 can add up exactly)."""


def integers(largest: int, *shape: int) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, device="cuda").float()


@pytest.mark.parametrize("name", INTEGERS)
def test_exact_products_of_integers_have_no_error(name):
    """In any order of accumulation: every partial sum is an integer below 2^24."""
    largest, k = INTEGERS[name]
    a, b = integers(largest, 3, 40, k), integers(largest, 3, 24, k)
    assert torch.equal(GEMMS[name].run(a, b).double(), torch.bmm(a.double(), b.double().mT))


@pytest.mark.parametrize(("name", "lowest"), [("bf16-exact", -133), ("tf32-exact", -136), ("fp32", -149)])
def test_subnormal_operands_are_not_flushed(name, lowest):
    a, b = integers(7, 2, 16, 32) * 2.0**-75 * 2.0 ** (lowest + 75), integers(7, 2, 16, 32) * 2.0**120
    assert a.abs().max() < torch.finfo(torch.float32).tiny
    assert torch.equal(GEMMS[name].run(a, b).double(), torch.bmm(a.double(), b.double().mT))


@pytest.mark.parametrize("name", RUN)
def test_products_are_those_of_float64_within_the_error_of_the_accumulator(name):
    """The bound is far below the error of an operand that is rounded to BF16, as the last line shows."""
    power = torch.exp2(torch.randint(-6, 7, (2, 3, 200, 16), device="cuda").float())
    a, b = (x.view(3, 200, 16, 1).mul(integers(12, 3, 200, 16, 16)).view(3, 200, 256) for x in power)
    exact, size = torch.bmm(a.double(), b.double().mT), torch.bmm(a.double().abs(), b.double().abs().mT)
    error = GEMMS[name].run(a, b).double() - exact
    assert (error.abs() <= 2.0**-18 * size).all()
    wide = torch.randn(3, 200, 256, device="cuda")
    rounded = GEMMS["bf16-rounded"].run(wide, wide).double() - torch.bmm(wide.double(), wide.double().mT)
    assert (rounded.abs() > 2.0**-18 * torch.bmm(wide.double().abs(), wide.double().abs().mT)).any()


PRODUCTS = [
    *[(64, 48, 256), (33, 10, 48), (7, 1, 17), (512, 10, 256), (512, 1, 1024), (10, 256, 512), (1, 64, 8192)],
    *[(512, 256, 10), (1, 256, 512), (512, 1, 256), (1024, 1, 8192), (129, 65, 8193), (128, 27, 8192), (64, 64, 64)],
    *[(128, 352, 16384), (352, 128, 16384), (16384, 128, 352), (256, 128, 16384), (1152, 128, 8192)],
    *[(1024, 1024, 8184), (1024, 1024, 8192), (1000, 1056, 8400), (1000, 1057, 8400), (1001, 1056, 8401)],
]
"""(rows, columns, contraction): narrow, odd and long ones, of language:9M, and on both sides of what is large."""


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize(("rows", "columns", "k"), PRODUCTS)
def test_a_product_has_the_same_bits_in_any_company(name, rows, columns, k, along):
    lanes = 5 if rows * columns * k > 2**26 else 70
    a, b = torch.randn(lanes, rows, k, device="cuda"), torch.randn(lanes, columns, k, device="cuda")

    def product(lanes):
        x, y = a[lanes].to(GEMMS[name].operand), b[lanes].to(GEMMS[name].operand)
        return GEMMS[name].run(x, y) if along == "rows" else GEMMS[name].run(x.mT.contiguous().mT, y.mT.contiguous().mT)

    together = product([*range(lanes)])
    assert together.isfinite().all()
    for chosen in ([3, 1], [4, 2, 1], [2], [*range(3, lanes)]):
        assert torch.equal(product(chosen), together[chosen])


@pytest.mark.parametrize("name", ["bf16-exact", "tf32-exact", "fp32"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_large_product_takes_no_memory_beyond_its_result(name, lanes):
    a, b = (torch.randn(lanes, n, 4096, device="cuda").to(GEMMS[name].operand) for n in (2048, 1024))
    assert is_large(a, b)
    GEMMS[name].run(a, b)  # cuBLAS makes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = GEMMS[name].run(a, b)
    assert torch.cuda.max_memory_allocated() - before == out.nbytes


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("rows", "columns", "k"), [(64, 32, 64), (2048, 1024, 4096)], ids=["small", "large"])
def test_a_captured_product_has_the_same_bits_and_waits_for_nothing(name, lanes, rows, columns, k):
    a, b = integers(12, lanes, rows, k), integers(12, lanes, columns, k)
    expected = GEMMS[name].run(a, b)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            GEMMS[name].run(a, b)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = GEMMS[name].run(a, b)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize(
    ("quantizer", "name"),
    [
        (QUANTIZERS["nvfp4"], "bf16-exact"),
        (QUANTIZERS["mxfp4-2d"], "bf16-exact"),
        (QUANTIZERS["bf16"], "bf16-exact"),
        (Quantizer(scale=BF16()), "tf32-exact"),
        (Quantizer(scale=FP32()), "fp32"),
        (QUANTIZERS["none"], "fp32"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.label(),
)
def test_lanes_take_the_fastest_product_that_holds_their_operands(quantizer, name):
    """The operands are the CPU's, bit for bit, and the product is theirs in FP32."""
    recipe = Recipe.uniform(quantizer)
    there, here = (LaneNumerics([recipe] * 2, [0, 1], device) for device in ("cuda", "cpu"))
    assert there.gemms == dict.fromkeys(STAGES, name), there.gemm_why_not
    x, w = torch.randn(2, 64, 96), torch.randn(2, 32, 96)
    dtype = GEMMS[name].operand
    operands = []
    for operand, value in zip(("x", "w"), (x, w), strict=True):
        slot = f"fprop.{operand}"
        use = msgspec.structs.replace(there.use(0), dtype=dtype)
        ((seen, dec, shift),) = there.slots[slot].quantize(value.cuda(), use).terms
        ((expected, expected_dec, _),) = here.slots[slot].quantize(value, here.use(0)).terms
        assert shift is None
        assert torch.equal(seen.cpu().float(), expected)
        assert dec is None or torch.equal(dec.cpu(), expected_dec)
        operands.append(expected.double() * (1 if dec is None else expected_dec.double()[:, None, None]))
    size = torch.bmm(operands[0].abs(), operands[1].abs().mT)
    error = there.gemm("fprop", 0, x.cuda(), 2, w.cuda(), 2).cpu().double() - torch.bmm(operands[0], operands[1].mT)
    assert (error.abs() <= 2.0**-18 * size).all()


PRESETS = [
    (name, preset)
    for name, presets in TASKS.items()
    for preset, task in presets.items()
    if preset.endswith("smoke") and not task.rolls_out
]
"""Of every task, but for those whose samples amplify the last bits: tests/tasks/rl has theirs."""


@pytest.mark.parametrize("between", ["", "+bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "preset"), [*PRESETS, ("regression", "small")])
def test_training_is_independent_of_company_and_close_to_the_cpu(name, preset, between):
    task = msgspec.structs.replace(get_task(name, preset + between), steps=20)
    lanes = [Lane(Recipe.named(n), task.lr, seed) for n in NAMES for seed in (0, 1)]
    wild = Lane(lanes[0].recipe, 1e30, 5)
    together = train(task, lanes, "cuda").lanes
    mixed = train(task, [wild, lanes[4], lanes[1]], "cuda").lanes
    assert mixed[0].status == "diverged"
    assert mixed[1:] == [together[4], together[1]]
    assert [train(task, lanes[i : i + 1], "cuda").lanes[0] for i in (4, 1)] == [together[4], together[1]]
    assert train(task, lanes, "cuda").lanes == together
    for here, there in zip(train(task, lanes).lanes, together, strict=True):
        assert there.val_loss == pytest.approx(here.val_loss, rel=0.2)


def held(name: str) -> Recipe:
    return with_amax(Recipe.named(name), "held")


def test_a_captured_step_does_not_wait_for_the_device():
    task = msgspec.structs.replace(get_task("regression", "smoke"), steps=200)
    lanes = [Lane(held("nvidia-nvfp4"), task.lr, seed) for seed in (0, 1)]
    population = Population(task, lanes, "cuda")
    for step in range(160):  # both phases are captured
        population.train_step(step)
    assert len(population.graphs.captured) == 2, population.fallbacks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            for step in range(160, 200):
                population.train_step(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("task", "preset"), [("regression", "smoke"), ("vision", "smoke"), ("vision", "smoke+bf16")])
@pytest.mark.parametrize("names", [["nvfp4", "nvfp4-sr"], ["ue5m3-graphcore"], ["tetrajet-qema"]], ids="+".join)
@pytest.mark.parametrize("few", [2, 1])
def test_lanes_that_stay_do_not_notice_that_others_leave(task, preset, names, few):
    task = msgspec.structs.replace(get_task(task, preset), steps=20)
    lanes = [Lane(Recipe.named(name), task.lr, seed) for name in names for seed in (0, 1, 2)]
    whole, fewer = Population(task, lanes, "cuda"), Population(task, lanes, "cuda")
    stay = [len(lanes) - 1, 0][:few]
    for step in range(20):
        whole.train_step(step)
        fewer.train_step(step)
        if step == 9:
            fewer.keep(stay, 10)
    expected = whole.state(20)
    for name, value in fewer.state(20).items():
        assert torch.equal(value.cpu(), expected[name].cpu()[stay]), name


def test_a_training_goes_on_from_its_checkpoint(tmp_path):
    task = msgspec.structs.replace(get_task("regression", "smoke"), steps=60)
    lanes = [Lane(held("nvidia-nvfp4"), task.lr, seed) for seed in (0, 1)]
    again = train_in_two(task, lanes, "cuda", file=tmp_path / "file", after=30)
    assert again == train(task, lanes, "cuda").lanes
