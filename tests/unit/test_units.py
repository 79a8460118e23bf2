"""The cut of a model into units, by names alone."""

from __future__ import annotations

import pytest

from zeroexp.units import common_unit, order, unit_of


@pytest.mark.parametrize(
    ("name", "cut", "wanted"),
    [
        ("emb.weight", "block", ""),
        ("blocks.0.attn.q.weight", "block", "blocks.0"),
        ("blocks.3.experts.1.w", "block", "blocks.3"),
        ("0.weight", "block", "0"),
        ("weight", "block", ""),
        ("a.b.weight", "leaf", "a.b"),
        ("weight", "leaf", ""),
        ("blocks.0.a.w", "model", ""),
        ("enc.layers.2.a.w", "enc.layers.*,dec.layers.*", "enc.layers.2"),
        ("dec.layers.2.w", "enc.layers.*, dec.layers.*", "dec.layers.2"),
        ("head.w", "enc.layers.*", ""),
    ],
)
def test_unit_of(name: str, cut: str, wanted: str) -> None:
    assert unit_of(name, cut) == wanted


@pytest.mark.parametrize(
    ("names", "cut", "wanted"),
    [
        (["emb.weight", "head.weight"], "block", ""),
        (["blocks.0.a.w", "blocks.0.b.w"], "block", "blocks.0"),
        (["blocks.0.a.w", "blocks.1.a.w"], "block", ""),
        (["t.a.w", "t.b.w"], "leaf", "t"),
        (["x.a.w", "y.b.w"], "leaf", ""),
    ],
)
def test_a_shared_parameter_belongs_to_the_innermost_unit_that_encloses_every_use(
    names: list[str], cut: str, wanted: str
) -> None:
    assert common_unit(names, cut) == wanted


def test_the_root_comes_first() -> None:
    assert order(["b.0", "b.1", "", "b.2", "b.0"]) == ["", "b.0", "b.1", "b.2"]
    assert order(["b.1", "b.0"]) == ["b.1", "b.0"]
