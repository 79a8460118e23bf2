"""The strategy on one accelerator: ready to run where there is one."""

from __future__ import annotations

import pytest
import torch
from single_lab import Net, ZeroStrategy, data, trainer, weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_on_the_device_ends_on_the_cpu(stage: int, precision: str) -> None:
    class Placed(Net):
        def on_train_batch_end(self, *_: object) -> None:
            self.seen.append(self.trainer.strategy.engine.device.type)

    net, before = Placed(), weights(Net())
    run = trainer(ZeroStrategy(stage), accelerator="gpu", precision=precision)
    run.fit(net, data(), data())
    run.validate(net, data(), verbose=False)
    assert "cuda" in net.seen
    assert (False, False) in net.seen  # evaluated, and not in inference mode
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in net.parameters())
    moved = [float((a.float() - b).abs().max()) for a, b in zip(weights(net), before, strict=True)]
    assert all(0 < distance < 0.1 for distance in moved)


def test_fp32_equals_the_stock_strategy() -> None:
    ours, theirs = Net(), Net()
    options = {"accelerator": "gpu", "use_distributed_sampler": False}
    trainer(ZeroStrategy(3), **options).fit(ours, data())
    trainer("auto", **options).fit(theirs, data())
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
