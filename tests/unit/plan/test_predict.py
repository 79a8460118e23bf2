"""The planner against the paper's formulas, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from zeroexp.config import Config
from zeroexp.layout import ParamSpec
from zeroexp.plan import predict

PSI = 4096 * 3
SPECS = [
    ParamSpec("emb.weight", (64, 64)),
    ParamSpec("blocks.0.weight", (64, 64)),
    ParamSpec("blocks.1.weight", (64, 64)),
]
N = 4


def config(stage: int, accumulate: int = 1, compute: str = "fp32", **zero: Any) -> Config:
    return Config.from_mapping(
        {
            "zero": {"stage": stage, **zero},
            "precision": {"compute": compute, "accumulate": "fp32", "reduce": "fp32"},
            "trainer": {"devices": N, "accumulate_grad_batches": accumulate},
        }
    )


@pytest.mark.parametrize(
    ("stage", "params", "grads", "optim"),
    [(0, 4, 4, 8), (1, 4, 4, 8 / N), (2, 4, 4 / N, 8 / N), (3, 4 / N, 4 / N, 8 / N)],
)
def test_state_of_fp32_adamw(stage: int, params: float, grads: float, optim: float) -> None:
    found = predict(config(stage), SPECS)
    for rank in range(N):
        kinds = {k: v["device"] for k, v in found.state_bytes[rank].items()}
        assert kinds == {"params": params * PSI, "grads": grads * PSI, "optim": optim * PSI}
        assert found.padding_bytes[rank] == 0
        assert found.total(rank) == (params + grads + optim) * PSI


def test_bf16_keeps_a_master_copy() -> None:
    kinds = predict(config(3, compute="bf16"), SPECS).state_bytes[0]
    assert kinds["params"]["device"] == 2 * PSI // N
    assert kinds["optim"]["device"] == 12 * PSI // N


SHARE = (N - 1) / N * PSI * 4


@pytest.mark.parametrize(
    ("stage", "accumulate", "zero", "gathers", "scatters"),
    [
        (0, 1, {}, 1, 1),
        (1, 1, {}, 1, 1),
        (1, 4, {}, 1, 1),
        (2, 1, {}, 1, 1),
        (2, 4, {}, 1, 4),
        (2, 4, {"reduce": "last"}, 1, 1),
        (3, 1, {}, 2, 1),
        (3, 4, {}, 8, 4),
        (3, 1, {"reshard_after_forward": "false"}, 1, 1),
        (3, 1, {"reshard_after_forward": "auto"}, 2 - 1 / 3, 1),
    ],
)
def test_traffic(
    stage: int, accumulate: int, zero: dict[str, str], gathers: float, scatters: int
) -> None:
    """2(N-1)/N of the model for stages 0-2, 3(N-1)/N for stage 3, and their variants
    (arXiv:1910.02054, section 7). The root unit is a third of this model."""
    found = predict(config(stage, accumulate, **zero), SPECS).comm_bytes_per_step
    for rank in range(N):
        assert found[rank] == {
            "all_gather": pytest.approx(gathers * SHARE),
            "reduce_scatter": scatters * SHARE,
        }


def test_one_rank_sends_nothing() -> None:
    alone = Config.from_mapping({"zero": {"stage": 3}, "precision": {"compute": "fp32"}})
    assert predict(alone, SPECS).comm_bytes_per_step == {0: {}}


def test_padding_is_listed() -> None:
    """65 elements on 4 ranks: parameters start at multiples of 16, shards too, so 128 are held."""
    found = predict(config(0), [ParamSpec("w", (65,))])
    assert found.state_bytes[0]["params"]["device"] == 128 * 4
    assert found.padding_bytes[0] == (128 - 65) * 4 * 4  # parameters, gradients, two moments


def test_no_torch() -> None:
    code = (
        "import sys; from zeroexp.config import Config; from zeroexp.layout import ParamSpec;"
        "from zeroexp.plan import predict; predict(Config(), [ParamSpec('w', (3,))]);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
