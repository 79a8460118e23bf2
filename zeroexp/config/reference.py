"""The key reference, docs/configuration.md: every key, option and rule, generated from the schema.

``python -m zeroexp.config.reference docs/configuration.md`` writes the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from zeroexp.config.groups import Groups
from zeroexp.config.later import OPTIONS
from zeroexp.config.later import SECTIONS as LATER
from zeroexp.config.rules import RULES, START
from zeroexp.config.setting import Key
from zeroexp.config.tree import KEYS, SECTIONS, option_key
from zeroexp.config.value import plain, show, wanted

_HEAD = """\
# Configuration: every key

<!-- Generated from zeroexp.config: python -m zeroexp.config.reference docs/configuration.md -->

    python train.py zero=stage3 optim.lr=1e-3        # options of groups, values of keys
    python train.py -m zero=stage0,stage3            # a sweep: one run per combination
    zeroexp explain zero.bucket                      # one key, with its value and origin here

A *group* picks an option file: `zero=stage3` reads `conf/zero/stage3.yaml`, which holds what
differs from the defaults below. A *key* is set by its dotted name. Later words win, and the command
line wins over option files. Off is `none`. Values are checked before anything starts, and all
problems are reported at once (exit code 2).

* An integer may be written as `5e8`; a byte size as a string with a binary unit, `64MiB`.
* A key that would do nothing (a loss scale without fp16, betas with sgd) is refused, as is every
  key that does not exist. `+key` adds no keys, except below `model.kwargs`.
* `${other.key}` refers to another key.
* The *digest* names a configuration by everything that results or reported figures depend on. Keys
  marked ° take no part in it.
"""


def reference() -> str:
    """The whole text of docs/configuration.md."""
    groups = Groups()
    defaults = groups.defaults()
    parts = [_HEAD, _groups(groups, defaults), _table("Top level", "", _root_keys())]
    for name, section in SECTIONS.items():
        doc = (section.__doc__ or "").strip().split("\n")[0]
        options = _options(groups, name, defaults.get(name, ""))
        keys = [key for key in KEYS.values() if key.path.startswith(f"{name}.")]
        parts.append(_table(f"`{name}`", f"{doc} Options: {options}.", keys))
    parts.append(_rules())
    return "\n".join(parts)


def _groups(groups: Groups, defaults: dict[str, str]) -> str:
    rows = [f"| `{name}` | {_options(groups, name, option)} |" for name, option in defaults.items()]
    rows.append(
        "| `sweep` | files of `experiments/sweep/`; `sweep=NAME` starts the sweep by itself |"
    )
    waiting: dict[str, list[str]] = {}
    for name, capability in LATER.items():
        waiting.setdefault(capability, []).append(f"`{name}`")
    for (group, option), capability in OPTIONS.items():
        waiting.setdefault(capability, []).append(f"`{group}={option}`")
    later = [f"{what} ({', '.join(names)})" for what, names in waiting.items()]
    return "\n".join(
        [
            "## Groups\n",
            "| group | options (default first) |",
            "|---|---|",
            *rows,
            "\nNot in this version, and refused by name: " + "; ".join(later) + ".\n",
        ]
    )


def _options(groups: Groups, name: str, default: str) -> str:
    options = [default, *(option for option in groups.options(name) if option != default)]
    return " ".join(f"`{option}`" for option in options)


def _root_keys() -> list[Key]:
    return [key for key in KEYS.values() if "." not in key.path]


def _table(title: str, lead: str, keys: Iterable[Key]) -> str:
    lines = [f"## {title}\n"]
    if lead:
        lines.append(f"{lead}\n")
    lines += ["| key | default | meaning | changes |", "|---|---|---|---|"]
    for key in keys:
        mark = "" if key.meta.digest else " °"
        unit = f" In {key.meta.unit}." if key.meta.unit not in ("", "bytes") else ""
        with_kinds = (
            f" With {option_key(key.section)} {', '.join(key.meta.kinds)}."
            if key.meta.kinds
            else ""
        )
        meaning = f"{_sentence(key.meta.doc)}{unit} Wanted: {wanted(key)}.{with_kinds}"
        default = show(plain(key.default), key)
        lines.append(
            f"| `{key.path}`{mark} | `{default}` | {_cell(meaning)} | {_cell(key.meta.changes)} |"
        )
    return "\n".join([*lines, ""])


def _rules() -> str:
    lines = [
        "## Rules\n",
        "What cannot run together is refused before anything starts. The last ones concern this "
        "machine and hold for a run, not for a plan.\n",
        "| key | rule |",
        "|---|---|",
    ]
    rows = []
    for rule in RULES:
        when = " (when a run starts)" if rule.scope == START else ""
        if not rule.why.startswith("belongs to"):
            rows.append(f"| `{rule.key}` | {_cell(rule.why)}{when} |")
    return "\n".join([*lines, *dict.fromkeys(rows), ""])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: list[str]) -> int:
    """Write the reference to the file named in ``argv``, or to standard output."""
    if argv:
        Path(argv[0]).write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
