"""From a mapping to a checked configuration, with every problem in one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from zeroexp.config.rules import broken
from zeroexp.config.tree import KEYS, Config, option_key
from zeroexp.config.unknown import later_value, unknown_key
from zeroexp.config.value import BadValue, coerce, show
from zeroexp.errors import ConfigError, Problem

_PREFIXES = {path.rpartition(".")[0] for path in KEYS} - {""}


def build(partial: Mapping[str, Any], *, base: Config | None = None) -> Config:
    """The configuration that ``partial`` describes over ``base`` (the defaults).

    Raises:
        ConfigError: with every unknown key, wrong value and broken rule.
    """
    leaves, problems = flatten(partial)
    values, wrong = coerced(leaves)
    problems += wrong
    config = assemble(values, base or Config())
    # Rules that read a key with a problem of its own would report a second fault that is none.
    problems += broken(config, ignore=frozenset(p.key for p in problems))
    if problems:
        raise ConfigError(problems)
    return config


def flatten(partial: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Known leaf keys of a nested or dotted mapping with their raw values, and the problems on "
    "the way."""
    leaves: dict[str, Any] = {}
    problems: list[Problem] = []
    for path, value in _leaves(partial, ""):
        if isinstance(value, Problem):
            problems.append(value)
        elif path not in leaves:
            leaves[path] = value
        elif KEYS[path].free and isinstance(leaves[path], Mapping) and isinstance(value, Mapping):
            leaves[path] = merged(leaves[path], value)
        else:
            problems.append(Problem(path, "is given twice.", "Keep one of the two."))
    return leaves, problems


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with the entries of ``new``, nested mappings joined."""
    result = dict(old)
    for name, value in new.items():
        before = result.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[name] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def _leaves(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str):
            yield path, Problem(path, f"{name!r} is not a key.", "Keys are strings.")
        elif path in KEYS:
            yield path, value
        elif path in _PREFIXES:
            yield from _section(path, value)
        elif (free := free_key(path)) is not None:
            for part in reversed(path.removeprefix(f"{free}.").split(".")):
                value = {part: value}
            yield free, value
        else:
            yield path, unknown_key(path)


def free_key(path: str) -> str | None:
    """The key with free entries (``model.kwargs``) that ``path`` lies below, if any."""
    return next(
        (key.path for key in KEYS.values() if key.free and path.startswith(f"{key.path}.")), None
    )


def _section(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from _leaves(value, f"{path}.")
    elif isinstance(value, str) and option_key(path) in KEYS:
        yield option_key(path), value
    else:
        first = next(key for key in KEYS.values() if key.section == path)
        example = f"{path}.{first.name}={show(first.default, first)}"
        option = option_key(path)
        off = f" Off is {option}=none." if value is None and option in KEYS else ""
        yield (
            path,
            Problem(
                path,
                f"{show(value)} is not a section.",
                f"Set one of its keys, as in {example}.{off}",
            ),
        )


def coerced(leaves: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Every leaf in the type of its key; those that do not fit are problems instead."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for path, raw in leaves.items():
        key = KEYS[path]
        try:
            values[path] = coerce(key, raw)
        except BadValue as bad:
            problems.append(later_value(key, raw) or Problem(path, bad.problem, bad.fix))
    return values, problems


def assemble(values: Mapping[str, Any], base: Config) -> Config:
    """``base`` with typed ``values`` in the place of theirs."""
    return _assemble(values, base, "")  # type: ignore[no-any-return]


def _assemble(values: Mapping[str, Any], node: Any, prefix: str) -> Any:
    parts = {}
    for f in fields(node):
        path = f"{prefix}{f.name}"
        current = getattr(node, f.name)
        if is_dataclass(current):
            parts[f.name] = _assemble(values, current, f"{path}.")
        else:
            parts[f.name] = values.get(path, current)
    return type(node)(**parts)
