"""Models that strain a pipeline equal one process: losses, norms, the whole state on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pipe_models import STRAINS, Trial, attempt_all, plain
from pipeline_lab import SCHEDULES
from small import STAGES, furthest
from torch import Tensor

from zeroexp.pipeline.runtime import layers_of
from zeroexp.pipeline.runtime.part import layered_in
from zeroexp.pipeline.runtime.split import layer_sizes

EXACT = 1e-9  # fp64, sums in another order


def check(trials: Sequence[Trial], results: Sequence[Sequence[dict[str, Any]]]) -> None:
    for number, trial in enumerate(trials):
        found = [each[number] for each in results]
        data_ranks = len(found) // trial.of.stages
        assert [each["error"] for each in found] == [""] * len(found), trial
        losses, norms, weights = plain(trial, data_ranks)
        # A model whose weights grow is compared by their size.
        sizes = (
            float(t.abs().max()) for t in weights.values() if t.is_floating_point() and t.numel()
        )
        limit = EXACT * max(1.0, *sizes)
        assert gap(found[0]["state"], weights) <= limit, trial
        assert not any(each["state"] for each in found[1:]), trial
        for each in found:
            assert gap(each["whole"], found[0]["whole"]) == 0, trial
            assert gap(each["whole"], weights) <= limit, trial
            assert each["norms"] == pytest.approx(norms, abs=EXACT, rel=EXACT), trial
        mean = [
            sum(v) / data_ranks
            for v in zip(*(f["losses"] for f in found[:data_ranks]), strict=True)
        ]
        assert mean == pytest.approx(losses, abs=EXACT, rel=EXACT), trial


def gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """:func:`small.furthest` with complex numbers as pairs."""
    return furthest(*({n: torch.view_as_real(t) if t.is_complex() else t for n, t in each.items()}
                      for each in (a, b)))  # fmt: skip


def of(stages: int, names: Sequence[str] = tuple(STRAINS)) -> list[str]:
    return [n for n in names if STRAINS[n].stages == stages and not with_buffers(n)]


def with_buffers(name: str) -> bool:
    """Data ranks have buffers of their own: one of them is compared."""
    return name in ("batch_norm", "odd_buffers")


def test_weights_that_some_stage_or_data_rank_does_not_use(ranks: Callable[[int], Any]) -> None:
    """A tied weight is stepped everywhere or nowhere; parameters of several units are unfrozen in
    one order."""
    trials = [
        Trial("sometimes"),
        Trial("sometimes", "interleaved", 1, keys={"zero_reduce": "last"}),
        Trial("thaw_first"),
        Trial("shared_across", "zb_v", 3, optimizer="groups"),
        Trial("structures", "zb_h1", 2, optimizer="two"),
    ]
    check(trials, ranks(4)(attempt_all, trials))


def test_buffers_come_from_the_stage_that_has_them(ranks: Callable[[int], Any]) -> None:
    trials = [Trial("batch_norm"), Trial("odd_buffers", "zb_v", 1)]
    check(trials, ranks(2)(attempt_all, trials))


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_model_at_every_stage(ranks: Callable[[int], Any], stages: int, stage: int) -> None:
    """Schedules and optimizers go round."""
    schedules = itertools.cycle(["1f1b", "zb_h1", "gpipe", "interleaved", "zb_v", "dualpipe_v"])
    kinds = itertools.cycle(["adamw", "two", "momentum", "groups", "halves"])
    trials = []
    for name in of(stages):
        layers = layer_sizes(layers_of(layered_in(STRAINS[name].build())))
        few = sum(layer.params > 0 for layer in layers) < 2 * stages
        schedule = next(schedules)
        if stages > 2 or few or name in ("tied_over_three", "detached"):
            schedule = "zb_h1" if stage % 2 else "1f1b"
        kind = next(kinds)
        trials.append(Trial(name, schedule, stage, optimizer=kind, micro_batches=2 * stages))
    check(trials, ranks(4 if stages == 2 else stages)(attempt_all, trials, timeout=400))


@pytest.mark.full
@pytest.mark.parametrize("keys", [
    {"zero_unit": "model"}, {"zero_unit": "leaf"}, {"offload_optim": "cpu"},
    {"offload_optim": "nvme", "offload_params": "nvme"}, {"offload_params": "cpu"},
    {"offload_optim": "cpu", "offload_fraction": 0.5},
], ids=str)  # fmt: skip
def test_units_and_tiers_under_every_schedule(
    ranks: Callable[[int], Any], keys: dict[str, Any], tmp_path: Any
) -> None:
    keys = {**keys, **({"nvme_dir": str(tmp_path)} if "nvme" in keys.values() else {})}
    trials = [Trial("two_ties" if v == 1 else "mlp", s, 3, keys=keys) for s, v in SCHEDULES.items()]
    trials += [Trial("mlp", s, 3, keys=keys, recompute=True) for s in ("1f1b", "zb_h1")]
    check(trials, ranks(4)(attempt_all, trials, timeout=400))
