"""The full format of an optimizer's state: torch's own, with whole tensors and the numbers that the
parameters have where one rank holds all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.checkpoint.across import collect, hand_out, note_of_rank_0
from zeroexp.checkpoint.collect import needed
from zeroexp.checkpoint.entries import Entry, key_of, optimizer_entries
from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import CheckpointError
from zeroexp.optim.history import Run, per_element
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.stepper import Stepper


def _scalar(value: Any) -> Any:
    """A state entry that is not per element, as JSON holds it."""
    if isinstance(value, Tensor):
        return {"value": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    return {"value": value}


def _unscalar(note: Mapping[str, Any]) -> Any:
    if "dtype" in note:
        return torch.tensor(note["value"], dtype=getattr(torch, note["dtype"]))
    return note["value"]


def _describe(run: Run, state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "slots": run.slots,
        "elements": {
            k: str(v.dtype).removeprefix("torch.") for k, v in state.items() if per_element(v, run)
        },
        "scalars": {k: _scalar(v) for k, v in state.items() if not per_element(v, run)},
    }


def optimizer_state(
    model: ShardedModel, stepper: Stepper, *, everywhere: bool = False
) -> dict[str, Any]:
    """See :meth:`zeroexp.engine.Engine.optimizer_state_dict`; ``everywhere``: on every rank."""
    world = model.around.world
    groups = optimizer_entries(model, stepper)
    if everywhere:  # as its optimizer has them
        mine = [g["params"] for g in stepper.optimizer.param_groups]
        groups = [
            [Entry("", p, None, key_of(model, p, _share(model, p))[1]) for p in g] for g in mine
        ]
    numbers = {e.key: i for i, e in enumerate(e for g in groups for e in g)}
    out: dict[int, dict[str, Any]] = {}
    for segment in stepper.segments:
        notes, wholes = _segment_state(model, stepper, segment)
        group = segment.sharing.block
        if everywhere:
            _enter(model, segment, notes, wholes, group.index, numbers, out)
            continue
        if not needed(world, group):
            continue
        for index, theirs in enumerate(exchange_notes(group, notes, _COLLECTION)):
            flats = {}
            for key, dtype in _keys(theirs):
                shape, kind = segment.spec.size, getattr(torch, dtype)
                flat = torch.empty(shape, dtype=kind, device=model.around.device)
                if index == group.index:
                    flat.copy_(wholes[key])
                group.broadcast(flat, source=index, tag=segment.tag, what=_COLLECTION).wait()
                flats[key] = flat.cpu()
            if world.first:
                _enter(model, segment, theirs, flats, index, numbers, out)
    if everywhere or world.first:
        out = _over_the_pipe(model, out, everywhere=everywhere)
    if not (everywhere or world.rank == 0):
        return {}
    packed = []
    for group_entries, options in zip(groups, stepper.optimizer.param_groups, strict=True):
        rest = {k: v for k, v in options.items() if k != "params"}
        packed.append({**rest, "params": [numbers[e.key] for e in group_entries]})
    return {"state": {i: out[i] for i in sorted(out)}, "param_groups": packed}


_COLLECTION = "collection of optimizer state"


def _share(model: ShardedModel, param: nn.Parameter) -> int:
    share = model.shares.get(id(param))
    return 0 if share is None else share.index


def _keys(notes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and dtypes of what is kept per element."""
    return sorted({(k, d) for note in notes for k, d in note["elements"].items()})


def _segment_state(
    model: ShardedModel, stepper: Stepper, segment: SegmentState
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What the ranks that have ``segment`` hold for it: descriptions, and whole tensors ``[size]``
    by name, on the CPU (collective)."""
    held = stepper.entries(segment)
    mine = [_describe(run, state) for run, state in held if state]
    everyone = exchange_notes(segment.sharing.gather, mine, _COLLECTION)
    notes = [note for rank in everyone for note in rank]
    wholes = {}
    for key, dtype in _keys(notes):
        flat = torch.zeros(segment.num_stepped, dtype=getattr(torch, dtype))
        for run, state in held:
            if per_element(state.get(key), run):
                flat[run.start : run.stop].copy_(state[key].reshape(-1))
        wholes[key] = _collect(model, segment, flat)
    return notes, wholes


def _enter(
    model: ShardedModel,
    segment: SegmentState,
    notes: Sequence[Mapping[str, Any]],
    wholes: Mapping[str, Tensor],
    index: int,
    numbers: Mapping[tuple[int, int], int],
    out: dict[int, dict[str, Any]],
) -> None:
    """Add the state of share ``index`` of ``segment`` to ``out``, by number; slices of one tensor
    are joined in the order in which they come."""
    for number, (at, param) in enumerate(zip(segment.spec.slots, segment.params, strict=True)):
        found = [n for n in notes if number in n["slots"]]  # of every rank that has a piece of it
        if not found:
            continue
        entry = out.setdefault(numbers[key_of(model, param, index)], {})
        for key in dict.fromkeys(k for note in found for k in note["elements"]):
            value = wholes[key][at.offset : at.stop].view(at.spec.shape).clone()
            entry[key] = torch.cat((entry[key], value)) if key in entry else value
        for note in found:
            entry.update({k: _unscalar(v) for k, v in note["scalars"].items()})


def _over_the_pipe(
    model: ShardedModel, mine: Mapping[int, Mapping[str, Any]], *, everywhere: bool
) -> dict[int, dict[str, Any]]:
    """The states by parameter number of all parts of the model."""
    world, what = model.around.world, "collection of the stages' optimizer state"
    if world.pipe.size == 1:
        return {number: dict(entry) for number, entry in mine.items()}
    large = {
        f"{number}.{key}": value
        for number, entry in mine.items()
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.dim()
    }
    small = {
        str(number): {k: _scalar(v) for k, v in entry.items() if f"{number}.{k}" not in large}
        for number, entry in mine.items()
    }
    found = collect(world, large, model.around.device, what, everywhere=everywhere)
    out: dict[int, dict[str, Any]] = {}
    for note in exchange_notes(world.pipe, small, what):
        for number, entry in note.items():
            out[int(number)] = {key: _unscalar(value) for key, value in entry.items()}
    for name, value in found.items():
        number, _, key = name.partition(".")
        out[int(number)][key] = value
    return out


def _collect(model: ShardedModel, segment: SegmentState, flat: Tensor) -> Tensor:
    if flat.numel() == segment.spec.size:
        return flat
    whole = torch.empty(segment.spec.size, dtype=flat.dtype, device=model.around.device)
    segment.sharing.gather.all_gather(
        whole, flat.to(whole.device), tag=segment.tag, what="collection of optimizer state"
    ).wait()
    return whole.cpu()


def load_optimizer_state(model: ShardedModel, stepper: Stepper, saved: Mapping[str, Any]) -> None:
    """See :meth:`zeroexp.engine.Engine.load_optimizer_state_dict`."""
    world = model.around.world
    groups = optimizer_entries(model, stepper)
    numbers = {e.key: i for i, e in enumerate(e for g in groups for e in g)}
    note: dict[str, Any] = {}
    if world.rank == 0:
        note = _summarise(stepper, saved, groups)
    note = note_of_rank_0(world, note, "check of an optimizer checkpoint")
    if "problem" in note:
        raise CheckpointError(note["problem"])
    for group, values in zip(stepper.optimizer.param_groups, note["groups"], strict=True):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    stepper.face.state.clear()
    given = _handed_out(model, stepper, saved, note["params"], numbers)
    for segment in stepper.segments:
        stepper.reset_history(segment)
        of_shares = [
            [note["params"].get(str(numbers[key_of(model, p, i)])) for p in segment.params]
            for i in range(segment.sharing.block.size)
        ]
        infos = of_shares[segment.sharing.block.index]
        history = stepper.histories[segment.tag]
        history.split(
            [repr(info and sorted(info["scalars"].items())) for info in infos], stepper.face.state
        )
        keys = sorted(
            {k for share in of_shares for info in share if info for k in info["elements"]}
        )
        flats = {k: _scatter(model, segment, k, given, of_shares, groups) for k in keys}
        for run in history.runs:
            info = infos[run.slots[0]] if run.slots else next((i for i in infos if i), None)
            if info is None:
                continue
            entry = {}
            for key in info["elements"]:
                part = flats[key][run.start : run.stop].view(run.tensor.shape)
                entry[key] = part.to(run.tensor.dtype, copy=True)
            for key, value in info["scalars"].items():
                entry[key] = _unscalar(value)
            stepper.put(segment, run, entry)
        stepper.account(segment)


_CHANGES_THE_UPDATE = ("amsgrad", "maximize", "centered", "nesterov")
"""Switches of torch's optimizers; one that the loading optimizer lacks would be lost in silence."""


def _summarise(
    stepper: Stepper, saved: Mapping[str, Any], entries_of: Sequence[Sequence[Entry]]
) -> dict[str, Any]:
    """What the other ranks must know of rank 0's ``saved``, or the reason why it does not fit."""
    groups = stepper.optimizer.param_groups
    sizes = [len(g["params"]) for g in saved.get("param_groups", [])]
    wanted = [len(group) for group in entries_of]
    if sizes != wanted:
        return {
            "problem": f"the optimizer checkpoint has groups of {sizes} parameters, the "
            f"optimizer of {wanted}"
        }
    for mine, theirs in zip(groups, saved["param_groups"], strict=True):
        foreign = [k for k in _CHANGES_THE_UPDATE if theirs.get(k) and k not in mine]
        if foreign:
            return {
                "problem": f"the optimizer checkpoint was made with {foreign[0]}=True, which "
                f"{type(stepper.optimizer).__name__} does not have: it would go on with another "
                "update. Use the optimizer of the checkpoint."
            }
    order = [i for g in saved["param_groups"] for i in g["params"]]
    place = {old: new for new, old in enumerate(order)}
    by_number = [entry for group in entries_of for entry in group]
    params: dict[str, Any] = {}
    for old, entry in saved["state"].items():
        number = place[old]
        shape = by_number[number].shape
        elements, scalars = [], {}
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if tuple(value.shape) != shape and stepper.whole:  # factors, one per row
                    scalars[key] = _scalar(value)
                    continue
                if tuple(value.shape) != shape:
                    return {
                        "problem": f"optimizer state {key} of {by_number[number].name} has "
                        "shape "
                        f"{tuple(value.shape)}, the parameter {shape}"
                    }
                elements.append(key)
            elif isinstance(value, Tensor) and shape == ():
                elements.append(key) if key != "step" else scalars.update({key: _scalar(value)})
            else:
                scalars[key] = _scalar(value)
        params[str(number)] = {"elements": elements, "scalars": scalars}
    plain = [{k: _plain(v) for k, v in g.items() if k != "params"} for g in saved["param_groups"]]
    return {"groups": plain, "params": params}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _handed_out(
    model: ShardedModel,
    stepper: Stepper,
    saved: Mapping[str, Any],
    infos: Mapping[str, Any],
    numbers: Mapping[tuple[int, int], int],
) -> dict[str, Tensor]:
    """Rank 0's whole tensors as ``<number>.<key>``, on the first rank of each part of the model
    that steps them."""
    world = model.around.world
    if not world.first:
        return {}
    order = [i for g in saved["param_groups"] for i in g["params"]] if world.rank == 0 else []
    everything = {
        f"{number}.{key}": saved["state"][order[int(number)]][key]
        for number, info in (infos.items() if world.rank == 0 else ())
        for key in info["elements"]
    }
    mine = dict.fromkeys(
        str(numbers[key_of(model, param, index)])
        for segment in stepper.segments
        for index in range(segment.sharing.block.size)
        for param in segment.params
    )
    wanted = [f"{n}.{key}" for n in mine if n in infos for key in infos[n]["elements"]]
    return hand_out(world, everything, wanted, model.around.device, "load of optimizer state")


def _scatter(
    model: ShardedModel,
    segment: SegmentState,
    key: str,
    given: Mapping[str, Tensor],
    of_shares: Sequence[Sequence[Any]],
    groups: Sequence[Sequence[Entry]],
) -> Tensor:
    """This rank's part ``[master.numel()]`` of one kind of state, from the whole tensors that the
    first rank was handed; ``of_shares`` are the facts of each parameter, by share."""
    dtype = torch.float64 if segment.master_dtype == torch.float64 else torch.float32
    mine: Tensor | None = None
    for index, infos in enumerate(of_shares):
        flat = torch.zeros(segment.spec.size, dtype=dtype, device=model.around.device)
        if model.around.world.first:
            _fill(model, segment, key, given, infos, groups, index, flat)
        model.around.world.control.broadcast(
            flat, source=0, tag=segment.tag, what="load of optimizer state"
        ).wait()
        if index == segment.sharing.block.index:
            mine = flat
    assert mine is not None
    return mine if segment.num_stepped == segment.spec.size else mine[segment.lo : segment.hi]


def _fill(
    model: ShardedModel,
    segment: SegmentState,
    key: str,
    given: Mapping[str, Tensor],
    infos: Sequence[Any],
    groups: Sequence[Sequence[Entry]],
    index: int,
    flat: Tensor,
) -> None:
    by_key = {e.key: (i, e) for i, e in enumerate(e for g in groups for e in g)}
    for at, param, info in zip(segment.spec.slots, segment.params, infos, strict=True):
        if info and key in info["elements"]:
            number, entry = by_key[key_of(model, param, index)]
            value = entry.share_of(given[f"{number}.{key}"], index)
            assert value is not None
            flat[at.offset : at.stop].copy_(value.reshape(-1))
