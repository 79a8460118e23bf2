"""One run from its configuration to its result: plan, directory, ranks, verdict. No torch in
this process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from zeroexp.config import Composed, Config
from zeroexp.data.plan import problems
from zeroexp.errors import ConfigError, ZeroexpError
from zeroexp.folder import check_writable, unwritable
from zeroexp.run import provenance, reserve, result, resume, status
from zeroexp.run.atomic import write_json, write_text
from zeroexp.run.directory import RunDirectory
from zeroexp.run.environment import threads_per_rank
from zeroexp.run.failure import Verdict
from zeroexp.run.forecast import Forecast, forecast
from zeroexp.run.launch import Interrupt, Job, interrupted, run_job
from zeroexp.run.summary import closing_lines, opening_lines
from zeroexp.run.swap import sweep_after, sweep_before
from zeroexp.run.tag import tag_of


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its status, its directory and the content of its result.json."""

    status: status.Status
    directory: RunDirectory
    result: Mapping[str, Any]
    exit_code: int


@dataclass
class Start:
    """A run that is ready to start: checked, planned, and with a directory that says so."""

    config: Config
    directory: RunDirectory
    forecast: Forecast | None
    threads: int
    argv: Sequence[str]
    resume_from: Path | None
    #: what to say about swap files of dead runs that were found
    swept: Sequence[str] = ()
    #: collects run.json while the ranks start
    describing: threading.Thread | None = field(default=None)

    @property
    def digest(self) -> str:
        return self.config.digest()


def check(composed: Composed) -> Config:
    """The resolved configuration, once its data is known to be readable; raises
    :class:`ConfigError`.
    """
    config = composed.config.resolved()
    if config.model.kind != "external":
        found = problems(config)
        if found:
            raise ConfigError(found)
    return config


def prepare(
    composed: Composed, argv: Sequence[str], *, directory: RunDirectory | None = None
) -> Start:
    """Check, plan, and make the run directory with its first files (or use ``directory``, which
    exists).

    Raises :class:`ConfigError` and leaves nothing behind.
    """
    config = check(composed)
    resume_from = resume.find(config)
    if config.offload.uses_files:
        # Where nobody named it, it lies below the runs, and that key is the one to mend.
        asked = composed.config.offload.nvme.dir
        key = "paths.runs" if asked is None else "offload.nvme.dir"
        check_writable(Path(str(config.offload.nvme.dir)), key)
    swept = sweep_before(config)  # first: what it frees may be what the plan needs
    plan = forecast(config)
    threads = threads_per_rank(config.launch.threads_per_rank, config.trainer.devices, os.environ)
    made = directory or RunDirectory.create(
        Path(config.paths.runs), config.name, tag_of(config, composed.overrides)
    )
    start = Start(config, made, plan, threads, list(argv), resume_from, swept)
    try:
        write_text(made.config, yaml.safe_dump(config.to_dict(), sort_keys=False))
        write_text(made.origins, yaml.safe_dump(composed.origins, sort_keys=False))
        if plan is not None:
            write_json(made.plan, plan.predicted)
        status.running().write(made)
        reserve.keep(made)
    except OSError as error:
        made.discard()
        raise unwritable(made.path, error) from error
    start.describing = threading.Thread(target=_describe, args=(start,), daemon=True)
    start.describing.start()
    return start


def _describe(start: Start) -> None:
    described = provenance.describe(start.argv, threads_per_rank=start.threads)
    described["config_digest"] = start.digest
    described["resume_digest"] = resume.digest_without_resume(start.config)
    described["resumed_from"] = str(start.resume_from) if start.resume_from else None
    with contextlib.suppress(OSError):  # where a run comes from is worth no failed run
        write_json(start.directory.run, described)


def run(
    start: Start,
    *,
    out: IO[str] | None = None,
    interrupt: Interrupt | None = None,
    quiet: bool = False,
) -> Outcome:
    """Carry out a run that :func:`prepare` made ready; returns when no process of it is left.

    ``interrupt`` is one that is entered already (a sweep's); without it Ctrl-C is caught here.
    """
    out = sys.stdout if out is None else out
    if not quiet:
        lines = opening_lines(start.config, start.forecast, start.directory, start.threads)
        _say(out, [*lines, *start.swept])
    began = time.time()
    if interrupt is not None:
        verdict = _carry_out(start, out, interrupt, quiet)
    else:
        with Interrupt() as interrupt:
            verdict = _carry_out(start, out, interrupt, quiet)
    return _finish(start, verdict, interrupt, began, out, quiet)


def _carry_out(start: Start, out: IO[str], interrupt: Interrupt, quiet: bool) -> Verdict:
    config, plan = start.config, start.forecast
    if interrupt.signal is not None:
        return interrupted(interrupt)
    if plan is not None and plan.fits is False:
        if config.launch.guard == "refuse":
            return Verdict(status.WONT_FIT, plan.verdict)
        if config.launch.guard == "warn":
            _say(out, [f"warning: {plan.verdict}"])
    command = ["-m", "zeroexp.run.worker", str(start.directory.path)]
    if start.resume_from is not None:
        command.append(str(start.resume_from))
    job = Job(
        start.directory,
        config.trainer.devices,
        command,
        start.threads,
        retries=config.launch.retries,
    )
    ended_well = False
    try:
        verdict = run_job(job, out, interrupt, quiet=quiet)
        ended_well = verdict.status == status.OK
        return verdict
    except OSError as error:  # of the driver's own files; the ranks have ended
        return Verdict(status.CRASH, f"{error.strerror or error}: {error.filename or 'driver'}")
    finally:
        sweep_after(config, failed=not ended_well)


def _finish(
    start: Start, verdict: Verdict, interrupt: Interrupt, began: float, out: IO[str], quiet: bool
) -> Outcome:
    if start.describing is not None:
        start.describing.join()
    final = status.Status(verdict.status, verdict.reason, verdict.failed_rank)
    ranks = start.config.ranks
    reserve.give_up(start.directory)
    try:
        try:
            written = result.write(
                start.directory, config_digest=start.digest, status=final, ranks=ranks
            )
        finally:
            final.write(start.directory)
    except OSError as error:
        raise ZeroexpError(
            f"the run ended ({verdict.status}: {verdict.reason or 'as planned'}), but its result "
            f"cannot be written to {start.directory.path}: {error.strerror}"
        ) from error
    if not (quiet and final.status == status.OK):
        _say(out, closing_lines(start.directory, verdict, written, began))
    code = interrupt.exit_code if final.status == status.INTERRUPTED else final.exit_code
    return Outcome(final, start.directory, written, code)


def _say(out: IO[str], lines: Sequence[str]) -> None:
    out.write("".join(line + "\n" for line in lines))
    out.flush()
