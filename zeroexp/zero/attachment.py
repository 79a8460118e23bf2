"""Everything an engine puts on the user's module, and its removal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from zeroexp.zero.access import Guards, ModuleHook, Owner
from zeroexp.zero.elsewhere import Elsewhere
from zeroexp.zero.hooks import Hooks
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.owner import EngineOwner
from zeroexp.zero.registry import forget, register
from zeroexp.zero.residency import Residency
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.unit import UnitState


class Attachment:
    """Hooks that gather and reduce, guards on parameter access, and who owns which parameter."""

    def __init__(
        self,
        model: ShardedModel,
        residency: Residency,
        hooks: Hooks,
        root: UnitState | None,
        forward_begins: Callable[[], None],
    ) -> None:
        self._model = model
        self._hooks = hooks
        self._handed_over = False
        self._guards = Guards(on_remove=self._removed)
        self._owners = {id(u): EngineOwner(u, model, residency) for u in model.units}
        hooks.attach_root(model.module, root, forward_begins)
        for unit in model.units:
            if unit.transient and unit is not root:
                hooks.attach_unit(unit)
        self.follow(model.trainable_segments)
        for param in model.params.values():
            register(param, self._owner_of(param))
        others = self._owners_elsewhere()
        for param in model.elsewhere.values():
            register(param, others[id(param)])
        for module in model.module.modules():
            table: dict[str, Owner] = {
                name: others.get(id(p)) or self._owner_of(p)
                for name, p in dict.items(module._parameters)
                if p is not None
            }
            if table:
                self._guards.install(module, table)
        for unit in model.units:
            if unit.transient:
                owner = self._owners[id(unit)]
                self._guards.keep(
                    unit.module.register_state_dict_pre_hook(ModuleHook(owner.open)),
                    unit.module._register_state_dict_hook(ModuleHook(owner.shut)),
                )

    def _owners_elsewhere(self) -> dict[int, Elsewhere]:
        model, world = self._model, self._model.around.world
        if model.part is None:
            return {}
        first = {n: world.pipe.ranks[held_by[0]] for n, held_by in model.part.holders.items()}
        return {id(p): Elsewhere(n, first[n], world) for n, p in model.elsewhere.items()}

    def _owner_of(self, param: nn.Parameter) -> EngineOwner:
        return self._owners[id(self._model.place[id(param)][0])]

    def follow(self, segments: Sequence[SegmentState]) -> None:
        """Take the gradients of ``segments`` from autograd."""
        for segment in segments:
            unit = self._model.place[id(segment.params[0])][0]
            for slot in range(len(segment.params)):
                self._hooks.attach_parameter(unit, segment, slot)

    def hand_over(self) -> None:
        """Leave the module as it is, sharded and working, for the next engine to take over."""
        for owner in self._owners.values():
            owner.transferable = True
        self._handed_over = True
        # A module that nobody takes over must not leave the threads of its groups behind.
        weakref.finalize(self._model.module, self._model.around.world.close)

    def remove(self) -> None:
        """Make the module plain again."""
        self._guards.remove()

    def _removed(self) -> None:
        self._hooks.detach()
        for param in (*self._model.params.values(), *self._model.elsewhere.values()):
            forget(param)
        if self._handed_over:
            self._model.around.world.close()
