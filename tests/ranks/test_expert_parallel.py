"""Expert parallelism under the engine: where experts lie changes no weight, and every row of the
placement table holds its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from census import bytes_since, live_storages
from expert_lab import (
    EXPERTS,
    batch,
    each,
    each_stage,
    engine_of,
    loss_of,
    model_of,
    steps,
    trained,
)
from small import STAGES, digest, furthest
from torch import Tensor, nn

from zeroexp.errors import CheckpointError, ModelError, NonFiniteError, OptimizerError
from zeroexp.moe import moe_layers

CLIP = {"trainer.gradient_clip_val": 0.3}
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize(("expert", "dtype"), [("mlp", torch.float32), ("modules", torch.float64)])
def test_every_degree_gives_the_same_weights_and_norms(
    ranks: Any, expert: str, dtype: torch.dtype
) -> None:
    keys = {**CLIP, "zero.stage": 1}
    found = ranks(4)(each, [1, 2, 4], keys, expert=expert, dtype=dtype)
    wanted = found[0][0]
    assert wanted["weights"]
    assert max(wanted["norms"]) > 0.3  # clipping has an effect
    for mine in found:
        for run in mine:
            assert run["norms"] == pytest.approx(wanted["norms"], rel=EXACT[dtype])
        # The same bits on every rank
        assert [run["norms"] for run in mine] == [run["norms"] for run in found[0]]
    for run in found[0][1:]:
        assert list(run["weights"]) == list(wanted["weights"])
        assert furthest(run["weights"], wanted["weights"]) <= EXACT[dtype]


@pytest.mark.parametrize(("num_ranks", "degree"), [(2, 2), (4, 2)])
def test_stages_give_the_same_bits(ranks: Any, num_ranks: int, degree: int) -> None:
    # reduce=each: sums of micro-batches in one order at every stage
    keys = {**CLIP, "zero.reduce": "each", "trainer.accumulate_grad_batches": 2}
    found = ranks(num_ranks)(each_stage, degree, keys, count=4)
    bits = [(digest(run["weights"]), run["norms"]) for run in found[0]]
    assert bits[0][0] and all(other == bits[0] for other in bits[1:])


def tiers(degree: int, folder: str) -> list[dict[str, Any]]:
    found = []
    for kind in ("none", "cpu", "nvme", "nvme_params"):
        keys = {"zero.stage": 3, "offload.kind": kind}
        if kind.startswith("nvme"):
            keys["offload.nvme.dir"] = folder
        found.append(trained(degree, keys, count=3, adam=True))
    return found


def test_tiers_give_the_same_bits(ranks: Any, tmp_path: Any) -> None:
    found = ranks(2)(tiers, 2, str(tmp_path))[0]
    bits = [digest(run["weights"]) for run in found]
    assert bits[0] and all(other == bits[0] for other in bits[1:])


def rows(degree: int, keys: dict[str, Any]) -> list[tuple[int, dict[str, int], int]]:
    """Bytes by kind, counted by walking what lives, and by the ledger, for every stage."""
    found = []
    for stage in STAGES:
        before = live_storages()
        model = model_of(degree)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = engine_of(model, {**keys, "zero.stage": stage}, optimizer)
        steps(engine, 1)
        x = batch(7, dist.get_rank())
        engine.backward(loss_of(model, engine(x), x))
        ledger = engine.ledger
        del x
        for layer in moe_layers(model).values():
            layer.statistics.reset()
        held = ledger.live_bytes("whole") + ledger.live_bytes("workspace")
        counted = bytes_since(before) - held
        state = {kind: tier["device"] for kind, tier in ledger.state_bytes().items()}
        found.append((counted, state, sum(b.nbytes for b in model.buffers())))
        engine.zero_grad()
        engine.close()
    return found


def padded(numels: list[int], shards: int) -> int:
    """The documented rule: parameters at multiples of 16, the buffer a multiple of 16 per shard."""
    used = 0
    for n in numels:
        used = -(-used // 16) * 16 + n
    return -(-used // (16 * shards)) * 16 * shards


def wanted_bytes(degree: int, ranks: int, stage: int, shard: int) -> dict[str, int]:
    """From shapes alone: fp32, AdamW (8 bytes of state per element), one unit for each of the two
    blocks; experts over the ranks with the same ones."""
    dense = [8 * 8, 8, 4 * 8]  # linear, bias, gate
    local = 4 // degree
    experts = [local * 8 * 6, local * 6 * 8, local * 6, local * 8]
    out = dict.fromkeys(("params", "grads", "optim"), 0)
    for numels, shards in ((dense, shard), (experts, max(1, shard // degree))):
        whole = padded(numels, shards)
        for kind, first, nbytes in (("params", 3, 4), ("grads", 2, 4), ("optim", 1, 8)):
            out[kind] += 2 * nbytes * (whole // shards if stage >= first else whole)
    return out


@pytest.mark.parametrize("degree", [2, 4])
def test_every_row_holds_its_bytes(ranks: Any, degree: int) -> None:
    for found in ranks(4)(rows, degree, {}):
        for stage, (counted, state, buffers) in zip(STAGES, found, strict=True):
            wanted = wanted_bytes(degree, 4, stage, 4)
            assert state == wanted, stage
            assert counted == sum(wanted.values()) + buffers


@pytest.mark.parametrize("degree", [2, 4])
def test_shards_of_fewer_ranks(ranks: Any, degree: int) -> None:
    """Hybrid: a copy of the model on 2 of 4 ranks, experts spread as far or further."""
    plain, hybrid = {"zero.stage": 3, **CLIP}, {"zero.stage": 3, "zero.shard_size": 2, **CLIP}
    found = ranks(4)(each, [degree], hybrid)
    wanted = ranks(4)(each, [1], plain)[0][0]
    assert furthest(found[0][0]["weights"], wanted["weights"]) <= 1e-6
    assert found[0][0]["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
    assert all(mine[0]["norms"] == found[0][0]["norms"] for mine in found)


# -- checkpoints -----------------------------------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Weights and biases in groups of their own: experts of one layer are not one run of numbers."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def saved(degree: int, expert: str, folder: str, load: str | None, stage: int) -> dict[str, Any]:
    model = model_of(degree, expert)
    engine = engine_of(model, {"zero.stage": stage}, adam(model))
    if load is None:
        steps(engine, 2)
    else:
        engine.load_checkpoint(load)
    whole = engine.state_dict(), engine.optimizer_state_dict(engine.optimizers[0])
    engine.save_checkpoint(folder)
    steps(engine, 2, first=2)
    after = engine.state_dict()
    engine.close()
    return {"model": whole[0], "optimizer": whole[1], "after": after}


@pytest.mark.parametrize("expert", EXPERTS)
def test_a_checkpoint_goes_to_any_degree(ranks: Any, tmp_path: Any, expert: str) -> None:
    """2 to 1 to 4 and on; what is trained afterwards is the same."""
    first = ranks(4)(saved, 2, expert, str(tmp_path / "a"), None, 1)[0]
    alone = ranks(4)(saved, 1, expert, str(tmp_path / "b"), str(tmp_path / "a"), 3)[0]
    again = ranks(4)(saved, 4, expert, str(tmp_path / "c"), str(tmp_path / "b"), 2)[0]
    for other in (alone, again):
        assert list(other["model"]) == list(first["model"])
        assert all(torch.equal(other["model"][n], first["model"][n]) for n in first["model"])
        assert same(other["optimizer"], first["optimizer"])
        assert furthest(other["after"], first["after"]) <= 1e-6


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def as_without_experts(expert: str) -> tuple[list[str], Any, list[str], Any]:
    """Names and numbers of a whole checkpoint, and those that torch gives where all experts are on
    one rank."""
    out: list[Any] = []
    for degree in (2, 1):
        model = model_of(degree, expert)
        plain = list(model.state_dict())
        engine = engine_of(model, {}, adam(model))
        steps(engine, 1)
        names, state = list(engine.state_dict()), engine.optimizer_state_dict(engine.optimizers[0])
        out += [
            names,
            {
                n: [(k, tuple(v.shape)) for k, v in s.items()]
                for n, s in state.get("state", {}).items()
            },
        ]
        engine.close()
    return (*out, plain)  # type: ignore[return-value]


@pytest.mark.parametrize("expert", EXPERTS)
def test_names_and_numbers_are_those_of_all_experts(ranks: Any, expert: str) -> None:
    names, state, names_1, state_1, plain = ranks(2)(as_without_experts, expert)[0]
    assert names == names_1 == plain
    assert state and state == state_1


def loaded_before_training(degree: int, expert: str, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's own load_state_dict with a whole state, as Lightning does it before the engine."""
    model = model_of(degree, expert)
    model.load_state_dict(whole)
    engine = engine_of(model, {"zero.stage": 3})
    found = engine.state_dict()
    engine.load_state_dict({n: 2 * v for n, v in whole.items()})
    twice = engine.state_dict()
    assert all(torch.equal(twice[n], 2 * found[n]) for n in twice)
    partly = {n: v for n, v in whole.items() if ".moe.experts." in n and n.startswith("1")}
    engine.load_state_dict(partly, strict=False)
    mixed = engine.state_dict()
    assert all(torch.equal(mixed[n], (1 if n in partly else 2) * found[n]) for n in mixed)
    try:
        engine.load_state_dict({**whole, "1.moe.experts.9.weight": torch.zeros(1)})
        raise AssertionError("a name too many was taken")
    except CheckpointError as error:
        assert "experts.9.weight" in str(error)
    engine.close()
    return found


@pytest.mark.parametrize("expert", EXPERTS)
def test_a_plain_module_takes_a_whole_state(ranks: Any, expert: str) -> None:
    torch.manual_seed(3)
    whole = {n: torch.randn(v.shape) for n, v in model_of(1, expert).state_dict().items()}
    found = ranks(2)(loaded_before_training, 2, expert, whole)[0]
    assert same(found, whole)


def closed(degree: int, expert: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An optimizer goes on alone after its engine, and under a second one."""
    out = []
    for again in (False, True):
        model = model_of(degree, expert)
        optimizer = adam(model)
        engine = engine_of(model, {"zero.stage": 2}, optimizer)
        steps(engine, 2)
        if again:
            engine.close()
            engine = engine_of(model, {"zero.stage": 3}, optimizer)
        steps(engine, 2, first=2)
        out.append(engine.state_dict())
        engine.close()
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    return out[0], out[1]


@pytest.mark.parametrize("expert", EXPERTS)
def test_a_second_engine_goes_on(ranks: Any, expert: str) -> None:
    once, twice = ranks(2)(closed, 2, expert)[0]
    assert once and all(torch.equal(once[n], twice[n]) for n in once)


# -- what goes wrong -------------------------------------------------------------------------------


def poisoned(compute: str, nonfinite: str, expert: str) -> tuple[bool, int, dict[str, Tensor], str]:
    """A gradient of rank 1's first expert is infinite on rank 1 alone."""
    model = model_of(2, expert)
    keys = {"precision.compute": compute, "precision.nonfinite": nonfinite, "zero.stage": 2}
    engine = engine_of(model, keys)
    before = engine.state_dict()
    x = engine.cast(batch(0, dist.get_rank()))
    loss = loss_of(model, engine(x), x)
    if dist.get_rank() == 1:
        first = next(moe_layers(model)["1.moe"].experts.parameters())
        first.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))
    engine.backward(loss)
    message, applied = "", False
    try:
        applied = engine.step()
    except NonFiniteError as error:
        message = str(error)
    after = engine.state_dict()
    found = all(torch.equal(before[n], after[n]) for n in before)
    skipped = engine.skipped_steps
    engine.close(collective=not message)
    return applied, skipped, found, message  # type: ignore[return-value]


def test_an_overflow_in_one_expert_skips_the_step_everywhere(ranks: Any) -> None:
    for applied, skipped, unchanged, _ in ranks(2)(poisoned, "fp16", "skip", "mlp"):
        assert (applied, skipped, unchanged) == (False, 1, True)


@pytest.mark.parametrize(
    ("expert", "name"), [("mlp", "1.moe.experts.up[2]"), ("modules", "1.moe.experts.2.0.weight")]
)
def test_the_expert_is_named_by_its_global_id(ranks: Any, expert: str, name: str) -> None:
    for _, _, _, message in ranks(2)(poisoned, "fp32", "stop", expert):
        assert f"the gradient of {name} is not finite (found by rank 1" in message


def alone(degree: int) -> str:
    """Without an engine nobody connects the ranks."""
    try:
        model_of(degree)(batch(0, dist.get_rank()))
    except ModelError as error:
        return str(error)
    return ""


def test_a_layer_that_nothing_connects_says_so(ranks: Any) -> None:
    for message in ranks(2)(alone, 2):
        assert "its experts lie on 2 ranks, and nothing connects them" in message


def looks_at_matrices() -> str:
    model = model_of(2)
    try:
        engine_of(model, {"zero.stage": 0}, torch.optim.Adafactor(model.parameters()))
    except OptimizerError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_matrices_is_refused(ranks: Any) -> None:
    for message in ranks(2)(looks_at_matrices):
        assert "0.moe.experts.up holds some of the experts only" in message


# -- traffic ---------------------------------------------------------------------------------------


def forward_calls(degree: int) -> tuple[int, int, int]:
    """All-to-alls of one forward and of its backward, and what they sent."""
    calls = []
    model = model_of(degree)
    engine = engine_of(model, {})
    layer = moe_layers(model)["0.moe"]
    if layer.group is not None:
        plain = layer.group.all_to_all

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs["what"])
            return plain(*args, **kwargs)

        layer.group.all_to_all = counting  # type: ignore[method-assign]
    x = batch(0, dist.get_rank())
    loss = loss_of(model, engine(x), x)
    forward = len(calls)
    engine.backward(loss)
    engine.step()
    sent = engine.ledger.comm_bytes_per_step().get("all_to_all", 0)
    moved = sum(layer.statistics._nbytes for layer in moe_layers(model).values())
    engine.close()
    assert sent == moved
    return forward, len(calls), sent


def test_two_all_to_alls_a_layer_and_none_without_a_group(ranks: Any) -> None:
    """deepspeed.md 3.F row 92; the two layers share a group."""
    assert ranks(2)(forward_calls, 1) == [(0, 0, 0)] * 2
    for forward, whole, sent in ranks(2)(forward_calls, 2):
        assert (forward, whole) == (2 * 2, 4 * 2) and sent > 0
