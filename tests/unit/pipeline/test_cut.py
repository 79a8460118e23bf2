"""Cuts against all cuts there are, and what cannot be cut."""

from __future__ import annotations

import itertools
import random

import pytest

from zeroexp.errors import ConfigError
from zeroexp.pipeline.cut import Layer, balanced, cut


def all_cuts(n: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, n) for inner in itertools.combinations(range(1, n), parts - 1)]


def sums(weights: list[float], bounds: tuple[int, ...]) -> list[float]:
    return [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]


def test_the_largest_part_is_the_smallest_possible() -> None:
    draw = random.Random(0)
    for _ in range(150):
        n = draw.randint(1, 9)
        weights: list[float] = [draw.choice((0, 1, 2, 3, 7, 20)) for _ in range(n)]
        anchors = [draw.random() < 0.7 for _ in range(n)]
        for parts in range(1, n + 1):
            fine = [
                bounds
                for bounds in all_cuts(n, parts)
                if all(any(anchors[a:b]) for a, b in itertools.pairwise(bounds))
            ]
            if not fine:
                with pytest.raises(ValueError, match="cannot make"):
                    balanced(weights, parts, anchors)
                continue
            found = balanced(weights, parts, anchors)
            assert found in fine

            def key(bounds: tuple[int, ...], w: list[float] = weights) -> tuple[float, float]:
                parts = sums(w, bounds)
                return max(parts), sum(x * x for x in parts)

            assert key(found) == min(map(key, fine))


def test_measured_times_are_cut_exactly() -> None:
    """Floats: the same bound as the best of all cuts, to the last bit of its own sum."""
    draw = random.Random(1)
    for _ in range(40):
        weights = [draw.uniform(0.1, 3) for _ in range(9)]
        found = max(sums(weights, balanced(weights, 4)))
        assert found == pytest.approx(
            min(max(sums(weights, bounds)) for bounds in all_cuts(9, 4)), rel=1e-12
        )


def model(*params: int, **of: list[float]) -> list[Layer]:
    return [
        Layer(f"layer{i}", n, **{name: values[i] for name, values in of.items()})
        for i, n in enumerate(params)
    ]


def test_by_parameters_layers_and_time() -> None:
    """An embedding, four blocks, a head: each way puts the cut elsewhere."""
    forward = [0.0, 1.0, 1.0, 1.0, 1.0, 4.5]
    layers = model(500, 100, 100, 100, 100, 300, forward=forward)
    assert cut(layers, 2, "parameters").bounds == (0, 2, 6)
    assert cut(layers, 2, "parameters").weights == (600, 600)
    assert cut(layers, 2, "layers").bounds == (0, 3, 6)
    by_time = cut(layers, 2, "time")
    assert by_time.bounds == (0, 5, 6) and by_time.weights == (4, 4.5)
    assert by_time.imbalance == pytest.approx(4.5 / 4.25)
    explicit = cut(layers, 3, [1, 4, 1])
    assert explicit.sizes == (1, 4, 1) and explicit.bounds == (0, 1, 5, 6)
    assert list(explicit.stage(1)) == [1, 2, 3, 4]


def test_backward_counts() -> None:
    layers = model(1, 1, 1, forward=[1, 1, 1], input_grad=[0, 0, 2], weight_grad=[0, 0, 2])
    assert cut(layers, 2, "time").bounds == (0, 2, 3)


def test_virtual_stages_are_more_parts() -> None:
    assert cut(model(*[10] * 8), 2 * 2).sizes == (2, 2, 2, 2)


def test_a_layer_without_parameters_is_no_stage() -> None:
    """By the number alone (2, 2, 2) would be even, its second stage without parameters."""
    layers = model(5, 0, 0, 0, 5, 5)
    found = cut(layers, 3, "layers")
    assert sorted(found.sizes) == [1, 2, 3]
    assert all(any(layers[i].params for i in found.stage(s)) for s in range(3))
    assert cut(model(5, 0, 0, 5, 5), 3, "layers").sizes == (2, 2, 1)


def test_many_layers() -> None:
    assert cut(model(*[1] * 400), 32).weights.count(13) == 16


@pytest.mark.parametrize(
    ("params", "stages", "by", "message"),
    [
        ([1, 1, 1], 4, "layers", "pipeline.stages.*4 stages are more than the model's 3 layers"),
        ([1, 0, 0, 1], 3, "layers", "only 2 of 4 layers have parameters.*Use at most 2"),
        ([1, 1], 0, "layers", "0 is not a count"),
        ([1, 1], 2, "colour", "no way to cut by colour.*parameters, layers, time or the layers"),
        ([1, 1], 2, "time", "no layer has a measured time"),
        ([1, 0, 1], 3, [1, 1, 1], r"stage 1 \(layer1\) has no parameters"),
        ([1, 1, 1], 2, [1, 1, 1], r"\[1, 1, 1\] cuts 3 stages, not 2.*Give 2 counts"),
        ([1, 1, 1], 2, [3, 0], r"\[3, 0\] leaves a stage without a layer"),
        ([1, 1, 1], 2, [1, 1], r"\[1, 1\] has 2 layers, the model 3"),
    ],
)
def test_what_cannot_be_cut(
    params: list[int], stages: int, by: str | list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(model(*params), stages, by)


def test_a_time_that_is_none() -> None:
    with pytest.raises(ConfigError, match="time of layer layer1 is nan"):
        cut(model(1, 1, forward=[1, float("nan")]), 2, "time")
