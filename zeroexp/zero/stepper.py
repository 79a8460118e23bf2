"""Steps the owned part of every segment with the user's optimizer, and publishes the result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.errors import OptimizerError
from zeroexp.layout import Share
from zeroexp.optim.elementwise import is_elementwise
from zeroexp.optim.face import Face
from zeroexp.optim.history import History, Run, per_element
from zeroexp.zero.passes import FusesPasses, fused, give_gradient
from zeroexp.zero.pieces import PieceStep
from zeroexp.zero.segment import SegmentState
from zeroexp.zero.surroundings import Surroundings


def _refuse_closures(optimizer: Optimizer) -> None:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise OptimizerError(
            f"{type(optimizer).__name__}.step() needs {', '.join(needed)}: it evaluates the model "
            "several times per step, "
            "which the engine does not do. Use an optimizer whose step() needs no argument."
        )


class Stepper:
    """One optimizer over the segments of its parameter groups.

    ``first_group`` is the number of its first group among all optimizers'. Raises
    :class:`OptimizerError` when the optimizer looks at whole matrices and the placement cuts them.
    """

    def __init__(
        self, face: Face, segments: Sequence[SegmentState], first_group: int, around: Surroundings
    ) -> None:
        self.face = face
        self.segments: list[SegmentState] = []
        self._first_group = first_group
        self._around = around
        _refuse_closures(face.optimizer)
        cut = around.placement.optim.sharded and around.world.sharing().gather.size > 1
        whole = not is_elementwise(face.optimizer)
        if whole and cut:
            raise OptimizerError(
                f"{type(face.optimizer).__name__} looks at whole parameters (it gives other "
                "results on slices), but this "
                "ZeRO stage cuts them over the ranks. Use zero.stage=0, or an element-wise "
                "optimizer."
            )
        self.whole = whole
        """Whether the optimizer gets whole parameters, because it looks at matrices."""
        self._sizes = self._group_sizes()
        self.histories: dict[int, History] = {}
        self._accounted: dict[int, list[int]] = {}
        self._pieces: PieceStep | None = None
        self._stepped: set[int] = set()
        self.adopt(segments)

    def refuse_cut(self, shares: Mapping[int, Share]) -> None:
        """Raise :class:`OptimizerError` when the optimizer looks at whole parameters and ``shares``
        (by ``id``) are slices of some."""
        cut = [
            slot.spec.name
            for segment in self.segments
            for slot, param in zip(segment.spec.slots, segment.params, strict=True)
            if (share := shares.get(id(param))) is not None and not share.ends
        ]
        if self.whole and cut:
            raise OptimizerError(
                f"{type(self.optimizer).__name__} looks at whole parameters (it gives other "
                f"results on slices), but {cut[0]} holds some of the experts only. Use "
                "moe.expert_parallel=1, or an element-wise optimizer."
            )

    def adopt(self, segments: Sequence[SegmentState]) -> None:
        """Take over those of ``segments`` that belong to groups of this optimizer."""
        last = self._first_group + len(self.optimizer.param_groups)
        for segment in segments:
            if self._first_group <= segment.spec.group < last:
                self.segments.append(segment)
                self.reset_history(segment)

    def reset_history(self, segment: SegmentState) -> None:
        """All parameters of ``segment`` share one history again."""
        index = segment.index if segment.placement.optim.sharded else None
        master = segment.master
        if master is None:  # on disk: a stand-in without memory is what its history is known by
            master = torch.empty(segment.num_stepped, dtype=segment.master_dtype, device="meta")
        self.histories[segment.tag] = History(segment.spec, master, index, whole=self.whole)

    def _check_groups(self) -> None:
        if self._group_sizes() != self._sizes:
            raise OptimizerError(
                f"the groups of the optimizer changed since the engine was built (from "
                f"{self._sizes} to {self._group_sizes()} parameters): after add_param_group() the "
                "new parameters have no gradients here. Build the engine with all groups and "
                "freeze parameters with requires_grad_(False) until they are needed."
            )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    @property
    def optimizer(self) -> Optimizer:
        return self.face.optimizer

    # -- step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, touched: Mapping[int, Sequence[bool]], scale: float) -> None:
        """Step what has gradients; they are multiplied by ``scale`` first. ``touched`` is per
        segment tag and slot."""
        active = self.prepare(touched)
        rest = [s for s in active if s.tag not in self._stepped]
        in_pieces = self._pieces is not None or any(s.needs_pieces for s in rest)
        if in_pieces:
            self._step_in_pieces(rest, touched, scale)
        else:
            self._step_at_once(rest, touched, scale)
        self.publish(active)

    def prepare(self, touched: Mapping[int, Sequence[bool]]) -> list[SegmentState]:
        """The segments that will be stepped, with their gradients where they are needed, and one
        run for all parameters that share a history."""
        self._check_groups()
        around = self._around
        around.world.settle()
        active = [s for s in self.segments if any(touched[s.tag])]
        rest = [s for s in active if s.tag not in self._stepped]
        for segment in rest:
            segment.check_views()
            segment.adopt_edits()
            self.histories[segment.tag].split(touched[segment.tag], self.face.state)
        if not around.placement.optim.sharded:
            for pending in [s.grads.spread() for s in rest]:
                pending.wait()
        return active

    def publish(self, active: Sequence[SegmentState]) -> None:
        """The values of ``active`` are new on this rank: bring them to the others."""
        for pending in [
            s.mirror.publish() for s in active if s.mirror.publishes and not s.home_on_disk
        ]:
            pending.wait()
        # A graph made before this step must not be used after it; ``.data`` hides the change.
        torch.autograd.graph.increment_version([p for s in active for p in s.params])
        for segment in active:
            segment.count_transfers()
            if self._entries_of(segment) != self._accounted.get(segment.tag):
                self.account(segment)

    def present(self, segment: SegmentState, touched: Mapping[int, Sequence[bool]]) -> list[Run]:
        """The runs of ``segment`` that are stepped."""
        history = self.histories[segment.tag]
        return [r for r in history.runs if history.present(r, touched[segment.tag])]

    def _step_at_once(
        self,
        segments: Sequence[SegmentState],
        touched: Mapping[int, Sequence[bool]],
        scale: float,
    ) -> None:
        """In one call of the optimizer."""
        optimizer = self.optimizer
        groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        tensors: list[Tensor] = []
        copies: dict[Tensor, Tensor] = {}
        with ExitStack() as stack:
            for segment in segments:
                runs = self.present(segment, touched)
                gradient = stack.enter_context(segment.grads.stepped())
                values = stack.enter_context(segment.mirror.updating(keeps=True))
                if scale != 1.0 and not isinstance(optimizer, FusesPasses):
                    gradient.mul_(scale)
                for run in runs:
                    shape = run.tensor.shape
                    give_gradient(optimizer, run.tensor, gradient[run.start : run.stop].view(shape))
                    groups[segment.spec.group - self._first_group].append(run.tensor)
                    tensors.append(run.tensor)
                    if segment.master_copy is not None:
                        copies[run.tensor] = values[run.start : run.stop].view(shape)
            with fused(optimizer, scale, copies):
                try:
                    self.face.step(groups)
                finally:
                    for tensor in tensors:
                        tensor.grad = None

    def _step_in_pieces(
        self,
        segments: Sequence[SegmentState],
        touched: Mapping[int, Sequence[bool]],
        scale: float,
    ) -> None:
        """As state and parameters come from disk and go back to it."""
        pieces = self._begin_pieces(scale)
        work = [(s, self.present(s, touched)) for s in segments]
        for segment, runs in work:
            pieces.announce(segment, runs)
        for segment, runs in work:
            partly = sum(r.stop - r.start for r in runs) < segment.num_stepped
            with (
                segment.grads.stepped() as gradient,
                segment.mirror.updating(keeps=partly) as values,
            ):
                pieces.step(segment, runs, gradient, values)
        pieces.finish()
        self.end_ahead()

    def new_pieces(self, scale: float) -> PieceStep:
        """A step that is made in pieces."""
        return PieceStep(self.face, scale, self._first_group)

    def _begin_pieces(self, scale: float) -> PieceStep:
        if self._pieces is None:
            self._check_groups()
            self._pieces = self.new_pieces(scale)
        elif self._pieces.outdated:
            raise OptimizerError(
                "a hyperparameter of the optimizer was changed between backward and step, but a "
                "part of the step was made during backward with the old one. Change it before "
                "backward, or set offload.step_in_backward=false."
            )
        return self._pieces

    # -- in backward -------------------------------------------------------------------------------

    def step_ahead(self, segment: SegmentState, values: Tensor) -> Callable[[], None]:
        """Take ``segment``, whose parameters all have their reduced gradients, out of the step to
        come; the returned function steps it on any thread and writes into ``values``."""
        segment.check_views()
        segment.adopt_edits()
        pieces = self._begin_pieces(1.0)
        self.histories[segment.tag].split([True] * len(segment.params), self.face.state)
        runs = self._runs(segment)
        gradient = segment.grads.beside_master()
        pieces.announce(segment, runs)
        self._stepped.add(segment.tag)
        return lambda: pieces.step(segment, runs, gradient, values)

    def foresee(self, segments: Sequence[SegmentState]) -> Callable[[], None]:
        """:meth:`step_ahead` will probably follow for ``segments``; the returned function begins to
        read what it needs, on the thread that steps."""
        pieces = self._begin_pieces(1.0)
        for segment in segments:
            pieces.announce(segment, self._runs(segment))
        return pieces.prefetch

    def end_ahead(self) -> None:
        """Forget what was stepped ahead."""
        self._pieces, self._stepped = None, set()

    # -- account -----------------------------------------------------------------------------------

    def account(self, segment: SegmentState) -> None:
        """Record the state bytes the optimizer holds for ``segment`` now."""
        nbytes = padding = 0
        used = [
            (p.shard_start, p.shard_start + p.numel) for p in segment.spec.pieces(segment.index)
        ]
        if not segment.placement.optim.sharded:
            used = [(s.offset, s.stop) for s in segment.spec.slots]
        for run in self.histories[segment.tag].runs:
            mine = sum(max(0, min(run.stop, b) - max(run.start, a)) for a, b in used)
            for value in self.face.state.get(run.tensor, {}).values():
                if per_element(value, run):
                    nbytes += value.nbytes
                    padding += (run.stop - run.start - mine) * value.element_size()
        segment.hold_optimizer_bytes(nbytes, padding)
        self._accounted[segment.tag] = self._entries_of(segment)

    def _entries_of(self, segment: SegmentState) -> list[int]:
        """State entries of each run: what the bytes can change with."""
        state = self.face.state
        return [len(state.get(r.tensor, ())) for r in self.histories[segment.tag].runs]

    # -- state, for checkpoints --------------------------------------------------------------------

    def entries(self, segment: SegmentState) -> list[tuple[Run, dict[str, Any]]]:
        """Runs of ``segment`` with their optimizer state, what is on disk read from there."""
        found = [(r, dict(self.face.state.get(r.tensor, {}))) for r in self._runs(segment)]
        disk = segment.on_disk.optim if segment.on_disk is not None else None
        names = {k for run, state in found for k, v in state.items() if per_element(v, run)}
        for name in names if disk is not None else ():
            assert disk is not None
            column = disk.read(name)
            for run, state in found:
                if name in state:
                    state[name] = column[run.start : run.stop].view(run.tensor.shape)
        return found

    def put(self, segment: SegmentState, run: Run, entry: dict[str, Any]) -> None:
        """Give ``run`` the state ``entry``."""
        disk = segment.on_disk.optim if segment.on_disk is not None else None
        state = self.face.state[run.tensor]
        for name, value in entry.items():
            if disk is None or not per_element(value, run):
                here = per_element(value, run) and not run.tensor.is_meta
                state[name] = value.to(run.tensor.device) if here else value
                continue
            disk.write(name, value.reshape(-1), run.start)
            state[name] = torch.empty_like(value, device="meta")

    def _runs(self, segment: SegmentState) -> list[Run]:
        return self.histories[segment.tag].runs
