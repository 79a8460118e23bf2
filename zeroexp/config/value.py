"""One value: what the user wrote, checked against its key and turned into the key's type."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from zeroexp.config.byte_size import format_bytes, parse_bytes
from zeroexp.config.nearest import nearest
from zeroexp.config.setting import Key, Meta, alternatives


class BadValue(Exception):
    """A value does not fit its key. ``problem`` and ``fix`` are sentences for the report."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


def coerce(key: Key, value: Any) -> Any:
    """``value`` as the type of ``key``, after every check that needs this key alone.

    Integers may be written as whole floats (``5e8``), byte sizes as strings (``64MiB``), none as
    ``none`` or null, and ``off`` or ``false`` where such a word is a choice, although YAML reads it
    as a truth value.

    Raises:
        BadValue: wrong type, not a choice, or out of range.
    """
    if value is None or (
        value == "none" and isinstance(value, str) and "none" not in key.meta.choices
    ):
        if key.optional:
            return None
        if value is None:
            raise BadValue("null is not a value here.", f"Wanted {wanted(key)}.{_off(key)}")
    types = alternatives(key.type)
    origins = [typing.get_origin(t) for t in types]
    if dict in origins:
        return _mapping(key, value)
    if tuple in origins and not (str in types and isinstance(value, str)):
        return _tuple(key, value)
    result = _scalar(key, types, value)
    if key.meta.zero_is_off and result == 0:
        return None
    return result


def _off(key: Key) -> str:
    return f" Off is {key.name}=none." if "none" in key.meta.choices else ""


def _scalar(key: Key, types: tuple[Any, ...], value: Any) -> Any:
    meta = key.meta
    if bool in types:
        if isinstance(value, bool):
            return value
        raise _wrong(key, value)
    if isinstance(value, str) and value in meta.words:
        return value
    if int in types:
        return in_range(key, _int(key, value))
    if float in types:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(key, value)
        return in_range(key, float(value))
    return _text(key, meta, value)


def _int(key: Key, value: Any) -> int:
    if key.meta.unit == "bytes" and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise BadValue(f"{value!r} is not a byte size.", f"{_sentence(str(error))}.") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, value)
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        raise _wrong(key, value)
    return int(value)


def _text(key: Key, meta: Meta, value: Any) -> str:
    if isinstance(value, bool):
        for word in ("true", "on") if value else ("false", "off"):
            if word in meta.choices:
                return word
    if isinstance(value, int) and not isinstance(value, bool) and not meta.choices:
        return str(value)
    if not isinstance(value, str):
        raise _wrong(key, value)
    if not meta.choices:
        if not value.strip():
            raise BadValue("the text is empty.", f"Wanted {wanted(key)}.")
        return value
    return choose(value, meta.choices)


def choose(value: str, choices: Sequence[str]) -> str:
    """``value`` if it is one of ``choices``.

    Raises:
        BadValue: otherwise, with the nearest choice and the list.
    """
    if value in choices:
        return value
    close = nearest(value, choices)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise BadValue(f"{value!r} is not a choice.", f"{hint}Choices: {', '.join(choices)}.")


def _tuple(key: Key, value: Any) -> tuple[Any, ...]:
    members = next(
        typing.get_args(t) for t in alternatives(key.type) if typing.get_origin(t) is tuple
    )
    if isinstance(value, str) and members[-1] is Ellipsis and members[0] is str:
        value = [] if value == "none" else [value]
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(key, value)
    if members[-1] is Ellipsis:
        items = [_scalar(key, (members[0],), item) for item in value]
        if members[0] is str and len(set(items)) < len(items):
            raise BadValue(f"{show(list(value))} names one twice.", "Name each once.")
        return tuple(items)
    if len(value) != len(members):
        raise BadValue(f"{show(list(value))} has {len(value)} values.", f"Wanted {wanted(key)}.")
    return tuple(_scalar(key, (member,), item) for member, item in zip(members, value, strict=True))


def _mapping(key: Key, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(key, value)
    return typing.cast("dict[str, Any]", plain(value))


def plain(value: Any) -> Any:
    """Containers of any kind as dicts and lists, recursively; scalars as they are."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(v) for v in value]
    return value


def in_range(key: Key, number: Any) -> Any:
    """``number`` if it lies within the bounds of ``key``.

    Raises:
        BadValue: otherwise, or when it is not finite.
    """
    meta = key.meta
    if (
        not math.isfinite(number)
        or (meta.minimum is not None and number < meta.minimum)
        or (meta.above is not None and number <= meta.above)
        or (meta.maximum is not None and number > meta.maximum)
        or (meta.below is not None and number >= meta.below)
    ):
        raise BadValue(f"{show(number)} is out of range.", f"Wanted {wanted(key)}.")
    return number


def _wrong(key: Key, value: Any) -> BadValue:
    return BadValue(f"{show(value)} is {article(_kind(value))}.", f"Wanted {wanted(key)}.")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "mapping"
    if isinstance(value, Sequence):
        return "list"
    if isinstance(value, float):
        return "fraction" if math.isfinite(value) and not value.is_integer() else "number"
    return "number" if isinstance(value, int) else type(value).__name__


def article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def wanted(key: Key) -> str:
    """What a value of ``key`` looks like: ``an integer from 0 to 3``, ``one of auto, fp32 or "
    "bf16``."""
    meta = key.meta
    types = alternatives(key.type)
    origins = [typing.get_origin(t) for t in types]
    if dict in origins:
        text = "a mapping"
    elif tuple in origins:
        members = next(typing.get_args(t) for t in types if typing.get_origin(t) is tuple)
        if members[0] is int and members[-1] is Ellipsis:
            text = f"a list of integers{bounds(meta)}"
            if str in types:
                text = f"{', '.join(meta.choices)} or {text}"
        elif members[-1] is Ellipsis:
            text = f"a list of {', '.join(meta.choices)}" if meta.choices else "a list of strings"
        else:
            text = f"a list of {len(members)} numbers{bounds(meta)}"
    elif bool in types:
        text = "true or false"
    elif meta.choices:
        text = (
            f"one of {', '.join(meta.choices[:-1])} or {meta.choices[-1]}"
            if meta.choices[1:]
            else meta.choices[0]
        )
    elif meta.unit == "bytes":
        text = f"bytes{bounds(meta)}, an integer or a string such as 64MiB"
    elif int in types:
        text = f"an integer{bounds(meta)}"
    elif float in types:
        text = f"a number{bounds(meta)}"
    else:
        text = "a string"
    for word in meta.words:
        text += f", {word}"
    return f"{text} or none" if key.optional else text


def bounds(meta: Meta) -> str:
    """The range of a number in words, with a leading blank; empty without bounds."""
    low = high = ""
    if meta.minimum is not None:
        low = f"from {show(meta.minimum)}"
    elif meta.above is not None:
        low = f"above {show(meta.above)}"
    if meta.maximum is not None:
        high = f"to {show(meta.maximum)}"
    elif meta.below is not None:
        high = f"below {show(meta.below)}"
    if meta.minimum is not None and not high:
        low = f"of at least {show(meta.minimum)}"
    if low and high and not (low.startswith("from") and high.startswith("to")):
        return f" {low} and {high}"
    return "".join(f" {part}" for part in (low, high) if part)


def show(value: Any, key: Key | None = None) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if key is not None and key.meta.unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, float):
        if math.isfinite(value) and value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(show(v) for v in value) + "]"
    if isinstance(value, str):
        return value if value.strip() else repr(value)
    return repr(value)
