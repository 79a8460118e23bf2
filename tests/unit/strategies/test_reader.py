"""Reading checkpoints: formats, places, what is unpickled, and the parts of schedules."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroexp.errors import CheckpointError
from zeroexp.strategies import checkpoint, schedulers
from zeroexp.strategies.compat import namespace

NS = namespace("lightning.pytorch")


def test_tensors_are_mapped_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.arange(4.0)}, "epoch": 3}, path)
    found = checkpoint.read(path, None, NS)
    assert found["epoch"] == 3
    assert found["state_dict"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert str(path) in Path("/proc/self/maps").read_text()
    del found


def test_the_format_of_old_torch_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert checkpoint.read(path, True, NS)["w"].tolist() == [1.0, 1.0]


def test_other_filesystems_are_lightnings_to_read() -> None:
    import fsspec

    with fsspec.open("memory://folder/a.ckpt", "wb") as file:
        torch.save({"w": torch.ones(2)}, file)
    assert checkpoint.read("memory://folder/a.ckpt", None, NS)["w"].tolist() == [1.0, 1.0]


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('this ran')",)


def test_nothing_runs_while_a_checkpoint_is_read(tmp_path: Path) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"hyper_parameters": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"more than data: .*exec.*weights_only=False"):
        checkpoint.read(path, None, NS)
    with pytest.raises(SystemExit):
        checkpoint.read(path, False, NS)


class Allowed:
    """A class that its owner declares safe."""


def test_classes_that_were_declared_safe_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "allowed.ckpt"
    torch.save({"hyper_parameters": Allowed()}, path)
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        checkpoint.read(path, None, NS)
    with torch.serialization.safe_globals([Allowed]):
        assert isinstance(checkpoint.read(path, None, NS)["hyper_parameters"], Allowed)


def test_a_directory_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a directory"):
        checkpoint.read(tmp_path, None, NS)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.read(tmp_path / "none.ckpt", None, NS)


def test_omegaconf_containers_are_data(tmp_path: Path) -> None:
    from omegaconf import DictConfig, OmegaConf

    path = tmp_path / "conf.ckpt"
    tree = {"a": [1, 2.5, None, "x"], "b": {"c": True}, "d": "${a[0]}", "e": "???"}
    torch.save({"hyper_parameters": OmegaConf.create(tree), "type": DictConfig}, path)
    found = checkpoint.read(path, None, NS)
    assert OmegaConf.to_container(found["hyper_parameters"]) == tree
    assert found["hyper_parameters"].d == 1
    assert found["type"] is DictConfig


def test_a_failed_write_comes_back_as_text(tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    assert checkpoint.write(full, {}, tmp_path / "a.ckpt", None) == (
        "OSError: [Errno 28] No space left on device"
    )
    assert "is a directory" in str(checkpoint.write(full, {}, tmp_path, None))
    assert checkpoint.write(lambda *_, **__: None, {}, tmp_path / "a.ckpt", None) is None


def test_whole_modules_are_told_from_sharded_ones() -> None:
    module = nn.Linear(3, 2)
    assert checkpoint.is_whole(module)
    module.weight.data = torch.full((1,), float("nan")).expand(2, 3)
    assert not checkpoint.is_whole(module)
    assert not checkpoint.is_whole(nn.Linear(3, 2, device="meta"))
    assert checkpoint.is_whole(nn.Linear(1, 1))  # one number is no placeholder


# --------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=9),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            milestones=[2],
        ),
    ],
    ids=["step", "one cycle", "sequential"],
)
def test_a_held_schedule_stands_still(make: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    kind, held = type(scheduler), [False]
    schedulers.hold_while(scheduler, lambda: held[0])
    before = scheduler.state_dict().keys()
    assert type(scheduler).__name__ == kind.__name__
    assert isinstance(scheduler, kind)
    rates = []
    for held[0] in (False, True, True, False):
        optimizer.step()
        scheduler.step()
        rates.append((scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
    assert [epoch for epoch, _ in rates] == [1, 1, 1, 2]
    assert rates[0] == rates[1] == rates[2]
    assert scheduler.state_dict().keys() == before  # nothing of ours is saved
    schedulers.release(scheduler)
    assert type(scheduler) is kind


def test_holding_twice_is_holding_once() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedulers.hold_while(scheduler, lambda: True)
    schedulers.hold_while(scheduler, lambda: False)
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1
    schedulers.release(scheduler)
    schedulers.release(scheduler)
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert pickle.loads(pickle.dumps(scheduler.state_dict())) == scheduler.state_dict()
