"""The full format of a model: whole tensors by name, collected on rank 0 one segment at a time,
loaded from rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zeroexp.checkpoint.collect import each_part, needed
from zeroexp.checkpoint.entries import Entry, entries, key_of
from zeroexp.comm.notes import exchange_notes
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
    found: dict[int, list[Tensor]] = {}  # by id of the tensor here: of each part
    for segment in model.segments:
        mine, group = model.master_whole(segment), segment.sharing.parts
        what = f"collection of unit {segment.spec.unit or 'root'}"
        for whole in each_part(group, mine, tag=segment.tag, what=what) if needed(group) else ():
            for slot, param in zip(segment.spec.slots, segment.params, strict=True):
                if world.rank == 0:
                    value = whole[slot.offset : slot.stop].view(slot.spec.shape)
                    found.setdefault(id(param), []).append(_widen(value))
    everything = entries(model)
    buffers = {id(e.tensor): e for e in everything if e.part and id(e.tensor) not in model.place}
    for number, entry in enumerate(buffers.values()):
        assert entry.part is not None
        group, mine = world.sharing(entry.part.count).parts, entry.tensor.contiguous()
        what = f"collection of buffer {entry.name}"
        for value in each_part(group, mine, tag=number, what=what) if needed(group) else ():
            found.setdefault(id(entry.tensor), []).append(_widen(value))
    if world.rank != 0:
        return {}
    return {entry.name: _whole(entry, found) for entry in everything}


def _whole(entry: Entry, found: Mapping[int, list[Tensor]]) -> Tensor:
    values = found.get(id(entry.tensor)) or [_widen(entry.tensor)]
    return torch.cat(values) if entry.part and not entry.part.ends else values[entry.index]


def load_model_state(model: ShardedModel, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """See :meth:`zeroexp.engine.Engine.load_state_dict`."""
    world = model.around.world
    everything = entries(model)
    present: list[str] = []
    problem = None
    if world.rank == 0:
        present = [e.name for e in everything if e.name in state]
        problem = _mismatch(everything, state, strict)
    notes = exchange_notes(world.control, [problem, present], "check of a checkpoint")
    if notes[0][0]:
        raise CheckpointError(notes[0][0])
    names = set(notes[0][1])
    given = {e.key: e for e in reversed(everything) if e.name in names}
    for segment in model.segments:
        _load_segment(model, segment, given, state)
    for entry in everything:
        if entry.name in names and not isinstance(entry.tensor, nn.Parameter):
            _load_buffer(model, entry, state)


def _load_buffer(model: ShardedModel, entry: Entry, state: Mapping[str, Tensor]) -> None:
    world, tensor = model.around.world, entry.tensor
    if world.rank == 0:
        value = state[entry.name].to(tensor.device, tensor.dtype).contiguous()
    else:
        value = tensor.new_empty(entry.shape)
    world.control.broadcast(value, source=0, tag=0, what=f"load of buffer {entry.name}").wait()
    mine = entry.part_of(value, entry.part.index if entry.part else 0)
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
    world, group = model.around.world, segment.sharing.parts
    whole: Tensor | None = None
    for index in range(group.size):
        wanted = _wanted(model, segment, given, index)
        if not wanted:
            continue
        if whole is None:
            whole = model.master_whole(segment)
        flat = torch.zeros_like(whole)
        for slot, entry in wanted if world.rank == 0 else ():
            value = entry.part_of(state[entry.name], index)
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
    """The places of part ``index`` of ``segment`` for which ``given`` has something."""
    found = []
    for slot, param in zip(segment.spec.slots, segment.params, strict=True):
        entry = given.get(key_of(model, param, index))
        if entry is not None:
            found.append((slot, entry))
    return found
