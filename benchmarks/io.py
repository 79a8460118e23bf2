"""The file engine against a bare io_uring loop, DeepSpeed's asynchronous I/O and fio.

All of them read and write one file in place, past the page cache, in turn in every round, each at
the settings it does best with. What runs elsewhere is a process that waits for its turn, but fio,
which is started for each and times itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import fio, peer_env, uring_loop
from benchmarks.contender import Unavailable, contender
from benchmarks.uring_loop import MIB
from zeroexp.ops import HostRange
from zeroexp.tiers import FileEngine

NUM_BYTES = 256 * MIB
LIMIT = "io_uring loop"
OURS = "zeroexp io_uring"
PEER = "DeepSpeed, its pinned buffer"
FIO = "fio"
LIMIT_SETTINGS = ((2 * MIB, 4), (8 * MIB, 4))
PEER_SETTINGS = ((1 * MIB, 8), (8 * MIB, 4))  # its defaults, and what suits the limit

Pass = Callable[[str], float]


def measure(rounds: int, folder: Path, num_bytes: int = NUM_BYTES) -> dict[str, Any]:
    """Milliseconds of one pass over ``num_bytes`` below ``folder``, reading and writing.

    Raises SystemExit with a line where the file system refuses direct transfers: nothing is to be
    learned about a disk there.
    """
    with tempfile.TemporaryDirectory(prefix="zeroexp-io-", dir=folder) as scratch, ExitStack() as s:
        path = Path(scratch) / "file"
        buffer = HostRange(num_bytes).tensor(torch.uint8).fill_(1)
        engine = s.enter_context(FileEngine())
        with engine.create(path, num_bytes) as file:
            if not file.direct:
                raise SystemExit(f"skipped: {'; '.join(engine.status().buffered)}")
            file.write(buffer)
        contenders, missing = _contenders(s, path, Path(scratch), buffer)
        return {"cases": _cases(contenders, missing, rounds, num_bytes)}


def _contenders(
    stack: ExitStack, path: Path, scratch: Path, buffer: torch.Tensor
) -> tuple[dict[str, Pass], dict[str, str]]:
    size = str(buffer.numel())
    plain = torch.ones_like(buffer)
    makers: dict[str, Callable[[], Any]] = {}
    try:
        loop = uring_loop.build(scratch)
        for block, depth in LIMIT_SETTINGS:
            command = [str(loop), str(path), size, str(block), str(depth)]
            makers[f"{LIMIT}, {_setting(block, depth)}"] = lambda c=command: _process(c, False)
    except Unavailable as error:
        makers[LIMIT] = _unavailable(str(error))
    makers[OURS] = lambda: _engine("io_uring", path, buffer)
    makers["zeroexp threads"] = lambda: _engine("threads", path, buffer)
    makers[f"{OURS}, caller's tensor"] = lambda: _engine("io_uring", path, plain)
    for kind, name in (("pinned", PEER), ("tensor", "DeepSpeed, caller's tensor")):
        for block, depth in PEER_SETTINGS:
            command = [
                *(str(peer_env.PYTHON), "-m", "benchmarks.peers.deepspeed_aio"),
                *(str(path), size, str(block), str(depth), kind),
            ]
            makers[f"{name}, {_setting(block, depth)}"] = lambda c=command: _process(c, True)
    for block, depth in LIMIT_SETTINGS:
        job = fio.Job(path, buffer.numel(), block, depth)
        makers[f"{FIO}, {_setting(block, depth)}"] = lambda j=job: fio.passes(j)
    running: dict[str, Pass] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            running[name] = stack.enter_context(make())
        except Unavailable as error:
            missing[name] = str(error)
    return running, missing


def _setting(block: int, depth: int) -> str:
    return f"{block // MIB} MiB x {depth}"


def _unavailable(reason: str) -> Callable[[], Any]:
    def make() -> Any:
        raise Unavailable(reason)

    return make


def _cases(
    contenders: dict[str, Pass], missing: dict[str, str], rounds: int, num_bytes: int
) -> list[dict[str, Any]]:
    samples: dict[str, dict[str, Any]] = {}
    for what in ("read", "write"):
        samples[what] = {name: [] for name in contenders} | missing
    for index in range(rounds + 1):
        for name, run in list(contenders.items())[:: 1 if index % 2 else -1]:
            for what in samples:
                seconds = run(what)
                if index:  # the first round warms up
                    samples[what][name].append(seconds * 1e3)
    for found in samples.values():
        for name in (LIMIT, PEER, FIO):
            _best_of(found, name)
    return [
        {
            "name": what,
            "what": f"{num_bytes // MIB} MiB in place, direct; zeroexp at its defaults",
            "unit": "ms",
            "samples": samples[what],
        }
        for what in samples
    ]


def _best_of(samples: dict[str, Any], name: str) -> None:
    """Adds a variant ``name``: in each round, the fastest of the settings of that contender."""
    lists = [v for k, v in samples.items() if k.startswith(f"{name}, ") and isinstance(v, list)]
    if lists:
        samples[name] = [min(values) for values in zip(*lists, strict=True)]


@contextmanager
def _engine(kind: str, path: Path, buffer: torch.Tensor) -> Iterator[Pass]:
    with FileEngine(kind) as engine, engine.open(path, writable=True) as file:
        transfers = {"read": file.read, "write": file.write}

        def run(what: str) -> float:
            start = time.perf_counter()
            transfers[what](buffer)
            return time.perf_counter() - start

        yield run


@contextmanager
def _process(command: list[str], ready: bool) -> Iterator[Pass]:
    if not Path(command[0]).exists():
        raise Unavailable("not installed: python -m benchmarks peers")
    with contender(command, peer_env.variables(), ready) as one:
        yield one.run
