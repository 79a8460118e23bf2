"""The full format: whole tensors by name, assembled on rank 0 one segment at a time, loaded from
rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.checkpoint.across import collect, hand_out, note_of_rank_0
from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import CheckpointError
from zeroexp.optim.history import Run, per_element
from zeroexp.zero.model import ShardedModel
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.stepper import Stepper


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Parameter | Tensor]]:
    """Names and tensors in the order of ``module.state_dict()``, without asking for values."""
    for path, sub in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, param in dict.items(sub._parameters):
            if param is not None:
                yield prefix + name, param
        for name, buffer in sub._buffers.items():
            if buffer is not None and name not in sub._non_persistent_buffers_set:
                yield prefix + name, buffer


def _widen(value: Tensor) -> Tensor:
    """A CPU copy, narrow floats as fp32."""
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    return value.detach().to("cpu", torch.float32 if narrow else value.dtype, copy=True)


def model_state(model: ShardedModel) -> dict[str, Tensor]:
    """See :meth:`zeroexp.engine.Engine.state_dict`."""
    world = model.around.world
    values: dict[int, Tensor] = {}
    for segment in model.segments:
        whole = model.master_whole(segment)
        if world.first:
            for slot, param in zip(segment.spec.slots, segment.params, strict=True):
                values[id(param)] = _widen(whole[slot.offset : slot.stop].view(slot.spec.shape))
    if not world.first:
        return {}
    entries = dict(_entries(model.module))
    here = {
        name: values[id(t)] if id(t) in values else _widen(t)
        for name, t in entries.items()
        if model.speaks_for(name, t)
    }
    device = model.around.device
    found = collect(world, here, device, "collection of the model's state", everywhere=False)
    return {name: found[name] for name in entries} if world.rank == 0 else {}


def load_model_state(model: ShardedModel, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """See :meth:`zeroexp.engine.Engine.load_state_dict`."""
    world = model.around.world
    entries = dict(_entries(model.module))
    present: list[str] = []
    if world.rank == 0:
        present = [n for n in entries if n in state]
        problem = _mismatch(entries, state, strict)
    else:
        problem = None
    problem, present = note_of_rank_0(world, [problem, present], "check of a checkpoint")
    if problem:
        raise CheckpointError(problem)
    given = set(present)
    if world.first:
        wanted = [n for n, t in entries.items() if n in given and model.holds(n, t)]
        state = hand_out(world, state, wanted, model.around.device, "load of the model's state")
    for segment in model.segments:
        _load_segment(model, segment, entries, given, state)
    for name, tensor in entries.items():
        here = name in given and model.holds(name, tensor)
        if here and not isinstance(tensor, nn.Parameter):
            value = state[name].to(tensor.device, tensor.dtype) if world.first else tensor.clone()
            world.control.broadcast(
                value.contiguous(), source=0, tag=0, what=f"load of buffer {name}"
            ).wait()
            tensor.copy_(value)


def _mismatch(
    entries: Mapping[str, Tensor], state: Mapping[str, Tensor], strict: bool
) -> str | None:
    missing = [n for n in entries if n not in state]
    extra = [n for n in state if n not in entries]
    if strict and (missing or extra):
        return (
            f"the checkpoint does not fit the model: missing {missing[:5]}, unexpected {extra[:5]} "
            f"({len(missing)} and {len(extra)} in all)"
        )
    if len(missing) == len(entries) and entries:
        return (
            f"no name in the checkpoint fits the model; it has {list(state)[:5]}, "
            f"the model {list(entries)[:5]}"
        )
    for name, tensor in entries.items():
        if name in state and tuple(state[name].shape) != tuple(tensor.shape):
            return (
                f"parameter {name} has shape {tuple(state[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} "
                "in the model"
            )
    return None


def _load_segment(
    model: ShardedModel,
    segment: SegmentState,
    entries: Mapping[str, Tensor],
    given: set[str],
    state: Mapping[str, Tensor],
) -> None:
    names = {id(t): n for n, t in reversed(list(entries.items())) if n in given}
    wanted = [
        (slot, names.get(id(p))) for slot, p in zip(segment.spec.slots, segment.params, strict=True)
    ]
    if not any(name for _, name in wanted):
        return
    flat = model.master_whole(segment).clone()
    if model.around.world.first:
        for slot, name in wanted:
            if name is not None:
                flat[slot.offset : slot.stop].copy_(state[name].reshape(-1))
    model.around.world.control.broadcast(
        flat, source=0, tag=segment.tag, what=f"load of unit {segment.spec.unit or 'root'}"
    ).wait()
    segment.assign(flat)


# -- optimizer -------------------------------------------------------------------------------------


def _numbers(stepper: Stepper) -> dict[int, int]:
    """``id(parameter)`` to its number in torch's optimizer format."""
    params = [p for g in stepper.optimizer.param_groups for p in g["params"]]
    return {id(p): i for i, p in enumerate(params)}


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
    wanted = everywhere or world.first
    numbers = _numbers(stepper)
    out: dict[int, dict[str, Any]] = {}
    for segment in stepper.segments:
        entries = stepper.entries(segment)
        mine = [_describe(run, state) for run, state in entries if state]
        everyone = exchange_notes(world.gather, mine, "collection of optimizer state")
        notes = [note for rank in everyone for note in rank]
        keys = sorted({(k, d) for note in notes for k, d in note["elements"].items()})
        wholes = {}
        for key, dtype in keys:
            flat = torch.zeros(segment.num_stepped, dtype=getattr(torch, dtype))
            for run, state in entries:
                if per_element(state.get(key), run):
                    flat[run.start : run.stop].copy_(state[key].reshape(-1))
            wholes[key] = _collect(model, segment, flat)
        if not wanted:
            continue
        for slot, param in enumerate(segment.params):
            at = segment.spec.slots[slot]
            for note in (n for n in notes if slot in n["slots"]):
                entry = out.setdefault(numbers[id(param)], {})
                for key in note["elements"]:
                    entry[key] = wholes[key][at.offset : at.stop].view(at.spec.shape).clone()
                entry.update({k: _unscalar(v) for k, v in note["scalars"].items()})
    if not wanted:
        return {}
    out = _over_the_pipe(model, out, everywhere=everywhere)
    if not (everywhere or world.rank == 0):
        return {}
    groups = []
    for group in stepper.optimizer.param_groups:
        packed = {k: v for k, v in group.items() if k != "params"}
        groups.append({**packed, "params": [numbers[id(p)] for p in group["params"]]})
    return {"state": {i: out[i] for i in sorted(out)}, "param_groups": groups}


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
    model.around.world.gather.all_gather(
        whole, flat.to(whole.device), tag=segment.tag, what="collection of optimizer state"
    ).wait()
    return whole.cpu()


def load_optimizer_state(model: ShardedModel, stepper: Stepper, saved: Mapping[str, Any]) -> None:
    """See :meth:`zeroexp.engine.Engine.load_optimizer_state_dict`."""
    world = model.around.world
    numbers = _numbers(stepper)
    note: dict[str, Any] = {}
    if world.rank == 0:
        note = _summarise(stepper, saved, numbers, {n: p for p, n in _named(model)})
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
        infos = [note["params"].get(str(numbers[id(p)])) for p in segment.params]
        history = stepper.histories[segment.tag]
        history.split(
            [repr(info and sorted(info["scalars"].items())) for info in infos], stepper.face.state
        )
        keys = sorted({k for info in infos if info for k in info["elements"]})
        flats = {k: _scatter(model, segment, k, given, infos, numbers) for k in keys}
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


def _named(model: ShardedModel) -> list[tuple[int, str]]:
    return [(id(p), n) for n, p in (*model.params.items(), *model.elsewhere.items())]


def _summarise(
    stepper: Stepper, saved: Mapping[str, Any], numbers: dict[int, int], names: dict[str, int]
) -> dict[str, Any]:
    """What the other ranks must know of rank 0's ``saved``, or the reason why it does not fit."""
    groups = stepper.optimizer.param_groups
    sizes = [len(g["params"]) for g in saved.get("param_groups", [])]
    if sizes != [len(g["params"]) for g in groups]:
        return {
            "problem": f"the optimizer checkpoint has groups of {sizes} parameters, the "
            "optimizer of "
            f"{[len(g['params']) for g in groups]}"
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
    by_number = [p for g in groups for p in g["params"]]
    label = {numbers[i]: n for n, i in names.items() if i in numbers}
    params: dict[str, Any] = {}
    for old, entry in saved["state"].items():
        number = place[old]
        shape = tuple(by_number[number].shape)
        elements, scalars = [], {}
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if tuple(value.shape) != shape and stepper.whole:  # factors, one per row
                    scalars[key] = _scalar(value)
                    continue
                if tuple(value.shape) != shape:
                    return {
                        "problem": f"optimizer state {key} of {label.get(number, number)} has "
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
    numbers: dict[int, int],
) -> dict[str, Tensor]:
    """Rank 0's whole tensors as ``<number>.<key>``, on the first rank of each part that steps
    them."""
    world = model.around.world
    if not world.first:
        return {}
    order = [i for g in saved["param_groups"] for i in g["params"]] if world.rank == 0 else []
    everything = {
        f"{number}.{key}": saved["state"][order[int(number)]][key]
        for number, info in (infos.items() if world.rank == 0 else ())
        for key in info["elements"]
    }
    mine = [str(numbers[id(p)]) for s in stepper.segments for p in s.params]
    wanted = [f"{n}.{key}" for n in mine if n in infos for key in infos[n]["elements"]]
    return hand_out(world, everything, wanted, model.around.device, "load of optimizer state")


def _scatter(
    model: ShardedModel,
    segment: SegmentState,
    key: str,
    given: Mapping[str, Tensor],
    infos: list[Any],
    numbers: dict[int, int],
) -> Tensor:
    """This rank's part ``[master.numel()]`` of one kind of state, from the whole tensors that the
    first rank was handed."""
    flat = torch.zeros(segment.spec.size, dtype=torch.float32, device=model.around.device)
    if segment.master_dtype == torch.float64:
        flat = flat.double()
    if model.around.world.first:
        for at, param, info in zip(segment.spec.slots, segment.params, infos, strict=True):
            if info and key in info["elements"]:
                flat[at.offset : at.stop].copy_(given[f"{numbers[id(param)]}.{key}"].reshape(-1))
    model.around.world.control.broadcast(
        flat, source=0, tag=segment.tag, what="load of optimizer state"
    ).wait()
    return flat if segment.num_stepped == segment.spec.size else flat[segment.lo : segment.hi]
