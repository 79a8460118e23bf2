"""Decoders of transformers as layers of a pipeline: their own forward bit for bit, and training
that is one process's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from llama_lab import (
    FAMILIES,
    LENGTH,
    Case,
    along_the_chain,
    batch_of,
    both,
    decoder,
    differences,
    small_case,
    train,
)
from small import caught, furthest


def check(results, data_ranks: int) -> None:
    """``results`` of :func:`llama_lab.both` by rank."""
    (_, weights), (losses, wanted) = results[0]
    assert furthest(weights, wanted) <= 1e-12
    for place in range(2):
        theirs = [piped[0] for piped, _ in results[place * data_ranks :][:data_ranks]]
        mean = [sum(each) / data_ranks for each in zip(*theirs, strict=True)]
        assert mean == pytest.approx(losses, abs=1e-12)
    assert losses[-1] != losses[0]


def test_a_small_llama_in_a_pipe(ranks):
    """Tied, with padding, ZeRO 3 and a split backward; the rest is --full. Both ways on the ranks:
    they import transformers, this process does not."""
    results = ranks(2)(small_case)
    assert [apart for apart, *_ in results] == [(0.0, 0.0)] * 2
    check([(piped, alone) for _, piped, alone in results], 1)


@pytest.mark.full
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_are_the_decoders_forward(family, attention, padded):
    """Masks by layer, rotary tables, scales and soft caps are the family's own: bit for bit, and
    within 1e-12 where torch chooses the attention's kernel."""
    if (family, attention) == ("gemma2", "sdpa"):
        pytest.skip("sdpa cannot cap the attention's scores")
    model = decoder(family, attention=attention)
    logits, grads = differences(model, batch_of(4, 1, padded=padded))
    assert logits <= (0 if attention == "eager" else 1e-12)
    assert grads <= (0 if attention == "eager" else 1e-12)


@pytest.mark.full
def test_masks_and_positions_reach_every_layer():
    """Left padding with positions that start behind it, packed sequences, and a mask of the
    user's own: none is without effect, all are the decoder's."""
    model = decoder()
    plain = batch_of(2, 2)
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * LENGTH])
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3], list(range(LENGTH))])
    own = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64)
    own[:, :, :, 3:] = -1e9
    batches = [
        {**plain, "attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)},
        {**plain, "position_ids": packed},
        {**plain, "attention_mask": own},
    ]
    with torch.no_grad():
        without = along_the_chain(model, plain["input_ids"])
        for batch in batches:
            found = along_the_chain(model, batch)
            wanted = model(**batch, use_cache=False).logits
            assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
            assert not torch.allclose(found, without)


CASES = [
    Case(schedule, stage, tied=tied, padded=tied is (stage == 3))
    for schedule in ("1f1b", "zb_h1")
    for stage in (0, 3)
    for tied in (False, True)
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_the_decoders_own(ranks, case):
    check(ranks(4)(both, case, timeout=200), 2)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families_train(ranks, family):
    check(ranks(4)(both, replace(CASES[0], family=family), timeout=200), 2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_gradient_checkpointing_of_the_decoder_changes_nothing(ranks, kind):
    check(ranks(4)(both, replace(CASES[3], checkpointing=kind), timeout=200), 2)


@pytest.mark.full
def test_reentrant_checkpointing_is_refused_where_the_backward_is_split(ranks):
    case = Case("zb_h1", 0, tied=False, padded=False, checkpointing="reentrant")
    for kind, message in ranks(4)(caught, train, case, timeout=200):
        assert kind == "StageError" and "CheckpointFunction" in message
