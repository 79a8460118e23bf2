"""Which parameters travel together: the cut of a model into units.

A unit is what is gathered, reduced, stepped and swapped as one. The cut works on *names* alone, so
the planner (which never sees a module) and the engine (which has one) always agree. ``nn.Module``
names the elements of a ``ModuleList`` or ``Sequential`` by number, so "a repeated block" is
"everything under the first numbered component".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

ROOT = ""
"""Name of the unit that holds whatever no other unit holds."""


def _prefixes(module_path: str) -> list[str]:
    """``a.b.c`` -> ``["a", "a.b", "a.b.c"]``, outermost first."""
    parts = module_path.split(".") if module_path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def unit_of(name: str, cut: str) -> str:
    """The unit that parameter ``name`` falls into when it is not shared with another module.

    ``cut`` is ``zero.unit``: ``block``, ``model``, ``leaf`` or comma-separated glob patterns over
    module paths.
    """
    path = name.rpartition(".")[0]
    if cut == "model":
        return ROOT
    if cut == "leaf":
        return path
    if cut == "block":
        return next((p for p in _prefixes(path) if p.rpartition(".")[2].isdigit()), ROOT)
    patterns = [p.strip() for p in cut.split(",") if p.strip()]
    return next((p for p in _prefixes(path) if any(fnmatchcase(p, q) for q in patterns)), ROOT)


def common_unit(names: Sequence[str], cut: str) -> str:
    """The unit of a parameter that is reachable under several ``names`` (tied weights).

    It is the innermost unit that encloses every use: an enclosing unit stays whole while the units
    inside it run, so each use finds the weight whole.
    """
    units = [unit_of(n, cut) for n in names]
    if len(set(units)) == 1:
        return units[0]
    paths = [n.rpartition(".")[0] for n in names]
    shared = [p for p in _prefixes(paths[0]) if all(q == p or q.startswith(p + ".") for q in paths)]
    candidates = [p for p in shared if unit_of(p + ".x", cut) == p]
    return candidates[-1] if candidates else ROOT


def order(units: Iterable[str]) -> list[str]:
    """Units in their order of definition with the root first: the order in which a plain forward
    uses them."""
    seen = dict.fromkeys(units)
    rest = [u for u in seen if u != ROOT]
    return [ROOT, *rest] if ROOT in seen else rest
