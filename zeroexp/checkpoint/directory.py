"""A checkpoint on disk: a directory that is complete or not there.

``model.safetensors``, one ``optimizer-<i>.safetensors`` each, ``state.json``. It is written beside
its final name and renamed at the end, so a reader sees the old one or the new one. Nothing in it
can execute code.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zeroexp.checkpoint.across import note_of_rank_0
from zeroexp.errors import CheckpointError

if TYPE_CHECKING:
    from zeroexp.engine import Engine

FORMAT = 1


def save(engine: Engine, directory: Path) -> None:
    """Write the state of ``engine`` (collective; rank 0 writes)."""
    model = engine.state_dict()
    optimizers = [engine.optimizer_state_dict(o) for o in engine.optimizers]
    problem = None
    if engine.rank == 0:
        try:
            _write(directory, model, optimizers, engine.scalar_state())
        except OSError as error:
            problem = f"cannot write the checkpoint {directory.absolute()}: {error}"
    problem = note_of_rank_0(engine.world, problem, "end of a checkpoint")
    if problem:
        raise CheckpointError(problem)


def _write(
    directory: Path,
    model: dict[str, Tensor],
    optimizers: list[dict[str, Any]],
    scalars: dict[str, Any],
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    save_file(
        {k: v.clone(memory_format=torch.contiguous_format) for k, v in model.items()},
        fresh / "model.safetensors",
    )
    meta: dict[str, Any] = {"format": FORMAT, "engine": scalars, "optimizers": []}
    for i, state in enumerate(optimizers):
        tensors = {
            f"{n}.{k}": v.contiguous()
            for n, entry in state["state"].items()
            for k, v in entry.items()
            if isinstance(v, Tensor)
        }
        plain = {
            str(n): {k: v for k, v in entry.items() if not isinstance(v, Tensor)}
            for n, entry in state["state"].items()
        }
        groups = [
            {k: v.item() if isinstance(v, Tensor) else v for k, v in g.items()}
            for g in state["param_groups"]
        ]
        save_file(tensors, fresh / f"optimizer-{i}.safetensors")
        meta["optimizers"].append({"state": plain, "param_groups": groups})
    (fresh / "state.json").write_text(json.dumps(meta, indent=1))
    for path in [*fresh.iterdir(), fresh]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def load(engine: Engine, directory: Path) -> None:
    """Read what :func:`save` wrote into ``engine`` (collective; rank 0 reads)."""
    model: dict[str, Tensor] = {}
    states: list[dict[str, Any]] = []
    scalars: dict[str, Any] = {}
    problem: str | None = None
    if engine.rank == 0:
        try:
            model, states, scalars = _read(directory)
            if len(states) != len(engine.optimizers):
                problem = (
                    f"{directory} holds {len(states)} optimizers, "
                    f"the engine has {len(engine.optimizers)}"
                )
        except FileNotFoundError as error:
            problem = (
                f"no checkpoint at {directory.absolute()}: {error.filename or error} is missing"
            )
        except (OSError, ValueError, KeyError) as error:
            problem = f"the checkpoint {directory.absolute()} cannot be read: {error}"
    note = note_of_rank_0(engine.world, [problem, scalars], "start of a load")
    if note[0]:
        kind = FileNotFoundError if note[0].startswith("no checkpoint") else CheckpointError
        raise kind(note[0])
    engine.load_state_dict(model)
    for i, optimizer in enumerate(engine.optimizers):
        engine.load_optimizer_state_dict(optimizer, states[i] if states else {})
    engine.load_scalar_state(note[1])


def _read(directory: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Any]]:
    meta = json.loads((directory / "state.json").read_text())
    if meta.get("format") != FORMAT:
        raise ValueError(f"format {meta.get('format')}, this version reads {FORMAT}")
    model = load_file(directory / "model.safetensors")
    states = []
    for i, plain in enumerate(meta["optimizers"]):
        state: dict[int, dict[str, Any]] = {int(n): dict(v) for n, v in plain["state"].items()}
        for key, tensor in load_file(directory / f"optimizer-{i}.safetensors").items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = tensor
        states.append({"state": state, "param_groups": plain["param_groups"]})
    return model, states, meta["engine"]
