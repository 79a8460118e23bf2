"""The names of a whole model, also where a rank has shares of it only, and what stands for them
here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from zeroexp.layout import Share
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.shares import raw_tensors
from zeroexp.zero.stepper import Stepper


@dataclass(frozen=True)
class Entry:
    """A tensor of the whole model. ``tensor`` is this rank's: of its share, if it has a share.

    Where each share has a name of its own ``index`` is the share that is meant; ``tensor`` then
    stands in the same place of another share.
    """

    name: str
    tensor: Tensor
    share: Share | None = None
    index: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The same for all names of one tensor."""
        return id(self.tensor), self.index

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.tensor.shape)
        return self.share.whole(shape) if self.share is not None else shape

    def share_of(self, whole: Tensor, index: int) -> Tensor | None:
        """What share ``index`` has of ``whole``; None: nothing."""
        if self.share is None:
            return whole
        if self.share.ends:
            return whole if index == self.index else None
        return whole.tensor_split(self.share.count)[index]


def expanded(named: Iterable[tuple[str, Tensor]], shares: Mapping[int, Share]) -> Iterator[Entry]:
    """The entries of the whole model for the tensors of this rank, in the order that they have
    where one rank holds all: what shares name apart follows share by share."""

    def run(item: tuple[str, Tensor]) -> str | int:
        share = shares.get(id(item[1]))
        return share.prefix(item[0]) if share is not None and share.ends else id(item[1])

    for _, items in groupby(named, run):
        together = list(items)
        share = shares.get(id(together[0][1]))
        for index in range(share.count if share is not None and share.ends else 1):
            for name, tensor in together:
                mine = shares.get(id(tensor))
                called = mine.name(name, index) if mine is not None else name
                yield Entry(called, tensor, mine, index)


def entries(model: ShardedModel) -> list[Entry]:
    """In the order of ``module.state_dict()`` of the whole module, without asking for values."""
    return list(expanded(raw_tensors(model.module, saved=True), model.shares))


def optimizer_entries(model: ShardedModel, stepper: Stepper) -> list[list[Entry]]:
    """The parameters of each group of an optimizer over the whole model, in its order."""
    names = {id(p): n for n, p in (*model.params.items(), *model.elsewhere.items())}
    return [
        list(expanded(((names.get(id(p), ""), p) for p in group["params"]), model.shares))
        for group in stepper.optimizer.param_groups
    ]


def key_of(model: ShardedModel, param: nn.Parameter, index: int) -> tuple[int, int]:
    """The entry that has share ``index`` of ``param``."""
    share = model.shares.get(id(param))
    return id(param), index if share is not None and share.ends else 0
