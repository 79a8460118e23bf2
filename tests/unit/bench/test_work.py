"""The work is what the tables say it is, and bytes are counted once."""

from __future__ import annotations

import importlib.util
import mmap

import pytest
import torch

from benchmarks import memory
from benchmarks.modes import MODES
from benchmarks.work import WORKS


@pytest.mark.parametrize("name", list(WORKS))
def test_parameters_are_as_many_as_written(name: str) -> None:
    with torch.device("meta"):
        model = WORKS[name].build()
    assert sum(p.numel() for p in model.parameters()) == WORKS[name].num_params
    blocks = model.blocks
    assert isinstance(blocks, torch.nn.ModuleList)
    assert len(blocks) == WORKS[name].num_blocks


@pytest.mark.parametrize("name", ["gpt-tiny", "mlp-tiny"])
def test_every_process_builds_the_same_model_and_every_batch_is_its_own(name: str) -> None:
    work = WORKS[name]
    first, second = work.model(), work.model()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert all(map(torch.equal, work.batch(1, 2), work.batch(1, 2)))
    seen = [work.batch(rank, step)[0] for rank in range(2) for step in range(3)]
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_gpt_is_causal() -> None:
    """A change of the last token changes no earlier prediction: the mean loss moves only by what
    the last position adds."""
    work = WORKS["gpt-tiny"]
    model = work.model()
    tokens, targets = work.batch(0, 0)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    ignored = targets.clone()
    ignored[:, -1] = -100  # cross_entropy's default for "do not count"
    assert model(tokens, ignored).item() == model(changed, ignored).item()
    assert model(tokens, targets).item() != model(changed, targets).item()


def test_storages_count_once() -> None:
    base = torch.zeros(100)
    assert memory.unique_bytes([base, base[10:20], base.view(10, 10)]) == 400
    assert memory.unique_bytes([base, torch.zeros(1, dtype=torch.float64)]) == 408
    assert memory.unique_bytes([torch.zeros(0)]) == 0


def test_live_tensors_are_counted_when_resident() -> None:
    before = memory.live_tensor_bytes()
    touched = torch.ones(1 << 20)
    # 16 MiB that no page backs yet: a mapping of its own, since malloc may hand out used pages.
    untouched = torch.frombuffer(mmap.mmap(-1, 1 << 24), dtype=torch.float32)
    grown = memory.live_tensor_bytes() - before
    assert touched.nbytes <= grown < touched.nbytes + untouched.nbytes // 4


def test_every_mode_has_a_file() -> None:
    for mode in MODES.values():
        assert importlib.util.find_spec(mode.module) is not None, mode.name
