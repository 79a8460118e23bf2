"""One setting of a section: its default, its documentation and what a value must look like.

A section is a frozen dataclass whose fields are made by :func:`setting`. The metadata written there
is the only place where a key is described: values are checked against it, ``zeroexp explain``
prints it, docs/configuration.md is generated from it.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

_METADATA_KEY = "zeroexp"


@dataclass(frozen=True)
class Meta:
    """What is known about a key besides its type and default.

    ``doc`` begins with a short phrase up to the first full stop: hints quote it. ``changes`` says
    what in a run is different when the value is. ``digest`` tells whether the key takes part in the
    config digest (it does when results or reported figures may depend on it). ``kinds`` names the
    values of the section's ``kind`` (of a pipeline: ``schedule``) to which the key
    applies; empty means all.
    """

    doc: str
    changes: str
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    unit: str = ""
    digest: bool = True
    kinds: tuple[str, ...] = ()
    zero_is_off: bool = False

    @property
    def phrase(self) -> str:
        """The first sentence of ``doc`` without its full stop."""
        return self.doc.split(". ")[0].rstrip(".")


def setting(
    default: Any,
    doc: str,
    *,
    changes: str,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    unit: str = "",
    digest: bool = True,
    kinds: tuple[str, ...] = (),
    zero_is_off: bool = False,
    hashed: bool = True,
) -> Any:
    """A dataclass field with its documentation. A callable ``default`` is a default factory.

    ``words`` are strings that an integer key accepts besides numbers; ``unit="bytes"`` accepts
    ``"64MiB"``.
    """
    meta = Meta(
        doc=doc,
        changes=changes,
        choices=choices,
        words=words,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
        unit=unit,
        digest=digest,
        kinds=kinds,
        zero_is_off=zero_is_off,
    )
    metadata = {_METADATA_KEY: meta}
    if callable(default):
        factory: Callable[[], Any] = default
        return field(default_factory=factory, metadata=metadata, hash=hashed)
    return field(default=default, metadata=metadata, hash=hashed)


@dataclass(frozen=True)
class Key:
    """A leaf of the configuration: ``path`` is the dotted key, ``type`` the annotation, "
    "``default`` the value."""

    path: str
    type: Any
    default: Any
    meta: Meta

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def optional(self) -> bool:
        return types.NoneType in alternatives(self.type)

    @property
    def free(self) -> bool:
        """True for a mapping whose keys are the user's own (``model.kwargs``)."""
        return any(typing.get_origin(t) is dict for t in alternatives(self.type))


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


@cache
def section_types(cls: type) -> dict[str, type]:
    """Nested sections of a dataclass: field name to dataclass, in the order of definition."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if _METADATA_KEY not in f.metadata}


@cache
def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """Every leaf key below a dataclass, dotted path to :class:`Key`, in the order of definition."""
    return {key.path: key for key in _walk(cls, prefix)}


def _walk(cls: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    defaults = cls()
    for f in fields(cls):
        path = f"{prefix}{f.name}"
        if _METADATA_KEY in f.metadata:
            yield Key(path, hints[f.name], getattr(defaults, f.name), f.metadata[_METADATA_KEY])
        else:
            yield from _walk(hints[f.name], f"{path}.")
