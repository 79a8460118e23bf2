"""The backward in two halves: first the gradients of a stage's inputs, later those of its weights
(Qi et al., arXiv:2401.10241, section 2.1).

The first half is ``torch.autograd.grad`` for the inputs: of every node on the way to them it asks
for the gradients on that way alone. What comes to a node from which an edge also leads off the way,
to a weight, is kept. The second half runs those nodes once more for just these edges, and then
autograd from there to the weights, in one walk: a weight that is used twice gets one sum, and its
hooks see it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from zeroexp.errors import ModelError

MAY_REPEAT = "backward_may_repeat"
"""Set this to True on a ``torch.autograd.Function`` whose backward gives the same gradients when it
is called a second time and does nothing else."""

Grads = tuple[Tensor | None, ...]


@dataclass
class _Branch:
    """A node on the way to the inputs with edges off it. ``edges``: (place among the valid edges,
    where it leads)."""

    node: Node
    edges: list[tuple[int, GradientEdge]]


class SplitBackward:
    """One backward from ``roots`` (with their gradients) through the graph of ``inputs``."""

    def __init__(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
    ) -> None:
        self._roots, self._grads, self._inputs = list(roots), list(grads), list(inputs)
        self._branches: list[_Branch] = []
        self._came: list[Grads | None] = []
        self._off_way: list[tuple[GradientEdge, Tensor]] = []

    def input_grads(self) -> list[Tensor | None]:
        """The first half: the gradients of the inputs, None where there is none.

        Raises :class:`ModelError` naming a custom autograd function that cannot be split.
        """
        on_way = _on_the_way([edge.node for edge in self._roots], {e.node for e in self._inputs})
        chain = [
            (root, grad)
            for root, grad in zip(self._roots, self._grads, strict=True)
            if root.node in on_way
        ]
        self._off_way = [
            (root, grad)
            for root, grad in zip(self._roots, self._grads, strict=True)
            if root.node not in on_way
        ]
        self._roots, self._grads = [], []
        if not chain:
            return [None] * len(self._inputs)
        self._branches = list(_branches(on_way, {edge.node for edge in self._inputs}))
        self._came = [None] * len(self._branches)
        handles = [
            branch.node.register_prehook(partial(self._keep, number))
            for number, branch in enumerate(self._branches)
        ]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in chain],
                self._inputs,
                [grad for _, grad in chain],
                retain_graph=True,
                allow_unused=True,
            )
        except RuntimeError as error:
            raise self._explained(error, on_way) from error
        finally:
            for handle in handles:
                handle.remove()
        return list(found)

    def _keep(self, number: int, grads: Grads) -> None:
        self._came[number] = grads

    def _explained(self, error: RuntimeError, on_way: dict[Node, None]) -> Exception:
        names = sorted({n.name() for n in on_way if _is_custom(n)})
        if not names:
            return error
        return ModelError(
            f"the backward for inputs alone failed ({str(error).splitlines()[0]}). On its way are "
            f"the custom autograd functions {', '.join(names)}: use a schedule that does not split "
            "the backward, and checkpoint(use_reentrant=False) for recomputation"
        )

    def weight_grads(self) -> None:
        """The second half: every leaf that is no input gets its gradient, its hooks fire."""
        edges = [edge for edge, _ in self._off_way]
        grads = [grad for _, grad in self._off_way]
        if self._branches:
            wanted = [edge for branch in self._branches for _, edge in branch.edges]
            for edge, grad in _inside_a_walk(wanted, self._run_branches):
                edges.append(edge)
                grads.append(grad)
        self._branches, self._came, self._off_way = [], [], []
        if edges:
            torch.autograd.backward(edges, grads)

    def _run_branches(self) -> list[tuple[GradientEdge, Tensor]]:
        found = []
        for number, branch in enumerate(self._branches):
            came = self._came[number]
            if came is None:
                continue  # no gradient reached it
            self._came[number] = None
            out = _call(branch.node, came)
            for place, edge in branch.edges:
                grad = out[place]
                if grad is not None:
                    found.append((edge, _fitted(grad, edge)))
        return found


def _on_the_way(roots: Iterable[Node], ends: set[Node]) -> dict[Node, None]:
    """Nodes that lead from the roots to one of ``ends``, those included; in an order that is the
    same in every run, because sums follow it."""
    before: dict[Node, list[Node]] = {}
    seen = dict.fromkeys(roots)
    stack = list(seen)
    while stack:
        node = stack.pop()
        if node in ends:
            continue
        for following, _ in node.next_functions:
            if following is None:
                continue
            before.setdefault(following, []).append(node)
            if following not in seen:
                seen[following] = None
                stack.append(following)
    stack = [node for node in seen if node in ends]
    found = set(stack)
    while stack:
        for node in before.get(stack.pop(), ()):
            if node not in found:
                found.add(node)
                stack.append(node)
    return {node: None for node in seen if node in found}


def _branches(on_way: dict[Node, None], ends: set[Node]) -> Iterable[_Branch]:
    for node in on_way:
        if node in ends:
            continue
        edges = []
        # A custom function's edges are those of its tensors; its results are given for all its
        # arguments. The edges that exist are the same in both.
        custom = _is_custom(node)
        place = 0
        for position, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if following not in on_way:
                edges.append((place if custom else position, GradientEdge(following, number)))
            place += 1
        if not edges:
            continue
        if custom and not getattr(getattr(node, "_forward_cls", None), MAY_REPEAT, False):
            raise ModelError(
                f"the backward of {node.name()} cannot be split: it is a custom autograd function "
                "with gradients of inputs and of parameters, and would have to run twice. If that "
                f"is harmless, set {MAY_REPEAT} = True on the function; else use a schedule that "
                "does not split the backward (1f1b, gpipe, interleaved, breadth_first)"
            )
        yield _Branch(node, edges)


class _Work(torch.autograd.Function):
    """Runs a function as a node of a backward."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.work()
        return grads[0], None


def _inside_a_walk(
    wanted: Sequence[GradientEdge], run: Callable[[], list[tuple[GradientEdge, Tensor]]]
) -> list[tuple[GradientEdge, Tensor]]:
    """``run()`` inside a walk of autograd for the edges ``wanted``: nodes that are called there
    compute the gradients of these edges and no others. (Outside one they would compute all: right,
    but twice the work.)"""
    found: list[tuple[GradientEdge, Tensor]] = []
    start = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        root = _Work.apply(start, lambda: found.extend(run()))  # type: ignore[no-untyped-call]
    leaves: list[Any] = [start, *wanted]
    torch.autograd.grad(root, leaves, allow_unused=True)
    return found


def _is_custom(node: Any) -> bool:
    """A Python ``torch.autograd.Function``'s node: it computes all its gradients or none."""
    return isinstance(node, BackwardCFunction)


def _call(node: Any, came: Grads) -> Sequence[Tensor | None]:
    if not _is_custom(node):
        out = node(*came)
        return out if isinstance(out, tuple) else (out,)
    metas = node._input_metadata
    whole = [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
        for grad, meta in zip(came, metas, strict=True)
    ]
    with torch.no_grad():
        out = node.apply(*whole)
    out = out if isinstance(out, tuple) else (out,)
    return [grad for grad, needed in zip(out, node.needs_input_grad, strict=True) if needed]


def _fitted(grad: Tensor, edge: GradientEdge) -> Tensor:
    """What autograd does between nodes: a broadcast is summed back, and the dtype is the
    tensor's."""
    meta = edge.node._input_metadata[edge.output_nr]
    if grad.shape != meta.shape:
        grad = grad.sum_to_size(meta.shape)
    return grad if grad.dtype == meta.dtype else grad.to(meta.dtype)
