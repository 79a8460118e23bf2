"""The backward in two halves equals the whole, weight by weight, and each hook fires once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zeroexp.errors import ModelError
from zeroexp.pipeline.runtime.message import Message, describe
from zeroexp.pipeline.runtime.stage import Stage


class Twice(nn.Module):
    """y = w (w x)"""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * (self.w * x)


class Square(torch.autograd.Function):
    """Of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Scale(torch.autograd.Function):
    """Of the input and a parameter, with an argument that is no tensor between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: str, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w + grads[1], None, (grads[0] * x + grads[1]).sum(0)


class MayRepeat(Scale):
    backward_may_repeat = True


class Net(nn.Module):
    """Whatever a function makes of two layers and a vector."""

    def __init__(self, use: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.w = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def repeats(net: Net, x: Tensor) -> Tensor:
    y, _ = MayRepeat.apply(net.a(x), "note", net.w)
    return y


CASES: dict[str, Callable[[Net, Tensor], Any]] = {
    "chain": lambda n, x: n.b(torch.tanh(n.norm(n.a(x)))),
    "shared": lambda n, x: n.a(F.gelu(n.a(x) + n.b(x))) * n.w + n.w,
    "weight of a weight": lambda n, x: F.linear(n.a(x), n.b.weight @ n.a.weight) * n.w.exp(),
    "two outputs": lambda n, x: (n.a(x), {"other": n.b(x), "leaf": n.w * 2, "same": x}),
    "one off the way": lambda n, x: (n.a(x), n.norm(n.w.expand(2, 4))),
    "one without use": lambda n, x: (n.a(x), x.detach()),
    "in place": lambda n, x: n.b(n.a(x.mul_(2)).add_(n.w).relu_()),
    "custom, input only": lambda n, x: n.a(Square.apply(n.b(x))),
    "custom, repeats": repeats,
    "lstm": lambda n, x: n.lstm(n.a(x))[0] * n.w,
    "recomputed": lambda n, x: checkpoint(
        lambda t: n.b(torch.tanh(n.a(t))), x, use_reentrant=False
    ),
    "views": lambda n, x: n.a(x.transpose(0, 1).flip(0)).chunk(2, -1),
    "broadcast": lambda n, x: (n.a(x).sum(0) + n.w).unsqueeze(0) * n.b(x),
}


def grads_of(
    net: Net, x: Tensor, how: str, recompute: bool
) -> tuple[list[Tensor | None], list[Any]]:
    net.zero_grad()
    counts = {name: 0 for name, _ in net.named_parameters()}
    hooks = []
    for name, p in net.named_parameters():

        def count(grad: Tensor, name: str = name) -> None:
            counts[name] += 1

        hooks.append(p.register_hook(count))
    sent = describe(x.clone().requires_grad_())
    stage = Stage(1, net, recompute=recompute)
    out = stage.forward(0, Message(sent.structure, [x.clone()]))
    assert isinstance(out, Message)
    grads: list[Tensor | None] = []
    for i, meta in enumerate(out.structure.tensors):
        if meta.takes_grad:
            grads.append(
                torch.linspace(-1, 1 + i, out.tensors[i].numel()).view(meta.shape).double()
            )
    if how == "whole":
        back = stage.backward(0, grads)
    else:
        back = stage.backward_input(0, grads)
        assert all(p.grad is None for p in net.parameters())
        assert stage.in_flight == 1
        stage.backward_weight(0)
    assert stage.in_flight == 0
    for hook in hooks:
        hook.remove()
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    assert counts == {n: int(p.grad is not None) for n, p in net.named_parameters()}
    return [*found, *back], grads


def plain(net: Net, x: Tensor, grads: list[Any]) -> list[Tensor | None]:
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    tensors = describe(net(leaf * 1)).tensors
    chosen = [t for t in tensors if t.requires_grad]
    torch.autograd.backward(chosen, grads)
    return [*(p.grad for p in net.parameters()), leaf.grad]


@pytest.mark.parametrize("case", CASES)
def test_both_ways_equal_plain_autograd(case):
    net = Net(CASES[case])
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).double()
    for how in ("whole", "split"):
        found, grads = grads_of(net, x, how, False)
        for a, b in zip(found, plain(net, x, grads), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("in place", "one without use")])
def test_recompute_changes_nothing(case):
    net = Net(CASES[case])
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).double()
    for how in ("whole", "split"):
        found, _ = grads_of(net, x, how, True)
        wanted, _ = grads_of(net, x, how, False)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_a_weight_used_twice_counts_twice():
    """PP-04: w = 3, x = 2, loss = w (w x): dL/dw = 2 w x = 12, dL/dx = w^2 = 9."""
    stage = Stage(1, Twice())
    sent = describe(torch.tensor(2.0, requires_grad=True))
    stage.forward(0, Message(sent.structure, [torch.tensor(2.0)]))
    (back,) = stage.backward_input(0, [torch.tensor(1.0)])
    stage.backward_weight(0)
    assert back is not None and float(back) == 9.0
    assert float(stage.module.w.grad) == 12.0


def test_the_first_half_computes_no_weight_gradient_and_the_second_no_input_gradient():
    """One matrix product each: together they cost what the whole does."""
    net = Net(lambda n, x: n.a(x))
    stage = Stage(1, net)
    x = torch.randn(5, 4, dtype=torch.float64)
    sent = describe(x.clone().requires_grad_())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
        stage.forward(0, Message(sent.structure, [x]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as first:
        stage.backward_input(0, [torch.ones(5, 4, dtype=torch.float64)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as second:
        stage.backward_weight(0)
    products = [
        sum(event.name in ("aten::mm", "aten::addmm") for event in each.events())
        for each in (forward, first, second)
    ]
    assert products == [1, 1, 1]


def refused(use: Callable[[Net, Tensor], Any]) -> str:
    net = Net(use)
    stage = Stage(2, net)
    x = torch.randn(2, 4, dtype=torch.float64)
    sent = describe(x.clone().requires_grad_())
    out = stage.forward(0, Message(sent.structure, [x]))
    with pytest.raises(ModelError) as error:
        stage.backward_input(0, [torch.ones_like(out.tensors[0])])
    return str(error.value)


def test_what_cannot_be_split_is_refused_by_name():
    text = refused(lambda n, x: Scale.apply(n.a(x), "note", n.w)[0])
    assert "stage 2" in text and "ScaleBackward" in text and "backward_may_repeat" in text
    text = refused(lambda n, x: checkpoint(n.a, x, use_reentrant=True))
    assert "CheckpointFunctionBackward" in text and "use_reentrant=False" in text
    net = Net(lambda n, x: n.a(x))
    net.a.register_backward_hook(lambda module, before, after: None)
    with pytest.raises(ModelError, match="stage 3, module a: a hook of register_backward_hook"):
        Stage(3, net).refuse_what_cannot_split()


def test_full_backward_hooks_see_the_input_gradient_once():
    net = Net(lambda n, x: n.b(n.a(x)))
    seen: list[Tensor] = []
    net.a.register_full_backward_hook(lambda module, before, after: seen.append(before[0]))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found, grads = grads_of(net, x, "split", False)
    assert len(seen) == 1 and torch.equal(seen[0], found[-1])
    plain(net, x, grads)
    assert torch.allclose(seen[0], seen[1])


def test_an_input_changed_in_place_cannot_be_run_again():
    net = Net(CASES["in place"])
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(ModelError, match="changes its input in place"):
        Stage(1, net, recompute=True).forward(0, describe(x))
