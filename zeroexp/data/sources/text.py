"""Text as bytes: a file, or every file of a folder. Token ids are the byte values 0-255."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zeroexp.data.sources.source import Split, tail
from zeroexp.errors import ConfigError, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SEPARATOR = b"\0"
"""Ends every file of a folder; it does not occur in text, so a model can tell documents apart."""


def in_validation(name: str, fraction: float) -> bool:
    """Whether the file called ``name`` (relative, with forward slashes) belongs to validation.

    Decided by the SHA-256 of the name alone: adding or removing other files moves nothing between
    the splits.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


class TextFiles:
    """The bytes of ``files`` in the given order, each ended by :data:`SEPARATOR`.

    Whole files go to one split; where that would leave training or validation without any (few
    files), validation is the last ``val_fraction`` of all bytes instead.
    """

    num_ids = 256

    def __init__(self, name: str, root: Path, files: Sequence[Path], val_fraction: float) -> None:
        self.name = name
        train: list[Path] = []
        val: list[Path] = []
        for file in files:
            name_in_root = file.relative_to(root).as_posix()
            (val if in_validation(name_in_root, val_fraction) else train).append(file)
        self._by_file = val_fraction == 0 or bool(val and train)
        self._files: dict[Split, list[Path]] = (
            {"train": train, "val": val} if self._by_file else {"train": list(files), "val": []}
        )
        self._sizes = {
            split: sum(f.stat().st_size + len(SEPARATOR) for f in part)
            for split, part in self._files.items()
        }
        self._val_tail = 0 if self._by_file else tail(self._sizes["train"], val_fraction)
        self._streams: dict[Split, npt.NDArray[np.uint8]] = {}

    def files(self, split: Split) -> list[Path]:
        """Files of the split; all of them are under "train" where the split is a cut through the
        bytes."""
        return list(self._files[split])

    def num_tokens(self, split: Split) -> int:
        if self._by_file:
            return self._sizes[split]
        return self._val_tail if split == "val" else self._sizes["train"] - self._val_tail

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        import numpy as np

        if not self._by_file and split == "val":
            split, start = "train", start + self._sizes["train"] - self._val_tail
        if split not in self._streams:
            self._streams[split] = np.frombuffer(
                b"".join(f.read_bytes() + SEPARATOR for f in self._files[split]), dtype=np.uint8
            )
        return self._streams[split][start : start + count].astype(np.int64)


class TextFile:
    """The bytes of one file, mapped and not loaded; validation is the last ``val_fraction`` of
    them."""

    num_ids = 256

    def __init__(self, path: Path, val_fraction: float) -> None:
        self.name = str(path)
        self._path = path
        self._size = path.stat().st_size
        self._val_tail = tail(self._size, val_fraction)
        self._stream: npt.NDArray[np.uint8] | None = None

    def num_tokens(self, split: Split) -> int:
        return self._val_tail if split == "val" else self._size - self._val_tail

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        import numpy as np

        if self._stream is None:
            self._stream = np.memmap(self._path, dtype=np.uint8, mode="r")
        if split == "val":
            start += self._size - self._val_tail
        return self._stream[start : start + count].astype(np.int64)


def existing(path: str | None, what: str) -> Path:
    """The path of ``data.path``, or the message that it is missing. ``what`` says what it should
    hold."""
    if not path:
        raise ConfigError([Problem("data.path", "is not set.", f"Give {what}: data.path=PATH")])
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(
            [
                Problem(
                    "data.path",
                    f"{path!r} does not exist (looked for {found.absolute()}).",
                    f"Give {what} that exists",
                )
            ]
        )
    return found


def text_under(root: Path) -> list[Path]:
    """Every readable, non-empty file below ``root`` in the order of its name; hidden files and
    folders stay out."""
    files = (f for f in root.rglob("*") if f.is_file() and f.stat().st_size)
    visible = (
        f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts)
    )
    return sorted(visible, key=lambda f: f.relative_to(root).as_posix())


def open_text(path: str | None, val_fraction: float) -> TextFile | TextFiles:
    """The source of ``data=text``.

    Raises :class:`ConfigError` if ``path`` is missing or holds no text.
    """
    found = existing(path, "a text file or a folder of them")
    source: TextFile | TextFiles
    if found.is_dir():
        source = TextFiles(str(path), found, text_under(found), val_fraction)
        empty, what = not source.files("train"), "holds no file with text in it"
    else:
        source = TextFile(found, val_fraction)
        empty, what = found.stat().st_size == 0, "is empty"
    if empty:
        raise ConfigError(
            [Problem("data.path", f"{path!r} {what}.", "Give a file or folder with text")]
        )
    return source
