"""Parameters that other ranks of the pipe hold: here they have a shape and no values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NoReturn

from torch import nn

from zeroexp.comm import World
from zeroexp.errors import ModelError


class Elsewhere:
    """See :class:`zeroexp.zero.access.Owner`. ``name`` is the parameter's, ``rank`` a global rank
    that has it."""

    transferable = False
    sharded = False

    def __init__(self, name: str, rank: int, world: World) -> None:
        self._name, self._rank = name, rank
        self.world = world

    def give_up(self) -> NoReturn:
        self._refuse()

    def holders(self, param: nn.Parameter) -> NoReturn:
        self._refuse()

    def touch(self) -> None:
        """Nothing: models are walked for names and shapes."""

    def whole(self, *, edit: bool) -> AbstractContextManager[None]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ModelError(
            f"parameter {self._name} is in another stage of the pipeline: rank {self._rank} holds "
            "it. All parameters together are in engine.state_dict() and load_state_dict(), or in "
            "the module itself after engine.close()."
        )
