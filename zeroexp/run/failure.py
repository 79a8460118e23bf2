"""Which rank failed first, and how: one verdict out of error files, exit codes and the kernel's
word on memory.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from zeroexp.run import status
from zeroexp.run.atomic import read_json
from zeroexp.run.directory import RunDirectory
from zeroexp.run.fault import lost_peer
from zeroexp.run.reserve import no_room

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended badly. ``signal`` is set when a signal ended it, ``message`` when it could
    say why.
    """

    rank: int
    #: seconds since the epoch: when the error was raised, else when the end was seen
    time: float
    signal: int | None = None
    exit_code: int | None = None
    kind: str = ""  # the class name of the exception
    message: str = ""
    brief: str = ""  # its traceback without the frames of libraries
    status: str = status.CRASH  # what the rank itself takes its error for

    @property
    def was_stopped(self) -> bool:
        """True for a rank that had no error of its own and ended because it was told to."""
        told = self.signal == signal.SIGTERM or self.exit_code == 128 + signal.SIGTERM
        return told and not self.kind

    @property
    def is_consequence(self) -> bool:
        """True for an end that only says that another rank is gone or that the agent stopped it."""
        if self.was_stopped:
            return True
        return self.signal is None and self.status != status.TIMEOUT and lost_peer(self.message)


@dataclass(frozen=True)
class Verdict:
    """The status class of a run with its reason and the rank that failed.

    ``first`` is the failure that started it, if one is known. It is another rank's than
    ``failed_rank`` where that rank waited in vain for this one.
    """

    status: str
    reason: str = ""
    failed_rank: int | None = None
    first: RankFailure | None = None


def collect(directory: RunDirectory) -> list[RankFailure]:
    """Every bad end of a rank that the run directory tells of, error files joined with exit
    codes.
    """
    ended = (read_json(directory.exits) or {}).get("exits", [])
    exits: dict[int, dict[str, object]] = {e["rank"]: e for e in ended if e["exit_code"] != 0}
    found: list[RankFailure] = []
    for path in sorted(directory.errors.glob("rank*.json")) if directory.errors.is_dir() else []:
        error = read_json(path)
        if error is None:
            continue
        rank = int(error["rank"])
        end = exits.pop(rank, {})
        code = end.get("exit_code")
        # A rank that was told to stop may raise on the way; its error is the agent's doing.
        found.append(
            RankFailure(
                rank=rank,
                time=float(error["time"]),
                signal=-code
                if isinstance(code, int) and code < 0 and not error["message"]
                else None,
                exit_code=code if isinstance(code, int) else None,
                kind=str(error["kind"]),
                message=str(error["message"]),
                brief=str(error["brief"]),
                status=str(error["status"]),
            )
        )
    for rank, end in exits.items():
        code = end["exit_code"]
        number = code if isinstance(code, int) else None
        found.append(
            RankFailure(
                rank=rank,
                time=float(str(end["time"])),
                signal=-number if number is not None and number < 0 else None,
                exit_code=number,
            )
        )
    return found


def first(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The failure that started it: the earliest that is not a mere consequence, else the earliest
    of all. Of ranks that say the same (they agreed on it) the first rank speaks.
    """
    causes = [failure for failure in failures if not failure.is_consequence]
    earliest = min(causes or failures, key=lambda failure: failure.time, default=None)
    if earliest is None or not earliest.kind:
        return earliest
    alike = [failure for failure in failures if failure.message == earliest.message]
    return min(alike, key=lambda failure: failure.rank)


def verdict(directory: RunDirectory, *, agent_code: int, oom_kills: int) -> Verdict:
    """What became of a run whose agent ended with ``agent_code`` (not 0).

    ``oom_kills`` is how many processes the kernel killed for memory during the run.
    """
    failures = collect(directory)
    cause = first(failures)
    if cause is None:
        return Verdict(status.CRASH, _agent_reason(directory, agent_code))
    rank = cause.rank
    if cause.signal is not None:
        name = signal_name(cause.signal)
        if cause.signal == signal.SIGKILL and oom_kills > 0:
            reason = f"rank {rank} was killed by the kernel: out of host memory"
            return Verdict(status.OOM, reason, rank, cause)
        hint = "; its log ends with the stack" if cause.signal in _FAULTS else ""
        return Verdict(status.CRASH, f"rank {rank} was ended by {name}{hint}", rank, cause)
    if not cause.kind:
        reason = f"rank {rank} ended with exit code {cause.exit_code} and no Python error"
        if no_room(directory):
            reason += f", and the disk of {directory.path} is full"
        return Verdict(status.CRASH, reason, rank, cause)
    reason = f"rank {rank}: {cause.kind}: {headline(cause.message) or cause.kind}"
    absent = [failure.rank for failure in failures if failure.was_stopped]
    if cause.status == status.TIMEOUT and absent:
        who = f"rank {absent[0]} did" if len(absent) == 1 else f"ranks {absent} did"
        reason = f"{who} not take part; {reason}; where it stood: launch/stack{absent[0]}.txt"
        return Verdict(status.TIMEOUT, reason, absent[0], cause)
    return Verdict(cause.status, reason, rank, cause)


def headline(message: str) -> str:
    """The first sentence of ``message``: its first line, and where that ends in a colon the lines
    it announces.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = lines[0] if lines else ""
    for line in lines[1:]:
        if not said.endswith(":"):
            break
        said += f" {line}"
    return said.rstrip(":")


_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)


def port_taken(text: str) -> bool:
    """True for words of torch's that say another process has the port."""
    return bool(_PORT_TAKEN.search(text))


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the bare number for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _agent_reason(directory: RunDirectory, code: int) -> str:
    try:
        text = directory.agent_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if port_taken(text):
        return "the port of the rendezvous is in use by another process; start the run again"
    lines = [line for line in text.splitlines() if line.strip()]
    if no_room(directory):
        return f"the disk of {directory.path} is full (the ranks could not say what they met)"
    last = lines[-1].strip() if lines else "no output"
    return f"the elastic agent ended with exit code {code}: {last}"
