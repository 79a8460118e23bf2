"""Expert parallelism under the engine: where experts lie changes no weight, and every row of the
placement table holds its bytes."""

from __future__ import annotations

from contextlib import nullcontext
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

from zeroexp import gathered, sharded_init
from zeroexp.errors import CheckpointError, ModelError, NonFiniteError, OptimizerError
from zeroexp.moe import MoE, moe_layers

CLIP = {"trainer.gradient_clip_val": 0.3}
LONG = pytest.mark.full
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


@pytest.mark.parametrize(("num_ranks", "degree"), [(2, 2), pytest.param(4, 2, marks=LONG)])
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


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=LONG)])
def test_every_row_holds_its_bytes(ranks: Any, degree: int) -> None:
    for found in ranks(4)(rows, degree, {}):
        for stage, (counted, state, buffers) in zip(STAGES, found, strict=True):
            wanted = wanted_bytes(degree, 4, stage, 4)
            assert state == wanted, stage
            assert counted == sum(wanted.values()) + buffers


@pytest.mark.parametrize("degree", [pytest.param(2, marks=LONG), 4])
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
    """Weights and biases in groups of their own: experts of one layer are not neighbours."""
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


@pytest.mark.parametrize("expert", ["mlp", pytest.param("modules", marks=LONG)])
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


# -- building, reading, editing --------------------------------------------------------------------


def born_sharded(expert: str, tier: str, folder: str) -> list[dict[str, Tensor]]:
    """Weights of a model that was built sharded, at the start and after two steps, beside one that
    was built whole."""
    keys = {"zero.stage": 3, "offload.kind": tier, "trainer.devices": dist.get_world_size()}
    if tier.startswith("nvme"):
        keys["offload.nvme.dir"] = folder
    out = []
    for context in (nullcontext(), sharded_init(keys)):
        with context:
            model = model_of(2, expert)
        engine = engine_of(model, keys)
        out.append(engine.state_dict())
        steps(engine, 2)
        out.append(engine.state_dict())
        engine.close()
    return out


@pytest.mark.parametrize(("expert", "tier"), [("mlp", "none"), ("modules", "nvme_params")])
def test_experts_are_born_sharded(ranks: Any, tmp_path: Any, expert: str, tier: str) -> None:
    start, end, born, trained = ranks(4)(born_sharded, expert, tier, str(tmp_path))[0]
    assert start and same(born, start) and same(trained, end)


def looked_at(stage: int) -> dict[str, Any]:
    """Gradients of the experts here; edits by one rank, by all, and of what was frozen."""
    model = model_of(2)
    frozen = moe_layers(model)["1.moe"].experts.down
    frozen.requires_grad_(False)
    engine = engine_of(model, {"zero.stage": stage})
    x = batch(0, dist.get_rank())
    engine.backward(loss_of(model, engine(x), x))
    up = moe_layers(model)["0.moe"].experts.up
    found: dict[str, Any] = {"grad": engine.full_grad(up), "frozen": engine.full_grad(frozen)}
    engine.step()
    before = engine.state_dict()
    frozen.requires_grad_(True)
    steps(engine, 1, first=1)
    after = engine.state_dict()
    found["thawed"] = {n for n in before if not torch.equal(before[n], after[n])}
    with gathered(up, modify_rank=2):  # its first two experts are rank 0's as well
        up.data.fill_(float(dist.get_rank()))
    found["edited"] = engine.state_dict().get("0.moe.experts.up")
    engine.close()
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=LONG), 3])
def test_reading_and_editing_experts(ranks: Any, stage: int) -> None:
    found = ranks(4)(looked_at, stage)
    model = model_of(1)
    for rank in range(4):
        x = batch(0, rank)
        (loss_of(model, model(x), x) / 4).backward()
    up = model.get_parameter("0.moe.experts.up").grad
    for rank, mine in enumerate(found):
        here = slice(rank % 2 * 2, rank % 2 * 2 + 2)
        torch.testing.assert_close(mine["grad"], up[here], rtol=0, atol=1e-6)
        assert mine["frozen"] is None
    assert "1.moe.experts.down" in found[0]["thawed"]
    # Rank 2 counts where it holds them, else the first that does: rank 1
    edited = found[0]["edited"]
    assert (edited[:2] == 2).all() and (edited[2:] == 1).all()


def uneven(expert: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """MO-02, MO-04: rank 0 has five tokens and rank 1 none or three, experts get none at all."""
    out = []
    for degree in (1, 2):
        model = model_of(degree, expert)
        with torch.no_grad():
            for layer in moe_layers(model).values():
                layer.gate.weight[2:] = -layer.gate.weight[:2].abs().sum(0)
        engine = engine_of(model, {"zero.stage": 2})
        for step, tokens in enumerate([(5, 3), (5, 1), (2, 4)]):
            x = batch(step, dist.get_rank())[: tokens[dist.get_rank()]].abs()
            engine.backward(loss_of(model, engine(x), x))
            engine.step()
        out.append(engine.state_dict())
        engine.close()
    return out[0], out[1]


@pytest.mark.parametrize("expert", EXPERTS)
def test_uneven_batches_and_idle_experts(ranks: Any, expert: str) -> None:
    alone, spread = ranks(2)(uneven, expert)[0]
    assert alone and furthest(alone, spread) <= 1e-6


def narrow(compute: str) -> list[dict[str, Any]]:
    keys = {"precision.compute": compute, "zero.stage": 2, "trainer.accumulate_grad_batches": 2}
    return each([1, 2], keys, count=3)


@pytest.mark.parametrize("compute", ["bf16", pytest.param("fp16", marks=LONG)])
def test_narrow_formats(ranks: Any, compute: str) -> None:
    alone, spread = ranks(2)(narrow, compute)[0]
    step = torch.finfo(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compute])).eps
    assert furthest(alone["weights"], spread["weights"]) <= step
    assert spread["norms"] == pytest.approx(alone["norms"], rel=2 * step)


def averaging() -> tuple[list[Tensor], list[Tensor]]:
    """Buffers of experts are each expert's own."""
    model = nn.Sequential(
        MoE(8, lambda: nn.Sequential(nn.BatchNorm1d(8, momentum=1.0)), 2, 2, expert_parallel=2)
    )
    engine = engine_of(model, {})
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(float(name.split(".")[2]) + 1)
    whole = engine.state_dict()
    engine.load_state_dict({n: 3 * v for n, v in whole.items()})
    twice = engine.state_dict()
    engine.close()
    return [
        [s[f"0.experts.{i}.0.running_mean"] for i in range(2)] if s else [] for s in (whole, twice)
    ]  # type: ignore[return-value]


def test_buffers_of_experts(ranks: Any) -> None:
    whole, tripled = ranks(2)(averaging)[0]
    for i in range(2):
        assert (whole[i] == i + 1).all() and (tripled[i] == 3 * (i + 1)).all()


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
