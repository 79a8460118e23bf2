"""benchmarks/ is not installed: make the checkout importable, last, so that it shadows nothing."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
