"""A tier is a placement: any of them gives the bits of ``offload=none``, also in pieces and in
backward."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_lab import KINDS, offloaded
from small import STAGES, digest, micro_batches, tiny_gpt, token_batches

from zeroexp.engine import Engine
from zeroexp.optim.adamw import AdamW

STEPS, SEQUENCES = 10, 8

OPTIMIZERS = {"ours": AdamW, "torch": torch.optim.AdamW}


@dataclass(frozen=True)
class Row:
    """One way to run the same training."""

    stage: int
    kind: str
    compute: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    optimizer: str = "torch"
    in_backward: str = "auto"

    @property
    def at_home(self) -> Row:
        """The same with nothing offloaded. Stages 0 and 1 are one training, and so are 2 and 3."""
        return replace(self, stage=self.stage & 2, kind="none", in_backward="auto")


@dataclass(frozen=True)
class Outcome:
    """What a training leaves: a digest of the weights (rank 0), all losses of this rank, and how
    many segments were stepped inside a backward."""

    weights: dict[str, str]
    losses: list[float]
    ahead: int


def train(row: Row, folder: str) -> Outcome:
    # A block has 9376 elements, which is two chunks of 64KiB (4096 elements) and a tail.
    model = tiny_gpt(dim=32, layers=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[row.optimizer](trained, lr=1e-2, weight_decay=0.1)
    keys = offloaded(
        row.stage,
        folder,
        compute=row.compute,
        accumulate=row.accumulate,
        clip=row.clip,
        offload_kind=row.kind,
        offload_step_in_backward=row.in_backward,
    )
    engine = Engine(model, optimizer, keys)
    ahead = _count_steps_ahead(engine)
    losses = []
    for batch in token_batches(STEPS, SEQUENCES):
        for piece in micro_batches(batch, row.accumulate):
            loss = engine(*piece)
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
    whole = engine.state_dict()
    engine.close()
    return Outcome(digest(whole), losses, len(ahead))


def _count_steps_ahead(engine: Engine) -> list[int]:
    """Tags of the segments that are stepped while a backward runs, as they are."""
    found: list[int] = []
    stepper = engine.steppers[0]
    original = stepper.step_ahead

    def counting(segment: Any, values: Any) -> Any:
        found.append(segment.tag)
        return original(segment, values)

    stepper.step_ahead = counting  # type: ignore[method-assign]
    return found


def run(rows: list[Row], folder: str) -> tuple[list[Outcome], list[str]]:
    """What each row leaves, and what is left in ``folder``, where swap files were."""
    found = [train(row, folder) for row in rows]
    gc.collect()  # an optimizer keeps its state, also on disk, as long as it is there
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return found, [path.name for path in Path(folder).iterdir()]


def check(ranks: Any, num_ranks: int, rows: list[Row], folder: Path) -> None:
    """Every row has the bits of its training without offload."""
    plain = list(dict.fromkeys(row.at_home for row in rows))
    every = [*plain, *rows]
    results = ranks(num_ranks)(run, every, str(folder), timeout=60 + 10 * len(every))
    wanted = {row: found for row, found in zip(plain, results[0][0], strict=False)}
    for rank, (outcomes, left) in enumerate(results):
        assert not left
        for row, found in zip(rows, outcomes[len(plain) :], strict=True):
            reference = wanted[row.at_home]
            apart = [n for n, bits in found.weights.items() if reference.weights[n] != bits]
            assert not apart, f"{row} differs from offload=none in {apart}"
            if rank == 0:
                assert found.losses == reference.losses, row
                assert found.weights, row
            # What every rank holds whole waits for the boundary: on disk, or stepped in place.
            in_place = row.kind == "cpu_params" and row.compute == "fp32"
            waits = row.stage < 3 and (row.kind == "nvme_params" or in_place)
            may = row.stage > 0 and row.clip is None and not waits
            may = may and row.in_backward == "auto"
            assert (found.ahead > 0) == may, f"{row}: {found.ahead} segments stepped in backward"


def pairwise(num_ranks: int, compute: str) -> list[Row]:
    """Every kind at every stage; accumulation, clipping and optimizers take turns, so that each
    pair of values is there."""
    turns = itertools.cycle(
        [
            (1, None, "torch"),
            (4, 0.5, "ours"),
            (4, None, "torch"),
            (1, 0.5, "torch"),
            (1, None, "ours"),
        ]
    )
    skip = 2 * (num_ranks - 1) + (compute == "bf16")
    turns = itertools.islice(turns, skip, None)
    return [Row(stage, kind, compute, *next(turns)) for stage in STAGES for kind in KINDS]


def complete(num_ranks: int, compute: str) -> list[Row]:
    product = itertools.product(STAGES, KINDS, (1, 4), (None, 0.5), OPTIMIZERS)
    return [Row(s, k, compute, a, c, o) for s, k, a, c, o in product]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_same_bits_as_without_offload(ranks, tmp_path, num_ranks, compute):
    check(ranks, num_ranks, pairwise(num_ranks, compute), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_after_backward_or_inside_it(ranks, tmp_path, kind):
    """auto steps ahead without clipping, false never does."""
    choices = ((3, "fp32", 1), (3, "bf16", 2), (1, "bf16", 1), (2, "fp32", 2))
    rows = [Row(stage, kind, how, n, in_backward="false") for stage, how, n in choices]
    check(ranks, 1, [*rows, *(replace(row, in_backward="auto") for row in rows)], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_same_bits_in_the_whole_matrix(ranks, tmp_path, num_ranks, compute):
    check(ranks, num_ranks, complete(num_ranks, compute), tmp_path)
