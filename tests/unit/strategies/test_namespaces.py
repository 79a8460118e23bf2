"""Two Lightning class trees, two registries, any order of imports."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from zeroexp.strategies import compat, fabric_strategy_class, strategy_class
from zeroexp.strategies.registry import NAMES


@pytest.mark.parametrize("name", compat.NAMESPACES)
@pytest.mark.parametrize("attribute", sorted(compat.TABLE))
def test_every_name_taken_from_lightning_exists(name: str, attribute: str) -> None:
    found = getattr(compat.namespace(name), attribute)
    assert found is not None or attribute in compat.OPTIONAL
    module = getattr(found, "__module__", None)
    if isinstance(found, type):
        assert str(module).partition(".")[0] in (
            name.partition(".")[0],
            "lightning_fabric",
            "lightning",
        )


def test_an_unknown_namespace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lightning\.pytorch and pytorch_lightning"):
        strategy_class("pytorch")


@pytest.mark.parametrize("name", compat.NAMESPACES)
@pytest.mark.parametrize("registered", NAMES)
def test_a_name_makes_the_strategy_of_its_registry(name: str, registered: str) -> None:
    ns = compat.namespace(name)
    for registry, make in (
        (ns.StrategyRegistry, strategy_class),
        (ns.FabricRegistry, fabric_strategy_class),
    ):
        assert registered in registry.available_strategies()
        made = registry.get(registered)
        assert type(made) is make(name)
        assert made.asked.zero.stage == NAMES[registered].get("stage", 1)


@pytest.mark.parametrize(
    ("registered", "stage", "optim"),
    [
        ("zeroexp_stage_2_offload", 2, "cpu"),
        ("zeroexp_stage_3_offload", 3, "cpu"),
        ("zeroexp_stage_3_offload_nvme", 3, "nvme"),
    ],
)
def test_offload_names_place_the_optimizer_state(registered: str, stage: int, optim: str) -> None:
    registry = compat.namespace("lightning.pytorch").StrategyRegistry
    asked = registry.get(registered).asked
    assert asked.zero.stage == stage
    assert (asked.offload.optim_tier, asked.offload.params_tier) == (optim, "device")


def test_the_two_classes_belong_to_their_own_tree() -> None:
    first, second = (strategy_class(name) for name in compat.NAMESPACES)
    assert first is not second
    assert first is strategy_class("lightning.pytorch")
    trees = [compat.namespace(name).ParallelStrategy for name in compat.NAMESPACES]
    assert issubclass(first, trees[0]) and not issubclass(first, trees[1])
    assert issubclass(second, trees[1]) and not issubclass(second, trees[0])


def test_the_representation_tells_which_tree() -> None:
    """Lightning prints it when a strategy of the other tree is given to its Trainer."""
    assert "pytorch_lightning" in repr(strategy_class("pytorch_lightning")(stage=2))
    assert "zero.stage=2" in repr(strategy_class("pytorch_lightning")(stage=2))


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_strategies_imports_neither_torch_nor_lightning() -> None:
    said = run(
        """
        import sys
        import zeroexp.strategies
        print([name for name in ("torch", "lightning", "pytorch_lightning") if name in sys.modules])
        """
    )
    assert said.strip() == "[]"


USE = """
import logging, sys, warnings
{imports}
import torch
warnings.filterwarnings("ignore")

def train(pl, strategy):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
        def training_step(self, batch, batch_idx):
            return self.layer(batch).pow(2).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(2, 2)))
    print(type(trainer.strategy).__mro__[-4].__module__.partition(".")[0], trainer.global_step,
          trainer.strategy.asked.zero.stage)
{uses}
"""
ORDERS: dict[str, tuple[str, str, list[str]]] = {
    "strategies first, both names later": (
        "import zeroexp.strategies\nimport pytorch_lightning\nimport lightning.pytorch",
        "train(pytorch_lightning, 'zeroexp_stage_2')\ntrain(lightning.pytorch, 'ZEROEXP_STAGE_3')",
        ["pytorch_lightning 2 2", "lightning 2 3"],
    ),
    "lightning first": (
        "import lightning.pytorch\nfrom zeroexp.strategies import ZeroStrategy",
        "train(lightning.pytorch, ZeroStrategy(1))\ntrain(lightning.pytorch, 'zeroexp')",
        ["lightning 2 1", "lightning 2 1"],
    ),
    "the other one only": (
        "import pytorch_lightning\nfrom zeroexp.strategies import ZeroStrategy",
        "train(pytorch_lightning, ZeroStrategy(stage=0))",
        ["pytorch_lightning 2 0"],
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports(order: str) -> None:
    imports, uses, expected = ORDERS[order]
    assert run(USE.format(imports=imports, uses=uses)).split("\n")[: len(expected)] == expected


def test_the_project_decides_which_class_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroexp import strategies

    for name in compat.NAMESPACES:
        __import__(name)
    assert strategies.ZeroStrategy is strategy_class("lightning.pytorch")  # both are imported
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert strategies.ZeroStrategy is strategy_class("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    assert strategies.ZeroStrategy is strategy_class("lightning.pytorch")  # installed, first


def test_neither_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in compat.NAMESPACES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        compat.default_namespace()


def test_unknown_attributes_are_attribute_errors() -> None:
    from zeroexp import strategies

    missing: Any = "Zero"
    with pytest.raises(AttributeError):
        getattr(strategies, missing)
