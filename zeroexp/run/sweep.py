"""Many runs after one another: each with its own directory and its own processes, and a row for
each.

A run that fails is a row like any other; the sweep goes on. A sweep started again in its directory
leaves alone what is done: a run with the same config digest and status ok.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zeroexp.config import Composed, Config, compose, parse_multirun
from zeroexp.errors import ConfigError, Problem
from zeroexp.folder import unwritable
from zeroexp.report import write_report
from zeroexp.report.row import Row, differing, row_of
from zeroexp.run import driver, status
from zeroexp.run.atomic import read_json, write_json
from zeroexp.run.directory import RunDirectory, make_exclusive, safe_name
from zeroexp.run.launch import Interrupt

SWEEP_FILE = "sweep.json"


_EXTERNAL = "external: a sweep starts the ranks of every run itself."


@dataclass(frozen=True)
class SweepJob:
    """One line of the sweep: the words that make it, and its configuration or what is wrong with
    it.
    """

    index: int
    words: list[str]
    #: the words that not every job has: what the table shows
    differences: dict[str, str]
    composed: Composed | None
    problem: ConfigError | None = None

    @property
    def label(self) -> str:
        return ",".join(f"{key}={value}" for key, value in self.differences.items())


def plan_jobs(argv: Sequence[str]) -> list[SweepJob]:
    """Compose every job of the command line.

    Raises :class:`ConfigError` if the sweep cannot be read or none of its jobs can run, with the
    first job's problems.
    """
    lines = parse_multirun(argv)
    differences = differing(lines)
    jobs = []
    for index, (words, difference) in enumerate(zip(lines, differences, strict=True)):
        try:
            composed, problem = compose(words), None
            driver.check(composed)
            if composed.config.launch.kind == "external":
                raise ConfigError([Problem("launch.kind", _EXTERNAL, "Leave launch out.")])
        except ConfigError as error:
            composed, problem = None, error
        jobs.append(SweepJob(index, words, difference, composed, problem))
    first = jobs[0].problem
    if first is not None and all(job.composed is None for job in jobs):
        raise first
    return jobs


def sweep_directory(config: Config, name: str | None, given: Path | None) -> Path:
    """The sweep's directory: ``given`` (made if missing), else a fresh
    ``runs/<name>/<time>-sweep``. Raises :class:`ConfigError` where it cannot be made.
    """
    if given is not None:
        try:
            given.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(given, error, "--sweep-dir") from error
        return given.absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    parent = Path(config.paths.runs) / (safe_name(config.name) or "run")
    return make_exclusive(parent.absolute(), f"{stamp}-{safe_name(name or '') or 'sweep'}")


def run_sweep(
    argv: Sequence[str],
    *,
    directory: Path | None = None,
    fail_fast: bool = False,
    quiet: bool = False,
    out: IO[str] | None = None,
) -> int:
    """Run all jobs of ``argv`` and report; exit code 0 if all are ok, 1 if any failed, 130 on
    Ctrl-C.

    ``fail_fast`` stops after the first job that fails. Raises :class:`ConfigError` before anything
    is started.
    """
    out = sys.stdout if out is None else out
    jobs = plan_jobs(argv)
    sample = next(job.composed for job in jobs if job.composed is not None)
    named = [word.partition("=")[2] for word in argv if word.startswith("sweep=")]
    where = sweep_directory(
        sample.config.resolved(), Path(named[0]).stem if named else None, directory
    )
    described = {
        "argv": list(argv),
        "jobs": [{"words": job.words, "differences": job.differences} for job in jobs],
    }
    try:
        write_json(where / SWEEP_FILE, described)
    except OSError as error:
        key = "paths.runs" if directory is None else "--sweep-dir"
        raise unwritable(where, error, key) from error
    done = finished(where)
    out.write(f"sweep of {len(jobs)} runs in {where}\n")
    rows: list[Row] = []
    with Interrupt() as interrupt:
        for job in jobs:
            out.write(f"\n--- run {job.index + 1} of {len(jobs)}: {job.label or 'as given'}\n")
            out.flush()
            row = _one(job, where, done, interrupt, out, quiet)
            rows.append(row)
            if interrupt.signal is not None or (fail_fast and row.status != status.OK):
                break
    out.write("\n" + write_report(where, rows) + "\n")
    out.flush()
    if interrupt.signal is not None:
        out.write(f"zeroexp: interrupted in run {len(rows)} of {len(jobs)}; to go on:\n")
        out.write(f"  {_again(argv, where)}\n")
        return interrupt.exit_code
    failed = [row for row in rows if row.status != status.OK]
    if failed:
        names = ", ".join(f"{row.index} ({row.status})" for row in failed)
        left = len(jobs) - len(rows)
        skipped = f"; {left} not started (--fail-fast)" if left else ""
        out.write(f"zeroexp: {len(failed)} of {len(rows)} runs failed: {names}{skipped}\n")
    return 1 if failed else 0


def _one(
    job: SweepJob,
    where: Path,
    done: dict[str, RunDirectory],
    interrupt: Interrupt,
    out: IO[str],
    quiet: bool,
) -> Row:
    if job.composed is None:
        out.write(f"zeroexp: {job.problem}\n")
        reason = str(job.problem).partition("\n")[2].strip()
        return Row(job.index, job.differences, status.CONFIG, reason)
    digest = job.composed.config.digest()
    if digest in done:
        out.write(f"done already: {done[digest].path}\n")
        return row_of(done[digest], job.index, job.differences)
    name = f"{job.index:03d}-{safe_name(job.label)}".rstrip("-")
    made = RunDirectory(make_exclusive(where, name))
    try:
        start = driver.prepare(job.composed, job.words, directory=made)
    except ConfigError as error:
        made.discard()
        out.write(f"zeroexp: {error}\n")
        return Row(job.index, job.differences, status.CONFIG, str(error).partition("\n")[2].strip())
    driver.run(start, out=out, interrupt=interrupt, quiet=quiet)
    return row_of(made, job.index, job.differences)


def finished(where: Path) -> dict[str, RunDirectory]:
    """The runs below ``where`` that ended well, by config digest."""
    found = {}
    for path in sorted(where.iterdir()):
        directory = RunDirectory(path)
        result = read_json(directory.result)
        if result is not None and result.get("status") == status.OK:
            found[str(result["config_digest"])] = directory
    return found


def _again(argv: Sequence[str], where: Path) -> str:
    import shlex

    return f"python train.py {shlex.join(argv)} --sweep-dir {shlex.quote(str(where))}"
