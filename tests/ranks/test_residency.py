"""How much is whole at stage 3, and in flight to its owners: numbers from the shapes alone.

ZeRO (arXiv:1910.02054, section 5.3) needs a layer whole only while it is used. Between forward
and backward of the root, its unit stays; with ``zero.prefetch`` p the next p units are whole as
well, and so is every unit whose module encloses the one that runs.
"""

from __future__ import annotations

import pytest
import torch
from formula import sizes
from small import settings
from torch import Tensor, nn

from zeroexp.engine import Engine

NUM_RANKS, WIDTH, NUM_BLOCKS = 2, 10, 6


class Tower(nn.Module):
    """Equal blocks between a stem and a head that belong to the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Gated(nn.Module):
    """A block with a parameter of its own around two layers of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class Nested(nn.Module):
    """Three levels of units with the cut ``leaf``: root, gated block, layer."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.gated = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offset
        for block in self.gated:
            x = block(x)
        return x


def peaks(
    kind: type[nn.Module], cut: str, choices: list[tuple[int, str]], overlap: bool = True
) -> list[int]:
    """The most bytes whole in a step, once the order of use is known."""
    found = []
    for prefetch, reshard in choices:
        torch.manual_seed(0)
        model = kind()
        engine = Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            settings(
                3,
                zero_prefetch=prefetch,
                zero_reshard_after_forward=reshard,
                zero_unit=cut,
                zero_overlap=overlap,
            ),
        )
        for _ in range(3):
            engine.ledger.reset_peaks()
            engine.backward(engine(torch.ones(2, WIDTH)).sum())
            engine.step()
        found.append(engine.ledger.peak_bytes("whole"))
        engine.close()
    return found


def nbytes(model: nn.Module, unit: str, cut: str = "block") -> int:
    return 4 * sizes(model, NUM_RANKS, cut, trainable=True, only=unit).padded


def test_what_is_whole_is_the_root_a_block_and_what_is_prefetched(ranks):
    """To the byte: root + block * (1 + prefetch); everything where nothing is released."""
    model = Tower()
    root, block = nbytes(model, ""), nbytes(model, "blocks.0")
    assert block > 0 and all(nbytes(model, f"blocks.{i}") == block for i in range(NUM_BLOCKS))
    choices = [(p, reshard) for p in (0, 1, 2) for reshard in ("auto", "true", "false")]
    wanted = [
        root + block * (NUM_BLOCKS if reshard == "false" else 1 + p) for p, reshard in choices
    ]
    for found in ranks(NUM_RANKS)(peaks, Tower, "block", choices):
        assert dict(zip(choices, found, strict=True)) == dict(zip(choices, wanted, strict=True))


def test_without_overlap_nothing_is_gathered_ahead(ranks):
    model = Tower()
    root, block = nbytes(model, ""), nbytes(model, "blocks.0")
    choices = [(p, "auto") for p in (0, 2)]
    for found in ranks(NUM_RANKS)(peaks, Tower, "block", choices, overlap=False):
        assert found == [root + block] * 2


def test_units_that_enclose_the_one_in_use_are_whole_too(ranks):
    """The largest, over the order of use, of a unit, those around it and the ``prefetch`` next."""
    model = Nested()
    size = {"": nbytes(model, "", "leaf")}
    for i in range(3):
        for name in (f"gated.{i}", f"gated.{i}.up", f"gated.{i}.down"):
            size[name] = nbytes(model, name, "leaf")
    forward = list(size)
    backward = [""]  # a unit's own parameters are used around those of the layers in it
    for i in (2, 1, 0):
        backward += [f"gated.{i}", f"gated.{i}.down", f"gated.{i}.up"]

    def most(prefetch: int) -> int:
        def around(name: str) -> set[str]:
            return {u for u in size if u == "" or name == u or name.startswith(u + ".")}

        return max(
            sum(size[u] for u in around(name) | set(order[at + 1 : at + 1 + prefetch]))
            for order in (forward, backward)
            for at, name in enumerate(order)
        )

    choices = [(p, "auto") for p in (0, 1, 2)]
    wanted = [most(p) for p, _ in choices]
    assert sorted(set(wanted)) == wanted  # each depth of prefetch shows
    for found in ranks(NUM_RANKS)(peaks, Nested, "leaf", choices):
        assert found == wanted


def in_transit(stage: int, overlap: bool, counts: tuple[int, ...]) -> list[int]:
    """The most bytes of workspace in a step of models with ``counts`` equal units."""
    found = []
    for count in counts:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))
        engine = Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            settings(stage, zero_overlap=overlap, zero_reduce="each"),
        )
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 32)).sum())
            engine.step()
        found.append(engine.ledger.peak_bytes("workspace"))
        engine.close()
    return found


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_transit_do_not_grow_with_the_model(ranks, stage, overlap):
    """Sharded gradients are reduced as they come: 12 units need the room that 6 need, which is
    that of two in reduction (each with what arrives from the peer) and one that is filled."""
    one = 4 * sizes(nn.Sequential(nn.Linear(32, 32)), NUM_RANKS, trainable=True).padded
    for six, twelve in ranks(NUM_RANKS)(in_transit, stage, overlap, (6, 12)):
        assert six == twelve
        assert one <= six <= 3 * one + 2 * one * (NUM_RANKS - 1) // NUM_RANKS
