"""Weights that several stages share, as an embedding and the head do: one gradient for all copies,
the same bits on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeroexp.errors import RankMismatch
from zeroexp.pipeline.runtime.channel import Channel


@dataclass(frozen=True)
class Tie:
    """``name`` in the whole model, the ``holders`` (ranks of the pipe, ascending) and this rank's
    copy."""

    name: str
    holders: tuple[int, ...]
    parameter: nn.Parameter


class Ties:
    """This rank's tied weights: ``parameters`` by name. Collective over the pipe.

    A weight whose stages are all on one rank needs no tie: there it is one parameter. Copies start
    as the first holder's. Raises :class:`RankMismatch` where they differ in shape, dtype or
    whether they are trained.
    """

    def __init__(self, channel: Channel, parameters: Mapping[str, nn.Parameter]) -> None:
        self._channel = channel
        mine = {
            name: [str(p.dtype), list(p.shape), p.requires_grad] for name, p in parameters.items()
        }
        notes = channel.exchange_notes(mine, "tied weights of the stages")
        # By name, so that ranks with several ties add them in the same order.
        self._tags = {name: tag for tag, name in enumerate(sorted(set().union(*notes)))}
        self.ties: list[Tie] = []
        for name in self._tags:
            holders = tuple(rank for rank, note in enumerate(notes) if name in note)
            first = notes[holders[0]][name]
            for rank in holders[1:]:
                if notes[rank][name] != first:
                    raise RankMismatch(
                        f"the tied weight {name} is {first} (dtype, shape, trained) on rank "
                        f"{channel.ranks[holders[0]]}, but {notes[rank][name]} on rank "
                        f"{channel.ranks[rank]}"
                    )
            if name in parameters and len(holders) > 1:
                self.ties.append(Tie(name, holders, parameters[name]))
        with torch.no_grad():
            for tie in self.ties:
                value = tie.parameter.detach().contiguous().clone()
                channel.copy_from_first(
                    tie.holders, value, self._tags[tie.name], f"tied weight {tie.name}"
                ).wait()
                tie.parameter.copy_(value)

    def counts_here(self, tie: Tie) -> bool:
        """Whether this rank counts the weight in a norm or a number of parameters: its first holder
        does."""
        return tie.holders[0] == self._channel.index

    def sum_grads(self) -> None:
        """Give every copy the sum of all copies' gradients. One that no copy has stays None."""
        started = []
        for tie in self.ties:
            parameter = tie.parameter
            if not parameter.requires_grad:
                continue
            # The last element counts who has a gradient, so that none and zero stay apart.
            flat = parameter.new_zeros(parameter.numel() + 1)
            if parameter.grad is not None:
                flat[:-1].copy_(parameter.grad.flatten())
                flat[-1] = 1
            what = f"gradient of the tied weight {tie.name}"
            pending = self._channel.sum_between(tie.holders, flat, self._tags[tie.name], what)
            started.append((parameter, flat, pending))
        for parameter, flat, pending in started:
            pending.wait()
            if not flat[-1]:
                continue
            total = flat[:-1].view_as(parameter)
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                parameter.grad.copy_(total)
