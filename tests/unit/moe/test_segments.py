"""MLPs of sorted rows against one matrix a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zeroexp.moe import segments
from zeroexp.moe.activations import ACTIVATIONS
from zeroexp.moe.permutation import Permutation
from zeroexp.moe.segments import Linear, grouped_linear, grouped_mlp
from zeroexp.ops import host_zeros

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0], [2, 2, 2, 3]]


def mlps(activation: str, *, bias: bool = True) -> tuple[list[Linear], Linear]:
    """Four experts from 5 channels over 3 to 5 again."""

    def linear(inputs: int, outputs: int) -> Linear:
        shapes = ((4, inputs, outputs), (4, outputs))
        weight, biases = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
        return Linear(weight, biases if bias else None)

    return [linear(5, 3) for _ in range(ACTIVATIONS[activation].inputs)], linear(3, 5)


def each_row(
    rows: Tensor, counts: list[int], into: list[Linear], activation: str, out: Linear
) -> Tensor:
    """The same with a matrix of its own for every row, differentiated by autograd."""
    expert = [e for e, n in enumerate(counts) for _ in range(n)]

    def linear(x: Tensor, each: Linear) -> Tensor:
        y = torch.einsum("ac,ach->ah", x, each.weight[expert])
        return y if each.bias is None else y + each.bias[expert]

    pre = [linear(rows, each) for each in into]
    functions = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    hidden = F.silu(pre[1]) * pre[0] if activation == "swiglu" else functions[activation](pre[0])
    return linear(hidden, out)


def tensors(into: list[Linear], out: Linear) -> list[Tensor]:
    return [tensor for each in (*into, out) for tensor in each if tensor is not None]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("bias", [True, False])
def test_each_row_meets_its_own_expert(counts: list[int], activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)
    into, out = mlps(activation, bias=bias)
    found = grouped_mlp(rows, torch.tensor(counts), into, ACTIVATIONS[activation], out)
    wanted = each_row(rows, counts, into, activation, out)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    inputs = [rows, *tensors(into, out)]
    direction = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, direction)
    for a, b in zip(grads, torch.autograd.grad(wanted, inputs, direction), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wanted", range(7))
def test_one_gradient_alone_is_that_of_all(wanted: int) -> None:
    """Rows, weight and bias of both layers before the activation and of the one after it."""
    torch.manual_seed(0)
    rows = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    into, out = mlps("swiglu")
    inputs = [rows, *tensors(into, out)]
    counts = torch.tensor([3, 0, 5, 1])
    direction = torch.randn(9, 5, dtype=torch.float64)
    y = grouped_mlp(rows, counts, into, ACTIVATIONS["swiglu"], out)
    all_of_them = torch.autograd.grad(y, inputs, direction)
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i == wanted)
    y = grouped_mlp(rows, counts, into, ACTIVATIONS["swiglu"], out)
    y.backward(direction)
    assert [tensor.grad is not None for tensor in inputs] == [i == wanted for i in range(7)]
    assert inputs[wanted].grad is not None
    assert torch.equal(inputs[wanted].grad, all_of_them[wanted])


def test_what_is_kept_and_made_for_the_activation_is_no_larger_than_its_input() -> None:
    """Rows, their product, and nothing else of their number; the rest belongs to one expert."""
    rows = torch.randn(400, 5, requires_grad=True)
    into, out = [Linear(torch.randn(4, 5, 30), None)], Linear(torch.randn(4, 30, 5), None)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = grouped_mlp(rows, torch.tensor([100] * 4), into, ACTIVATIONS["gelu"], out)
    assert sorted(t.shape[1] for t in kept if t.shape[0] == 400) == [5, 30]
    with LargestResult() as seen:
        y.sum().backward()
    assert seen.elements == 100 * 30


class LargestResult(TorchDispatchMode):
    """Elements of the largest floating-point tensor that is made within."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.elements = max(self.elements, out.numel())
        return out


def test_large_gradients_lie_in_memory_of_their_own_and_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    into, out = mlps("gelu")
    inputs = [rows, *tensors(into, out)]

    def gradients() -> tuple[Tensor, ...]:
        y = grouped_mlp(rows, torch.tensor([3, 0, 5, 1]), into, ACTIVATIONS["gelu"], out)
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    usual = gradients()
    asked: list[int] = []

    def ranges(size: int, dtype: torch.dtype) -> Tensor:
        asked.append(size)
        return host_zeros(size, dtype)

    monkeypatch.setattr(segments, "MAPPED_BYTES", 4 * 5 * 3 * 8)
    monkeypatch.setattr(segments, "host_zeros", ranges)
    large = gradients()
    assert asked == [60, 60]  # the two weights of 4 x 5 x 3; rows have 9 x 5 elements
    for a, b in zip(large, usual, strict=True):
        assert torch.equal(a, b)


def test_autocast_computes_in_its_dtype() -> None:
    rows = torch.randn(4, 5, requires_grad=True)
    into, out = mlps("gelu")
    into = [
        Linear(*(t.detach().float().requires_grad_() for t in each if t is not None))
        for each in into
    ]
    out = Linear(*(t.detach().float().requires_grad_() for t in out if t is not None))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_mlp(rows, torch.tensor([1, 3, 0, 0]), into, ACTIVATIONS["gelu"], out)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    for tensor in (rows, *tensors(into, out)):
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
    out = grouped_linear(rows, counts, Linear(weight, None))
    expert = torch.arange(4, device="cuda").repeat_interleave(counts)
    a, b = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    wanted = torch.einsum("ac,ach->ah", a, b[expert])
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), direction)
    exact = torch.autograd.grad(wanted, (a, b), direction.double())
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=0.2)
