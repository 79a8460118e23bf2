"""offload.delayed_update: weights one step stale, equal to a loop in plain torch that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import digest, furthest, micro_batches, settings, tiny_gpt, token_batches, weights
from torch import Tensor

from zeroexp.engine import Engine

STEPS, SEQUENCES = 5, 16


def make(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def stale_loop() -> dict[str, Tensor]:
    """``w[i+1] = step(w[i], g(w[i-1]))`` with the learning rate of the step that made ``g``, and
    the last gradient applied at the end."""
    model = tiny_gpt()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, scheduler = make(model)
    held: tuple[list[Tensor | None], float] | None = None

    def apply(grads: list[Tensor | None], lr: float) -> None:
        for p, grad in zip(trained, grads, strict=True):
            p.grad = grad
        for group in optimizer.param_groups:
            group["lr"], lr = lr, group["lr"]
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = lr

    for batch in token_batches(STEPS, SEQUENCES):
        optimizer.zero_grad()
        model(*batch).backward()
        grads = [None if p.grad is None else p.grad.clone() for p in trained]
        if held is not None:
            apply(*held)
        held = grads, optimizer.param_groups[0]["lr"]
        scheduler.step()
    assert held is not None
    apply(*held)
    return weights(model)


def run(stage: int, kind: str, folder: str) -> dict[str, Tensor]:
    model = tiny_gpt()
    optimizer, scheduler = make(model)
    keys = {"offload_kind": kind, "offload_delayed_update": True, "offload_chunk": "64KiB"}
    engine = Engine(model, optimizer, settings(stage, nvme_dir=folder, **keys))
    engine.scheduler = scheduler
    for batch in token_batches(STEPS, SEQUENCES):
        engine.backward(engine(*next(iter(micro_batches(batch, 1)))))
        engine.step()
    saved = engine.state_dict()
    engine.close()
    if saved:  # what was in flight is in what is saved, and in the module when the engine ends
        assert digest(saved) == digest(weights(model))
    return saved


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equals_the_stale_loop(ranks: Any, tmp_path: Path, num_ranks: int) -> None:
    wanted = stale_loop()
    found = None
    for stage, kind in [(0, "cpu"), (1, "nvme"), (2, "cpu_params"), (3, "nvme_params"), (3, "cpu")]:
        weights_now = ranks(num_ranks)(run, stage, kind, str(tmp_path))[0]
        if num_ranks == 1:
            assert digest(weights_now) == digest(wanted), (stage, kind)
        else:
            assert furthest(weights_now, wanted) < 1e-6, (stage, kind)
            assert found in (None, digest(weights_now)), (stage, kind)
            found = digest(weights_now)


BAD = 2
"""The step whose loss is not finite."""


def losses_of(model: Any, batch: Any, step: int) -> Tensor:
    loss: Tensor = model(*batch)
    return loss * float("inf") if step == BAD else loss


def stale_loop_that_skips() -> dict[str, Tensor]:
    """A skipped step has no gradient to give; the one before it is applied in its turn."""
    model = tiny_gpt()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    held: list[Tensor | None] | None = None
    for step, batch in enumerate(token_batches(STEPS, SEQUENCES)[: BAD + 1]):
        optimizer.zero_grad()
        losses_of(model, batch, step).backward()
        grads = [None if p.grad is None else p.grad.clone() for p in trained]
        if held is not None:
            for p, grad in zip(trained, held, strict=True):
                p.grad = grad
            optimizer.step()
        held = None if step == BAD else grads
    return weights(model)


def skipping(folder: str) -> dict[str, Tensor]:
    model = tiny_gpt()
    trained = [p for p in model.parameters() if p.requires_grad]
    keys = {"offload_kind": "cpu", "offload_delayed_update": True, "precision_nonfinite": "skip"}
    engine = Engine(model, torch.optim.AdamW(trained, lr=1e-2), settings(1, **keys))
    for step, batch in enumerate(token_batches(STEPS, SEQUENCES)[: BAD + 1]):
        pieces = next(iter(micro_batches(batch, 1)))
        engine.backward(losses_of(engine, pieces, step))
        engine.step()
    # What the next forward sees, not what is saved: that has all that was begun.
    seen = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.close()
    return seen


def test_a_skipped_step_does_not_hold_up_the_one_before(ranks: Any, tmp_path: Path) -> None:
    (seen,) = ranks(1)(skipping, str(tmp_path))
    wanted = stale_loop_that_skips()
    assert all(torch.equal(value, wanted[name]) for name, value in seen.items())
