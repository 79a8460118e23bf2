"""Did you mean: the known words nearest to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Up to ``count`` of ``known``, the best first; empty when none is near.

    Near is: a small edit distance relative to the length (difflib's ratio of at least 0.6, ignoring
    case), or one word inside the other (``3`` and ``stage3``), when only a single known word
    matches in that way.
    """
    candidates = list(dict.fromkeys(known))
    wanted = word.lower()
    scored = sorted(
        (
            (-difflib.SequenceMatcher(None, wanted, c.lower()).ratio(), i, c)
            for i, c in enumerate(candidates)
        ),
    )
    close = [c for score, _, c in scored if score <= -0.6]
    if not close and wanted:
        inside = [c for c in candidates if wanted in c.lower() or c.lower() in wanted]
        close = inside if len(inside) == 1 else []
    return close[:count]
