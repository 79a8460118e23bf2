"""A module and its sharded state: which parameter is where, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zeroexp import ops
from zeroexp.comm.pool import flat_zeros
from zeroexp.errors import ModelError
from zeroexp.layout import Layout, ParamSpec, Segment, Share, Unit, make_layout, make_unit
from zeroexp.placement import leaving
from zeroexp.zero.access import GuardedParameters, Guards, Owner, whole
from zeroexp.zero.part import Part
from zeroexp.zero.placeholder import Placeholders
from zeroexp.zero.same_model import compare_buffers, compare_parameters
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.shares import raw_parameters, raw_tensors, shares_of
from zeroexp.zero.surroundings import Surroundings
from zeroexp.zero.unit import Life, UnitState


class ShardedModel:
    """Cuts ``module`` into units and takes its parameters over, in place; names and objects stay.

    ``groups`` maps ``id(parameter)`` to its optimizer group; parameters in no group are never
    stepped. Every rank must build the same model; rank 0's values win. ``part``: these ranks hold
    a part of the module only, and the first of them has the values that win. Raises
    :class:`RankMismatch` when the ranks' models differ, :class:`ModelError` for parameters that
    hold no data.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Mapping[int, int],
        around: Surroundings,
        *,
        cut: str,
        part: Part | None = None,
    ) -> None:
        self.module = module
        self.around = around
        self.part = part
        self.params: dict[str, nn.Parameter] = {}
        """First name to parameter."""
        self.elsewhere: dict[str, nn.Parameter] = {}
        """The same of those that these ranks do not hold."""
        self._former, guards = self._former_owners()
        self.born_sharded = any(o.sharded for owners in self._former.values() for o in owners)
        """Whether the parameters were sharded before: the whole model may not fit."""
        self.shares = shares_of(module)
        """Which share this rank has, by ``id`` of the parameters and buffers that are spread."""
        specs = self._collect(groups)
        compare_parameters(around.world, specs, self._shares_by_name(), part)
        self.specs = [spec for spec in specs if spec.name in self.params]
        shards = around.world.sharing().gather.size
        self.layout: Layout = make_layout(self.specs, cut=cut, shards=shards)
        self.units: list[UnitState] = []
        self.place: dict[int, tuple[UnitState, SegmentState, int]] = {}
        """``id(parameter)`` to unit, segment and slot."""
        self.before_edit: Callable[[], None] = lambda: None
        """Called before values are read to be edited."""
        self.before_whole: Callable[[Sequence[str]], None] = lambda kinds: None
        """Called with the kinds of state that must be there to make units whole."""
        self._groups = dict(groups)
        self._num_tags = 0
        self._first_names: dict[int, str] | None = None
        self._take_over()
        self._share_buffers()
        self._frozen = self._find_frozen()
        for guard in guards:
            guard.remove()
        self._former = {}

    def _former_owners(self) -> tuple[dict[int, list[Owner]], list[Guards]]:
        """Who holds parameters of the module already, by ``id(parameter)``."""
        owners: dict[int, list[Owner]] = {}
        guards: dict[int, Guards] = {}
        for path, module in self.module.named_modules():
            table = module._parameters
            if isinstance(table, GuardedParameters):
                guards[id(table.guards)] = table.guards
                for name, owner in table.owners.items():
                    if not owner.transferable:
                        raise ModelError(
                            f"parameter {name} of {path or 'the root module'} belongs to another "
                            "zeroexp engine already. "
                            "Use that engine, or call its close() before building a second one."
                        )
                    owners.setdefault(id(dict.__getitem__(table, name)), []).append(owner)
        return owners, list(guards.values())

    def _collect(self, groups: Mapping[int, int]) -> list[ParamSpec]:
        """What all parts are made of, in the module's order."""
        names: dict[int, list[str]] = {}
        for name, param in raw_parameters(self.module):
            names.setdefault(id(param), []).append(name)
            if len(names[id(param)]) == 1:
                here = self.part is None or self.part.holds(name)
                (self.params if here else self.elsewhere)[name] = param
        self._refuse_renormalizing()
        tensors = {**self.params, **self.elsewhere}
        return [
            self._spec(first, tensors[first], others, groups) for first, *others in names.values()
        ]

    def _spec(
        self, name: str, param: nn.Parameter, aliases: Sequence[str], groups: Mapping[int, int]
    ) -> ParamSpec:
        if is_lazy(param):
            raise ModelError(
                f"parameter {name} has no shape yet (a lazy module). Run one forward with a batch "
                "before you build the engine and the optimizer."
            )
        if param.is_meta and name in self.params:
            raise ModelError(
                f"parameter {name} is on the meta device: it has no values. Build the model "
                "inside zeroexp.sharded_init(config), which needs no more memory."
            )
        group = groups.get(id(param), -1)
        if param.is_complex() and group >= 0:
            raise ModelError(
                f"parameter {name} is complex ({param.dtype}), and gradients here are real. "
                "Make it a real parameter with a last dimension of 2 and use "
                "torch.view_as_complex(parameter) in forward()."
            )
        return ParamSpec(
            name,
            tuple(param.shape),
            str(self.around.policy.storage_dtype(param.dtype)).removeprefix("torch."),
            trainable=param.requires_grad and group >= 0,
            aliases=tuple(aliases),
            group=group,
            tied=self.part is not None and self.part.is_tied(name),
            spread=self.shares[id(param)].count if id(param) in self.shares else 1,
        )

    def _shares_by_name(self) -> dict[str, Share]:
        tensors = raw_tensors(self.module)
        return {name: self.shares[id(t)] for name, t in tensors if id(t) in self.shares}

    def _refuse_renormalizing(self) -> None:
        """Weights that a forward rewrites come out differently on every rank."""
        around = self.around
        if around.world.size == 1 and not around.placement.params.sharded:
            return
        for path, module in self.module.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                raise ModelError(
                    f"{path or 'the model'} has max_norm={module.max_norm}: its forward rewrites "
                    "the rows it reads, other ones on each rank. Scale the output of the "
                    "embedding instead."
                )

    def _take_over(self) -> None:
        left = Counter(id(o) for owners in self._former.values() for o in owners)
        leaves = self._leaving()
        made = [
            [self._segment(s, leaves=(u, i) in leaves) for i, s in enumerate(unit.segments)]
            for u, unit in enumerate(self.layout.units)
        ]
        self._reserve([s for segments in made for s in segments])
        for unit, ready in zip(self.layout.units, made, strict=True):
            segments = []
            for segment in ready:
                segment.take_over(self._flat_values(segment))
                segments.append(segment)
                for owner in [o for p in segment.params for o in self._former.get(id(p), ())]:
                    left[id(owner)] -= 1
                    if not left[id(owner)]:
                        owner.give_up()
            ops.return_freed_memory()  # what the user's own tensors of this unit took
            module = self.module.get_submodule(unit.name)
            self.units.append(UnitState(unit.name, module, segments, self.around.world.rank))
            self._index(self.units[-1])
        for segment in self.segments:  # former owners showed their own whenever they were asked
            segment.show()
        for param in self.elsewhere.values():
            dtype = self.around.policy.storage_dtype(param.dtype)
            Placeholders([tuple(param.shape)], dtype, self.around.device).show([param])
        self.around.spare.drop()

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Buffers begin as those of rank 0 (of the first that has the share), like parameters:
        features that another rank drew do not fit the weights."""
        control = self.around.world.control
        buffers = [(n, b) for n, b in self.module.named_buffers() if not b.is_meta]
        compare_buffers(control, dict(buffers), self._shares_by_name())
        for number, (name, buffer) in enumerate(buffers):
            if buffer.numel():
                share = self.shares.get(id(buffer))
                members = self.around.world.sharing(share.count).members if share else control
                flat = buffer.contiguous().reshape(-1)
                members.broadcast(
                    flat.view(torch.uint8), source=0, tag=number, what=f"first value of {name}"
                ).wait()
                buffer.copy_(flat.view(buffer.shape))

    def _segment(self, spec: Segment, *, leaves: bool) -> SegmentState:
        self._num_tags += 1
        params = [self.params[s.spec.name] for s in spec.slots]
        state = SegmentState(spec, params, self.around, self._num_tags, leaves=leaves)
        if self.part is not None:
            state.counted = all(self.part.counts(s.spec.name) for s in spec.slots if s.spec.tied)
        return state

    def _leaving(self) -> set[tuple[int, int]]:
        """Unit and place in it of the segments whose optimizer state leaves the device."""
        trained = [
            (u, i, s)
            for u, unit in enumerate(self.layout.units)
            for i, s in enumerate(unit.segments)
            if s.trainable
        ]
        cut = self.around.placement.optim.sharded
        sizes = [s.shard_size if cut else s.size for _, _, s in trained]
        chosen = leaving(sizes, self.around.fraction)
        return {(u, i) for n, (u, i, _) in enumerate(trained) if n in chosen}

    def _reserve(self, segments: Sequence[SegmentState]) -> None:
        if self.around.disk is not None:
            self.around.disk.reserve(segments)

    def _index(self, unit: UnitState) -> None:
        for segment in unit.segments:
            for slot, param in enumerate(segment.params):
                self.place[id(param)] = (unit, segment, slot)

    def _flat_values(self, segment: SegmentState) -> Tensor:
        """The segment as the user built it, the same on every rank that has it."""
        dtype = segment.params[0].dtype
        for param in segment.params[1:]:
            dtype = torch.promote_types(dtype, param.dtype)
        flat = flat_zeros(segment.spec.size, dtype, self.around.device)
        owners = [o for p in segment.params for o in self._former.get(id(p), ())]
        if not owners:
            self._refuse_empty(segment)
        with whole(owners), torch.no_grad():
            for slot, param in zip(segment.spec.slots, segment.params, strict=True):
                flat[slot.offset : slot.stop].copy_(param.detach().reshape(-1))
        if not owners:  # a sharded build is one model already
            segment.sharing.members.broadcast(
                flat, source=0, tag=segment.tag, what="first broadcast of the parameters"
            ).wait()
        return flat

    @staticmethod
    def _refuse_empty(segment: SegmentState) -> None:
        for slot, param in zip(segment.spec.slots, segment.params, strict=True):
            if param.untyped_storage().nbytes() < param.numel() * param.element_size():
                raise ModelError(
                    f"parameter {slot.spec.name} has the shape {tuple(param.shape)} but no memory "
                    "for it: it is expanded, or an engine that ended after a failure left it "
                    "without values. Build the model anew, or load a checkpoint into a new one."
                )

    # -- unfreezing --------------------------------------------------------------------------------

    def _find_frozen(self) -> list[nn.Parameter]:
        """Parameters that an optimizer holds but that were frozen when their segment was made."""
        return [
            p
            for s in self.segments
            if not s.spec.trainable
            for p in s.params
            if id(p) in self._groups
        ]

    def thaw(self) -> list[SegmentState]:
        """Give parameters that were unfrozen since (``requires_grad`` set by the user) gradients
        and optimizer state.

        They move from their frozen segment to a new one of the same unit; nothing else moves.
        Returns the new segments. Collective: every rank must unfreeze the same parameters.
        """
        thawed = {id(p) for p in self._frozen if p.requires_grad}
        if not thawed:
            return []
        fresh: list[SegmentState] = []
        waiting = {id(self.place[i][0]) for i in thawed}
        for unit in self.units:  # in one order on every rank: each takes part in what follows
            if id(unit) not in waiting:
                continue
            unit.release()
            segments = []
            for old in unit.segments:
                if old.spec.trainable or not any(id(p) in thawed for p in old.params):
                    segments.append(old)
                    continue
                parts = self._split(old, thawed)
                segments += parts
                fresh += [s for s in parts if s.spec.trainable]
            unit.set_segments(segments)
            self._index(unit)
        units = tuple(Unit(u.name, tuple(s.spec for s in u.segments)) for u in self.units)
        self.layout = Layout(units, self.layout.shards)
        self._frozen = self._find_frozen()
        return fresh

    def _split(self, old: SegmentState, thawed: set[int]) -> list[SegmentState]:
        flat = self.master_whole(old)
        specs = [
            replace(
                slot.spec,
                trainable=id(p) in thawed,
                group=self._groups.get(id(p), -1),
            )
            for slot, p in zip(old.spec.slots, old.params, strict=True)
        ]
        old.forget()
        parts = [
            self._segment(spec, leaves=self.around.fraction == 1.0)
            for spec in make_unit(old.spec.unit, specs, self.layout.shards).segments
        ]
        self._reserve(parts)
        for segment in parts:
            spec = segment.spec
            values = flat.new_zeros(spec.size)
            for slot in spec.slots:
                at = next(s for s in old.spec.slots if s.spec.name == slot.spec.name)
                values[slot.offset : slot.stop].copy_(flat[at.offset : at.stop])
            segment.take_over(values)
        return parts

    # -- look-up -----------------------------------------------------------------------------------

    @property
    def segments(self) -> list[SegmentState]:
        return [s for u in self.units for s in u.segments]

    @property
    def trainable_segments(self) -> list[SegmentState]:
        return [s for s in self.segments if s.spec.trainable]

    def holds(self, name: str, tensor: Tensor) -> bool:
        """Whether these ranks hold the parameter or buffer ``tensor``, called ``name``."""
        return self.part is None or self.part.holds(self._first_name(name, tensor))

    def speaks_for(self, name: str, tensor: Tensor) -> bool:
        """The same, and no part before them holds it too."""
        return self.part is None or self.part.counts(self._first_name(name, tensor))

    def name_of(self, param: nn.Parameter) -> str:
        """Its first name. Raises :class:`ModelError` for a parameter of another module."""
        name = self._first_name("", param)
        if not name:
            raise ModelError("this parameter does not belong to the engine's module")
        return name

    def holders(self, name: str) -> tuple[int, ...]:
        """The places in the pipe that hold the parameter with this first name."""
        return (0,) if self.part is None else self.part.holders[name]

    def _first_name(self, name: str, tensor: Tensor) -> str:
        if self._first_names is None:
            known = (*self.params.items(), *self.elsewhere.items())
            self._first_names = {id(p): n for n, p in known}
        return self._first_names.get(id(tensor), name)

    @torch.no_grad()
    def fetch_elsewhere(self) -> None:
        """Parameters and buffers of other parts become whole here too; these ranks' own must be
        whole (collective)."""
        if self.part is None:
            return
        pipe = self.around.world.pipe
        known = [*self.params.items(), *self.elsewhere.items()]
        for name, tensor in (*sorted(known), *self.module.named_buffers()):
            mine = self.part.holds(name)
            value = tensor.detach().contiguous()
            if not mine:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            flat = value.view(-1).view(torch.uint8)
            first = self.part.holders[name][0]
            pipe.broadcast(flat, source=first, tag=0, what=f"values of {name}").wait()
            if not mine:
                tensor.data = value

    def master_whole(self, segment: SegmentState) -> Tensor:
        """The segment's values ``[size]`` as the optimizer sees them, on every rank that has it
        (collective)."""
        if segment.master_copy is None and segment.home is None:
            return segment.full
        mine = segment.read_values().to(self.around.device)
        if mine.numel() == segment.spec.size:
            return mine
        out = torch.empty(segment.spec.size, dtype=mine.dtype, device=mine.device)
        segment.sharing.gather.all_gather(
            out, mine, tag=segment.tag, what="all-gather of whole parameters"
        ).wait()
        return out

    @contextmanager
    def whole_units(self, units: Sequence[UnitState], *, edit: bool = False) -> Iterator[None]:
        """``units`` are whole inside; with ``edit`` what was written is kept."""
        self.before_whole(("params", "optim") if edit else ("params",))
        if edit:
            self.before_edit()
        opened = []
        kept = [(s, s.full.clone()) for u in units for s in u.segments if edit and not s.transient]
        for unit in units:
            if unit.life is Life.SHARDED:
                unit.gather()
                opened.append(unit)
            unit.wait()
            unit.pins += 1
        try:
            yield
            if edit:
                for unit in units:
                    for segment in unit.segments:
                        segment.write_back()
        except BaseException:  # half an edit is on this rank alone
            for segment, values in kept:
                segment.full.copy_(values)
            raise
        finally:
            for unit in units:
                unit.pins -= 1
            for unit in opened:
                if unit.pins == 0:
                    unit.release()
            self.around.spare.drop()
