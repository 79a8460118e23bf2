"""One rank: ``python -m zeroexp.run.worker RUN_DIR [CHECKPOINT]``, started by the elastic agent."""

from __future__ import annotations

import sys
from pathlib import Path

from zeroexp.run.rank import start_rank


def main(argv: list[str]) -> int:
    """Train the run whose configuration lies in ``argv[0]``, from the checkpoint ``argv[1]`` if
    one is given.
    """
    with start_rank(Path(argv[0])) as rank:
        from zeroexp.run.training import train  # torch and lightning: seconds

        train(rank, Path(argv[1]) if len(argv) > 1 else None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
