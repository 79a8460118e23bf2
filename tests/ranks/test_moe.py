"""Expert parallelism: the degree changes where experts are, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_lab import (
    WIDTH,
    averaged,
    batch,
    build,
    by_global_id,
    expert_group,
    loss_of,
    module,
    sgd,
    train,
    train_alone,
)
from small import furthest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroexp.moe import MLP, MoE, auxiliary_loss, expert_parameters, read_statistics

# Dropless and without a balance loss, ranks decide as one process with the whole batch would.
WHOLE_BATCH: dict[str, dict[str, Any]] = {
    "top1": {"top_k": 1, "balance_loss": 0.0, "z_loss": 0.01},
    "top2": {"top_k": 2, "balance_loss": 0.0, "shared": True},
    "sigmoid": {"gate": "sigmoid", "top_k": 3, "balance_loss": 0.0, "bias_rate": 0.05},
}
# With these a rank decides by its own tokens, as every data-parallel rank does.
OWN_BATCH: dict[str, dict[str, Any]] = {
    "top1 dropping": {"top_k": 1, "capacity_factor": 1.0, "min_capacity": 1, "expert": "modules"},
    "top2 dropping": {"top_k": 2, "capacity_factor": 0.75, "min_capacity": 1, "z_loss": 0.01},
    "topk": {"top_k": 3, "gate": "topk", "sequence_loss": 0.1, "expert": "modules"},
    "expert choice": {"top_k": 2, "gate": "expert_choice", "balance_loss": 0.0},
}
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}


def runs_of(cases: dict[str, dict[str, Any]]) -> list[tuple[str, torch.dtype]]:
    """Every case in fp64, the first also in fp32."""
    return [(next(iter(cases)), torch.float32), *((name, torch.float64) for name in cases)]


def trained(cases: dict[str, dict[str, Any]], sizes: list[int]) -> Any:
    return {run: train(cases[run[0]], sizes, run[1], 10) for run in runs_of(cases)}


def merged(results: list[Any], case: Any, size: int) -> dict[str, Tensor]:
    """The weights of the first group of ranks; what two of them hold must be the same."""
    out: dict[str, Tensor] = {}
    for rank in range(size):
        for name, value in results[rank][case][size].items():
            assert torch.equal(out.setdefault(name, value), value), name
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_degree_trains_the_same_weights_as_one_process(ranks: Any, num_ranks: int) -> None:
    sizes = [size for size in (1, 2, 4) if size <= num_ranks]
    results = ranks(num_ranks)(trained, WHOLE_BATCH, sizes)
    for name, dtype in runs_of(WHOLE_BATCH):
        wanted = train_alone(WHOLE_BATCH[name], num_ranks, dtype, 10, together=True)
        for size in sizes:
            found = merged(results, (name, dtype), size)
            assert furthest(found, wanted) <= EXACT[dtype], (name, dtype, size)


def test_every_degree_drops_and_balances_alike(ranks: Any) -> None:
    results = ranks(4)(trained, OWN_BATCH, [1, 2, 4])
    for name, dtype in runs_of(OWN_BATCH):
        wanted = train_alone(OWN_BATCH[name], 4, dtype, 10, together=False)
        for size in (1, 2, 4):
            found = merged(results, (name, dtype), size)
            assert furthest(found, wanted) <= EXACT[dtype], (name, dtype, size)


def half_and_half(size: int) -> dict[str, Any]:
    """MO-01: tokens 0, 1 to expert 0 and 2, 3 to expert 1 on each rank; three SGD steps."""
    torch.manual_seed(0)
    layer = MoE(4, lambda: nn.Linear(4, 4), 2, group=expert_group(size), balance_loss=0.0)
    fix(layer, [[9.0, 0, 0, 0], [-9.0, 0, 0, 0]])
    norms = []
    for step in range(3):
        layer.zero_grad()
        (layer(split_batch(step, dist.get_rank())).square().sum() / 8).backward()
        grads = averaged(layer, size)
        experts = {found.parameter for found in expert_parameters(layer)}
        square = sum(g.square().sum() for p, g in grads if p in experts)
        if size == 2:
            total = torch.as_tensor(square)
            dist.all_reduce(total)
            square = total
        norms.append(float(torch.as_tensor(square).sqrt()))
        sgd(grads)
    return {"weights": by_global_id(layer), "norms": norms}


def split_batch(step: int, rank: int) -> Tensor:
    x = batch(step, rank, torch.float32)[:4, :4].clone()
    x[:, 0] = torch.tensor([1.0, 2.0, -1.0, -2.0])
    return x


def fix(layer: MoE, rows: list[list[float]]) -> None:
    """A gate that is what it is."""
    with torch.no_grad():
        layer.gate.weight.copy_(torch.tensor(rows))


def test_expert_gradients_are_averaged_over_all_ranks(ranks: Any) -> None:
    """MO-01, against DeepSpeed's factor of ep_size."""
    torch.manual_seed(0)
    layer = MoE(4, lambda: nn.Linear(4, 4), 2, balance_loss=0.0)
    fix(layer, [[9.0, 0, 0, 0], [-9.0, 0, 0, 0]])
    norms = []
    for step in range(3):
        layer.zero_grad()
        x = torch.cat([split_batch(step, rank) for rank in range(2)])
        (layer(x).square().sum() / 16).backward()
        grads = [(p, p.grad) for p in layer.parameters() if p.grad is not None]
        norms.append(float(sum(g.square().sum() for p, g in grads if p.shape[0] == 4).sqrt()))
        sgd(grads)
    wanted = by_global_id(layer)
    for size in (1, 2):
        results = ranks(2)(half_and_half, size)
        found = {**results[1]["weights"], **results[0]["weights"]}
        assert furthest(found, wanted) <= 1e-6, size
        assert results[0]["norms"] == pytest.approx(norms, abs=1e-6)


def uneven(tokens: list[int]) -> dict[str, Any]:
    """Different numbers of tokens, all of them for expert 0, which is on rank 0."""
    torch.manual_seed(0)
    layer = MoE(WIDTH, module, 2, group=expert_group(2), balance_loss=0.0)
    fix(layer, [[0.0] * WIDTH, [-9.0] * WIDTH])
    rank = dist.get_rank()
    x = batch(0, rank, torch.float32)[: tokens[rank]].abs().requires_grad_()
    found: dict[str, Any] = {"x": x.detach().clone()}
    for step in range(3):
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        if step == 0:
            found["y"] = y.detach().clone()
            found["dense"] = [p.detach().clone() for p in layer.experts.parameters()]
        grads = [(p, p.grad) for p in layer.experts.parameters() if p.grad is not None]
        found["grads"] = [grad.clone() for _, grad in grads]
        sgd(grads)
    return found


@pytest.mark.parametrize("tokens", [[5, 3], [5, 0], [0, 3], [0, 0]])
def test_ranks_may_have_different_numbers_of_tokens(ranks: Any, tokens: list[int]) -> None:
    """MO-02, MO-04: uneven batches, a rank without tokens, an expert without tokens: no hang, the
    dense result, and gradients of zero where nothing came."""
    results = ranks(2)(uneven, tokens)
    expert = module()
    with torch.no_grad():
        for p, value in zip(expert.parameters(), results[0]["dense"], strict=True):
            p.copy_(value)
    for result in results:
        x = result["x"]
        logits = torch.stack((torch.zeros(len(x)), -9.0 * x.sum(1)), dim=1)
        wanted = expert(x) * logits.softmax(1)[:, :1]
        torch.testing.assert_close(result["y"], wanted, rtol=0, atol=1e-6)
        assert len(result["grads"]) == 4
    assert not any(grad.any() for grad in results[1]["grads"])
    assert all(bool(grad.any()) == (sum(tokens) > 0) for grad in results[0]["grads"])


def recomputed(keys: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a step with and without recomputation, noise included."""
    out = []
    for recompute in (False, True):
        model = build(keys, expert_group(2, space=int(recompute)))
        torch.manual_seed(5)
        x = batch(0, dist.get_rank(), torch.float32)
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        (y.square().mean() + auxiliary_loss(model)).backward()
        out.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        out[-1]["load"] = torch.tensor(
            [n.tokens_per_expert for n in read_statistics(model).values()]
        )
    return out[0], out[1]


def test_a_recomputed_block_is_the_same_block(ranks: Any) -> None:
    keys = {"top_k": 2, "gate_options": {"second": "gumbel"}, "jitter": 0.1}
    results = ranks(2)(recomputed, keys)
    for plain, again in results:
        assert furthest(plain, again) <= 1e-6


def jittered() -> tuple[Tensor, Tensor]:
    """Scores of the same tokens on every rank, and what is drawn next."""
    layer = MoE(WIDTH, module, 4, jitter=0.1)
    logits = layer.gate(batch(0, 0, torch.float32)).logits_SE.detach()
    return logits, torch.rand(1)


def test_ranks_draw_for_their_own_tokens_and_stay_together(ranks: Any) -> None:
    (a, next_a), (b, next_b) = ranks(2)(jittered)
    assert not torch.allclose(a, b, rtol=0, atol=1e-4)
    assert torch.equal(next_a, next_b)


def low_precision(dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients over a group in ``dtype``, and of the same tokens with all experts here."""
    keys = {"top_k": 2}
    out = []
    for group in (expert_group(2), None):
        model = build(keys, group).to(dtype)
        loss = torch.zeros(())
        for rank in range(2) if group is None else [dist.get_rank()]:
            loss = loss + loss_of(model, batch(0, rank, dtype)).float()
        loss.backward()
        here = {found.name for found in expert_parameters(model)}
        out.append({n: p.grad for n, p in model.named_parameters() if n in here})
    lo, hi = dist.get_rank() * 2, dist.get_rank() * 2 + 2
    return out[0], {name: grad[lo:hi] for name, grad in out[1].items()}


def test_rows_travel_in_bf16(ranks: Any) -> None:
    for found, wanted in ranks(2)(low_precision, torch.bfloat16):
        assert all(grad.dtype == torch.bfloat16 for grad in found.values())
        assert furthest(found, wanted) <= 0.02


def built_mlp(size: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    layer = MoE(WIDTH, MLP(16, "swiglu"), 8, 2, group=expert_group(size))
    return by_global_id(layer)


def test_the_degree_does_not_change_what_is_drawn(ranks: Any) -> None:
    torch.manual_seed(3)
    wanted = by_global_id(MoE(WIDTH, MLP(16, "swiglu"), 8, 2))
    parts = ranks(4)(built_mlp, 4)
    assert sum(name.startswith("experts.up[") for name in parts[3]) == 2
    found = {name: value for part in parts for name, value in part.items()}
    assert furthest(found, wanted) == 0
