"""Files of token ids, mapped into memory: ``.npy`` arrays, or raw ``.bin`` files of one integer
type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zeroexp.data.sources.source import Split, tail
from zeroexp.data.sources.text import existing
from zeroexp.errors import ConfigError, Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "int64": 8,
    "uint64": 8,
}
SUFFIXES = (".bin", ".npy")


class TokenFile:
    """One mapped file; ``dtype`` is the integer type of a ``.bin`` file (an ``.npy`` says its
    own)."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self._dtype = dtype
        self._tokens: npt.NDArray[np.integer] | None = None
        if path.suffix == ".npy":
            self.size = len(self.tokens)
            return
        size = path.stat().st_size
        if size % ITEM_BYTES[dtype]:
            raise ConfigError(
                [
                    Problem(
                        "data.dtype",
                        f"{path} has {size} bytes; one {dtype} takes {ITEM_BYTES[dtype]}.",
                        "Give the type that the file was written with",
                    )
                ]
            )
        self.size = size // ITEM_BYTES[dtype]

    @property
    def tokens(self) -> npt.NDArray[np.integer]:
        if self._tokens is None:
            self._tokens = self._open()
        return self._tokens

    def _open(self) -> npt.NDArray[np.integer]:
        import numpy as np

        if self.path.suffix != ".npy":
            return np.memmap(self.path, dtype=np.dtype(self._dtype), mode="r")
        try:
            array: npt.NDArray[np.integer] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ConfigError(
                [
                    Problem(
                        "data.path",
                        f"{self.path} is not a readable .npy file: {error}.",
                        "Write it with numpy.save",
                    )
                ]
            ) from error
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(
                [
                    Problem(
                        "data.path",
                        f"{self.path} holds {array.dtype} of shape {array.shape}.",
                        "Token files are one-dimensional arrays of integers",
                    )
                ]
            )
        return array

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        import numpy as np

        return self.tokens[start : start + count].astype(np.int64)


class TokenFiles:
    """The source of ``data=memmap``: one file cut at its tail, or a folder with ``train`` and
    ``val`` files."""

    num_ids = None

    def __init__(
        self, name: str, train: TokenFile, val: TokenFile | None, val_fraction: float
    ) -> None:
        self.name = name
        self._train = train
        self._val = val
        self._val_tail = 0 if val else tail(train.size, val_fraction)

    def num_tokens(self, split: Split) -> int:
        if split == "train":
            return self._train.size - self._val_tail
        return self._val.size if self._val else self._val_tail

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        if split == "train":
            return self._train.read(start, count)
        if self._val is not None:
            return self._val.read(start, count)
        return self._train.read(start + self._train.size - self._val_tail, count)


def _one_file(folder: Path, stem: str) -> Path | None:
    return next(
        (
            folder / f"{stem}{suffix}"
            for suffix in SUFFIXES
            if (folder / f"{stem}{suffix}").is_file()
        ),
        None,
    )


def open_token_files(path: str | None, dtype: str, val_fraction: float) -> TokenFiles:
    """The source of ``data=memmap``.

    ``path`` is a ``.bin`` or ``.npy`` file, whose last ``val_fraction`` is validation, or a folder
    with a ``train`` file and perhaps a ``val`` file. Raises :class:`ConfigError` if it is missing,
    empty or no token file.
    """
    found = existing(path, "a token file (.bin or .npy) or a folder with train.bin and val.bin")
    val: Path | None = None
    if found.is_dir():
        train, val = _one_file(found, "train"), _one_file(found, "val")
        if train is None:
            raise ConfigError(
                [
                    Problem(
                        "data.path",
                        f"the folder {path!r} holds neither train.bin nor train.npy.",
                        "Name the file, or put train.bin (and val.bin) there",
                    )
                ]
            )
    else:
        train = found
        if found.suffix not in SUFFIXES:
            raise ConfigError(
                [
                    Problem(
                        "data.path",
                        f"{path!r} ends neither in .bin nor in .npy.",
                        "Use data=text for text; rename raw token files to .bin",
                    )
                ]
            )
    if dtype not in ITEM_BYTES:
        raise ConfigError(
            [
                Problem(
                    "data.dtype",
                    f"{dtype!r} is no token type.",
                    f"Use one of {', '.join(ITEM_BYTES)}",
                )
            ]
        )
    for file in (train, val):
        if file is not None and file.stat().st_size == 0:
            raise ConfigError(
                [Problem("data.path", f"{str(file)!r} is empty.", "Give a file with tokens in it")]
            )
    return TokenFiles(
        str(path), TokenFile(train, dtype), TokenFile(val, dtype) if val else None, val_fraction
    )
