"""Scratch folders: whatever dies at whatever moment, the next start leaves the parent clean.

Processes that are killed load the module alone, without torch: they start in a tenth of the time.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroexp import scratch
from zeroexp.errors import ConfigError
from zeroexp.scratch import ScratchFolder

NAME = "zeroexp-swap-0123456789abcdef-rank0"
SOURCE = Path(scratch.__file__)
ROOT = SOURCE.parents[1]
assert importlib.util.find_spec("zeroexp.errors") is not None

START = f"""
import importlib.util, os, signal, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("scratch", {str(SOURCE)!r})
scratch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scratch)
ScratchFolder = scratch.ScratchFolder
assert "torch" not in sys.modules
PARENT = Path(sys.argv[1])
"""


def process(code: str, parent: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + code, str(parent)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )


def output_of(code: str, parent: Path) -> str:
    with process(code, parent) as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0
    return output


def listing(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


def test_a_folder_and_its_end(tmp_path: Path) -> None:
    parent = tmp_path / "a" / "b"
    open_files = len(os.listdir("/proc/self/fd"))
    with ScratchFolder(parent, "rank0") as folder:
        assert folder.path.parent == parent and folder.swept == ()
        assert folder.path.name.startswith("zeroexp-swap-") and folder.path.name.endswith("-rank0")
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (lock,) = folder.path.iterdir()
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        assert folder.free_bytes == os.statvfs(parent).f_bavail * os.statvfs(parent).f_frsize
        (folder.path / "optim").write_bytes(bytes(100))
        (folder.path / "deeper").mkdir()
        (folder.path / "deeper" / lock.name).write_bytes(bytes(100))
        with ScratchFolder(parent, "rank0") as other:
            assert other.path != folder.path and other.swept == ()
            assert len(listing(parent)) == 2
        assert listing(parent) == [folder.path.name] and len(list(folder.path.iterdir())) == 3
    assert listing(parent) == []
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_folder_goes_with_the_last_reference_and_with_the_process(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path, "x")
    assert len(listing(tmp_path)) == 1
    del folder
    gc.collect()
    assert listing(tmp_path) == []
    out = output_of("f = ScratchFolder(PARENT, 'x'); print(len(os.listdir(PARENT)))", tmp_path)
    assert out == "1\n" and listing(tmp_path) == []


def test_a_folder_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path, "x")
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    folder.close()
    with ScratchFolder(tmp_path, "x") as folder:  # a cleaner of old files took the lock only
        (folder.path / "optim").write_bytes(bytes(10))
        (folder.path / scratch._LOCK).unlink()
    assert listing(tmp_path) == []


def test_the_end_removes_the_folder_that_was_made_and_no_other(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path, "x")
    folder.path.rename(tmp_path / "aside")
    folder.path.mkdir()
    (folder.path / "precious").touch()
    folder.close()
    assert (folder.path / "precious").exists() and (tmp_path / "aside").exists()


def test_what_a_dead_process_left_is_removed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
f = ScratchFolder(PARENT, "rank1")
(f.path / "a").write_bytes(bytes(1000))
(f.path / "deep" / "er").mkdir(parents=True)
(f.path / "deep" / "er" / "b").write_bytes(bytes(23))
os.kill(os.getpid(), signal.SIGKILL)
"""
    with process(code, tmp_path) as dead:
        dead.wait()
    (left,) = listing(tmp_path)
    with caplog.at_level(logging.INFO, logger="zeroexp"):
        folder = ScratchFolder(tmp_path, "rank0")
    assert folder.swept == ((tmp_path / left, 1023),)
    assert f"removed {tmp_path / left} (1023 bytes)" in caplog.text
    assert listing(tmp_path) == [folder.path.name]
    folder.close()


def test_a_live_owner_is_left_alone(tmp_path: Path) -> None:
    code = """
f = ScratchFolder(PARENT, "rank0")
(f.path / "a").write_bytes(b"mine")
print(f.path, flush=True)
sys.stdin.readline()
assert (f.path / "a").read_bytes() == b"mine"
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", START + code, str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        for _ in range(3):
            with ScratchFolder(tmp_path, "rank1") as folder:
                assert folder.swept == () and (path / "a").read_bytes() == b"mine"
        owner.communicate("\n", timeout=60)
    assert owner.returncode == 0 and listing(tmp_path) == []


def test_a_fork_takes_nothing_away(tmp_path: Path) -> None:
    code = """
f = ScratchFolder(PARENT, "rank0")
for how in range(3):
    if os.fork() == 0:
        if how == 0:
            f.close()
        elif how == 1:
            del f
        sys.exit(0)
    assert os.wait()[1] == 0
    assert f.path.is_dir() and os.listdir(f.path)
    # The lock is still held, too.
    with ScratchFolder(PARENT, "other") as other:
        assert other.swept == () and f.path.is_dir()
if os.fork() == 0:
    f.path  # a worker that outlives its parent, for a moment
    time.sleep(0.3)
    os._exit(0)
print("end")
"""
    assert output_of(code, tmp_path) == "end\n"
    assert listing(tmp_path) == []


# What a system call is, here: everything through these names can be the last thing a process did.
CALLS = ["mkdir", "open", "close", "stat", "fstat", "unlink", "rmdir", "scandir", "flock"]


class Watched:
    """``os`` or ``fcntl`` with something done before its calls."""

    def __init__(self, module: Any, before: Callable[[str], None]) -> None:
        self._module = module
        self._before = before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name not in CALLS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(name)
            return value(*args, **kwargs)

        return call


def test_killed_before_every_system_call(tmp_path: Path) -> None:
    """Of a start, of the end, and of a start that sweeps: the next start cleans all of it."""
    code = f"""
CALLS = {CALLS!r}
real_os, real_fcntl = scratch.os, scratch.fcntl
class Deadly:
    left = 0
    def __init__(self, module):
        self.module = module
    def __getattr__(self, name):
        value = getattr(self.module, name)
        if name not in CALLS:
            return value
        def call(*args, **kwargs):
            Deadly.left -= 1
            if Deadly.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return value(*args, **kwargs)
        return call

def life(left):
    Deadly.left = left
    scratch.os, scratch.fcntl = Deadly(real_os), Deadly(real_fcntl)
    f = ScratchFolder(PARENT, "rank0")
    (f.path / "a").write_bytes(bytes(10))
    (f.path / "b").mkdir()
    (f.path / "b" / "c").write_bytes(bytes(10))
    f.close()
    os._exit(0)

kills, moments = 0, set()
for leave in (False, True):
    left = 0
    while True:
        if leave:  # something for the start to sweep
            if os.fork() == 0:
                f = ScratchFolder(PARENT, "old")
                (f.path / "a").write_bytes(bytes(10))
                os.kill(os.getpid(), signal.SIGKILL)
            os.wait()
            assert len(os.listdir(PARENT)) == 1
        if os.fork() == 0:
            life(left)
        killed = os.WIFSIGNALED(os.wait()[1])
        moments.add(tuple(sorted(len(files) for _, _, files in os.walk(PARENT))))
        ScratchFolder(PARENT, "next").close()
        assert os.listdir(PARENT) == [], (leave, left, os.listdir(PARENT))
        if not killed:
            break
        kills += 1
        left += 1
print(kills, len(moments))
"""
    kills, moments = map(int, output_of(code, tmp_path).split())
    assert kills > 60 and moments > 5


def test_killed_at_random_moments(tmp_path: Path) -> None:
    again_and_again = """
print("ready", flush=True)
while True:
    f = ScratchFolder(PARENT, "rank0")
    for i in range(3):
        (f.path / str(i)).write_bytes(bytes(100_000))
    f.close()
"""
    for_long = """
f = ScratchFolder(PARENT, "rank1")
print("ready", flush=True)
while True:
    (f.path / "a").write_bytes(bytes(100_000))
"""
    draw = random.Random(0)
    for _ in range(10):
        pair = [process(again_and_again, tmp_path), process(for_long, tmp_path)]
        for one in pair:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in pair:
            time.sleep(draw.uniform(0, 0.01))
            one.send_signal(signal.SIGKILL)
            one.communicate()
        assert len(listing(tmp_path)) >= 1
        ScratchFolder(tmp_path, "next").close()
        assert listing(tmp_path) == []


def test_many_starts_at_once(tmp_path: Path) -> None:
    code = """
for count in range(60):
    with ScratchFolder(PARENT / "made" / "by all", f"rank{count}") as f:
        (f.path / "a").write_bytes(b"mine")
        os.sched_yield()
        assert (f.path / "a").read_bytes() == b"mine"
        assert f.swept == (), "nobody is dead"
"""
    starts = [process(code, tmp_path) for _ in range(4)]
    for start in starts:
        start.communicate(timeout=60)
        assert start.returncode == 0
    assert listing(tmp_path / "made" / "by all") == []


def interleaved(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any], between: Callable[[], None]
) -> int:
    """Runs ``what`` again and again, each time with ``between`` before another system call of it;
    how often."""
    at = 0
    while True:
        count, inside = 0, False

        def before(_: str, at: int = at) -> None:
            nonlocal count, inside
            if not inside:
                count += 1
                if count == at + 1:
                    inside = True
                    between()
                    inside = False

        with monkeypatch.context() as patched:
            patched.setattr(scratch, "os", Watched(os, before))
            patched.setattr(scratch, "fcntl", Watched(scratch.fcntl, before))
            what()
        if count <= at:
            return at
        at += 1


def test_a_sweep_between_any_two_calls_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live() -> None:
        with ScratchFolder(tmp_path, "rank0") as folder:
            (folder.path / "a").write_bytes(b"mine")
            with ScratchFolder(tmp_path, "later") as later:
                assert later.swept == ()
            assert (folder.path / "a").read_bytes() == b"mine"
        assert listing(tmp_path) == []

    moments = interleaved(monkeypatch, live, lambda: ScratchFolder(tmp_path, "other").close())
    assert moments > 20


def test_a_sweep_between_any_two_calls_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []

    def other() -> None:
        with ScratchFolder(tmp_path, "other") as folder:
            reports.extend(size for _, size in folder.swept)

    def sweeping() -> None:
        (tmp_path / NAME / "deep").mkdir(parents=True)
        (tmp_path / NAME / scratch._LOCK).touch()
        (tmp_path / NAME / "deep" / "a").write_bytes(bytes(70))
        reports.clear()
        with ScratchFolder(tmp_path, "rank0") as folder:
            reports.extend(size for _, size in folder.swept)
            assert listing(tmp_path) == [folder.path.name]
        assert reports == [70], "one of both removed it and says so"

    assert interleaved(monkeypatch, sweeping, other) > 20
    assert listing(tmp_path) == []


def a_victim(folder: Path) -> Path:
    victim = folder / "victim"
    (victim / "inner").mkdir(parents=True)
    (victim / scratch._LOCK).touch()
    (victim / "inner" / "precious").write_text("kept")
    return victim


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_links_lead_nowhere(tmp_path: Path) -> None:
    victim = a_victim(tmp_path)
    before = files_of(victim)
    parent = tmp_path / "parent"
    (parent / NAME).mkdir(parents=True)
    (parent / NAME / scratch._LOCK).touch()
    (parent / NAME / "file").symlink_to(victim / "inner" / "precious")
    (parent / NAME / "folder").symlink_to(victim)
    (parent / NAME.replace("rank0", "link")).symlink_to(victim)
    (parent / NAME.replace("rank0", "lock")).mkdir()
    (parent / NAME.replace("rank0", "lock") / scratch._LOCK).symlink_to(victim / scratch._LOCK)
    ScratchFolder(parent, "x").close()
    assert files_of(victim) == before
    assert listing(parent) == [NAME.replace("rank0", "link"), NAME.replace("rank0", "lock")]


def test_a_folder_that_becomes_a_link_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two calls of a sweep, and of the end of the owner."""
    victim = a_victim(tmp_path)
    before = files_of(victim)
    parent, aside = tmp_path / "parent", tmp_path / "aside"
    parent.mkdir()
    count = 0

    def attack() -> None:
        nonlocal count
        for name in listing(parent):
            count += 1
            (parent / name).rename(aside.with_name(f"aside{count}"))
            (parent / name).symlink_to(victim)

    def sweep() -> None:
        for name in listing(parent):
            (parent / name).unlink()
        (parent / NAME / "inner").mkdir(parents=True)
        (parent / NAME / scratch._LOCK).touch()
        (parent / NAME / "inner" / "precious").write_text("ours")
        folder = ScratchFolder(parent, "x")
        (folder.path / "inner").mkdir(exist_ok=True)
        folder.close()

    interleaved(monkeypatch, sweep, attack)
    assert count > 20 and files_of(victim) == before
    assert (victim / "inner" / "precious").read_text() == "kept"


@pytest.mark.parametrize(
    "name",
    [
        "zeroexp-swap-0123456789abcdef",
        "zeroexp-swap-0123456789abcdef-",
        "zeroexp-swap-0123456789ABCDEF-rank0",
        "zeroexp-swap-0123456789abcde-rank0",
        f"{NAME}\n",
        f"x{NAME}",
        "zeroexp-swap-0123456789abcdef-.rank0",
    ],
)
def test_names_that_are_not_ours_are_not_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / scratch._LOCK).touch()
    ScratchFolder(tmp_path, "x").close()
    assert listing(tmp_path) == [name] and listing(tmp_path / name) == [scratch._LOCK]


def test_what_only_looks_like_ours_is_not_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).mkdir()  # no lock: nobody can tell whose it is
    (tmp_path / NAME / "precious").touch()
    (tmp_path / NAME.replace("rank0", "file")).touch()
    before = files_of(tmp_path)
    with ScratchFolder(tmp_path, "x") as folder:
        assert folder.swept == ()
    assert files_of(tmp_path) == before
    assert f"{NAME} may be left by a dead process and stays" in caplog.text
    if os.geteuid() == 0:
        (tmp_path / NAME / scratch._LOCK).touch()
        os.chown(tmp_path / NAME, 12345, 12345)
        ScratchFolder(tmp_path, "x").close()
        assert (tmp_path / NAME / "precious").exists(), "it belongs to another user"


def refused(parent: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ScratchFolder(parent, "x")
    (problem,) = caught.value.problems
    assert problem.key == "offload.nvme.dir" and str(parent) in problem.problem and problem.fix
    return problem.problem


def test_directories_that_do_not_do(tmp_path: Path) -> None:
    """Case NV-02."""
    (tmp_path / "file").touch()
    assert "Not a directory (ENOTDIR)" in refused(tmp_path / "file")
    assert "Not a directory (ENOTDIR)" in refused(tmp_path / "file" / "below")
    assert "No such file or directory (ENOENT)" in refused(Path("/proc/x"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "No such file or directory (ENOENT)" in refused(tmp_path / "link")
    (tmp_path / "closed").mkdir(mode=0o555)
    if os.geteuid() != 0:
        assert "Permission denied (EACCES)" in refused(tmp_path / "closed")
    for name in ("", "a/b", "..", "a b", "x" * 65):
        with pytest.raises(ValueError, match="ScratchFolder: name is"):
            ScratchFolder(tmp_path, name)
    assert listing(tmp_path) == ["closed", "file", "link"]


@pytest.mark.parametrize(
    ("call", "code"), [("mkdir", errno.EROFS), ("open", errno.EMFILE), ("flock", errno.ENOLCK)]
)
def test_a_start_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    made = False

    def before(name: str) -> None:
        nonlocal made
        if name == call and (made or name == "mkdir"):
            raise OSError(code, os.strerror(code))
        made = made or name == "mkdir"

    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(scratch, "os", Watched(os, before))
        patched.setattr(scratch, "fcntl", Watched(scratch.fcntl, before))
        assert errno.errorcode[code] in refused(tmp_path)
    assert listing(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_files
