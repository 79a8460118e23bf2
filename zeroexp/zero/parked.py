"""State that leaves memory between two phases of a training (``engine.offload_states``), and comes
back as it was, in place. Nothing here is collective: each rank moves its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from zeroexp import ops
from zeroexp.config import Config
from zeroexp.errors import ModelError
from zeroexp.ledger import STATE_KINDS
from zeroexp.placement import Tier
from zeroexp.zero.access import ModuleHook
from zeroexp.zero.delayed import DelayedSteps
from zeroexp.zero.early import EarlyStep
from zeroexp.zero.home import MemoryHome
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.placeholder import Placeholders
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.shelf import FileShelf, HostShelf, Memory, Shelf, memories
from zeroexp.zero.stepper import Stepper

_NAMES = {"params": "the parameters", "grads": "the gradients", "optim": "the optimizer state"}
_TIERS = {"cpu": Tier.CPU, "nvme": Tier.NVME}


@dataclass
class _Kind:
    """One kind of state that is away."""

    tier: Tier
    away: list[Memory]
    shelf: Shelf


class Parked:
    """Which kinds of one engine's state are away (``params``, ``grads``, ``optim``, as the ledger
    has them). ``why_in_use`` says why no state can leave at this moment, if it cannot."""

    def __init__(
        self,
        model: ShardedModel,
        steppers: Sequence[Stepper],
        delayed: DelayedSteps,
        early: EarlyStep | None,
        config: Config,
        why_in_use: Callable[[], str],
    ) -> None:
        self._model = model
        self._around = model.around
        self._steppers = steppers
        self._delayed = delayed
        self._early = early
        self._config = config
        self._why_in_use = why_in_use
        self._kinds: dict[str, _Kind] = {}
        self._stand_ins: list[tuple[SegmentState, Placeholders]] = []
        self._handles: list[RemovableHandle] = []

    # -- leaving and coming back -------------------------------------------------------------------

    def park(self, include: Iterable[str] | None, to: str) -> tuple[str, ...]:
        """Move the kinds in ``include`` (all) to the tier ``to``: those that were not away before.

        What lies on that tier, or on a lower one, stays where it is. Raises ModelError for a name
        that there is not and where state is in use; FileError and ConfigError where bytes cannot
        be written, and then all these kinds are in memory.
        """
        tier, wanted = _chosen(include, to)
        self._refuse_in_use()
        fresh = tuple(kind for kind in wanted if kind not in self._kinds)
        moved = [k for k in wanted if k in fresh or self._kinds[k].tier is not tier]
        self.reload(moved)
        self._let_go()
        made: dict[str, _Kind] = {}
        try:
            for kind in moved:
                leaving = [m for m in self._memories(kind) if _leaves(m, tier)]
                made[kind] = _Kind(tier, leaving, self._shelf(leaving, tier))
        except BaseException:
            for kept in made.values():
                kept.shelf.close()
            raise
        for kind, kept in made.items():
            self._kinds[kind] = kept
            if kind == "params":
                self._hide()
            self._around.ledger.park(kind, tier)
            for memory in kept.away:
                memory.free()
        self._return_cached()
        return fresh

    def reload(self, kinds: Iterable[str] = STATE_KINDS) -> None:
        """Bring back those of ``kinds`` that are away. Raises FileError and SwapError: what is not
        back then stays away, and can be asked for again."""
        for kind in [k for k in kinds if k in self._kinds]:
            kept = self._kinds[kind]
            while kept.away:
                self._bring(kept.shelf, kept.away[-1])
                kept.away.pop()
            kept.shelf.close()
            del self._kinds[kind]
            self._around.ledger.unpark(kind)
            if kind == "params":
                self._show()

    def _refuse_in_use(self) -> None:
        reason = self._why_in_use()
        if reason:
            raise ModelError(f"state cannot be offloaded {reason}")
        if self._early is not None:
            self._early.refuse("state is offloaded")

    def _bring(self, shelf: Shelf, memory: Memory) -> None:
        memory.acquire()
        try:
            if memory.counts:
                shelf.bring(memory)
        except BaseException:  # what may be wrong is not kept
            memory.free()
            raise

    def _shelf(self, leaving: Sequence[Memory], tier: Tier) -> Shelf:
        kept = [memory for memory in leaving if memory.counts]
        around = self._around
        if tier is Tier.NVME and kept:
            return FileShelf(kept, around.border, self._config, around.world.rank)
        return HostShelf(kept, around.border)

    # -- what there is -----------------------------------------------------------------------------

    def _memories(self, kind: str) -> list[Memory]:
        if kind == "grads":
            return [
                memory
                for s in self._model.trainable_segments
                for memory in memories(s.grads.memory, counts=s.grads.holds_any)
            ]
        return memories(self._parameters() if kind == "params" else self._optimizer_state())

    def _parameters(self) -> Iterator[Tensor]:
        for segment in self._model.segments:
            if segment.home is None:
                yield segment.full
            elif segment.home.resident is not None:
                yield segment.home.resident

    def _optimizer_state(self) -> Iterator[Tensor]:
        for segment in self._model.trainable_segments:
            if segment.master_copy is not None and segment.master_copy.tensor is not None:
                yield segment.master_copy.tensor
        for stepper in self._steppers:
            for entry in stepper.face.state.values():
                yield from (v for v in entry.values() if _is_plain(v))
        yield from self._delayed.copies

    def _let_go(self) -> None:
        """Nobody uses the state, and buffers that hold nothing take no memory."""
        around = self._around
        self._delayed.wait()
        around.world.settle()
        for segment in self._model.segments:
            segment.forget_near()
            segment.grads.forget_buffers()
        around.pool.drop()
        around.spare.drop()
        if around.disk is not None:
            around.disk.drop_buffers()

    def _return_cached(self) -> None:
        if self._around.device.type == "cuda":
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
        ops.return_freed_memory()

    # -- parameters that are away ------------------------------------------------------------------

    def _hide(self) -> None:
        """Whoever reads a parameter now meets a NaN or an error, and no old value."""
        refuse = self._refuser("a forward", "params")
        for segment in self._model.segments:
            if isinstance(segment.home, MemoryHome):
                segment.home.refuse = refuse
            elif segment.home is None:
                shapes = [slot.spec.shape for slot in segment.spec.slots]
                stand_ins = Placeholders(shapes, segment.dtype, self._around.device)
                stand_ins.show(segment.params)
                self._stand_ins.append((segment, stand_ins))
                # Graphs made before read memory that is gone: autograd must refuse them.
                torch.autograd.graph.increment_version(segment.params)
        hook = ModuleHook(lambda *_: refuse())
        self._handles = [  # the root asks for them itself
            module.register_forward_pre_hook(hook, prepend=True)
            for module in self._model.module.modules()
            if module is not self._model.module
        ]

    def _show(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for segment in self._model.segments:
            if isinstance(segment.home, MemoryHome):
                segment.home.refuse = None
        stand_ins, self._stand_ins = self._stand_ins, []
        for segment, _ in stand_ins:
            segment.show_whole()
        for segment, placeholders in stand_ins:
            if segment.dtype.is_floating_point:
                placeholders.check([slot.spec.name for slot in segment.spec.slots])

    # -- uses --------------------------------------------------------------------------------------

    def need(self, what: str, *kinds: str) -> None:
        """Raise ModelError if ``what``, which needs ``kinds``, comes while one of them is away."""
        for kind in kinds:
            if kind in self._kinds:
                raise ModelError(
                    f"{what} needs {_NAMES[kind]}, which engine.offload_states() moved to "
                    f"{self._kinds[kind].tier.value}. Call engine.reload_states() first, or do it "
                    "after the block of `with engine.offloaded(…)`."
                )

    def _refuser(self, what: str, *kinds: str) -> Callable[[], None]:
        return lambda: self.need(what, *kinds)


def _chosen(include: Iterable[str] | None, to: str) -> tuple[Tier, list[str]]:
    names = list(STATE_KINDS if include is None else include)
    unknown = [name for name in names if name not in STATE_KINDS]
    if unknown or isinstance(include, str):
        raise ModelError(
            f"offload_states(include={include!r}): there are {', '.join(STATE_KINDS)}; pass a "
            "list of them, or None for all."
        )
    if to not in _TIERS:
        raise ModelError(f"offload_states(to={to!r}): there are {' and '.join(_TIERS)}.")
    return _TIERS[to], [kind for kind in STATE_KINDS if kind in names]


def _leaves(memory: Memory, tier: Tier) -> bool:
    """Whether ``memory`` is above ``tier``; on a machine whose device is its CPU the host's memory
    is where it is already."""
    return tier is Tier.NVME or memory.device.type != "cpu"


def _is_plain(value: object) -> bool:
    """Whether a state entry is memory worth moving: no number, none that is on disk, and no
    subclass, which may keep its values elsewhere."""
    return (
        type(value) is Tensor
        and value.dim() > 0
        and not value.is_meta
        and value.layout is torch.strided
    )
