"""Hostile but legal models: every case is trained at all stages and by plain torch in one process.

What each would break stands in its docstring. All are fp32 within 1e-6 of torch, and equal in
every bit between stages.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adversary_lab import Side, batches, compare
from torch import Tensor, nn
from torch.nn import functional as F


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter created after it: its gradients come first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Tower(nn.Module):
    def __init__(self, block: type[nn.Module], dim: int = 6, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(layers))
        self.last = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def adapters_backward_twice_on_one_graph(side: Side) -> dict[str, Tensor]:
    module = Tower(Adapted)
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        out = engine(side.part(x))
        engine.backward(out.square().mean(), retain_graph=True)
        engine.backward(out.sin().mean())
        engine.step()
    return engine.state_dict()


def test_frozen_weights_are_there_for_a_second_backward(ranks):
    """A unit whose trained part is done may still have frozen weights to go through: releasing it
    by the count of its gradients alone reads freed memory in the second backward."""
    compare(ranks, 2, adapters_backward_twice_on_one_graph)


def adapters_two_forwards_before_backward(side: Side) -> dict[str, Tensor]:
    module = Tower(Adapted)
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        one, two = engine(side.part(x)).square().mean(), engine(side.part(x + 1)).sin().mean()
        engine.backward(one)
        engine.backward(two)
        engine.step()
    return engine.state_dict()


def test_two_forwards_then_two_backwards(ranks):
    """The end of the first backward must not forget that the second one is still to come."""
    compare(ranks, 2, adapters_two_forwards_before_backward)


class FrozenTrunk(nn.Module):
    """No repeated block: everything is the root's. The trained head finishes before the trunk."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.head = nn.Linear(dim, dim), nn.Linear(dim, 1)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x)))


def gradient_of_the_input(side: Side) -> dict[str, Tensor]:
    module = FrozenTrunk()
    engine = side.engine(module, sgd(module))
    noise = torch.zeros(6, requires_grad=True)  # one for all samples: a universal perturbation
    for x in batches(3):
        engine.backward(engine(side.part(x) + noise).square().mean())
        engine.step()
    if side.stage is not None:
        torch.distributed.all_reduce(noise.grad)
        noise.grad /= torch.distributed.get_world_size()
    return {"noise": noise.grad, **engine.state_dict()}


def test_the_input_s_gradient_passes_a_frozen_root(ranks):
    """The root's last trained gradient is not the end of its backward."""
    compare(ranks, 2, gradient_of_the_input)


class Visited(nn.Module):
    """The root uses a weight of its first block, which must stay whole until its backward."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.blocks[0].weight)


def visited_with_a_sample_in_between(side: Side) -> dict[str, Tensor]:
    module = Visited()
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        loss = engine(side.part(x)).square().mean()
        with torch.no_grad():
            engine(side.part(x))
        engine.backward(loss)
        engine.step()
    return engine.state_dict()


def visited_twice_forward_twice_backward(side: Side) -> dict[str, Tensor]:
    module = Visited()
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        one, two = engine(side.part(x)).square().mean(), engine(side.part(x + 1)).sin().mean()
        engine.backward(two, retain_graph=True)
        engine.backward(one)
        engine.backward(two)
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize(
    "case", [visited_with_a_sample_in_between, visited_twice_forward_twice_backward]
)
def test_a_weight_used_outside_its_unit_outlives_other_passes(ranks, case):
    """No pass between a forward and its backward may take the visited weight away."""
    compare(ranks, 2, case)


class Adds(nn.Module):
    """Returns its own input, changed in place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.code = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        x += self.b(torch.tanh(self.a(self.code)))
        return x


def outputs_changed_in_place(side: Side) -> dict[str, Tensor]:
    module = Tower(Adds)
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        engine.backward(engine(side.part(x)).square().mean())
        engine.step()
    return engine.state_dict()


def test_blocks_that_return_their_input_changed_in_place(ranks):
    """One tensor object is input and output: the hook of the old value comes too late."""
    compare(ranks, 2, outputs_changed_in_place)


class Parcel:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(nn.Module):
    """Takes and returns an object that is no container."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, parcel: Parcel) -> Parcel:
        return Parcel(self.b(torch.tanh(self.a(parcel.x))))


class Parcels(Tower):
    def __init__(self) -> None:
        super().__init__(Wraps)

    def forward(self, x: Tensor) -> Tensor:
        parcel = Parcel(self.first(x))
        for block in self.blocks:
            parcel = block(parcel)
        return self.last(parcel.x)


def opaque_objects(side: Side) -> dict[str, Tensor]:
    module = Parcels()
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        engine.backward(engine(side.part(x)).square().mean())
        engine.step()
    return engine.state_dict()


def test_blocks_that_exchange_objects_of_the_user_s_own(ranks):
    """A tensor inside an object the engine does not know must not hide a backward from it."""
    compare(ranks, 2, opaque_objects)


class Leaves(nn.Module):
    """Stores an auxiliary loss on itself after its output was made (a router's, for one)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b, self.router = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        self.aux = self.router(x).square().mean()
        return x


def losses_left_on_modules(side: Side) -> dict[str, Tensor]:
    module = Tower(Leaves)
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        out = engine(side.part(x))
        engine.backward(out.square().mean() + sum(b.aux for b in module.blocks))
        engine.step()
    return engine.state_dict()


def test_a_loss_stored_on_a_block(ranks):
    """Its backward runs before that of the block's output, which is where the gather hangs."""
    compare(ranks, 2, losses_left_on_modules)


class Features(nn.Module):
    """The last block's output is not used, only what a hook caught inside of it."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim)) for _ in range(3)
        )
        self.caught: list[Tensor] = []
        for block in self.blocks:
            block[0].register_forward_hook(lambda _m, _a, out: self.caught.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.caught.clear()
        for block in self.blocks:
            x = block(x)
        return torch.stack([c.square().mean() for c in self.caught]).sum()


def caught_by_a_hook(side: Side) -> dict[str, Tensor]:
    module = Features()
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        engine.backward(engine(side.part(x)))
        engine.step()
    return engine.state_dict()


def test_activations_caught_inside_a_block(ranks):
    """Perceptual losses: the backward enters the block in its middle."""
    compare(ranks, 2, caught_by_a_hook)


def penalty_with_accumulation(side: Side) -> dict[str, Tensor]:
    module = Tower(Adapted)
    engine = side.engine(module, sgd(module), accumulate=2)
    for x in batches(6):
        x = side.part(x).requires_grad_()
        out = engine(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        engine.backward(out.square().mean() + slope.square().mean())
        engine.step()
    return engine.state_dict()


def test_autograd_grad_is_no_micro_batch(ranks):
    """A gradient penalty must not count towards accumulation: steps would come twice as often."""
    compare(ranks, 2, penalty_with_accumulation, zero_reduce="each")


class Forces(Tower):
    """Differentiates inside its forward, as models of energies do."""

    def __init__(self) -> None:
        super().__init__(Adapted)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + self.last(force)


def forces_inside_forward(side: Side) -> dict[str, Tensor]:
    module = Forces()
    engine = side.engine(module, sgd(module))
    for x in batches(3):
        engine.backward(engine(side.part(x)).square().mean())
        engine.step()
    return engine.state_dict()


def test_autograd_grad_inside_forward(ranks):
    """A backward in the middle of a forward changes its direction twice."""
    compare(ranks, 2, forces_inside_forward)


def create_graph(side: Side) -> dict[str, Tensor]:
    module = Tower(Adapted)
    engine = side.engine(module, sgd(module))
    for x in batches(2):
        engine.backward(engine(side.part(x)).square().mean(), create_graph=True)
        engine.step()
    return engine.state_dict()


def test_backward_with_create_graph(ranks):
    """Gradients that have a graph themselves must not be refused by in-place arithmetic."""
    compare(ranks, 2, create_graph)


class Perceiver(nn.Module):
    """Parameters are the inputs of blocks: one alone, one beside an activation."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.latent, self.place = (nn.Parameter(torch.randn(1, dim)) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Bilinear(dim, dim, dim) for _ in range(2))
        self.start = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start[0](self.latent)
        for block in self.blocks:
            x = torch.tanh(block(x, self.place.expand_as(x)))
        return x


def parameters_as_inputs(side: Side) -> dict[str, Tensor]:
    module = Perceiver()
    engine = side.engine(module, sgd(module))
    counts = []
    for x in batches(4):
        engine.backward(engine(side.part(x)).square().mean())
        engine.step()
        counts.append(len(module._parameters["latent"]._backward_hooks or ()))
    assert counts[0] == counts[-1], counts
    twin: Any = copy.deepcopy(module)
    assert not vars(dict.__getitem__(twin._parameters, "latent"))
    return engine.state_dict()


def test_parameters_as_inputs_of_blocks(ranks):
    """Hooks on a parameter live as long as it does: they must not pile up, nor travel in copies."""
    compare(ranks, 2, parameters_as_inputs)
