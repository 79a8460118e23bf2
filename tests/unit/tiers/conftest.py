from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from zeroexp.errors import ZeroexpError
from zeroexp.ops import native
from zeroexp.tiers import FileEngine, backend

Make = Callable[..., FileEngine]


@pytest.fixture(params=["python", "threads", "io_uring"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines of each kind; small blocks, so that a test has many of them."""
    kind = request.param
    chosen = native.select("reference" if kind == "python" else "")
    if kind != "python" and chosen.file_engine is None:
        pytest.skip("no compiled ops here")
    monkeypatch.setattr(backend, "native", lambda: chosen)
    engines = []

    def engine(block_size: int = 8192, queue_depth: int = 4, threads: int = 3) -> FileEngine:
        made = FileEngine(
            "threads" if kind == "python" else kind,
            block_size=block_size,
            queue_depth=queue_depth,
            threads=threads,
        )
        assert made.status().compiled == (kind != "python")
        engines.append(made)
        return made

    try:
        FileEngine("threads" if kind == "python" else kind).close()
    except ZeroexpError as error:
        pytest.skip(str(error))
    yield engine
    for made in engines:
        made.close()
