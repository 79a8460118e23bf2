"""Which tensors of a module the ranks of one data-parallel group hold, where a pipe of such groups
holds the module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The module is spread over a pipe of ``count`` ranks; this one is its rank ``index``.

    ``holders`` are the pipe's ranks that hold a parameter or buffer, ascending, by its first name
    in the module. A weight with several holders is tied: they give it one gradient.
    """

    count: int
    index: int
    holders: Mapping[str, tuple[int, ...]]

    def holds(self, name: str) -> bool:
        return self.index in self.holders[name]

    def is_tied(self, name: str) -> bool:
        """Whether other ranks of the pipe hold it too."""
        return self.holds(name) and len(self.holders[name]) > 1

    @property
    def tied(self) -> list[str]:
        """The names of all tied weights, in one order on every rank."""
        return sorted(name for name, held_by in self.holders.items() if len(held_by) > 1)

    def counts(self, name: str) -> bool:
        """Whether this rank speaks for it: of several holders the first one does."""
        return self.holders[name][0] == self.index
