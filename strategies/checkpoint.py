"""Checkpoints as Lightning writes them: one file, whole tensors by name, readable by every other
strategy.

* Saving: names and order of ``LightningModule.state_dict()``, fp32 (fp64 where that is computed),
  optimizer state by parameter number as ``torch.optim`` has it. Rank 0 holds it, the others
  ``{}``; one rank's failure to write is every rank's error.
* Loading: nothing is unpickled but tensors, plain containers and OmegaConf's own, unless
  ``weights_only=False`` is given to ``fit`` (or ``validate``, …). Tensors are mapped from the
  file, not read; what is never copied costs nothing.
"""

from __future__ import annotations

import collections
import itertools
import pickle
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroexp.errors import CheckpointError
from zeroexp.strategies.compat import Namespace
from zeroexp.zero.shares import shares_of


def _safe_types() -> list[Any]:
    """Types that hyper-parameters of Hydra projects consist of, all of them plain data."""
    from omegaconf import DictConfig, ListConfig, nodes
    from omegaconf.base import ContainerMetadata, Metadata

    leaves = [
        nodes.AnyNode,
        nodes.BooleanNode,
        nodes.BytesNode,
        nodes.EnumNode,
        nodes.FloatNode,
        nodes.IntegerNode,
        nodes.PathNode,
        nodes.StringNode,
    ]
    plain = [dict, list, tuple, set, int, float, str, bool, bytes, Any]
    return [
        DictConfig,
        ListConfig,
        ContainerMetadata,
        Metadata,
        *leaves,
        *plain,
        collections.defaultdict,
    ]


def read(path: str | PathLike[str], weights_only: bool | None, ns: Namespace) -> dict[str, Any]:
    """The checkpoint at ``path``, on the CPU, tensors mapped from the file where that is possible.

    ``weights_only=None`` means true.

    Raises:
        CheckpointError: no such file, a directory, or something in it that only pickle could load.
    """
    safe = weights_only is None or weights_only
    if not ns.is_local(path):
        found: dict[str, Any] = ns.load_file(path, map_location="cpu", weights_only=safe)
        return found
    file = Path(path)
    if file.is_dir():
        raise CheckpointError(f"{file} is a directory; the checkpoints of this strategy are files")
    if not file.exists():
        raise CheckpointError(f"there is no checkpoint at {file.absolute()}")
    try:
        return _load(file, safe)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds objects that are more than data: {_blocked(error)}. If you trust the"
            " file, pass weights_only=False to fit (or validate, test, predict), or allow the"
            " classes with torch.serialization.add_safe_globals."
        ) from error


def _load(file: Path, safe: bool) -> dict[str, Any]:
    with torch.serialization.safe_globals(_safe_types()):
        try:
            return torch.load(file, map_location="cpu", weights_only=safe, mmap=True)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Written by torch's format before 1.6.
            return torch.load(file, map_location="cpu", weights_only=safe)  # type: ignore[no-any-return]


def _blocked(error: Exception) -> str:
    """The names in torch's message about what it refused."""
    words = [word.strip("`,.'\"") for word in str(error).split()]
    after = [b for a, b in itertools.pairwise(words) if a == "GLOBAL"]
    return ", ".join(sorted(set(after))) or str(error).splitlines()[0]


def is_whole(module: nn.Module) -> bool:
    """Whether every parameter is an ordinary tensor that can be copied into."""
    return all(not p.is_meta and not _is_placeholder(p) for p in module.parameters())


def collected(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """``module.state_dict()`` of a module that stayed sharded after its run, gathered one submodule
    at a time; only where ``keep`` is true (collective)."""
    from zeroexp import gathered

    state: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own = {n: p for n, p in dict.items(part._parameters) if p is not None}
        with gathered(own.values()):
            if keep:
                state.update({prefix + n: p.detach().to("cpu", copy=True) for n, p in own.items()})
        if keep:
            kept = [n for n in part._buffers if n not in part._non_persistent_buffers_set]
            buffers = {n: part._buffers[n] for n in kept}
            state.update(
                {prefix + n: b.detach().cpu() for n, b in buffers.items() if b is not None}
            )
    return state


def restore_shapes(module: nn.Module) -> None:
    """Give parameters that a failed run left without values memory again, for a checkpoint to fill.

    It is untouched until then and takes no room.
    """
    for part in module.modules():
        for parameter in dict.values(part._parameters):
            if parameter is not None and _is_placeholder(parameter):
                parameter.data = torch.zeros(
                    parameter.shape, dtype=parameter.dtype, device=parameter.device
                )


def is_lost(module: nn.Module) -> bool:
    """Whether a parameter is the placeholder that a failed run left behind.

    A module that is born sharded has placeholders as well, but its table of parameters is one that
    knows where they are.
    """
    return any(
        type(part._parameters) is dict and parameter is not None and _is_placeholder(parameter)
        for part in module.modules()
        for parameter in part._parameters.values()
    )


def _is_placeholder(parameter: Tensor) -> bool:
    # A released parameter is one number seen with strides of zero (zeroexp.zero.placeholder).
    return parameter.numel() > 1 and all(stride == 0 for stride in parameter.stride())


def filtered(
    whole: dict[str, Tensor], own: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """What a ``LightningModule.state_dict`` of the user's own returns, with the engine's values.

    ``own`` decides which keys there are and in which order, followed by those of experts that only
    other ranks have (``names``, by rank); where ``whole`` has the key, its fp32 tensor is taken.
    """
    theirs = {n: whole[n] for names_of in names for n in names_of if n in whole and n not in own}
    return {key: whole.get(key, value) for key, value in own.items()} | theirs


def has_shares(module: nn.Module) -> bool:
    """Whether a rank has some of the experts only."""
    return bool(shares_of(module))


def refuse_shares(module: nn.Module) -> None:
    """Raise :class:`CheckpointError` for a module whose experts lie on several ranks, which nothing
    connects any more."""
    if has_shares(module):
        raise CheckpointError(
            "the experts of this module lie on several ranks (expert parallelism), and the run "
            "that connected them is over: save while it goes on (a ModelCheckpoint, "
            "trainer.save_checkpoint in on_train_end)"
        )


def write(
    save: Any, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any
) -> str | None:
    """Write on this rank; the error as text, so that it can be told to the others."""
    try:
        file = Path(path)
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a directory")
        save(checkpoint, path, storage_options=storage_options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
