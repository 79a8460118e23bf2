"""What a source of tokens offers. Sizes are known without reading tokens and without torch or
numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Split = Literal["train", "val"]


class Source(Protocol):
    """A stream of token ids per split."""

    @property
    def name(self) -> str:
        """What messages call it: a path, or the kind."""

    @property
    def num_ids(self) -> int | None:
        """Token ids lie in ``range(num_ids)``; None if only the tokens tell."""

    def num_tokens(self, split: Split) -> int:
        """Length of the split's stream in tokens (0: the split is empty)."""

    def read(self, split: Split, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens ``start .. start + count`` of the split's stream, a fresh int64 array of shape
        (count,)."""


def tail(total: int, fraction: float) -> int:
    """Tokens of a stream of ``total`` that validation takes from its end."""
    return round(total * fraction)
