"""Backward passes whose first gradients are given."""

import torch

from fp4dse.kernels.autograd import contraction


def of_two(x):
    return x.sin() * 2, (x * x).to(torch.bfloat16)


def test_gradients_are_those_that_torch_finds_from_the_same_ones_to_the_bit():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    given = torch.randn(3, 5), torch.randn(3, 5).to(torch.bfloat16)
    [expected] = torch.autograd.grad(of_two(x), x, given)
    [found] = torch.autograd.grad(contraction(of_two(x), given), x)
    assert torch.equal(found, expected)
    contraction(of_two(x), given).backward()
    assert torch.equal(x.grad, expected)


def test_it_starts_one_in_a_backward_pass_too():
    x = torch.randn(4).requires_grad_()
    with torch.no_grad():
        with torch.enable_grad():
            y = x.exp()
        [found] = torch.autograd.grad(contraction([y], [torch.full((4,), 0.5)]), x)
    assert torch.equal(found, 0.5 * x.detach().exp())
