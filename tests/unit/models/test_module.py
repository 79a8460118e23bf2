"""The LightningModule around the built-in models, and the import of a user's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from zeroexp.config import Config
from zeroexp.errors import ConfigError
from zeroexp.models.build import build
from zeroexp.models.specs import param_specs
from zeroexp.optim.sgd import SGD
from zeroexp.strategies.module import LanguageModule, build_module

TINY = {"model.dim": 16, "model.layers": 2, "model.heads": 2, "model.vocab_size": 256}


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path for modules that a test writes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def external(target: str, **kwargs: Any) -> Config:
    keys: dict[str, Any] = {"model.kind": "external", "model.target": target}
    return Config.from_mapping({**keys, **{f"model.kwargs.{k}": v for k, v in kwargs.items()}})


def test_model_is_made_once_from_the_seed() -> None:
    config = Config.from_mapping({**TINY, "trainer.seed": 5})
    module = build_module(config)
    assert isinstance(module, LanguageModule)
    assert not list(module.parameters()), "made in configure_model, where the strategy can shard it"
    torch.manual_seed(99)
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first
    expected = build(config.model, seed=5)
    assert [f"model.{s.name}" for s in param_specs(config.model)] == [
        name for name, _ in module.named_parameters()
    ]
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_recompute_key_reaches_the_model() -> None:
    for kind in ("none", "full"):
        module = build_module(Config.from_mapping({**TINY, "recompute.kind": kind}))
        module.configure_model()
        assert getattr(module.model, "recompute", None) is (kind == "full")


def test_steps_return_loss_and_likeliest_tokens() -> None:
    module = build_module(Config.from_mapping(TINY))
    module.configure_model()
    assert isinstance(module, LanguageModule)
    tokens = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(0))
    batch: Any = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    logits = module(tokens)
    logp = torch.log_softmax(logits.double(), -1)
    picked = logp.gather(-1, batch["targets"].unsqueeze(-1))
    loss = module.training_step(batch, 0)
    assert loss.item() == pytest.approx(-picked.mean().item(), rel=1e-6)
    assert loss.requires_grad
    best = module.predict_step(batch, 0)
    assert torch.equal(best, logits.argmax(-1))


def test_optimizer_and_schedule_come_from_the_configuration() -> None:
    keys = {
        "optim.kind": "sgd",
        "optim.lr": 0.5,
        "optim.weight_decay": 0.25,
        "schedule.kind": "linear",
        "trainer.max_steps": 4,
    }
    module = build_module(Config.from_mapping({**TINY, **keys}))
    module.configure_model()
    made: Any = module.configure_optimizers()
    optimizer = made["optimizer"]
    assert isinstance(optimizer, SGD)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in module.parameters())
    decays = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {1: 0.0, 2: 0.25}
    assert made["lr_scheduler"]["interval"] == "step"
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made["lr_scheduler"]["scheduler"].step()
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125, 0.0])


GOOD = """
import lightning.pytorch as pl
import torch
class Net(pl.LightningModule):
    def __init__(self, width, depth=2):
        super().__init__()
        self.layer = torch.nn.Linear(width, depth)
def make(width):
    return Net(width)
def wrong():
    return torch.nn.Linear(1, 1)
class NotLightning(torch.nn.Module):
    pass
number = 3
"""


def test_external_module_is_made_with_its_arguments_and_the_seed(user_code: Path) -> None:
    (user_code / "good_net.py").write_text(GOOD)
    one: Any = build_module(external("good_net:Net", width=3, depth=5))
    assert issubclass(type(one), pl.LightningModule)
    assert one.layer.weight.shape == (5, 3)
    torch.manual_seed(123)
    two: Any = build_module(external("good_net:Net", width=3, depth=5))
    assert torch.equal(one.layer.weight, two.layer.weight)
    made: Any = build_module(external("good_net:make", width=4))
    assert made.layer.in_features == 4


@pytest.mark.parametrize(
    ("target", "kwargs", "key", "message"),
    [
        ("no_such_pkg.net:Net", {}, "model.target", r"no module 'no_such_pkg' on Python's path"),
        ("good_net:Nett", {}, "model.target", r"has no 'Nett'\. +Did you mean Net\?"),
        ("good_net:number", {}, "model.target", r"an object of builtins\.int, no LightningModule"),
        (
            "good_net:NotLightning",
            {},
            "model.target",
            r"the class good_net\.NotLightning, no Light",
        ),
        ("json:loads", {}, "model.target", r"json:loads is a function, no LightningModule.*'s'"),
        ("good_net:wrong", {}, "model.target", r"made an object of torch.*Linear, no LightningMod"),
        (
            "good_net:Net",
            {},
            "model.kwargs",
            r"missing a required argument: 'width'.*takes \(width",
        ),
        ("good_net:Net", {"width": 1, "dept": 2}, "model.kwargs", r"unexpected keyword.*'dept'"),
        ("broken_net:Net", {}, "model.target", r"importing broken_net failed with ZeroDivisionErr"),
        ("needs_more:Net", {}, "model.target", r"importing needs_more failed.*'not_installed'"),
        ("syntax_net:Net", {}, "model.target", r"importing syntax_net failed with SyntaxError"),
    ],
)
def test_external_module_that_cannot_be_made_is_a_configuration_problem(
    user_code: Path, target: str, kwargs: dict[str, Any], key: str, message: str
) -> None:
    (user_code / "good_net.py").write_text(GOOD)
    (user_code / "broken_net.py").write_text("1 / 0\n")
    (user_code / "needs_more.py").write_text("import not_installed\n")
    (user_code / "syntax_net.py").write_text("class Net(:\n")
    with pytest.raises(ConfigError, match=message) as caught:
        build_module(external(target, **kwargs))
    (problem,) = caught.value.problems
    assert problem.key == key and problem.fix


def test_the_other_lightning_is_named(user_code: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    (user_code / "other_net.py").write_text(
        "import pytorch_lightning as pl\nclass Net(pl.LightningModule):\n    pass\n"
    )
    with pytest.raises(ConfigError, match="a LightningModule of pytorch_lightning, another class"):
        build_module(external("other_net:Net"))
