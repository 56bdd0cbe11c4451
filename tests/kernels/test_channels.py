"""Input channels that are treated apart (OutControl, 2510.27527; ARCQuant, 2601.07475), against the definition written
out for one lane: which they are, what the products are, what is carried, and that lanes stay by themselves."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.channels import Corrected, Held
from fp4dse.dse.scale import FP32, TensorScale
from fp4dse.kernels import LaneNumerics, lanes, quantize
from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.spec.channels import by_score, in_order, put_back

replace = msgspec.structs.replace
NV, MX8, BF16 = QUANTIZERS["nvfp4"], QUANTIZERS["mxfp8-rceil"], QUANTIZERS["bf16"]
ROW = Quantizer(block="row", scale=FP32())
BY_ERROR = Corrected(of="both", by="error")
KINDS = [Held(format=MX8), Held(format=BF16), Corrected(), Corrected(of="both"), BY_ERROR]


def with_channels(channels: Held | Corrected | None, q: Quantizer = NV, rotation: Hadamard | None = None) -> Recipe:
    """The same quantizer in all slots; the rotation is that of wgrad."""
    recipe = Recipe.uniform(q)
    fprop, wgrad = replace(recipe.fprop, channels=channels), replace(recipe.wgrad, rotation=rotation)
    return replace(recipe, fprop=fprop, wgrad=wgrad)


def tensors(tokens: int, inputs: int, outputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and g of two lanes, whole numbers, so that scores are exact; some channels of x are large."""
    g = torch.Generator().manual_seed(seed)
    x, w, out = (torch.randint(-8, 9, (2, *shape), generator=g).float() for shape in
                 ((tokens, inputs), (outputs, inputs), (tokens, outputs)))  # fmt: skip
    return x * 4.0 ** torch.randint(0, 4, (2, 1, inputs), generator=g), w, out


def order_of(x: torch.Tensor, by: str) -> list[int]:
    """Channels of x [M, K] by falling score, of equals the first first."""
    columns = x.double().T.tolist()
    score = {
        "norm": lambda column: sum(v * v for v in column),
        "mean": lambda column: sum(map(abs, column)),
        "amax": lambda column: max(map(abs, column)),
    }[by]
    return sorted(range(len(columns)), key=lambda j: (-score(columns[j]), j))


def coded(x: torch.Tensor, q: Quantizer, unit: int = 32, rotation: Hadamard | None = None) -> torch.Tensor:
    """[R, C] quantized along its rows, with zeros up to whole blocks, float64 [R, ≥ C]."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % unit))
    if rotation:
        x = rotate(x[None], rotation.size, 2, None, rotation.order)[0]
    return (x.bfloat16() if q is BF16 else quantize(x, q).values).double()


def forward(x: torch.Tensor, w: torch.Tensor, channels: Held | Corrected, q: Quantizer) -> torch.Tensor:
    """Y of one lane."""
    order = order_of(x, channels.by)
    x, w, k = x[:, order], w[:, order], channels.count(x.shape[1])
    if isinstance(channels, Held):
        parts = ((slice(k), channels.format), (slice(k, None), q))
        return sum(coded(x[:, part], of) @ coded(w[:, part], of).T for part, of in parts)
    a, b = (coded(of, q)[:, : x.shape[1]] for of in (x, w))
    y = a @ b.T + coded((x - a.float())[:, :k], q)[:, :k] @ b[:, :k].T
    return y if channels.of == "x" else y + a[:, :k] @ coded((w - b.float())[:, :k], q)[:, :k].T


def hot_channels(x: torch.Tensor, w: torch.Tensor, channels: Corrected, q: Quantizer) -> torch.Tensor:
    """Y of one lane with the errors of channels that stay where they are, chosen by both operands' errors."""
    a, b = (coded(of, q)[:, : x.shape[1]] for of in (x, w))
    lost, lost_w = x - a.float(), w - b.float()
    score = lost.abs().double().mean(0) + lost_w.abs().double().mean(0)
    chosen = score.argsort(descending=True, stable=True)[: channels.count(x.shape[1])]
    y = a @ b.T + coded(lost[:, chosen], q)[:, : len(chosen)] @ b[:, chosen].T
    return y if channels.of == "x" else y + a[:, chosen] @ coded(lost_w[:, chosen], q)[:, : len(chosen)].T


@given(data=st.data(), tokens=st.integers(1, 9), inputs=st.integers(2, 70), share=st.sampled_from([0.01, 0.1, 0.5]))
@settings(max_examples=8, deadline=None)
def test_errors_of_hot_channels_are_multiplied_where_they_are(data, tokens, inputs, share):
    channels = Corrected(share=share, by="error", of=data.draw(st.sampled_from(["x", "both"])))
    q = data.draw(st.sampled_from([NV, QUANTIZERS["mxfp4"], replace(NV, tensor_scale=TensorScale(over="row"))]))
    x, _, _ = tensors(tokens, inputs, 5, data.draw(st.integers(0, 99)))
    w = torch.randn(2, 5, inputs, generator=torch.Generator().manual_seed(tokens))  # no two errors are equal
    numerics = LaneNumerics([with_channels(channels, q)] * 2, [0, 1])
    y = numerics.forward(0, x, w).y
    for lane in range(2):
        expected = hot_channels(x[lane], w[lane], channels, q)
        assert (y[lane].double() - expected).abs().max() <= 1e-5 * (x.abs().amax() * 8 * inputs)
    assert torch.equal(numerics.gemm("fprop", 0, x, 2, w, 2), y)


@given(
    data=st.data(),
    tokens=st.integers(1, 9),
    inputs=st.integers(2, 70),
    share=st.sampled_from([0.01, 0.1, 0.3, 0.99]),
    by=st.sampled_from(["norm", "amax", "mean"]),
)
@settings(max_examples=8, deadline=None)
def test_the_forward_product_is_the_sum_of_its_parts(data, tokens, inputs, share, by):
    channels = replace(data.draw(st.sampled_from(KINDS[:-1])), share=share, by=by)
    q = data.draw(st.sampled_from([NV, QUANTIZERS["mxfp4"], ROW, replace(NV, tensor_scale=TensorScale(over="row"))]))
    x, w, _ = tensors(tokens, inputs, 5, data.draw(st.integers(0, 99)))
    y = LaneNumerics([with_channels(channels, q)] * 2, [0, 1]).forward(0, x, w).y
    for lane in range(2):
        expected = forward(x[lane], w[lane], channels, q)
        assert (y[lane].double() - expected).abs().max() <= 1e-5 * (x.abs().amax() * 8 * inputs)


@pytest.mark.parametrize("rotation", [None, Hadamard(size=32, signs="none")], ids=["plain", "rotated"])
@pytest.mark.parametrize("steps", [1.0, 2.0])
def test_columns_of_the_weight_gradient_are_those_of_the_forward_product(path, rotation, steps):
    """Held channels in their format, not rotated; the others as in a layer without any. Their choice is fprop's."""
    channels = Held(format=MX8, share=0.2, steps=steps)
    x, w, g = tensors(24, 40, 7)
    numerics = LaneNumerics([with_channels(channels, NV, rotation)] * 2, [0, 1])
    numerics.forward(0, x.flip(2), w)
    numerics.step.fill_(1)
    numerics.forward(0, x, w)
    got = numerics.gemm("wgrad", 0, g, 1, x, 1)
    for lane in range(2):
        order = order_of(x[lane] if steps == 1 else x[lane].flip(1), "norm")
        held, others = order[:8], order[8:]
        a, b = g[lane].T, x[lane].T
        expected = torch.zeros(7, 40, dtype=torch.float64)
        expected[:, held] = coded(a, MX8) @ coded(b[held], MX8).T
        expected[:, others] = coded(a, NV, 32, rotation) @ coded(b[others], NV, 32, rotation).T
        assert torch.allclose(got[lane].double(), expected, rtol=1e-5, atol=1e-2)
    dgrad = LaneNumerics([with_channels(None)] * 2, [0, 1]).gemm("dgrad", 0, g, 2, w, 1)
    assert torch.equal(numerics.gemm("dgrad", 0, g, 2, w, 1), dgrad)


def test_a_weight_gradient_left_alone_is_that_without_channels(path):
    x, w, g = tensors(24, 40, 7)
    got = []
    for channels in (None, Held(wgrad=False), Corrected()):
        numerics = LaneNumerics([with_channels(channels)] * 2, [0, 1])
        numerics.forward(0, x, w)
        got.append(numerics.gemm("wgrad", 0, g, 1, x, 1))
    assert all(torch.equal(got[0], other) for other in got[1:])


@pytest.mark.parametrize("by", ["norm", "amax", "mean"])
def test_the_order_is_stable_and_a_permutation(by):
    x = torch.tensor([[[0.0, 2, -2, 1, 2, 1, torch.nan]]])
    order = by_score(x, 2, by)
    assert order.tolist() == [[6, 1, 2, 4, 3, 5, 0]]
    assert torch.equal(order, by_score(x.mT, 1, by))
    for dim in (1, 2):
        laid = x.nan_to_num(9.0) if dim == 2 else x.nan_to_num(9.0).mT
        assert torch.equal(put_back(in_order(laid, order, dim), order, dim), laid)


def test_the_worked_examples_of_the_docs():
    x, w = torch.tensor([[[1.0, -24, 3, 0.75]]]), torch.tensor([[[2.0, 1, -4, 8]]])
    found = {}
    for name, channels in (("none", None), ("held", Held(share=0.25, format=BF16))):
        recipe = with_channels(channels, ROW)
        recipe = replace(recipe, fprop=replace(recipe.fprop, w=BF16))
        found[name] = LaneNumerics([recipe], [0]).forward(0, x, w).y.item()
    x = torch.tensor([[[10.0, -24, 4, 2]]])
    for name, channels in (("without error", None), ("with error", Corrected(share=0.5, by="amax"))):
        recipe = with_channels(channels, ROW)
        recipe = replace(recipe, fprop=replace(recipe.fprop, w=BF16))
        found[name] = LaneNumerics([recipe], [0]).forward(0, x, w).y.item()
    assert found == pytest.approx({"none": -40, "held": -28, "without error": -8, "with error": -4})


@pytest.mark.parametrize("channels", KINDS, ids=lambda c: f"{c.__struct_config__.tag} {getattr(c, 'of', '')} {c.by}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lane_has_the_same_bits_alone(path, channels, dtype):
    x, w, g = (of.to(dtype) for of in tensors(24, 48, 33))
    w = w.float()
    recipe = with_channels(channels, NV, Hadamard(size=16))
    numerics = LaneNumerics([recipe] * 2, [3, 4])
    together = numerics.forward(0, x, w).y, numerics.gemm("wgrad", 0, g, 1, x, 1)
    for lane in range(2):
        alone = LaneNumerics([recipe], [3 + lane])
        of = [t[lane : lane + 1] for t in (x, w, g)]
        assert torch.equal(alone.forward(0, of[0], of[1]).y[0], together[0][lane])
        assert torch.equal(alone.gemm("wgrad", 0, of[2], 1, of[0], 1)[0], together[1][lane])


@pytest.mark.parametrize("channels", KINDS, ids=lambda c: f"{c.__struct_config__.tag} {getattr(c, 'of', '')} {c.by}")
def test_both_paths_have_the_same_bits(monkeypatch, channels):
    x, w, g = tensors(24, 48, 32)
    got = []
    for backend in (PLAIN, _compiled()):
        monkeypatch.setattr(lanes, "backend", lambda _, of=backend: of)
        numerics = LaneNumerics([with_channels(channels)] * 2, [0, 1])
        got.append([numerics.forward(0, x, w).y, numerics.gemm("wgrad", 0, g, 1, x, 1)])
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.parametrize("rotation", [None, Hadamard(size=16)], ids=["plain", "rotated"])
@pytest.mark.parametrize("channels", [Held(format=MX8, share=0.2), Corrected(share=0.2)], ids=["held", "corrected"])
def test_the_forwards_copy_has_every_channel_in_its_place(path, channels, rotation):
    x, w, _ = tensors(24, 40, 7)
    recipe = with_channels(channels)
    rotation = rotation if isinstance(channels, Held) else None
    recipe = replace(
        recipe,
        fprop=replace(recipe.fprop, rotation=rotation),
        dgrad=replace(recipe.dgrad, source="forward"),
        wgrad=replace(recipe.wgrad, source="forward"),
    )
    made = LaneNumerics([recipe] * 2, [0, 1]).forward(0, x, w)
    assert (made.x.shape, made.w.shape) == (x.shape, w.shape)
    assert torch.allclose(made.y, made.x @ made.w.mT, rtol=1e-5, atol=0.5)
    assert (made.x - x).square().mean() < 0.02 * x.square().mean()


def test_channels_are_chosen_anew_when_they_are_due_and_held_between():
    channels = Held(format=MX8, steps=3.0)
    x, w, _ = tensors(8, 40, 7)
    numerics = LaneNumerics([with_channels(channels)] * 2, [0, 1])
    numerics.training = False
    numerics.forward(0, x, w)
    assert not numerics.state()  # evaluation changes nothing
    numerics.training = True
    seen = []
    for step in range(7):
        numerics.step.fill_(step)
        numerics.forward(0, x.roll(step, 2), w)
        seen.append(numerics.state()["state/fprop.x/channels 0"].clone())
    due = [by_score(x.roll(step - step % 3, 2), 2, "norm") for step in range(7)]
    assert all(map(torch.equal, seen, due))
    numerics.training = False
    held = numerics.forward(0, x, w).y
    assert torch.equal(numerics.state()["state/fprop.x/channels 0"], seen[-1])
    again = LaneNumerics([with_channels(channels)] * 2, [0, 1])
    again.load_state(numerics.state())
    again.training = False
    assert torch.equal(again.forward(0, x, w).y, held)
    assert torch.equal(again.decoded_weight(0, w), numerics.decoded_weight(0, w))


def test_one_channel_is_not_divided(path):
    x, w, g = tensors(8, 1, 7)
    for channels in KINDS:
        got = []
        for of in (channels, None):
            numerics = LaneNumerics([with_channels(of)] * 2, [0, 1])
            got.append((numerics.forward(0, x, w).y, numerics.gemm("wgrad", 0, g, 1, x, 1)))
        assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


def test_large_channels_apart_leave_range_to_the_others():
    x, w, _ = tensors(64, 64, 16)
    x[:, :, [3, 40]] *= 100
    errors = {}
    kinds = ("held", Held(format=BF16, share=0.05)), ("both", Corrected(of="both")), ("by error", BY_ERROR)
    for name, channels in (("none", None), *kinds):
        y = LaneNumerics([with_channels(channels)] * 2, [0, 1]).forward(0, x, w).y.double()
        errors[name] = float((y - x.double() @ w.double().mT).square().mean())
    assert errors["held"] < 0.1 * errors["none"]
    assert errors["both"] < 0.5 * errors["none"]
    assert errors["by error"] < 0.5 * errors["none"]
