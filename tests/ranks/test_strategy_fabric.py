"""Lightning Fabric over the engine: setup, backward, clipping, steps, save and load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from strategy_lab import WIDTH, Net, become_elastic, distance, rows, shared_folder, values
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zeroexp.strategies import fabric_strategy_class
from zeroexp.strategies.compat import namespace


class Plain(nn.Module):
    """The same layers as Net, without Lightning."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fabric(strategy: Any, **kwargs: Any) -> Any:
    become_elastic()
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **kwargs)
    made.launch()
    return made


def zero(**kwargs: Any) -> Any:
    return fabric_strategy_class("lightning.pytorch")(**kwargs)


def train(
    strategy: Any,
    model: nn.Module,
    steps: int = 4,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    precision: Any = None,
    compiled: bool = False,
) -> tuple[Any, Any, Any]:
    engine = fabric(strategy, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    model, optimizer = engine.setup(model, optimizer)
    data = rows(2 * steps * accumulate * dist.get_world_size())
    batches = engine.setup_dataloaders(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    for number, batch in enumerate(batches):
        last = (number + 1) % accumulate == 0
        with engine.no_backward_sync(model, enabled=not last):
            loss = model(batch).pow(2).mean() / accumulate
            engine.backward(loss)
        if last:
            if clip:
                engine.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return engine, model, optimizer


def whole_state(engine: Any, model: Any) -> dict[str, Tensor]:
    """The weights on every rank."""
    box = [engine.strategy.get_module_state_dict(engine.strategy.engine.module)]
    dist.broadcast_object_list(box, 0)
    return box[0]


def against_ddp(stage: int, options: dict[str, Any]) -> float:
    """Distance of the weights; a compiled model of ours is compared with a plain one of DDP."""
    ours = whole_state(*train(zero(stage=stage), Plain(), **options)[:2])
    theirs = Plain()
    train("ddp", theirs, **{**options, "compiled": False})
    return distance(ours, values(theirs))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 0.0),
        ({"accumulate": 3}, 1e-6),
        ({"clip": {"max_norm": 0.05}}, 1e-6),
        ({"clip": {"clip_val": 0.01}}, 1e-6),
        ({"precision": "64-true"}, 1e-12),
        ({"precision": "bf16-mixed"}, 5e-2),  # AdamW: four steps of 1e-2 either way
    ],
    ids=["plain", "accumulate", "norm", "value", "fp64", "bf16"],
)
def test_fabric_trains_what_ddp_trains(
    ranks: Any, stage: int, options: dict[str, Any], limit: float
) -> None:
    assert max(ranks(2)(against_ddp, stage, options)) <= limit


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_compiled_as_a_whole(ranks: Any, stage: int) -> None:
    """Fabric compiles it again after setup, with its hooks: gathers must stay out of graphs."""
    assert max(ranks(2)(against_ddp, stage, {"compiled": True})) <= 1e-6


def clip_norm() -> float:
    engine = fabric(zero(stage=3))
    model = nn.ParameterDict({"w": torch.zeros(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer = engine.setup(model, optimizer)
    with engine.strategy.engine.scope():
        loss = (model["w"] * torch.tensor([3.0, 4.0])).sum()
        engine.backward(loss)
    return float(engine.clip_gradients(wrapped, optimizer, max_norm=1.0))


def test_the_norm_is_over_all_ranks(ranks: Any) -> None:
    assert ranks(2)(clip_norm) == pytest.approx([5.0, 5.0])


def save_and_load(first: int, second: int) -> tuple[float, int, list[str]]:
    path = shared_folder("fabric") / "saved.ckpt"
    engine, model, optimizer = train(zero(stage=first), Plain(), steps=3)
    engine.save(path, {"model": model, "optimizer": optimizer, "number": 7})
    again = fabric(zero(stage=second))
    other = Plain(seed=9)
    resumed, steps = again.setup(other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    state = {"model": resumed, "optimizer": steps, "number": 0}
    rest = again.load(path, state)
    for net, step, run in ((model, optimizer, engine), (resumed, steps, again)):
        step.zero_grad()
        run.backward(net(rows(4, seed=3)).pow(2).mean())
        step.step()
    away = distance(whole_state(engine, model), whole_state(again, resumed))
    return away, int(state["number"]), sorted(rest)


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 3), (2, 2)])
def test_save_and_load_at_any_stage(ranks: Any, first: int, second: int) -> None:
    """Optimizer state and plain values come back, too; the next step is the same."""
    assert ranks(2)(save_and_load, first, second) == [(0.0, 7, [])] * 2


def filtered() -> list[str]:
    path = shared_folder("filter") / "saved.ckpt"
    engine, model, _ = train(zero(stage=3), Plain(), steps=1)
    engine.save(path, {"model": model}, filter={"model": lambda name, _: "bias" not in name})
    return sorted(torch.load(path, weights_only=True)["model"])


def test_a_filter_decides_what_is_saved(ranks: Any) -> None:
    names = ["blocks.0.0.weight", "blocks.1.0.weight", "blocks.2.0.weight", "head.weight"]
    assert ranks(2)(filtered) == [names, names]


def module_alone() -> float:
    engine = fabric("zeroexp_stage_3")
    net = Plain()
    expected = net(rows(4))
    model = engine.setup_module(net)
    with torch.no_grad():
        return float((model(rows(4)) - expected).abs().max())


def test_a_model_without_optimizers_evaluates(ranks: Any) -> None:
    """Also: the registered names work for Fabric."""
    assert ranks(2)(module_alone) == [0.0, 0.0]


def scheduled() -> list[float]:
    engine, net = fabric(zero(stage=1)), Plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, wrapped, *rest = engine.setup(net, optimizer, scheduler=schedule)
    assert rest == [schedule]
    rates = []
    for batch in rows(6).split(2):
        engine.backward(model(batch).pow(2).mean())
        wrapped.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


@pytest.mark.skipif(
    not namespace("lightning.pytorch").fabric_takes_a_scheduler, reason="older Lightning"
)
def test_a_scheduler_is_handed_through(ranks: Any) -> None:
    assert ranks(2)(scheduled) == [[0.5, 0.25, 0.125]] * 2


def refused(what: str) -> None:
    engine = fabric(zero(stage=2))
    net = Plain()
    optimizer = torch.optim.AdamW(net.parameters())
    if what == "apart":
        engine.setup_module(net)
        engine.setup_optimizers(optimizer)
    elif what == "two models":
        engine.setup(net, optimizer)
        other = Plain()
        engine.setup(other, torch.optim.AdamW(other.parameters()))
    elif what == "bare backward":
        model, _ = engine.setup(net, optimizer)
        model(rows(2)).sum().backward()
    elif what == "norm":
        model, wrapped = engine.setup(net, optimizer)
        engine.backward(model(rows(2)).mean())
        engine.clip_gradients(model, wrapped, max_norm=1.0, norm_type=1)
    elif what == "missing":
        path = shared_folder("missing") / "saved.ckpt"
        model, _ = engine.setup(net, optimizer)
        engine.save(path, {"model": model})
        engine.load(path, {"model": model, "other": 1})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("apart", r"model, optimizer = fabric\.setup\(model, optimizer\)"),
        ("two models", "one model at a time"),
        ("bare backward", r"fabric\.backward\(loss\)"),
        ("norm", "norm_type=1"),
        ("missing", "has no 'other'; it has 'model'"),
    ],
)
def test_what_fabric_cannot_do_is_refused_by_name(ranks: Any, what: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        ranks(2)(refused, what)


def lightning_module() -> float:
    """A LightningModule in a Fabric loop."""
    net, reference = Net(), Net()
    for strategy, module in ((zero(stage=3), net), ("ddp", reference)):
        engine = fabric(strategy)
        model, optimizer = engine.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        if strategy == "ddp":
            model.mark_forward_method("training_step")
        for batch in rows(8).split(2):
            engine.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        if strategy != "ddp":
            engine.strategy.teardown()
    return distance(values(net), values(reference))


def test_a_lightning_module_under_fabric(ranks: Any) -> None:
    assert ranks(2)(lightning_module) == [0.0, 0.0]
