"""Long-lived gloo ranks for the tests: import torch once, run many functions in fresh groups.

A :class:`Pool` keeps one worker process per rank for the whole pytest session. Each call gets a
process group of its own (a fresh part of the store, destroyed afterwards) and a deadline. A worker
that misses the deadline, dies or leaves its peers stuck is killed, and all workers of a call that
failed are replaced before the next one, so that one bad test cannot spoil another.

The function is named, not pickled: workers import its module by name or file, so it has to live at
module level. Arguments and results travel as pickles over a pipe, prints go to one log file per
worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

DEADLINE = 60.0
"""Seconds one call may take when the test names no other deadline."""

START_DEADLINE = 180.0
"""Seconds a worker may take to start and import torch (on a loaded machine)."""

GRACE = 5.0
"""Seconds the peers of a failed rank get to fail by themselves (gloo sees closed connections)."""


_CONTEXT = multiprocessing.get_context("forkserver")
"""One server process imports what every worker needs and forks them off: a new worker costs
milliseconds. It never runs anything itself, so there are no threads or groups to inherit."""

_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "pytest", "zeroexp.engine"]
)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong on one rank. ``at`` is the system-wide monotonic clock in seconds."""

    rank: int
    kind: str
    message: str
    trace: str
    at: float
    error: BaseException | None = None


class RankError(Exception):
    """At least one rank failed.

    ``failures`` are ordered by time; ``error`` is the first failing rank's exception, if any.
    """

    def __init__(self, name: str, failures: Sequence[Failure], output: Sequence[str]) -> None:
        self.failures = tuple(failures)
        first = self.failures[0]
        self.rank, self.kind, self.error = first.rank, first.kind, first.error
        lines = [f"{name}: rank {first.rank} failed first: {first.kind}: {first.message}"]
        for failure in self.failures:
            lines.append(f"--- rank {failure.rank}: {failure.kind} ---")
            lines.append(failure.trace.rstrip() or failure.message)
        for rank, text in enumerate(output):
            if text.strip():
                lines.append(f"--- printed by rank {rank} ---\n{text.rstrip()[-8000:]}")
        super().__init__("\n".join(lines))


@dataclasses.dataclass(frozen=True)
class Target:
    """A module-level function, as a worker finds it."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Target:
        if "<" in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__}: only module-level functions can run on ranks")
        return cls(fn.__module__, str(Path(fn.__code__.co_filename).resolve()), fn.__qualname__)

    def load(self) -> Callable[..., Any]:
        module = sys.modules.get(self.module)
        if module is None:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(self.module)
        found_at = getattr(module, "__file__", None)
        if module is None or found_at is None or Path(found_at).resolve() != Path(self.file):
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{self.module} cannot be loaded from {self.file}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        found: Any = module
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]


class Worker:
    """The parent's end of one rank: its process, its pipe and its log."""

    def __init__(self, folder: Path, slot: int, serial: int) -> None:
        self.slot = slot
        self.log = folder / f"rank{slot}-{serial}.log"
        self.log.touch()
        self.pipe, theirs = connection.Pipe()
        with _environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"):
            self.process = _CONTEXT.Process(target=_main, args=(theirs, str(self.log)), daemon=True)
            self.process.start()
        theirs.close()
        self.ready = False
        self._read = 0

    def await_ready(self, until: float) -> None:
        if self.ready:
            return
        try:
            if not self.pipe.poll(max(0.0, until - time.monotonic())):
                raise RuntimeError(f"worker {self.slot} did not start:\n{self.printed()}")
            self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            said = self.printed()
            raise RuntimeError(f"worker {self.slot} died while starting:\n{said}") from error
        self.ready = True

    def printed(self) -> str:
        """Everything the worker wrote since the last call, C level included."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        return text.decode(errors="replace")

    def stacks(self) -> None:
        """Ask the worker to write the Python stacks of all its threads into its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)

    @property
    def _pid(self) -> int:
        if self.process.pid is None:
            raise ProcessLookupError
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def exit_code(self) -> int | None:
        """What the process ended with; waits for its end."""
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        """End the process and what it started (it leads a session of its own)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Workers for ranks 0, 1, …; a call starts what it needs and replaces what was broken."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-")) if folder is None else folder
        self._workers: dict[int, Worker] = {}
        self._serial = 0
        self._store: Any = None

    def _store_port(self) -> int:
        """Port of the store where all groups meet; it lives in this process."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def workers(self, num_ranks: int) -> list[Worker]:
        for slot in range(num_ranks):
            worker = self._workers.get(slot)
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.kill()
                self._serial += 1
                self._workers[slot] = Worker(self.folder, slot, self._serial)
        chosen = [self._workers[slot] for slot in range(num_ranks)]
        until = time.monotonic() + START_DEADLINE
        for worker in chosen:
            try:
                worker.await_ready(until)
            except RuntimeError:
                self._drop(worker)
                raise
        return chosen

    def _drop(self, worker: Worker) -> None:
        worker.kill()
        if self._workers.get(worker.slot) is worker:
            del self._workers[worker.slot]

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = DEADLINE,
    ) -> tuple[list[Any], list[str]]:
        """Run ``fn(*args, **kwargs)`` on ``num_ranks`` ranks; returns results and prints by rank.

        Raises :class:`RankError` when a rank raises, dies or needs more than ``timeout`` seconds.
        """
        workers = self.workers(num_ranks)
        for worker in workers:
            worker.printed()
        self._serial += 1
        target, store = Target.of(fn), (self._store_port(), f"call-{self._serial}")
        payload = pickle.dumps((args, kwargs or {}))
        started = time.monotonic()
        for rank, worker in enumerate(workers):
            try:
                worker.pipe.send((target, rank, num_ranks, store, timeout, sys.path))
                worker.pipe.send_bytes(payload)
            except OSError:
                continue  # dead already; noticed below
        results, failures = self._collect(workers, started + timeout, timeout)
        output = [worker.printed() for worker in workers]
        if failures:
            for worker in workers:
                self._drop(worker)
            # A death is never the consequence of a peer's failure, and its moment is known only
            # roughly: it comes first.
            failures.sort(key=lambda failure: (failure.kind != "died", failure.at))
            raised = RankError(fn.__qualname__, failures, output)
            raise raised from failures[0].error
        return [results[rank] for rank in range(num_ranks)], output

    def _collect(
        self, workers: list[Worker], until: float, timeout: float
    ) -> tuple[dict[int, Any], list[Failure]]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = dict(enumerate(workers))
        while waiting and time.monotonic() < until:
            pipes = {worker.pipe: rank for rank, worker in waiting.items()}
            for pipe in connection.wait(list(pipes), max(0.0, until - time.monotonic())):
                rank = pipes[pipe]  # type: ignore[index]
                worker = waiting.pop(rank)
                try:
                    ok, at, value = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    code = worker.exit_code()
                    text = f"the process ended with code {code}"
                    failures.append(Failure(rank, "died", text, "", time.monotonic()))
                    self._drop(worker)
                else:
                    if ok:
                        results[rank] = value
                    else:
                        failures.append(Failure(rank, at=at, **value))
            if failures:
                until = min(until, time.monotonic() + GRACE)
        if waiting:
            kind = "stuck" if failures else "timeout"
            late = f"not done after {timeout:g} s"
            text = "was still waiting for a failed peer" if failures else late
            for worker in waiting.values():
                worker.stacks()
            time.sleep(0.3)
            now = time.monotonic()
            for rank, worker in waiting.items():
                failures.append(Failure(rank, kind, text, "", now))
                self._drop(worker)
        return results, failures

    def close(self) -> None:
        for worker in list(self._workers.values()):
            self._drop(worker)
        shutil.rmtree(self.folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# The worker's side


def _main(pipe: connection.Connection, log: str) -> None:
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no life after pytest
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(out, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _serve(pipe)


@contextlib.contextmanager
def _group(rank: int, num_ranks: int, store: tuple[int, str], timeout: float) -> Iterator[None]:
    """A gloo group of its own; settings that a test may change are put back."""
    import torch
    import torch.distributed as dist

    environment, folder = dict(os.environ), Path.cwd()
    torch.manual_seed(0)
    random.seed(0)
    port, prefix = store
    patience = datetime.timedelta(seconds=timeout + 60)  # the pool's own deadline comes first
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, meeting),
        rank=rank,
        world_size=num_ranks,
        timeout=patience,
    )
    dist.barrier()  # or a quick rank could be gone before a slow one has connected to it
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)


def _failed(error: BaseException) -> dict[str, Any]:
    said = {"kind": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return said
    return {**said, "error": error}


def _answer(target: Target, payload: bytes) -> bytes:
    try:
        function = target.load()
        args, kwargs = pickle.loads(payload)
        return pickle.dumps((True, time.monotonic(), function(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps((False, time.monotonic(), _failed(error)))


def _serve(pipe: connection.Connection) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays; collections need not look at it
    pipe.send_bytes(b"ready")
    while True:
        try:
            target, rank, num_ranks, store, timeout, path = pipe.recv()
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        sys.path.extend(entry for entry in path if entry not in sys.path)
        answer = b""
        try:
            with _group(rank, num_ranks, store, timeout):
                answer = _answer(target, payload)  # stamped before the group goes and peers fail
        except BaseException as error:
            answer = answer or pickle.dumps((False, time.monotonic(), _failed(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()  # engines and graphs of this test must not live into the next one
        pipe.send_bytes(answer)
