"""Nested values between stages: tensors apart, the rest as data that JSON can hold.

Tensors, None, bool, int, float, str, and lists, tuples and dicts of them. Nothing that arrives is
executed, so an object of another class has no way across and is refused with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroexp.errors import ModelError

Shape = list[Any]
"""``["t", i]`` the i-th tensor; ``[type, value]`` a scalar; ``[l|u, [...]]`` a list or tuple;
``["d", [[key, value], ...]]`` a dict."""


def flatten(value: Any) -> tuple[Shape, list[Tensor]]:
    """The shape of ``value`` and its tensors; one that occurs twice is there once.

    Raises :class:`ModelError` for what cannot cross, with its place in the value.
    """
    if isinstance(value, Tensor):
        return ["t", 0], [_plain(value, "")]
    tensors: list[Tensor] = []
    return _flatten(value, tensors, {}, ""), tensors


def _flatten(value: Any, tensors: list[Tensor], seen: dict[int, int], where: str) -> Shape:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = len(tensors)
            tensors.append(_plain(value, where))
        return ["t", seen[id(value)]]
    kind = type(value)
    if kind is list or kind is tuple:
        parts = [_flatten(v, tensors, seen, f"{where}[{i}]") for i, v in enumerate(value)]
        return ["l" if kind is list else "u", parts]
    if kind is dict:
        return [
            "d",
            [
                [_scalar(k, f"key of {where or 'the dict'}"), _flatten(v, tensors, seen, at)]
                for k, v in value.items()
                for at in [f"{where}[{k!r}]"]
            ],
        ]
    return _scalar(value, where)


def _scalar(value: Any, where: str) -> Shape:
    kind = type(value)
    if kind is float:
        return ["float", value.hex()]  # exact, and NaN equals itself
    if value is None or kind in (bool, int, str):
        return [kind.__name__, value]
    raise ModelError(
        f"{_at(where)}a {kind.__name__} cannot go from stage to stage: send tensors, None, bool, "
        "int, float, str, and lists, tuples and dicts of them"
    )


def _plain(tensor: Tensor, where: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        kind = tensor.layout if type(tensor) is Tensor else type(tensor).__name__
        raise ModelError(
            f"{_at(where)}a tensor of kind {kind} cannot go from stage to stage: make it a plain "
            "dense tensor"
        )
    return tensor


def _at(where: str) -> str:
    return f"{where}: " if where else ""


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "NoneType": lambda value: value,
    "bool": bool,
    "int": int,
    "str": str,
    "float": float.fromhex,
}


def unflatten(shape: Shape, tensors: Sequence[Any]) -> Any:
    """The value that :func:`flatten` took apart, with ``tensors`` in it."""
    kind, content = shape
    if kind == "t":
        return tensors[content]
    if kind == "l":
        return [unflatten(part, tensors) for part in content]
    if kind == "u":
        return tuple(unflatten(part, tensors) for part in content)
    if kind == "d":
        return {unflatten(key, ()): unflatten(part, tensors) for key, part in content}
    return _SCALARS[kind](content)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order, repeated ones too; other leaves are passed over."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``change(tensor)`` in the place of each tensor; lists, tuples (named ones too)
    and dicts are made anew."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(change, part) for part in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
