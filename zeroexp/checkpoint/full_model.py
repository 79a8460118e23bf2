"""The full format of a model: whole tensors by name, collected on rank 0 one segment at a time,
loaded from rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroexp.checkpoint.across import collect, hand_out, note_of_rank_0
from zeroexp.checkpoint.collect import each_share, needed
from zeroexp.checkpoint.entries import Entry, entries, key_of
from zeroexp.errors import CheckpointError
from zeroexp.layout import Slot
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.segment import SegmentState


def _widen(value: Tensor) -> Tensor:
    """A CPU copy, narrow floats as fp32."""
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    return value.detach().to("cpu", torch.float32 if narrow else value.dtype, copy=True)


def model_state(model: ShardedModel) -> dict[str, Tensor]:
    """See :meth:`zeroexp.engine.Engine.state_dict`."""
    world = model.around.world
    found: dict[int, list[Tensor]] = {}  # by id of the tensor here: of each share
    for segment in model.segments:
        mine, group = model.master_whole(segment), segment.sharing.block
        if not needed(world, group):
            continue
        what = f"collection of unit {segment.spec.unit or 'root'}"
        for whole in each_share(group, mine, tag=segment.tag, what=what):
            for slot, param in zip(segment.spec.slots, segment.params, strict=True):
                if world.first:
                    value = whole[slot.offset : slot.stop].view(slot.spec.shape)
                    found.setdefault(id(param), []).append(_widen(value))
    everything = entries(model)
    _collect_buffers(model, everything, found)
    if not world.first:
        return {}
    here = {
        entry.name: _whole(entry, found)
        for entry in everything
        if model.speaks_for(entry.name, entry.tensor)
    }
    device = model.around.device
    state = collect(world, here, device, "collection of the model's state", everywhere=False)
    return {entry.name: state[entry.name] for entry in everything} if world.rank == 0 else {}


def _collect_buffers(
    model: ShardedModel, everything: Sequence[Entry], found: dict[int, list[Tensor]]
) -> None:
    """Add the shares of buffers to ``found``."""
    world = model.around.world
    shared = {
        id(e.tensor): e
        for e in everything
        if e.share is not None
        and not isinstance(e.tensor, nn.Parameter)
        and model.holds(e.name, e.tensor)
    }
    for number, entry in enumerate(shared.values()):
        assert entry.share is not None
        group, mine = world.sharing(entry.share.count).block, entry.tensor.contiguous()
        if not needed(world, group):
            continue
        what = f"collection of buffer {entry.name}"
        for value in each_share(group, mine, tag=number, what=what):
            found.setdefault(id(entry.tensor), []).append(_widen(value))


def _whole(entry: Entry, found: Mapping[int, list[Tensor]]) -> Tensor:
    values = found.get(id(entry.tensor)) or [_widen(entry.tensor)]
    return torch.cat(values) if entry.share and not entry.share.ends else values[entry.index]


def load_model_state(model: ShardedModel, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """See :meth:`zeroexp.engine.Engine.load_state_dict`."""
    world = model.around.world
    everything = entries(model)
    present: list[str] = []
    problem = None
    if world.rank == 0:
        present = [e.name for e in everything if e.name in state]
        problem = _mismatch(everything, state, strict)
    problem, present = note_of_rank_0(world, [problem, present], "check of a checkpoint")
    if problem:
        raise CheckpointError(problem)
    names = set(present)
    held = [e for e in everything if e.name in names and model.holds(e.name, e.tensor)]
    if world.first:
        wanted = [e.name for e in held]
        state = hand_out(world, state, wanted, model.around.device, "load of the model's state")
    given = {e.key: e for e in reversed(held)}
    for segment in model.segments:
        _load_segment(model, segment, given, state)
    for entry in held:
        if not isinstance(entry.tensor, nn.Parameter):
            _load_buffer(model, entry, state)


def _load_buffer(model: ShardedModel, entry: Entry, state: Mapping[str, Tensor]) -> None:
    world, tensor = model.around.world, entry.tensor
    if world.first:
        value = state[entry.name].to(tensor.device, tensor.dtype).contiguous()
    else:
        value = tensor.new_empty(entry.shape)
    world.control.broadcast(value, source=0, tag=0, what=f"load of buffer {entry.name}").wait()
    mine = entry.share_of(value, entry.share.index if entry.share else 0)
    if mine is not None:
        tensor.copy_(mine)


def _mismatch(everything: Sequence[Entry], state: Mapping[str, Tensor], strict: bool) -> str | None:
    known = [e.name for e in everything]
    missing = [n for n in known if n not in state]
    extra = sorted(set(state) - set(known), key=list(state).index)
    if strict and (missing or extra):
        return (
            f"the checkpoint does not fit the model: missing {missing[:5]}, unexpected {extra[:5]} "
            f"({len(missing)} and {len(extra)} in all)"
        )
    if len(missing) == len(known) and known:
        return (
            f"no name in the checkpoint fits the model; it has {list(state)[:5]}, "
            f"the model {known[:5]}"
        )
    for entry in everything:
        if entry.name in state and tuple(state[entry.name].shape) != entry.shape:
            return (
                f"parameter {entry.name} has shape {tuple(state[entry.name].shape)} in the "
                f"checkpoint and {entry.shape} in the model"
            )
    return None


def _load_segment(
    model: ShardedModel,
    segment: SegmentState,
    given: Mapping[tuple[int, int], Entry],
    state: Mapping[str, Tensor],
) -> None:
    world, group = model.around.world, segment.sharing.block
    whole: Tensor | None = None
    for index in range(group.size):
        wanted = _wanted(model, segment, given, index)
        if not wanted:
            continue
        if whole is None:
            whole = model.master_whole(segment)
        flat = torch.zeros_like(whole)
        for slot, entry in wanted if world.first else ():
            value = entry.share_of(state[entry.name], index)
            assert value is not None
            flat[slot.offset : slot.stop].copy_(value.reshape(-1))
        world.control.broadcast(
            flat, source=0, tag=segment.tag, what=f"load of unit {segment.spec.unit or 'root'}"
        ).wait()
        if index != group.index:
            continue
        if len(wanted) < len(segment.params):
            merged = whole.clone()
            for slot, _ in wanted:
                merged[slot.offset : slot.stop].copy_(flat[slot.offset : slot.stop])
            flat = merged
        segment.assign(flat)


def _wanted(
    model: ShardedModel,
    segment: SegmentState,
    given: Mapping[tuple[int, int], Entry],
    index: int,
) -> list[tuple[Slot, Entry]]:
    """The places of share ``index`` of ``segment`` for which ``given`` has something."""
    found = []
    for slot, param in zip(segment.spec.slots, segment.params, strict=True):
        entry = given.get(key_of(model, param, index))
        if entry is not None:
            found.append((slot, entry))
    return found
