"""``launch=external``: the ranks exist already, under torchrun or Slurm, and this process is one of
them.

Rank 0 makes the run directory and tells the others through the store of the launch; each rank then
trains in this very process. No driver watches: whoever started the ranks does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroexp.config import Composed
from zeroexp.errors import ConfigError, Problem, ZeroexpError
from zeroexp.run import driver, fault, reserve, result, status
from zeroexp.run.directory import RunDirectory
from zeroexp.run.failure import Verdict, headline, port_taken
from zeroexp.run.rank import Rank, log_to
from zeroexp.run.rendezvous import check_address, deadline, unreached
from zeroexp.run.summary import closing_lines, opening_lines

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_DIRECTORY = "zeroexp/run"
_LET_RANK_0_SPEAK_SECONDS = 10.0


def run_external(composed: Composed, argv: Sequence[str], *, quiet: bool = False) -> int:
    """Train as one of the ranks that exist; the exit code of this rank.

    Raises :class:`ConfigError` when no launcher's variables are there or one cannot be used, the
    port of the launch is taken, or rank 0 cannot make the run directory (on rank 0; the others end
    without a word, with the same code), and :class:`ZeroexpError` when the ranks do not meet within
    ``launch.timeout``.
    """
    check_address(os.environ)
    from zeroexp.run.training import train, with_ranks_of_launcher

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for ranks that are started here: model.target is found
    environment = with_ranks_of_launcher()
    rank, world = environment.global_rank(), environment.world_size()
    # A rank that reaches a collective late is no slower than one that reaches the store late.
    timeout = composed.config.launch.timeout
    with deadline(rank, world, timeout):
        store = _store(environment, timeout)
    start = _announce(store, composed, argv) if rank == 0 else None
    told = json.loads(store.get(_DIRECTORY))
    if told["path"] is None:
        time.sleep(_LET_RANK_0_SPEAK_SECONDS)  # the launcher ends this rank when rank 0 has ended
        return int(told["exit_code"])
    directory = RunDirectory(Path(told["path"]))
    checkpoint = Path(told["checkpoint"]) if told["checkpoint"] else None
    here = Rank(directory, rank, environment.local_rank(), world)
    began = time.time()
    if start is not None and not quiet:
        lines = opening_lines(start.config, start.forecast, directory, start.threads)
        print(*lines, *start.swept, sep="\n", flush=True)
    with _log(here, quiet), _reported(here, world):
        train(here, checkpoint, environment)
        # Every rank's figures are on disk before rank 0 puts them together.
        store.add(f"{_DIRECTORY}/done", 1)
        if start is not None:
            _wait_for(store, world, timeout)
            _finish(start, began, quiet)
    return 0


def _store(environment: Any, timeout: float) -> Store:
    """The store of the launch: torchrun's own, or one that rank 0 serves on MASTER_PORT."""
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    rank, world = environment.global_rank(), environment.world_size()
    try:
        store: Store
        within = timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", rank, world, timeout=within))
    except DistError as error:
        port, head = os.environ.get("MASTER_PORT", "?"), str(error).splitlines()[0].rstrip(".")
        if not port_taken(head):
            raise ZeroexpError(unreached(rank, world, timeout, head)) from error
        raise ConfigError(
            [
                Problem(
                    "MASTER_PORT",
                    f"port {port} cannot be used: {head}.",
                    f"See who has it with  ss -ltnp 'sport = :{port}', or set another MASTER_PORT",
                )
            ]
        ) from error
    return store


def _announce(store: Store, composed: Composed, argv: Sequence[str]) -> driver.Start:
    """On rank 0: make the run directory and tell the others, or tell them that there is none."""
    try:
        start = driver.prepare(composed, argv)
    except ZeroexpError as error:
        store.set(_DIRECTORY, json.dumps({"path": None, "exit_code": error.exit_code}))
        raise
    start.directory.launch.mkdir(exist_ok=True)
    resume = str(start.resume_from) if start.resume_from is not None else None
    store.set(_DIRECTORY, json.dumps({"path": str(start.directory.path), "checkpoint": resume}))
    return start


def _wait_for(store: Store, world: int, timeout: float) -> None:
    until = time.monotonic() + timeout
    while store.add(f"{_DIRECTORY}/done", 0) < world and time.monotonic() < until:
        time.sleep(0.02)


def _finish(start: driver.Start, began: float, quiet: bool) -> None:
    if start.describing is not None:
        start.describing.join()
    reserve.give_up(start.directory)
    final = status.Status(status.OK)
    ranks = start.config.ranks
    written = result.write(start.directory, config_digest=start.digest, status=final, ranks=ranks)
    final.write(start.directory)
    if not quiet:
        print(
            *closing_lines(start.directory, Verdict(status.OK), written, began),
            sep="\n",
            flush=True,
        )


@contextlib.contextmanager
def _log(rank: Rank, quiet: bool) -> Iterator[None]:
    """rankN.log gets everything; rank 0's output is shown as well, unless quiet."""
    path = rank.directory.log(rank.rank)
    if rank.rank != 0 or quiet:
        log_to(path)
        yield
        return
    shown = os.dup(1)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)

    def copy() -> None:
        with open(path, "ab", buffering=0) as log:
            while data := os.read(reader, 1 << 16):
                log.write(data)
                os.write(shown, data)

    copier = threading.Thread(target=copy, name="zeroexp-log", daemon=True)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The last writer of the pipe goes, so that the copier comes to its end.
        os.dup2(shown, 1)
        os.dup2(shown, 2)
        copier.join(timeout=5)


@contextlib.contextmanager
def _reported(rank: Rank, world: int) -> Iterator[None]:
    """An exception is this rank's word for the run directory and for torchrun, then ends the
    process.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            fault.record(rank.directory, rank.rank, error)
        found = fault.classify(error)
        _status_if_first(rank, error, found)
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        raise


def _status_if_first(rank: Rank, error: Exception, found: str) -> None:
    """Write status.json unless another rank has said why already; a lost peer is nobody's first
    word.
    """
    if fault.lost_peer(str(error)):
        time.sleep(1.0)
    known = status.read(rank.directory)
    if known is not None and known.status not in (status.RUNNING, status.INTERRUPTED):
        return
    kind = type(error).__name__
    reason = f"rank {rank.rank}: {kind}: {headline(fault.said(error, rank.directory)) or kind}"
    reserve.give_up(rank.directory)
    with contextlib.suppress(OSError):
        status.Status(found, reason, rank.rank).write(rank.directory)
