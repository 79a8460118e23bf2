"""The plan of tiers against what happens: state per tier, bytes between tiers, bytes of swap files.

Segments are multiples of 4096 elements per rank here: transfers past the page cache are whole
blocks, and what fills them up is traffic that the planner does not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import settings
from test_plan import specs_of
from torch import nn

from zeroexp.config import Config
from zeroexp.engine import Engine
from zeroexp.optim import build
from zeroexp.plan import predict


class Net(nn.Module):
    """Two blocks, and a root unit with a weight that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(128, 128, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
        self.last = nn.Linear(128, 128, bias=False)
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def what_happens(keys: dict[str, Any]) -> dict[str, Any]:
    """State before the step, and what the third step moved, of this rank."""
    config = Config.from_mapping(keys)
    micro = config.trainer.accumulate_grad_batches
    model = Net()
    engine = Engine(model, build(config.optim, model.named_parameters()), config)
    found: dict[str, Any] = {}
    for step in range(3):
        before = engine.disk.traffic.total if engine.disk else None
        for index, part in enumerate(torch.randn(2 * micro, 128).chunk(micro)):
            engine.backward(engine(part).float().square().mean(), last=index == micro - 1)
        if step == 2:
            found["state"] = engine.ledger.state_bytes()
            found["padding"] = engine.ledger.padding_bytes()
        engine.step()
        found["moved"] = engine.ledger.transfer_bytes_per_step()
        found["files"] = {"read": 0, "written": 0}
        if engine.disk and before is not None:
            after = engine.disk.traffic.total
            found["files"] = {"read": after.read - before.read}
            found["files"]["written"] = after.written - before.written
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "offload", ["cpu", "nvme", "cpu_params", "nvme_params", {"params": "cpu"}], ids=str
)
def test_the_plan_of_tiers_is_what_happens(
    ranks: Any, stage: int, offload: Any, tmp_path: Path
) -> None:
    """Stepped in backward where that can be; and with all that makes a difference at once."""
    usual: dict[str, Any] = {}
    other = {"compute": "bf16", "accumulate": 2, "clip": 1.0, "fraction": 0.4}
    for more in (usual, {**other, "zero_reshard_after_forward": "auto"}):
        fraction = more.pop("fraction", 1.0)
        keys = settings(stage, devices=2, **more)
        keys["offload"] = {"kind": offload} if isinstance(offload, str) else dict(offload)
        if isinstance(offload, str):
            keys["offload"]["fraction"] = fraction
            if "nvme" in offload:
                keys["offload"]["nvme"] = {"dir": str(tmp_path)}
        plan = predict(Config.from_mapping(keys), specs_of(Net()))
        for rank, found in enumerate(ranks(2)(what_happens, keys)):
            assert found["state"] == plan.state_bytes[rank]
            assert found["padding"] == plan.padding_bytes[rank]
            assert found["moved"] == plan.transfer_bytes_per_step[rank]
            assert found["files"] == plan.io_bytes_per_step[rank]
    assert list(tmp_path.iterdir()) == []
