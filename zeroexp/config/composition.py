"""From a command line to a checked configuration that knows where each value came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zeroexp.config.build import assemble, coerced, flatten
from zeroexp.config.command_line import CommandLine, parse
from zeroexp.config.external_ranks import external_ranks
from zeroexp.config.groups import GroupError, Groups, Selected
from zeroexp.config.rules import COMMAND, START, broken
from zeroexp.config.tree import KEYS, Config, option_key
from zeroexp.errors import ConfigError, Problem

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Composed:
    """A configuration, and how it came about.

    ``origins`` has for every key ``default``, an option file (``conf/zero/stage3.yaml``), ``command
    line``, or ``torchrun`` / ``Slurm`` for ranks that were counted. ``overrides`` are the words of
    the command line without flags, ``choices`` the option of each group.
    """

    config: Config
    origins: dict[str, str]
    overrides: list[str]
    choices: dict[str, str]


def compose(
    argv: Sequence[str],
    *,
    start: bool = True,
    environ: Mapping[str, str] | None = None,
    searchpath: Sequence[str] = (),
) -> Composed:
    """The configuration of one run from its overrides, ``["zero=stage3", "trainer.devices=2"]``.

    ``start=False`` leaves out what only a run needs that starts on this machine (its data exists,
    its devices are visible): a plan is made for another one. ``searchpath`` names folders with
    option files of your own.

    Raises:
        ConfigError: with every problem of groups, keys, values and rules.
    """
    environ = os.environ if environ is None else environ
    groups, line = _read(argv, searchpath)
    problems = list(line.problems)
    try:
        selected = groups.select(line.selections())
    except GroupError as error:
        raise ConfigError([*problems, Problem("conf", str(error), "")]) from None

    leaves, more = _leaves(selected, line)
    problems += more
    values, more = coerced(leaves)
    origins = _origins(selected, line, values)
    problems += [_in_file(problem, origins) for problem in more]
    problems += _count_ranks(values, origins, environ, start)
    problems += _ignored(values, line)
    config = assemble(values, Config())
    ignore = frozenset(problem.key for problem in problems)
    rules = broken(config, ignore=ignore, scope=START if start else COMMAND)
    problems += [p for p in rules if not any(p.key == q.key for q in problems)]
    if problems:
        raise ConfigError(problems)
    return Composed(config, origins, line.overrides, selected.choices)


def _read(argv: Sequence[str], searchpath: Sequence[str]) -> tuple[Groups, CommandLine]:
    """Parse once; a second time when the command line adds folders, whose groups it may name."""
    groups = Groups(searchpath)
    line = parse(argv, groups)
    if line.searchpath:
        groups = Groups([*searchpath, *line.searchpath])
        line = parse(argv, groups)
    return groups, line


def _leaves(selected: Selected, line: CommandLine) -> tuple[dict[str, Any], list[Problem]]:
    """Raw values of all keys: option files, then the command line, interpolations resolved."""
    problems: list[Problem] = []
    given, more = flatten(line.values)
    problems += more
    tree = selected.tree
    for path, value in given.items():
        merge = KEYS[path].free
        OmegaConf.update(tree, path, value, merge=merge, force_add=True)
    content, more = _resolve(tree)
    problems += more
    leaves, more = flatten(content)
    origins = selected.origins
    for problem in more:
        where = next((o for p, o in origins.items() if _below(p, problem.key)), None)
        fix = f"{problem.fix} (in {where})" if where else problem.fix
        problems.append(Problem(problem.key, problem.problem, fix))
    return leaves, problems


def _below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(f"{ancestor}.")


def _resolve(tree: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Plain values of ``tree``. A value that refers to nothing, or is missing, is a problem."""
    problems: list[Problem] = []

    def walk(node: DictConfig, prefix: str) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name in map(str, node):
            path = f"{prefix}{name}"
            if OmegaConf.is_missing(node, name):
                problems.append(Problem(path, "has no value (???).", "Give one."))
                continue
            try:
                value = node[name]
                if isinstance(value, DictConfig):
                    content[name] = walk(value, f"{path}.")
                elif OmegaConf.is_config(value):
                    content[name] = OmegaConf.to_container(value, resolve=True)
                else:
                    content[name] = value
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0].rstrip(".")
                problems.append(Problem(path, "refers to nothing.", f"{reason}."))
        return content

    return walk(tree, ""), problems


def _origins(selected: Selected, line: CommandLine, values: Mapping[str, Any]) -> dict[str, str]:
    given, _ = flatten(line.values)
    origins = {}
    for path, key in KEYS.items():
        if path in given:
            origins[path] = COMMAND_LINE
        else:
            where = (
                o
                for p, o in selected.origins.items()
                if p == path or (key.free and _below(p, path))
            )
            origins[path] = next(where, DEFAULT)
    return origins


def _in_file(problem: Problem, origins: Mapping[str, str]) -> Problem:
    where = origins.get(problem.key, "")
    if where.endswith(".yaml"):
        return Problem(problem.key, problem.problem, f"{problem.fix} (in {where})")
    return problem


def _count_ranks(
    values: dict[str, Any], origins: dict[str, str], environ: Mapping[str, str], start: bool
) -> list[Problem]:
    """Under launch=external take the ranks from whoever started them, and hold what was given
    against it.
    """
    if values.get("launch.kind") != "external":
        if start and "WORLD_SIZE" in environ and "RANK" in environ:
            what = f"would start ranks inside rank {environ['RANK']} of torchrun."
            return [Problem("launch.kind", f"local {what}", "Use launch=external.")]
        return []
    try:
        ranks = external_ranks(environ)
    except ValueError as error:
        return [Problem("launch.kind", f"external: {error}.", "Start with torchrun or srun.")]
    if ranks is None:
        return []
    problems = []
    for path, count in (("trainer.devices", ranks.devices), ("trainer.num_nodes", ranks.num_nodes)):
        if path not in values:
            continue
        if origins[path] == DEFAULT:
            values[path], origins[path] = count, ranks.source
        elif values[path] != count:
            fix = f"{ranks.source} started {count}; leave {path} out."
            problems.append(Problem(path, f"{values[path]} is not what runs.", fix))
    return problems


def _ignored(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Keys of another kind that were given with their default: the rules cannot see those."""
    given, _ = flatten(line.values)
    problems = []
    for path in given:
        kinds = KEYS[path].meta.kinds
        option = option_key(KEYS[path].section)
        kind = values.get(option)
        default = path in values and values[path] == KEYS[path].default
        if kinds and default and kind is not None and kind not in kinds:
            fix = f"It belongs to {', '.join(kinds)}; leave it out."
            problems.append(Problem(path, f"does nothing with {option}={kind}.", fix))
    return problems
