"""Sweeps: one command line becomes many, in Hydra's grammar."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroexp.config import compose, is_multirun, parse_multirun
from zeroexp.config.multirun import sweep_names
from zeroexp.errors import ConfigError


def problem(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_multirun(list(argv))
    (only,) = caught.value.problems
    return f"{only.key}: {only.problem} {only.fix}"


def test_the_product_with_the_last_word_fastest() -> None:
    assert parse_multirun(["zero=stage0,stage3", "optim.lr=1e-3", "trainer.devices=1,2", "-m"]) == [
        ["zero=stage0", "optim.lr=1e-3", "trainer.devices=1"],
        ["zero=stage0", "optim.lr=1e-3", "trainer.devices=2"],
        ["zero=stage3", "optim.lr=1e-3", "trainer.devices=1"],
        ["zero=stage3", "optim.lr=1e-3", "trainer.devices=2"],
    ]


@pytest.mark.parametrize(
    ("word", "runs"),
    [
        ("zero=choice(stage0,hybrid)", ["zero=stage0", "zero=hybrid"]),
        ("zero=glob(stage*)", ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"]),
        ("zero=glob(*,exclude=stage*)", ["zero=hybrid"]),
        ("trainer.devices=range(1,4)", [f"trainer.devices={n}" for n in (1, 2, 3)]),
        ("zero.prefetch=sort(2,0,1)", [f"zero.prefetch={n}" for n in (0, 1, 2)]),
        ("optim.betas=[0.9,0.95],[0.8,0.9]", ["optim.betas=[0.9,0.95]", "optim.betas=[0.8,0.9]"]),
        ("name='a,b'", ["name='a,b'"]),
        ("zero=stage3", ["zero=stage3"]),
    ],
)
def test_the_grammar(word: str, runs: list[str]) -> None:
    assert parse_multirun([word]) == [[run] for run in runs]


def test_quoted_values_stay_one_value_when_parsed_again() -> None:
    """HY-08: a value with commas, blanks and brackets survives the way through a command line."""
    runs = parse_multirun(["tag='a, b','[c]','50%'"])
    assert [compose(run).config.tag for run in runs] == ["a, b", "[c]", "50%"]


def test_a_shuffle_is_the_same_every_time_and_leaves_the_generator_alone() -> None:
    import random

    word = "zero.prefetch=shuffle(range(0,9))"
    random.seed(5)
    expected = random.random()
    random.seed(5)
    first = parse_multirun([word])
    assert random.random() == expected
    assert first == parse_multirun([word])
    assert sorted(first) == [[f"zero.prefetch={n}"] for n in range(9)]


def test_the_last_word_about_a_key_counts() -> None:
    assert parse_multirun(["zero=stage0,stage1", "zero=stage3"]) == [["zero=stage3"]]


def test_is_multirun() -> None:
    for argv in (["-m"], ["a=1", "--multirun"], ["sweep=x"]):
        assert is_multirun(argv)
    assert not is_multirun(["zero=stage0,stage1"])


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("optim.lr=interval(0,1)", "an interval has no list of values; use range or choice"),
        ("zero=glob(x*)", "glob(x*) matches nothing"),
        ("zero.unit=[1", "cannot be read"),
        ("zero", "has no value. Wanted zero=OPTION."),
        ("sweep=nothing_like_it", "nothing_like_it does not exist."),
    ],
)
def test_what_cannot_be_swept(word: str, words: str) -> None:
    assert words in problem(word)


def test_a_sweep_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "description: what it is for\n"
        "overrides: [model=mlp, trainer.devices=2]\n"
        "params:\n  zero: stage1,stage3\n  optim.lr: [0.1, 0.2]\n  tag: ['a, b']\n"
    )
    runs = parse_multirun([f"sweep={file}", "trainer.devices=1"])
    assert len(runs) == 4
    assert [compose(run).config.zero.stage for run in runs] == [1, 1, 3, 3]
    assert [compose(run).config.optim.lr for run in runs] == [0.1, 0.2, 0.1, 0.2]
    for run in runs:
        config = compose(run).config
        assert (config.trainer.devices, config.model.kind, config.tag) == (1, "mlp", "a, b")


def test_a_sweep_file_with_jobs_that_are_no_product(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("overrides: [model=mlp]\njobs:\n  - [zero=stage0]\n  - [zero=stage3, name=b]\n")
    assert parse_multirun([f"sweep={file}", "trainer.devices=1,2"]) == [
        ["model=mlp", "zero=stage0", "trainer.devices=1"],
        ["model=mlp", "zero=stage0", "trainer.devices=2"],
        ["model=mlp", "zero=stage3", "name=b", "trainer.devices=1"],
        ["model=mlp", "zero=stage3", "name=b", "trainer.devices=2"],
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "parms: {}\n",
            "parms is not a key of a sweep. Keys: description, overrides, params, jobs.",
        ),
        ("overrides: zero=stage3\n", "overrides is not a list of words"),
        ("params: [a]\n", "params is not a mapping"),
        ("jobs: [zero=stage3]\n", "jobs is not a list of words"),
        ("jobs: 3\n", "jobs is not a list"),
    ],
)
def test_a_sweep_file_of_another_shape(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert words in problem(f"sweep={file}")


def test_two_sweeps_at_once() -> None:
    assert "Give one" in problem("sweep=a", "sweep=b")


def test_no_sweep_is_none() -> None:
    assert parse_multirun(["sweep=none", "zero=stage3"]) == [["zero=stage3"]]


@pytest.mark.parametrize("name", sweep_names())
def test_every_sweep_that_comes_along_is_valid(name: str) -> None:
    runs = parse_multirun([f"sweep={name}"])
    assert len(runs) > 1
    digests = {compose(run, environ={}, start=False).config.digest() for run in runs}
    assert len(digests) == len(runs)


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["stage0", "stage1", "stage2"]), min_size=1, max_size=3, unique=True),
)
def test_every_combination_occurs_once(numbers: list[int], stages: list[str]) -> None:
    runs = parse_multirun(
        [f"zero={','.join(stages)}", f"trainer.devices={','.join(map(str, numbers))}"]
    )
    expected = {(f"zero={s}", f"trainer.devices={n}") for s in stages for n in numbers}
    assert len(runs) == len(expected)
    assert {tuple(run) for run in runs} == expected
