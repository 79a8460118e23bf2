"""The engine on an accelerator: ready to run where there is one, skipped elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from zeroexp.engine import Engine
from zeroexp.optim.adagrad import Adagrad
from zeroexp.optim.adamw import AdamW
from zeroexp.optim.lion import Lion
from zeroexp.optim.sgd import SGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        out: Tensor = self.head(x)
        return out


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().cuda()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def batches(num_ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (STEPS, 4 * num_ranks, 8), generator=generator).cuda()


def loss_of(net: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).float().flatten(0, 1), tokens.flatten())


def reference(num_ranks: int) -> dict[str, Tensor]:
    net, optimizer = build()
    for tokens in batches(num_ranks):
        optimizer.zero_grad()
        loss_of(net, tokens).backward()
        optimizer.step()
    return {k: v.cpu() for k, v in net.state_dict().items()}


def sharded(stage: int, compute: str = "fp32", **offload: Any) -> tuple[dict[str, Tensor], Engine]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    net, optimizer = build()
    engine = Engine(
        net,
        optimizer,
        {
            "zero": {"stage": stage},
            "precision": {"compute": compute},
            "offload": offload,
            "trainer": {"gradient_clip_val": None, "devices": num_ranks},
        },
    )
    for tokens in batches(num_ranks):
        engine.backward(loss_of(engine, tokens[rank * 4 : rank * 4 + 4]))
        engine.step()
    return engine.state_dict(), engine


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_device_equals_plain_torch(stage: int) -> None:
    found, engine = sharded(stage)
    wanted = reference(1)
    assert all(torch.allclose(found[k], wanted[k], atol=1e-6) for k in wanted)
    assert engine.device.type == "cuda"


def test_bf16_keeps_a_master_copy() -> None:
    _, engine = sharded(3, "bf16")
    assert {s.master.dtype for s in engine.model.trainable_segments} == {torch.float32}
    assert engine.ledger.state_bytes()["params"]["device"] == sum(
        2 * s.spec.size for s in engine.model.segments
    )


KINDS = ("cpu", "nvme", "cpu_params", "nvme_params")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tiers_equal_the_device(tmp_path: Path, kind: str, stage: int, compute: str) -> None:
    """SGD does the same operations on both sides of the border."""
    wanted, _ = sharded(stage, compute)
    nvme = {"nvme": {"dir": str(tmp_path)}} if "nvme" in kind else {}
    found, engine = sharded(stage, compute, kind=kind, **nvme)
    assert all(torch.allclose(found[k], wanted[k], atol=1e-6) for k in wanted)
    held = engine.ledger.state_bytes()
    assert held["optim"]["device"] == 0
    assert (held["params"]["device"] == 0) == kind.endswith("params")
    assert {
        s.master.device.type for s in engine.model.trainable_segments if s.master is not None
    } <= {"cpu"}


def test_a_delayed_update_goes_on_beside_the_device() -> None:
    immediate, _ = sharded(3, kind="cpu")
    delayed, _ = sharded(3, kind="cpu", delayed_update=True)
    assert any(not torch.equal(delayed[k], immediate[k]) for k in immediate)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["none", "cpu", "cpu_params"])
@pytest.mark.parametrize("to", ["cpu", "nvme"])
def test_state_leaves_and_comes_back(
    tmp_path: Path, to: str, kind: str, stage: int, compute: str
) -> None:
    """The device's memory falls by what the ledger has there; training goes on bit by bit."""

    def run(parks: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        engine = Engine(
            net,
            optimizer,
            {
                "zero": {"stage": stage},
                "precision": {"compute": compute},
                "offload": {"kind": kind, "nvme": {"dir": str(tmp_path)}},
                "trainer": {"gradient_clip_val": None},
            },
        )
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(4, 512, device="cuda")).float().square().mean()
            engine.backward(loss)
            losses.append(loss.detach().cpu())
            del loss
            engine.step()
            if parks:
                held = engine.ledger.state_bytes()
                on_device = sum(tiers["device"] for tiers in held.values())
                before = torch.cuda.memory_allocated()
                engine.offload_states(to=to)
                assert before - torch.cuda.memory_allocated() >= on_device
                assert all(t["device"] == 0 for t in engine.ledger.state_bytes().values())
                engine.reload_states()
                assert engine.ledger.state_bytes() == held
        found = engine.state_dict()
        engine.close()
        return found, losses

    (wanted, losses), (found, parked) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(losses, parked, strict=True))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def _rank(rank: int, num_ranks: int, stage: int, port: int, kind: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks)
    nvme = {"nvme": {"dir": folder}} if "nvme" in kind else {}
    found, _ = sharded(stage, kind=kind, **nvme)
    if rank == 0:
        wanted = reference(num_ranks)
        assert all(torch.allclose(found[k], wanted[k], atol=1e-5) for k in wanted)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["none", *KINDS])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_devices_equal_the_global_batch(tmp_path: Path, stage: int, kind: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(2, stage, port, kind, str(tmp_path)), nprocs=2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AdamW, {}),
        (SGD, {"momentum": 0.9}),
        (Adagrad, {}),
        (Lion, {}),
    ],
)
def test_optimizers_step_on_the_device_as_on_the_host(make: Any, options: dict[str, Any]) -> None:
    """fp32 with scaled gradients and a bf16 copy-out, three steps: the host's but for rounding."""
    generator = torch.Generator().manual_seed(2)
    start, grads = torch.randn(257, generator=generator), torch.randn(3, 257, generator=generator)
    stepped = []
    for device in ("cpu", "cuda"):
        p = start.to(device, copy=True)
        low = torch.zeros(257, dtype=torch.bfloat16, device=device)
        optimizer = make([p], lr=0.01, weight_decay=0.1, **options)
        optimizer.grad_scale, optimizer.copy_out = 0.5, {p: low}
        for grad in grads:
            p.grad = grad.to(device)
            optimizer.step()
        stepped.append(p.cpu())
        assert torch.equal(low, p.bfloat16())
    torch.testing.assert_close(stepped[1], stepped[0], rtol=1e-5, atol=1e-6)
