"""Nested values taken apart and put together, as bytes, and cut into micro-batches."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zeroexp.errors import ConfigError, ModelError
from zeroexp.pipeline.runtime import split_batch
from zeroexp.pipeline.runtime.message import PREFIX, Structure, describe, pack, places
from zeroexp.pipeline.runtime.tree import flatten, unflatten

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.tuples(
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    ).map(lambda made: torch.ones(made[0]).to(made[1])),
)
values = st.recursive(
    leaves,
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.lists(part, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), part, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=60)
@given(values)
def test_a_value_comes_back_through_bytes(value):
    message = describe(value)
    buffer = torch.full((message.structure.nbytes,), 255, dtype=torch.uint8)
    pack(buffer, 0, *message)
    structure = Structure.decode(message.structure.encode())
    assert structure == message.structure
    for place in structure.offsets:
        assert place % PREFIX == 0
    assert same(unflatten(structure.shape, places(buffer, structure)), value)


def test_scalars_differ_by_kind_and_by_bits():
    shapes = [flatten(v)[0] for v in (1, True, 1.0, 0.0, -0.0, math.nan, "1", None, math.inf)]
    assert all((a == b) == (i == j) for i, a in enumerate(shapes) for j, b in enumerate(shapes))
    assert math.isnan(unflatten(json.loads(json.dumps(shapes[5])), []))


def test_a_tensor_that_occurs_twice_is_sent_once():
    x = torch.ones(3)
    message = describe([x, {"a": x}, x + 1])
    assert message.structure.payload == 2 * 12
    first, other, _ = message.value
    assert first is other["a"]


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": [1, object()]}, "['x'][1]: a object cannot go"),
        ((Pair(1, 2),), "[0]: a Pair"),
        ([torch.ones(2).to_sparse()], "[0]: a tensor of kind torch.sparse_coo"),
        ({(1, 2): 3}, "key of the dict: a tuple"),
        (b"bytes", "a bytes cannot go"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_place(value, words):
    with pytest.raises(ModelError) as error:
        describe(value)
    assert words in str(error.value)


def test_a_batch_is_cut_along_its_first_dimension():
    batch = {"x": torch.arange(6), "y": (torch.arange(12).view(6, 2), 5), "z": torch.tensor(7)}
    parts = split_batch(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["y"][0].tolist() == [[8, 9], [10, 11]]
    assert all(part["y"][1] == 5 and part["z"] == 7 for part in parts)


@pytest.mark.parametrize(
    ("size", "count", "words"),
    [
        (8, 3, "8 samples do not make 3 equal micro-batches. Use 6 or 9 samples, or 2 or 4 micro"),
        (7, 2, "Use 6 or 8 samples, or 1 or 7 micro-batches"),
        (2, 4, "Use 4 samples, or 2 micro-batches"),
        (5, 0, "0 is not a count"),
    ],
)
def test_a_batch_that_does_not_divide_gets_the_nearest_sizes(size, count, words):
    with pytest.raises(ConfigError) as error:
        split_batch(torch.ones(size, 2), count)
    assert words in " ".join(str(error.value).split())


def test_tensors_of_different_lengths_are_no_batch():
    with pytest.raises(ConfigError, match="4, 6 samples"):
        split_batch((torch.ones(4), torch.ones(6)), 2)
