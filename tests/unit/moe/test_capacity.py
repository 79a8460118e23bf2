"""Places, drops and who goes first, on gates written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_moe import in_turn  # type: ignore[import-not-found]
from torch import nn

from zeroexp.errors import ConfigError
from zeroexp.moe import GATES, MLP, Capacity, Gate, MoE, Routing
from zeroexp.moe.routing import keep_first, sorted_slots


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "k", "minimum", "places"),
    [
        (3, 4, 8.0, 1, 4, 6),  # deepspeed.md 3.F case 91
        (8, 4, 1.0, 1, 4, 4),  # 2, raised to the minimum
        (64, 4, 1.0, 1, 4, 16),
        (64, 4, 1.25, 1, 4, 20),
        (64, 4, 1.0, 2, 4, 32),  # GShard: 2N/E
        (100, 8, 1.0, 1, 4, 13),  # rounded up
        (4, 4, 4.0, 4, 0, 16),  # case 91: more places than tokens
        (16, 8, 1.0, 2, 8, 8),  # case 91: the minimum is preserved
    ],
)
def test_places_are_deepspeeds(
    tokens: int, experts: int, factor: float, k: int, minimum: int, places: int
) -> None:
    capacity = Capacity(factor, minimum=minimum)
    assert capacity.places(tokens, experts, k, training=True) == places


def test_eval_may_have_a_factor_of_its_own() -> None:
    capacity = Capacity(1.0, 2.0, minimum=0)
    assert capacity.places(64, 4, 1, training=True) == 16
    assert capacity.places(64, 4, 1, training=False) == 32
    assert Capacity(1.0, math.inf).places(64, 4, 1, training=False) is None
    assert Capacity(None).places(64, 4, 1, training=True) is None


def gate_of(kind: str, k: int, experts: int, **capacity: Any) -> Gate:
    return GATES[kind](2, experts, top_k=k, capacity=Capacity(**capacity))


def logits_of(choices: list[list[int]], experts: int) -> torch.Tensor:
    """Logits under which token s prefers ``choices[s]`` in this order; later tokens less surely."""
    logits = torch.zeros(len(choices), experts, dtype=torch.float64)
    for s, wanted in enumerate(choices):
        for rank, e in enumerate(wanted):
            logits[s, e] = 4.0 - rank - 0.1 * s
    return logits


def kept(routing: Routing) -> list[tuple[int, int]]:
    """(token, expert) in the order of the lists."""
    expert_A = torch.arange(routing.counts_E.numel()).repeat_interleave(routing.counts_E)
    return list(zip(routing.token_A.tolist(), expert_A.tolist(), strict=True))


EIGHT = [[0], [0], [1], [0], [0], [2], [1], [0]]


def test_top1_on_eight_tokens() -> None:
    """Expert 0 is wanted five times and has two places; 3 + 0 + 0 + 0 are dropped."""
    routing = gate_of("top1", 1, 4, factor=1.0, minimum=0).route(logits_of(EIGHT, 4), None)
    assert routing.load_E.tolist() == [5, 2, 1, 0]
    assert routing.counts_E.tolist() == [2, 2, 1, 0]
    assert kept(routing) == [(0, 0), (1, 0), (2, 1), (6, 1), (5, 2)]
    for (s, e), weight in zip(kept(routing), routing.weight_A.tolist(), strict=True):
        top = math.exp(4.0 - 0.1 * s)
        assert weight == pytest.approx(top / (top + 3), abs=1e-12), (s, e)


@pytest.mark.parametrize("kind", ["top1", "topk", "sigmoid"])
@pytest.mark.parametrize("priority", ["position", "probs"])
def test_drops_are_what_exceeds_the_places(kind: str, priority: str) -> None:
    torch.manual_seed(0)
    k = 1 if kind == "top1" else 3
    gate = gate_of(kind, k, 6, factor=0.5, minimum=1, priority=priority)
    logits = 3 * torch.randn(40, 6)
    routing = gate.route(logits, None)
    places = math.ceil(40 / 6 * 0.5 * k)
    chosen = logits.topk(k, dim=1).indices.flatten().bincount(minlength=6)
    dropped = sum(max(0, int(c) - places) for c in chosen)
    assert dropped > 0
    assert int((routing.load_E - routing.counts_E).sum()) == dropped == 40 * k - len(kept(routing))


def test_first_choices_go_before_second_ones() -> None:
    """GShard: token 0's second choice, expert 1, loses its place to later first choices."""
    choices = [[0, 1], [1, 0], [1, 2], [2, 1]]
    gate = gate_of("top2", 2, 3, factor=0.75, minimum=0, priority="choice")
    routing = gate.route(logits_of(choices, 3), None)  # ceil(4 / 3 * 0.75 * 2) = 2 places
    assert kept(routing) == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
    by_token = dict(zip(kept(routing), routing.weight_A.tolist(), strict=True))
    assert by_token[0, 0] == pytest.approx(1, abs=1e-12)  # alone: the whole weight
    assert by_token[1, 1] == pytest.approx(math.e / (1 + math.e), abs=1e-12)

    gate = gate_of("top2", 2, 3, factor=0.75, minimum=0, priority="position")
    routing = gate.route(logits_of(choices, 3), None)
    assert kept(routing) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (3, 2)]


def test_probs_keeps_the_surest_tokens() -> None:
    logits = torch.tensor([[1.0, 0], [3.0, 0], [2.0, 0], [4.0, 0]])
    gate = gate_of("topk", 1, 2, factor=1.0, minimum=0, priority="probs")
    assert kept(gate.route(logits, None)) == [(1, 0), (3, 0)]


def test_random_priority_favours_no_place_in_the_batch() -> None:
    """DeepSpeed's random token selection: each of 8 tokens keeps one of 2 places in 1/4 of the
    draws; 4 sigma of 2000 draws are 0.039."""
    gate = gate_of("top1", 1, 4, factor=1.0, minimum=0, priority="random")
    logits = torch.zeros(8, 4)
    logits[:, 1] = 1
    generator = torch.Generator().manual_seed(0)
    times = torch.zeros(8)
    for _ in range(2000):
        tokens = gate.route(logits, generator).token_A
        assert tokens.numel() == 2 and tokens[0] < tokens[1]
        times[tokens] += 1
    assert float((times / 2000 - 0.25).abs().max()) < 0.039
    assert kept(gate.route(logits, None)) == [(0, 1), (1, 1)], "by position where nothing is drawn"


def test_expert_choice_fills_every_expert() -> None:
    """n * c / e = 8 * 2 / 4 = 4 tokens for each; fewer tokens than places: all of them."""
    torch.manual_seed(0)
    gate = gate_of("expert_choice", 2, 4, factor=1.0, minimum=0)
    routing = gate.route(torch.randn(8, 4), None)
    assert routing.counts_E.tolist() == [4, 4, 4, 4]
    assert len(set(kept(routing))) == 16
    gate = gate_of("expert_choice", 2, 4, factor=4.0, minimum=4)
    assert gate.route(torch.randn(3, 4), None).counts_E.tolist() == [3, 3, 3, 3]


@given(st.data())
def test_any_queue_is_served_in_turn(data: st.DataObject) -> None:
    tokens, experts = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    k, places = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 5))
    order = st.permutations(range(experts))
    chosen = [list(data.draw(order))[:k] for _ in range(tokens)]
    value = st.integers(0, 3)  # with ties, which the earlier token wins
    values = [[data.draw(value) for _ in range(k)] for _ in range(tokens)]
    wanted = [[data.draw(st.booleans()) for _ in range(k)] for _ in range(tokens)]
    priority = data.draw(st.sampled_from(["position", "choice", "probs"]))
    slots = [(s, j) for s in range(tokens) for j in range(k)]
    if priority == "choice":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    if priority == "probs":
        slots.sort(key=lambda slot: -values[slot[0]][slot[1]])
    wishes = [(s, chosen[s][j]) for s, j in slots if wanted[s][j]]
    served = in_turn(wishes, places)
    kept_SK = keep_first(
        torch.tensor(chosen),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(wanted),
        num_experts=experts,
        places=places,
        priority=priority,
        generator=None,
    )
    found = {(s, chosen[s][j]) for s, j in kept_SK.nonzero().tolist()}
    assert found == served
    listed = sorted_slots(torch.tensor(chosen), kept_SK)
    assert listed.tolist() == sorted(
        (s * k + j for s, j in kept_SK.nonzero().tolist()), key=lambda i: (chosen[i // k][i % k], i)
    )


def test_no_tokens_no_assignments() -> None:
    for kind in GATES:
        k = {"top1": 1}.get(kind, 2)
        for factor in (None, 1.0):
            routing = gate_of(kind, k, 4, factor=factor).route(torch.zeros(0, 4), None)
            assert kept(routing) == [] and routing.counts_E.tolist() == [0, 0, 0, 0]


ONE = nn.Linear(4, 4)

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"capacity_factor": 0.0}, "capacity_factor.*leaves no place.*use 1.25"),
    ({"capacity_factor": -1.0}, "capacity_factor"),
    ({"capacity_factor": float("nan")}, "capacity_factor"),
    ({"eval_capacity_factor": 0.0}, "eval_capacity_factor"),
    ({"min_capacity": -1}, "min_capacity.*negative"),
    ({"priority": "probz"}, "priority.*'probz'.*use probs"),
    ({"top_k": 5}, "top_k.*5 of 4 experts.*use 1 to 4"),
    ({"top_k": 0}, "top_k.*0 of 4 experts"),
    ({"num_experts": 0}, "num_experts"),
    ({"d_model": 0}, "d_model"),
    ({"jitter": 1.0}, "jitter"),
    ({"gate": "top3"}, "gate.*'top3'.*use top"),
    ({"gate": "top1", "top_k": 2}, "top_k.*2 with the gate top1"),
    ({"gate": "top2", "top_k": 1}, "top_k.*1 with the gate top2"),
    ({"gate": "top2", "top_k": 2, "gate_options": {"second": "skipp"}}, "second.*use skip"),
    ({"gate": "topk", "gate_options": {"second": "skip"}}, "topk does not take 'second'"),
    ({"gate": "top2", "top_k": 2, "bias_rate": 0.001}, "bias_rate.*use topk or sigmoid"),
    ({"gate": "expert_choice", "sequence_loss": 0.1}, "sequence_loss.*use 0"),
    ({"gate": "expert_choice", "priority": "probs"}, "priority.*turn nobody away"),
    ({"balance_loss": -0.1}, "balance_loss.*-0.1"),
    ({"expert": MLP(0)}, "expert.*hidden width 0"),
    ({"expert": MLP(4, "gelo")}, "expert.*'gelo'.*use gelu"),
    ({"expert": lambda: "no module"}, "expert.*factory made a str"),
    ({"gate": GATES["topk"](4, 6, top_k=1)}, "num_experts.*4, but the gate has 6"),
    ({"gate": GATES["topk"](4, 4, top_k=2)}, "top_k.*1, but the gate has 2"),
    ({"gate": GATES["topk"](4, 4, top_k=1), "jitter": 0.1}, "jitter.*built already.*to the gate"),
    ({"expert": lambda: ONE}, "expert.*one module twice"),
    ({"expert": lambda: MoE(4, MLP(4), 2)}, "expert.*holds a MoE layer itself"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_what_cannot_be_is_refused_with_the_fix(keys: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"d_model": 4, "expert": MLP(4), "num_experts": 4, **keys}
    with pytest.raises(ConfigError, match=message):
        MoE(given.pop("d_model"), given.pop("expert"), given.pop("num_experts"), **given)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        MoE(4, MLP(0), 4, 5, capacity_factor=0.0, jitter=2.0, z_loss=-1.0)
    assert {p.key for p in caught.value.problems} >= {"expert", "z_loss"}
    with pytest.raises(ConfigError) as caught:
        MoE(4, MLP(4), 4, 5, capacity_factor=0.0, jitter=2.0)
    assert {p.key for p in caught.value.problems} == {"top_k", "capacity_factor", "jitter"}
