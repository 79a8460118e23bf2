"""Where a model is cut into stages: arithmetic on a list of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NoReturn

from zeroexp.errors import ConfigError, Problem

WAYS = ("parameters", "layers", "time")
"""What a balanced cut can balance."""


@dataclass(frozen=True)
class Layer:
    """A layer and what it costs per micro-batch: ``params`` (elements), ``forward``,
    ``input_grad``, ``weight_grad`` (seconds, measured), ``activations`` (bytes kept from forward to
    backward), ``output`` (bytes sent on if a stage ends here)."""

    name: str
    params: int
    forward: float = 0
    input_grad: float = 0
    weight_grad: float = 0
    activations: float = 0
    output: float = 0

    @property
    def time(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Cut:
    """Stage s holds layers ``bounds[s]`` to ``bounds[s+1]`` (not included); ``weights`` are the
    sums per stage of what was balanced."""

    bounds: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers per stage."""
        return tuple(b - a for a, b in pairwise(self.bounds))

    def stage(self, index: int) -> range:
        """The layers of a stage."""
        return range(self.bounds[index], self.bounds[index + 1])

    @property
    def imbalance(self) -> float:
        """The largest stage over the mean; 1 is even."""
        total = sum(self.weights)
        return max(self.weights) * len(self.weights) / total if total else 1.0


def cut(layers: Sequence[Layer], stages: int, by: str | Sequence[int] = "parameters") -> Cut:
    """Cut ``layers`` into ``stages`` contiguous parts (with virtual stages: ranks x virtual).

    ``by`` names what is balanced, the largest stage being as small as it can be: ``parameters``,
    ``layers`` or ``time`` (forward and backward, measured). Or it is the list of layers per stage.
    Every stage has a layer with parameters. Raises :class:`ConfigError` where that cannot be.
    """
    if stages < 1:
        _refuse("stages", f"{stages} is not a count.", "Use 1 or more")
    if stages > len(layers):
        _refuse(
            "stages",
            f"{stages} stages are more than the model's {len(layers)} layers.",
            f"Use at most {len(layers)} (stages x virtual)",
        )
    if isinstance(by, str):
        weights = _weights(layers, by)
        anchors = [layer.params > 0 for layer in layers]
        if sum(anchors) < stages:
            _refuse(
                "stages",
                f"only {sum(anchors)} of {len(layers)} layers have parameters, and each of "
                f"{stages} stages needs one.",
                f"Use at most {sum(anchors)} (stages x virtual)",
            )
        bounds = balanced(weights, stages, anchors)
    else:
        weights = [layer.params for layer in layers]
        bounds = _explicit(layers, stages, by)
    return Cut(bounds, tuple(sum(weights[a:b]) for a, b in pairwise(bounds)))


def _refuse(key: str, problem: str, fix: str) -> NoReturn:
    raise ConfigError([Problem(f"pipeline.{key}", problem, fix)])


def _weights(layers: Sequence[Layer], by: str) -> list[float]:
    if by not in WAYS:
        known = f"{', '.join(WAYS)} or the layers per stage, as in [3,4,3]"
        _refuse("cut", f"no way to cut by {by}.", f"Use {known}")
    if by == "layers":
        return [1] * len(layers)
    weights = [layer.time if by == "time" else layer.params for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        if not 0 <= weight < math.inf:
            _refuse("cut", f"{by} of layer {layer.name} is {weight}.", "Measure again")
    if by == "time" and not any(weights):
        _refuse("cut", "no layer has a measured time.", "Measure, or cut by parameters")
    return weights


def _explicit(layers: Sequence[Layer], stages: int, sizes: Sequence[int]) -> tuple[int, ...]:
    fix = f"Give {stages} counts of 1 or more with the sum {len(layers)}"
    if len(sizes) != stages:
        _refuse("cut", f"{list(sizes)} cuts {len(sizes)} stages, not {stages}.", fix)
    if any(size < 1 for size in sizes):
        _refuse("cut", f"{list(sizes)} leaves a stage without a layer.", fix)
    if sum(sizes) != len(layers):
        _refuse("cut", f"{list(sizes)} has {sum(sizes)} layers, the model {len(layers)}.", fix)
    bounds = (0, *accumulate(sizes))
    for stage, (a, b) in enumerate(pairwise(bounds)):
        if not any(layer.params for layer in layers[a:b]):
            names = ", ".join(layer.name for layer in layers[a:b])
            _refuse(
                "cut",
                f"stage {stage} ({names}) has no parameters.",
                "Give it a layer that has some",
            )
    return bounds


def balanced(
    weights: Sequence[float], parts: int, anchors: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Bounds of ``parts`` contiguous parts with the smallest largest sum of ``weights``, exactly;
    among those the most even one (smallest sum of squares).

    With ``anchors`` every part holds a True. ValueError if there is no such cut.
    """
    n = len(weights)
    anchors = anchors or [True] * n
    sums = [0, *accumulate(weights)]
    count = [0, *accumulate(map(int, anchors))]
    if parts < 1 or count[n] < parts:
        raise ValueError(f"{n} weights with {count[n]} anchors cannot make {parts} parts")
    # best[j]: the smallest largest part of the first j weights. Walking back from j, a part only
    # grows; once it alone is worse than the best found, nothing further back can help.
    best = [0.0] + [math.inf] * n
    for _ in range(parts):
        row = [math.inf] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j - 1, -1, -1):
                part = sums[j] - sums[i]
                if part >= row[j]:
                    break
                if count[j] > count[i]:
                    row[j] = min(row[j], max(best[i], part))
        best = row
    limit = best[n]
    even = [0.0] + [math.inf] * n
    cuts: list[list[int]] = []
    for _ in range(parts):
        row, came = [math.inf] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j - 1, -1, -1):
                part = sums[j] - sums[i]
                if part > limit:
                    break
                if count[j] > count[i] and even[i] + part * part < row[j]:
                    row[j], came[j] = even[i] + part * part, i
        even = row
        cuts.append(came)
    bounds = [n]
    for came in reversed(cuts):
        bounds.append(came[bounds[-1]])
    return tuple(reversed(bounds))
