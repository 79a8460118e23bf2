"""From one command line to many: a sweep over values and groups as a list of runs.

The grammar is Hydra's: ``a=1,2``, ``choice(a,b)``, ``range(1,4)``, ``glob(stage*)`` over the
options of a group, ``sort`` and ``shuffle``. The jobs are the Cartesian product, the last word
varying fastest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from zeroexp.config.command_line import MULTIRUN_FLAGS, SWEEP, not_an_override
from zeroexp.config.files import read
from zeroexp.config.groups import Groups, package_dir
from zeroexp.config.nearest import nearest
from zeroexp.config.value import show
from zeroexp.errors import ConfigError, Problem

_SWEEP = f"{SWEEP}="
_FIELDS = ("description", "overrides", "params", "jobs")


def is_multirun(argv: Sequence[str]) -> bool:
    """Whether a command line asks for a sweep: by ``-m``, ``--multirun`` or ``sweep=NAME``."""
    return any(word in MULTIRUN_FLAGS or word.startswith(_SWEEP) for word in argv)


def parse_multirun(argv: Sequence[str], *, searchpath: Sequence[str] = ()) -> list[list[str]]:
    """The command line of each run of a sweep, in the order in which they run.

    ``sweep=NAME`` stands for the words of ``experiments/sweep/NAME.yaml`` (or of a file given by
    path); words on the command line replace words of the file about the same key. What is not a
    sweep stays in every run as it was written, so it parses back the same.

    Raises:
        ConfigError: unknown sweep, words that cannot be read, or values that cannot be listed.
    """
    names = [word.removeprefix(_SWEEP) for word in argv if word.startswith(_SWEEP)]
    own = [w for w in argv if w not in MULTIRUN_FLAGS and not w.startswith(_SWEEP)]
    if len(names) > 1:
        raise ConfigError([Problem("sweep", f"{show(names)} are several.", "Give one.")])
    groups = Groups(searchpath)
    if not names or names[0] == "none":
        return _expand(own, groups)
    runs: list[list[str]] = []
    for variant in sweep_words(names[0]):
        runs += _expand([*variant, *own], groups)
    return list(map(list, dict.fromkeys(map(tuple, runs))))


def sweep_names() -> list[str]:
    """Names of the sweeps that come with zeroexp, sorted."""
    return sorted(
        path.stem for path in (package_dir("experiments", "__init__.py") / "sweep").glob("*.yaml")
    )


def sweep_words(name: str) -> list[list[str]]:
    """The words of a sweep file, once for each entry of ``jobs``.

    A file is a mapping with ``overrides`` (words for every run), ``params`` (key to values: a list,
    or a string in Hydra's sweep grammar), ``jobs`` (a list of lists of words, for runs that are no
    product) and ``description``.

    Raises:
        ConfigError: no such sweep, or a file of another shape.
    """
    content = read(_sweep_file(name))
    problems = [
        Problem(f"sweep={name}", f"{key} is not a key of a sweep.", f"Keys: {', '.join(_FIELDS)}.")
        for key in content
        if key not in _FIELDS
    ]
    common = _words(name, "overrides", content.get("overrides", []), problems)
    params = content.get("params", {})
    if isinstance(params, Mapping):
        common += [f"{key}={_sweep_value(value)}" for key, value in params.items()]
    else:
        problems.append(Problem(f"sweep={name}", "params is not a mapping.", "Wanted key: values."))
    jobs = content.get("jobs", [[]])
    if not isinstance(jobs, Sequence) or isinstance(jobs, str) or not jobs:
        problems.append(Problem(f"sweep={name}", "jobs is not a list.", "Wanted lists of words."))
        jobs = []
    variants = [common + _words(name, "jobs", job, problems) for job in jobs]
    if problems:
        raise ConfigError(problems)
    return variants


def _sweep_file(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = package_dir("experiments", "__init__.py") / "sweep" / f"{name}.yaml"
    if not path.exists():
        known = sweep_names()
        close = nearest(name, known)
        hint = f"Did you mean  sweep={close[0]}?  " if close else ""
        fix = f"{hint}Sweeps: {', '.join(known) or 'none'}; or give the path of a file."
        raise ConfigError([Problem("sweep", f"{name} does not exist.", fix)])
    return path


def _words(name: str, field: str, value: Any, problems: list[Problem]) -> list[str]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_list and all(isinstance(word, str) for word in value):
        return list(value)
    problems.append(
        Problem(f"sweep={name}", f"{field} is not a list of words.", "Wanted [zero=stage3, ...].")
    )
    return []


def _sweep_value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(_quoted(item) for item in value)
    return value if isinstance(value, str) else _quoted(value)


def _quoted(value: Any) -> str:
    """One value of a list in Hydra's grammar, with its type kept."""
    if value is None:
        return "null"
    if isinstance(value, str) and not value.replace("_", "").replace(".", "").isalnum():
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return show(value)


def _expand(argv: Iterable[str], groups: Groups) -> list[list[str]]:
    """The Cartesian product of all sweeps in ``argv``; of words about one key the last counts."""
    problems: list[Problem] = []
    choices: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("-"):
            choices[word] = [word]
            continue
        try:
            override = groups.parse(word)
            key = override.get_key_element()
            values = _values(override, word)
        except HydraException as error:
            problems.append(not_an_override(word, error))
            continue
        except ValueError as error:
            problems.append(Problem(word.partition("=")[0], f"cannot be a sweep: {error}.", ""))
            continue
        choices.pop(key, None)
        choices[key] = values
    if problems:
        raise ConfigError(problems)
    return [list(run) for run in itertools.product(*choices.values())]


def _values(override: Override, word: str) -> list[str]:
    if not override.is_sweep_override():
        return [word]
    if not override.is_discrete_sweep():
        raise ValueError("an interval has no list of values; use range or choice")
    key = override.get_key_element()
    # shuffle() draws from the global generator: the same order in every process of one sweep.
    state = random.getstate()
    random.seed(0)
    try:
        values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    finally:
        random.setstate(state)
    if not values:
        raise ValueError(f"{override.get_value_string()} matches nothing")
    return values
