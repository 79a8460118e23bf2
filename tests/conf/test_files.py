"""Configurations from files (CF-08): what is found, and where exactly a fault is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf

from zeroexp.config import Config, load
from zeroexp.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problem(source: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(source)
    (only,) = caught.value.problems
    return only.key, f"{only.problem} {only.fix}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "zero:\n  stage: 3\n  bucket: 5e8\n"),
        ("a.yml", "zero: {stage: 3, bucket: 500000000}\n"),
        ("a.yaml", "zero.stage: 3\nzero.bucket: 5e8\n"),
        ("a.json", '{"zero": {"stage": 3,\t"bucket": 5e8}}'),
        ("a.yaml", "zero:\n  stage: ${trainer.devices}\n  bucket: 5e8\ntrainer:\n  devices: 3\n"),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_yaml_and_json_by_path_or_text_of_the_path(
    tmp_path: Path, name: str, text: str, as_text: bool
) -> None:
    """deepspeed 3.A 4."""
    path = write(tmp_path, name, text)
    config = load(str(path) if as_text else path)
    assert (config.zero.stage, config.zero.bucket) == (3, 500_000_000)


@pytest.mark.parametrize(
    "source",
    [
        {"zero": {"stage": 3}},
        MappingProxyType({"zero": {"stage": 3}}),
        OmegaConf.create({"zero": {"stage": 3}}),
        Config.from_mapping({"zero.stage": 3}),
    ],
)
def test_mappings_of_any_type_and_configs(source: Mapping[str, Any] | Config) -> None:
    assert load(source).zero.stage == 3


def test_what_is_no_source_is_named() -> None:
    with pytest.raises(TypeError, match="not int"):
        load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", ""), ("a.yaml", "\n# nothing\n"), ("a.json", ""), ("a.json", "  \n")],
)
def test_an_empty_file_is_the_defaults(tmp_path: Path, name: str, text: str) -> None:
    assert load(write(tmp_path, name, text)) == Config()


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        load("conf/ds.json")
    assert f"{tmp_path}/conf/ds.json" in str(caught.value)
    assert f"working directory {tmp_path}" in str(caught.value)


def test_a_folder(tmp_path: Path) -> None:
    assert problem(tmp_path) == (str(tmp_path), "is a folder. Wanted a file.")


@pytest.mark.parametrize(
    ("name", "text", "line", "column"),
    [
        ("a.json", '{"zero": {"stage": 3,}}', 1, 22),
        ("a.json", '{\n  "zero": 3\n  "a": 1}', 3, 3),
        ("a.yaml", "zero:\n  stage: [3\nb: 1\n", 3, 2),
        ("a.yaml", "zero:\n\tstage: 3\n", 2, 1),
    ],
)
def test_a_syntax_error_has_file_line_and_column(
    tmp_path: Path, name: str, text: str, line: int, column: int
) -> None:
    path = write(tmp_path, name, text)
    key, message = problem(path)
    # Python says at a trailing comma either where the comma or where the next token is.
    assert key in {f"{path}:{line}:{column}", f"{path}:{line}:{column - 1}"}
    assert message.startswith("syntax error: ")


def test_a_key_given_twice_in_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "zero:\n  stage: 1\n  prefetch: 2\n  stage: 3\n")
    assert problem(path) == (
        f"{path}:4:3",
        "zero.stage is given twice. The first is in line 2.",
    )


def test_a_key_given_twice_in_json(tmp_path: Path) -> None:
    """CF-01, deepspeed 3.A 5."""
    path = write(tmp_path, "a.json", '{"zero": {"stage": 1, "stage": 3}}')
    assert problem(path) == (str(path), "stage is given twice. Keep one.")


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "- 1\n"), ("a.json", "[1]"), ("a.yaml", "x")]
)
def test_no_mapping(tmp_path: Path, name: str, text: str) -> None:
    _, message = problem(write(tmp_path, name, text))
    assert "is not a mapping" in message


@pytest.mark.parametrize("word", ["NaN", "Infinity"])
def test_numbers_that_json_does_not_have(tmp_path: Path, word: str) -> None:
    _, message = problem(write(tmp_path, "a.json", f'{{"optim": {{"lr": {word}}}}}'))
    assert f"{word} is not JSON" in message


def test_a_quoted_number_in_json_is_a_string(tmp_path: Path) -> None:
    key, message = problem(write(tmp_path, "a.json", '{"trainer": {"devices": "5e8"}}'))
    assert (key, "5e8 is a string" in message) == ("trainer.devices", True)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    _, message = problem(path)
    assert "is not UTF-8" in message


def test_a_reference_to_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "zero:\n  stage: ${no.such}\n")
    key, message = problem(path)
    assert key == str(path)
    assert "no.such" in message
