"""Models whose parameters are born sharded: a model that does not fit one rank can still be built.

The model's own constructors run as they are, with real memory and the random numbers they always
draw. As soon as a repeated block (an element of a ``ModuleList`` or ``Sequential``) is complete,
each rank keeps its slice. Initialisation that runs later over the finished model finds each block
whole again when it touches it, one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from zeroexp import ops
from zeroexp.comm import Group, World
from zeroexp.comm.pool import flat_zeros
from zeroexp.config import Config
from zeroexp.layout import ParamSpec, Segment, Share, make_unit
from zeroexp.ledger import Ledger
from zeroexp.placement import STAGES
from zeroexp.zero.access import GuardedParameters, Guards
from zeroexp.zero.birthplace import Birthplace
from zeroexp.zero.home import Home
from zeroexp.zero.placeholder import Placeholders
from zeroexp.zero.registry import register
from zeroexp.zero.shares import Spread, raw_parameters, shares_of


class _Part:
    """The parameters of one dtype in a block: a shard, and for a while the whole."""

    def __init__(
        self, segment: Segment, params: Sequence[nn.Parameter], session: Session, tag: int
    ) -> None:
        world = session.world
        self._segment, self._params, self._tag = segment, list(params), tag
        first = params[0]
        self._dtype, self._device = first.dtype, first.device
        self._sharing = world.sharing(segment.spread)
        lo, hi = segment.bounds(self._sharing.gather.index)
        self._own = slice(lo, hi)
        self._birthplace = session.birthplace
        self._home: Home | None = session.birthplace.home(hi - lo, first.dtype, first.device)
        self._placeholders = Placeholders(
            [s.spec.shape for s in segment.slots], first.dtype, first.device
        )
        flat = flat_zeros(segment.size, first.dtype, first.device)
        for param, view in zip(self._params, self._views(flat), strict=True):
            view.copy_(param.data)
        self._keep(flat)

    def _whole(self) -> Tensor:
        return flat_zeros(self._segment.size, self._dtype, self._device)

    def give_up(self) -> None:
        if self._home is not None:
            self._birthplace.free(self._home)
            self._home = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[s.offset : s.stop].view(s.spec.shape) for s in self._segment.slots]

    def _keep(self, flat: Tensor) -> None:
        """Rank 0's values count (of a share, its first holder's); keep this rank's slice."""
        self._sharing.members.broadcast(
            flat, source=0, tag=self._tag, what="initial values of a sharded block"
        ).wait()
        assert self._home is not None
        self._home.write(flat[self._own])
        self._placeholders.show(self._params)

    def open(self) -> None:
        self._placeholders.check([s.spec.name for s in self._segment.slots])
        assert self._home is not None
        flat, gather = self._whole(), self._sharing.gather
        gather.all_gather(
            flat, self._home.fetch(), tag=self._tag, what="all-gather of a block under construction"
        ).wait()
        if self._home.resident is None:  # the visitor leaves when the peers have it, too
            gather.settle(self._tag)
            self._home.put_back()
        for param, view in zip(self._params, self._views(flat), strict=True):
            param.data = view

    def close(self, edit: bool) -> None:
        if not edit:
            self._placeholders.show(self._params)
            return
        flat = self._whole()
        for param, view in zip(self._params, self._views(flat), strict=True):
            view.copy_(param.data)
        self._keep(flat)


class BornUnit:
    """One block under construction. See :class:`zeroexp.zero.access.Owner`."""

    transferable = True
    sharded = True

    def __init__(
        self,
        session: Session,
        named: Mapping[str, nn.Parameter],
        shares: Mapping[int, Share],
        number: int,
    ) -> None:
        self._session = session
        self._depth = 0
        specs = [
            ParamSpec(
                name,
                tuple(p.shape),
                str(p.dtype).removeprefix("torch."),
                spread=shares[id(p)].count if id(p) in shares else 1,
            )
            for name, p in named.items()
        ]
        unit = make_unit(f"block {number}", specs, session.world.sharing().gather.size)
        self._spreads = {id(named[spec.name]): spec.spread for spec in specs}
        self._parts = [
            _Part(s, [named[slot.spec.name] for slot in s.slots], session, 1 + k)
            for k, s in enumerate(unit.segments)
        ]

    @property
    def world(self) -> World:
        return self._session.world

    def holders(self, param: nn.Parameter) -> Group:
        return self.world.sharing(self._spreads[id(param)]).members

    def give_up(self) -> None:
        for part in self._parts:
            part.give_up()

    def touch(self) -> None:
        self._session.visit(self)

    @contextmanager
    def whole(self, *, edit: bool) -> Iterator[None]:
        self.open()
        try:
            yield
        finally:
            self.close(edit)

    def open(self) -> None:
        self._depth += 1
        if self._depth == 1:
            for part in self._parts:
                part.open()

    def close(self, edit: bool) -> None:
        self._depth -= 1
        if self._depth == 0:
            for part in self._parts:
                part.close(edit)


class Session:
    """One ``with sharded_init`` block: shards what is finished, keeps at most one block whole."""

    def __init__(self, world: World, birthplace: Birthplace) -> None:
        self.world = world
        self.birthplace = birthplace
        self.active = True
        self._visited: BornUnit | None = None
        self._guards = Guards(on_remove=self._close)
        self._num_units = 0

    def _close(self) -> None:
        self.world.close()
        self.birthplace.close()

    def registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """torch's hook: ``module`` becomes a child of ``parent``."""
        if module is None or not name.isdigit() or not self.active:
            return
        named: dict[str, nn.Parameter] = {}
        table: dict[int, tuple[nn.Module, list[str]]] = {}
        for path, sub in module.named_modules():
            owned = sub._parameters.owners if isinstance(sub._parameters, GuardedParameters) else {}
            for key, param in dict.items(sub._parameters):
                fits = param is not None and key not in owned and param.is_floating_point()
                if fits and not param.is_meta:
                    named[f"{path}.{key}" if path else key] = param
                    table.setdefault(id(sub), (sub, []))[1].append(key)
        unique = {id(p): n for n, p in reversed(named.items())}
        if not unique:
            return
        self._num_units += 1
        unit = BornUnit(
            self,
            {n: named[n] for n in sorted(unique.values(), key=list(named).index)},
            self._shares(parent, name, module),
            self._num_units,
        )
        for sub, keys in table.values():
            self._guards.install(sub, dict.fromkeys(keys, unit))
        for param in named.values():
            register(param, unit)
        ops.return_freed_memory()

    @staticmethod
    def _shares(parent: nn.Module, name: str, module: nn.Module) -> dict[int, Share]:
        """Of a block, also of one that is an expert itself."""
        found = shares_of(module)
        if isinstance(parent, Spread):
            for path, param in raw_parameters(module):
                share = parent.zeroexp_share(f"{name}.{path}")
                if share is not None:
                    found[id(param)] = share
        return found

    def visit(self, unit: BornUnit) -> None:
        """``unit`` is touched: whole from now on, until another one is."""
        if not self.active or unit is self._visited:
            return
        self._leave()
        unit.open()
        self._visited = unit

    def _leave(self) -> None:
        if self._visited is not None:
            visited, self._visited = self._visited, None
            visited.close(edit=True)
            ops.return_freed_memory()

    def end(self) -> None:
        self._leave()
        self.active = False


@contextmanager
def sharded_init(config: Config | Mapping[str, Any] | None = None) -> Iterator[None]:
    """Parameters of modules built inside are sharded as they are built, if ``config`` shards
    parameters (stage 3).

    Every rank must build the same model; rank 0's values count. An engine built on the model
    afterwards takes the shards over. Nested blocks are one. Peak memory per rank is the rank's
    share of the model (which is on disk with ``offload=nvme_params``), one block, and what lies
    outside of repeated blocks.
    """
    if not isinstance(config, Config):
        config = Config.from_mapping(config or {})
    config = config.resolved()
    if not STAGES[config.zero.stage].params.sharded or _nested():
        yield
        return
    size = config.zero.shard_size if isinstance(config.zero.shard_size, int) else None
    if config.zero.shard_size == "node":
        size = config.node_data_ranks
    world = World.create(Ledger(), shard_size=size, timeout=float(config.launch.timeout))
    session = Session(world, Birthplace(config, world.rank))
    handle = register_module_module_registration_hook(session.registered)
    try:
        yield
    finally:
        handle.remove()
        session.end()


@contextmanager
def built_whole() -> Iterator[None]:
    """Blocks of what is built inside are not sharded one by one, also where a ``sharded_init`` is
    open: nobody can tell yet that they belong to something that other ranks do not have."""
    paused = [session for session in _open() if session.active]
    for session in paused:
        session.active = False
    try:
        yield
    finally:
        for session in paused:
            session.active = True


def _nested() -> bool:
    """Whether another ``sharded_init`` is open."""
    return bool(_open())


def _open() -> list[Session]:
    """The sessions whose hook is registered."""
    hooks = nn.modules.module._global_module_registration_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return [owner for owner in owners if isinstance(owner, Session)]
