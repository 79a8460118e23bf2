"""``zeroexp explain KEY``: what a key, a section or an option is, in a few lines of text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from zeroexp.config.rules import RULES
from zeroexp.config.setting import Key
from zeroexp.config.tree import KEYS, SECTIONS, Config, option_key
from zeroexp.config.unknown import unknown_key
from zeroexp.config.value import plain, show, wanted
from zeroexp.errors import ConfigError

if TYPE_CHECKING:
    from zeroexp.config.composition import Composed

_WIDTH = 100

# Groups that are no section.
_WITHOUT_KEYS = {
    "experiment": "a complete preset of one run; it overrides options and values, and the command "
    "line overrides it.",
    "sweep": "many runs from a file in experiments/sweep/, or from one of your own by its path.",
}


def explain(name: str, composed: Composed | None = None) -> str:
    """Type, default, documentation and effect of a key; for a section, its keys and options.

    With ``composed`` also the current value, where it comes from, and what ``auto`` becomes here.

    Raises:
        ConfigError: no such key, with the nearest one.
    """
    name = name.strip().rstrip(".")
    if name in KEYS:
        return _key(KEYS[name], composed)
    keys = [key for key in KEYS.values() if key.path.startswith(f"{name}.")]
    if keys:
        return _section(name, keys, composed)
    if name in _WITHOUT_KEYS:
        return f"{name}: {_WITHOUT_KEYS[name]}\n{_options(name, composed)}"
    raise ConfigError([unknown_key(name)])


def _key(key: Key, composed: Composed | None) -> str:
    rows = [
        ("wanted", wanted(key)),
        ("default", show(plain(key.default), key)),
    ]
    if key.meta.unit and key.meta.unit != "bytes":
        rows.append(("unit", key.meta.unit))
    if composed is not None:
        value = composed.config.get(key.path)
        rows.append(("now", f"{show(plain(value), key)}  ({composed.origins[key.path]})"))
        here = composed.config.resolved().get(key.path)
        if here != value:
            rows.append(("here", f"{show(plain(here), key)}  (on this machine)"))
    rows.append(("changes", key.meta.changes))
    if key.meta.kinds:
        rows.append(("with", f"{option_key(key.section)} {' or '.join(key.meta.kinds)}"))
    rows.append(("digest", "part of it" if key.meta.digest else "no part of it"))
    rows += [("rule", why) for why in _reasons(key.path)]
    head = f"{key.path}: {key.meta.doc}"
    return "\n".join([textwrap.fill(head, _WIDTH), "", *(_row(*row) for row in rows)])


def _reasons(path: str) -> list[str]:
    """Why of every rule that looks at a key, each once."""
    reasons = [r.why for r in RULES if path in r.reads and not r.why.startswith("belongs to")]
    return list(dict.fromkeys(reasons))


def _row(label: str, text: str) -> str:
    indent = " " * 11
    return textwrap.fill(
        f"  {label:<9}{text}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False
    )


def _section(name: str, keys: list[Key], composed: Composed | None) -> str:
    node: type | None = SECTIONS.get(name)
    doc = (node.__doc__ or "").split("\n")[0] if node is not None else ""
    lines = [f"{name}: {doc}".rstrip(": ")]
    if name in SECTIONS:
        lines.append(_options(name, composed))
    config = Config() if composed is None else composed.config
    width = max(len(key.path) for key in keys)
    lines.append("")
    for key in keys:
        value = show(plain(config.get(key.path)), key)
        lines.append(f"  {key.path:<{width}}  {value:<10}  {key.meta.phrase}")
    return "\n".join(lines)


def _options(name: str, composed: Composed | None) -> str:
    """The options of a group, the default first, and the one in use."""
    from zeroexp.config.groups import Groups
    from zeroexp.config.multirun import sweep_names

    groups = Groups()
    if name in groups.names():
        default = groups.defaults()[name]
        options = [default, *(o for o in groups.options(name) if o != default)]
        note = "(the first is the default)"
    else:
        options, note = ["none", *sweep_names()], "(python train.py sweep=NAME)"
    now = f"  now: {composed.choices[name]}" if composed and name in composed.choices else ""
    return _row("options", f"{' '.join(options)}  {note}{now}")
