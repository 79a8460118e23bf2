"""Bytes per tier, bytes between the tiers and bytes of files: formulas, ledger and census agree.

ZeRO-Offload (arXiv:2101.06840, section 4) keeps parameters alone on the device and moves 2M bytes
of gradients down and 2M bytes of parameters up, M being the number of parameters in 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from census import bytes_since, live_storages
from formula import sizes, state_bytes
from offload_lab import TIERS, offloaded
from small import STAGES, micro_batches, mlp, tiny_gpt, token_batches
from torch import nn

from zeroexp.engine import Engine
from zeroexp.tiers.file import File
from zeroexp.tiers.ring import SlotState

KINDS = {
    **TIERS,
    "params_alone": ("device", "cpu"),
    "params_alone_nvme": ("device", "nvme"),
    "crossed": ("nvme", "cpu"),
    "crossed_nvme": ("cpu", "nvme"),
}
"""Tiers of optimizer state and parameters."""

BLOCK = 4096
WIDTHS = (40, 160, 120, 3)


def keys_of(kind: str, stage: int, folder: str, **keys: Any) -> dict[str, Any]:
    optim, params = KINDS[kind]
    keys = {"offload_step_in_backward": "false", **keys}
    return offloaded(stage, folder, offload_optim=optim, offload_params=params, **keys)


# -- state -----------------------------------------------------------------------------------------


def held(kind: str, stage: int, folder: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Count in the middle of the second step, as :mod:`test_state_bytes` does."""
    batches = [next(iter(micro_batches(batch, 1))) for batch in token_batches(2, 4)]
    before = live_storages()
    model = tiny_gpt()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = Engine(
        model, torch.optim.AdamW(trained, lr=1e-2), keys_of(kind, stage, folder, **keys)
    )
    found: dict[str, Any] = {}
    for step, batch in enumerate(batches):
        engine.backward(engine(*batch))
        if step == 1:
            ledger = engine.ledger
            found["state"], found["padding"] = ledger.state_bytes(), ledger.padding_bytes()
            _touch_all_slots(engine)
            transient = ledger.live_bytes("whole") + ledger.live_bytes("workspace")
            found["in memory"] = bytes_since(before) - transient
        engine.step()
    found["between"] = bytes_since(before) - sum(
        engine.ledger.live_bytes(k) for k in ("whole", "workspace")
    )
    engine.close()
    return found


def _touch_all_slots(engine: Engine) -> None:
    """Host memory that was never written is not there yet, and the census does not find it."""
    for ring in engine.disk.rings if engine.disk is not None else ():
        for slot in ring._slots:
            if slot.state is SlotState.FREE:
                slot.memory.zero_()


def wanted_state(
    model: nn.Module, kind: str, stage: int, num_ranks: int, param: int, grad: int
) -> tuple[dict[str, dict[str, int]], int]:
    """Bytes per kind and tier, and the padding of all ranks together."""
    optim, params = KINDS[kind]
    # A master copy where parameters are narrow, on another tier, or in the records of a file.
    copy = param == 2 or optim != params or optim == "nvme"
    base = state_bytes(
        model, stage, num_ranks, param_size=param, grad_size=grad, optim_size=8 + 4 * copy
    )
    grads = "device"
    if stage >= 2 and optim != "device":
        grads = "nvme" if optim == params == "nvme" else "cpu"
    out = {k: dict.fromkeys(("device", "cpu", "nvme"), 0) for k in ("params", "grads", "optim")}
    out["params"][params] = base.params
    out["grads"][grads] = base.grads
    out["optim"][optim] = base.optim
    return out, num_ranks * base.total - round(num_ranks * base.ideal)


PRECISIONS = [({}, 4, 4), ({"compute": "bf16", "precision_accumulate": "bf16"}, 2, 2)]
"""Keys, and bytes per parameter and gradient."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [*TIERS][1:])
def test_state_per_tier(ranks, tmp_path, kind, stage):
    check_state(ranks, tmp_path, kind, stage, 2 - (stage == 1), PRECISIONS[stage % 2 :][:1])


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [*KINDS])
def test_state_per_tier_everywhere(ranks, tmp_path, kind, stage, num_ranks):
    check_state(ranks, tmp_path, kind, stage, num_ranks, PRECISIONS)


def check_state(
    ranks: Any,
    tmp_path: Path,
    kind: str,
    stage: int,
    num_ranks: int,
    precisions: list[tuple[dict[str, Any], int, int]],
) -> None:
    """What is on disk is in no storage, what is in memory is there once."""
    for keys, param, grad in precisions:
        wanted, padding = wanted_state(tiny_gpt(), kind, stage, num_ranks, param, grad)
        total = sum(sum(t.values()) for t in wanted.values())
        on_disk = sum(t["nvme"] for t in wanted.values())
        results = ranks(num_ranks)(held, kind, stage, str(tmp_path), keys)
        for rank, found in enumerate(results):
            assert found["state"] == wanted, f"rank {rank}"
            assert found["in memory"] == total - on_disk, f"rank {rank}"
            assert found["between"] <= total - on_disk, f"rank {rank}"
        assert sum(found["padding"] for found in results) == padding


@pytest.mark.parametrize("stage", STAGES)
def test_the_device_holds_what_the_papers_say(stage):
    """Without padding: 4M bytes replicated, 2M where gradients leave (ZeRO-Offload, table 1), and
    a share of the ranks at stage 3; nothing but whole gradients when parameters leave as well."""
    model, num_ranks = nn.Sequential(nn.Linear(32, 32, bias=False)), 2
    m = 32 * 32
    for kind, row in {
        "cpu": (4 * m, 4 * m, 2 * m, m),
        "nvme": (4 * m, 4 * m, 2 * m, m),
        "cpu_params": (2 * m, 2 * m, 0, 0),
        "nvme_params": (2 * m, 2 * m, 0, 0),
    }.items():
        wanted, padding = wanted_state(model, kind, stage, num_ranks, 2, 2)
        assert sum(t["device"] for t in wanted.values()) == row[stage]
        assert padding == 0


# -- traffic ---------------------------------------------------------------------------------------


@contextmanager
def counted_files() -> Iterator[Counter[str]]:
    """Bytes that files are asked to read and write, counted around the engine of files."""
    found: Counter[str] = Counter()
    read, write = File.submit_read, File.submit_write

    def reading(self: File, memory: torch.Tensor, offset: int) -> Any:
        found["read"] += memory.numel() * memory.element_size()
        return read(self, memory, offset)

    def writing(self: File, memory: torch.Tensor, offset: int) -> Any:
        found["written"] += memory.numel() * memory.element_size()
        return write(self, memory, offset)

    File.submit_read, File.submit_write = reading, writing  # type: ignore[method-assign]
    try:
        yield found
    finally:
        File.submit_read, File.submit_write = read, write  # type: ignore[method-assign]


def moved(
    kind: str, stage: int, folder: str, micro: int, keys: dict[str, Any]
) -> dict[str, dict[str, int]]:
    """What the third step moves."""
    model = mlp(*WIDTHS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(model, optimizer, keys_of(kind, stage, folder, accumulate=micro, **keys))
    x = torch.ones(4, WIDTHS[0])
    for step in range(3):
        before = engine.disk.traffic.total if engine.disk is not None else None
        with counted_files() as files:
            for _ in range(micro):
                engine.backward(engine(x).square().mean())
            engine.step()
            if engine.disk is not None:
                engine.disk.flush()
        if step < 2:
            continue
        found = {"tiers": engine.ledger.transfer_bytes_per_step(), "files": dict(files)}
        if before is not None:
            now = engine.disk.traffic.total
            found["traffic"] = {
                "read": now.read - before.read,
                "written": now.written - before.written,
            }
    engine.close()
    return found


def wanted_transfers(
    kind: str, stage: int, num_ranks: int, micro: int, param: int, grad: int
) -> dict[str, int]:
    """Down and up per rank and step; parameters that leave come up for each of their two uses."""
    optim, params = KINDS[kind]
    size = sizes(mlp(*WIDTHS), num_ranks, trainable=True).padded
    stepped = size // num_ranks if stage >= 1 else size
    shown = size // num_ranks if stage == 3 else size
    down = up = 0
    if optim != "device":
        down += stepped * grad * (micro if stage >= 2 else 1)
        up += stepped * param if params == "device" else 0
    if params != "device":
        up += 2 * micro * shown * param
        down += stepped * param if optim == "device" else 0
    return {way: n for way, n in (("down", down), ("up", up)) if n}


def wanted_files(
    kind: str, stage: int, num_ranks: int, micro: int, param: int, grad: int
) -> dict[str, int]:
    """Read and written per rank and step."""
    optim, params = KINDS[kind]
    read = written = 0
    for name in ("0", "2", "4"):
        size = sizes(mlp(*WIDTHS), num_ranks, trainable=True, only=name).padded
        stepped = size // num_ranks if stage >= 1 else size
        shown = size // num_ranks if stage == 3 else size
        if optim == "nvme":  # master, m and v in records of 4096 elements, in whole blocks
            for start in range(0, stepped, 4096):
                columns = 3 * -(-min(4096, stepped - start) * 4 // 64) * 64
                record = -(-columns // BLOCK) * BLOCK
                read, written = read + record, written + record
        if params == "nvme":
            read += 2 * micro * shown * param
            written += shown * param
        if optim == params == "nvme" and stage >= 2:  # gradients: one sum per micro-batch
            read += micro * stepped * grad
            written += micro * stepped * grad
    return {way: n for way, n in (("read", read), ("written", written)) if n}


HALF = {"compute": "bf16", "precision_accumulate": "bf16"}


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_that_move_in_a_step(ranks, tmp_path, stage):
    """fp32 on one rank, and 16 bits for parameters and gradients on two."""
    kinds = list(KINDS)
    check_moves(ranks, tmp_path, kinds[1 + stage :: 2], stage, 1, [(1, {}, 4)])
    check_moves(ranks, tmp_path, kinds[1:5], stage, 2, [(3, HALF, 2)])


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_that_move_in_a_step_everywhere(ranks, tmp_path, stage, num_ranks):
    check_moves(ranks, tmp_path, list(KINDS), stage, num_ranks, [(1, {}, 4), (3, HALF, 2)])


def check_moves(
    ranks: Any,
    tmp_path: Path,
    kinds: list[str],
    stage: int,
    num_ranks: int,
    precisions: list[tuple[int, dict[str, Any], int]],
) -> None:
    """Parameters whole for one use at a time (reshard_after_forward=true), so that formulas are
    short."""
    for kind in kinds:
        for micro, keys, size in precisions:
            keys = {**keys, "zero_reshard_after_forward": "true"}
            tiers = wanted_transfers(kind, stage, num_ranks, micro, size, size)
            files = wanted_files(kind, stage, num_ranks, micro, size, size)
            results = ranks(num_ranks)(moved, kind, stage, str(tmp_path), micro, keys)
            for rank, found in enumerate(results):
                where = f"{kind}, {micro} micro-batches, rank {rank}"
                assert found["tiers"] == tiers, where
                assert found["files"] == files, where
                if "traffic" in found:
                    assert {k: n for k, n in found["traffic"].items() if n} == files, where


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_moves_2m_down_and_2m_up(stage):
    """Over all ranks of a replica; at stage 0 each rank steps everything."""
    size = sizes(mlp(*WIDTHS), 2, trainable=True).padded
    per_rank = wanted_transfers("cpu", stage, 2, 1, 2, 2)
    ranks_that_share = 2 if stage else 1
    assert per_rank["down"] * ranks_that_share == 2 * size
    assert per_rank["up"] * ranks_that_share == 2 * size
