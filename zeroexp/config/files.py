"""Configurations from files: YAML and JSON, with errors that name the place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zeroexp.config.build import build
from zeroexp.config.tree import Config
from zeroexp.errors import ConfigError, Problem

Source = str | os.PathLike[str] | Mapping[str, Any] | Config


def load(source: Source) -> Config:
    """A checked configuration from a mapping of any type, a YAML or JSON file, or a Config.

    Raises:
        FileNotFoundError: with the absolute path and the working directory.
        ConfigError: syntax errors as file:line:column, keys given twice, and everything that
            :meth:`Config.from_mapping` reports.
    """
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        return build(source)
    if isinstance(source, str | os.PathLike):
        return build(read(source))
    raise TypeError(
        f"a configuration is a mapping, a path or a Config, not {type(source).__name__}"
    )


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping.

    YAML is read in OmegaConf's dialect, as option files are: ``5e8`` is a number and
    ``${data.path}`` refers to another key.

    Raises:
        FileNotFoundError: with the absolute path and the working directory.
        ConfigError: syntax errors as file:line:column, keys given twice, no mapping.
    """
    place = Path(path).expanduser()
    try:
        text = place.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no configuration file {place.absolute()} (working directory {Path.cwd()})"
        ) from None
    except IsADirectoryError:
        raise ConfigError([Problem(str(place), "is a folder.", "Wanted a file.")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(place), f"is not UTF-8: {error}.", "")]) from None
    if not text.strip():
        return {}
    return _json(place, text) if place.suffix.lower() == ".json" else _yaml(place, text)


def _yaml(place: Path, text: str) -> dict[str, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = str(place) if mark is None else f"{place}:{mark.line + 1}:{mark.column + 1}"
        raise ConfigError([_syntax(where, str(error.problem or error.context))]) from None
    except yaml.YAMLError as error:
        raise ConfigError([_syntax(str(place), str(error))]) from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([_not_a_mapping(place)])
    twice = [
        Problem(
            f"{place}:{mark.line + 1}:{mark.column + 1}",
            f"{name} is given twice.",
            f"The first is in line {first}.",
        )
        for name, mark, first in _twice(node)
    ]
    if twice:
        raise ConfigError(twice)
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError([Problem(str(place), " ".join(str(error).split()), "")]) from None
    assert isinstance(content, dict)  # the document is a mapping
    return {str(name): value for name, value in content.items()}


def _json(place: Path, text: str) -> dict[str, Any]:
    names: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        given = [name for name, _ in items]
        names.extend(name for i, name in enumerate(given) if name in given[:i])
        return dict(items)

    try:
        content = json.loads(text, object_pairs_hook=pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"{place}:{error.lineno}:{error.colno}"
        raise ConfigError([_syntax(where, error.msg)]) from None
    except ValueError as error:
        raise ConfigError([_syntax(str(place), str(error))]) from None
    if names:
        problems = [Problem(str(place), f"{name} is given twice.", "Keep one.") for name in names]
        raise ConfigError(problems)
    if not isinstance(content, dict):
        raise ConfigError([_not_a_mapping(place)])
    return content


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _syntax(where: str, what: str) -> Problem:
    return Problem(where, f"syntax error: {what}.", "")


def _not_a_mapping(place: Path) -> Problem:
    return Problem(str(place), "is not a mapping.", "Wanted keys and values.")


def _twice(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, Any, int]]:
    """Keys that a mapping gives again: dotted name, place of the second, line of the first."""
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in lines:
                yield name, key.start_mark, lines[name]
            lines.setdefault(name, key.start_mark.line + 1)
            yield from _twice(value, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item, prefix)
