"""State that leaves memory between two phases: how much, that it comes back as it was, and what is
refused meanwhile."""

from __future__ import annotations

import copy
import itertools
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from formula import sizes
from offload_lab import KINDS, leaves, offloaded
from small import STAGES, caught, digest, micro_batches, mlp, rank, tiny_gpt, token_batches
from torch import nn

import zeroexp
from zeroexp.engine import Engine
from zeroexp.optim.adamw import AdamW

STEPS, SEQUENCES = 4, 8
ALL = ("params", "grads", "optim")
FIX = "engine.reload_states()"

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ours": AdamW,
    "torch": torch.optim.AdamW,
    "fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "factored": torch.optim.Adafactor,
}


@dataclass(frozen=True)
class Row:
    """One training, and what leaves memory in it."""

    stage: int
    kind: str = "none"
    compute: str = "fp32"
    optimizer: str = "torch"
    include: tuple[str, ...] = ALL
    to: str = "nvme"
    accumulate: int = 1
    delayed: bool = False


def keys_of(row: Row, folder: str) -> dict[str, Any]:
    delayed = {"offload_delayed_update": True} if row.delayed else {}
    keys = offloaded(
        row.stage,
        folder,
        compute=row.compute,
        accumulate=row.accumulate,
        offload_kind=row.kind,
        **delayed,
    )
    keys["offload"].setdefault("nvme", {})["dir"] = folder
    return keys


def train(row: Row, folder: str, *, parks: bool) -> dict[str, Any]:
    """Losses, and the bits of weights and optimizer state. If it ``parks``, state leaves and comes
    back after every micro-batch, but for those after which a step has begun already."""
    model = tiny_gpt(dim=32, layers=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = Engine(model, OPTIMIZERS[row.optimizer](trained, lr=1e-2), keys_of(row, folder))
    losses, parked = [], 0
    for batch in token_batches(STEPS, SEQUENCES):
        for number, piece in enumerate(micro_batches(batch, row.accumulate)):
            loss = engine(*piece)
            engine.backward(loss)
            losses.append(float(loss.detach()))
            last = number == row.accumulate - 1
            if last:
                engine.step()
            if parks:
                before = engine.ledger.state_bytes()
                engine.offload_states(row.include, to=row.to)
                away = engine.ledger.state_bytes()
                assert not any(away[kind]["device"] for kind in row.include)
                engine.reload_states()
                assert engine.ledger.state_bytes() == before
                parked += 1
    found = {name: torch.as_tensor(value) for name, value in leaves(engine).items()}
    engine.close()
    return {
        "losses": losses,
        "bits": digest(found),
        "parked": parked,
        "left": [p.name for p in Path(folder).glob("*parked*")],
    }


def trainings(rows: list[Row], folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train(r, folder, parks=False), train(r, folder, parks=True)) for r in rows]


def check(ranks: Any, num_ranks: int, rows: list[Row], folder: Path) -> None:
    for found in ranks(num_ranks)(trainings, rows, str(folder), timeout=60 + 10 * len(rows)):
        for row, (wanted, parked) in zip(rows, found, strict=True):
            assert parked["parked"] == STEPS * row.accumulate
            assert parked["losses"] == wanted["losses"], row
            assert parked["bits"] == wanted["bits"], row
            assert not parked["left"]
    assert wanted["losses"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_goes_on_as_if_nothing_had_left(ranks, tmp_path, num_ranks):
    rows = [
        Row(0, accumulate=2, optimizer="factored", compute="bf16"),
        Row(1, "cpu", "bf16", "ours"),
        Row(2, optimizer="fused", include=("grads", "optim"), accumulate=2),
        Row(3, compute="bf16", to="cpu"),
        Row(3, "cpu_params", accumulate=2),
        Row(3, "nvme_params", "bf16"),
        Row(2, "cpu", delayed=True),
    ]
    check(ranks, num_ranks, rows if num_ranks == 1 else [r for r in rows if r.stage], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_with_every_kind(ranks, tmp_path, stage, compute, num_ranks):
    """All subsets of what can leave, to both tiers; optimizers and accumulation take turns."""
    subsets = [c for n in (1, 2, 3) for c in itertools.combinations(ALL, n)]
    turns = itertools.cycle(itertools.product(OPTIMIZERS, (1, 2)))
    rows = []
    for kind, to, include in itertools.product(("none", *KINDS), ("cpu", "nvme"), subsets):
        optimizer, accumulate = next(turns)
        if optimizer == "factored" and stage and num_ranks > 1:
            optimizer = "momentum"
        rows.append(Row(stage, kind, compute, optimizer, include, to, accumulate))
    rows += [Row(stage, kind, compute, delayed=True) for kind in ("cpu", "nvme")]
    check(ranks, num_ranks, rows, tmp_path)


# -- memory ----------------------------------------------------------------------------------------


def small_engine(folder: str, *, stage: int = 0, kind: str = "none", width: int = 48) -> Engine:
    module = mlp(width, width, width)
    engine = Engine(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        keys_of(Row(stage, kind), folder),
    )
    one_step(engine)
    return engine


def one_step(engine: Engine) -> float:
    loss = engine(torch.ones(4, engine.module[0].in_features)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def accounts(stage: int, folder: str) -> list[dict[str, dict[str, int]]]:
    engine = small_engine(folder, stage=stage)
    found = []

    def note() -> None:
        found.append(engine.ledger.state_bytes())

    note()
    engine.offload_states(["optim"], to="nvme")
    note()
    engine.offload_states(["params", "optim"])  # the optimizer state comes up for that
    note()
    with engine.offloaded("params", "grads", to="cpu"):  # params are away, and stay so
        note()
    note()
    engine.reload_states()
    note()
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_the_ledger_says_where_the_bytes_are(ranks, tmp_path, stage):
    """fp32 AdamW without a master copy: p of parameters, p of gradients, 2p of moments."""
    module = mlp(48, 48, 48)
    size = sizes(module, 2, "block", trainable=True)
    whole, mine = 4 * size.padded, 4 * size.padded // 2
    params, grads, optim = (
        mine if stage >= 3 else whole,
        mine if stage >= 2 else whole,
        2 * (mine if stage >= 1 else whole),
    )

    def at(params_at: str, grads_at: str, optim_at: str) -> dict[str, dict[str, int]]:
        there = {"params": (params, params_at), "grads": (grads, grads_at)}
        there["optim"] = (optim, optim_at)
        return {
            kind: {tier: nbytes * (tier == where) for tier in ("device", "cpu", "nvme")}
            for kind, (nbytes, where) in there.items()
        }

    home = at("device", "device", "device")
    for found in ranks(2)(accounts, stage, str(tmp_path)):
        assert found == [
            home,
            at("device", "device", "nvme"),
            at("cpu", "device", "cpu"),
            at("cpu", "cpu", "cpu"),
            at("cpu", "device", "cpu"),
            home,
        ]


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def shrinks(stage: int, kind: str, folder: str) -> dict[str, int]:
    engine = small_engine(folder, stage=stage, kind=kind, width=2048)
    state = sum(sum(tiers.values()) for tiers in engine.ledger.state_bytes().values())
    before = resident()
    engine.offload_states(to="nvme")
    away = resident()
    on_disk = sum(p.stat().st_blocks for p in Path(folder).glob("*-parked/*.parked")) * 512
    engine.reload_states()
    after = resident()
    engine.close()
    return {"state": state, "fell": before - away, "rose": after - away, "on disk": on_disk}


@pytest.mark.parametrize(("stage", "kind"), [(0, "none"), (3, "cpu_params")])
def test_memory_falls_and_returns(ranks, tmp_path, stage, kind):
    (found,) = ranks(1)(shrinks, stage, kind, str(tmp_path))
    params = 2 * (2048 * 2048 + 2048)
    assert found["state"] == 4 * 4 * params  # parameters, gradients and two moments in fp32
    assert found["fell"] > 0.97 * found["state"]
    assert 0.97 * found["state"] < found["rose"] < 1.1 * found["state"]
    # Gradients of a step that is over are not worth a write.
    assert 0.99 * found["state"] <= found["on disk"] / 3 * 4 <= 1.01 * found["state"]


# -- uses while something is away ------------------------------------------------------------------


def read_one(engine: Engine) -> None:
    with zeroexp.gathered(engine.module[0].weight):
        assert not engine.module[0].weight.isnan().any()


def edit_one(engine: Engine) -> None:
    with zeroexp.gathered(engine.module[0].weight, modify_rank=0), torch.no_grad():
        engine.module[0].weight.copy_(engine.module[0].weight)


def in_scope(engine: Engine) -> None:
    with engine.scope():
        pass


def optimizer_state(engine: Engine) -> None:
    found = engine.optimizer_state_dict(engine.optimizers[0])
    engine.load_optimizer_state_dict(engine.optimizers[0], found)


REFUSED: dict[str, tuple[str, Callable[[Engine], Any]]] = {
    "forward": ("params", lambda engine: engine(torch.ones(4, 48))),
    "forward of the module": ("params", lambda engine: engine.module(torch.ones(4, 48))),
    "forward of a part": ("params", lambda engine: engine.module[0](torch.ones(4, 48))),
    "scope": ("params", in_scope),
    "step": ("optim", lambda engine: engine.step()),
    "step with parameters away": ("params", lambda engine: engine.step()),
    "step of the optimizer": ("grads", lambda engine: engine.optimizers[0].step()),
    "backward": ("grads", lambda engine: engine.backward(engine(torch.ones(4, 48)).sum())),
    "bare backward": ("grads", lambda engine: engine(torch.ones(4, 48)).sum().backward()),
    "clip_norm": ("grads", lambda engine: engine.clip_norm(1.0)),
    "clip_value": ("grads", lambda engine: engine.clip_value(1.0)),
    "finish_gradients": ("grads", lambda engine: engine.finish_gradients()),
    "zero_grad": ("grads", lambda engine: engine.zero_grad()),
    "full_grad": ("grads", lambda engine: engine.full_grad(engine.model.params["0.weight"])),
}
RELOADS: dict[str, Callable[[Engine], Any]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "load_state_dict": lambda engine: engine.load_state_dict(engine.state_dict()),
    "optimizer_state": optimizer_state,
    "state_dict of the module": lambda engine: engine.module.state_dict(),
    "copy of the module": lambda engine: copy.deepcopy(engine.module),
    "gathered": read_one,
    "gathered to edit": edit_one,
}


def uses(stage: int, kind: str, folder: str) -> dict[str, Any]:
    """What each use says while state is away, and the losses that follow."""
    engine = small_engine(folder, stage=stage, kind=kind)
    found: dict[str, Any] = {"refused": {}}
    for name, (what, use) in REFUSED.items():
        with engine.offloaded(what, to="nvme"):
            found["refused"][name] = caught(use, engine)
        if stage == 0 and name == "bare backward":
            engine.zero_grad()
    for use in RELOADS.values():
        engine.offload_states(to="nvme")
        use(engine)
        engine.reload_states()
    with engine.offloaded("optim", "grads", to="nvme"), torch.no_grad():
        found["evaluated"] = float(engine(torch.ones(4, 48)).square().mean())
    found["nan"] = []
    with engine.offloaded("params"):
        params = list(engine.module.parameters())
        found["nan"] = [bool(p.isnan().all()) and p.shape.numel() > 0 for p in params]
    found["losses"] = [one_step(engine), one_step(engine)]
    engine.offload_states(to="nvme")
    engine.close()
    found["closed"] = caught(engine.offload_states)
    found["plain"] = float(engine.module(torch.ones(4, 48)).square().mean())
    return found


@pytest.mark.parametrize(("stage", "kind"), [(0, "none"), (2, "none"), (3, "cpu_params")])
def test_a_use_is_refused_or_reloads(ranks, tmp_path, stage, kind):
    def plain() -> Iterator[float]:
        torch.manual_seed(0)
        module = mlp(48, 48, 48)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        while True:
            optimizer.zero_grad()
            loss = module(torch.ones(4, 48)).square().mean()
            loss.backward()
            optimizer.step()
            yield float(loss.detach())

    training = plain()
    wanted = [next(training) for _ in range(4)]
    for found in ranks(2)(uses, stage, kind, str(tmp_path)):
        for name, (error, said) in found["refused"].items():
            assert (error, FIX in said) == ("ModelError", True), f"{name}: {error}: {said}"
        assert found["evaluated"] == pytest.approx(wanted[1], rel=1e-6)
        assert all(found["nan"])
        assert found["losses"] == pytest.approx(wanted[1:3], rel=1e-6)
        assert found["plain"] == pytest.approx(wanted[3], rel=1e-6)
        assert found["closed"][0] == "ModelError"
    assert len(set(wanted)) == 4


def in_use(folder: str) -> dict[str, tuple[str, str]]:
    engine = small_engine(folder)
    found = {}

    def park_inside(*_: Any) -> None:
        engine.offload_states()

    with engine.scope():
        found["scope"] = caught(engine.offload_states)
    handle = engine.module[1].register_forward_hook(park_inside)
    found["forward"] = caught(one_step, engine)
    handle.remove()
    x = torch.ones(4, 48, requires_grad=True)
    x.register_hook(park_inside)
    found["backward"] = caught(engine(x).sum().backward)
    found["after it"] = caught(engine.offload_states)
    engine.zero_grad()
    found["name"] = caught(engine.offload_states, ["weights"])
    found["no list"] = caught(engine.offload_states, "params")
    found["tier"] = caught(engine.offload_states, None, "disk")
    stale = engine(torch.ones(4, 48)).sum()
    with engine.offloaded("params", to="nvme"):
        pass
    found["old graph"] = caught(engine.backward, stale)
    return found


def test_state_in_use_stays(ranks, tmp_path):
    """Inside of a pass, and for a name that there is not; a graph of before finds no old values."""
    (found,) = ranks(1)(in_use, str(tmp_path))
    old, said = found.pop("old graph")
    assert old == "RuntimeError" and "modified by an inplace operation" in said
    assert {name: error for name, (error, _) in found.items()} == dict.fromkeys(found, "ModelError")
    assert "params, grads, optim" in found["name"][1] and "cpu and nvme" in found["tier"][1]


# -- files that fail -------------------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip(path: Path) -> None:
    """Change a byte of the first record, or change it back."""
    with open(path, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def failing(stage: int, folder: str) -> dict[str, Any]:
    def harmed(harm: bool) -> Engine:
        engine = small_engine(folder, stage=stage)
        if not harm:
            return engine
        held = engine.ledger.state_bytes()
        with largest_file(4096):
            found["write"] = caught(engine.offload_states, None, "nvme")
        found["unchanged"] = engine.ledger.state_bytes() == held
        found["left"] = [p.name for p in Path(folder).glob(f"*-rank{rank()}-parked")]
        one_step(engine)
        engine.offload_states(["optim"], to="nvme")
        (file,) = Path(folder).glob(f"*-rank{rank()}-parked/*.parked")
        flip(file)
        found["read"] = caught(engine.reload_states)
        found["again"] = caught(engine.reload_states)
        found["step"] = caught(engine.step)
        flip(file)
        engine.reload_states()
        found["back"] = engine.ledger.state_bytes() == held
        return engine

    found: dict[str, Any] = {}
    wanted, engine = harmed(False), harmed(True)
    one_step(wanted)
    for _ in range(2):
        one_step(wanted), one_step(engine)
    found["same"] = digest(wanted.state_dict()) == digest(engine.state_dict())
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_failing_file_loses_nothing(ranks, tmp_path, stage):
    """What cannot be written stays in memory; bytes that changed are no weights, and there again
    once they are right."""
    for found in ranks(2)(failing, stage, str(tmp_path)):
        assert found["write"][0] == "FileError" and "ulimit" in found["write"][1]
        assert found["unchanged"] and found["back"] and found["same"] and not found["left"]
        assert found["read"][0] == found["again"][0] == "SwapError"
        assert found["step"][0] == "ModelError" and FIX in found["step"][1]


class Counted(nn.Module):
    """A model with parameters that are no floats, and one that is unfrozen later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.last = nn.Linear(48, 48)
        self.shift = nn.Parameter(torch.arange(48), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()) + self.shift


def odd(stage: int, folder: str) -> list[dict[str, str]]:
    found = []
    for parks in (False, True):
        torch.manual_seed(0)
        module = Counted()
        module.first.requires_grad_(False)
        optimizer = torch.optim.AdamW([*module.first.parameters(), *module.last.parameters()])
        engine = Engine(module, optimizer, keys_of(Row(stage), folder))
        for step in range(4):
            if parks:
                with engine.offloaded(to="nvme"):
                    pass
            module.first.requires_grad_(step >= 2)
            with engine.offloaded("optim", to="nvme") if parks else engine.scope():
                loss = engine(torch.ones(4, 48)).square().mean()
            engine.backward(loss)
            engine.step()
        found.append(digest(engine.state_dict()))
        engine.close()
    return found


def test_frozen_and_whole_numbers(ranks, tmp_path):
    for stage in (0, 3):
        for without, parked in ranks(2)(odd, stage, str(tmp_path)):
            assert without == parked
