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


def memory_groups() -> list[Path]:
    """The memory control group of this process and its parents, nearest first (v2, else v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, own = line.split(":", 2)
        roots = []
        if "memory" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/memory")]
        elif number == "0":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        for root in roots:
            path = root / own.lstrip("/")
            found += [p for p in (path, *path.parents) if p.is_relative_to(root)]
    return found


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups; None when unlimited or
    unknown.
    """
    limits: list[int] = []
    for group in memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):  # v2, v1
            with contextlib.suppress(OSError, ValueError):
                value = int((group / name).read_text())  # "max" is no number: unlimited
                if value < 1 << 60:  # v1 writes its "unlimited" as a huge page-rounded number
                    limits.append(value)
    return min(limits, default=None)


def oom_kills() -> int | None:
    """How many processes of this control group the kernel has killed for memory so far.

    The difference of two readings around a run tells a kill for memory from another SIGKILL. Read
    from ``memory.events`` (v2) or ``memory.oom_control`` (v1), which count kills for the machine's
    memory as well as for the group's limit; outside control groups the machine's own count; None
    where there is neither.
    """
    groups = memory_groups()[:1]
    sources = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    for path in [*sources, Path("/proc/vmstat")]:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return None


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
