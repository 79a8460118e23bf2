"""What people do in a training, with every kind of offload: the bits of ``offload=none``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_lab import KINDS, Bench, Found, compare, leaves, part, train
from small import MLP, STAGES, caught, mlp, rank, regression, weights, world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroexp
from zeroexp.optim.adagrad import Adagrad
from zeroexp.optim.adamw import AdamW
from zeroexp.optim.lion import Lion
from zeroexp.optim.sgd import SGD

WIDTHS = (40, 160, 120, 3)
"""Units of 6560, 19320 and 363 parameters: several chunks of 4096, and less than one."""


def model(dtype: torch.dtype = torch.float32) -> MLP:
    return mlp(*WIDTHS, dtype=dtype)


def data(steps: int = 3, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    return regression(steps, samples, WIDTHS[0], WIDTHS[-1])


def adamw(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, **options)


# -- optimizers ------------------------------------------------------------------------------------


class CountsInGroups(torch.optim.Optimizer):
    """Keeps its number of steps and a running weight in the group, as schedule-free ones do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            k = group["k"]
            weight = (k + 1) ** 0.5
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], share)
            group["k"] = k + 1


class CountsInAttributes(torch.optim.Optimizer):
    """Keeps its number of steps in an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.rounds = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.rounds += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.rounds)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "our_sgd": lambda p: SGD(p, lr=0.05),
    "our_momentum": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "our_adagrad": lambda p: Adagrad(p, lr=0.05),
    "lion": lambda p: Lion(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "in_groups": CountsInGroups,
    "in_attributes": CountsInAttributes,
    "ours": lambda p: AdamW(p, lr=0.01),
}


def each_optimizer(bench: Bench) -> Found:
    found: Found = {}
    for name, make in OPTIMIZERS.items():
        module = model()
        optimizer = make(module.parameters())
        engine = bench.engine(module, optimizer)
        found[f"{name} losses"] = train(engine, data())
        left = leaves(engine)
        found |= {f"{name} {key}": value for key, value in left.items()}
        found[f"{name} groups"] = [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
        ]
        found[f"{name} rounds"] = getattr(optimizer, "rounds", None)
        engine.close()
    return found


def matrices(bench: Bench) -> Found:
    """Optimizers that look at whole matrices, which stage 0 and one rank can give them."""
    found: Found = {}
    for name, make in {
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
        "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    }.items():
        module = mlp(*WIDTHS)
        if name == "muon":
            module = MLP(*WIDTHS, bias=False)
        engine = bench.engine(module, make(list(module.parameters())))
        found[f"{name} losses"] = train(engine, data())
        found |= {f"{name} {key}": value for key, value in leaves(engine).items()}
        engine.close()
    return found


def groups_and_schedules(bench: Bench) -> Found:
    """Groups with hyperparameters of their own, a scheduler, hooks of the step."""
    module = model()
    biases = [p for p in module.parameters() if p.dim() == 1]
    rest = [p for p in module.parameters() if p.dim() == 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": rest, "weight_decay": 0.3},
            {"params": biases, "lr": 0.03, "betas": (0.5, 0.9)},
        ],
        lr=1e-2,
    )
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    engine = bench.engine(module, optimizer)
    engine.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    losses = train(engine, data(5))
    found = leaves(engine)
    engine.close()
    rates = [g["lr"] for g in optimizer.param_groups]
    return {**found, "losses": losses, "calls": calls, "rates": rates}


def several_optimizers(bench: Bench) -> Found:
    module = model()
    first, *rest = [list(layer.parameters()) for layer in module if isinstance(layer, nn.Linear)]
    one = torch.optim.SGD(first, lr=0.05, momentum=0.9)
    two = torch.optim.AdamW([p for ps in rest for p in ps], lr=1e-2)
    engine = bench.engine(module, [one, two])
    for number, (x, y) in enumerate(data(5)):
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        for optimizer in (one, two) if number % 2 else (two,):
            engine.step(optimizer)
            engine.zero_grad(optimizer)
        engine.zero_grad()
    found = leaves(engine)
    engine.close()
    return found


# -- models ----------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Layers of which a batch uses some, one that is used twice, a frozen one, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(72, 72) for _ in range(5))
        self.blocks[1].requires_grad_(False)
        self.blocks[4].weight = self.blocks[0].weight
        self.head = nn.Linear(72, 3)
        self.never = nn.Parameter(torch.ones(9))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = x + torch.tanh(self.blocks[index](x))
        return self.head(x)


def branches(bench: Bench) -> Found:
    """Histories split, units are skipped by every rank or by some, and come back."""
    module = Branches()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    engine = bench.engine(module, optimizer)
    uses = [[0, 1, 2, 3, 4], [2, 3], [0, 1], [1, 3, 4], [3], [0, 4], [0, 2, 2], [4, 3, 2, 1, 0]]
    for number, (x, y) in enumerate(regression(len(uses), 8, 72, 3)):
        other = 1 < number < 6 and rank() > 0
        used = uses[number - 1 if other else number]
        engine.backward(F.mse_loss(engine(part(x), used), part(y)))
        engine.step()
    found = leaves(engine)
    engine.close()
    return found


def thaw(bench: Bench) -> Found:
    """A layer is frozen at first; another one is frozen later."""
    module = model()
    module[2].requires_grad_(False)
    engine = bench.engine(module, adamw(module))
    losses = train(engine, data(2))
    module[2].requires_grad_(True)
    losses += train(engine, data(4)[2:])
    module[0].requires_grad_(False)
    losses += train(engine, data(6)[4:])
    found = {**leaves(engine), "losses": losses}
    engine.close()
    return found


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(72, 72), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number == 2)
        return self.head(x)


def recompute(bench: Bench) -> Found:
    module = Recomputed()
    engine = bench.engine(module, adamw(module))
    batches = [(x.requires_grad_(), y) for x, y in regression(3, 8, 72, 3)]
    torch.manual_seed(1)
    found = {"losses": train(engine, batches), **leaves(engine)}
    engine.close()
    return found


def precisions(bench: Bench) -> Found:
    found: Found = {}
    for name, keys in {
        "pure": {"compute": "bf16", "precision_master": "none"},
        "narrow": {"compute": "bf16", "precision_accumulate": "bf16", "precision_reduce": "bf16"},
        "fp64": {"compute": "fp64"},
    }.items():
        module = model(torch.float64 if name == "fp64" else torch.float32)
        engine = bench.engine(module, adamw(module), **keys)
        for x, y in data():
            x = x.double() if name == "fp64" else x
            engine.backward(F.mse_loss(engine(part(x)).double(), part(y).double()))
            engine.step()
        found |= {f"{name} {key}": value for key, value in leaves(engine).items()}
        engine.close()
    return found


def loss_scale(bench: Bench) -> Found:
    """fp16 with a scale that overflows at first: steps are skipped, then it goes on."""
    module = model()
    engine = bench.engine(
        module,
        adamw(module),
        compute="fp16",
        scale_init=2.0**24,
        scale_interval=2,
        scale_hysteresis=1,
        scale_backoff=0.001,
    )
    losses = train(engine, data(8))
    found = {
        **leaves(engine),
        "losses": losses,
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale,
        "norm": engine.grad_norm,
    }
    engine.close()
    assert 0 < found["skipped"] < 8
    return found


def skipped(bench: Bench) -> Found:
    """A loss that is not finite, with precision.nonfinite=skip."""
    module = model()
    engine = bench.engine(module, adamw(module), precision_nonfinite="skip")
    for number, (x, y) in enumerate(data(5)):
        loss = F.mse_loss(engine(part(x)), part(y))
        engine.backward(loss * float("nan") if number in (1, 3) and rank() == 0 else loss)
        engine.step()
    found = {**leaves(engine), "skipped": engine.skipped_steps}
    engine.close()
    assert found["skipped"] == 2
    return found


# -- around the step -------------------------------------------------------------------------------


def edits(bench: Bench) -> Found:
    """gathered() edits before, between and after steps; full_grad and clipping by hand."""
    found: Found = {}
    for compute in ("fp32", "bf16"):
        module = model()
        engine = bench.engine(
            module, adamw(module), compute=compute, offload_step_in_backward="false"
        )
        for number, (x, y) in enumerate(data(4)):
            with zeroexp.gathered(module[0].weight, modify_rank=0):
                if rank() == 0:
                    module[0].weight.data[number].fill_(0.25 * number)
            with zeroexp.gathered(module):
                found |= {f"{compute} {number} {n}": t for n, t in weights(module).items()}
            engine.backward(F.mse_loss(engine(part(x)).float(), part(y)))
            found[f"{compute} {number} grad"] = engine.full_grad(module[2].weight)
            if number == 2:
                found[f"{compute} norm"] = engine.clip_norm(0.01)
            if number == 3:
                engine.clip_value(1e-3)
            engine.step()
        found |= {f"{compute} {k}": v for k, v in leaves(engine).items()}
        engine.close()
    return found


def evaluation(bench: Bench) -> Found:
    """Evaluation between backward passes and steps, a backward that raises, zero_grad."""
    return {f"{n} {k}": v for n in (1, 2) for k, v in _evaluation(bench, n).items()}


def _evaluation(bench: Bench, accumulate: int) -> Found:
    module = model()
    # What was stepped in a backward that then raises cannot be dropped (test_offload_errors.py).
    late = {"offload_step_in_backward": "false"}
    engine = bench.engine(module, adamw(module), accumulate=accumulate, **late)
    found: Found = {}

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("on purpose")

    for number, (x, y) in enumerate(data(8)):
        with torch.no_grad():
            found[f"eval {number}"] = engine(part(x))
        if number == 4:
            handle = module[0].register_forward_hook(lambda m, a, out: Raises.apply(out))
            found["raised"] = caught(engine.backward, F.mse_loss(engine(part(x)), part(y)))[0]
            handle.remove()
            engine.zero_grad()
        engine.backward(F.mse_loss(engine(part(x)), part(y)))
        engine.step()
    found |= leaves(engine)
    engine.close()
    return found


def reloads(bench: Bench) -> Found:
    """state_dict and optimizer_state_dict, into the same engine and into a second one."""
    module = model()
    engine = bench.engine(module, adamw(module))
    train(engine, data(2))
    whole, state = engine.state_dict(), engine.optimizer_state_dict(engine.optimizers[0])
    train(engine, data(4)[2:])
    found = {f"on {k}": v for k, v in leaves(engine).items()}
    engine.load_state_dict(whole)
    engine.load_optimizer_state_dict(engine.optimizers[0], state)
    train(engine, data(4)[2:])
    found |= {f"back {k}": v for k, v in leaves(engine).items()}
    twin = mlp(*WIDTHS, seed=9)
    second = bench.engine(twin, adamw(twin))
    second.load_state_dict(whole)
    second.load_optimizer_state_dict(second.optimizers[0], state)
    train(second, data(4)[2:])
    found |= {f"second {k}": v for k, v in leaves(second).items()}
    for key, value in leaves(engine).items():
        again = found[f"second {key}"]
        assert not isinstance(value, Tensor) or torch.equal(value, again), key
    engine.close()
    second.close()
    return found


def afterwards(bench: Bench) -> Found:
    """The model and the optimizer without their engine, then under another one."""
    module = model()
    optimizer = adamw(module)
    engine = bench.engine(module, optimizer)
    train(engine, data(2))
    engine.close()
    for x, y in data(4)[2:]:
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    found: Found = {f"plain {k}": v for k, v in weights(module).items()}
    second = bench.engine(module, optimizer)
    train(second, data(6)[4:])
    found |= leaves(second)
    second.close()
    third = bench.engine(module, optimizer)
    train(third, data(8)[6:])
    found |= {f"third {k}": v for k, v in leaves(third).items()}
    third.close()
    found |= {f"end {k}": v for k, v in weights(module).items()}
    return found


def born(bench: Bench) -> Found:
    with zeroexp.sharded_init(bench.settings()):
        module = Recomputed()
    engine = bench.engine(module, adamw(module))
    losses = train(engine, regression(3, 8, 72, 3))
    found = {**leaves(engine), "losses": losses}
    engine.close(keep_sharded=True)
    with torch.no_grad():
        found["after"] = module(torch.ones(2, 72))
    second = bench.engine(module, engine.optimizers[0])
    train(second, regression(5, 8, 72, 3)[3:])
    found |= {f"second {k}": v for k, v in leaves(second).items()}
    second.close()
    return found


def schedules(bench: Bench) -> Found:
    """What must not matter: overlap, prefetch, small reductions, cuts, ways to keep parameters."""
    found: Found = {}
    for keys in (
        {"zero_overlap": False},
        {"zero_prefetch": 0},
        {"zero_prefetch": 2},
        {"zero_bucket": 4096},
        {"zero_unit": "model"},
        {"zero_unit": "leaf", "zero_reshard_after_forward": "false"},
        {"zero_reshard_after_forward": "true", "accumulate": 2},
        {"zero_reduce": "each", "accumulate": 2},
        {"zero_reduce": "last", "accumulate": 2},
        {"nvme_engine": "threads", "nvme_block_size": 8192, "nvme_checksum": False},
        {"offload_step_in_backward": "false"},
    ):
        module = model()
        engine = bench.engine(module, adamw(module), **keys)
        found[f"{keys} losses"] = train(engine, data(4))
        found |= {f"{keys} {k}": v for k, v in leaves(engine).items()}
        engine.close()
    return found


def by_fraction(bench: Bench) -> Found:
    """A part of the state leaves: the largest segments first."""
    found: Found = {}
    for fraction in (0.0, 0.3, 0.75):
        for make in (adamw, lambda m: AdamW(m.parameters(), lr=0.01)):
            module = model()
            engine = bench.engine(module, make(module), offload_fraction=fraction)
            left = {"losses": train(engine, data(4)), **leaves(engine)}
            found |= {f"{fraction} {key}": value for key, value in left.items()}
            engine.close()
    return found


CASES = [
    by_fraction,
    each_optimizer,
    groups_and_schedules,
    several_optimizers,
    branches,
    thaw,
    recompute,
    precisions,
    loss_scale,
    skipped,
    edits,
    evaluation,
    reloads,
    afterwards,
    born,
    schedules,
]


MIXED = [
    {"offload_optim": o, "offload_params": p}
    for o, p in (("device", "cpu"), ("device", "nvme"), ("cpu", "nvme"), ("nvme", "cpu"))
]
"""Optimizer state and parameters on different tiers."""
EACH = [*({"offload_kind": kind} for kind in KINDS), *MIXED]
LONG = {each_optimizer, schedules, by_fraction}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_at_stage_3_on_two_ranks(ranks, tmp_path, case):
    kinds = EACH[1:4:2] if case in LONG else EACH[:4]
    compare(ranks, 2, case, 3, tmp_path, kinds)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_at_one_stage_on_one_rank(ranks, tmp_path, case):
    """Stages and kinds take turns."""
    at = CASES.index(case)
    kinds = [EACH[at % 8], EACH[(at + 3) % 8]]
    compare(ranks, 1, case, at % 3, tmp_path, kinds[: 1 if case in LONG else 2])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_everywhere(ranks, tmp_path, case, stage, num_ranks):
    compare(ranks, num_ranks, case, stage, tmp_path, EACH)


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 0), (1, 2), (1, 3)])
def test_optimizers_over_matrices(ranks, tmp_path, num_ranks, stage):
    compare(ranks, num_ranks, matrices, stage, tmp_path)


@pytest.mark.parametrize(("num_ranks", "shard_size"), [(2, 1), (4, 2)])
def test_replicas(ranks, tmp_path, num_ranks, shard_size):
    compare(ranks, num_ranks, replicated, 3, tmp_path)


def replicated(bench: Bench) -> Found:
    """Shards within a group, replicas across groups."""
    found: Found = {}
    for size in {1: (1,), 2: (1,), 4: (2,)}[world()]:
        for keys in ({}, {"clip": 0.1, "accumulate": 2}):
            module = model()
            engine = bench.engine(module, adamw(module), zero_shard_size=size, **keys)
            found |= {
                f"{keys} {k}": v
                for k, v in {"losses": train(engine, data(4)), **leaves(engine)}.items()
            }
            engine.close()
    return found
