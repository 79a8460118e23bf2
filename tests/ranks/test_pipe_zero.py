"""A pipeline's stages under every ZeRO stage: the weights of one process, the bytes of the row."""

from __future__ import annotations

import pytest
import torch
from pipe_zero_lab import Case, Found, bytes_of_places, reference, train_all
from pipeline_lab import SCHEDULES
from small import STAGES, furthest

FP32, FP64 = torch.float32, torch.float64


def check(cases: list[Case], results: list[list[Found]], limits: dict[tuple[str, object], float]):
    num_ranks = len(results)
    for number, case in enumerate(cases):
        found = [each[number] for each in results]
        data_ranks = num_ranks // case.stages
        losses, weights = reference(case, data_ranks)
        limit = limits[case.optimizer, case.dtype]
        where = f"{case.schedule}, stage {case.stage}, {case.optimizer}, {case.dtype}"
        assert furthest(found[0].state, weights) <= limit, where
        assert all(not each.state for each in found[1:])
        for place in range(case.stages):
            theirs = found[place * data_ranks : (place + 1) * data_ranks]
            # A pipe's ranks all know its mean loss; the replicas' mean is the global batch's.
            assert [f.losses for f in theirs] == [f.losses for f in found[:data_ranks]], where
            mean = [
                sum(values) / data_ranks for values in zip(*(f.losses for f in theirs), strict=True)
            ]
            assert mean == pytest.approx(losses, abs=max(limit, 1e-12)), where
        for rank, wanted in enumerate(bytes_of_places(case, data_ranks)):
            for each in found[rank * data_ranks : (rank + 1) * data_ranks]:
                assert each.bytes["params"] == wanted.params, where
                assert each.bytes["grads"] == wanted.grads, where
                assert each.bytes["optim"] == wanted.optim, where
        for each in found:
            assert furthest(each.engine["whole"], found[0].engine["whole"]) == 0, where


LIMITS = {("sgd", FP64): 1e-12, ("adamw", FP64): 1e-10, ("sgd", FP32): 1e-6}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_in_a_pipe_equal_one_process(ranks, stage):
    """Each schedule once per optimizer and dtype, spread over the stages; the rest is --full."""
    names = list(SCHEDULES)
    cases = [Case(name, stage, FP64) for name in names[stage % 2 :: 2]]
    cases += [Case(names[stage % len(names)], stage, FP64, "adamw"), Case("1f1b", stage, FP32)]
    check(cases, ranks(4)(train_all, cases), LIMITS)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_at_every_stage(ranks, name):
    cases = [Case(name, stage, dtype, kind) for stage in STAGES for kind, dtype in LIMITS]
    check(cases, ranks(4)(train_all, cases, timeout=240), LIMITS)
