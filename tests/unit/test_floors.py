"""Imports go down only: the floors of the code, read from its import statements.

A module may import its own floor and those below. Floor 0 works without torch; lightning is
imported in strategies/ and in the worker (with files that only the worker imports), nowhere else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "zeroexp.config": 0,
    "zeroexp.conf": 0,
    "zeroexp.experiments": 0,
    "zeroexp.plan": 0,
    "zeroexp.layout": 0,
    "zeroexp.units": 0,
    "zeroexp.errors": 0,
    "zeroexp.folder": 0,
    "zeroexp.placement": 0,
    "zeroexp.pipeline": 0,  # schedules are data; what runs them is below
    "zeroexp.scratch": 0,
    "zeroexp.comm": 1,
    "zeroexp.tiers": 1,
    "zeroexp.precision": 1,
    "zeroexp.ops": 1,
    "zeroexp._C": 1,
    "zeroexp.ledger": 1,
    "zeroexp.zero": 2,
    "zeroexp.optim": 2,
    "zeroexp.pipeline.runtime": 2,
    "zeroexp.moe": 2,
    "zeroexp.parallel": 2,
    "zeroexp.engine": 3,
    "zeroexp.pipe_engine": 3,
    "zeroexp.loop": 3,
    "zeroexp.models": 3,
    "zeroexp.data": 3,
    "zeroexp.checkpoint": 3,
    "zeroexp.strategies": 4,
    "zeroexp.run": 5,
    "zeroexp.report": 5,
    "zeroexp.cli": 6,
    "zeroexp.__main__": 6,
}
FLOOR_0_PACKAGES = {"hydra", "omegaconf", "yaml"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
# The process that trains: a fresh one of ours, or the rank that an outside launcher started.
WORKERS = {"zeroexp.run.worker", "zeroexp.run.external"}

Sources = dict[str, str]


def project_sources() -> Sources:
    """The source of every module, by the name it is installed under."""
    places = {ROOT / "zeroexp": "zeroexp", ROOT / "strategies": "zeroexp.strategies"}
    sources = {}
    for folder, package in places.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            sources[name] = path.read_text()
    return sources


def floor_of(module: str) -> int | None:
    """The floor of the longest listed prefix; None for a module that has no place yet."""
    while module:
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
    return None


def executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING``, which never run."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from executed_nodes(other)
        else:
            yield from executed_nodes(child)


def imports_of(name: str, source: str, packages: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, also inside functions."""
    for node in executed_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                keep = len(parts) - node.level + (1 if name in packages else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def imported_modules(name: str, sources: Sources) -> list[tuple[int, str]]:
    """(line, module) with names inside modules cut off: project modules, or others' top names."""
    packages = {other.rpartition(".")[0] for other in sources}
    known = {*sources, "zeroexp._C", "zeroexp.conf", "zeroexp.experiments"}
    result = []
    for line, target in imports_of(name, sources[name], packages):
        if target.split(".")[0] != "zeroexp":
            result.append((line, target.split(".")[0]))
            continue
        module = target
        while module not in known and "." in module:
            module = module.rpartition(".")[0]
        # `from zeroexp import Engine`: a public name, which lives on the engine's floor.
        result.append((line, "zeroexp.engine" if module == "zeroexp" else module))
    return result


def worker_only(sources: Sources) -> set[str]:
    """The workers and the modules that nothing but they and such modules import."""
    importers: dict[str, set[str]] = {}
    for name in sources:
        for _, target in imported_modules(name, sources):
            importers.setdefault(target, set()).add(name)
    allowed = set(WORKERS)
    while True:
        more = {
            name
            for name in sources
            if name not in allowed and importers.get(name) and importers[name] <= allowed
        }
        if not more:
            return allowed
        allowed |= more


def violations(sources: Sources) -> list[str]:
    found = []
    may_use_lightning = worker_only(sources)
    for name in sources:
        if name == "zeroexp":  # resolves public names lazily, by design from every floor
            continue
        floor = floor_of(name)
        if floor is None:
            found.append(f"{name} has no floor")
            continue
        for line, target in imported_modules(name, sources):
            where = f"{name}:{line} imports {target}"
            if target.split(".")[0] == "zeroexp":
                target_floor = floor_of(target)
                if target_floor is None or target_floor > floor:
                    found.append(f"{where}: floor {target_floor} from floor {floor}")
            elif target in LIGHTNING:
                if floor != FLOORS["zeroexp.strategies"] and name not in may_use_lightning:
                    found.append(f"{where}: only strategies/ and the worker may")
            elif floor == 0 and target not in sys.stdlib_module_names | FLOOR_0_PACKAGES:
                found.append(f"{where}: floor 0 stands on the standard library and Hydra")
    return list(dict.fromkeys(found))  # one line per statement, not per name


def test_imports_go_down_only() -> None:
    sources = project_sources()
    assert len(sources) > 20
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("name", "line", "why"),
    [
        ("zeroexp.layout", "import torch", "floor 0 stands on"),
        ("zeroexp.plan.memory", "def f():\n    import numpy as np", "floor 0 stands on"),
        ("zeroexp.comm.gather", "from zeroexp.engine import Engine", "floor 3 from floor 1"),
        ("zeroexp.comm.gather", "from zeroexp import Engine", "floor 3 from floor 1"),
        ("zeroexp.zero.unit", "from ..run import record", "floor 5 from floor 2"),
        ("zeroexp.engine", "import lightning.pytorch as pl", "only strategies/ and the worker"),
        ("zeroexp.run.driver", "from pytorch_lightning import Trainer", "only strategies/"),
        ("zeroexp.engine", "from zeroexp import strategies", "floor 4 from floor 3"),
        ("zeroexp.helpers", "import os", "has no floor"),
        ("zeroexp.strategies.zero", "import zeroexp.cli", "floor 6 from floor 4"),
    ],
)
def test_a_planted_violation_is_found(name: str, line: str, why: str) -> None:
    rest = ["engine", "run", "run.record", "cli", "strategies", "zero", "comm"]
    sources = {**{f"zeroexp.{module}": "" for module in rest}, name: line}
    found = violations(sources)
    assert len(found) == 1 and why in found[0]


def test_what_is_allowed_is_not_reported() -> None:
    sources = {
        "zeroexp": "from zeroexp.engine import Engine",
        "zeroexp.run": "",
        "zeroexp.run.worker": "import lightning\nfrom zeroexp.run import training",
        "zeroexp.run.training": "import lightning.pytorch",
        "zeroexp.strategies": "import lightning",
        "zeroexp.engine": "import torch\nfrom zeroexp.zero import unit",
        "zeroexp.zero": "",
        "zeroexp.zero.unit": "from . import other",
        "zeroexp.zero.other": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from zeroexp.engine import Engine",
        "zeroexp.layout": "import os\nfrom omegaconf import OmegaConf",
    }
    assert violations(sources) == []
    sources["zeroexp.cli"] = "from zeroexp.run import training"
    assert len(violations(sources)) == 1, "a second importer takes the worker's privilege away"


@pytest.mark.parametrize(
    "modules",
    [
        "zeroexp",
        "zeroexp.config, zeroexp.layout, zeroexp.errors, zeroexp.plan",
        "zeroexp.pipeline.choose, zeroexp.pipeline.timeline_svg",
    ],
)
def test_floor_0_loads_no_torch(modules: str) -> None:
    """What the statements say, seen at run time: nothing pulls torch in through a side door."""
    code = f"import {modules}, sys; print(sorted({{'torch', 'lightning'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
