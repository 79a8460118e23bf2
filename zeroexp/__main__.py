"""``python -m zeroexp``."""

from __future__ import annotations

import sys

from zeroexp.cli import main

if __name__ == "__main__":
    sys.exit(main())
