"""The sources by ``data.kind``. A new source is a file of its own and one line here."""

from __future__ import annotations

from collections.abc import Callable

from zeroexp.config import Config
from zeroexp.data.sources.python_library import open_library
from zeroexp.data.sources.source import Source
from zeroexp.data.sources.synthetic import SyntheticTokens
from zeroexp.data.sources.text import open_text
from zeroexp.data.sources.token_files import open_token_files

SOURCES: dict[str, Callable[[Config], Source]] = {
    "stdlib": lambda c: open_library(c.data.val_fraction),
    "text": lambda c: open_text(c.data.path, c.data.val_fraction),
    "memmap": lambda c: open_token_files(c.data.path, c.data.dtype, c.data.val_fraction),
    "synthetic": lambda c: SyntheticTokens(c.model.vocab_size, data_seed(c), c.data.val_fraction),
}


def data_seed(config: Config) -> int:
    """``data.seed``, or ``trainer.seed`` where that is not set."""
    return config.trainer.seed if config.data.seed is None else config.data.seed


def open_source(config: Config) -> Source:
    """The source of ``config.data``; looks at names and sizes, reads no tokens.

    Raises :class:`zeroexp.errors.ConfigError` if there is nothing to read.
    """
    return SOURCES[config.data.kind](config)
