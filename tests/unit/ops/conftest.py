from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroexp.ops import (
    adagrad,
    adamw,
    casts,
    checksums,
    edits,
    host_range,
    lion,
    native,
    sgd,
    sums,
)

try:
    from zeroexp._C import available_isas

    COMPILED = available_isas()
except ImportError:
    COMPILED = []


@pytest.fixture(params=["reference", "baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with torch's operations and with the kernels of each instruction set."""
    name = request.param
    if name != "reference" and name not in COMPILED:
        pytest.skip(f"no {name} kernels here")
    chosen = native.select(name)
    for module in (adagrad, adamw, casts, checksums, edits, host_range, lion, sgd, sums):
        monkeypatch.setattr(module, "native", lambda: chosen)
    yield name
