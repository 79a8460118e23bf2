"""From a parameter to whoever holds its values.

A side table keyed by the parameter object: attributes on a Parameter that reach the engine would
travel into pickles and copies. Entries vanish with their parameter.
"""

from __future__ import annotations

import weakref

from torch import nn

from zeroexp.zero.access import Owner


class Registry:
    """Weak map by identity (tensors compare by value, so a ``WeakKeyDictionary`` cannot hold
    them)."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Owner]]] = {}

    def set(self, param: nn.Parameter, owner: Owner) -> None:
        key = id(param)
        # Weak both ways: an owner reaches its parameters, so a strong one would keep itself alive,
        # with its process groups and their threads. The guards of the module hold it.
        entry = weakref.ref(param, lambda _: self._owners.pop(key, None)), weakref.ref(owner)
        self._owners[key] = entry

    def drop(self, param: nn.Parameter) -> None:
        self._owners.pop(id(param), None)

    def get(self, param: nn.Parameter) -> Owner | None:
        entry = self._owners.get(id(param))
        return entry[1]() if entry is not None and entry[0]() is param else None


_REGISTRY = Registry()
owner_of = _REGISTRY.get
register = _REGISTRY.set
forget = _REGISTRY.drop
