"""Layout arithmetic: every element of every parameter lies in exactly one place."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroexp.layout import ALIGN, ParamSpec, make_layout, make_segment

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes=SHAPES, shards=st.integers(1, 7))
def test_pieces_cover_each_parameter_once(shapes: list[tuple[int, ...]], shards: int) -> None:
    specs = [ParamSpec(f"p{i}", shape) for i, shape in enumerate(shapes)]
    segment = make_segment(specs, "", shards)
    covered = {s.name: [0] * s.numel for s in specs}
    for index in range(shards):
        lo, hi = segment.bounds(index)
        assert lo % ALIGN == 0 and hi - lo == segment.shard_size
        for piece in segment.pieces(index):
            assert 0 <= piece.shard_start <= piece.shard_start + piece.numel <= hi - lo
            for k in range(piece.numel):
                covered[piece.slot.spec.name][piece.param_start + k] += 1
    assert all(set(counts) <= {1} for counts in covered.values())
    assert all(slot.offset % ALIGN == 0 for slot in segment.slots)


@given(shapes=SHAPES, shards=st.integers(1, 7))
def test_padding_is_what_is_not_a_parameter(shapes: list[tuple[int, ...]], shards: int) -> None:
    segment = make_segment([ParamSpec(f"p{i}", s) for i, s in enumerate(shapes)], "", shards)
    numel = sum(math.prod(s) for s in shapes)
    assert segment.size % (shards * ALIGN) == 0
    assert segment.padding == segment.size - numel == sum(b - a for a, b in segment.gaps)
    assert sum(segment.padding_in(i) for i in range(shards)) == segment.padding


def test_one_segment_per_dtype_trainability_and_group() -> None:
    layout = make_layout(
        [
            ParamSpec("blocks.0.a", (4,)),
            ParamSpec("blocks.0.b", (4,), "bfloat16"),
            ParamSpec("blocks.0.c", (4,), trainable=False),
            ParamSpec("blocks.0.d", (4,), group=1),
            ParamSpec("blocks.0.e", (4,)),
            ParamSpec("head.w", (3,)),
        ],
        cut="block",
        shards=2,
    )
    assert [u.name for u in layout.units] == ["", "blocks.0"]
    kinds = [[s.spec.name[-1] for s in seg.slots] for seg in layout.units[1].segments]
    assert kinds == [["a", "e"], ["b"], ["c"], ["d"]]


def test_aliases_are_found() -> None:
    layout = make_layout([ParamSpec("emb.w", (4, 4), aliases=("head.w",))], cut="block", shards=1)
    assert layout.find("head.w") == layout.find("emb.w")
    with pytest.raises(KeyError):
        layout.find("nowhere")


def test_a_trillion_parameters_are_arithmetic() -> None:
    layout = make_layout([ParamSpec("w", (2**20, 2**20))], cut="model", shards=1024)
    (segment,) = layout.segments
    assert segment.shard_size == 2**30
    assert segment.padding == 0
