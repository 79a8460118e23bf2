"""Steps the owned part of every segment with the user's optimizer, and publishes the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroexp.errors import OptimizerError
from zeroexp.optim.elementwise import is_elementwise
from zeroexp.optim.face import Face
from zeroexp.optim.history import History, Run, per_element
from zeroexp.zero.segment import SegmentState, Surroundings


@runtime_checkable
class FusesPasses(Protocol):
    """An optimizer that scales gradients as it reads them, in whatever dtype they are, and writes a
    low-precision copy as it writes."""

    grad_scale: float
    copy_out: dict[Tensor, Tensor]


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
        cut = around.placement.optim.sharded and around.world.gather.size > 1
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
        self.adopt(segments)

    def adopt(self, segments: Sequence[SegmentState]) -> None:
        """Take over those of ``segments`` that belong to groups of this optimizer."""
        last = self._first_group + len(self.optimizer.param_groups)
        for segment in segments:
            if self._first_group <= segment.spec.group < last:
                self.segments.append(segment)
                self.reset_history(segment)

    def reset_history(self, segment: SegmentState) -> None:
        """All parameters of ``segment`` share one history again."""
        around = self._around
        index = around.world.gather.index if around.placement.optim.sharded else None
        self.histories[segment.tag] = History(segment.spec, segment.master, index, whole=self.whole)

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    @property
    def optimizer(self) -> Optimizer:
        return self.face.optimizer

    @torch.no_grad()
    def step(self, touched: Mapping[int, Sequence[bool]], scale: float) -> None:
        """Step what has gradients; they are multiplied by ``scale`` first. ``touched`` is per
        segment tag and slot."""
        if self._group_sizes() != self._sizes:
            raise OptimizerError(
                f"the groups of the optimizer changed since the engine was built (from "
                f"{self._sizes} to {self._group_sizes()} parameters): after add_param_group() the "
                "new parameters have no gradients here. Build the engine with all groups and "
                "freeze parameters with requires_grad_(False) until they are needed."
            )
        around = self._around
        around.world.gather.settle()
        active = [s for s in self.segments if any(touched[s.tag])]
        for segment in active:
            segment.check_views()
            segment.adopt_edits()
        if not around.placement.optim.sharded:
            for pending in [s.grads.spread() for s in active]:
                pending.wait()
        optimizer = self.optimizer
        fuses = isinstance(optimizer, FusesPasses)
        groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        copies: dict[Tensor, Tensor] = {}
        stepped: list[tuple[SegmentState, Run]] = []
        for segment in active:
            history = self.histories[segment.tag]
            history.split(touched[segment.tag], self.face.state)
            gradient = segment.grads.stepped
            if scale != 1.0 and not fuses:
                gradient.mul_(scale)
            for run in history.runs:
                if not history.present(run, touched[segment.tag]):
                    continue
                grad = gradient[run.start : run.stop].view(run.tensor.shape)
                if fuses and hasattr(run.tensor, "grad_dtype"):  # torch 2.10
                    run.tensor.grad_dtype = None
                    run.tensor.grad = grad
                else:
                    run.tensor.grad = grad.to(run.tensor.dtype)
                groups[segment.spec.group - self._first_group].append(run.tensor)
                stepped.append((segment, run))
                if segment.has_master_copy:
                    copies[run.tensor] = segment.stepped[run.start : run.stop].view(
                        run.tensor.shape
                    )
        if isinstance(optimizer, FusesPasses):
            optimizer.grad_scale, optimizer.copy_out = scale, copies
        try:
            self.face.step(groups)
        finally:
            for _, run in stepped:
                run.tensor.grad = None
            if isinstance(optimizer, FusesPasses):
                optimizer.grad_scale, optimizer.copy_out = 1.0, {}
        if not fuses:
            for master, low in copies.items():
                low.copy_(master)
        if not around.placement.params.sharded and around.placement.optim.sharded:
            for pending in [s.publish() for s in active]:
                pending.wait()
        # A graph made before this step must not be used after it; ``.data`` hides the change.
        torch.autograd.graph.increment_version([p for s in active for p in s.params])
        for segment in active:
            if self._entries_of(segment) != self._accounted.get(segment.tag):
                self.account(segment)

    def account(self, segment: SegmentState) -> None:
        """Record the state bytes the optimizer holds for ``segment`` now."""
        nbytes = padding = 0
        used = [
            (p.shard_start, p.shard_start + p.numel) for p in segment.spec.pieces(segment.index)
        ]
        if not self._around.placement.optim.sharded:
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

    def entries(self, segment: SegmentState) -> list[tuple[Run, dict[str, Any]]]:
        """Runs of ``segment`` with their optimizer state."""
        return [(r, self.face.state.get(r.tensor, {})) for r in self.histories[segment.tag].runs]
