"""Models that strain a pipeline, one noun each, and the same training in one process.

A batch is a list of micro-batches ``(input, target)``, those of data rank 0 first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pipeline_lab import SCHEDULES
from small import caught, rank, settings, world
from torch import Tensor, nn
from torch.nn import functional as F

from zeroexp.pipe_engine import PipeEngine

MicroBatch = tuple[Any, Any]
FP64 = torch.float64


@dataclass(frozen=True)
class Strain:
    """``build()`` the model (fp64), ``batch(step, count)`` its micro-batches, ``before(model,
    step)`` what changes before a step."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], list[MicroBatch]]
    loss: Callable[[Any, Any], Tensor] = F.mse_loss
    before: Callable[[nn.Module, int], None] = lambda model, step: None
    cut: Any = "layers"
    stages: int = 2


def rows(step: int, count: int, *, width: int = 6, out: int = 4, samples: int = 3) -> Any:
    draw = torch.Generator().manual_seed(100 + step)
    return [
        (
            torch.randn(samples, width, generator=draw, dtype=FP64),
            torch.randn(samples, out, generator=draw, dtype=FP64),
        )
        for _ in range(count)
    ]


def tokens(step: int, count: int) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(200 + step)
    drawn = [torch.randint(0, 11, (3, 6), generator=draw) for _ in range(count)]
    return [(t[:, :-1], t[:, 1:]) for t in drawn]


def ragged(step: int, count: int) -> list[MicroBatch]:
    """Shapes that change between batches and micro-batches (PP-01)."""
    return [rows(10 * step + m, 1, samples=1 + (step + m) % 4)[0] for m in range(count)]


def words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def linear(*widths: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(a, b).double() for a, b in itertools.pairwise(widths)]


def mlp() -> nn.Module:
    return nn.Sequential(*linear(6, 8, 8, 8, 8, 4))


def with_batch_norm() -> nn.Module:
    a, b, c, d = linear(6, 8, 8, 8, 4)
    model = nn.Sequential(a, nn.BatchNorm1d(8), b, nn.BatchNorm1d(8), c, nn.BatchNorm1d(8), d)
    return model.double()


class Counting(nn.Module):
    """A layer with buffers that are not floats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=FP64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.full((2,), 1 + 2j, dtype=torch.complex128))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("own", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.phase *= 1j
        self.flags.logical_not_()
        self.own += 1
        return x * self.scale


def with_odd_buffers() -> nn.Module:
    a, b, c, d = linear(6, 8, 8, 8, 4)
    return nn.Sequential(a, Counting(), b, c, Counting(), d)


def freeze(*names: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = mlp()
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(names))
        return model

    return build


frozen_some = freeze("1.bias", "3.weight")
frozen_first = freeze("0", "1", "2")
frozen_last = freeze("3", "4")


def thaw(model: nn.Module, step: int) -> None:
    if step == 1:
        params = dict(model.named_parameters())
        for name in ("1.bias", "3.weight"):
            params[name].requires_grad_(True)


def thaw_stage(model: nn.Module, step: int) -> None:
    if step == 1:
        for p in model.parameters():
            p.requires_grad_(True)


class Twice(nn.Module):
    """One weight used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((8,), 0.7, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * (self.w * x)


def shared_in_a_stage() -> nn.Module:
    a, b, c = linear(6, 8, 8, 4)
    twice, act = Twice(), nn.Tanh()
    return nn.Sequential(a, act, twice, act, twice, b, act, c)


def shared_across() -> nn.Module:
    a, b, c = linear(6, 8, 8, 4)
    return nn.Sequential(a, b, nn.Tanh(), b, nn.Tanh(), b, c)


class Inner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"er": layer})

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.deep["er"](x))


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def two_ties() -> nn.Module:
    """An embedding tied with the head, and nested layers tied in pairs."""
    a, b = linear(8, 8, 8)
    table = nn.Embedding(11, 8).double()
    return nn.Sequential(table, Inner(a), Inner(b), Inner(b), Inner(a), Head(table.weight))


def tied_over_three() -> nn.Module:
    a, b, c, d = linear(8, 8, 8, 8, 8)
    table = nn.Embedding(11, 8).double()
    middle = nn.Sequential(b, Head(table.weight), Head(nn.Parameter(torch.ones(8, 11).double())))
    return nn.Sequential(table, a, middle, c, d, Head(table.weight))


class Sometimes(nn.Module):
    """Uses its weight when its input's first number is positive."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight if weight is not None else nn.Parameter(torch.eye(8, dtype=FP64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight if bool(x.flatten()[0] > 0) else 0)


def sometimes() -> nn.Module:
    """A tied weight that stages and data ranks use or not, each by its data."""
    a, b, c = linear(6, 8, 8, 4)
    first = Sometimes()
    return nn.Sequential(a, first, b, Sometimes(first.weight), Sometimes(), c)


def some(step: int, count: int) -> list[MicroBatch]:
    """Step by step nobody, one micro-batch, one data rank, all."""
    found = rows(step, count)
    return [(x * 0 + 1 if m in ([], [0], range(count // 2))[step % 3] else -x.abs(), y)
            for m, (x, y) in enumerate(found)]  # fmt: skip


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, 2, dtype=FP64) / 3)
        self.b = nn.Parameter(torch.zeros(2, 8, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + x @ self.a @ self.b


def lora() -> nn.Module:
    a, b = linear(8, 8, 8)
    table = nn.Embedding(11, 8).double().requires_grad_(False)
    return nn.Sequential(table, Lora(a), Lora(b), Head(table.weight))


class Packs(nn.Module):
    """Gives the next layer everything that may cross a boundary."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Any) -> Any:
        x = given["x"][0] if isinstance(given, dict) else given
        y = self.inner(x)
        mask = y.detach() > 0
        return {
            "x": (y, None, mask),
            "n": [mask.sum(), 3, 2.5, True, "s"],
            1: torch.arange(2),
            "empty": torch.empty(0, 3),
            "same": y,
            "halves": {"left": y[:, :4], "gone": y.detach()},
        }


class Unpacks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: Any) -> Tensor:
        y, nothing, mask = given["x"]
        assert (
            nothing is None
            and given["n"][1:] == [3, 2.5, True, "s"]
            and given["empty"].numel() == 0
        )
        assert torch.equal(given[1], torch.arange(2)) and mask.dtype == torch.bool
        left = given["halves"]["left"]
        y = y * mask + given["same"] * 0.5 + F.pad(left, (0, y.shape[1] - left.shape[1]))
        return self.inner(y + given["n"][0])


def structures() -> nn.Module:
    a, b, c, d = linear(6, 8, 8, 8, 4)
    return nn.Sequential(Packs(a), Packs(b), Packs(c), Unpacks(d))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(8, dtype=FP64))
        self.unused = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


def with_unused() -> nn.Module:
    a, b, c = linear(6, 8, 8, 4)
    return nn.Sequential(a, Unused(), b, Unused(), c)


def with_sparse() -> nn.Module:
    a, b = linear(8, 8, 11)
    table = nn.Embedding(11, 8, sparse=True).double()
    return nn.Sequential(table, nn.Tanh(), a, b)


class Detaches(nn.Module):
    """Its output has no graph: nothing before it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, dtype=FP64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).detach()


def detached() -> nn.Module:
    a, b, c = linear(6, 8, 8, 4)
    return nn.Sequential(a, Detaches(), b, c)


class Holds(nn.Module):
    """Its layers are a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


STRAINS: dict[str, Strain] = {
    "mlp": Strain(mlp, rows),
    "uneven": Strain(mlp, rows, cut=[4, 1]),
    "child": Strain(Holds, rows),
    "ragged": Strain(mlp, ragged),
    "batch_norm": Strain(with_batch_norm, rows),
    "odd_buffers": Strain(with_odd_buffers, rows),
    "frozen_some": Strain(frozen_some, rows),
    "frozen_first": Strain(frozen_first, rows, cut=[3, 2]),
    "frozen_last": Strain(frozen_last, rows, cut=[3, 2]),
    "thaw": Strain(frozen_some, rows, before=thaw),
    "thaw_first": Strain(frozen_first, rows, before=thaw_stage, cut=[3, 2]),
    "thaw_last": Strain(frozen_last, rows, before=thaw_stage, cut=[3, 2]),
    "shared_in_a_stage": Strain(shared_in_a_stage, rows, cut=[5, 3]),
    "shared_across": Strain(shared_across, rows),
    "two_ties": Strain(two_ties, tokens, words),
    "three": Strain(mlp, rows, stages=3, cut=[2, 1, 2]),
    "tied_over_three": Strain(tied_over_three, tokens, words, stages=3),
    "sometimes": Strain(sometimes, some, cut=[3, 3]),
    "lora": Strain(lora, tokens, words),
    "structures": Strain(structures, rows),
    "unused": Strain(with_unused, rows),
    "sparse": Strain(with_sparse, tokens, words),
    "detached": Strain(detached, rows, cut=[2, 2]),
    "four": Strain(mlp, rows, stages=4, cut=[1, 2, 1, 1]),
}


@dataclass
class Trial:
    """One strain in a pipe."""

    strain: str
    schedule: str = "1f1b"
    stage: int = 3
    micro_batches: int = 4
    steps: int = 4
    recompute: bool = False
    optimizer: str = "adamw"
    keys: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)

    @property
    def of(self) -> Strain:
        return STRAINS[self.strain]

    def config(self) -> dict[str, Any]:
        pipeline = {
            "schedule": self.schedule,
            "stages": self.of.stages,
            "micro_batches": self.micro_batches,
            "virtual": SCHEDULES.get(self.schedule, 1),
            "cut": self.of.cut if SCHEDULES.get(self.schedule) == 1 else "layers",
            **self.pipeline,
        }
        return {**settings(self.stage, **{"timeout": 20, **self.keys}), "pipeline": pipeline}

    def batch(self, step: int, data_ranks: int) -> list[MicroBatch]:
        return self.of.batch(step, self.micro_batches * data_ranks)


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.05)],
    "groups": lambda m: [
        torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.02},
            ],
            lr=0.01,
        )
    ],
    "two": lambda m: [
        torch.optim.SGD([p for p in m.parameters() if p.dim() > 1], lr=0.05, momentum=0.9),
        torch.optim.AdamW([p for p in m.parameters() if p.dim() == 1], lr=0.01),
    ],
    "halves": lambda m: [
        torch.optim.SGD(list(m.parameters())[:4], lr=0.05),
        torch.optim.Adagrad(list(m.parameters())[4:], lr=0.01),
    ],
}


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def attempt(trial: Trial) -> dict[str, Any]:
    """Losses, state on rank 0, the module after close, or the error."""
    found: dict[str, Any] = {}
    name, text = caught(_train, trial, found)
    return {**found, "error": f"{name}: {text}" if name else ""}


def attempt_all(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    return [attempt(trial) for trial in trials]


def _train(trial: Trial, found: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = trial.of.build()
    optimizers = OPTIMIZERS[trial.optimizer](model)
    engine = PipeEngine(
        model, optimizers, trial.config(), loss=trial.of.loss, recompute=trial.recompute
    )
    data_ranks = world() // trial.of.stages
    index = rank() % data_ranks
    found["losses"], found["norms"] = [], []
    for step in range(trial.steps):
        trial.of.before(model, step)
        batch = trial.batch(step, data_ranks)
        mine = batch[index * trial.micro_batches : (index + 1) * trial.micro_batches]
        found["losses"].append(
            engine.train_micro_batches([x for x, _ in mine], [y for _, y in mine])
        )
        engine.step()
        found["norms"].append(engine.grad_norm)
    found["state"] = engine.state_dict()
    engine.close()
    found["whole"] = whole(model)


def plain(trial: Trial, data_ranks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and state of the same training in this process."""
    model = trial.of.build()
    optimizers = OPTIMIZERS[trial.optimizer](model)
    losses, norms = [], []
    for step in range(trial.steps):
        trial.of.before(model, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = trial.batch(step, data_ranks)
        total = 0.0
        for x, y in batch:
            loss = trial.of.loss(model(x), y) / len(batch)
            loss.backward()
            total += float(loss.detach())
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(total)
    return losses, norms, whole(model)
