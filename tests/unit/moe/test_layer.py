"""The layer as a module: what runs beside the experts, what it counts, what it refuses."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plain_moe import plain_forward  # type: ignore[import-not-found]
from torch import Tensor, nn

from zeroexp.comm.group import SoloGroup
from zeroexp.comm.p2p import P2PGroup
from zeroexp.errors import ConfigError, ModelError
from zeroexp.ledger import Ledger
from zeroexp.moe import (
    MLP,
    MoE,
    auxiliary_loss,
    count_parameters,
    expert_parameters,
    name_layers,
    read_statistics,
)
from zeroexp.moe.experts import GroupedExperts, ModuleExperts, make_experts


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def test_leading_dimensions_stay() -> None:
    layer = MoE(4, MLP(8), 3, 2).eval()
    x = torch.randn(2, 5, 3, 4)
    y = layer(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.view(-1, 4), layer(x.view(-1, 4)))


def test_shared_and_residual_experts() -> None:
    """y = w0 * moe(x) + w1 * mlp(x) + shared(x), w = softmax(mix(x)) (PR-MoE)."""
    torch.manual_seed(0)
    layer = MoE(4, linear, 3, 2, gate="topk", shared=linear(), residual=linear()).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    assert layer.mix is not None and layer.residual is not None and layer.shared is not None
    w = layer.mix(x).softmax(-1)
    wanted = w[:, :1] * plain_forward(layer, x, "topk") + w[:, 1:] * layer.residual(x)
    torch.testing.assert_close(layer(x), wanted + layer.shared(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("expert", [MLP(8), linear])
def test_experts_without_tokens_get_zeros_and_the_step_goes_on(expert: Any) -> None:
    """MO-04, on one rank: three steps, expert 1 never chosen."""
    torch.manual_seed(0)
    layer = MoE(4, expert, 2, balance_loss=0.0)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    layer.gate.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.rand(6, 4) + 0.1).sum().backward()
        for found in layer.expert_parameters():
            grad = found.parameter.grad
            assert grad is not None
            unused = grad[1] if found.stacked else grad
            assert bool(unused.any()) == (not found.stacked and found.experts == range(1))
        optimizer.step()


def test_no_token_at_all() -> None:
    layer = MoE(4, MLP(8), 3, 2, shared=linear(), residual=linear())
    x = torch.zeros(2, 0, 4, requires_grad=True)
    y = layer(x)
    (y.sum() + auxiliary_loss(layer)).backward()
    assert y.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_an_expert_draws_the_same_weights_wherever_it_lies() -> None:
    for expert in (MLP(8, "swiglu"), linear):
        torch.manual_seed(7)
        whole = make_experts(4, expert, range(6), 6)
        after = torch.rand(())
        torch.manual_seed(7)
        part = make_experts(4, expert, range(4, 6), 6)
        assert torch.rand(()) == after, "what is built next does not depend on how many are here"
        if isinstance(whole, GroupedExperts):
            for a, b in zip(whole.parameters(), part.parameters(), strict=True):
                assert torch.equal(a[4:6], b) and not torch.equal(a[4], a[5])
        else:
            names = whole.state_dict()
            assert set(part.state_dict()) == {"4.weight", "4.bias", "5.weight", "5.bias"}
            for name, value in part.state_dict().items():
                assert torch.equal(names[name], value)
            assert not torch.equal(names["4.weight"], names["5.weight"])


def test_a_module_is_copied_as_it_is() -> None:
    given = linear()
    layer = MoE(4, given, 3)
    assert isinstance(layer.experts, ModuleExperts)
    for _, expert in layer.experts.named_children():
        assert expert is not given and torch.equal(expert.weight, given.weight)


def test_experts_born_on_meta_draw_the_same_wherever_they_lie() -> None:
    made = []
    for ids in (range(4), range(2, 4)):
        torch.manual_seed(7)
        with torch.device("meta"):
            experts = make_experts(4, MLP(8), ids, 4)
        assert isinstance(experts, GroupedExperts) and experts.up.is_meta
        experts.to_empty(device="cpu").reset_parameters()
        made.append(list(experts.parameters()))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a[2:], b)


def test_expert_parameters_say_whose_they_are() -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(MoE(4, linear, 3), nn.Linear(4, 4)), "b": MoE(4, MLP(8), 2)}
    )
    found = {p.name: p for p in expert_parameters(model)}
    named = dict(model.named_parameters())
    rest = {"a.0.gate.weight", "a.1.weight", "a.1.bias", "b.gate.weight"}
    assert set(found) == set(named) - rest
    assert all(found[name].parameter is named[name] for name in found)
    assert found["a.0.experts.2.weight"].experts == range(2, 3)
    assert not found["a.0.experts.2.weight"].stacked
    assert found["b.experts.up"].experts == range(2) and found["b.experts.up"].stacked


def test_active_and_total_parameters() -> None:
    layer = MoE(4, MLP(8), 6, 2, shared=linear())
    each = 2 * 4 * 8 + 8 + 4
    rest = 6 * 4 + 4 * 4 + 4
    assert count_parameters(nn.Sequential(layer, nn.Linear(4, 1))) == (
        2 * each + rest + 5,
        6 * each + rest + 5,
    )


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(("wrong", "made"), [(Narrow, r"\(2, 2\)"), (Pair, "tuple")])
def test_an_expert_that_changes_the_shape_is_named(wrong: type[nn.Module], made: str) -> None:
    makers = iter([nn.Identity, wrong, nn.Identity])
    model = nn.ModuleDict({"mlp": MoE(4, lambda: next(makers)(), 3)})
    layer = model["mlp"]
    assert isinstance(layer, MoE)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4, [-1.0] * 4]))
    with pytest.raises(ModelError, match=rf"a MoE layer: expert 1 turned .*\(2, 4\) into {made}"):
        layer(torch.ones(2, 4))
    name_layers(model)
    with pytest.raises(ModelError, match=r"MoE layer mlp: expert 1 .*the width 4"):
        layer(torch.ones(2, 4))


@pytest.mark.parametrize("shape", [(4,), (3, 5)])
def test_input_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=rf"takes \[\.\.\., 4\] and got .*d_model={shape[-1]}"):
        MoE(4, MLP(8), 3)(torch.zeros(shape))


def test_losses_that_nobody_takes_are_an_error() -> None:
    layer = MoE(4, MLP(8), 3)
    with pytest.raises(ModelError, match=r"never used.*auxiliary_loss\(model\).*balance_loss=0"):
        for _ in range(200):
            layer(torch.zeros(2, 4))
    silent = MoE(4, MLP(8), 3, balance_loss=0.0)
    for _ in range(200):
        silent(torch.zeros(2, 4))
    with torch.no_grad():
        for _ in range(200):
            layer.take_loss()
            layer(torch.zeros(2, 4))


def test_statistics_of_hand_written_gates() -> None:
    """Loads 4, 1, 1 and 2, 4, 0: in sum 6, 5, 1. Two places each: 2 + 2 of 12 are dropped."""
    layer = MoE(3, MLP(4), 3, capacity_factor=1.0, min_capacity=0, balance_loss=0.5).eval()
    with torch.no_grad():
        layer.gate.weight.copy_(20 * torch.eye(3))
    for choices in ([0, 0, 0, 0, 1, 2], [1, 1, 1, 1, 0, 0]):
        layer(torch.eye(3)[choices])
    found = read_statistics(nn.ModuleDict({"layer": layer}))["layer"]
    assert found.tokens_per_expert == (6, 5, 1)
    assert found.drop_rate == pytest.approx(4 / 12)
    assert found.max_vio == pytest.approx((6 - 4) / 4)
    # Scores are certain: E * sum f^2, 3 * 18/36 and 3 * 20/36.
    assert found.losses == {"balance": pytest.approx((18 + 20) / 24, abs=1e-6)}
    assert found.all_to_all_bytes == 0 and found.all_to_all_seconds == 0
    empty = read_statistics(layer)[""]
    assert empty.tokens_per_expert == (0, 0, 0) and empty.losses == {} and empty.max_vio == 0


def test_a_group_of_one_sends_nothing() -> None:
    """deepspeed.md 3.F case 92."""
    ledger = Ledger()
    layer = MoE(4, MLP(8), 3, group=SoloGroup(0, ledger))
    layer(torch.randn(5, 4)).sum().backward()
    assert ledger.comm_bytes() == {}


@pytest.mark.parametrize(
    ("experts", "ranks", "fix"),
    [(4, 3, "use 3 or 6 experts, or a group of 1 or 2"), (2, 4, "use 4 experts, or a group of 1")],
)
def test_experts_that_do_not_divide_over_the_group(experts: int, ranks: int, fix: str) -> None:
    """MO-08."""
    group = P2PGroup(Mock(), range(ranks), 0, Ledger(), 1.0)
    with pytest.raises(ConfigError, match=rf"num_experts.*{experts} experts.*{ranks} ranks.*{fix}"):
        MoE(4, MLP(8), experts, group=group)


def saved_bytes(experts: int, k: int, tokens: int) -> int:
    """Bytes that one forward pass keeps for backward, weights and the gate's scores left out."""
    torch.manual_seed(0)
    layer = MoE(32, MLP(64), experts, k, gate="topk", balance_loss=0.0)
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        scores = tensor.shape[:1] == (tokens,) and tensor.shape[1:] == (experts,)
        if storage.data_ptr() not in weights and not scores:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(tokens, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    del out
    return sum(seen.values())


def test_memory_grows_with_tokens_times_k_not_with_experts() -> None:
    few, many = saved_bytes(4, 2, 512), saved_bytes(64, 2, 512)
    assert many <= 1.1 * few
    # Rows in, the hidden values before their activation, rows out, and up to 16 numbers of each
    # assignment; the input of the layer.
    assert few <= 2 * 512 * (4 * (32 + 64 + 32) + 64) + 512 * 4 * 32
    assert 1.6 * few <= saved_bytes(4, 4, 512) <= 2.1 * few


def test_a_copy_is_another_layer() -> None:
    layer = MoE(4, MLP(8), 3, group=SoloGroup(0, Ledger()))
    layer(torch.randn(2, 4)).sum().backward()
    auxiliary_loss(layer)
    other = copy.deepcopy(layer)
    other(torch.randn(3, 4))
    assert sum(read_statistics(layer)[""].tokens_per_expert) == 2
    assert sum(read_statistics(other)[""].tokens_per_expert) == 5
    assert set(layer.state_dict()) == {name for name, _ in layer.named_parameters()}
