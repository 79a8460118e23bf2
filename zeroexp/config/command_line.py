"""The words of a command line: group choices, values, and what is neither."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from zeroexp.config.build import free_key
from zeroexp.config.groups import Groups
from zeroexp.config.later import SECTIONS as LATER_SECTIONS
from zeroexp.config.later import arrives_with
from zeroexp.config.nearest import nearest
from zeroexp.config.tree import KEYS, SECTIONS
from zeroexp.config.unknown import suggestion, unknown_key
from zeroexp.config.value import show
from zeroexp.errors import Problem

# torch.distributed.launch adds this flag; the environment says the same.
_LOCAL_RANK = re.compile(r"--local[-_]rank(=\d+)?")
MULTIRUN_FLAGS = ("-m", "--multirun")
SWEEP = "sweep"
_SECTION_PATHS = {path.rpartition(".")[0] for path in KEYS} - {""}

# What of Hydra's own settings has its place here.
_HYDRA_FIXES = {
    "run.dir": "Use paths.runs and name",
    "sweep.dir": "Use paths.runs and name",
    "sweep.subdir": "Use tag",
    "job.name": "Use name",
    "job.chdir": "The working directory never changes",
    "sweeper.params": "Use -m with key=a,b, or sweep=NAME",
}


@dataclass
class CommandLine:
    """A parsed command line: overrides of groups and of values, and the problems on the way."""

    groups: dict[str, str] = field(default_factory=dict)
    added_groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    searchpath: list[str] = field(default_factory=list)

    def selections(self) -> list[str]:
        """The group choices in Hydra's words."""
        chosen = [f"{group}={option}" for group, option in self.groups.items()]
        return chosen + [f"+{group}={option}" for group, option in self.added_groups.items()]


def words(argv: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """``argv`` without the flags that launchers add; any other flag is a problem.

    Both spellings of ``--local_rank`` are dropped: the rank comes from the environment.
    """
    kept: list[str] = []
    problems: list[Problem] = []
    rest = iter(argv)
    for word in rest:
        match = _LOCAL_RANK.fullmatch(word)
        if match is not None:
            if match.group(1) is None:
                next(rest, None)
        elif word.startswith("-") and not word.startswith("-="):
            problems.append(_flag(word))
        else:
            kept.append(word)
    return kept, problems


def _flag(word: str) -> Problem:
    name, equals, value = word.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if word in MULTIRUN_FLAGS:
        return Problem(word, "starts a sweep, and this is one run.", "Leave it out.")
    if key in KEYS or key in SECTIONS:
        return Problem(word, "no such flag.", f"Did you mean  {key}{equals}{value}?")
    return Problem(word, "no such flag.", "Overrides have no dashes: key=value.")


def parse(argv: Sequence[str], groups: Groups) -> CommandLine:
    """Sort the overrides of one run. A word that is given twice counts the last time."""
    line = CommandLine()
    kept, line.problems = words(argv)
    defaults = groups.defaults()
    for word in kept:
        try:
            override = groups.parse(word)
        except HydraException as error:
            line.problems.append(not_an_override(word, error))
            continue
        line.overrides.append(word)
        if override.key_or_group == SWEEP:
            if override.value() != "none":
                fix = "Leave it out, or start the sweep: python train.py"
                line.problems.append(
                    Problem(SWEEP, "starts many runs, and this is one.", f"{fix} {word}.")
                )
        elif override.is_sweep_override():
            line.problems.append(
                Problem(
                    override.key_or_group,
                    f"{override.get_value_string()} is a sweep, and this is one run.",
                    "Add -m for one run per value, or put the value in quotes.",
                )
            )
        elif _is_group(override, groups):
            _group(line, override, groups, defaults)
        else:
            _value(line, override)
    line.problems = _without_echoes(line.problems)
    return line


def _without_echoes(problems: list[Problem]) -> list[Problem]:
    """Keys below a group that is refused as a whole need no line of their own."""
    refused = tuple(f"{p.key}." for p in problems if p.key in LATER_SECTIONS)
    return [p for p in problems if not (refused and p.key.startswith(refused))]


def not_an_override(word: str, error: HydraException) -> Problem:
    """The problem of a word that Hydra's grammar does not take."""
    name = word.lstrip("+~").partition("=")[0]
    if "=" not in word:
        example = f"{name}=VALUE"
        if name in SECTIONS:
            example = f"{name}=OPTION"
        return Problem(word, "has no value.", f"Wanted {example}.")
    reason = str(error).splitlines()[0].split(" expecting {")[0]
    if reason.endswith(f"Exception: {word}"):
        # The lexer has no words of its own: Hydra repeats ours behind the name of a class.
        reason = "it has a character that Hydra's grammar does not know outside quotes"
    return Problem(name or word, f"cannot be read: {reason}.", "Put special characters in quotes.")


def _is_group(override: Override, groups: Groups) -> bool:
    name = override.key_or_group
    if override.package is not None or "/" in name:
        return True
    if "." in name or isinstance(override.value(), dict):
        return False
    return name in groups.names() or (name in LATER_SECTIONS and name not in SECTIONS)


def _group(line: CommandLine, override: Override, groups: Groups, defaults: dict[str, str]) -> None:
    name, value = override.key_or_group, override.value()
    if name.startswith("hydra/") or name == "hydra":
        line.problems.append(_hydra(override))
        return
    if override.package is not None or (name not in groups.names() and "/" in name):
        first = name.split("/")[0].split("@")[0]
        line.problems.append(Problem(name, "packages are not used here.", f"Write {first}=OPTION."))
        return
    problem = _group_fault(override, value, groups, defaults)
    if problem is not None:
        line.problems.append(problem)
    elif name in defaults:
        line.groups[name] = str(value)
    else:
        line.added_groups[name] = str(value)


def _group_fault(
    override: Override, value: Any, groups: Groups, defaults: dict[str, str]
) -> Problem | None:
    name = override.key_or_group
    capability = arrives_with(name, value)
    if capability is not None and value is not None:
        here = f"Only {name}=none exists in this version."
        if name not in LATER_SECTIONS:
            here = f"Options: {', '.join(groups.options(name))}."
        return Problem(name, f"{show(value)} arrives with {capability}.", here)
    options = groups.options(name)
    listed = f"Options: {', '.join(options)}."
    off = f"Off is {name}=none. " if "none" in options else ""
    if override.is_delete():
        return Problem(name, "a group cannot be removed.", f"{off}{listed}")
    if isinstance(value, list):
        if name == "logger":
            return Problem(name, "several loggers are a key.", f"Use logger.kinds={show(value)}.")
        return Problem(name, f"{show(value)} is a list.", f"Choose one. {listed}")
    if value is None:
        return Problem(name, "null is not an option.", f"{off}{listed}")
    if str(value) not in options:
        close = nearest(str(value), options)
        hint = f"Did you mean  {name}={close[0]}?  " if close else ""
        return Problem(name, f"{show(value)} is not an option.", f"{hint}{listed}")
    if override.type in (OverrideType.ADD, OverrideType.FORCE_ADD) and name in defaults:
        return Problem(name, "is already there.", f"Drop the +: {name}={value}.")
    if override.type == OverrideType.CHANGE and name not in defaults:
        return Problem(name, "is not in the defaults.", f"Add it: +{name}={value}.")
    return None


def _value(line: CommandLine, override: Override) -> None:
    path, value = override.key_or_group, override.value()
    if path.split(".")[0] == "hydra":
        if path == "hydra.searchpath" and isinstance(value, list):
            line.searchpath.extend(str(place) for place in value)
        else:
            line.problems.append(_hydra(override))
        return
    known = path in KEYS or path in _SECTION_PATHS or free_key(path) is not None
    if override.is_delete():
        if known:
            fix = f"To go back to the default write {path}={_default(path)}."
            line.problems.append(Problem(path, "a key cannot be removed.", fix))
        else:
            line.problems.append(Problem(path, "nothing to remove: no such key.", suggestion(path)))
    elif not known:
        line.problems.append(_unknown(path, override))
    elif override.type == OverrideType.ADD and free_key(path) is None:
        fix = f"Drop the +: {path}={override.get_value_string()}"
        line.problems.append(Problem(path, "already exists.", f"{fix}."))
    else:
        line.values.pop(path, None)
        line.values[path] = value


def _default(path: str) -> str:
    return show(KEYS[path].default, KEYS[path]) if path in KEYS else "..."


def _unknown(path: str, override: Override) -> Problem:
    """A key that does not exist. With ``+`` Hydra would add it; here it is refused all the same."""
    value = override.get_value_string()
    near = nearest(path, SECTIONS) if "." not in path else []
    if near and not suggestion(path).startswith(f"Did you mean  {path}"):
        problem = Problem(path, "no such group or key.", f"Did you mean  {near[0]}={value}?")
    else:
        problem = unknown_key(path)
    if override.type in (OverrideType.ADD, OverrideType.FORCE_ADD):
        plus = "++" if override.type == OverrideType.FORCE_ADD else "+"
        return Problem(problem.key, f"{problem.problem} {plus} adds no keys.", problem.fix)
    return problem


def _hydra(override: Override) -> Problem:
    """A key of Hydra's own settings: a typo, or one that has no effect here."""
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf

    path = override.key_or_group
    if path.startswith("hydra/"):
        fix = "zeroexp starts ranks and sweeps itself: launch=local or launch=external, and -m"
        return Problem(path, "has no effect here.", f"{fix}.")
    tree = OmegaConf.to_container(OmegaConf.structured(HydraConf), throw_on_missing=False)
    known = _branches(tree, "hydra")
    if path not in known:
        close = nearest(path, known)
        hint = f"Did you mean  {close[0]}? " if close else ""
        return Problem(path, "no such key.", f"{hint}zeroexp reads hydra.searchpath=[DIR] only.")
    fix = _HYDRA_FIXES.get(path.removeprefix("hydra."), "Leave it out")
    return Problem(path, "has no effect here.", f"{fix}.")


def _branches(node: Any, prefix: str) -> list[str]:
    paths = []
    if isinstance(node, dict):
        for name, value in node.items():
            paths += [f"{prefix}.{name}", *_branches(value, f"{prefix}.{name}")]
    return paths
