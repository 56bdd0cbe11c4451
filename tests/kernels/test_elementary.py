"""The power that is built from single operations is the power, to the last bit or its neighbour."""

import numpy as np
import pytest
import torch

from fp4dse.kernels.ops.elementary import log, power

EXPONENTS = (-0.8, -2 / 3, -0.5, -1.0, 0.3, 1.0, 2.0)


@pytest.mark.parametrize("p", EXPONENTS)
def test_a_power_is_within_one_ulp_over_all_of_float32(p):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F7FFFFF, (200_000,), generator=generator, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.rand(100_000, generator=generator), torch.tensor([1.0, 2**-149])])
    exact = np.power(x.double().numpy(), p)
    is_normal = (exact < 3.4e38) & (exact > 1.2e-38)
    error = np.abs(power(x, p).double().numpy() - exact)[is_normal]
    assert is_normal.sum() > 100_000
    assert (error <= np.spacing(exact[is_normal].astype(np.float32))).all()


def test_a_logarithm_is_within_one_ulp_over_all_of_float32():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F7FFFFF, (200_000,), generator=generator, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), 1 + (torch.rand(100_000, generator=generator) - 0.5) / 100])
    exact = np.log(x.double().numpy())
    error = np.abs(log(x).double().numpy() - exact)
    assert (error <= np.spacing(np.abs(exact).astype(np.float32))).all()
    assert log(torch.tensor([1.0, 0.0])).tolist() == [0, float("-inf")]
    assert log(torch.tensor([float("nan"), -1.0])).isnan().all()


def test_zero_and_nan_keep_what_they_mean():
    assert [power(torch.zeros(1), p).item() for p in (-0.8, 0.0, 0.5)] == [float("inf"), 1.0, 0.0]
    assert power(torch.tensor([float("nan")]), -0.8).isnan().all()


def test_a_power_does_not_depend_on_where_in_a_tensor_a_number_stands():
    x = torch.rand(500)
    for start in range(1, 40):
        assert torch.equal(power(x[start:], -0.8), power(x, -0.8)[start:])
