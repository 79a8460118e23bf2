"""What Linux says about processes and memory: /proc and the control group. Every size is in
bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

#: Environment variable that marks every process of a run (ranks, data workers, what they start).
RUN_MARK = "ZEROEXP_RUN_ID"


def _status_bytes(field: str, pid: int | str = "self") -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def peak_rss_bytes(pid: int | str = "self") -> int | None:
    """Highest resident memory of the process so far (VmHWM); None where the system does not say."""
    return _status_bytes("VmHWM", pid)


def rss_bytes(pid: int | str = "self") -> int | None:
    """Resident memory of the process now (VmRSS); None where the system does not say."""
    return _status_bytes("VmRSS", pid)


def total_memory_bytes() -> int | None:
    """Memory this process may use: the machine's, or the control group's limit where that is
    smaller.
    """
    machine: int | None = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                machine = int(line.split()[1]) * 1024
    limits = [size for size in (machine, cgroup_limit_bytes()) if size is not None]
    return min(limits, default=None)


def _cgroup_directories() -> list[Path]:
    """The control group (v2) of this process and its parents, nearest first; empty under v1 or
    without one.
    """
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    path = root / own.lstrip("/")
    found = []
    while path.is_relative_to(root):
        found.append(path)
        path = path.parent
    return found


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups (v2, else v1); None when unlimited
    or unknown.
    """
    limits: list[int] = []
    candidates = [directory / "memory.max" for directory in _cgroup_directories()]
    candidates.append(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    for path in candidates:
        with contextlib.suppress(OSError, ValueError):
            value = int(path.read_text())  # "max" is no number: unlimited
            if value < 1 << 60:  # v1 writes its "unlimited" as a huge page-rounded number
                limits.append(value)
    return min(limits, default=None)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for memory so far, in this control group and
    machine-wide.

    The difference of two readings around a run tells a kill for memory from another SIGKILL. None
    when neither ``memory.events`` (v2), ``memory.oom_control`` (v1) nor ``/proc/vmstat`` can be
    read.
    """
    counts: list[int] = []
    sources = [directory / "memory.events" for directory in _cgroup_directories()[:1]]
    sources += [Path("/sys/fs/cgroup/memory/memory.oom_control"), Path("/proc/vmstat")]
    for path in sources:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    counts.append(int(value))
    return sum(counts) if counts else None


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of process ``pid``; None when there is no such process or
    it is a zombie.
    """
    try:
        # the command name in parentheses may hold spaces: fields are counted after the last ")"
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def own_children() -> list[int]:
    """Processes that this process has started and not reaped, in pid order."""
    with contextlib.suppress(OSError):
        found = []
        for thread in os.listdir("/proc/self/task"):
            found += Path(f"/proc/self/task/{thread}/children").read_text().split()
        return sorted(int(pid) for pid in found)
    return children(os.getpid())  # a kernel without CONFIG_PROC_CHILDREN


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, in pid order."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return sorted(found)


def environment_value(pid: int, name: str) -> str | None:
    """Value of variable ``name`` in the environment process ``pid`` was started with; None if unset
    or unreadable.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    return next(
        (
            entry[len(prefix) :].decode(errors="replace")
            for entry in entries
            if entry.startswith(prefix)
        ),
        None,
    )


def marked(run_id: str) -> list[int]:
    """Live processes that carry the mark of run ``run_id`` in their environment, whoever their
    parent is now.
    """
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            pid = int(entry.name)
            if environment_value(pid, RUN_MARK) == run_id and start_ticks(pid) is not None:
                found.append(pid)
    return sorted(found)


def kill_marked(run_id: str) -> list[int]:
    """SIGKILL every process that carries the mark of run ``run_id``; returns their pids."""
    killed = marked(run_id)
    for pid in killed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return killed
