"""Grouped products against one product at a time."""

from __future__ import annotations

import pytest
import torch

from zeroexp.moe.permutation import Permutation
from zeroexp.moe.segments import activated_linear, grouped_linear

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0], [2, 2, 2, 3]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_each_row_meets_its_own_matrix(counts: list[int], with_bias: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 3, dtype=torch.float64, requires_grad=True) if with_bias else None
    expert = [e for e, n in enumerate(counts) for _ in range(n)]
    out = grouped_linear(rows, torch.tensor(counts), weight, bias)
    wanted = torch.einsum("ac,ach->ah", rows, weight[expert])
    if bias is not None:
        wanted = wanted + bias[expert]
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    inputs = [rows, weight] if bias is None else [rows, weight, bias]
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, direction)
    for a, b in zip(found, torch.autograd.grad(wanted, inputs, direction), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("frozen", ["", "pre", "weight", "bias"])
def test_an_activation_computed_anew_has_the_same_gradients(counts: list[int], frozen: str) -> None:
    torch.manual_seed(0)
    shapes = {"pre": (sum(counts), 5), "other": (sum(counts), 5)}
    shapes |= {"weight": (4, 5, 3), "bias": (4, 3)}
    tensors = {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=name != frozen)
        for name, shape in shapes.items()
    }
    pre, other, weight, bias = tensors.values()

    def activation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.tanh() * b

    out = activated_linear((pre, other), activation, torch.tensor(counts), weight, bias)
    wanted = grouped_linear(activation(pre, other), torch.tensor(counts), weight, bias)
    assert torch.equal(out, wanted)
    inputs = [tensor for tensor in tensors.values() if tensor.requires_grad]
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, direction)
    for a, b in zip(found, torch.autograd.grad(wanted, inputs, direction), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_gradient_that_nobody_wants_is_not_made() -> None:
    rows = torch.randn(4, 5)
    weight = torch.randn(2, 5, 3, requires_grad=True)
    grouped_linear(rows, torch.tensor([2, 2]), weight, None).sum().backward()
    assert rows.grad is None and weight.grad is not None
    frozen, rows = weight.detach(), rows.requires_grad_()
    grouped_linear(rows, torch.tensor([2, 2]), frozen, None).sum().backward()
    assert rows.grad is not None


def test_autocast_computes_in_its_dtype() -> None:
    rows, weight = torch.randn(4, 5, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    bias = torch.randn(2, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_linear(rows, torch.tensor([1, 3]), weight, bias)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    for tensor in (rows, weight, bias):
        assert tensor.grad is not None and tensor.grad.dtype == torch.float32


def test_a_permutation_and_back() -> None:
    order = torch.tensor([2, 0, 3, 1])
    permutation = Permutation(order)
    rows = torch.arange(8.0).view(4, 2).requires_grad_()
    moved = permutation.apply(rows)
    assert torch.equal(moved, rows[order])
    assert torch.equal(permutation.undo(moved), rows)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1)
    (grad,) = torch.autograd.grad((moved * weights).sum(), rows)
    assert grad[:, 0].tolist() == [2, 4, 1, 3]


@pytest.mark.gpu
def test_the_grouped_product_of_the_device_equals_the_loop() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([30, 0, 66, 32], device="cuda")
    rows = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = grouped_linear(rows, counts, weight, None)
    expert = torch.arange(4, device="cuda").repeat_interleave(counts)
    a, b = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = torch.einsum("ac,ach->ah", a, b[expert])
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), direction)
    exact = torch.autograd.grad(wanted, (a, b), direction.double())
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=0.2)
