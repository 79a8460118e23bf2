"""What ZeroStrategy refuses, with which words."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from single_lab import Net, ZeroStrategy, data, trainer

from zeroexp.errors import ConfigError, ModelError, OptimizerError, ZeroexpError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# --------------------------------------------------------------------------------- refused by name


def test_a_compiled_module_is_refused_with_the_way_to_do_it() -> None:
    compiled = torch.compile(Net(), backend="eager")
    with pytest.raises(ModelError, match=r"block\.compile\(\)"):
        trainer(ZeroStrategy(1)).fit(compiled, data())


def test_pruning_is_refused() -> None:
    from lightning.pytorch.callbacks import ModelPruning

    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(ModelError, match="ModelPruning replaces parameters"):
        trainer(ZeroStrategy(1), callbacks=[pruning]).fit(Net(), data())


def test_a_fit_without_an_optimizer_is_refused() -> None:
    class Bare(Net):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(OptimizerError, match="returned None"):
        trainer(ZeroStrategy(1)).fit(Bare(), data())


def test_lbfgs_is_refused() -> None:
    class Quasi(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises((OptimizerError, ModelError), match="LBFGS"):
        trainer(ZeroStrategy(0)).fit(Quasi(), data())


def test_step_arguments_are_refused() -> None:
    class Extra(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            optimizer.step(closure=closure, scale=2.0)

    with pytest.raises(OptimizerError, match="takes no scale"):
        trainer(ZeroStrategy(1)).fit(Extra(), data())


@pytest.mark.parametrize(
    ("precision", "word"),
    [("16-true", "16-mixed"), ("transformer-engine", "bf16-mixed")],
)
def test_other_precisions_are_refused(
    precision: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        if precision == "16-true":
            trainer(ZeroStrategy(1), precision=precision)
        else:  # the real plugin needs a package that only exists for CUDA
            plugin = pl.plugins.Precision()
            plugin.precision = precision
            ZeroStrategy(1).precision_plugin = plugin
    [problem] = caught.value.problems
    assert precision in problem.problem
    assert word in problem.fix


def test_precision_is_said_in_one_place() -> None:
    config = {"precision": {"compute": "bf16"}}
    with pytest.raises(ConfigError, match="in the strategy's config"):
        trainer(ZeroStrategy(config=config), precision="64-true")
    assert trainer(ZeroStrategy(config=config)).precision == "bf16-mixed"
    assert trainer(ZeroStrategy(config=config), precision="bf16-mixed").precision == "bf16-mixed"


def test_a_scaler_of_ones_own_is_refused() -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    with pytest.raises(ConfigError, match="GradScaler"):
        trainer(ZeroStrategy(1), plugins=[plugin])
    usual = pl.plugins.MixedPrecision("16-mixed", "cpu")
    assert trainer(ZeroStrategy(1), plugins=[usual]).precision == "16-mixed"


def test_unknown_start_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="popen, spawn"):
        ZeroStrategy(1, start_method="thread")


def test_a_sweep_that_would_start_itself_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's script launcher runs sys.argv again: under hydra -m that is the whole sweep."""

    class HydraConfig:
        @staticmethod
        def initialized() -> bool:
            return True

        @staticmethod
        def get() -> Any:
            return types.SimpleNamespace(mode="RunMode.MULTIRUN")

    fake = types.SimpleNamespace(HydraConfig=HydraConfig)
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", fake)
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # stock strategies leave it behind
    with pytest.raises(ConfigError, match="start_method='spawn'"):
        trainer(ZeroStrategy(1), devices=2)
    trainer(ZeroStrategy(1), devices=1)
    trainer(ZeroStrategy(1, start_method="spawn"), devices=2)


def test_a_group_of_another_run_is_refused() -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        strategy = ZeroStrategy(1)
        trainer(strategy, devices=2)
        with pytest.raises(ZeroexpError, match="process group of 1 ranks exists"):
            strategy.start_process_group()
    finally:
        dist.destroy_process_group()


def test_swap_files_that_cannot_be_written_are_found_before_the_model_is_built(
    tmp_path: Path,
) -> None:
    """NV-02: the key, the path and the system's reason."""
    (tmp_path / "file").touch()

    class Late(Net):
        def configure_model(self) -> None:
            raise AssertionError("a model is built")

    offload = {"kind": "nvme", "nvme.dir": str(tmp_path / "file")}
    with pytest.raises(ConfigError) as caught:
        trainer(ZeroStrategy(3, offload=offload)).fit(Late(), data())
    (problem,) = caught.value.problems
    assert problem.key == "offload.nvme.dir"
    assert f"{tmp_path}/file: Not a directory" in problem.problem
