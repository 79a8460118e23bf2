"""Which ranks share the experts, and which hold the same ones: arithmetic, no process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeroexp.errors import ConfigError, Problem


class ExpertRanks(NamedTuple):
    """Two partitions of the data-parallel ranks.

    ``expert``: each group holds all experts once and exchanges tokens. ``replicas``: each holds the
    same experts and reduces their gradients.
    """

    expert: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[int, ...], ...]


def expert_ranks(data: Sequence[int], size: int, *, near: str = "expert") -> ExpertRanks:
    """Cut the data-parallel ranks ``data`` into expert-parallel groups of ``size``.

    ``near`` says which groups are neighbours, so that they stay inside a node: ``expert`` (the
    all-to-all, in every layer) or ``replicas`` (the gradients of the experts, once a step). Raises
    :class:`ConfigError` when ``size`` does not divide the ranks.
    """
    ranks = len(data)
    problems = []
    if size < 1 or ranks % size:
        fits = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        problem = f"{size} does not divide the {ranks} data-parallel ranks."
        problems.append(Problem("moe.expert_parallel", problem, f"use {' or '.join(fits)}"))
    if near not in ExpertRanks._fields:
        problem = f"{near!r} is not known."
        problems.append(Problem("near", problem, f"use {' or '.join(ExpertRanks._fields)}"))
    if problems:
        raise ConfigError(problems)

    def blocks(n: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(data[i : i + n]) for i in range(0, ranks, n))

    def strides(n: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(data[i::n]) for i in range(n))

    if near == "expert":
        return ExpertRanks(blocks(size), strides(size))
    copies = ranks // size
    return ExpertRanks(strides(copies), blocks(copies))
