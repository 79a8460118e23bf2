"""Hydra's part: which option files a command line selects, and what they say.

Everything that touches Hydra's own classes is here. Hydra decides the defaults list (which files,
in which order, in which package); the files are merged in that order, and for each key it is
remembered which file spoke last. No global state of Hydra is used, so this works inside another
Hydra application too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zeroexp.config.tree import SECTIONS, Config

PRIMARY = "train"
_SCHEMA = "schema"


class GroupError(Exception):
    """Option files that cannot be composed; the text is Hydra's or YAML's."""


@dataclass(frozen=True)
class Selected:
    """What the chosen option files say: ``tree`` merged, ``origins`` the file of each key,
    ``choices`` by group.
    """

    tree: DictConfig
    origins: dict[str, str]
    choices: dict[str, str]


@cache
def package_dir(name: str, marker: str) -> Path:
    """The folder of the data package ``zeroexp.<name>``, or the folder of that name in a checkout.

    Raises:
        FileNotFoundError: when neither holds ``marker``.
    """
    spec = importlib.util.find_spec(f"zeroexp.{name}")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if spec and spec.origin:
        places.append(Path(spec.origin).parent)
    places.append(Path(__file__).resolve().parents[2] / name)
    for place in places:
        if (place / marker).exists():
            return place
    raise FileNotFoundError(
        f"zeroexp.{name} is not installed: no {marker} in {places}. Run: pip install -e ."
    )


def _register_schemas() -> None:
    """The typed defaults under ``schema/``, where they are not listed as options of a group."""
    store = ConfigStore.instance()
    if "root.yaml" in store.repo.get(_SCHEMA, {}):
        return
    defaults = Config().to_dict()
    root = {name: value for name, value in defaults.items() if name not in SECTIONS}
    for name, node in {**{name: defaults[name] for name in SECTIONS}, "root": root}.items():
        store.store(group=_SCHEMA, name=name, node=node, provider="zeroexp")


class Groups:
    """The option files of ``conf/`` and of further folders."""

    def __init__(self, searchpath: Sequence[str] = ()) -> None:
        """``searchpath``: folders, or Hydra's ``file://`` and ``pkg://`` URLs, looked at after
        ``conf/``.
        """
        _register_schemas()
        path = create_config_search_path(str(package_dir("conf", f"{PRIMARY}.yaml")))
        for place in searchpath:
            url = place if "://" in place else f"file://{Path(place).expanduser().absolute()}"
            path.append(provider="user", path=url)
        self._loader = ConfigLoaderImpl(path)
        self._repository = CachingConfigRepository(self._loader.repository)
        self._names: list[str] | None = None
        self._parser = OverridesParser.create(config_loader=self._loader)

    def parse(self, text: str) -> Override:
        """One override in Hydra's grammar.

        Raises:
            HydraException: when it is none.
        """
        # The plural: it hands the option files to glob(), parse_override() does not.
        return self._parser.parse_overrides([text])[0]

    def names(self) -> list[str]:
        """Groups that can be chosen, Hydra's own and the schemas left out."""
        if self._names is None:
            found = self._loader.list_groups("")
            self._names = [name for name in found if name not in ("hydra", _SCHEMA)]
        return self._names

    def options(self, group: str) -> list[str]:
        """Option names of a group in alphabetical order."""
        return [str(name) for name in self._loader.get_group_options(group)]

    def defaults(self) -> dict[str, str]:
        """The default option of each group, in the order of the primary file."""
        primary = self._repository.load_config(PRIMARY)
        entries = primary.defaults_list if primary is not None and primary.defaults_list else []
        return {
            entry.group: str(entry.value)
            for entry in entries
            if isinstance(entry, GroupDefault) and entry.group not in (None, _SCHEMA)
        }

    def select(self, overrides: Sequence[str]) -> Selected:
        """Merge the option files that group overrides such as ``zero=stage3`` choose.

        Raises:
            GroupError: when an option file is not valid or chooses what does not exist.
        """
        try:
            found = create_defaults_list(
                repo=self._repository,
                config_name=PRIMARY,
                overrides_list=self._parser.parse_overrides(list(overrides)),
                # Hydra's own settings choose nothing here, and reading them takes
                # a third of the time.
                prepend_hydra=False,
                skip_missing=False,
            )
            tree = Config().to_dict()
            origins: dict[str, str] = {}
            for default in found.defaults:
                if default.config_path is None or default.config_path.startswith(f"{_SCHEMA}/"):
                    continue
                content, where = self._content(default.config_path, default.package or "")
                origins.update(dict.fromkeys(_paths(content), where))
                _merge(tree, content)
            known = found.overrides.known_choices
        except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            raise GroupError(" ".join(str(error).split())) from error
        choices = {
            group: str(known.get(group, option)) for group, option in self.defaults().items()
        }
        added = {g: str(o) for g, o in known.items() if g not in choices and o is not None}
        choices.update({g: o for g, o in added.items() if not g.startswith(f"{_SCHEMA}/")})
        return Selected(OmegaConf.create(tree), origins, choices)

    def _content(self, path: str, package: str) -> tuple[dict[str, Any], str]:
        """What an option file sets, nested from the root, and the name of the file."""
        loaded = self._repository.load_config(path)
        if loaded is None:
            raise GroupError(f"{path}.yaml does not exist.")
        if not isinstance(loaded.config, DictConfig):
            raise GroupError(f"{path}.yaml must hold a mapping.")
        content: Any = OmegaConf.to_container(loaded.config, resolve=False)
        for part in reversed(package.split(".") if package else []):
            content = {part: content}
        if loaded.provider == "main":
            return content, f"conf/{path}.yaml"
        return content, f"{loaded.path.removeprefix('file://')}/{path}.yaml"


def _merge(tree: dict[str, Any], content: Mapping[str, Any]) -> None:
    """Put ``content`` over ``tree``: mappings are joined, everything else is replaced."""
    for name, value in content.items():
        before = tree.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            _merge(before, value)
        else:
            tree[name] = value


def _paths(node: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of the leaves."""
    paths: list[str] = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            paths += _paths(value, f"{path}.")
        else:
            paths.append(path)
    return paths
