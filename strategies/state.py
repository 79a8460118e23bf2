"""The strategy's part in saving and resuming (formats and files: checkpoint.py)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from zeroexp.comm.notes import exchange_notes
from zeroexp.errors import CheckpointError
from zeroexp.strategies import checkpoint as files
from zeroexp.strategies.compat import Namespace
from zeroexp.strategies.faults import Meeting
from zeroexp.strategies.hyperparameters import made_plain
from zeroexp.strategies.optimization import Optimization, unwrapped


class State:
    """Mixed into a Lightning strategy class, whose attributes the annotations name."""

    ns: Namespace
    optimization: Optimization
    optimizers: Any
    checkpoint_io: Any
    is_global_zero: bool
    lightning_module: Any
    broadcast: Any
    follow_optimizers: Any
    _meeting: Meeting
    _late_state: tuple[Mapping[str, Any], bool] | None

    # ------------------------------------------------------------------ what Lightning asks
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the whole module, before it is sharded.

        So ``weights_only`` reaches the reader (after setup the Trainer drops it), and
        ``on_load_checkpoint`` may change the weights before anything has been copied.
        """
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    # ------------------------------------------------------------------ load
    def load_checkpoint(
        self, checkpoint_path: str | PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The whole checkpoint; its tensors are mapped from the file, on every rank."""
        path = self.broadcast(checkpoint_path)
        if type(self.checkpoint_io) is self.ns.TorchCheckpointIO:
            return files.read(path, weights_only, self.ns)
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state, module = checkpoint["state_dict"], self.lightning_module
        _check_some_match(state, module, strict)
        if self.optimization.is_set_up:
            self.optimization.engine.load_state_dict(dict(state), strict=strict)
        elif files.is_whole(module):
            module.load_state_dict(state, strict=strict)
        else:
            self._late_state = (state, strict)  # born sharded: setup loads it through the engine

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds the state of {len(states)} optimizers, and"
                f" configure_optimizers returned {len(self.optimizers)}"
            )
        self.follow_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            self.optimization.engine.load_optimizer_state_dict(unwrapped(optimizer), state)

    # ------------------------------------------------------------------ save
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors by name on rank 0, ``{}`` elsewhere. Every rank has to call it."""
        self._meet_after_exception()
        module = self.lightning_module
        if not self.optimization.is_set_up:
            files.refuse_shares(module)
            if files.is_whole(module):
                return module.state_dict() if self.is_global_zero else {}
            return files.collected(module, keep=self.is_global_zero)
        whole = self.optimization.engine.state_dict()
        if type(module).state_dict is nn.Module.state_dict:
            return whole
        from zeroexp import gathered

        spread = files.has_shares(module)
        with gathered(module):
            own = module.state_dict() if self.is_global_zero or spread else {}
        names: list[list[str]] = []
        if spread:  # each rank has the names of its own experts
            control = self.optimization.engine.world.control
            names = exchange_notes(control, list(own), "names to save")
        return files.filtered(whole, own if self.is_global_zero else {}, names)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """torch's form of the state, whole, on rank 0; ``{}`` elsewhere."""
        optimizer = unwrapped(optimizer)
        engine = self.optimization.engine_of(optimizer)
        if engine is not None:
            return engine.optimizer_state_dict(optimizer)
        state: dict[str, Any] = optimizer.state_dict() if self.is_global_zero else {}
        return state

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write on rank 0. A failure there is raised on every rank, so that none waits."""
        path = self.broadcast(filepath)
        problem = None
        if self.is_global_zero:
            problem = files.write(
                self.checkpoint_io.save_checkpoint, made_plain(checkpoint), path, storage_options
            )
        problem = self.broadcast(problem)
        if problem is not None:
            raise CheckpointError(f"rank 0 could not write {path}: {problem}")

    def _meet_after_exception(self) -> None:
        """After an exception, save only if every rank does; else raise the exception again."""
        trainer = self.lightning_module._trainer
        if trainer is None or trainer.state.status != self.ns.TrainerStatus.INTERRUPTED:
            return
        if self._meeting.everyone():
            return
        cause = sys.exc_info()[1]
        text = (
            "no checkpoint is saved: it is gathered from all ranks, and after the exception not"
            f" every rank came within {self._meeting.seconds:g} s"
        )
        if cause is None:
            raise CheckpointError(text)
        warnings.warn(f"{text} ({type(cause).__name__}: {cause})", stacklevel=2)
        raise cause


def _check_some_match(state: Mapping[str, Any], module: Any, strict: bool) -> None:
    if strict or not state:
        return
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if names and not names & state.keys():
        first, ours = next(iter(state)), sorted(names)[0]
        raise CheckpointError(
            f"no name in the checkpoint (first: {first!r}) is a name in the model (first:"
            f" {ours!r}); with strict=False nothing would have been loaded"
        )
