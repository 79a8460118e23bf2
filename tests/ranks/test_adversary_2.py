"""Hostile but legal loops: optimizers, accumulation, clipping, edits, copies and closing.

Compared with plain torch in one process and between stages, as in ``test_adversary``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adversary_lab import Side, batches, compare
from small import STAGES, furthest, mlp, rank, settings, weights
from torch import Tensor, nn

from zeroexp.engine import Engine


class Pair(nn.Module):
    """Generator and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = mlp(6, 8, 6, seed=1), mlp(6, 8, 1, seed=2)

    def forward(self, z: Tensor) -> Tensor:
        return self.d(self.g(z))


def two_optimizers(side: Side, toggle: bool) -> dict[str, Tensor]:
    module = Pair()
    og = torch.optim.Adam(module.g.parameters(), lr=0.01)
    od = torch.optim.Adam(module.d.parameters(), lr=0.02)
    engine = side.engine(module, og, od)
    for x in batches(4):
        x = side.part(x)
        for optimizer, other, sign in ((og, module.d, -1.0), (od, module.g, 1.0)):
            if toggle:
                other.requires_grad_(False)
            engine.backward(sign * engine(x).tanh().mean() + engine(x).square().mean())
            engine.clip_norm(0.5, optimizer)
            engine.step(optimizer)
            engine.zero_grad()
            if toggle:
                other.requires_grad_(True)
    return engine.state_dict()


def adversaries_toggled(side: Side) -> dict[str, Tensor]:
    return two_optimizers(side, True)


def adversaries_untoggled(side: Side) -> dict[str, Tensor]:
    return two_optimizers(side, False)


@pytest.mark.parametrize("case", [adversaries_toggled, adversaries_untoggled])
def test_two_optimizers_in_one_module(ranks, case):
    """One optimizer's step must leave the other's gradients, clipping and history alone."""
    compare(ranks, 2, case, tolerance=2e-6)


def clipped_together(side: Side) -> dict[str, Tensor]:
    module = Pair()
    og = torch.optim.SGD(module.g.parameters(), lr=0.1)
    od = torch.optim.SGD(module.d.parameters(), lr=0.1)
    engine = side.engine(module, og, od)
    for x in batches(3):
        engine.backward(engine(side.part(x)).exp().mean() * 10)
        engine.clip_norm(0.3)
        engine.step(og)
        engine.step(od)
    return engine.state_dict()


def test_clipping_survives_the_step_of_another_optimizer(ranks):
    """clip(all), step(a), step(b): b must be clipped as well."""
    compare(ranks, 2, clipped_together)


def clipped_before_the_next_backward(side: Side) -> dict[str, Tensor]:
    module = Pair()
    og = torch.optim.SGD(module.g.parameters(), lr=0.1)
    od = torch.optim.SGD(module.d.parameters(), lr=0.1)
    engine = side.engine(module, og, od)
    for x in batches(3):
        x = side.part(x)
        engine.backward(engine(x).exp().mean() * 10)
        engine.clip_norm(0.3, og)
        module.g.requires_grad_(False)
        engine.backward(engine(x).square().mean())
        module.g.requires_grad_(True)
        engine.step(og)
        engine.step(od)
    return engine.state_dict()


def test_clipping_survives_the_backward_of_another_loss(ranks):
    """clip(a), backward of b's loss, step(a): a must be clipped still."""
    compare(ranks, 2, clipped_before_the_next_backward)


def clipped_by_value_then_norm(side: Side) -> dict[str, Tensor]:
    module = mlp(6, 8, 1)
    engine = side.engine(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for x in batches(3):
        engine.backward(engine(side.part(x)).exp().mean() * 10)
        engine.clip_value(0.2)
        engine.clip_norm(0.3)
        engine.step()
    return engine.state_dict()


def test_clipping_by_value_then_by_norm(ranks):
    """The norm is that of the clamped gradients."""
    compare(ranks, 2, clipped_by_value_then_norm)


def clipped_by_value(side: Side) -> dict[str, Tensor]:
    module = mlp(6, 8, 1)
    engine = side.engine(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for x in batches(3):
        engine.backward(engine(side.part(x)).exp().mean() * 10)
        engine.clip_value(0.2)
        engine.step()
    return engine.state_dict()


def test_clipping_by_value_with_replicas(ranks):
    """Four ranks, two replicas: clamped gradients must not be summed over replicas again."""
    compare(ranks, 4, clipped_by_value, stages=[3], zero_shard_size=2)


def gradients_read_in_between(side: Side) -> dict[str, Tensor]:
    module = mlp(6, 8, 1)
    engine = side.engine(module, torch.optim.SGD(module.parameters(), lr=0.1), accumulate=2)
    for i, x in enumerate(batches(6)):
        engine.backward(engine(side.part(x)).square().mean())
        for p in module.parameters():
            engine.full_grad(p)
        if i % 2:
            engine.step()
    return engine.state_dict()


def test_gradients_can_be_read_between_micro_batches(ranks):
    """Reading is no reduction too many, at any stage."""
    compare(ranks, 2, gradients_read_in_between, zero_reduce="each")


def test_gradients_can_be_read_between_micro_batches_with_replicas(ranks):
    """What was summed over the replicas once must not be summed again with the next micro-batch."""
    compare(ranks, 4, gradients_read_in_between, stages=[3], zero_shard_size=2)


def accumulation_changes(side: Side) -> dict[str, Tensor]:
    module = mlp(6, 8, 1)
    engine = side.engine(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    source = iter(batches(9))
    for count in (1, 4, 2, 1):
        engine.accumulate = count
        for _ in range(count):
            engine.backward(engine(side.part(next(source))).square().mean())
            engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_accumulation_may_change_between_steps(ranks, reduce):
    """The number of micro-batches is read at each of them."""
    compare(ranks, 2, accumulation_changes, zero_reduce=reduce)


OPTIMIZERS: dict[str, Any] = {
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, lr=0.001, maximize=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "still": lambda p: torch.optim.AdamW(p, lr=0.0),
}


def with_optimizers(side: Side) -> dict[str, Tensor]:
    out = {}
    for name, build in OPTIMIZERS.items():
        module = mlp(6, 7, 5, 1)
        tail = list(module[2:].parameters())
        optimizer = build([{"params": list(module[0].parameters())}, {"params": tail, "lr": 0.003}])
        engine = side.engine(module, optimizer)
        for x in batches(4):
            engine.step()  # without a backward: nothing happens
            engine.zero_grad()
            engine.backward(engine(side.part(x)).square().mean())
            engine.step()
        out.update({f"{name}.{k}": v for k, v in engine.state_dict().items()})
    return out


def test_optimizers_of_torch_in_groups(ranks):
    """Variants of the update, two groups; a step without gradients counts nowhere."""
    compare(
        ranks, 2, with_optimizers, tolerance=2e-6, timeout=120, zero_bucket=64, zero_prefetch=99
    )


class Normed(nn.Module):
    """Parametrized, normalized, attending, recurrent; conditional per rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        weight = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.blocks = nn.ModuleList([nn.Sequential(weight, nn.Tanh()), spectral, nn.Linear(6, 6)])
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.empty, self.scalar = nn.Parameter(torch.ones(0)), nn.Parameter(torch.tensor(0.5))

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        for block in reversed(self.blocks):
            x = block(x)
        x = x.unsqueeze(1).expand(-1, 3, -1)
        x = x + self.attention(x, x, x)[0]
        return {"loss": self.scalar * self.rnn(x)[0].square().mean() + self.empty.sum()}


def unusual_layers(side: Side) -> dict[str, Tensor]:
    module = Normed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = side.engine(module, optimizer)
    for x in batches(3):
        module.eval()
        with torch.inference_mode():
            engine(x=side.part(x))
        module.train()
        engine.backward(engine(x=side.part(x))["loss"])
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("cut", ["block", "leaf", "model", "blocks.*,rnn"])
def test_layers_that_use_their_weights_in_unusual_ways(ranks, cut):
    """Parametrizations, attention's fast path, flat recurrent weights, against every cut."""
    compare(ranks, 2, unusual_layers, zero_unit=cut)


def random_depth(stage: int) -> dict[str, Tensor]:
    """Each rank skips other blocks in each step, outside of the blocks."""
    module = mlp(6, 6, 6, 6, 6)
    engine = Engine(
        module, torch.optim.SGD(module.parameters(), lr=0.1), settings(stage, timeout=20)
    )
    for step, x in enumerate(batches(4)):
        with engine.scope():
            h = x[rank() : rank() + 1]
            for i, layer in enumerate(module):
                if (i // 2 + rank() + step) % 3:
                    h = layer(h)
            loss = h.square().mean()
        engine.backward(loss)
        engine.step()
    return engine.state_dict()


def test_ranks_that_skip_different_blocks(ranks):
    """Stochastic depth per rank: the mean over ranks, a skipped block counting as zero."""
    module = mlp(6, 6, 6, 6, 6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, x in enumerate(batches(4)):
        for r in range(2):
            h = x[r : r + 1]
            for i, layer in enumerate(module):
                if (i // 2 + r + step) % 3:
                    h = layer(h)
            (h.square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        found = ranks(2)(random_depth, stage)[0]
        assert furthest(found, weights(module)) <= 1e-6, stage
